"""Figures by band: every behaviour of every checkpoint, and the shift of every family of features."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.layout import finish, name_rows, panels, vertical_zero, x_title
from tsae.report.figures.marks import Mark, aside, dots
from tsae.report.figures.style import BAND_STYLE, LEGEND
from tsae.report.story import facts
from tsae.report.text import figure_text, interval, number, percent


def behaviour_figure(diff: FeatureDiff) -> go.Figure | None:
    """Every behaviour by checkpoint and band, with intervals."""
    names = facts.behaviours_of(diff)
    if not names:
        return None
    table = diff.behaviours
    policies = list(table.policy.unique())
    bands = [b for b in facts.BANDS if (table.band == b).any()] or ["all"]
    titles = [f"<b>{figure_text(facts.behaviour_name(n))}</b>" for n in names]
    panel = max(90, len(policies) * (14 * len(bands) + 12))
    figure, cells, height = panels(titles, 4, panel=panel, gap=80, shared_yaxes=True)
    for name, cell in zip(names, cells, strict=True):
        share = facts.is_share(diff, name)
        factor, unit = (100.0, " %") if share else (1.0, " tokens" if name == "response_length" else "")
        shown: Callable[[float], str] = percent if share else number
        for order, band in enumerate(bands):
            marks = [
                Mark(
                    policies.index(r.policy),
                    (factor * r.mean, factor * r.low, factor * r.high),
                    f"{figure_text(r.policy)}, {band}: {shown(r.mean)}{unit} [{shown(r.low)}, {shown(r.high)}]<br>"
                    f"{r.n_problems} problems, {r.n_trajectories} trajectories",
                )
                for r in facts.records(table[(table.behaviour == name) & (table.band == band)])
            ]
            figure.add_trace(_band_dots(marks, band, order, len(bands), 0.24, name == names[0]), **cell)
        if share:
            figure.update_xaxes(range=[-3, 103], ticksuffix=" %", nticks=5, **cell)
        else:
            figure.update_xaxes(rangemode="tozero", nticks=5, **cell)
            x_title(figure, unit.strip(), **cell)
        name_rows(figure, policies, **cell)
    return finish(figure, height=height + 110, left=130, top=66, legend=LEGEND)


def family_figure(diff: FeatureDiff) -> go.Figure | None:
    """Shift of every family in every run, by band."""
    table = diff.families
    if table.empty or not table.note.eq("").any():
        return None
    runs = [run for run in facts.final_checkpoints(diff) if run in set(table.checkpoint)]
    families = list(table.family.unique())
    bands = [band for band in ("all", *facts.BANDS) if (table.band == band).any()]
    titles = [f"<b>{figure_text(f, 28)}</b> ({table[table.family == f].n_features.iloc[0]} features)" for f in families]
    panel = len(runs) * (13 * len(bands) + 12)
    figure, cells, height = panels(titles, 3, panel=panel, gap=80, shared_yaxes=True)
    drawn = table[(table.note == "") & table.checkpoint.isin(runs)]
    for family, cell in zip(families, cells, strict=True):
        for order, band in enumerate(bands):
            marks = [
                Mark(
                    runs.index(r.checkpoint),
                    (r.difference, r.low, r.high),
                    f"{figure_text(r.checkpoint)}, {band} problems: {number(r.difference, sign=True)} "
                    f"{interval(r.low, r.high, sign=True, like=r.difference)}, q {r.q:.2g}",
                )
                for r in facts.records(drawn[(drawn.family == family) & (drawn.band == band)])
            ]
            figure.add_trace(_band_dots(marks, band, order, len(bands), 0.19, family == families[0]), **cell)
        vertical_zero(figure, **cell)
        x_title(figure, "shift, standard deviations over trajectories", **cell)
        name_rows(figure, runs, **cell)
    return finish(figure, height=height + 112, left=130, top=66, bottom=46, legend=LEGEND)


def _band_dots(marks: list[Mark], band: str, order: int, n: int, step: float, named: bool) -> go.Scatter:
    up, name = aside(order, n, step), f"{band} problems"
    return dots(marks, BAND_STYLE[band], up=up, name=name, legendgroup=band, showlegend=named)
