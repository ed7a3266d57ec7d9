"""What every feature responds to, how often it fires, and whether it goes with the length of responses.

*Families* of features, such as direct-answer, basic-computation and deliberation: a family is a set of token classes of
an annotator. Its *share* of a feature is the part of the feature's activation that falls on these tokens. Its *lift* is
the share over the family's part of all tokens. A feature belongs to the family with the largest share · log(lift) among
those with q ≤ the config's and a lift of at least 2, or to none. The lift of a family with more than a third of all
tokens cannot be much larger (arithmetic has half of those in GSM8K's solutions): its share need only be half way from
that part to 1.

The null keeps what makes tokens dependent. Problems get the labels of other problems' responses, stretched to their
length and rotated by a random offset: runs of labels stay runs, and responses of a problem stay alike. p is the share
of draws whose lift is as large, one-sided; q is over all features and families. (Stretched labels of short responses
change the families' parts of the tokens, so shares would not do.)

*Shift of a family*: the mean of its features, each in its standard deviation over trajectories, is compared like any
other feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from einops import rearrange
from scipy.stats import rankdata

from tsae.diff.comparisons import Rows, group_difference, shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.inference import paired_inference, q_values
from tsae.diff.threads import in_threads
from tsae.errors import TsaeError
from tsae.features.contexts import TokenClasses, responds_to, top_tokens
from tsae.features.feature_table import FeatureTable, masked_sums
from tsae.features.sparse_matrices import column_blocks, row_blocks


def describe(
    features: FeatureTable, rows: Rows, config: DiffConfig, classes: TokenClasses | None, strings: Sequence[str]
) -> pd.DataFrame:
    """`FeatureDiff.features`: one row a feature, with what it responds to on the tokens that are compared."""
    counted = features.span_mask(config.span)
    jobs: list[Callable[[], Any]] = [
        partial(top_tokens, features, strings, among=counted),
        partial(_length_correlation, features, rows),
    ]
    tokens, correlation = in_threads(jobs, config.threads)
    fired, _ = masked_sums(features, counted)
    index = pd.RangeIndex(features.n_features, name="feature")
    table = pd.DataFrame(
        {
            "group": np.where(np.arange(features.n_features) < features.d_high, "high", "low"),
            "firing_rate": fired / max(int(counted.sum()), 1),
            "length_correlation": correlation,
        },
        index=index,
    )
    if features.rollouts.has_thinking:
        table["thinking_share"] = _thinking_share(features)
    if classes is not None:
        table = table.join(responds_to(features, classes, counted))
    else:
        table["responds_to"] = [" ".join(repr(t) for t in found[:3]) or "never active" for found in tokens.top_tokens]
    return table.join(tokens)


def _thinking_share(features: FeatureTable) -> np.ndarray:
    """(n_features,) share of a feature's activation in responses that falls on thinking; 0 where it never fires."""
    of_thinking, of_response = (masked_sums(features, features.span_mask(span))[1] for span in ("thinking", "response"))
    return np.divide(of_thinking, of_response, out=np.zeros(features.n_features), where=of_response > 0)


def _length_correlation(features: FeatureTable, rows: Rows) -> np.ndarray:
    """(n_features,) Spearman correlation of a trajectory's mean activation with its response length, on the base."""
    base = features.readers[0]
    picked = rows.by_reader[base, rows.own(base)]
    length = rankdata(features.rollouts.n_sampled[features.trajectory[picked]])
    length, n = length - length.mean(), len(picked)
    place = np.full(len(rows.problem), -1)
    place[picked] = np.arange(n)
    product, square = np.zeros((2, features.n_features))
    for first, block in column_blocks(rows.columns, features.n_features):
        row = place[block.indices]
        inside = row >= 0
        size = np.bincount(
            np.repeat(np.arange(block.shape[1]), np.diff(block.indptr))[inside], minlength=block.shape[1]
        )
        row, rank = _ranks(block.data[inside].astype(np.float32, copy=False), row[inside], np.r_[0, size.cumsum()])
        # Activations are not negative: zeros share the lowest ranks.
        zeros, column = n - size, np.repeat(np.arange(len(size)), size)
        above = rank + ((zeros - 1) / 2)[column]
        part = slice(first, first + len(size))
        product[part] = np.bincount(column, above * length[row], minlength=len(size))
        square[part] = np.bincount(column, (above - (size / 2)[column]) ** 2, minlength=len(size))
        square[part] += zeros * (size / 2) ** 2
    norm = np.sqrt(square * (length**2).sum())
    return np.divide(product, norm, out=np.zeros(features.n_features), where=norm > 0)


