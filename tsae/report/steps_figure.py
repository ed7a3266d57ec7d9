"""The figure of what happened along the steps of runs."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.diff.result import FeatureDiff
from tsae.report.story import facts
from tsae.report.style import BAND_STYLE, LEGEND, SERIES, SYMBOLS, finish
from tsae.report.text import figure_text, interval, number, percent


def steps_figure(diff: FeatureDiff, features: list[int]) -> go.Figure | None:
    """Accuracy by band, and the shift of the given features, along the steps of every run."""
    table = diff.dynamics
    if table is None or table.empty:
        return None
    runs = list(dict.fromkeys(table.run))
    lived = _along(diff)
    panels = (1 if len(lived) else 0) + 1
    figure = make_subplots(
        rows=panels,
        cols=len(runs),
        shared_yaxes="rows",
        shared_xaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.09,
        row_heights=[0.42, 0.58][-panels:],
        subplot_titles=[f"<b>{figure_text(run, 24)}</b>" for run in runs],
    )
    named: set[str] = set()

    def line(
        column: int, row: int, mine: pd.DataFrame, name: str, colour: str, symbol: str, value: str, text: Any
    ) -> None:
        figure.add_trace(
            go.Scatter(
                x=mine.step.tolist(),
                y=mine[value].tolist(),
                mode="lines+markers",
                name=name,
                legendgroup=name,
                legend="legend" if row < panels else "legend2",
                showlegend=name not in named,
                line={"color": colour, "width": 1.5},
                marker={"color": colour, "symbol": symbol, "size": 7},
                error_y={
                    "array": (mine.high - mine[value]).tolist(),
                    "arrayminus": (mine[value] - mine.low).tolist(),
                    "color": colour,
                    "thickness": 1.1,
                    "width": 0,
                },
                text=text,
                hovertemplate="%{text}<extra></extra>",
            ),
            row=row,
            col=column,
        )
        named.add(name)

    for column, run in enumerate(runs, start=1):
        for band in [b for b in (*facts.BANDS, "all") if len(lived) and (lived.band == b).any()]:
            mine = lived[(lived.run == run) & (lived.band == band)].sort_values("step")
            text = [
                f"step {r.step}, {band}: {percent(r.mean)} % [{percent(r.low)}, {percent(r.high)}]"
                for r in facts.records(mine)
            ]
            scaled = mine.assign(**{c: 100 * mine[c] for c in ("mean", "low", "high")})
            line(column, 1, scaled, f"accuracy, {band} problems", *BAND_STYLE[band], "mean", text)
        for order, feature in enumerate(features):
            mine = table[(table.run == run) & (table.feature == feature)].sort_values("step")
            label = f"{feature}: {figure_text(diff.features.responds_to[feature], 26)}"
            text = [
                f"step {r.step}, feature {label}<br>shift {number(r.shift, sign=True)} "
                f"{interval(r.low, r.high, sign=True, like=r.shift)}, {figure_text(r.kind)}"
                for r in facts.records(mine)
            ]
            colour, symbol = SERIES[1 + order % (len(SERIES) - 1)], SYMBOLS[order % len(SYMBOLS)]
            line(column, panels, mine, label, colour, symbol, "shift", text)
        figure.update_xaxes(title={"text": "step", "standoff": 4}, row=panels, col=column)
    if panels == 2:
        figure.update_yaxes(title={"text": "accuracy, %"}, row=1, col=1)
    figure.update_yaxes(title={"text": "shift of activation"}, row=panels, col=1)
    second = {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom", "x": 0}
    made = finish(figure, height=panels * 230 + 150, left=62, top=66, bottom=110, legend=LEGEND, legend2=second)
    made.update_yaxes(showgrid=True)
    return made


def _along(diff: FeatureDiff) -> pd.DataFrame:
    table = diff.behaviour_dynamics
    if table is None or table.empty:
        return pd.DataFrame()
    table = table[table.behaviour == "accuracy"]
    return table[table.band != "all"] if (table.band != "all").any() else table
