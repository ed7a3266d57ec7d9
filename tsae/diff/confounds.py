"""Confounds: does an effect survive what else differs between the two sides?

Three controls, each again a difference per problem, with the intervals of every contrast:

- *length*: trajectories are compared with those of the same problem and of similar length (same half-octave);
- *position*: tokens are compared with those of the same problem at similar positions (same half-octave);
- *token*: every feature minus its mean given the token's id, estimated on the other half of the problems. What is left
  is not lexical. Ids that the other half lacks are expected to have the feature's mean over all tokens.

In the matched controls, a problem's cells count by the smaller of their two sides. Cells with one side only are left
out, and so are problems without a common cell. `kept` is the controlled effect / the plain effect *of the same
problems*: other problems may have another effect, with or without a control. An effect survives if the controlled
interval excludes 0 on the side of the effect and at least half of the effect is left: similar lengths are not equal
lengths, and a clear feature shows what remains. If the comparable problems do not show half of the effect even without
the control, they cannot tell.

Nor can length where it is the same variable as a style: if length alone says which responses show a behaviour (AUROC of
.95 or more), responses of like length are responses of one style, and a feature of the style cannot survive. Such a
feature is not refuted; the verdict is "cannot tell". `overlap` says how much there is to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from einops import rearrange, reduce
from scipy.stats import mannwhitneyu

from tsae.base.statistics import group_interval
from tsae.diff.comparisons import CONTRAST, Comparison, Rows, difference_weights, group_difference, some_columns
from tsae.diff.config import DiffConfig
from tsae.diff.effects import Contrast
from tsae.diff.threads import in_threads
from tsae.features.contexts import id_codes
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import grouped_sums, no_code, stretches, sums_by_code, weighted_sums
from tsae.rollouts.behaviours import measures

CONTROLS = ("length", "position", "token")
SURVIVES, FAILS, TOO_FEW, NOT_MEASURED = "survives", "does not survive", "too few problems", "not measured"
CANNOT_TELL = "cannot tell"
_ONE_VARIABLE = 0.95  # AUROC of length for a style
_RARE = 0.02  # A style that fewer responses show, or lack, is not what differs.
_NUMBERS = ("difference", "low", "high", "n_problems", "plain", "kept", "verdict")
_OF_LENGTH = ("style", "style_auroc", "overlap")
_KEPT = 0.5
_SHOWN = 0.5  # of the effect, that the comparable problems show without the control
_OFTEN = 0.1  # of the problems have a token id, from which on a dense product is faster than a sparse one
_IDS = 4096  # token ids whose frequencies are made dense at once
_TOKENS = 100_000  # that are gathered at once
_DENSE_BYTES = 64_000_000  # of all frequencies
_CONTROLLED = ("total", "success_minus_failure")


def confound_table(
    features: FeatureTable, rows: Rows, contrasts: Sequence[Contrast], config: DiffConfig
) -> pd.DataFrame:
    """Apply every control to the total shifts and outcome effects, for all features that were tested there.

    Returns:
        the contrast's keys, rows (as in the contrast table) and feature, control, the controlled difference with its
        interval (NaN if too few problems are comparable), n_problems that are comparable, plain (their difference
        without the control), kept (controlled / plain, 0 if plain is 0) and verdict. Of the length control also style:
        the behaviour that length tells best, style_auroc: how well, and overlap: the share of responses that have one
        of like length to the same problem on the other side.
    """
    tokens, styles = _Tokens.of(features, config), _styles(features)
    drawn = [c for c in contrasts if c.inference is not None and c.of.outcome == "all" and c.of.part in _CONTROLLED]
    wanted = [(contrast, control) for contrast in drawn for control in CONTROLS]
    jobs = [partial(_control, features, rows, tokens, styles, *each, config) for each in wanted]
    parts = list(in_threads(jobs, config.threads))
    empty = pd.DataFrame(columns=[*CONTRAST, "feature", "control", *_NUMBERS, "rows", *_OF_LENGTH])
    return pd.concat(parts, ignore_index=True) if parts else empty


@dataclass(frozen=True)
class _Tokens:
    """The tokens that count."""

    mask: np.ndarray
    """(n_tokens,) bool."""
    length: np.ndarray
    """(n_rows,) how many tokens of a row count."""
    number: np.ndarray
    """Of every token id its index among those that occur, 0 … n_ids − 1."""
    n_ids: int

    @classmethod
    def of(cls, features: FeatureTable, config: DiffConfig) -> _Tokens:
        mask = features.span_mask(config.span)
        ids, number = id_codes(features.token_ids, mask)
        return cls(mask, features.counts(mask), number, len(ids))

    def of_rows(self, features: FeatureTable, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Counted tokens, some rows at a time; beside each token, the place of its row in `rows`."""
        for low, high in stretches(self.length[rows], _TOKENS):
            starts, stops = features.row_offsets[rows[low:high]], features.row_offsets[rows[low:high] + 1]
            bounds = zip(starts.tolist(), stops.tolist(), strict=True)
            found = np.concatenate([start + np.flatnonzero(self.mask[start:stop]) for start, stop in bounds])
            yield found, np.repeat(np.arange(low, high), self.length[rows[low:high]])


