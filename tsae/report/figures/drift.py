"""The figure of drift: where in the model training wrote."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.checkpoints.drift import drift_by
from tsae.report.figures.layout import finish
from tsae.report.story.drift import relative_text
from tsae.report.text import figure_text, percent

_MODULES = 16
_NO_LAYER = ""
# From the page's own tile colour to the orange of what was raised.
_SCALE = [[0.0, "#eceef1"], [0.5, "#f0bfa4"], [1.0, "#d4622a"]]


def drift_figure(drift: pd.DataFrame, checkpoints: list[str]) -> go.Figure:
    """A heat map a checkpoint: modules across, layers upwards, and what lies outside of layers in a row of its own."""
    table = drift_by(drift[drift.checkpoint.isin(checkpoints)], ["layer", "module"])
    table["row"] = [_NO_LAYER if pd.isna(layer) else str(layer) for layer in table.layer]
    inside, outside = table[table.row != _NO_LAYER], table[table.row == _NO_LAYER]
    columns = list(dict.fromkeys(inside.module))[:_MODULES]
    layers = [str(layer) for layer in sorted({int(layer) for layer in inside.layer})]
    extra = list(dict.fromkeys(outside.module))
    top = float(table.relative.max()) or 1.0
    per_row = min(len(checkpoints), 3)
    blocks = -(-len(checkpoints) // per_row)
    panel = max(170, 20 * len(layers)) + 26 * len(extra)
    figure = make_subplots(
        rows=blocks,
        cols=per_row,
        shared_yaxes=True,
        horizontal_spacing=0.02,
        vertical_spacing=150 / (blocks * panel + (blocks - 1) * 150) if blocks > 1 else 0,
        subplot_titles=[f"<b>{figure_text(c, 30)}</b>" for c in checkpoints],
    )
    for position, checkpoint in enumerate(checkpoints):
        mine = table[table.checkpoint == checkpoint]
        known = {
            (row, module): cell for row, module, cell in zip(mine.row, mine.module, mine.itertuples(), strict=True)
        }
        z, text = [], []
        for name in [*extra, *layers]:
            cells: list[Any] = [
                known.get((_NO_LAYER, name)) if name in extra else known.get((name, module)) for module in columns
            ]
            z.append([None if cell is None or math.isnan(cell.relative) else cell.relative for cell in cells])
            text.append(["" if cell is None else _hover(cell, name in extra) for cell in cells])
        figure.add_trace(
            go.Heatmap(
                z=z,
                x=[figure_text(module, 24) for module in columns],
                y=[figure_text(name if name in extra else f"layer {name}", 18) for name in [*extra, *layers]],
                customdata=text,
                hovertemplate="%{customdata}<extra></extra>",
                colorscale=_SCALE,
                zmin=0,
                zmax=top,
                showscale=position == 0,
                colorbar={
                    "orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0, "xanchor": "left",
                    "len": 0.3, "thickness": 10, "tickformat": ".2~%", "nticks": 4,
                },
                xgap=1,
                ygap=1,
                hoverongaps=False,
            ),
            row=position // per_row + 1,
            col=position % per_row + 1,
        )  # fmt: skip
    figure.update_xaxes(tickangle=-40, ticks="", showgrid=False)
    figure.update_yaxes(ticks="", nticks=len(layers) + len(extra))
    return finish(figure, height=blocks * panel + (blocks - 1) * 150 + 250, left=110, top=92, bottom=140)


def _hover(cell: Any, outside: bool) -> str:
    where = figure_text(cell.module) if outside else f"layer {cell.row}, {figure_text(cell.module)}"
    changed = "" if pd.isna(cell.changed) else f"<br>{percent(cell.changed)} % of {cell.n_weights:,} weights changed"
    return (
        f"{figure_text(cell.checkpoint)}<br>{where}: {relative_text(cell.relative)}<br>"
        f"{percent(cell.share)} % of the squared update{changed}"
    )
