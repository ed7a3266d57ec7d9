"""Results in a notebook: escaped HTML that needs no style sheet and no network (templates/cards.html).

It needs no script either: where scripts do not run, as in a notebook that is not trusted, tables cannot be sorted. In a
terminal the same results are text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, SupportsIndex

import numpy as np
import pandas as pd

from tsae.activations.reading_plan import check_tokenizer
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.tokenizers import token_strings
from tsae.diff.confounds import CONTROLS, NOT_MEASURED, SURVIVES
from tsae.diff.feature_diff import Feature, FeatureDiff
from tsae.errors import refuse
from tsae.features.contexts import context
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import row_blocks
from tsae.report.document import macro
from tsae.report.story.facts import bands_of, compared_with, records, responds
from tsae.report.story.findings import verdicts
from tsae.report.text import count, interval, number, percent, q_value, shortened, visible
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts


@dataclass(frozen=True)
class Spark:
    """Numbers that a cell shows as a small line, with another at 0; NaN for what is not known."""

    names: Sequence[str]
    values: Sequence[float]
    width, height = 72, 18

    @property
    def known(self) -> list[tuple[int, float]]:
        return [(i, float(value)) for i, value in enumerate(self.values) if np.isfinite(value)]

    @property
    def said(self) -> str:
        """The numbers in words."""
        return ", ".join(f"{self.names[i]} {number(value, sign=True)}" for i, value in self.known) or "–"

    @property
    def zero(self) -> float:
        """Height of 0, from above."""
        return self._y(0.0)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Places of the known numbers."""
        step = (self.width - 6) / max(1, len(self.values) - 1)
        return [(round(3 + step * i, 1), self._y(value)) for i, value in self.known]

    def _y(self, value: float) -> float:
        values = [0.0, *(known for _, known in self.known)]
        low, high = min(values), max(values)
        return round(3 + (self.height - 6) * (high - value) / ((high - low) or 1.0), 1)


def card(
    title: str, facts: Mapping[str, object], *tables: tuple[str, pd.DataFrame], note: str = "", sortable: int = 0
) -> str:
    """A result at a glance.

    Args:
        title: the class.
        facts: what it holds, by name; None is left out.
        tables: (caption, table): the first rows, numbers to three significant digits; an index is left out.
        note: what to know before believing it.
        sortable: rows of the first table, if it scrolls and a click on a head sorts it; 0 for one like the others.
    """
    known = [(name, _plain(value)) for name, value in facts.items() if value is not None]
    sorted_one = bool(sortable and tables and len(tables[0][1]))
    kept = [(caption, table) for caption, table in tables if len(table)]
    limits = [sortable if sorted_one else 12, *[12] * len(kept)]
    shown = [_cells(table, caption, limit) for (caption, table), limit in zip(kept, limits, strict=False)]
    return macro("cards.html", "card", title, known, shown, note, sorted_one)


def tokens_html(
    tokens: Sequence[str], values: Sequence[float] | np.ndarray, *, strongest: float, n_prompt: int = 0
) -> str:
    """Tokens with their activations as colour: the deeper, the nearer to the strongest; ▸ starts the response.

    Args:
        tokens: their texts.
        values: an activation each; the exact number is the token's title.
        strongest: the activation of the deepest colour.
        n_prompt: tokens of the prompt, which come first.
    """
    shown = [
        (
            token.replace("\n", "⏎\n"),
            f"{0.12 + 0.48 * min(1.0, float(value) / (strongest or 1.0)):.2f}",
            number(float(value)) if value > 0 else "",
        )
        for token, value in zip(tokens, values, strict=True)
    ]
    return macro("cards.html", "tokens", shown, n_prompt)


def heading_html(text: str) -> str:
    """A line above a passage."""
    return macro("cards.html", "heading", text)


