"""Draws of permutation tests: how many are as extreme as what was observed, for all features under the same draws.

A test asks whether a mean is 0, or whether it lies beyond a least size on its own side (`offset`). For a least size,
values are moved so that this boundary is the null. A draw is then as extreme if it lies as far beyond the boundary as
the observed value, or as far below the opposite boundary. With offset 0 that is the two-sided test.

A test is a function that makes further draws for the features asked for, so that features which need few draws cost no
more (`tsae.diff.inference.sequential_p`). What it draws depends on the number of earlier draws, not on
the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy.sparse as sp

from tsae.features.sparse_matrices import PickedColumns

_BLOCK = 250  # draws at once
_DENSE_BYTES = 24_000_000  # of sparse values made dense at once, and of draws
_ARRANGEMENTS = 10_000  # of labels within a problem that are written out, to be drawn by number
_FEW = 32  # features up to which it is faster to look up what an arrangement adds than to multiply

Count = Callable[[int, np.ndarray], np.ndarray]
"""(draws, features) -> (n_tests, n_features): how many of these further draws are as extreme as the observed value."""


def sign_flips(differences: np.ndarray, seed: int, offset: np.ndarray | None = None) -> Count:
    """Count sign flips of (n_problems, n_features) differences whose mean is as extreme as the observed.

    Args:
        differences: of every problem.
        seed: of the draws.
        offset: (n_features,) least size of the mean, in its own unit; None tests for a mean of 0.
    """
    rng = np.random.default_rng([seed, 1])
    n, mean = len(differences), differences.mean(0)
    edge = _Edge.of(mean, offset)
    single = edge.moved(differences).astype(np.float32)

    def count(draws: int, features: np.ndarray) -> np.ndarray:
        values = single[:, features]
        extreme = np.zeros(len(features), dtype=np.int64)
        for size in _blocks(draws):
            bits = np.unpackbits(rng.integers(0, 256, size=(size, -(-n // 8)), dtype=np.uint8), axis=1, count=n)
            signs = (bits.view(np.int8) * 2 - 1).astype(np.float32)
            extreme += edge.as_extreme(signs @ values / n, features)
        return extreme[None]

    return count


@dataclass(frozen=True)
class _Edge:
    """Where a statistic is as extreme as the observed one, for every feature."""

    sign: np.ndarray
    """(n_features,) side on which the statistic was observed; 1 for a test for 0, which has no side."""
    offset: np.ndarray
    """(n_features,) boundary."""
    high: np.ndarray
    low: np.ndarray
    """Distances beyond the boundary, and below the opposite one, that count as extreme."""
    two_sided: bool

    @classmethod
    def of(cls, observed: np.ndarray, offset: np.ndarray | None) -> _Edge:
        size = np.abs(observed)
        if offset is None:
            nothing = np.zeros_like(size)
            return cls(np.ones_like(size), nothing, _limit(size), _limit(size), True)
        sign = np.where(observed < 0, -1.0, 1.0)
        return cls(sign, offset, _limit(size - offset), _limit(size + offset), False)

    def moved(self, values: np.ndarray) -> np.ndarray:
        """(…, n_features) values turned to the observed side, less the boundary."""
        return values if self.two_sided else values * self.sign - self.offset

    def as_extreme(self, drawn: np.ndarray, features: np.ndarray) -> np.ndarray:
        """(n_features,) how many of (draws, n_features) statistics are as extreme; overwrites them."""
        high = self.high[features].astype(drawn.dtype)
        if self.two_sided:
            return np.count_nonzero(np.abs(drawn, out=drawn) >= high, axis=0)
        low = self.low[features].astype(drawn.dtype)
        return np.count_nonzero(drawn >= high, axis=0) + np.count_nonzero(drawn <= -low, axis=0)


def label_permutations(
    values: PickedColumns, success: np.ndarray, problem: np.ndarray, seed: int, offset: np.ndarray | None = None
) -> Count:
    """Count permutations of labels within problems whose success − failure is as extreme as the observed.

    Args:
        values: (n_rows, n_features) of trajectories of problems that have both outcomes.
        success: (n_rows,) bool.
        problem: (n_rows,) codes 0 … n_problems − 1.
        seed: of the draws.
        offset: (n_features,) least size; the values of successes are moved by it before labels are permuted.
    """
    rng = np.random.default_rng([seed, 2])
    size = np.bincount(problem)
    n_success = np.bincount(problem, weights=success).astype(int)
    n_problems = len(size)
    positive, negative = 1.0 / (n_success * n_problems), -1.0 / ((size - n_success) * n_problems)
    edge = _Edge.of(values.weighted(np.where(success, positive[problem], negative[problem])), offset)
    # Problems of one size and number of successes lie together, and their rows problem by problem.
    order = np.lexsort((problem, n_success[problem], size[problem]))
    columns = values.in_order(order)
    right = success[order].astype(np.float32)
    alike = [
        _Alike.of(int(n), int(k), int(problems), n_problems)
        for (n, k), problems in zip(*np.unique(np.stack([size, n_success], 1), axis=0, return_counts=True), strict=True)
    ]
    bounds = np.cumsum([some.problems * some.size for some in alike])[:-1]
    wide = max(1, _DENSE_BYTES // (4 * len(problem)))  # features made dense at once
    at_once = max(1, _DENSE_BYTES // (4 * _BLOCK * len(problem)))  # blocks of draws for which they are
    written_out = sum(some.problems * len(some.arrangements) for some in alike if some.arrangements is not None)

    def as_extreme(statistic: np.ndarray, of_right: np.ndarray | None, features: np.ndarray) -> np.ndarray:
        if offset is not None and of_right is not None:
            statistic *= edge.sign[features].astype(np.float32)
            statistic -= np.outer(of_right, offset[features].astype(np.float32))
        return edge.as_extreme(statistic, features)

    def count(draws: int, features: np.ndarray) -> np.ndarray:
        if len(features) <= _FEW and 4 * written_out * (len(features) + 1) <= _DENSE_BYTES:
            return count_few(draws, features)
        parts = [slice(start, start + wide) for start in range(0, len(features), wide)]
        extreme = np.zeros(len(features), dtype=np.int64)
        dense = columns.dense(features) if len(parts) == 1 else None
        blocks = list(_blocks(draws))
        for low in range(0, len(blocks), at_once):
            every = [_joint(alike, block, rng) for block in blocks[low : low + at_once]]
            for part in parts:
                of_part = columns.dense(features[part]) if dense is None else dense
                for drawn in every:
                    of_right = None if offset is None else drawn @ right
                    extreme[part] += as_extreme(drawn @ of_part, of_right, features[part])
        return extreme[None]

    def count_few(draws: int, features: np.ndarray) -> np.ndarray:
        """The same draws. A draw is the sum of what each problem's arrangement adds."""
        values = np.column_stack([columns.dense(features), right])
        tables = [some.table(part) for some, part in zip(alike, np.split(values, bounds), strict=True)]
        extreme = np.zeros(len(features), dtype=np.int64)
        for block in _blocks(draws):
            sums = np.zeros((block, values.shape[1]), dtype=np.float32)
            for some, table in zip(alike, tables, strict=True):
                sums += some.sums(some.draw(block, rng), table)
            extreme += as_extreme(np.ascontiguousarray(sums[:, :-1]), sums[:, -1], features)
        return extreme[None]

    return count


