"""Inference with the problem as unit.

Trajectories of a problem are not independent, so every contrast is first reduced to one difference per problem and
feature. Then:

- *interval*: symmetric studentised bootstrap over problems (Hall 1988): difference ± the quantile of |t*| times the
  standard error, all features under the same draws, two matrix products. Percentile intervals cover too little with few
  problems (84 % in place of 95 % with five), equal-tailed studentised ones where most problems differ by nothing;
- *p, paired differences*: sign-flip test. Under the null the two sides are exchangeable within a problem, so that
  flipping the sign of a problem's difference changes nothing. Flips keep the sum of squares, so that this is the test
  of Student's t too: effects that differ between problems and average to 0 are no discovery;
- *p, success − failure*: the larger of two. Labels permuted within problems: with one success among eight failures a
  problem's difference is skewed under the null, which sign flips would get wrong. And sign flips: where outcome effects
  differ between problems and average to 0, permuted labels know nothing of that and reject far too often;
- *p, interaction*: bands permuted over problems, with Welch's t as statistic (Janssen 1997), since the two bands need
  not vary alike;
- *p and interval agree*: where the interval has 0 in it, p is at least the bootstrap's own, so that no discovery has
  such an interval. Sign flips alone would find a feature whose difference is tiny in most problems and huge in a few,
  of the same sign: that its differences lie above 0 is sure, what their mean is is not. A larger p-value stays valid;
- *q*: Benjamini–Hochberg, or Benjamini–Yekutieli, over the features of one contrast.

p = (1 + number of draws at least as extreme) / (1 + draws), never 0 (Phipson & Smyth 2010); `sequential_p` says how
many draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from tsae.diff.config import FalseDiscoveries
from tsae.diff.permutations import (
    Count,
    band_permutations,
    label_permutations,
    sign_flips,
    together,
    weight_permutations,
)
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
    d: np.ndarray
    """Effect size: mean / standard deviation of the per-problem differences; 0 where nothing differs. Between two
    groups of problems the difference of means / pooled standard deviation."""
    p: np.ndarray
    q: np.ndarray


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
    count: Count, n_tests: int, n_features: int, n_permutations: int, q: float, method: FalseDiscoveries
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
    """
    most, done = most_draws(n_features, n_permutations, q, method), 0
    undecided = np.arange(n_features)
    extreme, draws = np.zeros((n_tests, n_features), dtype=np.int64), np.zeros(n_features, dtype=np.int64)
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


