"""Inference with the problem as unit.

Trajectories of a problem are not independent, so every contrast is first reduced to one difference per problem and
feature. Then:

- *interval*: percentile bootstrap over problems, all features under the same draws, one matrix product;
- *p, paired differences*: sign-flip test. Under the null the two sides are exchangeable within a problem, so that
  flipping the sign of a problem's difference changes nothing;
- *p, success − failure*: labels permuted within problems. With one success among eight failures a problem's difference
  is skewed under the null, which sign flips would get wrong;
- *q*: Benjamini–Hochberg over the features of one contrast.

p = (1 + number of draws at least as extreme) / (1 + draws), never 0 (Phipson & Smyth 2010).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

_BLOCK = 1000  # draws at once


@dataclass(frozen=True)
class Inference:
    """One entry a feature."""

    difference: np.ndarray
    """Mean over problems of the per-problem difference."""
    low: np.ndarray
    high: np.ndarray
    """Bootstrap interval of the difference."""
    d: np.ndarray
    """Paired effect size: mean / standard deviation of the per-problem differences; 0 where nothing differs."""
    p: np.ndarray
    q: np.ndarray


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """q-values of (n,) p-values (Benjamini & Hochberg 1995)."""
    n = len(p)
    order = np.argsort(p)
    scaled = p[order] * n / np.arange(1, n + 1)
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


def paired_inference(
    differences: np.ndarray, *, n_bootstrap: int, n_permutations: int, confidence: float, seed: int
) -> Inference:
    """Inference on (n_problems, n_features) per-problem differences; p by sign flips."""
    rng = np.random.default_rng([seed, 1])
    n = len(differences)
    observed = differences.mean(0)

    def flipped(draws: int) -> np.ndarray:
        signs = rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1
        return signs.astype(np.float32) @ differences.astype(np.float32) / n

    p = _p_values(observed, flipped, n_permutations)
    return _assemble(differences, p, n_bootstrap, confidence, seed)


def outcome_inference(
    values: np.ndarray,
    success: np.ndarray,
    problem: np.ndarray,
    *,
    n_bootstrap: int,
    n_permutations: int,
    confidence: float,
    seed: int,
) -> Inference:
    """Inference on success − failure within problem; p by permuting labels within problems.

    Args:
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
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
    observed = weights @ values
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

    p = _p_values(observed, permuted, n_permutations)
    differences = np.zeros((n_problems, values.shape[1]))
    np.add.at(differences, problem, (weights * n_problems)[:, None] * values)
    return _assemble(differences, p, n_bootstrap, confidence, seed)


def _p_values(observed: np.ndarray, draw: object, n_permutations: int) -> np.ndarray:
    # A draw that repeats the observed arrangement must count as extreme in spite of float32 rounding.
    limit = np.abs(observed) * (1 - 1e-5)
    extreme = np.zeros(len(observed), dtype=np.int64)
    done = 0
    while done < n_permutations:
        n = min(_BLOCK, n_permutations - done)
        extreme += (np.abs(draw(n)) >= limit).sum(0)  # type: ignore[operator]
        done += n
    return (1 + extreme) / (1 + n_permutations)


def bootstrap_interval(
    differences: np.ndarray, n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) percentile interval of the mean over problems; (n_problems, n_features) in, (n_features,) out."""
    rng = np.random.default_rng([seed, 3])
    n = len(differences)
    weights = rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float32) / n
    means = weights @ differences.astype(np.float32)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def _assemble(differences: np.ndarray, p: np.ndarray, n_bootstrap: int, confidence: float, seed: int) -> Inference:
    low, high = bootstrap_interval(differences, n_bootstrap, confidence, seed)
    mean, deviation = differences.mean(0), differences.std(0, ddof=1)
    d = np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0)
    return Inference(mean, low, high, d, p, benjamini_hochberg(p))
