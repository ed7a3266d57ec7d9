"""Inference with the problem as unit.

Trajectories of a problem are not independent, so every contrast is first reduced to one difference per problem and
feature.

*Size.* Two checkpoints with different weights are two deterministic functions, and enough problems tell any two such
functions apart. Whether a difference is there is therefore the lesser question; whether it is large is the first.
Δ = difference / the feature's standard deviation over base trajectories (Glass 1976): a unit that noise in the weights
cannot inflate. A feature *moved* where |Δ| is larger than `minimum_effect`: the null is |Δ| ≤ minimum_effect, not Δ = 0
(a minimum-effect test, Murphy & Myors 1999). The deviation is taken as known: with 100 base trajectories it is known to
about 7 %.

- *interval*: symmetric studentised bootstrap over problems (Hall 1988): difference ± the quantile of |t*| times the
  standard error, all features under the same draws, two matrix products. Percentile intervals cover too little with few
  problems (84 % in place of 95 % with five), equal-tailed studentised ones where most problems differ by nothing;
- *p, paired differences*: sign-flip test. Under the null the two sides are exchangeable within a problem, so that
  flipping the sign of a problem's difference changes nothing. Flips keep the sum of squares, so that this is the test
  of Student's t too: effects that differ between problems and average to 0 are no discovery. For the test of the size,
  differences are moved to the boundary of the null first;
- *p, success − failure*: the larger of two. Labels permuted within problems: with one success among eight failures a
  problem's difference is skewed under the null, which sign flips would get wrong. And sign flips: where outcome effects
  differ between problems and average to 0, permuted labels know nothing of that and reject far too often;
- *p, interaction*: bands permuted over problems, with Welch's t as statistic (Janssen 1997), since the two bands need
  not vary alike;
- *p and interval agree*: where the interval reaches the null, p is at least the bootstrap's own, so that no discovery
  has such an interval. Sign flips alone would find a feature whose difference is tiny in most problems and huge in a
  few, of the same sign: that its differences lie above 0 is sure, what their mean is is not. A larger p-value stays
  valid;
- *q*: Benjamini–Hochberg, or Benjamini–Yekutieli, over the features of one contrast.

p = (1 + number of draws at least as extreme) / (1 + draws), never 0 (Phipson & Smyth 2010); `sequential_p` says how
many draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from tsae.base.bootstrap import studentised
from tsae.diff.config import FalseDiscoveries
from tsae.diff.permutations import (
    Count,
    band_permutations,
    label_permutations,
    sign_flips,
    together,
    weight_permutations,
)

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
    """Δ and its interval: difference, low and high in standard deviations of the feature over base trajectories."""
    p: np.ndarray
    q: np.ndarray
    """Of the null |Δ| ≤ minimum_effect."""
    p_differs: np.ndarray
    q_differs: np.ndarray
    """Of the null Δ = 0."""
    error: np.ndarray
    """Standard error of Δ."""


@dataclass(frozen=True)
class Draws:
    """How p-values, q-values and intervals are drawn; see `tsae.diff.config.DiffConfig`."""

    n_bootstrap: int
    """Draws of problems."""
    n_permutations: int
    """Draws of signs, labels or bands, for features that need as many."""
    confidence: float
    """Of the intervals."""
    seed: int
    minimum_effect: float
    """|Δ| up to which a feature did not move."""
    q: float = 0.05
    """False-discovery rate for which draws are to suffice."""
    method: FalseDiscoveries = "bh"
    """Of the q-values."""


def q_values(p: np.ndarray, method: FalseDiscoveries = "bh") -> np.ndarray:
    """q-values of (n,) p-values.

    Args:
        p: p-values.
        method: "bh" (Benjamini & Hochberg 1995), or "by" (Benjamini & Yekutieli 2001), which holds under any dependence
            between the features and is larger by 1 + 1/2 + … + 1/n.
    """
    n = len(p)
    order = np.argsort(p)
    scaled = p[order] * n / np.arange(1, n + 1)
    if method == "by":
        scaled *= (1 / np.arange(1, n + 1)).sum()
    q = np.empty(n)
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return q


def most_draws(n_features: int, n_permutations: int, q: float, method: FalseDiscoveries) -> int:
    """Draws from which on a single feature can be a discovery, or n_permutations if that is more."""
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
    """(n_features,) p-values, of several tests the largest, with as many draws as each feature needs.

    Draws are added in doublings:

    1. A feature with 100 draws as extreme is settled: its p is known to a tenth (Besag & Clifford 1991, here in
       batches). That costs no validity: with n the first look at which 101 / (n + 1) ≤ u, features settled sooner have
       p > u, and those that go on have p ≤ u there too. So p ≤ u in the end only if p ≤ u after n draws, which u fixes.
    2. All others have n_permutations draws.
    3. With m features a single one is a discovery at p ≤ q / m only, which takes m / q draws. Drawing goes on up to
       there for features that more draws can make discoveries: those that would be, were no further draw as extreme.
       What is left behind could not have become a discovery. It ends when all of these are discoveries (Sandve,
       Ferkingstad & Nygård 2011).

    Args:
        count: makes draws.
        n_tests: that `count` makes.
        n_features: how many there are.
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
    """What is asked of a mean over problems, or of the difference of two groups' means."""

    groups: Sequence[np.ndarray]
    """One or two (n_problems, n_features)."""
    scale: np.ndarray
    """(n_features,) standard deviation that Δ is measured in, above 0."""
    tests: Callable[[np.ndarray | None], Count]
    """Makes the tests for a least size (n_features,) of the difference; for None, for a difference of 0."""
    n_tests: int
    """That it makes."""

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
    values: sp.csr_array,
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
    differences: np.ndarray,
    scale: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray,
    group: np.ndarray,
    seed: int,
) -> Tested:
    """Sums of weights and values, by permuting weights within groups and by sign flips; for a size of 0 alone.

    Args:
        differences: (n_problems, n_features) sums of weights · values of every problem, times the number of problems.
        scale: (n_features,).
        values: (n_rows, n_features).
        weights: (n_rows,).
        group: (n_rows,) codes, within which weights are permuted.
        seed: of the draws.
    """

    def tests(least: np.ndarray | None) -> Count:
        # Moving values by a constant moves no weighted sum within groups: permutations know no other null.
        assert least is None or not least.any()
        return together(weight_permutations(values, weights, group, seed), sign_flips(differences, seed))

    return Tested([differences], scale, tests, 2)


