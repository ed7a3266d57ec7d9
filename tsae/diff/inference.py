"""Inference with the problem as unit: sizes, intervals and tests of one contrast.

Trajectories of a problem are not independent. Every contrast is therefore first reduced to one difference per problem
and feature.

*Size.* Two checkpoints with different weights are two different functions, and enough problems tell any two such
functions apart. So the first question is not whether there is a difference, but whether it is large. Δ = difference /
the feature's standard deviation over base trajectories (Glass 1976): noise in the weights cannot inflate that unit. A
feature *moved* if |Δ| is larger than `minimum_effect`: the null is |Δ| ≤ minimum_effect, not Δ = 0 (a minimum-effect
test, Murphy & Myors 1999). The deviation is taken as known: with 100 base trajectories it is known to about 7 %.

- *interval*: symmetric studentised bootstrap over problems (`tsae.base.statistics`);
- *p, paired differences*: sign flips. Under the null the two sides of a problem are exchangeable, so flipping the sign
  of its difference changes nothing. Flips keep the sum of squares, so this is the test of Student's t too: effects that
  differ between problems and average to 0 are not a discovery. For the test of the size, differences are first moved to
  the boundary of the null;
- *p, success − failure*: the larger of two. Labels permuted within problems: with one success among eight failures a
  problem's difference is skewed under the null, and sign flips would be wrong. And sign flips: where outcome effects
  differ between problems and average to 0, permuted labels reject far too often;
- *p, interaction*: bands permuted over problems, with Welch's t as statistic (Janssen 1997), since the variances of the
  two bands may differ;
- *p and interval agree*: where the interval reaches the null, p is at least the bootstrap's own, so that no discovery
  has such an interval. Sign flips alone would find a feature with a tiny difference in most problems and a huge one in
  a few, all of the same sign: its differences surely lie above 0, but their mean is uncertain. A larger p stays valid;
- *q*: Benjamini–Hochberg, or Benjamini–Yekutieli, over the features of one contrast.

p = (1 + number of draws at least as extreme) / (1 + draws), never 0 (Phipson & Smyth 2010); `sequential_p` chooses the
number of draws.

*Power*: which effects a contrast would have found, by a t-test at the p-value that counted as a discovery. Permutation
tests of means have the power of Student's t in large samples. The level is that of the Benjamini–Hochberg step: q ·
max(discoveries, 1) / features tested. With more discoveries smaller effects are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, false_discovery_control, norm
from scipy.stats import t as student

from tsae.base.statistics import studentised
from tsae.diff.config import DiffConfig, FalseDiscoveries
from tsae.diff.permutations import (
    Count,
    band_permutations,
    label_permutations,
    sign_flips,
    together,
    weight_permutations,
)
from tsae.features.sparse_matrices import PickedColumns

_FIRST = 250  # draws before features are settled for the first time
_ENOUGH = 100  # draws as extreme that settle a feature


@dataclass(frozen=True)
class Inference:
    """One entry a feature."""

    difference: np.ndarray
    """Mean over problems of the per-problem difference."""
    low: np.ndarray
    high: np.ndarray
    """Bootstrap interval of the difference."""
    delta: np.ndarray
    delta_low: np.ndarray
    delta_high: np.ndarray
    """Δ and its interval, in standard deviations of the feature over base trajectories."""
    p: np.ndarray
    q: np.ndarray
    """Of the null |Δ| ≤ minimum_effect."""
    p_differs: np.ndarray
    q_differs: np.ndarray
    """Of the null Δ = 0."""
    error: np.ndarray
    """Standard error of Δ."""


def q_values(p: np.ndarray, method: FalseDiscoveries = "bh") -> np.ndarray:
    """q-values of (n,) p-values.

    Args:
        p: p-values.
        method: "bh" (Benjamini & Hochberg 1995), or "by" (Benjamini & Yekutieli 2001), which holds under any dependence
            between the features and is larger by 1 + 1/2 + … + 1/n.
    """
    return false_discovery_control(p, method=method) if len(p) else np.empty(0)


def most_draws(n_features: int, n_permutations: int, q: float, method: FalseDiscoveries) -> int:
    """Draws that a single feature needs to be a discovery, or n_permutations if that is more."""
    penalty = (1 / np.arange(1, n_features + 1)).sum() if method == "by" else 1.0
    return max(n_permutations, math.ceil(penalty * n_features / q))


def sequential_p(
    count: Count,
    n_tests: int,
    n_features: int,
    n_permutations: int,
    q: float,
    method: FalseDiscoveries,
    among: np.ndarray | None = None,
) -> np.ndarray:
    """(n_features,) p-values, the largest of several tests, with as many draws as each feature needs.

    Draws are added in doublings:

    1. A feature with 100 draws as extreme is settled: its p is known to a tenth (Besag & Clifford 1991, here in
       batches). The test stays valid. Let n be the first look at which 101 / (n + 1) ≤ u. Features settled sooner have
       p > u, and those that go on have p ≤ u there too. So p ≤ u in the end only if p ≤ u after n draws, which u fixes.
    2. All others have n_permutations draws.
    3. With m features, a single one is a discovery only at p ≤ q / m, which takes m / q draws. Drawing goes on up to
       there for features that would be discoveries if no further draw were as extreme. The others could not have become
       discoveries. Drawing ends when all of these are discoveries (Sandve, Ferkingstad & Nygård 2011).

    Args:
        count: makes draws.
        n_tests: number of tests that `count` makes.
        n_features: their number.
        n_permutations: draws of features that are not settled sooner.
        q: false-discovery rate for which the number of draws is to suffice.
        method: of the q-values.
        among: features to draw for; the others have p = 1. All by default.
    """
    most, done = most_draws(n_features, n_permutations, q, method), 0
    undecided = np.arange(n_features) if among is None else among
    extreme, draws = np.zeros((n_tests, n_features), dtype=np.int64), np.zeros(n_features, dtype=np.int64)
    if not len(undecided):
        return np.ones(n_features)
    while True:
        target = min(2 * done or _FIRST, n_permutations if done < n_permutations else most)
        extreme[:, undecided] += count(target - done, undecided)
        draws[undecided] = done = target
        worst = extreme.max(0)
        p = (1 + worst) / (1 + draws)
        undecided = undecided[worst[undecided] < _ENOUGH]
        if done >= n_permutations and len(undecided):
            best = p.copy()
            best[undecided] = (1 + worst[undecided]) / (1 + most)
            undecided = undecided[q_values(best, method)[undecided] <= q]
            if done == most or (q_values(p, method)[undecided] <= q).all():
                return p
        if not len(undecided):
            return p


@dataclass(frozen=True)
class Tested:
    """A mean over problems, or the difference of two groups' means, and the tests of it."""

    groups: Sequence[np.ndarray]
    """One or two (n_problems, n_features)."""
    scale: np.ndarray
    """(n_features,) standard deviation that Δ is measured in, above 0."""
    tests: Callable[[np.ndarray | None], Count]
    """Makes the tests for a least size (n_features,) of the difference; None tests for a difference of 0."""
    n_tests: int

    @property
    def difference(self) -> np.ndarray:
        """(n_features,)."""
        mean: np.ndarray = self.groups[0].mean(0)
        return mean - self.groups[1].mean(0) if len(self.groups) > 1 else mean


