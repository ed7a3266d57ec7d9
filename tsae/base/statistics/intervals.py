"""Intervals over problems: trajectories of a problem are not independent, so problems are what varies.

They use Student's t, because the percentile bootstrap is too narrow for few problems. Where nothing changed, it reports
a change in up to 52 % of draws of two problems, 17 % of five and 6 % of sixty (`scripts/check_changes.py`). Numbers
that are not means, such as entropies, use the jackknife: their pseudo-values are averaged like measurements (Tukey
1958).
"""

from __future__ import annotations

import numpy as np
from scipy.stats import t as student

FEWEST = 8
"""Fewest problems for which a change is reported. If the true change is 0, at most 6 % of draws of eight problems or
more are called a change, for every kind of difference in scripts/check_changes.py; with two problems 9 % would be.
With fewer than eight, a rare behaviour cannot show a change."""


def mean_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a mean over problems; NaN for a single problem, and for fewer than `FEWEST` that are all alike.

    Two problems with the same value say nothing of how far problems lie apart. If no value is negative, neither is an
    end. If all values are shares, so are the ends.
    """
    known = len(values) >= FEWEST or values.min() < values.max()
    low, high = _interval(float(values.mean()), values, confidence) if known else (np.nan, np.nan)
    floor = 0.0 if values.min() >= 0 else -np.inf
    ceiling = 1.0 if floor == 0 and values.max() <= 1 else np.inf
    return max(low, floor), min(high, ceiling)


def change_interval(differences: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of the mean of paired differences, one a problem; NaN for fewer than `FEWEST`."""
    if len(differences) < FEWEST:
        return np.nan, np.nan
    return _interval(float(differences.mean()), differences, confidence)


def jackknife_interval(whole: float, without: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a number over problems, from its (n_problems,) values with one problem left out."""
    n = len(without)
    return _interval(whole, n * whole - (n - 1) * without, confidence)


def _interval(centre: float, values: np.ndarray, confidence: float) -> tuple[float, float]:
    n = len(values)
    half = float(student.ppf(0.5 + confidence / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return centre - half, centre + half


def too_few(n: int) -> str:
    """Say why a change is not reported."""
    return f"too few problems ({n}; {FEWEST} are needed)"
