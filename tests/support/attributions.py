"""Attributions made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution

BANDS = ("easy", "medium", "hard")
TARGETS = (*(f"right − wrong, {band}" for band in BANDS), "log-likelihood, direct answer", "feature 2")
BEFORE = (1.0, 0.5, -0.2, 0.5, 0.6)
REALISED = (0.6, 0.3, -0.1, -0.9, 0.03)
WORDS = ("24", " + 7", " =", "\n", "31")
GATE = (
    "No effect is stated: the log holds every tenth step only, so that the run cannot be replayed. Add logging_steps=1 "
    "to the trainer's settings."
)


def make_attribution(texts: tuple[str, ...] = (), **info: Any) -> Attribution:
    """Twelve samples of six steps: a success and a failure a step, on easy, medium and hard problems in turn.

    The share of sample i in target j is REALISED[j] · (i − 5) / 6. Of a group with the share s, without it the target
    changes by REALISED[j] − 2 s, and with it alone by s / 2. Of a sample that is shown, each of the five tokens has a
    part of the share: −1, 0, 0, 0, 2. Its first token is its text, if it has one.
    """
    n, k = 12, np.arange(12)
    band = [BANDS[i // 2 % 3] for i in k]
    facts = pd.DataFrame(
        {
            "trajectory": k, "problem_id": [f"p{i // 4}" for i in k], "step": k // 2 + 1, "band": band,
            "outcome": ["success", "failure"] * 6, "reward": [1.0, 0.0] * 6, "advantage": [1.0, -1.0] * 6,
            "length": len(WORDS), "prompt": [f"prompt {i}" for i in k],
            "response": [texts[i] if i < len(texts) else f"response {i}" for i in k],
        }
    )  # fmt: skip
    shares = np.outer(k - 5, REALISED) / 6  # (n, n_targets); the columns sum to REALISED
    samples = pd.DataFrame(
        {
            "trajectory": np.repeat(k, len(TARGETS)), "step": np.repeat(facts.step.to_numpy(), len(TARGETS)),
            "target": np.tile(TARGETS, n), "share": shares.ravel(), "policy": 1.5 * shares.ravel(),
            "kl": -0.5 * shares.ravel(),
        }
    )  # fmt: skip
    masks = {("band", one): (facts.band == one).to_numpy() for one in BANDS}
    masks |= {("lone success", "lone success"): k == 8, ("outcome", "success"): k % 2 == 0}
    groups = [
        {
            "kind": kind, "group": group, "n": int(mask.sum()), "target": target, "share": shares[mask, j].sum(),
            "without": REALISED[j] - 2 * shares[mask, j].sum(), "effect": 2 * shares[mask, j].sum(),
            "alone": shares[mask, j].sum() / 2,
            "how": "replayed" if kind == "band" else "simulated",
        }
        for (kind, group), mask in masks.items()
        for j, target in enumerate(TARGETS)
    ]  # fmt: skip
    entropy = [
        {"band": one, "fifth": fifth, "target": target, "share": shares[masks["band", one], j].sum() * part}
        for one in BANDS
        for fifth, part in enumerate((0.0, 0.1, 0.1, 0.2, 0.6), start=1)
        for j, target in enumerate(TARGETS)
    ]
    tokens = [
        {
            "trajectory": i, "step": i // 2 + 1, "target": TARGETS[3], "position": place, "token_id": place,
            "token": texts[i] if place == 0 and i < len(texts) else word, "share": shares[i, 3] * part,
        }
        for i in (11, 0, 10, 1, 9, 2, 8, 3, 7, 4)
        for place, (word, part) in enumerate(zip(WORDS, (-1, 0, 0, 0, 2), strict=True))
    ]  # fmt: skip
    targets = pd.DataFrame(
        {
            "target": TARGETS, "before": BEFORE, "after": np.add(BEFORE, REALISED), "realised": REALISED,
            "predicted": REALISED, "decay": 0.0, "remainder": [0.003, 0.2, 0.01, 0.004, 0.005],
            "flagged": [False, True, False, False, False],
        }
    )  # fmt: skip
    steps = pd.DataFrame(
        {
            "step": range(1, 7), "n": 2, "grad_norm": 1.0, "logged_grad_norm": [1.0, 1.0, 1.0, 1.0, 1.0, 1.001],
            "mean_length": 5.0, "logged_mean_length": 5.0, "distance": [np.nan] * 5 + [0.0002], "clipped": False,
        }
    )  # fmt: skip
    known = {
        "recipe": "adamw, learning rate 0.001 (constant)", "series": "tiny", "run": "run", "checkpoints": [0, 6],
        "inputs": {"rollouts": "none"}, "sae": None, "path_error": 0.0002,
        "replay": {"steps": 6, "to": 6, "within": 0.001, "departs": None, "cause": ""}, "gate": "",
        "trained_on": True, "notes": ["A note."],
    }  # fmt: skip
    return Attribution(
        targets, samples, facts, pd.DataFrame(groups), steps, pd.DataFrame(entropy), pd.DataFrame(tokens),
        {**known, **info},
    )  # fmt: skip
