"""Attributions made by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution

TARGETS = ("P (first token)", "log-likelihood, right − wrong", "feature 2")
REALISED = (-0.4, 1.2, 0.03)
BEFORE = (0.5, 1.0, 0.6)


def make_attribution(texts: tuple[str, ...] = (), *, validated: bool = False, **info: Any) -> Attribution:
    """Twelve samples of six steps: a success and a failure of a step, easy and hard in turn.

    The share of sample i in target j is REALISED[j] · (i − 5) / 6; the effect of a group is the double of its share.
    """
    n, bands, outcomes = 12, ["easy", "hard"], ["success", "failure"]
    i = np.arange(n)
    facts = pd.DataFrame(
        {
            "trajectory": i,
            "step": i // 2 + 1,
            "problem_id": [f"p{k // 4}" for k in i],
            "band": [bands[k // 2 % 2] for k in i],
            "outcome": [outcomes[k % 2] for k in i],
            "prompt": [f"prompt {k}" for k in i],
            "response": [texts[k] if k < len(texts) else f"response {k}" for k in i],
            "reward": (i % 2 == 0).astype(float),
            "advantage": np.where(i % 2 == 0, 1.0, -1.0),
            "length": 5 + i,
            "gradient_norm": 0.1,
        }
    )
    shares = np.outer(i - 5, REALISED) / 6  # (n, n_targets); the columns sum to REALISED
    samples = pd.DataFrame(
        {
            "trajectory": np.repeat(i, len(TARGETS)),
            "step": np.repeat(facts.step.to_numpy(), len(TARGETS)),
            "target": np.tile(TARGETS, n),
            "share": shares.ravel(),
            "effect": np.where(np.repeat(i, len(TARGETS)) == n - 1, 0.01, np.nan),
        }
    )
    thirds = [f"{name} third of the run" for name in ("first", "second", "last")]
    masks = {("band", band): (facts.band == band).to_numpy() for band in bands}
    for band, outcome, third in product(bands, outcomes, range(3)):
        mask = (facts.band == band) & (facts.outcome == outcome) & ((facts.step - 1) // 2 == third)
        masks["band and outcome and third", f"{band}, {outcome}, {thirds[third]}"] = mask.to_numpy()
    groups = [
        {
            "kind": kind, "group": group, "n": int(mask.sum()), "target": target, "share": shares[mask, j].sum(),
            "without": REALISED[j] - 2 * shares[mask, j].sum(), "effect": 2 * shares[mask, j].sum(),
            "alone": shares[mask, j].sum() / 2,
        }
        for (kind, group), mask in masks.items()
        for j, target in enumerate(TARGETS)
    ]  # fmt: skip
    problems = pd.DataFrame(
        [
            {"problem_id": f"p{p}", "n": 4, "target": t, "share": 0.1, "effect": 0.1 * p, "low": -0.1, "high": 0.3}
            for p, t in product(range(3), TARGETS[:2])
        ]
    )
    targets = pd.DataFrame(
        {
            "target": TARGETS,
            "before": BEFORE,
            "after": np.add(BEFORE, REALISED),
            "realised": REALISED,
            "simulated": REALISED,
            "decay": 0.0,
            "remainder": [0.003, 0.2, 0.01],
            "flagged": [False, True, False],
            "r2": [0.9, -0.1, np.nan],
            "validated": [0.9, 0.8, np.nan] if validated else np.nan,
            "validated_error": [0.04, 0.06, 0.003] if validated else np.nan,
        }
    )
    segments = pd.DataFrame(
        {
            "target": TARGETS, "first": 0, "last": 6, "realised": REALISED, "predicted": REALISED, "remainder": 0.0,
            "path_error": 0.01, "flagged": [False, True, False],
        }
    )  # fmt: skip
    known = {
        "recipe": "adamw, learning rate 0.001 (constant)", "config": {"validate": 8 if validated else 0},
        "series": "tiny", "run": "run", "checkpoints": [0, 3, 6], "inputs": {"rollouts": "none"}, "sae": None,
        "directions": "directions-0123456789abcdef", "path_error": 0.01, "notes": ["A note."],
    }  # fmt: skip
    return Attribution(targets, samples, facts, pd.DataFrame(groups), problems, segments, {**known, **info})
