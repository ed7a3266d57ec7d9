"""The figure of the null for changed weights: what a run moved, and what noise as large as its update moves."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.layout import finish, panels
from tsae.report.figures.style import LEGEND, NEUTRAL, RAISED
from tsae.report.story import facts
from tsae.report.text import figure_text

_LEAST = 1e-5  # |Δ| below which the figure does not tell sizes apart


def noise_figure(diff: FeatureDiff) -> go.Figure | None:
    """The share of features with a larger |Δ|, of every run and of every draw of noise."""
    table = diff.noise
    if table is None or table.empty:
        return None
    runs = [run for run in facts.final_checkpoints(diff) if (table.checkpoint == run).any()]
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, cells, height = panels(titles, 4, panel=190, gap=74, horizontal=0.03, shared_yaxes=True)
    for position, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        mine = table[table.checkpoint == run]
        for draw, rows in mine.groupby("draw"):
            size, share = _survival(rows.delta)
            figure.add_trace(
                go.Scatter(
                    x=size.tolist(),
                    y=share.tolist(),
                    mode="lines",
                    line={"shape": "hv", "width": 1.2 if draw else 2.4, "color": NEUTRAL if draw else RAISED},
                    name="noise of the update's size" if draw else "run",
                    legendgroup="noise" if draw else "run",
                    showlegend=position == 0 and draw in (0, 1),
                    hovertemplate="%{y:.0f} % of features have |Δ| > %{x:.2g}<extra></extra>",
                ),
                **cell,
            )
        figure.add_vline(x=diff.minimum_effect, line={"color": NEUTRAL, "width": 1, "dash": "dot"}, **cell)
        figure.update_xaxes(type="log", exponentformat="power", dtick=1, title={"text": "|Δ|", "standoff": 2}, **cell)
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", nticks=5)
    return finish(figure, height=height + 110, left=60, top=66, bottom=44, legend=LEGEND)


def _survival(delta: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Sizes in ascending order, and the per cent of features above each."""
    size = np.sort(np.maximum(delta.abs().to_numpy(), _LEAST))
    return size, 100 * (1 - (np.arange(len(size)) + 1) / len(size))
