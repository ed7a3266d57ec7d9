"""The null of a contrast: how many discoveries its own test makes on its own rows after its effect is removed.

- *shift*: the second side's trajectories of every problem are split into two random halves;
- *outcome*: labels are permuted within problem, among the trajectories of that band;
- *interaction*: the same in both bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import Comparison
from tsae.diff.contrast.draw_contrast import problem_effects, question
from tsae.diff.contrast.problem_means import difference_weights
from tsae.diff.contrast.rows import Rows
from tsae.diff.significance.inference import moved_p, q_values
from tsae.diff.threads import in_threads
from tsae.features.sparse_matrices import no_code, sums_by_code, weighted_sums

REPEATS = 5
_BYTES = 64_000_000  # of weights of rows, for the differences that one pass computes
_MANY = 8  # of so many features at most one is read by itself; of more, the rows are


def null_counts(
    rows: Rows, found: Sequence[Comparison], config: DiffConfig, repeats: int = REPEATS
) -> list[tuple[float, float]]:
    """Count the discoveries of every comparison where there is nothing to find.

    Returns:
        for each the mean number over the repeats, and the share of repeats with any. NaN if the comparison is not
        drawn, within prompts (trajectories of a problem are then the same), and if fewer than min_problems problems
        have two trajectories to split.
    """
    drawn: list[Comparison] = []
    start: list[int | None] = []
    halves: dict[tuple[str, bytes], int] = {}
    for of in found:
        if of.note or config.within_prompt:
            start.append(None)
            continue
        # All checkpoints compared with the base share its halves; only the unit of Δ differs.
        key = (of.band, of.b.tobytes())
        if of.kind == "shift" and key in halves:
            start.append(halves[key])
            continue
        start.append(len(drawn))
        if of.kind == "shift":
            halves[key] = len(drawn)
        drawn.append(of)
    at_once = max(1, _BYTES // (8 * len(rows.problem) * repeats))
    batches = [drawn[first : first + at_once] for first in range(0, len(drawn), at_once)]
    counts = [count for batch in batches for count in _discoveries(rows, batch, config, repeats)]
    result = []
    for place in start:
        each = counts[place] if place is not None else []
        result.append((float(np.mean(each)), float(np.mean(np.array(each) > 0))) if each else (np.nan, np.nan))
    return result


def null_of(rows: Rows, of: Comparison, rng: np.random.Generator) -> Comparison:
    """Remove the comparison's effect."""
    if of.bands is not None:
        harder, easier = (null_of(rows, band, rng) for band in of.bands)
        return replace(of, bands=(harder, easier))
    if of.kind == "shift":
        order = rng.permutation(of.b)
        order = order[np.argsort(rows.problem[order], kind="stable")]
        size = np.bincount(rows.problem[order])
        rank = np.arange(len(order)) - (size.cumsum() - size)[rows.problem[order]]
        order, rank = (x[size[rows.problem[order]] > 1] for x in (order, rank))
        halves = order[rank % 2 == 0], order[rank % 2 == 1]
        return replace(of, a=halves[0], b=halves[1], problems=np.unique(rows.problem[order]))
    # Rows are sorted by problem, and labels shuffled within each.
    both = np.concatenate([of.a, of.b])
    success = np.arange(len(both)) < len(of.a)
    order = np.argsort(rows.problem[both], kind="stable")
    shuffled = success[np.lexsort((rng.random(len(both)), rows.problem[both]))]
    return replace(of, a=both[order][shuffled], b=both[order][~shuffled])


def _discoveries(rows: Rows, found: Sequence[Comparison], config: DiffConfig, repeats: int) -> list[list[int]]:
    """Number of discoveries without the effect, of every comparison and repeat; repeats with too few problems aside."""
    drawn = [
        [null_of(rows, of, np.random.default_rng([config.seed, 4, repeat])) for repeat in range(repeats)]
        for of in found
    ]
    drawn = [[null for null in nulls if len(null.problems) >= config.min_problems] for nulls in drawn]
    every = [_weights(rows, null) for nulls in drawn for null in nulls]
    if not every:
        return [[] for _ in drawn]
    # One pass over all rows finds the few features whose difference is large enough to be a discovery.
    weights, parts = np.stack(every, axis=1), np.array_split(np.arange(rows.columns.shape[1]), config.threads)
    passes = [partial(weighted_sums, rows.columns, weights, part) for part in parts]
    difference = iter(np.concatenate(list(in_threads(passes, config.threads))).T)
    jobs = [partial(_count, rows, nulls, [next(difference) for _ in nulls], config) for nulls in drawn]
    return list(in_threads(jobs, config.threads))


def _weights(rows: Rows, of: Comparison) -> np.ndarray:
    """(n_rows,) weights under which the rows add up to the difference that is compared."""
    if of.bands is not None:
        harder, easier = (_weights(rows, band) for band in of.bands)
        return np.asarray(harder - easier)
    return difference_weights(of.a, of.b, rows.problem, of.problems)


def _count(rows: Rows, nulls: Sequence[Comparison], differences: Sequence[np.ndarray], config: DiffConfig) -> list[int]:
    """Number of discoveries in every repeat of one comparison, from its differences of all features."""
    counts, tested = [], None
    for of, difference in zip(nulls, differences, strict=True):
        deviation = rows.scales[of.checkpoint].deviation
        # A little less, for rounding: `moved_p` decides.
        close = np.flatnonzero((np.abs(difference) > config.minimum_effect * deviation * (1 - 1e-6)) & (deviation > 0))
        if tested is None and len(close):
            tested = _tested(rows, of, config)  # that are the same in all repeats
        if tested is None or not len(close := np.intersect1d(close, tested)):
            counts.append(0)
            continue
        few = _MANY * len(close) <= len(deviation)
        some, feature = (rows.of_features(close), np.arange(len(close))) if few else (rows, close)
        effects = [problem_effects(some, part) for part in of.bands or (of,)]
        found = moved_p(question(some, of, effects, feature, config), config, len(tested))
        p = np.ones(len(tested))
        p[: len(close)] = found
        counts.append(int((q_values(p, config.fdr) <= config.q).sum()))
    return counts


def _tested(rows: Rows, of: Comparison, config: DiffConfig) -> np.ndarray:
    """The features that `tested_features` of `tsae.diff.contrast.draw_contrast` gives, from one pass."""
    code = no_code(len(rows.problem), n_problems := int(rows.problem.max()) + 1)
    for part in of.bands or (of,):
        for side in (part.a, part.b):
            code[side] = rows.problem[side]
    active = np.concatenate([(sums > 0).sum(0) for _, sums in sums_by_code(rows.columns, code, n_problems)])
    return np.flatnonzero((active >= config.min_problems) & (rows.scales[of.checkpoint].deviation > 0))
