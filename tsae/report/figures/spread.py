"""Figures of all tested features at once, a mark a feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.features import drawn_runs, feature_hover
from tsae.report.figures.layout import DELTA, Panels, finish, panels, vertical_zero, x_title
from tsae.report.figures.marks import HOVER
from tsae.report.figures.style import LEGEND, LOWERED, NEUTRAL, RAISED
from tsae.report.story import facts
from tsae.report.text import figure_text, number

MAX_POINTS = 1500
"""Features drawn in one panel."""
# (colour, symbol): direction is a shape too.
_SIDES = {"raised": (RAISED, "triangle-up"), "lowered": (LOWERED, "triangle-down"), "no discovery": (NEUTRAL, "circle")}


def spread_figure(diff: FeatureDiff) -> go.Figure | None:
    """Every tested feature of every run: its shift against how active it is.

    No volcano: permutation p-values have a floor that most discoveries reach, so that a volcano's height tells little.
    """
    runs = drawn_runs(diff)
    if not runs:
        return None
    figure, cells, height = _panels(runs, 3, 284, shared_xaxes=True)
    for run, cell in zip(runs, cells, strict=True):
        for name, part in _sides(_thinned(facts.main_shift(diff, run), diff.q), diff.q).items():
            colour, symbol = _SIDES[name]
            level = np.maximum((part["mean"] + part.reference) / 2, 1e-9)
            marker = {"color": colour, "symbol": symbol, "size": 5 if name == "no discovery" else 7, "opacity": 0.7}
            text = [
                f"feature {r.feature}: {figure_text(r.responds_to)}<br>{number(r.reference)} → "
                f"{number(r.mean)}, Δ {facts.effect_text(r)}, q {r.q:.2g}"
                for r in facts.records(part)
            ]
            points = _points(level, part.delta, name, marker, text, showlegend=run == runs[0])
            points.customdata = [int(f) for f in part.feature]
            figure.add_trace(points, **cell)
        figure.add_hline(y=0, line={"color": NEUTRAL, "width": 1}, layer="below", **cell)
    decades = range(-7, 5)
    figure.update_xaxes(type="log", tickvals=[10.0**e for e in decades], ticktext=[f"10{_raised(e)}" for e in decades])
    figure.update_xaxes(showticklabels=True)
    x_title(figure, "mean activation of base and run")
    figure.update_yaxes(title={"text": "Δ (standard deviations)", "standoff": 4}, col=1)
    made = finish(figure, height=height + 116, left=62, top=66, bottom=50, legend=LEGEND)
    return made.update_yaxes(showgrid=True)


def volcano_figure(diff: FeatureDiff) -> go.Figure | None:
    """Every tested feature of every run: its shift against its q-value."""
    runs = drawn_runs(diff)
    if not runs:
        return None
    figure, cells, height = _panels(runs, len(runs), 310)
    for run, cell in zip(runs, cells, strict=True):
        for name, part in _sides(facts.main_shift(diff, run), diff.q).items():
            symbols = ["circle" if group == "high" else "diamond-open" for group in part.group]
            marker = {"color": _SIDES[name][0], "size": 6, "opacity": 0.75, "symbol": symbols}
            text = [feature_hover(row, run) for _, row in part.iterrows()]
            # No permutation p is 0, and so no q is.
            points = _points(part.delta, part.q, name, marker, text, showlegend=run == runs[0])
            figure.add_trace(points, **cell)
        figure.add_hline(y=diff.q, line={"color": NEUTRAL, "width": 1, "dash": "dot"}, **cell)
        vertical_zero(figure, **cell)
        x_title(figure, DELTA, **cell)
    figure.update_yaxes(type="log", autorange="reversed", exponentformat="power", dtick=1)
    figure.update_yaxes(title={"text": "q (clearer upwards)"}, row=1, col=1)
    return finish(figure, height=height + 110, left=70, top=60, bottom=50, legend=LEGEND)


def thinned_text(diff: FeatureDiff) -> str:
    """What `spread_figure` leaves out."""
    sizes = [len(facts.main_shift(diff, run)) for run in facts.final_checkpoints(diff)]
    if max(sizes, default=0) <= MAX_POINTS:
        return ""
    return f" At most {MAX_POINTS:,} features of a run are drawn, discoveries first."


def _panels(runs: list[str], most: int, panel: int, **options: Any) -> Panels:
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    return panels(titles, most, panel=panel, gap=74, least=200, shared_yaxes=True, **options)


def _points(
    x: pd.Series, y: pd.Series, name: str, marker: dict[str, Any], text: list[str], *, showlegend: bool
) -> go.Scatter:
    named = {"name": name, "legendgroup": name, "showlegend": showlegend}
    return go.Scatter(x=x.tolist(), y=y.tolist(), mode="markers", marker=marker, text=text, **named, **HOVER)


def _sides(table: pd.DataFrame, q: float) -> dict[str, pd.DataFrame]:
    found = table.q <= q
    return {
        "raised": table[found & (table.delta > 0)],
        "lowered": table[found & (table.delta < 0)],
        "no discovery": table[~found],
    }


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _thinned(table: pd.DataFrame, q: float) -> pd.DataFrame:
    """Discoveries with the largest |Δ| first, then others evenly over their |d|."""
    if len(table) <= MAX_POINTS:
        return table
    by_size = table.loc[table.delta.abs().sort_values(ascending=False, kind="stable").index]
    found, rest = by_size[by_size.q <= q].head(MAX_POINTS), by_size[by_size.q > q]
    room = MAX_POINTS - len(found)
    picked = np.unique(np.linspace(0, len(rest) - 1, min(room, len(rest))).astype(int))
    return pd.concat([found, rest.iloc[picked]])
