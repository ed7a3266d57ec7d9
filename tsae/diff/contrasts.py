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

Three steps, so that a contrast and whatever is said about it rest on the same rows: `Rows` holds what each row is,
`comparisons` lists which rows are set against which, and `draw` computes. Controls, nulls and plain directions take the
same `Comparison`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.power import detectable_delta
from tsae.diff.statistics import (
    Draws,
    Inference,
    Tested,
    infer,
    interaction,
    outcomes,
    paired,
    side_means,
    within_problem_auroc,
)
from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.rollouts.table import BANDS

Sparse = TypeVar("Sparse", sp.csr_array, sp.csc_array)
_SAME_PROMPTS = "both sides read the same prompts with the same checkpoint"
SHIFT_PARTS = ("total", "policy", "representation", "same_trajectories")
MAIN_PARTS = ("total", "same_trajectories")
OUTCOME_PART = "success_minus_failure"


def main_part(parts: Mapping[str, str]) -> str | None:
    """The shift that speaks for a checkpoint: total, or same_trajectories where that cannot be drawn.

    Args:
        parts: for every part of its shift over all problems why it was not drawn, "" where it was.
    """
    present = [part for part in MAIN_PARTS if part in parts]
    return next((part for part in present if not parts[part]), present[0] if present else None)


class Scale(NamedTuple):
    """What Δ of a checkpoint's contrasts is measured in."""

    deviation: np.ndarray
    """(n_features,) standard deviation over base trajectories; where silent, pooled with the checkpoint's."""
    silent: np.ndarray
    """(n_features,) bool: at base active in fewer than min_problems problems, or the same in all trajectories."""


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
    n_tokens: np.ndarray
    """(n_rows,) tokens of the span."""
    by_reader: dict[tuple[str, str | None], np.ndarray]
    """Rows of (reader, policy); of all policies under (reader, None)."""
    pooled: bool
    """Whether who sampled a trajectory makes no difference: readers share no problems, only what they read."""
    scales: dict[str, Scale]
    """Of every reader."""

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
        counted = features.row_of_token[features.span_mask(config.span)]
        rows = cls(
            values=values,
            columns=sp.csc_array(values),
            problem=problem,
            band=frame.band.to_numpy(dtype=object),
            outcome=frame.outcome.to_numpy(dtype=object),
            n_tokens=np.bincount(counted, minlength=features.n_rows),
            by_reader=by_reader,
            pooled=_is_pooled(features, by_reader, problem, config),
            scales={},
        )
        return replace(rows, scales=_scales(rows, features.readers, config))

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


def _scales(rows: Rows, readers: list[str], config: DiffConfig) -> dict[str, Scale]:
    """The deviation over base trajectories; of a feature that the base hardly has, pooled with the checkpoint's."""
    own = {reader: rows.by_reader[reader, rows.own(reader)] for reader in readers}
    base = own[readers[0]]
    problems = np.unique(rows.problem[base])
    active = (side_means(rows.values, base, rows.problem, problems) > 0).sum(0)
    variance = {r: _variance(rows.values[own[r]]) for r in readers}
    silent = (active < config.min_problems) | (variance[readers[0]] == 0)
    found = {}
    for reader in readers:
        freedom = [max(len(own[r]) - 1, 0) for r in (readers[0], reader)]
        both = [variance[r] for r in (readers[0], reader)]
        pooled = (freedom[0] * both[0] + freedom[1] * both[1]) / max(sum(freedom), 1)
        found[reader] = Scale(np.sqrt(np.where(silent, pooled, both[0])), silent)
    return found


def _variance(values: sp.csr_array) -> np.ndarray:
    """(n_features,) variance over rows, by n − 1; 0 where rounding is all there is."""
    n = values.shape[0]
    if n < 2:
        return np.zeros(values.shape[1])
    exact = values.astype(np.float64)
    mean, square = np.asarray(exact.mean(0)).ravel(), np.asarray(exact.multiply(exact).mean(0)).ravel()
    variance = (square - mean**2) * n / (n - 1)
    return np.where(variance > 1e-9 * square, variance, 0.0)


