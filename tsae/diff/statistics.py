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
from functools import lru_cache

import numpy as np
import scipy.sparse as sp

from tsae.diff.config import FalseDiscoveries
from tsae.diff.permutations import Count, band_permutations, label_permutations, sign_flips, together
from tsae.features.sums import grouped_sums

_FIRST = 250  # draws before features are settled for the first time
_ENOUGH = 100  # draws as extreme that settle a feature
_AUROC_BYTES = 2_000_000  # of dense values at once, which stay in a core's cache
_WIDE = 512  # features whose bootstrap draws are made at once, for the same reason


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
    differs: bool = True
    """Whether Δ = 0 is tested too; without that p_differs is p, and what lies within the minimum effect has no
    interval: the bootstrap is most of a null's work."""
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


def group_difference(
    values: sp.csr_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """Per-problem difference of means.

    Args:
        values: (n_rows, n_features).
        a: rows of one side.
        b: rows of the other.
        problem: (n_rows,) problem code of every row.
        problems: codes of the problems to use; each has rows on both sides.

    Returns:
        (n_problems, n_features) mean over a's rows of the problem − mean over b's.
    """
    return side_means(values, a, problem, problems) - side_means(values, b, problem, problems)


def side_means(values: sp.csr_array, rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """(n_problems, n_features) mean over the given rows of every problem."""
    rows, where = _of_problems(rows, problem, problems)
    weight = 1.0 / np.bincount(where, minlength=len(problems))[where]
    return grouped_sums(values, rows, where, weight, len(problems))


def _of_problems(rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of the rows that belong to the problems, and the place of each one's problem among these."""
    position = np.full(int(problem.max()) + 1, -1)
    position[problems] = np.arange(len(problems))
    where = position[problem[rows]]
    return rows[where >= 0], where[where >= 0]


def within_problem_auroc(
    values: sp.csc_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """(n_features,) mean over problems of `problem_aurocs`."""
    n_rows, n_features = values.shape
    block = max(1, _AUROC_BYTES // (4 * n_rows))
    blocks = [values[:, start : start + block] for start in range(0, n_features, block)]
    return np.concatenate([problem_aurocs(part, a, b, problem, problems).mean(0) for part in blocks])


def problem_aurocs(
    values: sp.csr_array | sp.csc_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """Chance that a trajectory of side a has the larger value than one of side b of the same problem; ties count half.

    Args:
        values: (n_rows, n_features).
        a: rows of one side.
        b: rows of the other.
        problem: (n_rows,) problem code of every row.
        problems: codes of the problems to use; each has rows on both sides.

    Returns:
        (n_problems, n_features), .5 where the sides do not differ.
    """
    dense = values.toarray()
    sides, pairs = [], np.ones(len(problems))
    for rows in (a, b):
        rows, where = _of_problems(rows, problem, problems)
        order = np.argsort(where, kind="stable")
        rows, where = rows[order], where[order]
        size = np.bincount(where, minlength=len(problems))
        slot = np.arange(len(rows)) - (size.cumsum() - size)[where]
        # An empty place is neither larger nor smaller than any value.
        filled = np.full((int(size.max()), len(problems), dense.shape[1]), np.nan, dtype=np.float32)
        filled[slot, where] = dense[rows]
        sides.append(filled)
        pairs *= size
    wins = np.zeros(sides[0].shape[1:], dtype=np.float32)  # pairs in which a is larger − those in which b is
    found = np.empty(wins.shape, dtype=bool)
    for x in sides[0]:
        for start in range(0, len(sides[1]), 127):
            few = np.zeros(wins.shape, dtype=np.int8)
            for y in sides[1][start : start + 127]:
                few += np.greater(x, y, out=found).view(np.int8)
                few -= np.less(x, y, out=found).view(np.int8)
            wins += few
    return 0.5 + wins / (2 * pairs)[:, None]


def paired_inference(differences: np.ndarray, scale: np.ndarray, draws: Draws) -> Inference:
    """Inference on (n_problems, n_features) per-problem differences; p by sign flips.

    Args:
        differences: side a − side b of every problem.
        scale: (n_features,) standard deviation that Δ is measured in, above 0.
        draws: how many.
    """
    return _infer([differences], scale, lambda offset: sign_flips(differences, draws.seed, offset), 1, draws)


def outcome_inference(
    differences: np.ndarray,
    scale: np.ndarray,
    values: sp.csr_array,
    success: np.ndarray,
    problem: np.ndarray,
    draws: Draws,
) -> Inference:
    """Inference on success − failure within problem; p the larger of label permutations within problems and sign flips.

    Args:
        differences: (n_problems, n_features) mean over successes − mean over failures.
        scale: (n_features,) standard deviation that Δ is measured in, above 0.
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
        draws: how many.
    """

    def tests(offset: np.ndarray | None) -> Count:
        labels = label_permutations(values, success, problem, draws.seed, offset)
        return together(labels, sign_flips(differences, draws.seed, offset))

    return _infer([differences], scale, tests, 2, draws)


def interaction_inference(a: np.ndarray, b: np.ndarray, scale: np.ndarray, draws: Draws) -> Inference:
    """Inference on the difference of mean effects between two groups of problems; p by permuting the groups.

    Args:
        a: (n_problems_a, n_features) per-problem effects.
        b: (n_problems_b, n_features) per-problem effects.
        scale: (n_features,) standard deviation that Δ is measured in, above 0.
        draws: how many.
    """
    return _infer([a, b], scale, lambda offset: band_permutations(a, b, draws.seed, offset), 1, draws)


def _infer(
    groups: list[np.ndarray],
    scale: np.ndarray,
    tests: Callable[[np.ndarray | None], Count],
    n_tests: int,
    draws: Draws,
) -> Inference:
    """Inference on a mean, or on the difference of two groups' means.

    Args:
        groups: one or two (n_problems, n_features).
        scale: (n_features,).
        tests: makes the tests for a least size (n_features,) of the difference, or for a difference of 0.
        n_tests: that it makes.
        draws: how many.
    """
    difference = groups[0].mean(0) - (groups[1].mean(0) if len(groups) > 1 else 0.0)
    n, size, least = len(difference), np.abs(difference), draws.minimum_effect * scale
    beyond = np.flatnonzero(size > least)
    drawn = np.arange(n) if draws.differs else beyond
    half, error, at_0, at_least = np.full((4, n), np.nan)
    some = groups if draws.differs else [group[:, drawn] for group in groups]
    half[drawn], error[drawn], (at_0[drawn], at_least[drawn]) = _bootstrap(
        some, draws.n_bootstrap, draws.confidence, draws.seed, [0 * least[drawn], least[drawn]]
    )
    common = (n_tests, n, draws.n_permutations, draws.q, draws.method)
    p = sequential_p(tests(least), *common, among=beyond)
    p = p_differs = np.where(half >= size - least, np.maximum(p, at_least), p)
    if draws.differs and draws.minimum_effect > 0:
        p_differs = sequential_p(tests(None), *common)
        p_differs = np.where(half >= size, np.maximum(p_differs, at_0), p_differs)
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


def bootstrap_interval(
    differences: np.ndarray, n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) studentised interval of the mean over problems; (n_problems, n_features) in, (n_features,) out."""
    _, low, high = group_interval([differences], n_bootstrap, confidence, seed)
    return low, high


def group_interval(
    groups: Sequence[np.ndarray], n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over problems with its studentised interval (low, high), or the difference of two groups' means.

    Args:
        groups: one or two (n_problems, n_features).
        n_bootstrap: draws of problems within each group.
        confidence: of the interval.
        seed: of the draws.
    """
    mean = groups[0].mean(0) - (groups[1].mean(0) if len(groups) > 1 else 0.0)
    half, _, _ = _bootstrap(groups, n_bootstrap, confidence, seed, [])
    return mean, mean - half, mean + half


@lru_cache(maxsize=16)
def _weights(sizes: tuple[int, ...], n_bootstrap: int, seed: int) -> list[np.ndarray]:
    """(n_bootstrap, n_problems) weight of every problem of every group in every draw."""
    rng = np.random.default_rng([seed, 3])
    return [rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float32) / np.float32(n) for n in sizes]


def _bootstrap(
    groups: Sequence[np.ndarray], n_bootstrap: int, confidence: float, seed: int, least: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Of a mean or of a difference of two means: half the interval, standard error, and p-values.

    Args:
        groups: one or two (n_problems, n_features).
        n_bootstrap: draws of problems within each group.
        confidence: of the interval.
        seed: of the draws.
        least: sizes (n_features,) for each of which there is a p-value that the size is no larger.
    """
    n_features = groups[0].shape[1]
    weights = _weights(tuple(len(group) for group in groups), n_bootstrap, seed)
    half, error = np.empty(n_features), np.empty(n_features)
    p = [np.empty(n_features) for _ in least]
    for start in range(0, n_features, _WIDE):
        part = slice(start, start + _WIDE)
        shift: np.ndarray | float = 0.0
        variance: np.ndarray | float = 0.0
        se_squared: np.ndarray | float = 0.0
        observed: np.ndarray | float = 0.0
        for sign, group, weight in zip((1, -1), groups, weights, strict=False):
            n = len(group)
            # Features in rows, so that a feature's draws lie together.
            centred = np.ascontiguousarray((group[:, part] - group[:, part].mean(0)).astype(np.float32).T)
            mean, square = centred @ weight.T, centred**2 @ weight.T
            spread = (centred**2).mean(1, keepdims=True)
            shift = shift + sign * mean
            observed = observed + sign * group[:, part].mean(0)
            # A draw that repeats one problem varies by nothing; a spread of 1/n of the sample's keeps its t finite.
            variance = variance + np.maximum(square - mean**2, spread / n) / (n - 1)
            se_squared = se_squared + spread[:, 0] / (n - 1)
        t = np.abs(shift) / np.sqrt(np.maximum(variance, np.finfo(np.float32).tiny))
        error[part] = np.sqrt(se_squared)
        half[part] = np.quantile(t, confidence, axis=1) * error[part]
        if least:
            t *= error[part].astype(np.float32)[:, None]
        for found, edge in zip(p, least, strict=True):
            beyond = (np.abs(observed) - edge[part]).astype(np.float32)
            found[part] = (1 + np.count_nonzero(t >= beyond[:, None], axis=1)) / (1 + n_bootstrap)
    return half, error, p
