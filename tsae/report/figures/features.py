"""Features as rows of a figure: which ones, their labels, and what hovering over a mark tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.layout import label_rows
from tsae.report.figures.marks import Mark
from tsae.report.story import facts
from tsae.report.text import figure_text, number


def drawn_runs(diff: FeatureDiff) -> list[str]:
    """The last step of every run whose shift was tested."""
    return [c for c in facts.final_checkpoints(diff) if diff.main_part(c)]


def top_features(diff: FeatureDiff, runs: list[str], n: int) -> list[int]:
    """The n most moved features of every run, put together; most raised by the last run first."""
    chosen: dict[int, None] = {}
    for run in runs:
        chosen |= dict.fromkeys(int(f) for f in facts.strongest(facts.main_shift(diff, run), diff.q, n).index)
    if not chosen:
        return []
    last = facts.main_shift(diff, runs[-1])
    return sorted(chosen, key=lambda f: -float(last.delta[f]) if f in last.index else 0.0)


def feature_rows(figure: go.Figure, diff: FeatureDiff, features: Sequence[int], **cell: int) -> None:
    """Number and description of the features on the vertical axis."""
    labels = [f"<b>{f}</b> {figure_text(diff.features.responds_to[f], 28)}" for f in features]
    label_rows(figure, labels, **cell)


def feature_marks(table: pd.DataFrame, features: Sequence[int], rows: Sequence[int], who: str) -> list[Mark]:
    """Δ of features with intervals, each in its row; features that the table does not have are left out."""
    records = [(row, facts.record(table, f)) for f, row in zip(features, rows, strict=True) if f in table.index]
    return [Mark(row, facts.standardised(record), feature_hover(record, who)) for row, record in records]


def feature_hover(record: Any, who: str) -> str:
    """What a feature is and how far it moved, in units of activation and in Δ."""
    return (
        f"{figure_text(who)}<br>feature {int(record.feature)}: {figure_text(record.responds_to)}<br>"
        f"{number(record.reference)} → {number(record['mean'])}, difference {number(record.difference, sign=True)} "
        f"[{number(record.low, sign=True)}, {number(record.high, sign=True)}]<br>"
        f"Δ {facts.effect_text(record)}, q = {record.q:.4f}"
    )
