"""The rows of a feature table, and which of them are compared with which.

`Rows` says what each row is, and has the unit of Δ. `comparisons` lists the comparisons that `tsae.diff.effects` draws.
`side_means` and `problem_aurocs` give one number for every problem and feature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.diff.config import DiffConfig
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import Columns, columns_of, grouped_sums, row_blocks
from tsae.features.sparse_matrices import Rows as Matrix
from tsae.rollouts.bands import bands_info
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_ROWS = 512  # whose squares are summed at once


class Scale(NamedTuple):
    """The unit of Δ in a checkpoint's contrasts: a standard deviation, with a floor.

    The deviation is that over base trajectories. A feature that is *silent* at base (active in fewer than min_problems
    of the base's problems, or with the same mean in all of its trajectories) says too little of it there: its deviation
    is pooled with that over the checkpoint's trajectories.

    The floor is half of the deviation over the trajectories of both, as many of either. So a feature that the base has
    with almost no variance gets no Δ of hundreds: between the two means m₀ and m₁, the deviation over both is at least
    |m₁ − m₀| / 2, and |Δ| at most 4.
    """

    deviation: np.ndarray
    """(n_features,)"""
    kind: np.ndarray
    """(n_features,) base, pooled or floored: which of the three it is."""


@dataclass(frozen=True)
class Rows:
    """What contrasts need of every row of a FeatureTable."""

    values: Matrix
    """(n_rows, n_features) mean activation over the span; 0 for a row without a token of it."""
    columns: Columns
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
    """Rows of (reader, policy) that have a token of the span; of all policies under (reader, None)."""
    pooled: bool
    """Whether all trajectories count as one policy's: all readers read the same ones, and their own trajectories share
    too few problems to be compared."""
    scales: dict[str, Scale]
    """By reader."""

    @classmethod
    def of(cls, features: FeatureTable, config: DiffConfig) -> Rows:
        """The rows of a table, over the config's span.

        Raises:
            TsaeError: where a mean activation is not a finite number.
        """
        frame = features.rollouts.frame.iloc[features.trajectory]
        n_tokens = features.counts(features.span_mask(config.span))
        by_reader: dict[tuple[str, str | None], np.ndarray] = {}
        for reader in features.readers:
            # The base reads what every run sampled; every other reader the base's trajectories and its own.
            policies = features.readers if reader == features.readers[0] else (features.readers[0], reader)
            for policy in (None, *policies):
                found = features.rows(reader=reader, policy=policy)
                by_reader[reader, policy] = found[n_tokens[found] > 0]
        problem = pd.factorize(frame.problem_id)[0]
        values = features.row_means(config.span)
        _need_finite(values, features.origin)
        rows = cls(
            values=values,
            columns=columns_of(values),
            problem=problem,
            band=frame.band.to_numpy(dtype=object),
            outcome=frame.outcome.to_numpy(dtype=object),
            n_tokens=n_tokens,
            by_reader=by_reader,
            pooled=_is_pooled(features, by_reader, problem, config),
            scales={},
        )
        own = [by_reader[reader, rows.own(reader)] for reader in features.readers]
        return replace(rows, scales=dict(zip(features.readers, scales(rows, own[0], own, config), strict=True)))

    def own(self, reader: str) -> str | None:
        """The policy whose trajectories count as a reader's: its own, or None for all."""
        return reader if not self.pooled and len(self.by_reader[reader, reader]) else None

    def of_features(self, some: np.ndarray) -> Rows:
        """The same rows with some features only, in memory."""
        columns = sp.csc_array(self.columns[:, some])
        scales = {reader: Scale(*(each[some] for each in scale)) for reader, scale in self.scales.items()}
        return replace(self, values=sp.csr_array(columns), columns=columns, scales=scales)

    def without_tokens(self, features: FeatureTable) -> dict[str, int]:
        """Number of trajectories without a token of the span, by reader; readers with none are left out."""
        empty = {id: int((self.n_tokens[features.rows(reader=id)] == 0).sum()) for id in features.readers}
        return {id: n for id, n in empty.items() if n}

    def pick(self, reader: str, policy: str | None, band: str, outcome: str) -> np.ndarray:
        rows = self.by_reader[reader, policy]
        if band != "all":
            rows = rows[self.band[rows] == band]
        if outcome != "all":
            rows = rows[self.outcome[rows] == outcome]
        return rows


def _need_finite(values: Matrix, where: str | Path) -> None:
    """Refuse NaN and infinity: no draw is as extreme as these, so that their p would be as small as can be."""
    for _, block in row_blocks(values):
        finite = np.isfinite(block.data)
        if not finite.all():
            feature = int(block.indices[~finite][0])
            raise TsaeError(f"the codes of feature {feature} are not finite", where=where, fix="Encode again.")


def scales(rows: Rows, base: np.ndarray, others: Sequence[np.ndarray], config: DiffConfig) -> list[Scale]:
    """The unit of Δ for each of the others; see `Scale`."""
    problems = np.unique(rows.problem[base])
    active = (side_means(rows.values, base, rows.problem, problems) > 0).sum(0)
    base_mean, of_base = _moments(rows.values, base)
    silent = (active < config.min_problems) | (of_base == 0)
    found = []
    for other in others:
        mean, of_other = (base_mean, of_base) if np.array_equal(other, base) else _moments(rows.values, other)
        freedom = [max(len(side) - 1, 0) for side in (base, other)]
        pooled = (freedom[0] * of_base + freedom[1] * of_other) / max(sum(freedom), 1)
        variance = np.where(silent, pooled, of_base)
        floor = ((of_base + of_other) / 2 + np.square(mean - base_mean) / 4) / 4 if len(other) else 0.0
        kind = np.where(floor > variance, "floored", np.where(silent, "pooled", "base"))
        found.append(Scale(np.sqrt(np.maximum(variance, floor)), kind))
    return found


def _moments(values: Matrix, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n_features,) mean and variance over some rows, by n − 1; a variance that is only rounding is 0."""
    n = len(rows)
    total, square = np.zeros((2, values.shape[1]))
    if n < 2:
        return total, square
    for start in range(0, n, _ROWS):
        block = values[rows[start : start + _ROWS]]
        data = block.data.astype(np.float64)
        total += np.bincount(block.indices, weights=data, minlength=len(total))
        square += np.bincount(block.indices, weights=data * data, minlength=len(total))
    mean, square = total / n, square / n
    variance = (square - mean**2) * n / (n - 1)
    return mean, np.where(variance > 1e-9 * square, variance, 0.0)


def _is_pooled(
    features: FeatureTable, by_reader: dict[tuple[str, str | None], np.ndarray], problem: np.ndarray, config: DiffConfig
) -> bool:
    """Whether all readers read the same trajectories, and no checkpoint's own share enough problems with the base's."""
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


_SAME_PROMPTS = "both sides read the same prompts with the same checkpoint"
CONTRAST = ("kind", "checkpoint", "part", "band", "outcome")
"""Columns that tell one comparison from another."""
MAIN_PARTS = ("total", "same_trajectories")
OUTCOME_PART = "success_minus_failure"


@dataclass(frozen=True)
class Comparison:
    """Two sides of rows. A contrast, its controls, its null and its baselines all rest on the same one."""

    kind: str
    """"shift", "outcome" or "interaction"."""
    checkpoint: str
    part: str
    band: str
    outcome: str
    a: np.ndarray
    """Rows of the first side: the checkpoint's, or successes; of an interaction, those of both bands."""
    b: np.ndarray
    """Rows of the second side: the base's, or failures."""
    problems: np.ndarray
    """Codes of the problems that count: each has rows on both sides."""
    n_left_out: int
    """Problems of the band that lack one of the two sides."""
    bands: tuple[Comparison, Comparison] | None = None
    """Of an interaction: the outcome comparisons of the harder and of the easier band."""
    note: str = ""
    """Why nothing is drawn, or ""."""

    @property
    def key(self) -> dict[str, str]:
        """The columns `CONTRAST`."""
        return {name: getattr(self, name) for name in CONTRAST}

    @property
    def rows(self) -> np.ndarray:
        """Rows of both sides."""
        return np.union1d(self.a, self.b)

    @property
    def fingerprint(self) -> str:
        """A name of the rows, the same for the same two sides; empty without rows."""
        if self.bands is not None:
            return "+".join(band.fingerprint for band in self.bands)
        if not len(self.problems):
            return ""
        digest = hashlib.sha256(np.sort(self.a).astype(np.int64).tobytes())
        digest.update(b"|" + np.sort(self.b).astype(np.int64).tobytes())
        return digest.hexdigest()[:12]

    @property
    def n_problems(self) -> int:
        """Problems that count; of an interaction, in both bands together."""
        return len(self.problems) if self.bands is None else sum(len(band.problems) for band in self.bands)


def main_part(parts: Mapping[str, str]) -> str | None:
    """Choose the part that stands for a checkpoint's shift: total, or same_trajectories if total cannot be drawn.

    Args:
        parts: by part of its shift over all problems, why it was not drawn, or "".
    """
    present = [part for part in MAIN_PARTS if part in parts]
    return next((part for part in present if not parts[part]), present[0] if present else None)


def contrast_bands(rollouts: Rollouts, config: DiffConfig, where: str | Path) -> list[str]:
    """Return "all", then the bands that are asked for or present; `where` is named where one is missing.

    Raises:
        TsaeError: where a band that is asked for has no problems.
    """
    band = set(rollouts.table["band"].to_pylist()) - {None}
    wanted = list(config.bands) if config.bands is not None else [b for b in BANDS if b in band]
    for name in wanted:
        if name not in band:
            what = f"no problem is in the band {name!r}; the rollouts have {', '.join(sorted(band)) or 'no bands'}"
            fix = "Measure bands first (`tsae rollouts bands`), or leave that band out."
            raise TsaeError(what, where=where, fix=fix)
    return ["all", *wanted]


def comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> list[Comparison]:
    """Every comparison of a diff: shifts first, then outcome effects, then interactions."""
    effects = list(outcome_comparisons(features, rows, config))
    shifts = shift_comparisons(features, rows, config)
    between = (_unless_refused(features, found) for found in interaction_comparisons(effects, config))
    return [*shifts, *effects, *between]


def main_comparisons(found: Sequence[Comparison], checkpoint: str) -> list[Comparison]:
    """A checkpoint's main shift in every band, and its outcome effects: the comparisons that a report leads with."""
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
            # In logs of other policies or other problems, only what all readers read can be compared.
            sides = {"same_trajectories": ((reader, None), (base, None))}
        elif len(rows.by_reader[reader, reader]) == 0:
            sides = {"same_trajectories": sides["same_trajectories"]}
        for part, ((reader_a, policy_a), (reader_b, policy_b)) in sides.items():
            for band in contrast_bands(features.rollouts, config, features.origin):
                for outcome in ("all", "success", "failure"):
                    a = rows.pick(reader_a, policy_a, band, outcome)
                    b = rows.pick(reader_b, policy_b, band, outcome)
                    # Both sides of the representation part are the checkpoint's trajectories. It is drawn over the
                    # problems of the other two parts: otherwise the parts would not add up.
                    among = rows.pick(base, base, band, outcome) if part == "representation" else b
                    found = _compare(rows, "shift", reader, part, band, outcome, a, b, among)
                    note = _too_few(found, "such trajectories on both sides", config)
                    found = replace(found, note=_SAME_PROMPTS if config.within_prompt and part == "policy" else note)
                    yield _unless_refused(features, found)


def outcome_comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Comparison]:
    """Success − failure within problem, for every reader and band."""
    for reader in features.readers:
        policy = rows.own(reader)
        for band in contrast_bands(features.rollouts, config, features.origin):
            a, b = (rows.pick(reader, policy, band, outcome) for outcome in ("success", "failure"))
            yield _unless_refused(features, outcome_comparison(rows, a, b, reader, band, config))