@dataclass(frozen=True)
class _Alike:
    """Problems with the same numbers of rows and of successes."""

    size: int
    n_success: int
    problems: int
    weights: np.ndarray
    """(2,) weight of a failure and of a success."""
    arrangements: np.ndarray | None
    """(n_arrangements, size) weights of a problem's rows; None if there are too many arrangements."""

    @classmethod
    def of(cls, size: int, n_success: int, problems: int, all_problems: int) -> _Alike:
        weights = np.array([-1 / ((size - n_success) * all_problems), 1 / (n_success * all_problems)], dtype=np.float32)
        every = None
        if (n := math.comb(size, n_success)) <= _ARRANGEMENTS:
            places = np.array(list(combinations(range(size), n_success)))
            every = np.full((n, size), weights[0])
            np.put_along_axis(every, places, weights[1], axis=1)
        return cls(size, n_success, problems, weights, every)

    def draw(self, draws: int, rng: np.random.Generator) -> np.ndarray:
        """Permute labels within problems: (draws, problems) numbers of arrangements, or (draws, rows) weights."""
        if self.arrangements is not None:
            return rng.integers(0, len(self.arrangements), size=(draws, self.problems))
        # Selection sampling: each row is a success with probability successes left / rows left.
        drawn = np.empty((draws, self.problems, self.size), dtype=np.float32)
        left = np.full((draws, self.problems), self.n_success, dtype=np.float32)
        for i in range(self.size):
            chosen = rng.random(left.shape, dtype=np.float32) < left / np.float32(self.size - i)
            left -= chosen
            drawn[:, :, i] = self.weights[chosen.view(np.uint8)]
        return drawn.reshape(draws, -1)

    def table(self, values: np.ndarray) -> np.ndarray:
        """What `sums` needs of (rows, n) values: (problems · arrangements, n), or the values themselves."""
        if self.arrangements is None:
            return values
        n = values.shape[1]
        return (self.arrangements @ values.reshape(self.problems, self.size, n)).reshape(-1, n)

    def sums(self, drawn: np.ndarray, table: np.ndarray) -> np.ndarray:
        """(draws, n) weighted sums of the values under what was drawn."""
        if self.arrangements is None:
            return np.asarray(drawn @ table)
        place = (drawn + np.arange(self.problems) * len(self.arrangements)).astype(np.int32)
        ends = np.arange(len(place) + 1, dtype=np.int32) * self.problems
        chosen = sp.csr_array((np.ones(place.size, np.float32), place.ravel(), ends), shape=(len(place), len(table)))
        return np.asarray(chosen @ table)


