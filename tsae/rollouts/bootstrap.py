"""Bootstrap over problems: trajectories of a problem are not independent, so problems are what is drawn."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def bootstrap_mean(values: np.ndarray, confidence: float, n_draws: int, seed: int) -> tuple[float, float]:
    """Percentile interval of a mean over problems; NaN for a single problem, which tells nothing of others."""
    if len(values) < 2:
        return np.nan, np.nan
    tail = (1 - confidence) / 2
    low, high = np.quantile(weights(len(values), n_draws, seed) @ values, [tail, 1 - tail])
    return float(low), float(high)


@lru_cache(maxsize=8)
def weights(n: int, n_draws: int, seed: int) -> np.ndarray:
    """(n_draws, n) weight of every problem in every draw; rows add up to 1. The same for the same arguments."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_draws) / n
