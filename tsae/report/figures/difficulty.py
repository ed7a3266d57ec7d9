"""Figures of difficulty: how problems move between bands along a run, and pass@k before and after."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.base.statistics.intervals import too_few
from tsae.report.figures.layout import finish, panels, x_title
from tsae.report.figures.marks import area, aside, path
from tsae.report.figures.style import BAND_STYLE, LEGEND, SERIES, SYMBOLS
from tsae.report.story.difficulty import ends_of, moved_text, percent_change
from tsae.report.text import count, figure_text, percent
from tsae.rollouts.difficulty import Difficulty
from tsae.rollouts.schema import BANDS

_BAR = 0.28  # half the width of a checkpoint's bar, where neighbours are 1 apart
_ON_COLOUR = "#101317"  # readable on all band colours


def migration_figure(difficulty: Difficulty) -> go.Figure | None:
    """Bands of all problems at every step of every run, and the problems that move from one step to the next.

    A bar a checkpoint, easy on top; a ribbon a group of problems. Ribbons that are broader than 97.5 % of what chance
    makes are drawn full, the others pale.
    """
    table = difficulty.migration
    runs = [run for run in difficulty.paths if (table.run == run).any()]
    if not runs:
        return None
    titles = [f"<b>{figure_text(run, 30)}</b>" if run else "" for run in runs]
    figure, cells, height = panels(titles, 3, panel=260, gap=94, horizontal=0.04, least=220, shared_yaxes=True)
    for run, cell in zip(runs, cells, strict=True):
        path = difficulty.paths[run]
        mine = table[table.run == run]
        for place, (start, end) in enumerate(pairwise(path)):
            step = mine[(mine.start == start) & (mine.end == end)]
            figure.add_traces(_ribbons(step, place), rows=[cell["row"]] * 9, cols=[cell["col"]] * 9)
        for place, policy in enumerate(path):
            _bar(figure, _sizes(mine, policy), place, policy, cell)
        ticks = {"tickvals": list(range(len(path))), "ticktext": [figure_text(policy, 14) for policy in path]}
        angle = 0 if len(path) <= 4 else -35
        figure.update_xaxes(range=[-0.5, len(path) - 0.5], **ticks, tickangle=angle, ticks="", showgrid=False, **cell)
    figure.update_yaxes(range=[1, 0], tickvals=[0, 0.5, 1], ticktext=["100 %", "50 %", "0 %"])
    for band in BANDS:
        marker = {"color": BAND_STYLE[band][0], "symbol": "square"}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=band, marker=marker))
    return finish(figure, height=height + 130, left=56, top=66, bottom=64, legend=LEGEND, hovermode="closest")


def pass_at_k_figure(difficulty: Difficulty) -> go.Figure | None:
    """pass@k of where every run started and ended, by band."""
    table = difficulty.pass_at_k
    shown = ends_of(difficulty)
    table = table[table.policy.isin(shown)]
    if table.k.nunique() < 2:
        return None
    bands = [band for band in ("all", *BANDS) if (table.band == band).any()]
    titles = [f"<b>{band} problems</b>" for band in bands]
    figure, cells, height = panels(titles, len(bands), panel=226, gap=0, horizontal=0.025, shared_yaxes=True)
    sizes = sorted(table.k.unique())
    for band, cell in zip(bands, cells, strict=True):
        for order, policy in enumerate(shown):
            mine = table[(table.policy == policy) & (table.band == band)]
            # Of fewer problems there is no interval (NaN): none is drawn.
            ends = zip(mine.pass_at_k, mine.low.fillna(mine.pass_at_k), mine.high.fillna(mine.pass_at_k), strict=True)
            line = path(
                # Marks of one k side by side, so that their intervals can be told apart.
                [sizes.index(k) + aside(order, len(shown), 0.07) for k in mine.k],
                [tuple(100 * value for value in point) for point in ends],
                (SERIES[order % len(SERIES)], SYMBOLS[order % len(SYMBOLS)]),
                [_pass_hover(row) for _, row in mine.iterrows()],
                name=figure_text(policy),
                legendgroup=policy,
                showlegend=band == bands[0],
                widths=(1.6, 8, 1.2),
            )
            figure.add_trace(line, **cell)
    ticks = {"tickvals": list(range(len(sizes))), "ticktext": [str(k) for k in sizes]}
    figure.update_xaxes(range=[-0.4, len(sizes) - 0.6], **ticks)
    x_title(figure, "k")
    figure.update_yaxes(range=[-3, 103], ticksuffix=" %")
    figure = finish(figure, height=height + 114, left=56, top=66, bottom=48, legend=LEGEND)
    return figure.update_yaxes(showgrid=True)


def _sizes(mine: pd.DataFrame, policy: str) -> pd.Series:
    """Number of problems in every band at a policy of the path."""
    starts, ends = mine[mine.start == policy], mine[mine.end == policy]
    if not starts.empty:
        return starts[starts.end == starts.end.iloc[0]].groupby("from_band").n.sum().reindex(BANDS, fill_value=0)
    return ends[ends.start == ends.start.iloc[0]].groupby("to_band").n.sum().reindex(BANDS, fill_value=0)


def _bar(figure: go.Figure, sizes: pd.Series, place: int, policy: str, cell: dict[str, int]) -> None:
    total, top = int(sizes.sum()), 0.0
    for band in BANDS:
        share = sizes[band] / total
        x = [place - _BAR, place + _BAR, place + _BAR, place - _BAR]
        hover = f"{figure_text(policy)}: {int(sizes[band])} of {total} problems {band} ({percent(share)} %)"
        figure.add_trace(area(x, [top, top, top + share, top + share], BAND_STYLE[band][0], hover), **cell)
        if share >= 0.045:
            font = {"size": 11, "color": _ON_COLOUR}
            place_in = {"x": place, "y": top + share / 2}
            figure.add_annotation(text=f"{int(sizes[band])}", **place_in, showarrow=False, font=font, **cell)
        top += share


def _ribbons(step: pd.DataFrame, place: int) -> list[go.Scatter]:
    counts = step.pivot(index="from_band", columns="to_band", values="n").loc[list(BANDS), list(BANDS)]
    total = max(int(counts.to_numpy().sum()), 1)
    left = dict(zip(BANDS, _tops(counts.sum(axis=1).tolist(), total), strict=True))
    right = dict(zip(BANDS, _tops(counts.sum(axis=0).tolist(), total), strict=True))
    traces = []
    for before, after in product(BANDS, BANDS):
        row = step[(step.from_band == before) & (step.to_band == after)].iloc[0]
        share = row.n / total
        beyond = before != after and row.n > row.null_high
        x, upper, lower = _curve(place, left[before], right[after], share)
        left[before] += share
        right[after] += share
        across: list[Any] = [*x, *x[::-1]] if row.n else [None]
        down: list[Any] = [*upper, *lower[::-1]] if row.n else [None]
        colour = _translucent(BAND_STYLE[after][0], 0.72 if beyond else 0.24)
        hover = f"{figure_text(row.start)} → {figure_text(row.end)}: {moved_text(row)}"
        traces.append(area(across, down, colour, hover))
    return traces


def _tops(sizes: Sequence[int], total: int) -> list[float]:
    return [0.0, *(np.cumsum(sizes)[:-1] / total).tolist()]


def _curve(place: int, start: float, end: float, height: float) -> tuple[list[float], list[float], list[float]]:
    """x, upper and lower edge of a ribbon between two bars; level where it leaves and arrives."""
    t = np.linspace(0, 1, 21)
    x = place + _BAR + t * (1 - 2 * _BAR)
    upper = start + (end - start) * (1 - np.cos(np.pi * t)) / 2
    return x.tolist(), upper.tolist(), (upper + height).tolist()


def _translucent(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _pass_hover(row: pd.Series) -> str:
    text = (
        f"{figure_text(row.policy)}: pass@{row.k} {percent(row.pass_at_k)} % [{percent(row.low)}, {percent(row.high)}]"
        f"<br>{count(row.n_problems, 'problem')}"
    )
    if row.n_paired:
        ends = f"[{percent_change(row.difference_low)}, {percent_change(row.difference_high)}] points, paired"
        if pd.isna(row.difference_low):
            ends = f"points, {too_few(int(row.n_paired))}"
        text += f"<br>against the start {percent_change(row.difference)} {ends}"
    return text