def outcome_comparison(
    rows: Rows, success: np.ndarray, failure: np.ndarray, checkpoint: str, band: str, config: DiffConfig
) -> Comparison:
    """Successes against failures of the same problems, both rows of the checkpoint."""
    found = _compare(rows, "outcome", checkpoint, OUTCOME_PART, band, "all", success, failure)
    note = _SAME_PROMPTS if config.within_prompt else _too_few(found, "both outcomes", config)
    return replace(found, note=note)


def interaction_comparisons(outcomes: list[Comparison], config: DiffConfig) -> Iterator[Comparison]:
    """The outcome effect in the harder − in the easier of every two bands, for every reader."""
    for easier, harder in combinations([found for found in outcomes if found.band != "all"], 2):
        if easier.checkpoint != harder.checkpoint:
            continue
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
            checkpoint=harder.checkpoint,
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
    """Compare rows a with rows b on the problems that both have, and that the rows `among` have."""
    both = np.intersect1d(rows.problem[a], rows.problem[b])
    if among is not None:
        both = np.intersect1d(both, rows.problem[among])
    left_out = len(np.union1d(rows.problem[a], rows.problem[b])) - len(both)
    a, b = (side[np.isin(rows.problem[side], both)] for side in (a, b))
    return Comparison(kind, checkpoint, part, band, outcome, a, b, both, left_out)


