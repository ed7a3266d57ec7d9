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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import scipy.sparse as sp
from einops import rearrange, reduce

from tsae.base.bootstrap import group_interval
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import CONTRAST, Comparison
from tsae.diff.contrast.draw_contrast import Contrast
from tsae.diff.contrast.problem_means import group_difference
from tsae.diff.contrast.rows import Rows
from tsae.diff.threads import in_threads
from tsae.features.feature_table import FeatureTable
from tsae.features.sums import grouped_sums

CONTROLS = ("length", "position", "token")
SURVIVES, FAILS, TOO_FEW, NOT_MEASURED = "survives", "does not survive", "too few problems", "not measured"
_NUMBERS = ("difference", "low", "high", "n_problems", "plain", "kept", "verdict")
_KEPT = 0.5
_SHOWN = 0.5  # of the effect, that the comparable problems show without the control
_IDS = 256  # token ids whose means are made at once
_CONTROLLED = ("total", "success_minus_failure")


def confound_table(
    features: FeatureTable, rows: Rows, contrasts: Sequence[Contrast], config: DiffConfig
) -> pd.DataFrame:
    """Apply every control to the total shifts and outcome effects, for all features that were tested there.

    Returns:
        the contrast's keys, rows (as in the contrast table) and feature, control, the controlled difference with its
        interval (NaN if too few problems are comparable), n_problems that are comparable, plain (their difference
        without the control), kept (controlled / plain, 0 if plain is 0) and verdict.
    """
    tokens = _Tokens.of(features, config)
    drawn = [c for c in contrasts if c.inference is not None and c.of.outcome == "all" and c.of.part in _CONTROLLED]
    wanted = [(contrast, control) for contrast in drawn for control in CONTROLS]
    jobs = [partial(_control, features, rows, tokens, *each, config) for each in wanted]
    parts = list(in_threads(jobs, config.threads))
    empty = pd.DataFrame(columns=[*CONTRAST, "feature", "control", *_NUMBERS, "rows"])
    return pd.concat(parts, ignore_index=True) if parts else empty


@dataclass(frozen=True)
class _Tokens:
    """The tokens that count."""

    index: np.ndarray
    row: np.ndarray
    position: np.ndarray
    """Half-octave of the place among the row's counted tokens."""
    length: np.ndarray
    """(n_rows,) how many tokens of a row count."""
    id_code: np.ndarray

    @classmethod
    def of(cls, features: FeatureTable, config: DiffConfig) -> _Tokens:
        index = np.flatnonzero(features.span_mask(config.span))
        row = features.row_of_token[index]
        length = np.bincount(row, minlength=features.n_rows)
        place = np.arange(len(row)) - (length.cumsum() - length)[row]
        codes = np.unique(features.token_ids[index], return_inverse=True)[1]
        return cls(index, row, _half_octave(place + 1), length, codes)


def _half_octave(n: np.ndarray) -> np.ndarray:
    return np.floor(2 * np.log2(np.maximum(n, 1))).astype(int)


def _control(
    features: FeatureTable, rows: Rows, tokens: _Tokens, contrast: Contrast, control: str, config: DiffConfig
) -> pd.DataFrame:
    """A row a feature that the contrast tested."""
    assert contrast.inference is not None
    of, feature, effect = contrast.of, contrast.feature, contrast.inference.difference
    keys = {**of.key, "feature": feature, "control": control}
    groups, plains = [], []
    for part in of.bands or (of,):
        problems, differences = _controlled(features, rows, tokens, part, control, config.seed)
        if len(problems) < config.min_problems:
            nothing = {**dict.fromkeys(_NUMBERS, np.nan), "n_problems": 0, "verdict": TOO_FEW}
            return pd.DataFrame({**keys, **nothing, "rows": of.fingerprint})
        groups.append(differences[:, feature])
        plains.append(group_difference(rows.values, part.a, part.b, rows.problem, problems)[:, feature].mean(0))
    mean, low, high = group_interval(groups, config.n_bootstrap, config.confidence, config.seed)
    plain = plains[0] - (plains[1] if len(plains) > 1 else 0.0)
    kept = np.divide(mean, plain, out=np.zeros(len(plain)), where=plain != 0)
    shown = (np.sign(plain) == np.sign(effect)) & (np.abs(plain) >= _SHOWN * np.abs(effect))
    survives = np.where(effect > 0, low > 0, high < 0) & (kept >= _KEPT)
    verdict = np.where(shown, np.where(survives, SURVIVES, FAILS), TOO_FEW)
    numbers = {"difference": mean, "low": low, "high": high, "n_problems": sum(map(len, groups)), "plain": plain}
    return pd.DataFrame({**keys, **numbers, "kept": kept, "verdict": verdict, "rows": of.fingerprint})


