"""The figure of what happened along the steps of runs."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.layout import finish, panels, x_title
from tsae.report.figures.marks import path
from tsae.report.figures.style import BAND_STYLE, LEGEND, run_style
from tsae.report.story import facts
from tsae.report.text import figure_text, interval, number, percent

_BELOW = {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom", "x": 0}


def steps_figure(diff: FeatureDiff, features: list[int]) -> go.Figure | None:
    """Accuracy by band, and the shift of the given features, along the steps of every run."""
    table = diff.dynamics
    if table is None or table.empty:
        return None
    runs = list(table.run.unique())
    lived = _accuracy(diff)
    heights = [160, 220] if len(lived) else [204]
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, cells, height = panels(
        titles, len(runs), panel=heights, gap=54, least=180, shared_yaxes="rows", shared_xaxes=True
    )
    named: set[str] = set()

    def line(mine: pd.DataFrame, value: str, name: str, style: tuple[str, str], text: list[str], place: int) -> None:
        points = list(zip(mine[value], mine.low, mine.high, strict=True))
        below = place % len(heights) == len(heights) - 1
        legend = {"legend": "legend2" if below else "legend", "legendgroup": name, "showlegend": name not in named}
        line = path(mine.step.tolist(), points, style, text, name=name, widths=(1.5, 7, 1.1), **legend)
        figure.add_trace(line, **cells[place])
        named.add(name)

    for first, run in zip(range(0, len(cells), len(heights)), runs, strict=True):
        for band in [b for b in (*facts.BANDS, "all") if len(lived) and (lived.band == b).any()]:
            mine = lived[(lived.run == run) & (lived.band == band)].sort_values("step")
            text = [
                f"step {r.step}, {band}: {percent(r.mean)} % [{percent(r.low)}, {percent(r.high)}]"
                for r in facts.records(mine)
            ]
            scaled = mine.assign(**{c: 100 * mine[c] for c in ("mean", "low", "high")})
            line(scaled, "mean", f"accuracy, {band} problems", BAND_STYLE[band], text, first)
        last = first + len(heights) - 1
        for order, feature in enumerate(features):
            mine = table[(table.run == run) & (table.feature == feature)].sort_values("step")
            label = f"{feature}: {figure_text(diff.features.responds_to[feature], 26)}"
            text = [
                f"step {r.step}, feature {label}<br>shift {number(r.shift, sign=True)} "
                f"{interval(r.low, r.high, sign=True, like=r.shift)}, {figure_text(r.kind)}"
                for r in facts.records(mine)
            ]
            line(mine, "shift", label, run_style(order), text, last)
        x_title(figure, "step", **cells[last])
    if len(lived):
        figure.update_yaxes(title={"text": "accuracy, %"}, row=1, col=1)
    figure.update_yaxes(title={"text": "shift of activation"}, row=len(heights), col=1)
    made = finish(figure, height=height + 176, left=62, top=66, bottom=110, legend=LEGEND, legend2=_BELOW)
    return made.update_yaxes(showgrid=True)


def _accuracy(diff: FeatureDiff) -> pd.DataFrame:
    table = diff.behaviour_dynamics
    if table is None or table.empty:
        return pd.DataFrame()
    table = table[table.behaviour == "accuracy"]
    return table[table.band != "all"] if (table.band != "all").any() else table
