"""What features respond to: classes of tokens, from an annotator or from token identity.

An annotator is a plain function (prompt, response tokens) -> one class per response token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from einops import reduce

from tsae.base.plugins import find_function
from tsae.checkpoints.loading import text_of
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sums import active_counts, no_code, sums_by_code

Annotator = Callable[[str, Sequence[str]], Sequence[str]]
"""(prompt text, response tokens as strings) -> class of each response token."""


def find_annotator(name: str) -> Annotator:
    """Import the annotator that ``module:function`` names."""
    fix = "Give module:function of a function (prompt, response tokens) -> one class per token."
    return find_function(name, takes=2, where="annotator", fix=fix)


PROMPT_CLASS, SPECIAL_CLASS, RARE = "prompt", "special", "rare tokens"
_MIN_TOKENS = 20  # A class with fewer tokens cannot be what a feature responds to.


@dataclass(frozen=True)
class TokenClasses:
    """A class for every token of a FeatureTable."""

    names: list[str]
    code: np.ndarray
    """(n_tokens,) index into names."""


def annotate_tokens(features: FeatureTable, annotator: Annotator, token_strings: Sequence[str]) -> TokenClasses:
    """Apply an annotator to every trajectory. Prompt tokens have a class of their own, special tokens and outliers too.

    Args:
        features: the table.
        annotator: called once a trajectory.
        token_strings: text of every token id.
    """
    names: dict[str, int] = {PROMPT_CLASS: 0, SPECIAL_CLASS: 1}
    by_trajectory: dict[int, np.ndarray] = {}
    prompts = features.rollouts.table["prompt"].to_pylist()
    prompt_lengths = features.rollouts.lengths("prompt_ids")
    code = np.zeros(len(features.token_ids), dtype=np.int32)
    for row, trajectory in enumerate(features.trajectory.tolist()):
        start, stop = features.row_offsets[row] + prompt_lengths[trajectory], features.row_offsets[row + 1]
        if trajectory not in by_trajectory:
            tokens = [text_of(token_strings, i) for i in features.token_ids[start:stop]]
            classes = annotator(prompts[trajectory] or "", tokens)
            if len(classes) != len(tokens):
                raise TsaeError(
                    f"gave {len(classes)} classes for the {len(tokens)} response tokens of trajectory {trajectory}",
                    where="annotator",
                    fix="Give one class per response token.",
                )
            by_trajectory[trajectory] = np.array([names.setdefault(c, len(names)) for c in classes], dtype=np.int32)
        code[start:stop] = by_trajectory[trajectory]
    code[~features.span_mask("all")] = 1
    return TokenClasses(list(names), code)


def responds_to(features: FeatureTable, classes: TokenClasses) -> pd.DataFrame:
    """For every feature the class of tokens that its activation singles out.

    share is the part of the feature's activation that falls on a class, and lift is share divided by the class's part
    of all tokens. The class has the largest share · log(lift) among classes with at least 20 tokens: its contribution
    to the Kullback–Leibler divergence between where the feature is active and where tokens are. So a rare class with a
    slightly higher lift does not win over the common one that carries the activation. Special tokens do not count. This
    describes the feature; it does not test what the feature does.

    Returns:
        indexed by feature: responds_to, lift, share, n_tokens (on which it is active). A feature that is active only
        on smaller classes responds to "rare tokens".
    """
    counted = classes.code != classes.names.index(SPECIAL_CLASS)
    n_classes = len(classes.names)
    code = np.where(counted, classes.code, np.int32(n_classes))
    sums = np.empty((n_classes, features.n_features))
    for some, found in sums_by_code(features.columns, code, n_classes):
        sums[:, some] = found
    sizes = np.bincount(classes.code[counted], minlength=n_classes).astype(float)
    total = reduce(sums, "token_class feature -> feature", "sum")
    shares = sums / np.where(total > 0, total, 1)
    lifts = shares / np.maximum(sizes / sizes.sum(), 1e-12)[:, None]
    score = np.where(sizes[:, None] >= _MIN_TOKENS, shares * np.log(np.maximum(lifts, 1e-12)), -np.inf)
    best = score.argmax(0)
    column = np.arange(features.n_features)
    # Active, but on no class that is large enough.
    rare = (total > 0) & ((shares[best, column] == 0) | (sizes[best] < _MIN_TOKENS))
    return pd.DataFrame(
        {
            "responds_to": np.select(
                [total == 0, rare], ["never active", RARE], np.array(classes.names, dtype=object)[best]
            ),
            "lift": np.where(rare, 0.0, lifts[best, column]),
            "share": np.where(rare, 0.0, shares[best, column]),
            "n_tokens": active_counts(features, counted),
        },
        index=pd.RangeIndex(features.n_features, name="feature"),
    )


def top_tokens(features: FeatureTable, token_strings: Sequence[str], n: int = 5) -> pd.DataFrame:
    """For every feature the tokens that carry most of its activation.

    Returns:
        indexed by feature: top_tokens (the strings, most activation first), top_token_share (share of the feature's
        summed activation on the first one; near 1 means that the feature may be lexical).
    """
    mask = features.span_mask("all")
    ids, number = id_codes(features.token_ids, mask)
    code = no_code(len(mask), max(len(ids), 1))
    for first, last in features.row_blocks():
        tokens = slice(int(features.row_offsets[first]), int(features.row_offsets[last]))
        code[tokens][mask[tokens]] = number[features.token_ids[tokens][mask[tokens]]]
    strings = [text_of(token_strings, i) for i in ids]
    names, share = [], []
    for _, sums in sums_by_code(features.columns, code, max(len(ids), 1)):
        sums = np.ascontiguousarray(sums.T)  # (features, ids)
        column, total = np.arange(len(sums)), sums.sum(1)
        best, of_id = np.zeros((n, len(column))), np.zeros((n, len(column)), dtype=int)
        for place in range(n):  # faster than a partition, and of equal sums the first id comes first
            of_id[place] = sums.argmax(1)
            best[place] = sums[column, of_id[place]]
            sums[column, of_id[place]] = 0
        names += [
            [strings[i] for i, value in zip(*each, strict=True) if value > 0]
            for each in zip(of_id.T.tolist(), best.T.tolist(), strict=True)
        ]
        share.append(np.divide(best[0], total, out=np.zeros(len(total)), where=total > 0))
    table = {"top_tokens": names, "top_token_share": np.concatenate(share)}
    return pd.DataFrame(table, index=pd.RangeIndex(features.n_features, name="feature"))


def id_codes(token_ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The (n,) ids that occur on tokens of a mask, and the int32 index of every id up to the largest among them.

    Other ids have −1.
    """
    occurs = np.zeros(int(token_ids.max(initial=0)) + 1, dtype=bool)
    occurs[token_ids[mask]] = True
    ids = np.flatnonzero(occurs)
    number = np.full(len(occurs), -1, dtype=np.int32)
    number[ids] = np.arange(len(ids))
    return ids, number
