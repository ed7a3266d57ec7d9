"""Features that a reward reinforces: those that successes have more of, within problems."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from statements import Line
from statements.tables import EOS, feature_table
from tsae import DiffConfig, FeatureTable, Rollouts, reinforcement

PLANTED = 10
"""Features with a mean effect, the first ones of `heterogeneous`."""


def world(
    *,
    n_problems: int = 24,
    n_samples: int = 6,
    n_features: int = 12,
    effect: np.ndarray | float = 0.0,
    shift: np.ndarray | float = 0.0,
    seed: int = 0,
    bands: bool = True,
    **columns: Any,
) -> FeatureTable:
    """One-token responses of base and run: a problem's level, noise, `effect` on successes, `shift` on the run's.

    The first third of the problems is easy, and so on; the harder, the rarer are successes. An effect may be one for
    all, one a feature, or (n_problems, n_features).
    """
    rng = np.random.default_rng(seed)
    level = rng.normal(4, 1, size=(n_problems, n_features))
    of_problem = np.broadcast_to(effect, (n_problems, n_features))
    records, values = [], []
    for policy in ("base", "run"):
        for problem in range(n_problems):
            band = problem * 3 // n_problems
            for _ in range(n_samples):
                right = bool(rng.random() < (0.8, 0.5, 0.2)[band])
                records.append(
                    {
                        "problem_id": f"p{problem}", "policy": policy, "prompt_ids": [1], "response_ids": [2, EOS],
                        "reward": float(right), "outcome": "success" if right else "failure",
                        "band": ("easy", "medium", "hard")[band] if bands else None, **columns,
                    }
                )  # fmt: skip
                values.append(level[problem] + of_problem[problem] * right + shift * (policy == "run"))
    values = np.maximum(values + 0.5 * rng.normal(size=(len(records), n_features)), 0)
    rollouts = Rollouts.from_records(records).with_advantages()
    codes = np.zeros((3 * len(records), n_features))
    codes[1::3] = values
    read = np.arange(len(records))
    return feature_table(rollouts, np.concatenate([codes, codes]), [("base", read), ("run", read)])


def heterogeneous(seed: int, size: float, between: float = 1.0) -> FeatureTable:
    """60 problems in which success raises or lowers each of 40 features as it happens; only the first ten have a mean
    effect.

    Args:
        seed: of the draw.
        size: mean effect, where a trajectory's own deviation is 0.5.
        between: standard deviation of the effects between problems.
    """
    effect = np.random.default_rng([seed, 9]).normal(0, between, (60, 40))
    effect[:, :PLANTED] += size
    return world(n_problems=60, n_features=40, effect=effect, seed=seed, bands=False)


def discoveries(table: FeatureTable, config: DiffConfig) -> pd.DataFrame:
    """Rows of the features that are said to be reinforced, or the opposite, over all rollouts."""
    found = reinforcement(table, config).table.query("part == 'all'")
    return found[found.q <= config.q]


def false_and_right(discovered: pd.DataFrame) -> tuple[float, float]:
    """(false / all discoveries, share of the planted features that was found)."""
    right = ((discovered.feature < PLANTED) & (discovered.reinforcement > 0)).sum()
    return float(len(discovered) - right) / max(1, len(discovered)), float(right) / PLANTED


def reinforced(size: float, between: float, seed: int, config: DiffConfig) -> tuple[float, float]:
    """Of positive mean effects, or of none."""
    discovered = discoveries(heterogeneous(seed, size, between), config)
    if size == 0:
        return float(len(discovered) > 0), math.nan
    return false_and_right(discovered)


LINES = [
    Line("reinforced", "nothing", partial(reinforced, 0.0, 0.0)),
    Line("reinforced", "nothing on average, effects of SD 1 between problems", partial(reinforced, 0.0, 1.0)),
    *(
        Line("reinforced", f"10 of 40 by {size}, effects of SD 1 between problems", partial(reinforced, size, 1.0))
        for size in (0.4, 0.8)
    ),
]
