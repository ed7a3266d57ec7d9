"""What was written and what fired on it: passages of rollouts, token by token, in a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import pandas as pd

from tsae.activations.reading_plan import check_tokenizer
from tsae.checkpoints.loading import Checkpoint, token_strings
from tsae.diff.feature_diff import Feature
from tsae.errors import TsaeError
from tsae.features.contexts import context
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import row_blocks
from tsae.report.notebook.cards import card, heading_html, show, text_html, tokens_html
from tsae.report.notebook.diff_card import by_band
from tsae.report.text import count, number, visible
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_BEFORE, _AFTER = 48, 24
"""Tokens shown before and after the strongest one of an example."""
_MARKS = {"success": "✓ success", "failure": "✗ failure", "unknown": "? outcome unknown"}


def show_feature(feature: Feature, n: int, reader: str | None) -> None:
    """See `Feature.show`."""
    show(*_with_examples(feature, n, reader))


def feature_card(feature: Feature) -> str:
    """A feature at a glance, with two examples where the diff has its features."""
    return _effects_card(feature) if feature.source is None else _with_examples(feature, 2, None)[0]


def _with_examples(feature: Feature, n: int, reader: str | None) -> tuple[str, str]:
    """As HTML and as text."""
    contexts = feature.contexts(n, reader=reader)
    html, text = [_effects_card(feature)], [feature_line(feature)]
    strongest = max((float(c.activations.max()) for c in contexts), default=1.0)
    for c in contexts:
        head = f"{_MARKS[c.outcome]}; problem {c.problem_id}, sampled by {c.policy}, read by {c.reader}"
        peak = int(np.argmax(c.activations))
        part = slice(max(0, peak - _BEFORE), peak + _AFTER)
        tokens, n_prompt = _texts(c.token_ids[part], feature.strings), max(0, c.n_prompt - part.start)
        values = c.activations[part]
        html += [heading_html(head), tokens_html(tokens, values, strongest=strongest, n_prompt=n_prompt)]
        text += ["", visible(head), _bracketed(tokens, values)]
    return "".join(html), "\n".join(text)


def feature_line(feature: Feature) -> str:
    """A feature in one line of text."""
    row = feature.described
    described = visible(str(row.responds_to))
    return f"Feature({feature.index}, {row.group}-level, responds to {described}, fires on {row.firing_rate:.2%})"


def _effects_card(feature: Feature) -> str:
    row, effects = feature.described, feature.effects
    columns = ["kind", "checkpoint", "part", "delta", "delta_low", "delta_high", "difference", "q"]
    table = effects[(effects.band == "all") & (effects.outcome == "all")]
    bands = [band for band in BANDS if (effects.band == band).any()]
    if len(bands) > 1:
        table = table.assign(by_band=pd.Series(list(by_band(effects, table, bands)), index=table.index, dtype=object))
        columns.insert(3, "by_band")
    return card(
        f"Feature {feature.index}",
        {
            "group": row.group,
            "responds to": row.responds_to,
            "label": (row.label or "none that holds")
            if "label" in row and row.label_score == row.label_score
            else None,
            "fires on": f"{row.firing_rate:.2%} of {feature.span.replace('_', ' ')} tokens",
            "correlation with length": row.length_correlation,
            "found by other seeds": row.stability if "stability" in row else None,
        },
        ("effects over all problems, in units of activation, with interval", table[columns]),
        note="Correlational: not causally tested.",
    )


def show_problem(
    rollouts: Rollouts, problem: str, *, policy: str | None = None, n: int = 8, checkpoint: Checkpoint | None = None
) -> None:
    """See `Rollouts.show`."""
    if n < 1:
        raise TsaeError(f"n={n} responses are none", where=rollouts.origin, fix="Show at least one.")
    frame = rollouts.frame
    mask = frame.problem_id == problem
    if policy is not None:
        mask &= frame.policy == policy
    if not mask.any():
        some = ", ".join(map(str, frame.problem_id.unique()[:5]))
        raise TsaeError(
            f"nothing was sampled for {problem!r}{f' by {policy}' if policy else ''}; problems are {some}, …",
            where=rollouts.origin,
        )
    # As many of each outcome, so that successes and failures can be read against each other.
    turn = frame[mask].groupby("outcome").cumcount().sort_values(kind="stable").index[:n]
    found = frame.loc[turn].sort_values("outcome", key=lambda names: names.map(list(_MARKS).index), kind="stable")
    first = found.iloc[0]
    strings = None if checkpoint is None else _strings(checkpoint, rollouts)
    answer = "" if pd.isna(first.answer) else f", answer {first.answer}"
    band = "" if pd.isna(first.band) else f", {first.band}"
    head = f"problem {problem}{band}{answer}: {len(found)} of {int(mask.sum())} responses"
    prompt = rollouts.tokens(int(first.name))[0]
    html = [card("Rollouts", {"": head}), _passage(first.prompt, prompt, strings)]
    text = [visible(head), visible(str(first.prompt))]
    for position, row in found.iterrows():
        advantage = "" if pd.isna(row.advantage) else f", advantage {number(row.advantage, sign=True)}"
        told = f"{_MARKS[row.outcome]}; {row.policy}, {row.response_length} tokens{advantage}, {row.finish_reason}"
        html += [heading_html(told), _passage(row.response, rollouts.tokens(int(position))[1], strings)]
        text += ["", visible(told), visible(str(row.response))]
    show("".join(html), "\n".join(text))


def show_trajectory(
    features: FeatureTable,
    trajectory: int,
    chosen: int | Sequence[int] | None = None,
    *,
    reader: str | None = None,
    checkpoint: Checkpoint | None = None,
) -> None:
    """See `FeatureTable.show`."""
    reader = reader or features.readers[0]
    rows = features.rows(reader=reader)
    rows = rows[features.trajectory[rows] == trajectory]
    if not len(rows):
        raise TsaeError(f"{reader} did not read trajectory {trajectory}", where=features.origin)
    row = int(rows[0])
    span = slice(int(features.row_offsets[row]), int(features.row_offsets[row + 1]))
    if chosen is None:
        chosen = _strongest(features, row)
    ids = features.need([chosen] if isinstance(chosen, SupportsIndex) else chosen)
    strings: Any = {} if checkpoint is None else dict(enumerate(_strings(checkpoint, features.rollouts)))
    tokens = _texts(features.token_ids[span], strings)
    contexts = [context(features, feature, row) for feature in ids]
    if not contexts:
        raise TsaeError("no feature fires there", where=f"trajectory {trajectory}")
    one = contexts[0]
    head = f"trajectory {trajectory}: {_MARKS[one.outcome]}, problem {one.problem_id}, sampled by {one.policy}"
    html, text = [card("Features", {"": f"{head}, read by {reader}"})], [visible(head)]
    for feature, c in zip(ids, contexts, strict=True):
        strongest = float(c.activations.max())
        active = count(int((c.activations > 0).sum()), "token")
        told = f"feature {feature}: strongest {number(strongest)}, active on {active}"
        html += [heading_html(told), tokens_html(tokens, c.activations, strongest=strongest, n_prompt=c.n_prompt)]
        text += ["", told, _bracketed(tokens, c.activations)]
    show("".join(html), "\n".join(text))


def _strongest(features: FeatureTable, row: int, n: int = 4) -> list[int]:
    """The features that are most above their mean over the table on a row's response."""
    means = features.row_means()
    mine = means[[row]].toarray()[0]
    squares = sum(np.bincount(block.indices, block.data**2, len(mine)) for _, block in row_blocks(means))
    spread = np.sqrt(squares / features.n_rows)
    ratio = np.divide(mine, spread, out=np.zeros_like(mine), where=spread > 0)
    order = np.argsort(-ratio, kind="stable")[:n]
    return [int(feature) for feature in order if mine[feature] > 0]


def _strings(checkpoint: Checkpoint, rollouts: Rollouts) -> list[str]:
    return token_strings(check_tokenizer(checkpoint, rollouts))


def _texts(ids: np.ndarray, strings: Any) -> list[str]:
    """Texts of token ids, by id or by its digits, as diffs have them; ids where they are not known."""
    return [strings.get(int(i), strings.get(str(int(i)), f"#{int(i)} ")) for i in ids]


def _passage(text: object, ids: np.ndarray, strings: list[str] | None) -> str:
    """The text, or its tokens with every other one shaded where the tokenizer is known."""
    if strings is None:
        return text_html("" if text is None else str(text))
    return tokens_html(_texts(ids, dict(enumerate(strings))), [float(i % 2) for i in range(len(ids))], strongest=4.0)


def _bracketed(tokens: Sequence[str], values: Sequence[float] | np.ndarray) -> str:
    """For a terminal: tokens on which the feature is active in brackets with its value."""
    return "".join(
        f"[{visible(token)}|{float(value):.2g}]" if value > 0 else visible(token)
        for token, value in zip(tokens, values, strict=True)
    )
