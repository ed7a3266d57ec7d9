"""Figures of features: their shift by run, band, outcome and part, and all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures import layout
from tsae.report.figures.layout import BAND_STYLE, DELTA, HOVER, LEGEND, LOWERED, NEUTRAL, RAISED, Mark, Panels
from tsae.report.story import facts
from tsae.report.text import figure_text, number


def drawn_runs(diff: FeatureDiff) -> list[str]:
    """The last step of every run whose shift was tested."""
    return [c for c in diff.final_checkpoints if diff.main_part(c)]


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
    labels = [f"<b>{f}</b> {figure_text(diff.names[f], 28)}" for f in features]
    layout.label_rows(figure, labels, **cell)


def feature_marks(table: pd.DataFrame, features: Sequence[int], rows: Sequence[int], who: str) -> list[Mark]:
    """Δ of features with intervals, each in its row; features that the table does not have are left out."""
    records = [(row, facts.record(table, f)) for f, row in zip(features, rows, strict=True) if f in table.index]
    return [
        Mark(row, facts.standardised(record), feature_hover(record, who), int(record.feature))
        for row, record in records
    ]


def feature_hover(record: Any, who: str) -> str:
    """What a feature is and how far it moved, in units of activation and in Δ."""
    return (
        f"{figure_text(who)}<br>feature {int(record.feature)}: {figure_text(facts.responds(record))}<br>"
        f"{number(record.reference)} → {number(record['mean'])}, difference {number(record.difference, sign=True)} "
        f"[{number(record.low, sign=True)}, {number(record.high, sign=True)}]<br>"
        f"Δ {facts.effect_text(record)}, q = {record.q:.4f}"
    )


_LEFT = 226
# Light tiles on either page, so that dark numbers on them are always readable.
_DIVERGING = [[0.0, "#67a6db"], [0.5, "#eceef1"], [1.0, "#ec8f64"]]
_PARTS = {
    "policy": ("policy part (new responses)", "#1b9381", ""),
    "representation": ("representation part (new reader)", "#a55cc0", "/"),
}
"""Name, colour and hatching."""


def opposed_figure(diff: FeatureDiff, features: Sequence[int]) -> go.Figure | None:
    """Shift of the given features in every run, one line a feature: marks far apart were moved apart."""
    runs = drawn_runs(diff)
    if not features or not runs:
        return None
    figure = layout.one_panel(26 * len(features)).figure
    for order, run in enumerate(runs):
        marks = feature_marks(facts.main_shift(diff, run), features, range(len(features)), run)
        figure.add_trace(layout.dots(marks, layout.run_style(order), size=10, name=figure_text(run)))
    layout.vertical_zero(figure)
    layout.x_title(figure, DELTA.replace("Δ", "Δ against base"), 6)
    feature_rows(figure, diff, features)
    return layout.finish(figure, height=26 * len(features) + 100, left=_LEFT, bottom=50, legend=LEGEND)


def outcome_figure(diff: FeatureDiff, *, n: int = 6) -> go.Figure | None:
    """Success − failure within problem: the clearest features of every band, as the base reads (its own) responses."""
    bands = ["all", *facts.bands_of(diff)]
    tables = {b: facts.rows(diff, kind="outcome", checkpoint=diff.base, band=b) for b in bands}
    top = {b: facts.strongest(table, diff.q, n) for b, table in tables.items()}
    features = list(dict.fromkeys(int(f) for table in top.values() for f in table.index))
    if not features:
        return None
    marks = {b: feature_marks(t[t.q <= diff.q], features, range(len(features)), _of(b)) for b, t in tables.items()}
    figure = _by_band(30 * len(features), marks, 8)
    layout.x_title(figure, f"← in failures    in successes →    {DELTA}", 6)
    feature_rows(figure, diff, features)
    height = 30 * len(features) + 110
    return layout.finish(figure, height=height, left=_LEFT, bottom=56, legend=LEGEND, showlegend=True)


def feature_figure(diff: FeatureDiff, feature: int) -> go.Figure | None:
    """Shift of one feature in every run, over all problems and by band."""
    runs, marks = drawn_runs(diff), {}
    for band in ["all", *facts.bands_of(diff)]:
        tables = [_shift(diff, run, diff.main_part(run) or "total", band) for run in runs]
        found = [feature_marks(t, [feature], [i], f"{runs[i]}, {_of(band)}") for i, t in enumerate(tables)]
        marks[band] = [mark for mine in found for mark in mine]
    if not any(marks.values()):
        return None
    figure = _by_band(52 * len(runs), marks, 9, empty=True)
    layout.label_rows(figure, [figure_text(run, 18) for run in runs], edge=0.55)
    layout.x_title(figure, DELTA, 6)
    return layout.finish(figure, height=52 * len(runs) + 110, left=140, bottom=50, legend=LEGEND, showlegend=True)


def band_figure(diff: FeatureDiff, *, n: int = 8) -> go.Figure | None:
    """Shift of each run's most moved features by band and by outcome, as a heat map per run."""
    runs = drawn_runs(diff)
    features = top_features(diff, runs, n)
    if not features:
        return None
    bands = facts.bands_of(diff)
    columns = {"all": ("all", "all")} | {b: (b, "all") for b in bands} | {o: ("all", o) for o in ("success", "failure")}
    names = list(columns)
    tables = {
        run: [_shift(diff, run, diff.main_part(run) or "total", *key) for key in columns.values()] for run in runs
    }
    grids = {run: [[_effect(t, f) for t in mine] for f in features] for run, mine in tables.items()}
    limit = max([0.0, *(abs(v) for grid in grids.values() for line in grid for v in line if v is not None)])
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, cells, height = layout.panels(
        titles, len(runs), panel=24 * len(features), gap=0, horizontal=0.02, least=190, shared_yaxes=True
    )
    for run, cell in zip(runs, cells, strict=True):
        hover = [
            [
                feature_hover(facts.record(t, f), f"{run}, {name}") if f in t.index else "not tested"
                for t, name in zip(tables[run], names, strict=True)
            ]
            for f in features
        ]
        text = [[_tile(t, f) for t in tables[run]] for f in features]
        heat_map = go.Heatmap(
            z=grids[run], x=names, y=list(range(len(features))), xgap=1, ygap=1, hoverongaps=False,
            colorscale=_DIVERGING, zmin=-limit, zmax=limit, showscale=False,
            text=text, texttemplate="%{text}", textfont={"size": 10.5, "color": "#1d2228"},
            hovertext=hover, hoverinfo="text", customdata=[[feature] * len(names) for feature in features],
        )  # fmt: skip
        figure.add_trace(heat_map, **cell)
    figure.update_xaxes(showgrid=False, ticks="", tickangle=-35, tickvals=names, ticktext=names)
    feature_rows(figure, diff, features)
    return layout.finish(figure, height=height + 120, left=_LEFT, bottom=64)


