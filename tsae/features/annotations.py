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
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sums import active_counts, grouped_sums

Annotator = Callable[[str, Sequence[str]], Sequence[str]]
"""(prompt text, response tokens as strings) -> class of each response token."""


def find_annotator(name: str) -> Annotator:
    """Import the annotator that ``module:function`` names."""
    fix = "Give module:function of a function (prompt, response tokens) -> one class per token."
    return find_function(name, where="annotator", fix=fix)


PROMPT_CLASS, SPECIAL_CLASS, RARE = "prompt", "special", "rare tokens"
_IDS = 128  # token ids whose sums are made at once
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
            tokens = [token_strings[i] for i in features.token_ids[start:stop]]
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
    tokens = np.flatnonzero(counted)
    n_classes, ones = len(classes.names), np.ones(len(tokens))
    sums = grouped_sums(features.codes, tokens, classes.code[tokens], ones, n_classes)
    sizes = np.bincount(classes.code[tokens], minlength=n_classes).astype(float)
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
            "n_tokens": active_counts(features.codes, tokens),
        },
        index=pd.RangeIndex(features.n_features, name="feature"),
    )


def top_tokens(features: FeatureTable, token_strings: Sequence[str], n: int = 5) -> pd.DataFrame:
    """For every feature the tokens that carry most of its activation.

    Returns:
        indexed by feature: top_tokens (the strings, most activation first), top_token_share (share of the feature's
        summed activation on the first one; near 1 means that the feature may be lexical).
    """
    tokens = np.flatnonzero(features.span_mask("all"))
    ids, code = np.unique(features.token_ids[tokens], return_inverse=True)
    order = np.argsort(code, kind="stable")
    tokens, code = tokens[order], code[order]
    # The n largest sums so far and their ids: sums of all tokens would need too much memory.
    best, of_id = np.zeros((n, features.n_features)), np.zeros((n, features.n_features), dtype=int)
    total = np.zeros(features.n_features)
    for first in range(0, len(ids), _IDS):
        size = min(_IDS, len(ids) - first)
        some = slice(*np.searchsorted(code, [first, first + size]))
        sums = grouped_sums(features.codes, tokens[some], code[some] - first, np.ones(len(tokens[some])), size)
        total += sums.sum(0)
        new = np.flatnonzero(sums.max(0) > best[-1])  # features whose best tokens change
        candidates = np.concatenate([best[:, new], sums[:, new]])
        ids_here = np.broadcast_to(np.arange(first, first + size)[:, None], (size, len(new)))
        largest = np.argsort(-candidates, axis=0, kind="stable")[:n]
        best[:, new] = np.take_along_axis(candidates, largest, 0)
        of_id[:, new] = np.take_along_axis(np.concatenate([of_id[:, new], ids_here]), largest, 0)
    strings = [token_strings[i] for i in ids]
    names = [
        [strings[i] for i, value in zip(of_id[:, feature], best[:, feature], strict=True) if value > 0]
        for feature in range(features.n_features)
    ]
    share = np.divide(best[0], total, out=np.zeros(len(total)), where=total > 0)
    return pd.DataFrame(
        {"top_tokens": names, "top_token_share": share}, index=pd.RangeIndex(features.n_features, name="feature")
    )
