"""The null of a contrast: how many discoveries its own test makes on its own rows after its effect is removed.

- *shift*: the second side's trajectories of every problem are split into two random halves;
- *outcome*: labels are permuted within problem, among the trajectories of that band;
- *interaction*: the same in both bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import Comparison
from tsae.diff.contrast.draw_contrast import problem_effects, question, tested_features
from tsae.diff.contrast.rows import Rows
from tsae.diff.significance.inference import moved_p, q_values
from tsae.diff.threads import in_threads

REPEATS = 5


def null_counts(
    rows: Rows, found: Sequence[Comparison], config: DiffConfig, repeats: int = REPEATS
) -> list[tuple[float, float]]:
    """Count the discoveries of every comparison where there is nothing to find.

    Returns:
        for each the mean number over the repeats, and the share of repeats with any. NaN if the comparison is not
        drawn, within prompts (trajectories of a problem are then the same), and if fewer than min_problems problems
        have two trajectories to split.
    """
    jobs: list[Callable[[], int | None]] = []
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
        start.append(len(jobs))
        if of.kind == "shift":
            halves[key] = len(jobs)
        jobs += [partial(_discoveries, rows, of, config, repeat) for repeat in range(repeats)]
    counts = list(in_threads(jobs, config.threads))
    result = []
    for first in start:
        each = [] if first is None else [n for n in counts[first : first + repeats] if n is not None]
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


def _discoveries(rows: Rows, of: Comparison, config: DiffConfig, repeat: int) -> int | None:
    """Number of discoveries without the effect; None with too few problems."""
    nothing = null_of(rows, of, np.random.default_rng([config.seed, 4, repeat]))
    if len(nothing.problems) < config.min_problems:
        return None
    effects = [problem_effects(rows, part) for part in nothing.bands or (nothing,)]
    feature = tested_features(rows, nothing, effects, config)
    if not len(feature):
        return 0
    p = moved_p(question(rows, nothing, effects, feature, config), config)
    return int((q_values(p, config.fdr) <= config.q).sum())
