"""The contrasts of a feature diff.

*Shift* of a checkpoint B against the base 0, with E[f | policy, reader] the mean over problems of the mean activation:

    total          = E[f | B, B] − E[f | 0, 0]
    policy         = E[f | B, 0] − E[f | 0, 0]     same reader, new trajectories
    representation = E[f | B, B] − E[f | B, 0]     same trajectories, new reader
    same_trajectories = E[f | 0, B] − E[f | 0, 0]  the base's trajectories, new reader

total = policy + representation holds problem by problem. Shifts are split by band and by outcome; with an outcome,
only problems that have such trajectories of both checkpoints count, in all three parts.

*Outcome*: success − failure within problem, on what a checkpoint reads of its own trajectories (of all trajectories,
where it sampled none). Problems where all rollouts agree carry no contrast and are counted.

*Interaction*: is the outcome effect another in hard than in medium problems? The mean outcome effect of one band's
problems − that of another's, for every two bands.

A trainer's log has every problem from the policy of one step: the base and a checkpoint then share no problems, and
their own trajectories cannot be set against each other. Where all readers read the same trajectories and no two share
enough problems, all contrasts are drawn on everything that was read, whoever sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.power import detectable_d
from tsae.diff.statistics import (
    Inference,
    interaction_inference,
    outcome_inference,
    paired_inference,
    side_means,
    within_problem_auroc,
)
from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.rollouts.table import BANDS

Sparse = TypeVar("Sparse", sp.csr_array, sp.csc_array)
_SAME_PROMPTS = "both sides read the same prompts with the same checkpoint"
SHIFT_PARTS = ("total", "policy", "representation", "same_trajectories")


@dataclass(frozen=True)
class Rows:
    """Per-row data of a FeatureTable that contrasts are drawn on."""

    values: sp.csr_array
    """(n_rows, n_features) mean activation over the span."""
    columns: sp.csc_array
    """The same by columns."""
    problem: np.ndarray
    """(n_rows,) problem codes."""
    band: np.ndarray
    """(n_rows,) easy, medium, hard, or None."""
    outcome: np.ndarray
    """(n_rows,) success, failure or unknown."""
    by_reader: dict[tuple[str, str | None], np.ndarray]
    """Rows of (reader, policy); of all policies under (reader, None)."""
    pooled: bool
    """Whether who sampled a trajectory makes no difference: readers share no problems, only what they read."""
    bands_refused: str = ""
    """Why bands are not compared; empty where they are (``rollouts.info["bands"]["refused"]``)."""

    @classmethod
    def of(cls, features: FeatureTable, config: DiffConfig) -> Rows:
        frame = features.rollouts.frame.iloc[features.trajectory]
        by_reader: dict[tuple[str, str | None], np.ndarray] = {}
        for reader in features.readers:
            by_reader[reader, None] = features.rows(reader=reader)
            # The base reads what every run sampled; every other reader the base's trajectories and its own.
            for policy in features.readers if reader == features.readers[0] else (features.readers[0], reader):
                by_reader[reader, policy] = features.rows(reader=reader, policy=policy)
        problem = pd.factorize(frame.problem_id)[0]
        values = features.row_means(config.span)
        return cls(
            values=values,
            columns=sp.csc_array(values),
            problem=problem,
            band=frame.band.to_numpy(dtype=object),
            outcome=frame.outcome.to_numpy(dtype=object),
            by_reader=by_reader,
            pooled=_is_pooled(features, by_reader, problem, config),
            bands_refused=(features.rollouts.info.get("bands") or {}).get("refused", ""),
        )

    def own(self, reader: str) -> str | None:
        """The policy whose trajectories stand for a reader: its own, or all where these do not count."""
        return reader if not self.pooled and len(self.by_reader[reader, reader]) else None

    def pick(self, reader: str, policy: str | None, band: str, outcome: str) -> np.ndarray:
        rows = self.by_reader[reader, policy]
        if band != "all":
            rows = rows[self.band[rows] == band]
        if outcome != "all":
            rows = rows[self.outcome[rows] == outcome]
        return rows


@dataclass(frozen=True)
class Contrast:
    """One contrast over all features, or the reason why it was not drawn."""

    kind: str
    """"shift", "outcome" or "interaction"."""
    checkpoint: str
    part: str
    band: str
    outcome: str
    n_problems: int
    n_left_out: int
    """Problems of the band that lack one of the two sides."""
    feature: np.ndarray
    """(n_tested,) features tested: active in enough problems."""
    inference: Inference | None = None
    mean_a: np.ndarray | None = None
    """(n_tested,) mean of the first side: the checkpoint, or successes."""
    mean_b: np.ndarray | None = None
    """(n_tested,) mean of the second side: the base, or failures."""
    auroc: np.ndarray | None = None
    """(n_tested,) chance that a trajectory of the first side has the larger mean activation than one of the second, of
    the same problem; of an interaction that a problem of the first band has the larger outcome effect."""
    detectable_d: float = np.nan
    """The |d| that is found 8 times in 10 (`tsae.diff.power`)."""
    note: str = ""


Draw = Callable[[], Contrast]
"""Draws a contrast: several may be drawn at once."""


def contrast_bands(features: FeatureTable, config: DiffConfig) -> list[str]:
    """ "all", then the bands that are asked for or present.

    Raises:
        TsaeError: where a band that is asked for has no problems.
    """
    band = set(features.rollouts.table["band"].to_pylist()) - {None}
    wanted = list(config.bands) if config.bands is not None else [b for b in BANDS if b in band]
    for name in wanted:
        if name not in band:
            raise TsaeError(
                f"no problem is in the band {name!r}; the rollouts have {', '.join(sorted(band)) or 'no bands'}",
                where=features.origin,
                fix="Measure bands first (`tsae rollouts bands`), or leave that band out.",
            )
    return ["all", *wanted]


def shift_contrasts(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Draw]:
    """Every shift of every non-base reader, by part, band and outcome."""
    base = features.readers[0]
    for reader in features.readers[1:]:
        sides: dict[str, tuple[tuple[str, str | None], tuple[str, str | None]]] = {
            "total": ((reader, reader), (base, base)),
            "policy": ((base, reader), (base, base)),
            "representation": ((reader, reader), (base, reader)),
            "same_trajectories": ((reader, base), (base, base)),
        }
        if rows.own(base) is None:
            # Logs of other policies, or of other problems: there is only what all readers read.
            sides = {"same_trajectories": ((reader, None), (base, None))}
        elif len(rows.by_reader[reader, reader]) == 0:
            sides = {"same_trajectories": sides["same_trajectories"]}
        for part, ((reader_a, policy_a), (reader_b, policy_b)) in sides.items():
            for band in contrast_bands(features, config):
                for outcome in ("all", "success", "failure"):
                    a = rows.pick(reader_a, policy_a, band, outcome)
                    b = rows.pick(reader_b, policy_b, band, outcome)
                    # Both sides of the representation part are the checkpoint's trajectories; it is drawn over the
                    # problems of the other two parts, or they would not add up.
                    among = rows.pick(base, base, band, outcome) if part == "representation" else b
                    among = rows.problem[among]
                    yield partial(_paired, rows, a, b, config, reader, part, band, outcome, among=among)


def _paired(
    rows: Rows,
    a: np.ndarray,
    b: np.ndarray,
    config: DiffConfig,
    checkpoint: str,
    part: str,
    band: str,
    outcome: str,
    *,
    among: np.ndarray | None = None,
) -> Contrast:
    """Side a − side b over the problems that both sides have, and that are `among` those given."""
    both = np.intersect1d(rows.problem[a], rows.problem[b])
    if among is not None:
        both = np.intersect1d(both, among)
    left_out = len(np.union1d(rows.problem[a], rows.problem[b])) - len(both)
    empty = Contrast("shift", checkpoint, part, band, outcome, len(both), left_out, np.empty(0, dtype=int))
    if config.within_prompt and part == "policy":
        return _refused(empty, _SAME_PROMPTS)
    if rows.bands_refused and band != "all":
        return _refused(empty, rows.bands_refused)
    if len(both) < config.min_problems:
        return _refused(
            empty,
            f"{len(both)} problems have such trajectories on both sides; {config.min_problems} are needed",
        )
    mean_a, mean_b = (side_means(rows.values, side, rows.problem, both) for side in (a, b))
    feature = active_features(config, mean_a, mean_b)
    if not len(feature):
        return _refused(empty, "no feature is active in enough problems")
    inference = paired_inference((mean_a - mean_b)[:, feature], **draws(config))
    reference = mean_b.mean(0)[feature]
    return replace(
        empty,
        feature=feature,
        inference=inference,
        mean_a=reference + inference.difference,
        mean_b=reference,
        auroc=within_problem_auroc(_columns(rows.columns, feature), a, b, rows.problem, both),
        detectable_d=_detectable(inference, (len(both),), config),
    )


def outcome_contrasts(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Draw]:
    """Success − failure within problem, for every reader and band."""
    for reader in features.readers:
        policy = rows.own(reader)
        for band in contrast_bands(features, config):
            picked = rows.pick(reader, policy, band, "all")
            yield partial(outcome_contrast, rows, picked, rows.outcome[picked], config, reader, band)


def outcome_contrast(
    rows: Rows, picked: np.ndarray, outcome: np.ndarray, config: DiffConfig, checkpoint: str, band: str
) -> Contrast:
    """Success − failure within problem over the given rows, with the given outcomes of these rows."""
    picked, outcome = picked[outcome != "unknown"], outcome[outcome != "unknown"]
    success = outcome == "success"
    problem = rows.problem[picked]
    both = np.intersect1d(problem[success], problem[~success])
    left_out = len(np.unique(problem)) - len(both)
    empty = Contrast(
        "outcome",
        checkpoint,
        "success_minus_failure",
        band,
        "all",
        len(both),
        left_out,
        np.empty(0, dtype=int),
    )
    if config.within_prompt:
        return _refused(empty, _SAME_PROMPTS)
    if rows.bands_refused and band != "all":
        return _refused(empty, rows.bands_refused)
    if len(both) < config.min_problems:
        return _refused(empty, f"{len(both)} problems have both outcomes; {config.min_problems} are needed")
    keep = np.isin(problem, both)
    picked, success = picked[keep], success[keep]
    sides = picked[success], picked[~success]
    mean_a, mean_b = (side_means(rows.values, side, rows.problem, both) for side in sides)
    feature = active_features(config, mean_a, mean_b)
    if not len(feature):
        return _refused(empty, "no feature is active in enough problems")
    code = np.searchsorted(both, rows.problem[picked])
    values = _columns(rows.values[picked], feature)
    inference = outcome_inference((mean_a - mean_b)[:, feature], values, success, code, **draws(config))
    reference = mean_b.mean(0)[feature]
    return replace(
        empty,
        feature=feature,
        inference=inference,
        mean_a=reference + inference.difference,
        mean_b=reference,
        auroc=within_problem_auroc(_columns(rows.columns, feature), *sides, rows.problem, both),
        detectable_d=_detectable(inference, (len(both),), config),
    )


def interaction_contrasts(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Draw]:
    """The outcome effect in the harder − in the easier of every two bands, for every reader."""
    for reader in features.readers:
        policy = reader if len(rows.by_reader.get((reader, reader), ())) else None
        for easier, harder in combinations(contrast_bands(features, config)[1:], 2):
            yield partial(_interaction, rows, policy, config, reader, harder, easier)


def _interaction(
    rows: Rows, policy: str | None, config: DiffConfig, checkpoint: str, harder: str, easier: str
) -> Contrast:
    mixed, left_out, picked = [], 0, {}
    for band in (harder, easier):
        success, failure = (rows.pick(checkpoint, policy, band, outcome) for outcome in ("success", "failure"))
        both = np.intersect1d(rows.problem[success], rows.problem[failure])
        left_out += len(np.union1d(rows.problem[success], rows.problem[failure])) - len(both)
        mixed.append(both)
        picked[band] = (success, failure)
    sizes = (len(mixed[0]), len(mixed[1]))
    empty = Contrast(
        "interaction",
        checkpoint,
        "success_minus_failure",
        f"{harder}-{easier}",
        "all",
        sum(sizes),
        left_out,
        np.empty(0, dtype=int),
    )
    if config.within_prompt:
        return _refused(empty, _SAME_PROMPTS)
    if rows.bands_refused:
        return _refused(empty, rows.bands_refused)
    for band, size in zip((harder, easier), sizes, strict=True):
        if size < config.min_problems:
            return _refused(
                empty, f"{size} problems of the band {band} have both outcomes; {config.min_problems} are needed"
            )
    means = [
        [side_means(rows.values, side, rows.problem, both) for side in picked[band]]
        for band, both in zip((harder, easier), mixed, strict=True)
    ]
    feature = active_features(config, *(np.concatenate(side) for side in zip(*means, strict=True)))
    if not len(feature):
        return _refused(empty, "no feature is active in enough problems")
    a, b = ((success - failure)[:, feature] for success, failure in means)
    inference = interaction_inference(a, b, **draws(config))
    return replace(
        empty,
        feature=feature,
        inference=inference,
        mean_a=a.mean(0),
        mean_b=b.mean(0),
        auroc=_auroc_between(a, b),
        detectable_d=_detectable(inference, sizes, config),
    )


def _auroc_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n_features,) Mann–Whitney U of the problems of a against those of b / (n_a · n_b)."""
    ranks = rankdata(np.concatenate([a, b]), axis=0)
    return (ranks[: len(a)].sum(0) - len(a) * (len(a) + 1) / 2) / (len(a) * len(b))