def _too_few(found: Comparison, what: str, config: DiffConfig) -> str:
    if found.n_problems >= config.min_problems:
        return ""
    return f"{found.n_problems} problems have {what}; {config.min_problems} are needed"


def _unless_refused(features: FeatureTable, found: Comparison) -> Comparison:
    """Refuse a comparison within a band if the bands' info says that they cannot be told from training steps."""
    refused = (bands_info(features.rollouts.info, features.rollouts.origin) or {}).get("refused")
    return replace(found, note=refused) if refused and found.band != "all" else found


_AUROC_BYTES = 2_000_000  # of dense values at once, to stay in a core's cache


def group_difference(
    values: Matrix, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """(n_problems, n_features) mean over the problem's rows in a − mean over those in b; see `side_means`."""
    return side_means(values, a, problem, problems) - side_means(values, b, problem, problems)


def difference_weights(a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """(n_rows,) weights under which the rows' values add up to the mean over problems of `group_difference`."""
    weights = np.zeros(len(problem))
    for sign, side in ((1.0, a), (-1.0, b)):
        rows, where = _of_problems(side, problem, problems)
        weights[rows] += sign / (np.bincount(where, minlength=len(problems))[where] * len(problems))
    return weights


def side_means(values: Matrix, rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """(n_problems, n_features) mean over the given rows of every problem.

    Args:
        values: (n_rows, n_features).
        rows: of one side.
        problem: (n_rows,) problem code of every row.
        problems: codes of the problems to use; each has such rows.
    """
    rows, where = _of_problems(rows, problem, problems)
    weight = 1.0 / np.bincount(where, minlength=len(problems))[where]
    return grouped_sums(values, rows, where, weight, len(problems))


def some_columns(values: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Columns of (n, n_features) values, without a copy where these are all; features in order, each once."""
    return values if len(features) == values.shape[1] else values[:, features]


def _of_problems(rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that belong to the problems, and the index of each one's problem among these."""
    position = np.full(int(problem.max()) + 1, -1)
    position[problems] = np.arange(len(problems))
    where = position[problem[rows]]
    return rows[where >= 0], where[where >= 0]


def within_problem_auroc(
    columns: Columns, feature: np.ndarray, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over problems of `problem_aurocs`, and of the share of each side's rows in which a feature is active.

    Returns:
        three (n_features,), of some columns.
    """
    block = max(1, _AUROC_BYTES // (4 * columns.shape[0]))
    found = []
    for start in range(0, len(feature), block):
        dense = columns[:, feature[start : start + block]].toarray()
        shares = [_active_share(dense, side, problem, problems) for side in (a, b)]
        found.append((problem_aurocs(dense, a, b, problem, problems).mean(0), *shares))
    auroc, active_a, active_b = map(np.concatenate, zip(*found, strict=True))
    return auroc, active_a, active_b


def _active_share(dense: np.ndarray, side: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    rows, where = _of_problems(side, problem, problems)
    weight = 1 / (np.bincount(where, minlength=len(problems))[where] * len(problems))
    return np.asarray(weight @ (dense[rows] > 0))


def problem_aurocs(
    dense: np.ndarray, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """Chance that a trajectory of side a has a larger value than one of side b of the same problem; ties count half.

    Returns:
        (n_problems, n_features), .5 if the sides do not differ. Arguments are as in `group_difference`.
    """
    sides, pairs = [], np.ones(len(problems))
    for rows in (a, b):
        rows, where = _of_problems(rows, problem, problems)
        order = np.argsort(where, kind="stable")
        rows, where = rows[order], where[order]
        size = np.bincount(where, minlength=len(problems))
        slot = np.arange(len(rows)) - (size.cumsum() - size)[where]
        # NaN is neither larger nor smaller than any value.
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
