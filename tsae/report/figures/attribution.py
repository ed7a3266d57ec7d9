"""The figure of which samples moved what: shares and effects by band, outcome and third of the run."""

from __future__ import annotations

from math import floor, log10

import numpy as np
import plotly.graph_objects as go

from tsae.attribution.attribution import Attribution
from tsae.report.figures.layout import finish, label_rows, panels
from tsae.report.figures.style import DIVERGING
from tsae.report.story.attribution import Grid, amount, grid, most_moved
from tsae.report.text import figure_text

_MAX_TARGETS, _ROW = 6, 24


def attribution_figure(found: Attribution) -> go.Figure | None:
    """A column for each of the targets that changed most: shares above, effects below, as heat maps."""
    names = most_moved(found, _MAX_TARGETS)
    grids = {name: made for name in names if (made := grid(found, name)) is not None}
    if not grids:
        return None
    rows, columns = next(iter(grids.values())).rows, next(iter(grids.values())).columns
    ticks = [figure_text(column.removesuffix(" of the run"), 14) for column in columns]
    figure, cells, height = panels(
        [f"<b>{figure_text(name, 40)}</b>" for name in grids],
        3,
        panel=[_ROW * len(rows)] * 2,
        gap=52,
        horizontal=0.02,
        heads=["<b>share</b>", "<b>effect</b>"],
        beside=True,
        align="left",
        least=190,
        shared_yaxes=True,
    )
    for place, (name, made) in enumerate(grids.items()):
        limit = float(np.nanmax(np.abs([made.share, made.effect])))
        for p, (what, values) in enumerate((("share", made.share), ("effect", made.effect))):
            cell = cells[2 * place + p]
            tiles = go.Heatmap(
                z=values, x=list(range(len(columns))), y=list(range(len(rows))), xgap=1, ygap=1, hoverongaps=False,
                colorscale=DIVERGING, zmin=-limit, zmax=limit, showscale=False,
                text=[[_tile(v, limit) for v in line] for line in values],
                texttemplate="%{text}", textfont={"size": 10.5, "color": "#1d2228"},
                customdata=_hover(made, name, what, values), hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
            figure.add_trace(tiles, **cell)
            figure.update_xaxes(tickvals=list(range(len(columns))), ticktext=ticks, ticks="", showgrid=False, **cell)
            label_rows(figure, [figure_text(row, 30) for row in rows], edge=0.5, **cell)
    return finish(figure, height=height + 100, left=150, top=56)


def _tile(value: float, limit: float) -> str:
    """With the decimals that the largest of its figure needs; hovering tells more."""
    if np.isnan(value):
        return ""
    decimals = max(0, 2 - floor(log10(limit))) if limit > 0 else 0
    return f"{value:+.{decimals}f}".replace("-", "−")


def _hover(made: Grid, name: str, what: str, values: np.ndarray) -> list[list[str]]:
    return [
        [
            f"{figure_text(name)}<br>{figure_text(row)}, {figure_text(column)}: {what} {amount(values[i, j])}"
            f"<br>{made.n[i, j]:.0f} samples"
            for j, column in enumerate(made.columns)
        ]
        for i, row in enumerate(made.rows)
    ]