def draws(config: DiffConfig) -> dict[str, Any]:
    return {
        "n_bootstrap": config.n_bootstrap,
        "n_permutations": config.n_permutations,
        "confidence": config.confidence,
        "seed": config.seed,
        "q": config.q,
        "method": config.fdr,
    }


def _detectable(inference: Inference, sizes: tuple[int, ...], config: DiffConfig) -> float:
    return detectable_d(
        sizes,
        q=config.q,
        n_tested=len(inference.q),
        n_discoveries=int((inference.q <= config.q).sum()),
        method=config.fdr,
    )


def _is_pooled(
    features: FeatureTable,
    by_reader: dict[tuple[str, str | None], np.ndarray],
    problem: np.ndarray,
    config: DiffConfig,
) -> bool:
    """Whether all readers read the same trajectories, and none can be paired as the base's and a checkpoint's own."""
    base, *others = features.readers
    if len(np.unique(problem)) < config.min_problems:
        return False
    read = np.sort(features.trajectory[by_reader[base, None]])
    for reader in others:
        if not np.array_equal(np.sort(features.trajectory[by_reader[reader, None]]), read):
            return False
        both = np.intersect1d(problem[by_reader[reader, reader]], problem[by_reader[base, base]])
        if len(both) >= config.min_problems:
            return False
    return True


def active_features(config: DiffConfig, *means: np.ndarray) -> np.ndarray:
    """Features active in at least min_problems problems, on any side: a filter blind to the contrast's sign.

    Args:
        config: min_problems.
        means: (n_problems, n_features) means of each side, of activations that are not negative.
    """
    active = np.logical_or.reduce([side > 0 for side in means])
    return np.flatnonzero(active.sum(0) >= config.min_problems)


def _columns(values: Sparse, feature: np.ndarray) -> Sparse:
    """The features' columns; all are not copied."""
    return values if len(feature) == values.shape[1] else values[:, feature]


def _refused(empty: Contrast, note: str) -> Contrast:
    return replace(empty, note=note)
