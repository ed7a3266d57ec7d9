"""Power: which effects a contrast would have found, by a t-test at the p-value that counted as a discovery.

Permutation tests of means have the power of Student's t in large samples. The level is that of the
Benjamini–Hochberg step: q · max(discoveries, 1) / features tested. With more discoveries smaller effects are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student

from tsae.diff.config import FalseDiscoveries

POWER = 0.8
_POINTS = 1000


def power(d: float, n_problems: Sequence[int], level: float, errors: float = 0.0) -> float:
    """Chance that a t-test finds, on the right side, an effect that lies d beyond the boundary of its null.

    Args:
        d: (mean − boundary) in standard deviations of the differences; of two groups of problems, pooled deviations.
        n_problems: of one group of paired differences, or of two groups.
        level: p-value up to which the test rejects.
        errors: from 0 to the boundary, in standard errors: 0 for the two-sided test of a mean of 0.
    """
    df = sum(n_problems) - len(n_problems)
    shift = abs(d) / math.sqrt(sum(1 / n for n in n_problems))
    # Average over the estimated deviation by its quantiles: scipy's noncentral t gives NaN far out.
    deviation = _deviations(df)
    return float(norm.sf(_critical(df, level, errors) * deviation - shift).mean())


@lru_cache(maxsize=64)
def _critical(df: int, level: float, errors: float) -> float:
    """The t beyond the near boundary of the null with the p-value `level`, which counts the tail beyond the far one."""
    low, high = float(student.isf(level, df)), float(student.isf(level / 2, df))
    if errors == 0:
        return high
    return float(brentq(lambda t: student.sf(t, df) + student.sf(t + 2 * errors, df) - level, low - 1e-9, high + 1e-9))


@lru_cache(maxsize=64)
def _deviations(df: int) -> np.ndarray:
    """(_POINTS,) quantiles of an estimated deviation whose true value is 1."""
    return np.sqrt(chi2.ppf((np.arange(_POINTS) + 0.5) / _POINTS, df) / df)


def detectable_delta(
    n_problems: Sequence[int],
    error: float,
    *,
    minimum_effect: float,
    q: float,
    n_tested: int,
    n_discoveries: int,
    method: FalseDiscoveries = "bh",
) -> float:
    """The |Δ| at which a typical feature is found to exceed the minimum effect 8 times in 10.

    Args:
        n_problems: of one group of paired differences, or of two groups; no p-value is below 2 / the number of their
            arrangements. Draws set no limit (`tsae.diff.significance.inference.sequential_p`).
        error: standard error of Δ of a typical feature.
        minimum_effect: |Δ| up to which a feature did not move.
        q: false-discovery rate.
        n_tested: features tested.
        n_discoveries: features found.
        method: of the q-values.

    Returns:
        infinite if the problems cannot give a p-value that small; NaN without an error, for which nothing is known.
    """
    if not error > 0:
        return math.nan
    level = q * max(n_discoveries, 1) / n_tested
    if method == "by":
        level /= sum(1 / k for k in range(1, n_tested + 1))
    arrangements = 2 ** min(n_problems[0], 60) if len(n_problems) == 1 else math.comb(sum(n_problems), n_problems[0])
    if level < 2 / arrangements:
        return math.inf
    top, errors = 1.0, minimum_effect / error
    while power(top, n_problems, level, errors) < POWER:
        top *= 2
    if power(0.0, n_problems, level, errors) >= POWER:  # at a false-discovery rate near 1
        return minimum_effect
    d = brentq(lambda d: power(d, n_problems, level, errors) - POWER, 0, top, xtol=1e-4)
    return minimum_effect + float(d) * error / math.sqrt(sum(1 / n for n in n_problems))


def power_text(n_problems: int, delta: float) -> str:
    """“with these 180 problems Δ = 0.25 is found 8 times in 10”."""
    if math.isinf(delta):
        return f"with these {n_problems} problems no p-value is small enough for a single feature to be found"
    if math.isnan(delta):
        return "which Δ would be found is not known: a typical feature is the same on both sides of every problem"
    return f"with these {n_problems} problems Δ = {delta:.2f} is found 8 times in 10"