@dataclass(frozen=True)
class Comparison:
    """Which rows are set against which: what a contrast, its controls, its null and its plain directions rest on."""

    kind: str
    """"shift", "outcome" or "interaction"."""
    checkpoint: str
    part: str
    band: str
    outcome: str
    a: np.ndarray
    """Rows of the first side: the checkpoint's, or successes; of an interaction those of its two bands."""
    b: np.ndarray
    """Rows of the second side: the base's, or failures."""
    problems: np.ndarray
    """Codes of the problems that count: each has rows on both sides."""
    n_left_out: int
    """Problems of the band that lack one of the two sides."""
    bands: tuple[Comparison, Comparison] | None = None
    """Of an interaction, the outcomes that are compared: of the harder band, and of the easier."""
    note: str = ""
    """Why nothing is drawn."""

    @property
    def key(self) -> dict[str, str]:
        """Columns that tell it from others."""
        return {name: getattr(self, name) for name in ("kind", "checkpoint", "part", "band", "outcome")}

    @property
    def rows(self) -> np.ndarray:
        """Rows of both sides."""
        return np.union1d(self.a, self.b)

    @property
    def fingerprint(self) -> str:
        """Names the rows: equal for whatever rests on the same sides, empty where there are none."""
        if self.bands is not None:
            return "+".join(band.fingerprint for band in self.bands)
        if not len(self.problems):
            return ""
        digest = hashlib.sha256(np.sort(self.a).astype(np.int64).tobytes())
        digest.update(b"|" + np.sort(self.b).astype(np.int64).tobytes())
        return digest.hexdigest()[:12]

    @property
    def n_problems(self) -> int:
        """Problems that count; of an interaction, of its two bands together."""
        return len(self.problems) if self.bands is None else sum(len(band.problems) for band in self.bands)


@dataclass(frozen=True)
class Contrast:
    """One comparison drawn over all features, or the reason why it was not."""

    of: Comparison
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
    detectable_delta: float = np.nan
    """The |Δ| that is found 8 times in 10 (`tsae.diff.power`)."""
    note: str = ""


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


def comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> list[Comparison]:
    """All shifts, then all outcome effects, then all interactions."""
    effects = list(outcome_comparisons(features, rows, config))
    shifts = shift_comparisons(features, rows, config)
    between = (_unless_refused(features, found) for found in interaction_comparisons(effects, config))
    return [*shifts, *effects, *between]


def main_comparisons(found: Sequence[Comparison], checkpoint: str) -> list[Comparison]:
    """Of a checkpoint, what its report speaks of first: its main shift in every band, and its outcome effects."""
    shifts = [of for of in found if of.kind == "shift" and of.checkpoint == checkpoint and of.outcome == "all"]
    part = main_part({of.part: of.note for of in shifts if of.band == "all"})
    outcomes = [of for of in found if of.kind == "outcome" and of.checkpoint == checkpoint]
    return [*(of for of in shifts if of.part == part), *outcomes]


def shift_comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Comparison]:
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
                    found = _compare(rows, "shift", reader, part, band, outcome, a, b, among)
                    if config.within_prompt and part == "policy":
                        found = replace(found, note=_SAME_PROMPTS)
                    elif found.n_problems < config.min_problems:
                        have = f"{found.n_problems} problems have such trajectories on both sides"
                        found = replace(found, note=f"{have}; {config.min_problems} are needed")
                    yield _unless_refused(features, found)


def outcome_comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Comparison]:
    """Success − failure within problem, for every reader and band."""
    for reader in features.readers:
        policy = rows.own(reader)
        for band in contrast_bands(features, config):
            a, b = (rows.pick(reader, policy, band, outcome) for outcome in ("success", "failure"))
            yield _unless_refused(features, outcome_comparison(rows, a, b, reader, band, config))


def outcome_comparison(
    rows: Rows, success: np.ndarray, failure: np.ndarray, checkpoint: str, band: str, config: DiffConfig
) -> Comparison:
    """Successes against failures of the same problems, both rows of the checkpoint."""
    found = _compare(rows, "outcome", checkpoint, OUTCOME_PART, band, "all", success, failure)
    if config.within_prompt:
        return replace(found, note=_SAME_PROMPTS)
    if found.n_problems < config.min_problems:
        have = f"{found.n_problems} problems have both outcomes"
        return replace(found, note=f"{have}; {config.min_problems} are needed")
    return found


def interaction_comparisons(outcomes: list[Comparison], config: DiffConfig) -> Iterator[Comparison]:
    """The outcome effect in the harder − in the easier of every two bands, for every reader."""
    by_reader: dict[str, list[Comparison]] = {}
    for found in outcomes:
        if found.band != "all":
            by_reader.setdefault(found.checkpoint, []).append(found)
    for reader, of_bands in by_reader.items():
        for easier, harder in combinations(of_bands, 2):
            short = [part for part in (harder, easier) if part.note]
            note = ""
            if config.within_prompt:
                note = _SAME_PROMPTS
            elif short:
                few = [f"{part.n_problems} problems of the band {part.band}" for part in short]
                note = f"{' and '.join(few)} have both outcomes; {config.min_problems} are needed"
                note = next((part.note for part in short if part.n_problems >= config.min_problems), note)
            yield Comparison(
                kind="interaction",
                checkpoint=reader,
                part=OUTCOME_PART,
                band=f"{harder.band}-{easier.band}",
                outcome="all",
                a=np.concatenate([harder.a, easier.a]),
                b=np.concatenate([harder.b, easier.b]),
                problems=np.union1d(harder.problems, easier.problems),
                n_left_out=harder.n_left_out + easier.n_left_out,
                bands=(harder, easier),
                note=note,
            )