def _half_octave(n: np.ndarray) -> np.ndarray:
    return np.floor(2 * np.log2(np.maximum(n, 1))).astype(int)


def _control(
    features: FeatureTable,
    rows: Rows,
    tokens: _Tokens,
    styles: pd.DataFrame,
    contrast: Contrast,
    control: str,
    config: DiffConfig,
) -> pd.DataFrame:
    """A row a feature that the contrast tested."""
    assert contrast.inference is not None
    of, feature, effect = contrast.of, contrast.feature, contrast.inference.difference
    style, auroc, overlap = _of_length(of, rows, tokens, styles) if control == "length" else ("", np.nan, np.nan)
    keys: dict[str, Any] = {**of.key, "feature": feature, "control": control, "rows": of.fingerprint}
    keys |= {"style": style, "style_auroc": auroc, "overlap": overlap}
    parts, groups, comparable = of.bands or (of,), [], []
    for part in parts:
        problems, differences = _controlled(features, rows, tokens, part, control, config.seed)
        if len(problems) < config.min_problems:
            nothing = {**dict.fromkeys(_NUMBERS, np.nan), "n_problems": 0, "verdict": TOO_FEW}
            return pd.DataFrame({**keys, **nothing})
        groups.append(some_columns(differences, feature))
        comparable.append(problems)
    mean, low, high = group_interval(groups, config.n_bootstrap, config.confidence, config.seed)
    plain = effect
    if not all(np.array_equal(found, part.problems) for found, part in zip(comparable, parts, strict=True)):
        first, *others = (
            difference_weights(part.a, part.b, rows.problem, found)
            for found, part in zip(comparable, parts, strict=True)
        )
        plain = weighted_sums(rows.columns, (first - sum(others))[:, None], feature)[:, 0]
    kept = np.divide(mean, plain, out=np.zeros(len(plain)), where=plain != 0)
    shown = (np.sign(plain) == np.sign(effect)) & (np.abs(plain) >= _SHOWN * np.abs(effect))
    survives = np.where(effect > 0, low > 0, high < 0) & (kept >= _KEPT)
    lost = CANNOT_TELL if auroc >= _ONE_VARIABLE else FAILS
    verdict = np.where(shown, np.where(survives, SURVIVES, lost), TOO_FEW)
    numbers = {"difference": mean, "low": low, "high": high, "n_problems": sum(map(len, groups)), "plain": plain}
    return pd.DataFrame({**keys, **numbers, "kept": kept, "verdict": verdict})


def _styles(features: FeatureTable) -> pd.DataFrame:
    """Of every row of the table the behaviours that a response shows or does not; success and length are not styles."""
    measured = measures(features.rollouts).drop(columns=["accuracy", "truncated"], errors="ignore")
    yes_or_no = [name for name, values in measured.items() if values.dropna().isin([0, 1]).all()]
    return measured[yes_or_no].iloc[features.trajectory].reset_index(drop=True)


def _of_length(of: Comparison, rows: Rows, tokens: _Tokens, styles: pd.DataFrame) -> tuple[str, float, float]:
    """The style that length tells best, how well (AUROC, ½ to 1), and the share of responses with one as long."""
    both, best = of.rows, ("", np.nan)
    for name, values in styles.iloc[both].items():
        known = values.notna().to_numpy()
        shows, length = values[known].to_numpy() == 1, tokens.length[both][known]
        if known.any() and _RARE <= shows.mean() <= 1 - _RARE:
            auroc = mannwhitneyu(length[shows], length[~shows], method="asymptotic").statistic
            auroc = auroc / (shows.sum() * (~shows).sum())
            best = max(best, (str(name), max(auroc, 1 - auroc)), key=lambda pair: np.nan_to_num(pair[1]))
    cells = [
        pd.Series(1, index=pd.MultiIndex.from_arrays([rows.problem[side], _half_octave(tokens.length[side])]))
        for side in (of.a, of.b)
    ]
    a, b = (cell.groupby(level=[0, 1]).size() for cell in cells)
    common = pd.concat([a, b], axis=1).min(axis=1, skipna=False).sum()
    return *best, float(common / min(len(of.a), len(of.b)))


