"""Draw one contrast: differences of problems, handed to inference for the Δ of every feature.

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

`tsae.diff.contrast.rows` says what each row is, `tsae.diff.contrast.comparisons` lists which rows are compared, and
`draw` computes. Controls, nulls and baselines take the same `Comparison`, so all of them rest on the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import Comparison
from tsae.diff.contrast.problem_means import side_means, some_columns, within_problem_auroc
from tsae.diff.contrast.rows import Rows
from tsae.diff.significance.inference import Inference, Tested, infer, interaction, outcomes, paired
from tsae.diff.significance.power import detectable_delta
from tsae.features.sparse_matrices import PickedColumns


@dataclass(frozen=True)
class Contrast:
    """One comparison over all features, or the reason why it was not drawn."""

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
    detectable_delta: float = np.nan
    """The |Δ| that is found 8 times in 10 (`tsae.diff.significance.power`)."""
    note: str = ""


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
        auroc = within_problem_auroc(rows.columns, feature, of.a, of.b, rows.problem, of.problems)
    else:
        a, b = ((effect.a - effect.b)[:, feature] for effect in effects)
        mean, reference, auroc = a.mean(0), b.mean(0), _auroc_between(a, b)
    detectable = detectable_delta(
        tuple(len(part.problems) for part in of.bands or (of,)),
        float(np.median(inference.error)),
        minimum_effect=config.minimum_effect,
        q=config.q,
        n_tested=len(feature),
        n_discoveries=int((inference.q <= config.q).sum()),
        method=config.fdr,
    )
    return Contrast(of, feature, inference, mean, reference, auroc, detectable)


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


def _auroc_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n_features,) Mann–Whitney U of the problems of a against those of b / (n_a · n_b)."""
    ranks = rankdata(np.concatenate([a, b]), axis=0)
    return (ranks[: len(a)].sum(0) - len(a) * (len(a) + 1) / 2) / (len(a) * len(b))


def active_features(config: DiffConfig, *means: np.ndarray) -> np.ndarray:
    """Features active in at least min_problems problems, on any side. The filter does not see the contrast's sign.

    Args:
        config: min_problems.
        means: (n_problems, n_features) means of each side, of activations that are not negative.
    """
    active = np.logical_or.reduce([side > 0 for side in means])
    return np.flatnonzero(active.sum(0) >= config.min_problems)