def _ranks(values: np.ndarray, row: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, ranks) of the values of each column from the lowest on; equal values share the mean of their ranks.

    Args:
        values: (nnz,) float32 from 0 up, column by column.
        row: (nnz,) of each.
        ends: (n_columns + 1,) where each column begins.
    """
    # The bits of positive floats are in the order of the floats, so that sorting numbers sorts rows along with values.
    key = (values.view(np.uint32).astype(np.uint64) << np.uint64(32)) | row.astype(np.uint64)
    for start, stop in pairwise(ends.tolist()):
        key[start:stop].sort()
    bits = key >> np.uint64(32)
    new = np.ones(len(key) + 1, dtype=bool)  # where another value begins
    new[1:-1] = bits[1:] != bits[:-1]
    new[ends] = True
    bounds = np.flatnonzero(new)
    shared = (bounds[:-1] + bounds[1:] - 1) / 2 + 1
    rank = np.repeat(shared, np.diff(bounds)) - np.repeat(ends[:-1], np.diff(ends))
    return (key & np.uint64(0xFFFFFFFF)).astype(np.int64), rank


Families = Mapping[str, Sequence[str]]
NO_FAMILY = "none"
_LIFT = 2.0
_NUMBERS = ("difference", "low", "high", "delta", "delta_low", "delta_high", "p", "q")
_ROWS = 600  # rows that families are learnt on; more cost time and change little
_DRAWS, _BLOCK = 999, 37


def find_families(annotator: str | None) -> Families:
    """FAMILIES from the module of an annotator (module:function).

    Raises:
        TsaeError: if it has none.
    """
    module = (annotator or "").partition(":")[0]
    found = getattr(import_module(module), "FAMILIES", None) if module else None
    if not isinstance(found, Mapping):
        what = f"{annotator!r} names no annotator with FAMILIES, a dictionary of family to classes, beside it"
        fix = "Give --annotator, such as tsae.features.mathematics:math_classes."
        raise TsaeError(what, where="--families", fix=fix)
    return found


def assign_families(
    features: FeatureTable, classes: TokenClasses, families: Families, config: DiffConfig
) -> pd.DataFrame:
    """Find the family of every feature.

    Args:
        features: the table.
        classes: of its tokens, from `annotate_tokens`.
        families: token classes of every family.
        config: q, fdr, span, min_problems, seed.

    Returns:
        indexed by feature: family ("none" if no association is clear); family_share, family_lift, family_p and family_q
        of it, or of the one with the highest score. p is 1 for features active in fewer than min_problems problems.

    Raises:
        TsaeError: where no token has a class of any family.
    """
    label = np.full(len(classes.names), -1)
    for number, members in enumerate(families.values()):
        label[[classes.names.index(name) for name in members if name in classes.names]] = number
    if not (label[classes.code] >= 0).any():
        what = f"no token has a class of a family; there are {', '.join(map(repr, classes.names))}"
        raise TsaeError(what, where="families", fix="Name classes that the annotator gives.")
    rng = np.random.default_rng([config.seed, 7])
    token, row, label = _sample(features, label[classes.code], config, rng)
    codes = sp.csr_array(features.codes[token])
    total = np.asarray(codes.sum(0), dtype=np.float64).ravel()
    by_feature = sp.csr_array(codes.T)
    n = len(families)

    def lifts(labels: np.ndarray) -> np.ndarray:
        """(draws, n_families, n_features) for (draws, n_tokens) labels."""
        member = rearrange(labels, "draw token -> draw 1 token") == np.arange(n)[:, None]
        sums = by_feature @ rearrange(member, "draw family token -> token (draw family)").astype(np.float32)
        part = rearrange(member.mean(-1), "draw family -> draw family 1")
        sums = rearrange(sums, "feature (draw family) -> draw family feature", family=n)
        return sums / np.where(total > 0, total, 1) / np.where(part > 0, part, np.inf)

    lift = lifts(label[None])[0]
    extreme, done = np.zeros(lift.shape, dtype=int), 0
    shuffle = _Shuffle(features, row, label)
    while done < _DRAWS:
        drawn = np.stack([shuffle(rng) for _ in range(min(_BLOCK, _DRAWS - done))])
        extreme += (lifts(drawn) >= lift * (1 - 1e-5)).sum(0)
        done += len(drawn)
    p = np.where(_widespread(features, row, codes, config), (1 + extreme) / (1 + _DRAWS), 1.0)
    q = q_values(p.ravel(), config.fdr).reshape(p.shape)
    part = np.array([(label == number).mean() for number in range(n)])
    observed = lift * part[:, None]
    score = observed * np.log(np.maximum(lift, 1e-12))
    clear = (q <= config.q) & (observed >= np.minimum(_LIFT * part, (1 + part) / 2)[:, None])
    best = np.where(clear.any(0), np.where(clear, score, -np.inf).argmax(0), score.argmax(0))
    names = np.array(list(families), dtype=object)
    table = pd.DataFrame({"family": np.where(clear.any(0), names[best], NO_FAMILY)})
    for name, values in {"share": observed, "lift": lift, "p": p, "q": q}.items():
        table[f"family_{name}"] = values[best, np.arange(len(best))]
    return table.rename_axis("feature")


def _widespread(features: FeatureTable, row: np.ndarray, codes: sp.csr_array, config: DiffConfig) -> np.ndarray:
    """(n_features,) whether a feature is active in min_problems problems or more."""
    problem = pd.factorize(features.rollouts.frame.problem_id.to_numpy()[features.trajectory[row]])[0]
    n = len(problem)
    member = sp.csr_array((np.ones(n, np.float32), (problem, np.arange(n))), shape=(int(problem.max()) + 1, n))
    active = np.asarray(((member @ codes) > 0).sum(0)).ravel()
    return active >= config.min_problems


def _sample(
    features: FeatureTable, label: np.ndarray, config: DiffConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counted tokens of at most _ROWS rows, their rows and labels."""
    rows = np.sort(rng.permutation(features.n_rows)[:_ROWS])
    counted = features.span_mask(config.span)
    chosen = np.zeros(features.n_rows, dtype=bool)
    chosen[rows] = True
    token = np.flatnonzero(counted & np.repeat(chosen, np.diff(features.row_offsets)))
    return token, features.rows_of(token), label[token]