def _controlled(
    features: FeatureTable, rows: Rows, tokens: _Tokens, of: Comparison, control: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the problems in which the two sides are comparable, and (n_problems, n_features) differences."""
    a, b = of.a, of.b
    if control == "length":
        return _matched(rows.values, np.arange(len(rows.problem)), a, b, rows.problem, _half_octave(tokens.length))
    on_a, on_b = (np.flatnonzero(np.isin(tokens.row, side)) for side in (a, b))
    problem = rows.problem[tokens.row]
    if control == "position":
        return _matched(features.codes, tokens.index, on_a, on_b, problem, tokens.position)
    a, b = (side[tokens.length[side] > 0] for side in (a, b))
    problems = np.intersect1d(rows.problem[a], rows.problem[b])
    plain = group_difference(rows.values, a, b, rows.problem, problems)
    return problems, plain - _expected(features.codes, tokens, (on_a, on_b), problem, problems, seed)


def _matched(
    values: sp.csr_array, index: np.ndarray, a: np.ndarray, b: np.ndarray, problem: np.ndarray, stratum: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the problems with a common cell, and (n_problems, n_features) a's mean − b's there.

    A problem's cells count by the smaller of their two sides.

    Args:
        values: (…, n_features).
        index: (n_units,) row of the values of each unit.
        a: units of one side.
        b: units of the other.
        problem: (n_units,) problem code.
        stratum: (n_units,) what makes units comparable.
    """
    strata = int(stratum.max(initial=0)) + 1
    cell = problem * strata + stratum
    size = (int(problem.max()) + 1) * strata
    n_a, n_b = np.bincount(cell[a], minlength=size), np.bincount(cell[b], minlength=size)
    common = np.minimum(n_a, n_b)
    total = reduce(common, "(problem stratum) -> problem", "sum", stratum=strata)
    problems = np.flatnonzero(total)
    units, weights = [], []
    for sign, side, n in ((1.0, a, n_a), (-1.0, b, n_b)):
        side = side[common[cell[side]] > 0]
        units.append(side)
        weights.append(sign * common[cell[side]] / n[cell[side]] / total[problem[side]])
    unit = np.concatenate(units)
    where = np.searchsorted(problems, problem[unit])
    return problems, grouped_sums(values, index[unit], where, np.concatenate(weights), len(problems))


def _expected(
    codes: sp.csr_array,
    tokens: _Tokens,
    places: tuple[np.ndarray, np.ndarray],
    problem: np.ndarray,
    problems: np.ndarray,
    seed: int,
) -> np.ndarray:
    """(n_problems, n_features) differences that follow from token ids alone, by means on the other half of problems."""
    n_ids, n = int(tokens.id_code.max()) + 1, len(problems)
    frequency = sp.csc_array((n, n_ids))  # how much more often one side has the token
    for sign, side in zip((1.0, -1.0), places, strict=True):
        side = side[np.isin(problem[side], problems)]
        where = np.searchsorted(problems, problem[side])
        share = 1 / tokens.length[tokens.row[side]]
        weight = sign * share / np.bincount(where, weights=share, minlength=n)[where]
        frequency = frequency + sp.csc_array((weight, (where, tokens.id_code[side])), shape=frequency.shape)
    half = np.random.default_rng([seed, 6]).permutation(n) % 2
    of_half = np.full(int(problem.max()) + 1, -1)
    of_half[problems] = half
    used = np.concatenate(places)
    used = used[of_half[problem[used]] >= 0]
    used = used[np.argsort(tokens.id_code[used], kind="stable")]
    code, other = tokens.id_code[used], of_half[problem[used]]
    # Problems that use the means of half 0 come first, so that each half is a slice.
    by_half = np.argsort(1 - half, kind="stable")
    frequency, first_half = frequency.tocsr()[by_half].tocsc(), int((half == 1).sum())
    mine = [slice(0, first_half), slice(first_half, n)]
    count, overall = np.zeros((2, n_ids)), np.zeros((2, codes.shape[1]))
    expected = np.zeros((n, codes.shape[1]))
    for first in range(0, n_ids, _IDS):
        size = min(_IDS, n_ids - first)
        some = slice(*np.searchsorted(code, [first, first + size]))
        group = other[some] * size + code[some] - first
        sums = grouped_sums(codes, tokens.index[used[some]], group, np.ones(len(group)), 2 * size)
        counts = np.bincount(group, minlength=2 * size)
        overall += reduce(sums, "(half id) feature -> half feature", "sum", half=2)
        sums /= np.maximum(counts, 1)[:, None]
        means = rearrange(sums.astype(np.float32), "(half id) feature -> half id feature", half=2)
        often = frequency[:, first : first + size].toarray().astype(np.float32)
        for number in (0, 1):
            expected[mine[number]] += often[mine[number]] @ means[number]
        count[:, first : first + size] = rearrange(counts, "(half id) -> half id", half=2)
    for number in (0, 1):
        unseen = frequency[mine[number]] @ (count[number] == 0).astype(float)
        expected[mine[number]] += unseen[:, None] * (overall[number] / max(count[number].sum(), 1))
    return expected[np.argsort(by_half)]


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
