"""Rollouts and features where a feature decides success."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.builders import EOS, feature_table
from tsae.rl.config import CreditConfig
from tsae.rl.credit import Credit
from tsae.rollouts.table import Rollouts

N_FEATURES, IDLE = 6, 5


def world(*, n_problems: int = 40, n_samples: int = 8, tie: float = 1.0, seed: int = 0, **columns: Any) -> Any:
    """Feature j < 4 says that token j is due next; a response is right if every token was due, else now and then.

    Feature 4 fires on the last token of failures, feature 5 anywhere. With tie = 0 rewards are drawn anew, tied to
    nothing.
    """
    rng = np.random.default_rng(seed)
    records, codes = [], []
    for problem in range(n_problems):
        for _ in range(n_samples):
            due = rng.integers(0, 4, 6)
            written = np.where(rng.random(6) < 0.1, rng.integers(0, 4, 6), due)
            right = bool((written == due).all()) if rng.random() < tie else bool(rng.random() < 0.5)
            states = np.zeros((8, N_FEATURES))  # prompt, six tokens, the end
            states[np.arange(6), due] = 1.0 + rng.random(6)
            states[6, 4] = not right and tie > 0
            states[:, IDLE] = rng.random(8) < 0.3
            codes.append(states)
            ids = {"prompt_ids": [9], "response_ids": [*written.tolist(), EOS]}
            outcome = {"reward": float(right), "outcome": "success" if right else "failure"}
            records.append({"problem_id": f"p{problem}", "policy": "base", **ids, **outcome, **columns})
    table = feature_table(
        Rollouts.from_records(records).with_advantages(),
        np.concatenate(codes),
        [("base", np.arange(len(records)))],
    )
    table.info["sae"].update({"weights": "abc", "d_model": 4, "d_sae": N_FEATURES})
    return table


def small_credit() -> Credit:
    """Tables of four features, two pairs and two tokens."""
    judged = {"difference": 1.0, "low": 0.5, "high": 1.5, "p": 0.01}
    sae = {"weights": "abc", "site": "blocks.0.hook_resid_post", "d_model": 3, "d_sae": 4}
    info = {"sae": sae, "reader": "base", "n_learned": 9, "n_held_out": 6, "significant": True, "note": "", **judged}
    keys = torch.tensor([1, 6])
    return Credit(CreditConfig(), torch.ones(4), keys, torch.ones(2), torch.ones(2), 0.0, 1.0, info)
