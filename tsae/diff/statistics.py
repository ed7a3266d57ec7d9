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
- *q*: Benjamini–Hochberg, or Benjamini–Yekutieli, over the features of one contrast.

p = (1 + number of draws at least as extreme) / (1 + draws), never 0 (Phipson & Smyth 2010).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from tsae.diff.config import FalseDiscoveries

_BLOCK = 1000  # draws at once
_AUROC_BYTES = 64_000_000  # of dense values at once


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
    position = np.full(int(problem.max()) + 1, -1)
    position[problems] = np.arange(len(problems))
    where = position[problem[rows]]
    rows, where = rows[where >= 0], where[where >= 0]
    weight = 1.0 / np.bincount(where, minlength=len(problems))[where]
    averaging = sp.csr_array((weight, (where, rows)), shape=(len(problems), values.shape[0]))
    return np.asarray((averaging @ values).todense())


def within_problem_auroc(
    values: sp.csr_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """(n_features,) mean over problems of `problem_aurocs`."""
    block = max(1, _AUROC_BYTES // (4 * len(a) + 4 * len(b)))
    columns = sp.csc_array(values)
    blocks = [sp.csr_array(columns[:, start : start + block]) for start in range(0, values.shape[1], block)]
    return np.concatenate([problem_aurocs(part, a, b, problem, problems).mean(0) for part in blocks])


def problem_aurocs(
    values: sp.csr_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
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
    position = np.full(int(problem.max()) + 1, -1)
    position[problems] = np.arange(len(problems))
    sides = []
    for rows in (a, b):
        rows = rows[position[problem[rows]] >= 0]
        rows = rows[np.argsort(position[problem[rows]], kind="stable")]
        where = position[problem[rows]]
        size = np.bincount(where, minlength=len(problems))
        slot = np.arange(len(rows)) - (size.cumsum() - size)[where]
        sides.append((rows, where, slot, size))
    dense = []
    for rows, where, slot, size in sides:
        # An empty place compares as neither larger nor equal.
        filled = np.full((int(size.max()), len(problems), values.shape[1]), np.nan, dtype=np.float32)
        filled[slot, where] = values[rows].toarray()
        dense.append(filled)
    wins = np.zeros(dense[0].shape[1:], dtype=np.float32)
    for x in dense[0]:
        for y in dense[1]:
            wins += (x > y) + np.float32(0.5) * (x == y)
    return wins / (sides[0][3] * sides[1][3])[:, None]


def paired_inference(
    differences: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on (n_problems, n_features) per-problem differences; p by sign flips."""
    p = _sign_flips(differences, n_permutations, seed)
    return _assemble(differences, p, n_bootstrap, confidence, seed, method)


def _sign_flips(differences: np.ndarray, n_permutations: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 1])
    n = len(differences)
    single = differences.astype(np.float32)

    def flipped(draws: int) -> np.ndarray:
        signs = rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1
        return signs.astype(np.float32) @ single / n

    return _p_values(differences.mean(0), flipped, n_permutations)


def outcome_inference(
    values: np.ndarray,
    success: np.ndarray,
    problem: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on success − failure within problem; p the larger of label permutations within problems and sign flips.

    Args:
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
        n_bootstrap: draws of problems.
        n_permutations: of labels, and as many of signs.
        confidence: of the interval.
        seed: of the draws.
        method: of the q-values.
    """
    rng = np.random.default_rng([seed, 2])
    order = np.argsort(problem, kind="stable")
    values, success, problem = values[order], success[order], problem[order]
    n_problems = int(problem[-1]) + 1
    size = np.bincount(problem)
    n_success = np.bincount(problem, weights=success).astype(int)
    start = size.cumsum() - size
    rank = np.arange(len(problem)) - start[problem]
    positive = 1.0 / (n_success[problem] * n_problems)
    negative = -1.0 / ((size - n_success)[problem] * n_problems)
    weights = np.where(success, positive, negative)
    single = values.astype(np.float32)

    def permuted(draws: int) -> np.ndarray:
        # Sorting random keys within problems permutes their rows; the first n_success of them become successes.
        keys = rng.random((draws, len(problem))) + problem
        chosen = np.argsort(keys, axis=1)
        drawn = np.empty((draws, len(problem)), dtype=np.float32)
        np.put_along_axis(
            drawn, chosen, np.where(rank < n_success[problem], positive, negative)[None].astype(np.float32), 1
        )
        return drawn @ single

    differences = np.zeros((n_problems, values.shape[1]))
    np.add.at(differences, problem, (weights * n_problems)[:, None] * values)
    p = np.maximum(
        _p_values(weights @ values, permuted, n_permutations), _sign_flips(differences, n_permutations, seed)
    )
    return _assemble(differences, p, n_bootstrap, confidence, seed, method)


def interaction_inference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
    method: FalseDiscoveries = "bh",
) -> Inference:
    """Inference on the difference of mean effects between two groups of problems.

    Args:
        a: (n_problems_a, n_features) per-problem effects.
        b: (n_problems_b, n_features) per-problem effects.
        n_bootstrap: draws of problems within each group.
        n_permutations: of the groups over problems.
        confidence: of the interval.
        seed: of the draws.
        method: of the q-values.
    """
    rng = np.random.default_rng([seed, 5])
    both = np.concatenate([a, b])
    both = both - both.mean(0)
    single = both.astype(np.float32)
    square, total, total_square = single**2, single.sum(0), (single**2).sum(0)
    n, n_a, n_b = len(both), len(a), len(b)
    floor = np.maximum(both.var(0) * 1e-9, np.finfo(np.float32).tiny)

    def welch(member: np.ndarray) -> np.ndarray:
        """|t| for (draws, n) memberships of group a."""
        mean_a, square_a = member @ single / n_a, member @ square / n_a
        mean_b, square_b = (total - n_a * mean_a) / n_b, (total_square - n_a * square_a) / n_b
        variance = (square_a - mean_a**2) / (n_a - 1) + (square_b - mean_b**2) / (n_b - 1)
        return np.abs(mean_a - mean_b) / np.sqrt(np.maximum(variance, floor))

    def permuted(draws: int) -> np.ndarray:
        member = np.zeros((draws, n), dtype=np.float32)
        np.put_along_axis(member, np.argsort(rng.random((draws, n)), axis=1)[:, :n_a], 1.0, 1)
        return welch(member)

    p = _p_values(welch((np.arange(n) < n_a).astype(np.float32)[None])[0], permuted, n_permutations)
    difference = a.mean(0) - b.mean(0)
    half = _half_width([a, b], n_bootstrap, confidence, seed)
    pooled = np.sqrt(((n_a - 1) * a.var(0, ddof=1) + (n_b - 1) * b.var(0, ddof=1)) / (n - 2))
    d = np.divide(difference, pooled, out=np.zeros_like(difference), where=pooled > 0)
    return Inference(difference, difference - half, difference + half, d, p, q_values(p, method))


def _p_values(observed: np.ndarray, draw: Callable[[int], np.ndarray], n_permutations: int) -> np.ndarray:
    # A draw that repeats the observed arrangement must count as extreme in spite of float32 rounding.
    limit = np.abs(observed) * (1 - 1e-5)
    extreme = np.zeros(len(observed), dtype=np.int64)
    done = 0
    while done < n_permutations:
        n = min(_BLOCK, n_permutations - done)
        extreme += (np.abs(draw(n)) >= limit).sum(0)
        done += n
    return (1 + extreme) / (1 + n_permutations)


def bootstrap_interval(
    differences: np.ndarray, n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) studentised interval of the mean over problems; (n_problems, n_features) in, (n_features,) out."""
    mean, half = differences.mean(0), _half_width([differences], n_bootstrap, confidence, seed)
    return mean - half, mean + half


def _half_width(groups: list[np.ndarray], n_bootstrap: int, confidence: float, seed: int) -> np.ndarray:
    """(n_features,) quantile of |t*| times the standard error, of a mean or of a difference of two groups' means."""
    rng = np.random.default_rng([seed, 3])
    shift: np.ndarray | float = 0.0
    variance: np.ndarray | float = 0.0
    se_squared: np.ndarray | float = 0.0
    for sign, group in zip((1, -1), groups, strict=False):
        n = len(group)
        centred = (group - group.mean(0)).astype(np.float32)
        weights = rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float32) / n
        mean, square = weights @ centred, weights @ centred**2
        spread = (centred**2).mean(0)
        shift = shift + sign * mean
        # A draw that repeats one problem varies by nothing; a spread of 1/n of the sample's keeps its t finite.
        variance = variance + np.maximum(square - mean**2, spread / n) / (n - 1)
        se_squared = se_squared + spread / (n - 1)
    t = np.abs(shift) / np.sqrt(np.maximum(variance, np.finfo(np.float32).tiny))
    return np.quantile(t, confidence, axis=0) * np.sqrt(se_squared)


def _assemble(
    differences: np.ndarray, p: np.ndarray, n_bootstrap: int, confidence: float, seed: int, method: FalseDiscoveries
) -> Inference:
    low, high = bootstrap_interval(differences, n_bootstrap, confidence, seed)
    mean, deviation = differences.mean(0), differences.std(0, ddof=1)
    d = np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0)
    return Inference(mean, low, high, d, p, q_values(p, method))