def infer(tested: Tested, draws: Draws) -> Inference:
    """Size, interval and both tests."""
    difference, scale = tested.difference, tested.scale
    half, error, p_at = studentised(
        tested.groups, draws.n_bootstrap, draws.confidence, draws.seed, np.zeros_like(difference)
    )
    p = p_differs = moved_p(tested, draws)
    if draws.minimum_effect > 0:
        common = (tested.n_tests, len(difference), draws.n_permutations, draws.q, draws.method)
        p_differs = sequential_p(tested.tests(None), *common)
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
        q=q_values(p, draws.method),
        p_differs=p_differs,
        q_differs=q_values(p_differs, draws.method),
        error=error / scale,
    )


def moved_p(tested: Tested, draws: Draws) -> np.ndarray:
    """(n_features,) p of |Δ| ≤ minimum_effect; 1 where Δ lies there."""
    size, least = np.abs(tested.difference), draws.minimum_effect * tested.scale
    beyond = np.flatnonzero(size > least)
    common = (tested.n_tests, len(size), draws.n_permutations, draws.q, draws.method)
    p = sequential_p(tested.tests(least), *common, among=beyond)
    groups = [group[:, beyond] for group in tested.groups]
    half, _, p_at = studentised(groups, draws.n_bootstrap, draws.confidence, draws.seed, least[beyond])
    # The interval reaches the null.
    p[beyond] = np.where(half >= size[beyond] - least[beyond], np.maximum(p[beyond], p_at), p[beyond])
    return p


def paired_inference(differences: np.ndarray, scale: np.ndarray, draws: Draws) -> Inference:
    """`infer` of `paired`."""
    return infer(paired(differences, scale, draws.seed), draws)