def paired(differences: np.ndarray, scale: np.ndarray, seed: int) -> Tested:
    """(n_problems, n_features) per-problem differences, by sign flips."""
    return Tested([differences], scale, lambda least: sign_flips(differences, seed, least), 1)


def outcomes(
    differences: np.ndarray,
    scale: np.ndarray,
    values: PickedColumns,
    success: np.ndarray,
    problem: np.ndarray,
    seed: int,
) -> Tested:
    """Success − failure within problem, by label permutations within problems and by sign flips.

    Args:
        differences: (n_problems, n_features) mean over successes − mean over failures.
        scale: (n_features,).
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
        seed: of the draws.
    """

    def tests(least: np.ndarray | None) -> Count:
        return together(label_permutations(values, success, problem, seed, least), sign_flips(differences, seed, least))

    return Tested([differences], scale, tests, 2)


def interaction(a: np.ndarray, b: np.ndarray, scale: np.ndarray, seed: int) -> Tested:
    """Effects (n_problems_a, n_features) of one group of problems − (n_problems_b, n_features), by permuting groups."""
    return Tested([a, b], scale, lambda least: band_permutations(a, b, seed, least), 1)


def weighted(
    differences: np.ndarray, scale: np.ndarray, values: np.ndarray, weights: np.ndarray, group: np.ndarray, seed: int
) -> Tested:
    """Weighted sums of values, by permuting weights within groups and by sign flips; only for a size of 0.

    Args:
        differences: (n_problems, n_features) sums of weights · values of every problem, times the number of problems.
        scale: (n_features,).
        values: (n_rows, n_features).
        weights: (n_rows,).
        group: (n_rows,) codes, within which weights are permuted.
        seed: of the draws.
    """

    def tests(least: np.ndarray | None) -> Count:
        # Moving values by a constant moves no weighted sum within groups, so there is no test of another size.
        assert least is None or not least.any()
        return together(weight_permutations(values, weights, group, seed), sign_flips(differences, seed))

    return Tested([differences], scale, tests, 2)


