"""The effects of a diff: comparisons drawn over all features, and how many are found where there is nothing to find.

*Shift* of a checkpoint B against the base 0. E[f | policy, reader] is the mean over problems of the mean activation:

    total          = E[f | B, B] − E[f | 0, 0]
    policy         = E[f | B, 0] − E[f | 0, 0]     same reader, new trajectories
    representation = E[f | B, B] − E[f | B, 0]     same trajectories, new reader
    same_trajectories = E[f | 0, B] − E[f | 0, 0]  the base's trajectories, new reader

total = policy + representation holds problem by problem. Shifts are split by band and by outcome. With an outcome, only
problems count in which both checkpoints have such trajectories, in all three parts.

*Outcome*: success − failure within problem, in what a checkpoint reads of its own trajectories (of all, if it sampled
none). Problems whose rollouts all agree carry no contrast and are counted.

*Interaction*: does the outcome effect differ between hard and medium problems? The mean outcome effect of one band's
problems − that of another's, for every two bands.

In a trainer's log the policy of one step answered every problem: the base and a checkpoint share no problems, and
their own trajectories cannot be compared. Where all readers read the same trajectories and no two share enough
problems, all contrasts are drawn on everything that was read, whoever sampled it.

`draw` takes the difference on each problem, and hands it to `tsae.diff.inference` for the Δ of every feature. Controls,
nulls and baselines take the same `Comparison`, so all of them rest on the same rows.

*Null* of a contrast: how many discoveries its own test makes on its own rows after its effect is removed.

- *shift*: the second side's trajectories of every problem are split into two random halves;
- *outcome*: labels are permuted within problem, among the trajectories of that band;
- *interaction*: the same in both bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import mannwhitneyu

from tsae.base.progress import progress_bar
from tsae.diff.comparisons import Comparison, Rows, difference_weights, side_means, some_columns, within_problem_auroc
from tsae.diff.config import DiffConfig
from tsae.diff.inference import (
    Inference,
    Tested,
    detectable_delta,
    infer,
    interaction,
    moved_p,
    outcomes,
    paired,
    q_values,
)
from tsae.diff.threads import in_threads
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import PickedColumns, no_code, sums_by_code, weighted_sums


@dataclass(frozen=True)
class Contrast:
    """One comparison over all features; or why it could not be made."""

    of: Comparison
    feature: np.ndarray
    """(n_tested,) features tested: active in enough problems."""
    inference: Inference | None = None
    mean_a: np.ndarray | None = None
    """(n_tested,) mean of the first side: the checkpoint, or successes."""
    mean_b: np.ndarray | None = None
    """(n_tested,) mean of the second side: the base, or failures."""
    auroc: np.ndarray | None = None
    """(n_tested,) chance that a trajectory of the first side has a larger mean activation than one of the second side
    of the same problem; of an interaction, that a problem of the first band has a larger outcome effect."""
    active: np.ndarray | None = None
    """(2, n_tested) share of the trajectories of either side in which the feature is active, a mean over problems; NaN
    for an interaction."""
    detectable_delta: float = np.nan
    """The |Δ| that is found 8 times in 10 (`tsae.diff.inference`)."""
    note: str = ""


def draw_all(rows: Rows, compared: Sequence[Comparison], config: DiffConfig, progress: bool) -> list[Contrast]:
    """Draw every comparison, some at once in threads."""
    drawn = in_threads([partial(draw, rows, of, config) for of in compared], config.threads)
    return list(progress_bar("diff", "contrast", len(compared), over=drawn, shown=progress))


def draw(rows: Rows, of: Comparison, config: DiffConfig) -> Contrast:
    """Draw a comparison over all features that are active in enough of its problems."""
    empty = Contrast(of, np.empty(0, dtype=int), note=of.note)
    if of.note:
        return empty
    effects = [problem_effects(rows, part) for part in of.bands or (of,)]
    feature = tested_features(rows, of, effects, config)
    if not len(feature):
        return replace(empty, note="no feature is active in enough problems")
    inference = infer(question(rows, of, effects, feature, config), config)
    if of.bands is None:
        reference = effects[0].b.mean(0)[feature]
        mean = reference + inference.difference
        auroc, *often = within_problem_auroc(rows.columns, feature, of.a, of.b, rows.problem, of.problems)
        active = np.stack(often)
    else:
        a, b = ((effect.a - effect.b)[:, feature] for effect in effects)
        wins = mannwhitneyu(a, b, method="asymptotic").statistic  # of which the p-value is not taken
        mean, reference, auroc = a.mean(0), b.mean(0), wins / (len(a) * len(b))
        active = np.full((2, len(feature)), np.nan)
    detectable = detectable_delta(
        tuple(len(part.problems) for part in of.bands or (of,)),
        float(np.median(inference.error)),
        minimum_effect=config.minimum_effect,
        q=config.q,
        n_tested=len(feature),
        n_discoveries=int((inference.q <= config.q).sum()),
        method=config.fdr,
    )
    return Contrast(of, feature, inference, mean, reference, auroc, active, detectable)


class Effects(NamedTuple):
    """(n_problems, n_features) means of the two sides of a comparison."""

    a: np.ndarray
    b: np.ndarray


def problem_effects(rows: Rows, of: Comparison) -> Effects:
    """Means of both sides in every problem."""
    return Effects(*(side_means(rows.values, side, rows.problem, of.problems) for side in (of.a, of.b)))


def tested_features(rows: Rows, of: Comparison, effects: list[Effects], config: DiffConfig) -> np.ndarray:
    """The `active_features` that vary."""
    a, b = (np.concatenate(side) for side in zip(*effects, strict=True))
    active = active_features(config, a, b)
    return active[rows.scales[of.checkpoint].deviation[active] > 0]


def question(rows: Rows, of: Comparison, effects: list[Effects], feature: np.ndarray, config: DiffConfig) -> Tested:
    """The difference of the given features and its tests."""
    scale, seed = rows.scales[of.checkpoint].deviation[feature], config.seed
    first, *others = (some_columns(effect.a - effect.b, feature) for effect in effects)
    if others:
        return interaction(first, others[0], scale, seed)
    if of.kind == "shift":
        return paired(first, scale, seed)
    picked = np.concatenate([of.a, of.b])
    code = np.searchsorted(of.problems, rows.problem[picked])
    success = np.arange(len(picked)) < len(of.a)
    return outcomes(first, scale, PickedColumns(rows.columns, picked, feature), success, code, seed)


def active_features(config: DiffConfig, *means: np.ndarray) -> np.ndarray:
    """Features active in at least min_problems problems, on any side. The filter does not see the contrast's sign.

    Args:
        config: min_problems.
        means: (n_problems, n_features) means of each side, of activations that are not negative.
    """
    active = np.logical_or.reduce([side > 0 for side in means])
    return np.flatnonzero(active.sum(0) >= config.min_problems)


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
    # All checkpoints compared with the base share its halves; only the unit of Δ differs.
    keys = [(of.band, of.b.tobytes()) if of.kind == "shift" else place for place, of in enumerate(found)]
    first: dict[Any, Comparison] = {}
    for key, of in zip(keys, found, strict=True):
        if not of.note and not config.within_prompt:
            first.setdefault(key, of)
    drawn, at_once = list(first.values()), max(1, _BYTES // (8 * len(rows.problem) * repeats))
    batches = [drawn[start : start + at_once] for start in range(0, len(drawn), at_once)]
    counts = dict(zip(first, (n for batch in batches for n in _discoveries(rows, batch, config, repeats)), strict=True))
    each = [[] if of.note else counts.get(key, []) for key, of in zip(keys, found, strict=True)]
    return [(float(np.mean(n)), float(np.mean(np.array(n) > 0))) if n else (np.nan, np.nan) for n in each]


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
    """The features that `tested_features` of `tsae.diff.effects` gives, from one pass."""
    code = no_code(len(rows.problem), n_problems := int(rows.problem.max()) + 1)
    for part in of.bands or (of,):
        for side in (part.a, part.b):
            code[side] = rows.problem[side]
    active = np.concatenate([(sums > 0).sum(0) for _, sums in sums_by_code(rows.columns, code, n_problems)])
    return np.flatnonzero((active >= config.min_problems) & (rows.scales[of.checkpoint].deviation > 0))


_KEYS = ["kind", "checkpoint", "run", "step", "part", "band", "outcome"]
_NUMBERS = ["difference", "low", "high", "delta", "delta_low", "delta_high", "p", "q", "p_differs", "q_differs"]


def shift_table(features: FeatureTable, rows: Rows, drawn: Sequence[Contrast]) -> pd.DataFrame:
    """`FeatureDiff.shifts`: one row a contrast and tested feature."""
    parts = []
    for c in drawn:
        if c.inference is None:
            continue
        columns = {**_keys(features, c.of), "feature": c.feature, "mean": c.mean_a, "reference": c.mean_b}
        columns |= {name: getattr(c.inference, name) for name in _NUMBERS}
        assert c.active is not None
        columns |= {"scale": rows.scales[c.of.checkpoint].kind[c.feature], "auroc": c.auroc}
        parts.append(pd.DataFrame({**columns, "active": c.active[0], "active_reference": c.active[1]}))
    names = [*_KEYS, "feature", "mean", "reference", *_NUMBERS, "scale", "auroc", "active", "active_reference"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def contrast_table(features: FeatureTable, rows: Rows, drawn: Sequence[Contrast], config: DiffConfig) -> pd.DataFrame:
    """`FeatureDiff.contrasts`: one row a contrast, drawn or refused."""
    nulls = null_counts(rows, [replace(c.of, note=c.note) for c in drawn], config)
    found = [c.inference for c in drawn]
    return pd.DataFrame([_keys(features, c.of) for c in drawn])[_KEYS].assign(
        n_problems=[c.of.n_problems for c in drawn],
        n_trajectories=[len(c.of.rows) for c in drawn],
        n_tokens=[int(rows.n_tokens[c.of.rows].sum()) for c in drawn],
        rows=[c.of.fingerprint for c in drawn],
        n_left_out=[c.of.n_left_out for c in drawn],
        n_tested=[len(c.feature) for c in drawn],
        n_discoveries=[0 if i is None else int((i.q <= config.q).sum()) for i in found],
        n_differs=[0 if i is None else int((i.q_differs <= config.q).sum()) for i in found],
        n_null=[mean for mean, _ in nulls],
        null_any=[share for _, share in nulls],
        detectable_delta=[c.detectable_delta for c in drawn],
        note=[c.note for c in drawn],
    )


def _keys(features: FeatureTable, of: Comparison) -> dict[str, Any]:
    reader = features.reader_info(of.checkpoint)
    return {**of.key, "run": reader["run"], "step": reader["step"]}
