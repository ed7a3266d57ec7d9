"""Where training wrote: how far every checkpoint is from the base, in words, a figure, a page and a terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.checkpoints.drift import drift_by
from tsae.report.document import render_page, write_page
from tsae.report.figures.layout import finish
from tsae.report.tables import DASH, Cell, Table, table_text
from tsae.report.text import figure_text, percent

_MOST = 3


def whole(drift: pd.DataFrame) -> Table:
    """‖W − W₀‖ / ‖W₀‖ of all weights of every checkpoint, and the tensors that moved furthest for their size."""
    rows: list[list[str | Cell]] = []
    for row in drift_by(drift, []).itertuples():
        mine = drift[drift.checkpoint == row.checkpoint]
        rank = mine.stable_rank.median()
        # Norms and biases, which are small, are left out.
        matrices = mine[mine.spectral.notna() | (mine.n_weights >= mine.n_weights.max() / 100)]
        most = matrices.sort_values("relative", ascending=False, kind="stable").head(_MOST)
        rows.append(
            [
                str(row.checkpoint),
                "; ".join(f"{_place(tensor)} {relative_text(tensor.relative)}" for tensor in most.itertuples()),
                relative_text(row.relative),
                DASH if pd.isna(row.changed) else f"{percent(row.changed)} %",
                DASH if math.isnan(rank) else f"{rank:.1f}",
            ]
        )
    head = ["checkpoint", "most written", "drift", "weights changed", "stable rank, median"]
    return Table("All weights as one", head, rows, 2)


def last_of_runs(drift: pd.DataFrame) -> list[str]:
    """The last checkpoint of every run."""
    order = drift.drop_duplicates("checkpoint").reset_index(drop=True)
    return order.loc[order.groupby(order.run.fillna(""), sort=False).step.idxmax()].checkpoint.tolist()


def relative_text(value: float) -> str:
    """A share of a norm in per cent."""
    return "–" if math.isnan(value) else f"{100 * value:.3g} %"


def _place(row: Any) -> str:
    return row.module if pd.isna(row.layer) else f"{row.layer}.{row.module}"


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


def write_drift(drift: pd.DataFrame, path: str | Path) -> Path:
    """Write the page.

    Raises:
        TsaeError: where the path is a folder.
    """
    content = render_page(
        "drift.html",
        "Where training wrote",
        {"drift": drift_figure(drift, last_of_runs(drift))},
        n_checkpoints=drift.checkpoint.nunique(),
        n_weights=int(drift[drift.checkpoint == drift.checkpoint.iloc[0]].n_weights.sum()),
        whole=whole(drift),
    )
    return write_page(path, content)


def drift_text(drift: pd.DataFrame) -> str:
    """Every checkpoint, then modules and layers of the last step of every run."""
    lines = ["How far from the base: norm of W − W0 over norm of W0", table_text(whole(drift))]
    last = last_of_runs(drift)
    for by in ("module", "layer"):
        table = drift_by(drift[drift.checkpoint.isin(last)], [by])
        keys = list(dict.fromkeys(None if pd.isna(key) else key for key in table[by]))
        rows: list[list[str | Cell]] = []
        for key in sorted(keys, key=lambda k: (k is None, k)) if by == "layer" else keys:
            mine = table[table[by].isna() if key is None else table[by] == key].set_index("checkpoint")
            cells = [Cell(relative_text(mine.relative[c]), f"({percent(mine.share[c])} %)") for c in last]
            rows.append(["outside of layers" if key is None else str(key), *cells])
        lines += ["", table_text(Table(f"By {by}: drift (share of the squared update)", [by, *last], rows))]
    rounded = drift[(drift.rounding > 0) & (drift.update_norm > 0)]
    if len(rounded):
        part = (rounded.rounding / rounded.relative).clip(upper=1).median()
        lines += [
            "",
            f"Checkpoints are stored more coarsely than the base: rounding alone makes {percent(part)} % of the drift "
            "(median over tensors; see the column rounding).",
        ]
    return "\n".join(lines)