class _Shuffle:
    """Draws of labels under the null."""

    def __init__(self, features: FeatureTable, row: np.ndarray, label: np.ndarray) -> None:
        self.label = label
        self.rows, self.start, self.length = np.unique(row, return_index=True, return_counts=True)
        problems = features.rollouts.frame.problem_id.to_numpy()[features.trajectory[self.rows]]
        self.problem = pd.factorize(problems)[0]
        self.members = [np.flatnonzero(self.problem == i) for i in range(self.problem.max() + 1)]

    def __call__(self, rng: np.random.Generator) -> np.ndarray:
        donor_of_problem = rng.permutation(len(self.members))
        parts = []
        for row, length in enumerate(self.length):
            donors = self.members[donor_of_problem[self.problem[row]]]
            donor = donors[rng.integers(len(donors))]
            place = (np.arange(length) * self.length[donor]) // length
            parts.append(np.roll(self.label[self.start[donor] + place], rng.integers(length)))
        return np.concatenate(parts)


def family_scores(rows: Rows, checkpoint: str, family: pd.Series) -> sp.csr_array:
    """(n_rows, n_families) score of every row: the mean of the family's features, each in its standard deviation over
    base trajectories.

    Args:
        rows: of a feature table.
        checkpoint: whose scale counts.
        family: of every feature; the families stand in order of their names, without "none".
    """
    names = sorted(set(family) - {NO_FAMILY})
    deviation = rows.scales[checkpoint].deviation
    unit = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    weights = np.stack([np.where(family == name, unit, 0) / (family == name).sum() for name in names], 1)
    return sp.csr_array(np.concatenate([block @ weights for _, block in row_blocks(rows.values)]))


def family_shifts(features: FeatureTable, rows: Rows, family: pd.Series, config: DiffConfig) -> pd.DataFrame:
    """Test the total shift of every family in every run and band.

    A trajectory's score is the mean of the family's features, each in its standard deviation over base trajectories. Δ
    is the score's shift in the score's own deviation over base trajectories.

    Args:
        features: the table.
        rows: of it.
        family: of every feature; "none" is left out.
        config: of the draws.

    Returns:
        checkpoint, band, family, n_features, n_problems, difference, low, high (of the score), delta, delta_low,
        delta_high, p, q (over the families of a checkpoint and band), note (why it was refused; its numbers are then
        NaN).
    """
    names = sorted(set(family) - {NO_FAMILY})
    counts = np.array([int((family == name).sum()) for name in names])
    columns = ["checkpoint", "band", "family", "n_features", "n_problems", *_NUMBERS, "note"]
    records = []
    for of in shift_comparisons(features, rows, config) if names else ():
        if of.part != "total" or of.outcome != "all":
            continue
        scores = family_scores(rows, of.checkpoint, family)
        keys = {"checkpoint": of.checkpoint, "band": of.band, "n_problems": len(of.problems)}
        table = pd.DataFrame({**keys, "family": names, "n_features": counts, "note": of.note})
        table[list(_NUMBERS)] = np.nan
        scale = scores[rows.by_reader[features.readers[0], rows.own(features.readers[0])]].toarray().std(0, ddof=1)
        varies = scale > 0
        if not of.note and varies.any():
            differences = group_difference(scores, of.a, of.b, rows.problem, of.problems)
            found = paired_inference(differences[:, varies], scale[varies], config)
            for name in _NUMBERS:
                table.loc[varies, name] = getattr(found, name)
        table.loc[~varies & (table.note == ""), "note"] = "silent at base"
        records.append(table)
    return pd.concat(records, ignore_index=True)[columns] if records else pd.DataFrame(columns=columns)