def _compare(
    rows: Rows,
    kind: str,
    checkpoint: str,
    part: str,
    band: str,
    outcome: str,
    a: np.ndarray,
    b: np.ndarray,
    among: np.ndarray | None = None,
) -> Comparison:
    """a against b over the problems that both have, and that are those of the rows `among` which are given."""
    both = np.intersect1d(rows.problem[a], rows.problem[b])
    if among is not None:
        both = np.intersect1d(both, rows.problem[among])
    left_out = len(np.union1d(rows.problem[a], rows.problem[b])) - len(both)
    a, b = (side[np.isin(rows.problem[side], both)] for side in (a, b))
    return Comparison(kind, checkpoint, part, band, outcome, a, b, both, left_out)


def _unless_refused(features: FeatureTable, found: Comparison) -> Comparison:
    """A comparison within a band is not drawn where the bands say themselves that they cannot be told from steps."""
    refused = (features.rollouts.info.get("bands") or {}).get("refused")
    return replace(found, note=refused) if refused and found.band != "all" else found


def draw(rows: Rows, of: Comparison, config: DiffConfig) -> Contrast:
    """The contrast of a comparison, over all features that are active in enough of its problems."""
    empty = Contrast(of, np.empty(0, dtype=int), note=of.note)
    if of.note:
        return empty
    effects = [problem_effects(rows, part) for part in of.bands or (of,)]
    feature = tested_features(rows, of, effects, config)
    if not len(feature):
        return replace(empty, note="no feature is active in enough problems")
    inference = infer(question(rows, of, effects, feature, config), draws(config))
    if of.bands is None:
        reference = effects[0].b.mean(0)[feature]
        mean = reference + inference.difference
        auroc = within_problem_auroc(_columns(rows.columns, feature), of.a, of.b, rows.problem, of.problems)
    else:
        a, b = ((effect.a - effect.b)[:, feature] for effect in effects)
        mean, reference, auroc = a.mean(0), b.mean(0), _auroc_between(a, b)
    return Contrast(of, feature, inference, mean, reference, auroc, _detectable(inference, of, config))


class Effects(NamedTuple):
    """(n_problems, n_features) means of the two sides of a comparison."""

    a: np.ndarray
    b: np.ndarray


def problem_effects(rows: Rows, of: Comparison) -> Effects:
    """Means of both sides in every problem."""
    return Effects(*(side_means(rows.values, side, rows.problem, of.problems) for side in (of.a, of.b)))


def tested_features(rows: Rows, of: Comparison, effects: list[Effects], config: DiffConfig) -> np.ndarray:
    """Features active in at least min_problems problems, on any side, that vary: blind to the contrast's sign."""
    a, b = (np.concatenate(side) for side in zip(*effects, strict=True))
    active = active_features(config, a, b)
    return active[rows.scales[of.checkpoint].deviation[active] > 0]


def question(rows: Rows, of: Comparison, effects: list[Effects], feature: np.ndarray, config: DiffConfig) -> Tested:
    """What is asked of the given features."""
    scale, seed = rows.scales[of.checkpoint].deviation[feature], config.seed
    first, *others = ((effect.a - effect.b)[:, feature] for effect in effects)
    if others:
        return interaction(first, others[0], scale, seed)
    if of.kind == "shift":
        return paired(first, scale, seed)
    picked = np.concatenate([of.a, of.b])
    code = np.searchsorted(of.problems, rows.problem[picked])
    success = np.arange(len(picked)) < len(of.a)
    return outcomes(first, scale, _columns(rows.values[picked], feature), success, code, seed)


def draws(config: DiffConfig) -> Draws:
    return Draws(
        n_bootstrap=config.n_bootstrap,
        n_permutations=config.n_permutations,
        confidence=config.confidence,
        seed=config.seed,
        minimum_effect=config.minimum_effect,
        q=config.q,
        method=config.fdr,
    )


def _auroc_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n_features,) Mann–Whitney U of the problems of a against those of b / (n_a · n_b)."""
    ranks = rankdata(np.concatenate([a, b]), axis=0)
    return (ranks[: len(a)].sum(0) - len(a) * (len(a) + 1) / 2) / (len(a) * len(b))


def _detectable(inference: Inference, of: Comparison, config: DiffConfig) -> float:
    return detectable_delta(
        tuple(len(part.problems) for part in of.bands or (of,)),
        float(np.median(inference.error)),
        minimum_effect=config.minimum_effect,
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
