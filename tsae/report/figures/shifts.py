"""Figures of single features: their shift by run, band, outcome and part."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.features import drawn_runs, feature_hover, feature_marks, feature_rows, top_features
from tsae.report.figures.layout import DELTA, finish, label_rows, one_panel, panels, vertical_zero, x_title
from tsae.report.figures.marks import HOVER, Mark, aside, dots
from tsae.report.figures.style import BAND_STYLE, DIVERGING, LEGEND, NEUTRAL, run_style
from tsae.report.story import facts
from tsae.report.text import figure_text

_LEFT = 226
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
    figure = one_panel(26 * len(features))
    for order, run in enumerate(runs):
        marks = feature_marks(facts.main_shift(diff, run), features, range(len(features)), run)
        figure.add_trace(dots(marks, run_style(order), size=10, name=figure_text(run)))
    vertical_zero(figure)
    x_title(figure, "Δ against base (standard deviations over base trajectories)", 6)
    feature_rows(figure, diff, features)
    return finish(figure, height=26 * len(features) + 100, left=_LEFT, bottom=50, legend=LEGEND)


def outcome_figure(diff: FeatureDiff, *, n: int = 6) -> go.Figure | None:
    """Success − failure within problem: the clearest features of every band, as the base reads (its own) responses."""
    bands = ["all", *facts.bands_of(diff)]
    tables = {b: facts.rows(diff, kind="outcome", checkpoint=diff.base, band=b) for b in bands}
    top = {b: facts.strongest(table, diff.q, n) for b, table in tables.items()}
    features = list(dict.fromkeys(int(f) for table in top.values() for f in table.index))
    if not features:
        return None
    figure = one_panel(30 * len(features))
    marks = {b: feature_marks(t[t.q <= diff.q], features, range(len(features)), _of(b)) for b, t in tables.items()}
    _by_band(figure, marks, 8)
    x_title(figure, "← in failures    in successes →    (Δ, standard deviations over base trajectories)", 6)
    feature_rows(figure, diff, features)
    height = 30 * len(features) + 110
    return finish(figure, height=height, left=_LEFT, bottom=56, legend=LEGEND, showlegend=True)


def feature_figure(diff: FeatureDiff, feature: int) -> go.Figure | None:
    """Shift of one feature in every run, over all problems and by band."""
    runs, marks = drawn_runs(diff), {}
    for band in ["all", *facts.bands_of(diff)]:
        tables = [_shift(diff, run, diff.main_part(run) or "total", band) for run in runs]
        found = [feature_marks(t, [feature], [i], f"{runs[i]}, {_of(band)}") for i, t in enumerate(tables)]
        marks[band] = [mark for mine in found for mark in mine]
    if not any(marks.values()):
        return None
    figure = one_panel(52 * len(runs))
    _by_band(figure, marks, 9, empty=True)
    label_rows(figure, [figure_text(run, 18) for run in runs], edge=0.55)
    x_title(figure, DELTA, 6)
    return finish(figure, height=52 * len(runs) + 110, left=140, bottom=50, legend=LEGEND, showlegend=True)


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
    figure, cells, height = panels(
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
        tiles = go.Heatmap(
            z=grids[run], x=names, y=list(range(len(features))), xgap=1, ygap=1, hoverongaps=False,
            colorscale=DIVERGING, zmin=-limit, zmax=limit, showscale=False,
            text=[[_tile(t, f) for t in tables[run]] for f in features],
            texttemplate="%{text}", textfont={"size": 10.5, "color": "#1d2228"},
            customdata=hover, hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(tiles, **cell)
    figure.update_xaxes(showgrid=False, ticks="", tickangle=-35, tickvals=names, ticktext=names)
    feature_rows(figure, diff, features)
    return finish(figure, height=height + 120, left=_LEFT, bottom=64)


def decomposition_figure(diff: FeatureDiff, *, n: int = 8) -> go.Figure | None:
    """Policy and representation part of each run's largest shifts, stacked; the diamond is their sum, the total."""
    runs = [run for run in drawn_runs(diff) if diff.main_part(run) == "total"]
    chosen = {run: features for run in runs if (features := top_features(diff, [run], n))}
    if not chosen:
        return None
    titles = [f"<b>{figure_text(run)}</b>" for run in chosen]
    depth = max(map(len, chosen.values()))
    figure, cells, height = panels(titles, 2, panel=depth * 26 + 10, gap=90, horizontal=0.2, least=240)
    for (run, features), cell in zip(chosen.items(), cells, strict=True):
        first = cell is cells[0]
        for part, (name, colour, shape) in _PARTS.items():
            who = f"{run}, {facts.PART_NAMES[part]}"
            marks = feature_marks(_shift(diff, run, part), features, range(len(features)), who)
            pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "fgopacity": 0.4, "size": 7}
            bar = go.Bar(
                x=[mark.point[0] for mark in marks],
                y=[mark.row for mark in marks],
                orientation="h",
                name=name,
                legendgroup=part,
                showlegend=first,
                marker={"color": colour, "pattern": pattern},
                width=0.62,
                text=[mark.hover for mark in marks],
                textposition="none",
                **HOVER,
            )
            figure.add_trace(bar, **cell)
        marks = feature_marks(facts.main_shift(diff, run), features, range(len(features)), f"{run}, total")
        name = "total, with interval"
        total = dots(marks, (NEUTRAL, "diamond"), name=name, legendgroup="total", showlegend=first)
        figure.add_trace(total.update(marker={"line": {"width": 1.5, "color": "#fff"}}), **cell)
        vertical_zero(figure, **cell)
        x_title(figure, DELTA, **cell)
        feature_rows(figure, diff, features, **cell)
    return finish(figure, height=height + 130, left=_LEFT, top=70, bottom=54, barmode="relative", legend=LEGEND)


def _shift(diff: FeatureDiff, run: str, part: str, band: str = "all", outcome: str = "all") -> pd.DataFrame:
    return facts.rows(diff, kind="shift", checkpoint=run, part=part, band=band, outcome=outcome)


def _of(band: str) -> str:
    return f"{band} problems"


def _by_band(figure: go.Figure, marks: dict[str, list[Mark]], size: int, *, empty: bool = False) -> None:
    """Marks of every band beside each other in their rows, around a line at 0."""
    for order, (band, mine) in enumerate(marks.items()):
        if mine or empty:
            up = aside(order, len(marks), 0.18)
            figure.add_trace(dots(mine, BAND_STYLE[band], size=size, up=up, name=_of(band)))
    vertical_zero(figure)


def _effect(table: pd.DataFrame, feature: int) -> float | None:
    return float(table.delta[feature]) if feature in table.index else None


def _tile(table: pd.DataFrame, feature: int) -> str:
    """A tile's number; a dot where the feature did not move, nothing where it was not tested."""
    if feature not in table.index:
        return ""
    return f"{table.delta[feature]:+.1f}".replace("-", "−") if table.moved[feature] else "·"