def _controlled(
    features: FeatureTable, rows: Rows, tokens: _Tokens, of: Comparison, control: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the problems in which the two sides are comparable, and (n_problems, n_features) differences."""
    a, b = of.a, of.b
    if control == "length":
        problems, row, weight = _matched(a, b, rows.problem, _half_octave(tokens.length)[:, None], None)
        where = np.searchsorted(problems, rows.problem[row])
        return problems, grouped_sums(rows.values, row, where, weight[:, 0], len(problems))
    if control == "position":
        return _by_position(features, rows, tokens, a, b)
    a, b = (side[tokens.length[side] > 0] for side in (a, b))
    problems = np.intersect1d(rows.problem[a], rows.problem[b])
    plain = group_difference(rows.values, a, b, rows.problem, problems)
    return problems, plain - _expected(features, tokens, (a, b), rows.problem, problems, seed)


def _matched(
    a: np.ndarray, b: np.ndarray, problem: np.ndarray, stratum: np.ndarray, count: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights that make a's mean − b's within every cell (problem, stratum) a sum over both sides.

    A problem's cells count by the smaller of their two sides.

    Args:
        a: rows of one side.
        b: rows of the other.
        problem: (n_rows,) problem codes.
        stratum: (n_rows, n) or (1, n) strata that a row's units are in.
        count: (n_rows, n) how many units of a row are in each; None for one.

    Returns:
        codes of the problems with a common cell; the rows of both sides that are in them, problem by problem; and
        (rows, n) the weight of a unit of each, 0 in cells with one side only.
    """
    strata = int(stratum.max(initial=0)) + 1
    n_problems = int(problem.max()) + 1
    sides = []
    for side in (a, b):
        cell = rearrange(problem[side], "row -> row 1") * strata + (stratum if len(stratum) == 1 else stratum[side])
        units = np.ones(cell.shape) if count is None else count[side].astype(float)
        sides.append((side, cell, np.bincount(cell.ravel(), units.ravel(), minlength=n_problems * strata)))
    common = np.minimum(sides[0][2], sides[1][2])
    total = reduce(common, "(problem stratum) -> problem", "sum", stratum=strata)
    problems = np.flatnonzero(total)
    weights = []
    for sign, (side, cell, n) in zip((1.0, -1.0), sides, strict=True):
        share = np.divide(common, n, out=np.zeros(len(n)), where=n > 0)
        of = total[problem[side], None]
        weights.append(sign * np.divide(share[cell], of, out=np.zeros(cell.shape), where=of > 0))
    row, weight = np.concatenate([a, b]), np.concatenate(weights)
    order = np.argsort(problem[row], kind="stable")
    order = order[total[problem[row[order]]] > 0]
    return problems, row[order], weight[order]


def _by_position(
    features: FeatureTable, rows: Rows, tokens: _Tokens, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare tokens at similar places of their rows.

    Returns:
        codes of the problems, and (n_problems, n_features) differences.
    """
    octave = _half_octave(np.arange(1, int(tokens.length.max(initial=1)) + 1))
    bounds = np.searchsorted(octave, np.arange(octave[-1] + 2))
    inside = np.diff(np.minimum(tokens.length[:, None], bounds))  # (n_rows, octaves) tokens of a row in each
    strata = np.arange(octave[-1] + 1)[None]
    problems, row, weight = _matched(a, b, rows.problem, strata, inside)
    sums = np.zeros((len(problems), features.n_features))
    for index, at in tokens.of_rows(features, row):
        if not len(index):
            continue
        where = np.searchsorted(problems, rows.problem[row[at]])
        place = np.arange(len(at)) - np.searchsorted(at, at)
        each = weight[at, octave[place]]
        used, first, last = each != 0, where[0], where[-1] + 1
        sums[first:last] += grouped_sums(features.codes, index[used], where[used] - first, each[used], last - first)
    return problems, sums


def _expected(
    features: FeatureTable,
    tokens: _Tokens,
    sides: tuple[np.ndarray, np.ndarray],
    problem: np.ndarray,
    problems: np.ndarray,
    seed: int,
) -> np.ndarray:
    """(n_problems, n_features) differences that follow from token ids alone, by means on the other half of problems."""
    n_ids, n = tokens.n_ids, len(problems)
    half = np.random.default_rng([seed, 6]).permutation(n) % 2
    code = no_code(len(tokens.mask), 2 * n_ids)  # (half, id) of every token that is used
    count = np.zeros(2 * n_ids)
    frequency = sp.csr_array((n, n_ids))  # how much more often one side has the token
    for sign, side in zip((1.0, -1.0), sides, strict=True):
        side = side[np.isin(problem[side], problems)]
        where = np.searchsorted(problems, problem[side])
        weight = sign / np.bincount(where, minlength=n)[where] / tokens.length[side]
        for index, at in tokens.of_rows(features, side):
            ids = tokens.number[features.token_ids[index]]
            of_half = half[where[at]] * n_ids + ids
            code[index] = of_half
            count += np.bincount(of_half, minlength=2 * n_ids)
            frequency = frequency + sp.csr_array((weight[at], (where[at], ids)), shape=frequency.shape)
    # Ids of many problems come first: so both kinds are a slice.
    problems_of_id = np.bincount(sp.coo_array(frequency).col, minlength=n_ids)
    order, n_common = np.argsort(-problems_of_id, kind="stable"), int((problems_of_id >= _OFTEN * n).sum())
    code = _renumbered(code, order)
    count = rearrange(count, "(half id) -> half id", half=2)[:, order]
    halves = [
        _Half.of(np.flatnonzero(half != number), frequency[half != number][:, order], count[number], n_common)
        for number in (0, 1)
    ]
    expected = np.zeros((n, features.n_features))
    for some, sums in sums_by_code(features.columns, code, 2 * n_ids):
        for of, own in zip(halves, rearrange(sums, "(half id) feature -> half id feature", half=2), strict=True):
            expected[of.problems, some] = of.expected(own)
    return expected


def _renumbered(code: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Codes (half, id) after the ids were put into another order."""
    n_ids = len(order)
    place = np.argsort(order)
    return np.concatenate([place, place + n_ids, [2 * n_ids]]).astype(code.dtype)[code]


@dataclass(frozen=True)
class _Half:
    """Half of the problems, whose features are expected by the other half's means."""

    problems: np.ndarray
    """(n,) places among all problems."""
    often: sp.csc_array
    """(n, n_common) how much more often one side has each common token id, over the tokens that its mean is over."""
    dense: list[tuple[slice, np.ndarray]] | None
    """The same, dense, where there is room; else it is made so for every block of features."""
    seldom: sp.csr_array
    """(n, the other ids): a dense product would multiply zeros."""
    unseen: np.ndarray
    """(n,) how much more often one side has an id that the other half lacks."""
    n_tokens: float
    """Of the other half."""

    @classmethod
    def of(cls, problems: np.ndarray, frequency: sp.csr_array, count: np.ndarray, n_common: int) -> _Half:
        unseen = frequency @ (count == 0).astype(float)
        columns = sp.csc_array(frequency @ sp.diags_array(1 / np.maximum(count, 1)), dtype=np.float32)
        often, seldom = sp.csc_array(columns[:, :n_common]), sp.csr_array(columns[:, n_common:])
        dense = list(_dense_parts(often)) if 8 * often.shape[0] * n_common <= _DENSE_BYTES else None
        return cls(problems, often, dense, seldom, unseen, max(float(count.sum()), 1))

    def expected(self, sums: np.ndarray) -> np.ndarray:
        """(n, features) differences from (n_ids, features) sums over the other half's tokens with each id."""
        single, n_common = sums.astype(np.float32), self.often.shape[1]
        found = np.outer(self.unseen, sums.sum(0) / self.n_tokens)
        for ids, dense in _dense_parts(self.often) if self.dense is None else self.dense:
            found += dense @ single[ids]
        found += self.seldom @ single[n_common:]
        return found


def _dense_parts(often: sp.csc_array) -> Iterator[tuple[slice, np.ndarray]]:
    """(ids, their columns), all of them in order."""
    for first in range(0, often.shape[1], _IDS):
        ids = slice(first, min(first + _IDS, often.shape[1]))
        yield ids, often[:, ids].toarray()


def survival(confounds: pd.DataFrame, shifts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts on every row of `FeatureDiff.shifts`: one column a control, such as survives_length."""
    keys = [*CONTRAST, "feature"]
    verdict = confounds.set_index([*keys, "control"]).verdict if len(confounds) else pd.Series(dtype=object)
    columns = {}
    for control in CONTROLS:
        known = verdict.xs(control, level="control") if len(verdict) else verdict
        index = pd.MultiIndex.from_frame(shifts[keys])
        values = known.reindex(index) if len(known) else pd.Series([None] * len(shifts), dtype=object)
        columns[f"survives_{control}"] = values.astype(object).fillna(NOT_MEASURED).to_numpy()
    return pd.DataFrame(columns, index=shifts.index)