def show(html: str, text: str) -> None:
    """Display HTML in a notebook, and print text anywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import HTML, display

        display(HTML(html))
    else:
        print(text)


def _cells(table: pd.DataFrame, caption: str, limit: int) -> tuple[str, list[tuple[str, str]], list[list[Any]]]:
    """Caption, heads with how their columns are aligned, and rows of cells: what is shown, and by what it is sorted."""
    aligned = ["right" if pd.api.types.is_numeric_dtype(kind) else "left" for kind in table.dtypes]
    heads = [(str(name).replace("_", " "), align) for name, align in zip(table.columns, aligned, strict=True)]
    rows = [[(_plain(value), _key(value)) for value in row] for row in table.head(limit).itertuples(index=False)]
    more = f"the first {limit} of {len(table):,} rows" if len(table) > limit else ""
    return " – ".join(part for part in (caption, more) if part), heads, rows


def _key(value: Any) -> str:
    """What a cell is sorted by: a number as it is, the last one of several, or the text."""
    if isinstance(value, Spark):
        value = value.known[-1][1] if value.known else None
    if value is None or value is pd.NA or (isinstance(value, Real) and pd.isna(value)):
        return ""
    return repr(float(value)) if isinstance(value, Real) else str(value)


def _plain(value: Any) -> str | Spark:
    """A value as people read it."""
    if isinstance(value, Spark):
        return value
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if isinstance(value, Real):
        return "–" if pd.isna(value) else number(float(value))
    if value is None or value is pd.NA:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


_ROWS = 30
_KEPT = ["checkpoint", "feature", "group", "responds_to"]
_NUMBERS = ["delta", "delta_low", "delta_high", "active_reference", "active", "q"]
_NUMBERS += ["survives_length", "survives_position", "survives_token"]


def diff_card(diff: FeatureDiff) -> str:
    """A feature diff at a glance: the verdict on every run, and shifts in a table that a click on a head sorts."""
    told = verdicts(diff)
    lights = [{"run": one.heading, **{of.question: of.answer for of in one.lights}} for one in told]
    drawn = diff.contrasts[(diff.contrasts.band == "all") & (diff.contrasts.outcome == "all")]
    drawn = drawn[["kind", "checkpoint", "part", "n_problems", "n_tested", "n_discoveries", "n_null"]]
    top = diff.top(_ROWS)
    lines = {"by_band": list(_by_band(diff, top)), "by_step": list(_by_step(diff, top))}
    of_each = pd.DataFrame({name: line for name, line in lines.items() if line}, index=top.index, dtype=object)
    shown = pd.concat([top[_KEPT], of_each, top[_NUMBERS]], axis=1)
    return card(
        "FeatureDiff",
        {
            "features": len(diff.features),
            "base": compared_with(diff),
            "compared": diff.checkpoints,
            "q ≤": f"{diff.q:g}",
            **{one.heading: " ".join(one.sentences[:2]) for one in told},
        },
        ("clearest shifts (delta: standard deviations, with a floor)", shown),
        ("verdicts", pd.DataFrame(lights)),
        ("contrasts over all problems", drawn),
        ("reconstruction per reader", pd.DataFrame(diff.info["readers"])[["id", "fve", "flagged"]]),
        note="Correlational: not causally tested. See diff.plot, diff.feature(i).show() and diff.to_html(path).",
        sortable=_ROWS,
    )


def diff_text(diff: FeatureDiff) -> str:
    """For a terminal: the verdict on every run, and the clearest shifts."""
    told = [f"{one.heading}: {' '.join(one.sentences[:2])}" for one in verdicts(diff)]
    top = diff.top(5)
    return "\n".join([repr(diff), *map(visible, told), *([str(top)] if len(top) else [])])


def shown_effects(table: pd.DataFrame) -> pd.DataFrame:
    """Of rows of `FeatureDiff.table` what a reader wants first, as text."""
    rows = records(table)
    survives = table[[f"survives_{control}" for control in CONTROLS]]
    return pd.DataFrame(
        {
            "feature": table.feature,
            "responds to": [shortened(visible(responds(row)), 40) for row in rows],
            "checkpoint": table.checkpoint,
            **{name: table[name] for name in ("kind", "part", "band") if table[name].nunique() > 1},
            "Δ (sd)": [number(row.delta, sign=True) for row in rows],
            "interval": [interval(row.delta_low, row.delta_high, sign=True) for row in rows],
            "active %": [f"{percent(row.active_reference)} → {percent(row.active)}" for row in rows],
            "q": [q_value(value) for value in table.q],
            "past all controls": np.select(
                [survives.eq(SURVIVES).all(axis=1), survives.eq(NOT_MEASURED).all(axis=1)], ["yes", "–"], "no"
            ),
        }
    )


def by_band(effects: pd.DataFrame, chosen: pd.DataFrame, bands: list[str]) -> Iterator[Spark]:
    """Δ of chosen effects over all problems, in the order of the bands, for rows of `FeatureDiff.table`."""
    keys = ["kind", "checkpoint", "part", "feature", "band"]
    known: dict[Any, float] = effects[effects.outcome == "all"].set_index(keys).delta.to_dict()
    for row in chosen.itertuples():
        of = (row.kind, row.checkpoint, row.part, row.feature)
        yield Spark(bands, [known.get((*of, band), np.nan) for band in bands])


def _by_band(diff: FeatureDiff, top: pd.DataFrame) -> Iterator[Spark]:
    bands = bands_of(diff)
    if len(bands) > 1:
        yield from by_band(diff.shifts[diff.shifts.feature.isin(top.feature)], top, bands)


def _by_step(diff: FeatureDiff, top: pd.DataFrame) -> Iterator[Spark]:
    if diff.dynamics is None or diff.dynamics.empty:
        return
    along = diff.dynamics[diff.dynamics.feature.isin(top.feature)].sort_values("step")
    known = {key: (rows.step.tolist(), rows.delta.tolist()) for key, rows in along.groupby(["run", "feature"])}
    for row in top.itertuples():
        steps, deltas = known.get((row.run, row.feature), ([], []))
        yield Spark([f"step {step}" for step in steps], deltas)


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
    described = visible(responds(row))
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
    rollouts: Rollouts, problem: str, *, policy: str | None, n: int, checkpoint: Checkpoint | None
) -> None:
    """See `Rollouts.show`."""
    refuse(rollouts.origin, (n < 1, f"n={n} is too small a number of responses", "Show at least one."))
    frame = rollouts.frame
    mask = frame.problem_id == problem
    if policy is not None:
        mask &= frame.policy == policy
    some = ", ".join(map(str, frame.problem_id.unique()[:5]))
    what = f"nothing was sampled for {problem!r}{f' by {policy}' if policy else ''}; problems are {some}, …"
    refuse(rollouts.origin, (not mask.any(), what, None))
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
    chosen: int | Sequence[int] | None,
    *,
    reader: str | None,
    checkpoint: Checkpoint | None,
) -> None:
    """See `FeatureTable.show`."""
    reader = reader or features.readers[0]
    rows = features.rows(reader=reader)
    rows = rows[features.trajectory[rows] == trajectory]
    refuse(features.origin, (not len(rows), f"{reader} did not read trajectory {trajectory}", None))
    row = int(rows[0])
    span = slice(int(features.row_offsets[row]), int(features.row_offsets[row + 1]))
    if chosen is None:
        chosen = _strongest(features, row)
    ids = features.need([chosen] if isinstance(chosen, SupportsIndex) else chosen)
    known = features.token_strings if checkpoint is None else _strings(checkpoint, features.rollouts)
    strings = dict(enumerate(known))
    tokens = _texts(features.token_ids[span], strings)
    contexts = [context(features, feature, row) for feature in ids]
    refuse(f"trajectory {trajectory}", (not contexts, "no feature fires there", None))
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
        return macro("cards.html", "text", text)
    return tokens_html(_texts(ids, dict(enumerate(strings))), [float(i % 2) for i in range(len(ids))], strongest=4.0)


def _bracketed(tokens: Sequence[str], values: Sequence[float] | np.ndarray) -> str:
    """For a terminal: tokens on which the feature is active in brackets with its value."""
    return "".join(
        f"[{visible(token)}|{float(value):.2g}]" if value > 0 else visible(token)
        for token, value in zip(tokens, values, strict=True)
    )