def _joint(alike: list[_Alike], draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, n_rows) weights of all rows under permuted labels."""
    weights, low = np.empty((draws, sum(some.problems * some.size for some in alike)), dtype=np.float32), 0
    for some in alike:
        drawn, part = some.draw(draws, rng), weights[:, low : low + some.problems * some.size]
        part[:] = drawn if some.arrangements is None else some.arrangements.take(drawn, axis=0).reshape(draws, -1)
        low += part.shape[1]
    return weights


def together(*counts: Count) -> Count:
    """Combine several tests of the same features."""
    return lambda draws, features: np.concatenate([count(draws, features) for count in counts])


def band_permutations(a: np.ndarray, b: np.ndarray, seed: int, offset: np.ndarray | None = None) -> Count:
    """Count permutations of two bands over problems whose Welch's t is as extreme as the observed.

    Args:
        a: (n_problems_a, n_features) per-problem effects.
        b: (n_problems_b, n_features) per-problem effects.
        seed: of the draws.
        offset: (n_features,) least size of the difference; a is moved by it before bands are permuted.
    """
    rng = np.random.default_rng([seed, 5])
    n_a, n_b = len(a), len(b)
    difference = a.mean(0) - b.mean(0)
    sign = np.where(difference < 0, -1.0, 1.0)
    least = np.zeros_like(difference) if offset is None else offset
    both = np.concatenate([a * sign - least, b * sign])
    both = both - both.mean(0)
    n = len(both)
    # In double precision, because the variance of a band that does not vary is only rounding.
    floor = np.maximum(both.var(0) * 1e-9, np.finfo(np.float32).tiny)

    def welch(member: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Differences and their standard errors for (draws, n) memberships of group a."""
        single = both[:, features]
        square, total = single**2, single.sum(0)
        mean_a, square_a = member @ single / n_a, member @ square / n_a
        mean_b, square_b = (total - n_a * mean_a) / n_b, (square.sum(0) - n_a * square_a) / n_b
        variance = (square_a - mean_a**2) / (n_a - 1) + (square_b - mean_b**2) / (n_b - 1)
        return mean_a - mean_b, np.sqrt(np.maximum(variance, floor[features]))

    found, error = (x[0] for x in welch((np.arange(n) < n_a).astype(float)[None], np.arange(both.shape[1])))
    high, low = _limit(found / error), _limit((found + 2 * least) / error)

    def count(draws: int, features: np.ndarray) -> np.ndarray:
        extreme = np.zeros(len(features), dtype=np.int64)
        for size in _blocks(draws):
            member = np.zeros((size, n))
            np.put_along_axis(member, np.argsort(rng.random((size, n)), axis=1)[:, :n_a], 1.0, 1)
            drawn = np.divide(*welch(member, features))
            # A draw of 0 where 0 was found is extreme on either side, and counts once.
            extreme += np.count_nonzero((drawn >= high[features]) | (drawn <= -low[features]), axis=0)
        return extreme[None]

    return count


def weight_permutations(values: np.ndarray, weights: np.ndarray, group: np.ndarray, seed: int) -> Count:
    """Count permutations of weights within groups whose weighted sum is as extreme as the observed.

    Args:
        values: (n_rows, n_features).
        weights: (n_rows,).
        group: (n_rows,) codes.
        seed: of the draws.
    """
    rng = np.random.default_rng([seed, 5])
    # Where all weights of a group are 0, permuting them does nothing.
    used = np.isin(group, group[weights != 0])
    single, weights, group = values[used].astype(np.float32), weights[used], group[used]
    edge = _Edge.of(weights @ values[used], None)

    def count(draws: int, features: np.ndarray) -> np.ndarray:
        extreme, columns = np.zeros(len(features), dtype=np.int64), single[:, features]
        for drawn in permuted_weights(weights, group, draws, rng):
            extreme += edge.as_extreme(drawn @ columns, features)
        return extreme[None]

    return count


def permuted_weights(
    weights: np.ndarray, group: np.ndarray, draws: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Blocks (draws, n_rows) of weights (n_rows,), permuted within groups."""
    in_order = weights[np.argsort(group, kind="stable")].astype(np.float32)
    for size in _blocks(draws):
        target = np.argsort(rng.random((size, len(group))) + group, axis=1)
        drawn = np.empty(target.shape, dtype=np.float32)
        np.put_along_axis(drawn, target, np.broadcast_to(in_order, target.shape), 1)
        yield drawn


def _limit(size: np.ndarray) -> np.ndarray:
    # A draw that repeats the observed arrangement must count as extreme in spite of rounding.
    limit: np.ndarray = size - 1e-5 * np.abs(size)
    return limit


def _blocks(draws: int) -> Iterator[int]:
    for start in range(0, draws, _BLOCK):
        yield min(_BLOCK, draws - start)