def paired_inference(
    differences: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    q: float = 0.05,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on (n_problems, n_features) per-problem differences; p by sign flips.

    Args:
        differences: side a − side b of every problem.
        n_bootstrap: draws of problems.
        n_permutations: draws of signs, for features that need as many (`tsae.diff.permutations`).
        confidence: of the interval.
        seed: of the draws.
        q: false-discovery rate for which draws are to suffice.
        method: of the q-values.
    """
    p = sequential_p(sign_flips(differences, seed), 1, differences.shape[1], n_permutations, q, method)
    return _assemble(differences, p, n_bootstrap, confidence, seed, method)


def outcome_inference(
    differences: np.ndarray,
    values: sp.csr_array,
    success: np.ndarray,
    problem: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    q: float = 0.05,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on success − failure within problem; p the larger of label permutations within problems and sign flips.

    Args:
        differences: (n_problems, n_features) mean over successes − mean over failures.
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
        n_bootstrap: draws of problems.
        n_permutations: draws of labels, and as many of signs, for features that need as many.
        confidence: of the interval.
        seed: of the draws.
        q: false-discovery rate for which draws are to suffice.
        method: of the q-values.
    """
    count = outcome_tests(differences, values, success, problem, seed)
    p = sequential_p(count, 2, differences.shape[1], n_permutations, q, method)
    return _assemble(differences, p, n_bootstrap, confidence, seed, method)


def outcome_tests(
    differences: np.ndarray, values: sp.csr_array, success: np.ndarray, problem: np.ndarray, seed: int
) -> Count:
    """The two tests of success − failure; see `outcome_inference`."""
    return together(label_permutations(values, success, problem, seed), sign_flips(differences, seed))


def weighted_inference(
    differences: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray,
    group: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    q: float = 0.05,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on sums of weights and values; p the larger of weights permuted within groups and sign flips.

    Args:
        differences: (n_problems, n_features) sums of weights · values of every problem, times the number of problems.
        values: (n_rows, n_features).
        weights: (n_rows,).
        group: (n_rows,) codes, within which weights are permuted.
        n_bootstrap: draws of problems.
        n_permutations: draws of weights, and as many of signs, for features that need as many.
        confidence: of the interval.
        seed: of the draws.
        q: false-discovery rate for which draws are to suffice.
        method: of the q-values.
    """
    count = together(weight_permutations(values, weights, group, seed), sign_flips(differences, seed))
    p = sequential_p(count, 2, differences.shape[1], n_permutations, q, method)
    return _assemble(differences, p, n_bootstrap, confidence, seed, method)


def interaction_inference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    q: float = 0.05,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on the difference of mean effects between two groups of problems.

    Args:
        a: (n_problems_a, n_features) per-problem effects.
        b: (n_problems_b, n_features) per-problem effects.
        n_bootstrap: draws of problems within each group.
        n_permutations: of the groups over problems, for features that need as many.
        confidence: of the interval.
        seed: of the draws.
        q: false-discovery rate for which draws are to suffice.
        method: of the q-values.
    """
    p = sequential_p(band_permutations(a, b, seed), 1, a.shape[1], n_permutations, q, method)
    n_a, n_b = len(a), len(b)
    difference = a.mean(0) - b.mean(0)
    half, bootstrap_p = _bootstrap([a, b], n_bootstrap, confidence, seed)
    p = _agreeing(p, difference, half, bootstrap_p)
    pooled = np.sqrt(((n_a - 1) * a.var(0, ddof=1) + (n_b - 1) * b.var(0, ddof=1)) / (n_a + n_b - 2))
    d = np.divide(difference, pooled, out=np.zeros_like(difference), where=pooled > 0)
    return Inference(difference, difference - half, difference + half, d, p, q_values(p, method))


def bootstrap_interval(
    differences: np.ndarray, n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) studentised interval of the mean over problems; (n_problems, n_features) in, (n_features,) out."""
    mean = differences.mean(0)
    half, _ = _bootstrap([differences], n_bootstrap, confidence, seed)
    return mean - half, mean + half


def _agreeing(p: np.ndarray, difference: np.ndarray, half: np.ndarray, bootstrap_p: np.ndarray) -> np.ndarray:
    """p, or the bootstrap's where that is larger and the interval has 0 in it."""
    return np.where(half >= np.abs(difference), np.maximum(p, bootstrap_p), p)


def _bootstrap(
    groups: list[np.ndarray], n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(quantile of |t*| times the standard error, p of a mean of 0), of a mean or of a difference of two means."""
    rng = np.random.default_rng([seed, 3])
    sizes, n_features = [len(group) for group in groups], groups[0].shape[1]
    weights = [
        rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float32) / np.float32(n) for n in sizes
    ]
    half, p = np.empty(n_features), np.empty(n_features)
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
        error = np.sqrt(se_squared)
        half[part] = np.quantile(t, confidence, axis=1) * error
        extreme = (t * error[:, None] >= np.abs(observed)[:, None]).sum(1)
        p[part] = (1 + extreme) / (1 + n_bootstrap)
    return half, p


def _assemble(
    differences: np.ndarray, p: np.ndarray, n_bootstrap: int, confidence: float, seed: int, method: FalseDiscoveries
) -> Inference:
    half, bootstrap_p = _bootstrap([differences], n_bootstrap, confidence, seed)
    mean, deviation = differences.mean(0), differences.std(0, ddof=1)
    d = np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0)
    p = _agreeing(p, mean, half, bootstrap_p)
    return Inference(mean, mean - half, mean + half, d, p, q_values(p, method))
