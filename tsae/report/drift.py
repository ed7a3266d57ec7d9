"""Where training wrote, for the terminal and as one HTML file that opens with no network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.checkpoints.drift import drift_by
from tsae.report import write_page
from tsae.report.figures.layout import finish
from tsae.report.page import document, figure_block
from tsae.report.sections import table
from tsae.report.text import count, figure_text, html_text, percent

_MODULES = 16
# From the page's own tile colour to the orange of what was raised.
_SCALE = [[0.0, "#eceef1"], [0.5, "#f0bfa4"], [1.0, "#d4622a"]]


def drift_text(drift: pd.DataFrame) -> str:
    """For the terminal: every checkpoint, then modules and layers of the last step of every run."""
    lines = ["How far from the base: norm of W − W0 over norm of W0 (all weights as one)"]
    lines.append(f"  {'checkpoint':<24}{'drift':>10}{'changed':>10}{'stable rank':>13}   most written")
    for row in drift_by(drift, []).itertuples():
        mine = drift[drift.checkpoint == row.checkpoint]
        changed = "–" if pd.isna(row.changed) else f"{percent(row.changed)} %"
        rank = mine.stable_rank.median()
        written = "; ".join(f"{_place(t)} {_relative(t.relative)}" for t in _most_written(mine, 3))
        lines.append(
            f"  {row.checkpoint:<24}{_relative(row.relative):>10}{changed:>10}"
            f"{'–' if math.isnan(rank) else f'{rank:.1f}':>13}   {written}"
        )
    last = last_of_runs(drift)
    shown = drift[drift.checkpoint.isin(last)]
    for what, by in (("module", "module"), ("layer", "layer")):
        table = drift_by(shown, [by])
        lines += ["", f"By {what}: drift (share of the squared update)"]
        lines.append(f"  {what:<28}" + "".join(f"{c:>24.23}" for c in last))
        keys = list(dict.fromkeys(None if pd.isna(key) else key for key in table[by]))
        for key in sorted(keys, key=lambda k: (k is None, k)) if by == "layer" else keys:
            cells = []
            for checkpoint in last:
                mine = table[(table.checkpoint == checkpoint) & (table[by].isna() if key is None else table[by] == key)]
                cell = mine.iloc[0]
                cells.append(f"{_relative(cell.relative)} ({percent(cell.share)} %)")
            lines.append(f"  {'outside of layers' if key is None else key!s:<28}" + "".join(f"{c:>24}" for c in cells))
    rounded = drift[(drift.rounding > 0) & (drift.update_norm > 0)]
    if len(rounded):
        part = (rounded.rounding / rounded.relative).clip(upper=1).median()
        lines += [
            "",
            f"Checkpoints are stored more coarsely than the base: rounding alone makes {percent(part)} % of the drift "
            "(median over tensors; see the column rounding).",
        ]
    return "\n".join(lines)


def write_drift(drift: pd.DataFrame, path: str | Path, *, title: str = "Where training wrote") -> Path:
    """Write the page.

    Raises:
        TsaeError: where the path is a folder.
    """
    drawn: dict[str, go.Figure | None] = {}
    last = last_of_runs(drift)
    caption = (
        "‖W − W₀‖ / ‖W₀‖ of every module and layer, at the last step of every run; all panels on one scale. "
        "Layers count from 0, below."
    )
    rows = []
    for row in drift_by(drift, []).itertuples():
        mine = drift[drift.checkpoint == row.checkpoint]
        rank = mine.stable_rank.median()
        rows.append(
            [
                html_text(row.checkpoint),
                html_text("; ".join(f"{_place(t)} {_relative(t.relative)}" for t in _most_written(mine, 3))),
                _relative(row.relative),
                "–" if pd.isna(row.changed) else f"{percent(row.changed)} %",
                "–" if math.isnan(rank) else f"{rank:.1f}",
            ]
        )
    head = ["checkpoint", "most written", "drift", "weights changed", "stable rank, median"]
    n = int(drift[drift.checkpoint == drift.checkpoint.iloc[0]].n_weights.sum())
    body = (
        f'<header><h1>{html_text(title)}</h1><p class="lead">{count(drift.checkpoint.nunique(), "checkpoint")} against '
        f"the base, {n:,} weights.</p></header><main><section>"
        + figure_block(drawn, "drift", drift_figure(drift, last), caption)
        + table("All weights as one", head, rows, numeric_from=2)
        + "</section></main>"
    )
    return write_page(path, document(title, body, drawn))


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


_NO_LAYER = ""


def last_of_runs(drift: pd.DataFrame) -> list[str]:
    """The last checkpoint of every run."""
    order = drift.drop_duplicates("checkpoint").reset_index(drop=True)
    return order.loc[order.groupby(order.run.fillna(""), sort=False).step.idxmax()].checkpoint.tolist()


def _most_written(mine: pd.DataFrame, n: int) -> list[Any]:
    """The matrices that moved furthest for their size; norms and biases, which are small, are left out."""
    matrices = mine[mine.spectral.notna() | (mine.n_weights >= mine.n_weights.max() / 100)]
    return list(matrices.sort_values("relative", ascending=False, kind="stable").head(n).itertuples())


def _place(row: Any) -> str:
    return row.module if pd.isna(row.layer) else f"{row.layer}.{row.module}"


def _relative(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.3g} %"


def _hover(cell: Any, outside: bool) -> str:
    where = figure_text(cell.module) if outside else f"layer {cell.row}, {figure_text(cell.module)}"
    changed = "" if pd.isna(cell.changed) else f"<br>{percent(cell.changed)} % of {cell.n_weights:,} weights changed"
    return (
        f"{figure_text(cell.checkpoint)}<br>{where}: {_relative(cell.relative)}<br>"
        f"{percent(cell.share)} % of the squared update{changed}"
    )
