"""Bootstrap over problems: trajectories of a problem are not independent, so problems are what is drawn."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8)
def weights(n: int, n_draws: int, seed: int) -> np.ndarray:
    """(n_draws, n) weight of every problem in every draw; rows add up to 1. The same for the same arguments."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_draws) / n
