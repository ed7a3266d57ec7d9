"""Intervals over problems: trajectories of a problem are not independent, so problems are what varies.

Student's t, since the percentile bootstrap is too narrow for few problems. Where nothing changed, the bootstrap reports
a change in up to 52 % of draws of two problems, 17 % of five and 6 % of sixty (`scripts/check_changes.py`). Numbers
that are no means, such as entropies, go through the jackknife: their pseudo-values are averaged like measurements
(Tukey 1958).
"""

from __future__ import annotations

import numpy as np
from scipy.stats import t as student

FEWEST = 8
"""Fewest problems for which a change is reported. Where the true change is 0, at most 6 % of draws of eight problems or
more are called a change, for every kind of difference in scripts/check_changes.py; of two problems 9 % would be. In
fewer than eight a rare behaviour cannot show a change."""


def mean_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a mean over problems; NaN for a single problem, which tells nothing of others.

    Where all values are shares, or none is negative, the ends are, too.
    """
    low, high = _interval(float(values.mean()), values, confidence) if len(values) > 1 else (np.nan, np.nan)
    floor = 0.0 if values.min() >= 0 else -np.inf
    ceiling = 1.0 if floor == 0 and values.max() <= 1 else np.inf
    return max(low, floor), min(high, ceiling)


def change_interval(differences: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of the mean of paired differences, one a problem; NaN for fewer than `FEWEST`."""
    if len(differences) < FEWEST:
        return np.nan, np.nan
    return _interval(float(differences.mean()), differences, confidence)


def jackknife_interval(whole: float, without: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a number over problems, from its values without each of them, (n_problems,)."""
    n = len(without)
    return _interval(whole, n * whole - (n - 1) * without, confidence)


def _interval(centre: float, values: np.ndarray, confidence: float) -> tuple[float, float]:
    n = len(values)
    half = float(student.ppf(0.5 + confidence / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return centre - half, centre + half


def too_few(n: int) -> str:
    """What is said where a change is not called one."""
    return f"too few problems ({n}; {FEWEST} are needed)"
