"""Intervals of proportions, such as pass rates."""

from __future__ import annotations

import numpy as np
from scipy.special import betaincinv, ndtri


def wilson_interval(
    successes: np.ndarray | float, trials: np.ndarray | float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval (Wilson 1927): (low, high); (0, 1) where there are no trials."""
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    z = ndtri(0.5 + confidence / 2)
    n = np.where(trials > 0, trials, 1.0)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)
    return np.where(trials > 0, low, 0.0), np.where(trials > 0, high, 1.0)


def jeffreys_interval(
    successes: np.ndarray | float, trials: np.ndarray | float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Jeffreys' interval: quantiles of Beta(successes + ½, failures + ½); (0, 1) where there are no trials.

    The low end is 0 where no trial succeeded, the high end 1 where all did (Brown, Cai & DasGupta 2001, Statistical
    Science 16).
    """
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    tail = (1 - confidence) / 2
    a, b = successes + 0.5, trials - successes + 0.5
    low, high = betaincinv(a, b, tail), betaincinv(a, b, 1 - tail)
    return np.where(successes > 0, low, 0.0), np.where(successes < trials, high, 1.0)
