"""The null for changed weights: what noise as large as a run's update moves, beside what the run moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.result import FeatureDiff
from tsae.report import views
from tsae.report.figures.layout import finish, panels
from tsae.report.figures.style import LEGEND, NEUTRAL, RAISED
from tsae.report.text import count, figure_text, html_text, listed, number, visible

NOT_RUN = "null for changed weights: not run, since it reads the models (give --series and --sae)"
_LEAST = 1e-5  # |Δ| below which the figure does not tell sizes apart


def noise_lines(info: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, from ``FeatureDiff.info["noise"]``."""
    return [f"{visible(id)}: {_sentence(record)}" for id, record in info.items()]


def noise_sentence(diff: FeatureDiff, checkpoint: str) -> str:
    """What noise of the size of a checkpoint's update moves; empty where that was not measured."""
    record = (diff.info.get("noise") or {}).get(checkpoint)
    if record is None:
        return ""
    if record["note"]:
        return f"No null for changed weights: {record['note']}."
    worst = max(zip(record["noise_moved"], record["noise_tested"], strict=True), key=lambda pair: pair[0] / pair[1])
    return (
        f"Noise of its update's size moves at most {worst[0]} of {worst[1]}, where it moves {record['n_moved']} of "
        f"{record['n_tested']} (same text, {count(record['n_problems'], 'problem')})."
    )


def _sentence(record: Mapping[str, Any]) -> str:
    if record["note"]:
        return visible(record["note"])
    noise = listed([f"{m} of {n}" for m, n in zip(record["noise_moved"], record["noise_tested"], strict=True)])
    size = "of the norm of its update" if record["share"] == 1 else f"of {record['share']:.3g} of its update's norm"
    return (
        f"on the same trajectories of {count(record['n_problems'], 'problem')} it moved {record['n_moved']} of "
        f"{record['n_tested']} features; noise {size} ({record['update_norm']:.2g} of the weights') moved {noise}; "
        f"median |Δ| {number(record['run']['median'])} against {number(record['noise']['median'])}"
    )


def noise_figure(diff: FeatureDiff) -> go.Figure | None:
    """The share of features with a larger |Δ|, of every run and of every draw of noise."""
    table = diff.noise
    if table is None or table.empty:
        return None
    runs = [run for run in views.final_checkpoints(diff) if (table.checkpoint == run).any()]
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


def noise_caption(diff: FeatureDiff) -> str:
    """What the figure shows."""
    return (
        "Per cent of features with a larger |Δ|: of the run (thick), and of the base with Gaussian noise that has, in "
        "every tensor, the norm of the run's update (thin). Both read the same text of some of the problems. Dotted: "
        f"|Δ| = {diff.minimum_effect:g}, beyond which a feature moved."
    )


def noise_html(diff: FeatureDiff) -> str:
    """The counts in words."""
    info = diff.info.get("noise")
    if diff.info["config"].get("noise_draws") == 0:
        return '<p class="quiet">The null for changed weights was left out (noise_draws=0).</p>'
    if not info:
        return f'<p class="quiet">{html_text(NOT_RUN[0].upper() + NOT_RUN[1:])}.</p>'
    return "".join(f"<p>{html_text(line)}.</p>" for line in noise_lines(info))
