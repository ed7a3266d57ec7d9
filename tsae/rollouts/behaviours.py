"""Behaviours per policy and band: accuracy, length, truncation, and whatever columns the table names as behaviours."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.table import BANDS, Rollouts

_DRAWS = 1000


def behaviour_table(rollouts: Rollouts, *, confidence: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """Means with bootstrap intervals over problems.

    Args:
        rollouts: ``info["behaviours"]`` names further numeric or boolean columns to average.
        confidence: of the intervals.
        seed: of the bootstrap.

    Returns:
        tidy: policy, band ("all" and every band present), behaviour, mean, low, high, n_problems, n_trajectories.
        Means are over problems of the mean over a problem's trajectories; missing values are left out.
    """
    frame = rollouts.frame
    measures = pd.DataFrame(
        {
            "accuracy": (frame.outcome == "success").where(frame.outcome != "unknown").astype(float),
            "response_length": frame.response_length.astype(float),
        }
    )
    if (frame.finish_reason == "length").any():
        measures["truncated"] = (frame.finish_reason == "length").astype(float)
    for name in rollouts.info.get("behaviours", []):
        if name not in frame.columns:
            raise TsaeError(
                f"names the behaviour {name!r} but has no such column", where=rollouts.origin, fix="Add that column."
            )
        measures[name] = frame[name].astype(float)
    rows = []
    bands = [band for band in BANDS if (frame.band == band).any()]
    for policy in rollouts.policies:
        for band in ("all", *bands):
            picked = (frame.policy == policy) & ((frame.band == band) | (band == "all"))
            if not picked.any():
                continue
            by_problem = measures[picked].groupby(frame.problem_id[picked]).mean()
            for name in measures:
                values = by_problem[name].dropna().to_numpy()
                if not len(values):
                    continue
                low, high = _interval(values, confidence, seed)
                rows.append(
                    {
                        "policy": policy,
                        "band": band,
                        "behaviour": name,
                        "mean": values.mean(),
                        "low": low,
                        "high": high,
                        "n_problems": len(values),
                        "n_trajectories": int(picked.sum()),
                    }
                )
    return pd.DataFrame(rows)


def _interval(values: np.ndarray, confidence: float, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=_DRAWS) / len(values)
    tail = (1 - confidence) / 2
    low, high = np.quantile(weights @ values, [tail, 1 - tail])
    return float(low), float(high)
