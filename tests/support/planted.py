"""Feature tables with a known truth: shifts, outcome effects and interactions planted into correlated activations.

A token's activation of feature f is relu(level + what its problem, its problem and side, its trajectory and itself add
+ planted effect), all of it normal. A side is the policy, and within it the outcome: the sides of a problem differ by
chance, with mean 0, more than its trajectories tell. Of the variance 35 % is the problem's, 17 % that of problem and
side, 14 % the trajectory's. Means of rectified normals are known in closed form, so that every true difference is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import norm, ttest_ind

from support.builders import EOS, feature_table
from tsae.diff.comparisons import Rows, interaction_comparisons, outcome_comparisons, shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.effects import Contrast, draw
from tsae.diff.inference import q_values
from tsae.rl.config import CreditConfig
from tsae.rl.credit import Credit
from tsae.rollouts.table import Rollouts

N_PLANTED = 40
SHIFTED, OUTCOME, INTERACTION = np.arange(10), np.arange(10, 20), np.arange(20, 30)  # the other ten carry nothing
SIGMA = {"problem": 0.8, "policy": 0.4, "outcome": 0.4, "trajectory": 0.5, "token": 0.8}
BANDS = ("easy", "medium", "hard")
SUCCESS_RATE = {"easy": 0.8, "medium": 0.5, "hard": 0.2}
CONTRASTS = ("shift", "outcome", "interaction")


@dataclass(frozen=True)
class Planted:
    table: Any
    truth: dict[str, np.ndarray]
    """(N_PLANTED,) true difference of every contrast."""


def planted(*, n_problems: int, n_samples: int = 8, effect: float = 0.6, seed: int = 0) -> Planted:
    """A base and a run; a third of the problems in each band."""
    rng = np.random.default_rng([seed, 77])
    level = np.linspace(-0.5, 1.5, 10)[np.arange(N_PLANTED) % 10]
    sign = np.where(np.arange(N_PLANTED) % 2, -1.0, 1.0) * effect
    effects = {
        name: np.where(np.isin(np.arange(N_PLANTED), which), sign, 0.0)
        for name, which in zip(("shift", "outcome", "interaction"), (SHIFTED, OUTCOME, INTERACTION), strict=True)
    }

    def noise(name: str, *shape: int) -> np.ndarray:
        return SIGMA[name] * rng.normal(size=(*shape, N_PLANTED))

    records, codes = [], []
    of_problem = noise("problem", n_problems)
    of_policy, of_outcome = noise("policy", n_problems, 2), noise("outcome", n_problems, 2, 2)
    for side, policy in enumerate(("base", "run")):
        for problem in range(n_problems):
            band = BANDS[problem * 3 // n_problems]
            for _ in range(n_samples):
                right, length = bool(rng.random() < SUCCESS_RATE[band]), int(rng.integers(3, 9))
                mean = level + of_problem[problem] + of_policy[problem, side] + of_outcome[problem, side, int(right)]
                mean = mean + side * effects["shift"] + right * effects["outcome"]
                mean = mean + right * (band == "hard") * effects["interaction"] + noise("trajectory")
                response = np.maximum(mean + noise("token", length), 0)
                codes.append(np.concatenate([np.zeros((1, N_PLANTED)), response, np.full((1, N_PLANTED), 9.0)]))
                ids = {"prompt_ids": [1], "response_ids": [*rng.integers(2, 12, length).tolist(), EOS]}
                outcome = "success" if right else "failure"
                records.append({"problem_id": f"p{problem}", "policy": policy, **ids, "outcome": outcome, "band": band})
    rows, own = np.arange(len(records)), np.arange(len(records) // 2, len(records))
    table = feature_table(
        Rollouts.from_records(records),
        np.concatenate([*codes, *(codes[row] for row in own)]),
        [("base", rows), ("run", own)],
    )
    sigma = float(np.sqrt(sum(s**2 for s in SIGMA.values())))

    def rectified(mean: np.ndarray) -> np.ndarray:
        return mean * norm.cdf(mean / sigma) + sigma * norm.pdf(mean / sigma)

    raised = {name: rectified(level + added) - rectified(level) for name, added in effects.items()}
    # A run's trajectories succeed as often as the base's, so that outcome effects cancel in the shift.
    shift = sum(
        rate / 3 * (rectified(level + effects["shift"] + e) - rectified(level + e))
        + (1 - rate) / 3 * (rectified(level + effects["shift"]) - rectified(level))
        for band, rate in SUCCESS_RATE.items()
        for e in [effects["outcome"] + (band == "hard") * effects["interaction"]]
    )
    return Planted(table, {"shift": shift, "outcome": raised["outcome"], "interaction": raised["interaction"]})


def contrasts_of(world: Planted, config: DiffConfig) -> dict[str, Contrast]:
    """The total shift, the base's outcome effect in medium and hard problems, and the latter's interaction."""
    rows = Rows.of(world.table, config)
    outcomes = list(outcome_comparisons(world.table, rows, config))
    chosen = {
        "shift": next(shift_comparisons(world.table, rows, config)),
        "outcome": next(of for of in outcomes if of.band == "medium"),
        "interaction": next(interaction_comparisons(outcomes, config)),
    }
    return {name: draw(rows, of, config) for name, of in chosen.items()}


def token_level_q(world: Planted, name: str) -> np.ndarray:
    """What a test gives that takes tokens for independent: Welch's t over tokens, Benjamini–Hochberg."""
    table = world.table
    counted = table.span_mask("response")
    frame = table.rollouts.frame.iloc[table.trajectory[table.row_of_token]]
    base, success = (frame.policy == "base").to_numpy(), (frame.outcome == "success").to_numpy()
    if name == "shift":
        sides = (~base & (table.reader[table.row_of_token] == 1), base)
    else:
        medium = base & (frame.band == "medium").to_numpy()
        sides = (medium & success, medium & ~success)
    a, b = (table.codes[np.flatnonzero(counted & side)].toarray() for side in sides)
    return q_values(ttest_ind(a, b, equal_var=False).pvalue)


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