def decomposition_figure(diff: FeatureDiff, *, n: int = 8) -> go.Figure | None:
    """Policy and representation part of each run's largest shifts, stacked; the diamond is their sum, the total."""
    runs = [run for run in drawn_runs(diff) if diff.main_part(run) == "total"]
    chosen = {run: features for run in runs if (features := top_features(diff, [run], n))}
    if not chosen:
        return None
    titles = [f"<b>{figure_text(run)}</b>" for run in chosen]
    depth = max(map(len, chosen.values()))
    figure, cells, height = layout.panels(titles, 2, panel=depth * 26 + 10, gap=90, horizontal=0.2, least=240)
    for (run, features), cell in zip(chosen.items(), cells, strict=True):
        first = cell is cells[0]
        for part, (name, colour, shape) in _PARTS.items():
            who = f"{run}, {facts.PART_NAMES[part]}"
            marks = feature_marks(_shift(diff, run, part), features, range(len(features)), who)
            pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "fgopacity": 0.4, "size": 7}
            bar = go.Bar(
                x=[mark.point[0] for mark in marks], y=[mark.row for mark in marks], orientation="h", width=0.62,
                name=name, legendgroup=part, showlegend=first, marker={"color": colour, "pattern": pattern},
                text=[mark.hover for mark in marks], customdata=[mark.feature for mark in marks],
                textposition="none", **HOVER,
            )  # fmt: skip
            figure.add_trace(bar, **cell)
        marks = feature_marks(facts.main_shift(diff, run), features, range(len(features)), f"{run}, total")
        name = "total, with interval"
        total = layout.dots(marks, (NEUTRAL, "diamond"), name=name, legendgroup="total", showlegend=first)
        figure.add_trace(total.update(marker={"line": {"width": 1.5, "color": "#fff"}}), **cell)
        layout.vertical_zero(figure, **cell)
        layout.x_title(figure, DELTA, **cell)
        feature_rows(figure, diff, features, **cell)
    return layout.finish(figure, height=height + 130, left=_LEFT, top=70, bottom=54, barmode="relative", legend=LEGEND)


def _shift(diff: FeatureDiff, run: str, part: str, band: str = "all", outcome: str = "all") -> pd.DataFrame:
    return facts.rows(diff, kind="shift", checkpoint=run, part=part, band=band, outcome=outcome)


def _of(band: str) -> str:
    return f"{band} problems"


def _by_band(height: int, marks: dict[str, list[Mark]], size: int, *, empty: bool = False) -> go.Figure:
    """Marks of every band beside each other in their rows, around a line at 0."""
    made = layout.one_panel(height)
    styles = {band: BAND_STYLE[band] for band in marks}
    layout.dots_by(made, styles, lambda _, band: marks[band], step=0.18, size=size, empty=empty)
    layout.vertical_zero(made.figure)
    return made.figure


def _effect(table: pd.DataFrame, feature: int) -> float | None:
    return float(table.delta[feature]) if feature in table.index else None


def _tile(table: pd.DataFrame, feature: int) -> str:
    """A tile's number; a dot where the feature did not move, nothing where it was not tested."""
    if feature not in table.index:
        return ""
    return f"{table.delta[feature]:+.1f}".replace("-", "−") if table.moved[feature] else "·"


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
                f"feature {r.feature}: {figure_text(facts.responds(r))}<br>{number(r.reference)} → "
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
    layout.x_title(figure, "mean activation of base and run")
    figure.update_yaxes(title={"text": DELTA, "standoff": 4}, col=1)
    made = layout.finish(figure, height=height + 116, left=62, top=66, bottom=50, legend=LEGEND)
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
        layout.vertical_zero(figure, **cell)
        layout.x_title(figure, DELTA, **cell)
    figure.update_yaxes(type="log", autorange="reversed", exponentformat="power", dtick=1)
    figure.update_yaxes(title={"text": "q (clearer upwards)"}, row=1, col=1)
    return layout.finish(figure, height=height + 110, left=70, top=60, bottom=50, legend=LEGEND)


def thinned_text(diff: FeatureDiff) -> str:
    """What `spread_figure` leaves out."""
    sizes = [len(facts.main_shift(diff, run)) for run in diff.final_checkpoints]
    if max(sizes, default=0) <= MAX_POINTS:
        return ""
    return f" At most {MAX_POINTS:,} features of a run are drawn, discoveries first."


def _panels(runs: list[str], most: int, panel: int, **options: Any) -> Panels:
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    return layout.panels(titles, most, panel=panel, gap=74, least=200, shared_yaxes=True, **options)


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