def infer(tested: Tested, config: DiffConfig) -> Inference:
    """Compute size, interval and both tests."""
    difference, scale = tested.difference, tested.scale
    leasts = (np.zeros_like(difference), config.minimum_effect * scale)
    half, error, (p_at, p_at_least) = studentised(
        tested.groups, config.n_bootstrap, config.confidence, config.seed, *leasts
    )
    p = p_differs = _moved(tested, config, half, p_at_least)
    if config.minimum_effect > 0:
        p_differs = _permutation_p(tested, None, config)
        p_differs = np.where(half >= np.abs(difference), np.maximum(p_differs, p_at), p_differs)
        p = np.maximum(p, p_differs)  # What moved differs.
    return Inference(
        difference=difference,
        low=difference - half,
        high=difference + half,
        delta=difference / scale,
        delta_low=(difference - half) / scale,
        delta_high=(difference + half) / scale,
        p=p,
        q=q_values(p, config.fdr),
        p_differs=p_differs,
        q_differs=q_values(p_differs, config.fdr),
        error=error / scale,
    )


def paired_inference(differences: np.ndarray, scale: np.ndarray, config: DiffConfig) -> Inference:
    """`infer` of `paired`."""
    return infer(paired(differences, scale, config.seed), config)


def moved_p(tested: Tested, config: DiffConfig, n_features: int | None = None) -> np.ndarray:
    """(n_features,) p of |Δ| ≤ minimum_effect; 1 where Δ lies there.

    Args:
        tested: some features of a contrast.
        config: draws and minimum effect.
        n_features: that the contrast has; those that are not given have p = 1. By default those that are given.
    """
    least = config.minimum_effect * tested.scale
    half, p_at = np.empty((2, len(least)))
    beyond = np.flatnonzero(np.abs(tested.difference) > least)
    groups = [group[:, beyond] for group in tested.groups]
    half[beyond], _, (p_at[beyond],) = studentised(
        groups, config.n_bootstrap, config.confidence, config.seed, least[beyond]
    )
    return _moved(tested, config, half, p_at, n_features)


def _moved(
    tested: Tested, config: DiffConfig, half: np.ndarray, p_at: np.ndarray, n_features: int | None = None
) -> np.ndarray:
    """`moved_p`, with half the interval and the bootstrap's own p of features beyond the minimum effect."""
    size, least = np.abs(tested.difference), config.minimum_effect * tested.scale
    beyond = np.flatnonzero(size > least)
    p = _permutation_p(tested, least, config, beyond, n_features)[: len(size)]
    # The interval reaches the null.
    p[beyond] = np.where(half[beyond] >= size[beyond] - least[beyond], np.maximum(p[beyond], p_at[beyond]), p[beyond])
    return p


def _permutation_p(
    tested: Tested,
    least: np.ndarray | None,
    config: DiffConfig,
    among: np.ndarray | None = None,
    n_features: int | None = None,
) -> np.ndarray:
    n_features, count = n_features or len(tested.scale), tested.tests(least)
    return sequential_p(count, tested.n_tests, n_features, config.n_permutations, config.q, config.fdr, among)


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
            arrangements. Draws set no limit (`tsae.diff.inference.sequential_p`).
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
