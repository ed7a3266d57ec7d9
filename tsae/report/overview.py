"""The one picture of the first screen: what each run did to behaviour, and to which kinds of features.

A column a run. Above, behaviour: grey ring = base, filled mark = run, whiskers = intervals. Below, features: a dot for
every feature that moved, placed by how far and which way; a row is a kind of feature (an annotator's class), or one
feature where no annotator named classes. Where there are no runs, the picture is of successes against failures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.diff.result import FeatureDiff
from tsae.report.story import facts
from tsae.report.style import LOWERED, NEUTRAL, RAISED, finish, vertical_zero, whiskers
from tsae.report.text import figure_text, number, percent

_MAX_RUNS, _MAX_ROWS, _LEFT = 4, 9, 178
_ROW, _TOP, _BOTTOM = 27, 84, 44  # pixels
# Between panels: axis labels and a heading; between stacked runs also an axis title and the next run's header.
_GAP, _STACKED_GAP = 64, 132


def overview(diff: FeatureDiff, *, columns: int = _MAX_RUNS) -> go.Figure | None:
    """Draw it; `columns=1` stacks the runs for narrow screens. None where there is nothing to draw."""
    runs = [c for c in facts.final_checkpoints(diff) if diff.main_part(c)][:_MAX_RUNS]
    if runs:
        return _runs(diff, runs, min(columns, len(runs)))
    bands = [b for b in ["all", *facts.bands_of(diff)] if len(_outcome_rows(diff, b))]
    return _outcomes(diff, bands, min(columns, len(bands))) if bands else None


@dataclass(frozen=True)
class _Row:
    """A line of the lower panel and the features on it."""

    label: str
    features: list[int]


def overview_caption(diff: FeatureDiff) -> str:
    """What the marks mean."""
    runs = [c for c in facts.final_checkpoints(diff) if diff.main_part(c)]
    if not runs:
        return (
            "Each mark is a feature, placed by how much more (right) or less (left) active it is in successes than in "
            "failures of the same problem (Δ, in standard deviations over base trajectories), with its interval."
        )
    below = (
        "a dot is one feature that moved, placed by Δ: its shift in standard deviations over base trajectories; "
        "numbers count dots"
        if facts.has_classes(diff)
        else "the features that moved most, with Δ (in standard deviations over base trajectories) and its interval"
    )
    shown = f" The first {_MAX_RUNS} of {len(runs)} runs are shown." if len(runs) > _MAX_RUNS else ""
    above = "Above: ring = base, filled = run, bars = intervals (grey: no clear change). Below: "
    if not _behaviour_lines(diff, runs):
        above, below = "", below[0].upper() + below[1:]
    return f"{above}{below}.{shown}"


def _behaviour_lines(diff: FeatureDiff, runs: list[str]) -> list[tuple[str, str, str]]:
    """(label, behaviour, band): accuracy by band, other shares over everything."""
    base = diff.base
    lines = []
    for name in facts.behaviours_of(diff):
        if not facts.is_share(diff, name):
            continue
        bands = [b for b in facts.BANDS if facts.behaviour(diff, base, b, name) is not None]
        for band in bands if name == "accuracy" and bands else ["all"]:
            if any(facts.change_of(diff, run, band, name) is not None for run in runs):
                label = facts.behaviour_name(name) + ("" if band == "all" else f", {band}")
                lines.append((label, name, band))
    return lines if any(facts.behaviour(diff, base, band, name) is not None for _, name, band in lines) else []


def _runs(diff: FeatureDiff, runs: list[str], columns: int) -> go.Figure:
    lines = _behaviour_lines(diff, runs)[:8]
    shifts = {run: facts.main_shift(diff, run) for run in runs}
    moved = {run: shift[shift.q <= diff.q] for run, shift in shifts.items()}
    families = _families(moved) if facts.has_classes(diff) else _single(diff, moved)
    panels = ([len(lines)] if lines else []) + ([len(families)] if families else [])
    if not panels:
        panels = [1]
    per_run, blocks = len(panels), -(-len(runs) // columns)
    # Every block of runs takes its panels plus room for the header and both axes.
    plot_height = blocks * (sum(panels) * _ROW + len(panels) * 12)
    gap = _GAP if blocks == 1 else _STACKED_GAP
    inner = plot_height + gap * (blocks * per_run - 1)
    height = inner + _TOP + _BOTTOM
    figure = make_subplots(
        rows=blocks * per_run,
        cols=columns,
        row_heights=[float(n * _ROW + 12) for n in panels] * blocks,
        vertical_spacing=gap / inner if blocks * per_run > 1 else 0,
        horizontal_spacing=0.035,
        shared_yaxes=columns > 1,
    )
    limit = max([0.5, *(float(m.delta.abs().max()) for m in moved.values() if len(m))]) * 1.3
    for position, run in enumerate(runs):
        row, column = position // columns * per_run + 1, position % columns + 1
        _header(figure, diff, run, row, column, columns)
        if column == 1:
            titles = (["<b>behaviour</b>"] if lines else []) + (["<b>features that respond to</b>"] if families else [])
            for offset, title in enumerate(titles):
                _panel_title(figure, title, row + offset)
        if lines:
            _behaviours(figure, diff, run, lines, row, column)
        if families:
            cell = row + (1 if lines else 0)
            if facts.has_classes(diff):
                _strip(figure, families, moved[run], limit, cell, column)
            else:
                _forest(figure, families, moved[run], cell, column)
            _feature_axes(figure, families, limit, cell, column)
    return finish(figure, height=height, left=_LEFT, top=_TOP, bottom=_BOTTOM, showlegend=False)


def _header(figure: go.Figure, diff: FeatureDiff, run: str, row: int, column: int, columns: int) -> None:
    band = facts.trained_on(diff, run)
    # Beside each other the columns are wide enough for name and band on one line; stacked, on a narrow screen, not.
    between = "<br>" if columns == 1 else " · "
    lines = [f"<b>{figure_text(run, 28)}</b>" + (f"{between}trained on {figure_text(band, 16)}" if band else "")]
    if (both := facts.change_of(diff, run, "all", "response_length")) is not None:
        before, after = both
        lines.append(f"length {number(before['mean'])} → {number(after['mean'])} tokens")
    contrast = diff.contrast(kind="shift", checkpoint=run, part=diff.main_part(run), band="all")
    if contrast is not None:
        lines.append(
            "features: not drawn"
            if contrast.note
            else f"{contrast.n_discoveries} of {contrast.n_tested} features moved"
        )
    axis = figure.get_subplot(row, column)
    figure.add_annotation(
        text="<br>".join(lines),
        xref="paper",
        yref="paper",
        x=axis.xaxis.domain[0],
        y=axis.yaxis.domain[1],
        yshift=8,
        xanchor="left",
        yanchor="bottom",
        align="left",
        showarrow=False,
        font={"size": 12.5 if columns < 4 else 11},
    )


def _panel_title(figure: go.Figure, title: str, row: int) -> None:
    figure.add_annotation(
        text=title,
        xref="paper",
        yref="paper",
        x=0,
        y=figure.get_subplot(row, 1).yaxis.domain[1],
        xshift=-6,
        yshift=2,
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        font={"size": 12},
    )


def _behaviours(
    figure: go.Figure, diff: FeatureDiff, run: str, lines: list[tuple[str, str, str]], row: int, column: int
) -> None:
    base = diff.base
    cell = {"row": row, "col": column}
    lines_and_marks = []
    for y, (label, name, band) in enumerate(lines):
        before, after = (facts.behaviour(diff, policy, band, name) for policy in (base, run))
        if before is None or after is None:
            continue
        colour = {1: RAISED, -1: LOWERED, 0: NEUTRAL}[facts.direction(after)]
        lines_and_marks.append(
            go.Scatter(
                x=[100 * before["mean"], 100 * after["mean"]],
                y=[y, y],
                mode="lines",
                line={"color": colour, "width": 2.5},
                opacity=0.55,
                hoverinfo="skip",
            )
        )
        for who, point, symbol, size in ((base, before, "circle-open", 9), (run, after, "circle", 10)):
            ink = NEUTRAL if who == base else colour
            lines_and_marks.append(
                go.Scatter(
                    x=[100 * point["mean"]],
                    y=[y],
                    mode="markers" if who == base else "markers+text",
                    text=[f"  {percent(point['mean'])}  "],
                    textposition="middle right" if after["mean"] >= before["mean"] else "middle left",
                    textfont={"size": 11},
                    marker={"symbol": symbol, "size": size, "color": ink, "line": {"width": 2, "color": ink}},
                    error_x=whiskers([tuple(100 * point[side] for side in ("mean", "low", "high"))], ink),
                    hovertemplate=(
                        f"{figure_text(who)}<br>{figure_text(label)}: {percent(point['mean'])} % "
                        f"[{percent(point['low'])}, {percent(point['high'])}]<br>"
                        f"{int(point['n_problems'])} problems<extra></extra>"
                    ),
                )
            )
    n = len(lines_and_marks)
    figure.add_traces(lines_and_marks, rows=[row] * n, cols=[column] * n)
    figure.update_xaxes(range=[-17, 119], tickvals=[0, 50, 100], ticktext=["0 %", "50 %", "100 %"], **cell)
    labels = [figure_text(label, 29) for label, _, _ in lines]
    figure.update_yaxes(
        range=[len(lines) - 0.4, -0.6], tickvals=list(range(len(lines))), ticktext=labels, ticks="", **cell
    )


def _families(moved: dict[str, pd.DataFrame]) -> list[_Row]:
    """Classes with the most shift over all runs, ordered by what the last run did to them."""
    everything = pd.concat(list(moved.values()))
    if everything.empty:
        return []
    weight = everything.delta.abs().groupby(everything.responds_to).sum().sort_values(ascending=False, kind="stable")
    kept = [name for name in weight.index if name != "never active"][:_MAX_ROWS]
    last = next(table for table in reversed(list(moved.values())) if len(table))
    mean = last.delta.groupby(last.responds_to).mean()
    kept.sort(key=lambda name: -float(mean.get(name, 0.0)))
    return [_Row(name, []) for name in kept]


def _single(diff: FeatureDiff, moved: dict[str, pd.DataFrame]) -> list[_Row]:
    everything = pd.concat(list(moved.values()))
    if everything.empty:
        return []
    strength = everything.delta.abs().groupby(everything.feature).max().sort_values(ascending=False, kind="stable")
    chosen = [int(f) for f in strength.index[:_MAX_ROWS]]
    last = next(table for table in reversed(list(moved.values())) if len(table))
    chosen.sort(key=lambda f: -float(last.delta.get(f, 0.0)))
    return [_Row(f"{f}: {diff.features.responds_to[f]}", [f]) for f in chosen]


def _strip(figure: go.Figure, families: list[_Row], moved: pd.DataFrame, limit: float, row: int, column: int) -> None:
    """A dot a feature; their number, lowered and raised, at the ends of its row."""
    parts: list[pd.DataFrame] = []
    counts: list[tuple[float, int, int]] = []
    for y, family in enumerate(families):
        mine = moved[moved.responds_to == family.label].sort_values("delta", kind="stable")
        # Neighbours step through five heights, so that dots at the same place stay countable.
        offset = np.array([0.0, 0.22, -0.22, 0.11, -0.11])[np.arange(len(mine)) % 5]
        parts.append(mine.assign(height=y + offset))
        counts += [(y, sign, n) for sign in (-1, 1) if (n := int((np.sign(mine.delta) == sign).sum()))]
    dots = pd.concat(parts)
    text = [
        f"feature {r.feature}<br>{figure_text(_described(r))}<br>{number(r.reference)} → {number(r.mean)}, "
        f"shift {number(r.difference, sign=True)} [{number(r.low, sign=True)}, {number(r.high, sign=True)}]<br>"
        f"Δ {facts.effect_text(r)}"
        for r in facts.records(dots)
    ]
    colours = [RAISED if d > 0 else LOWERED for d in dots.delta]
    points = go.Scatter(
        x=dots.delta.tolist(),
        y=dots.height.tolist(),
        mode="markers",
        marker={"size": 7, "color": colours, "opacity": 0.62, "line": {"width": 0}},
        text=text,
        hovertemplate="%{text}<extra></extra>",
    )
    numbers = go.Scatter(
        x=[0.91 * limit * sign for _, sign, _ in counts],
        y=[y for y, _, _ in counts],
        mode="text",
        text=[f"<b>{n}</b>" for _, _, n in counts],
        textfont={"size": 11, "color": [RAISED if sign > 0 else LOWERED for _, sign, _ in counts]},
        hoverinfo="skip",
    )
    figure.add_traces([points, numbers], rows=[row] * 2, cols=[column] * 2)
    vertical_zero(figure, row=row, col=column)


def _described(row: object) -> str:
    """Hover text: what a row's feature responds to."""
    share = getattr(row, "share", None)
    described = str(getattr(row, "responds_to", ""))
    return described if share is None else f"{described}, {100 * share:.0f} % of its activation"


def _forest(figure: go.Figure, families: list[_Row], moved: pd.DataFrame, row: int, column: int) -> None:
    for y, family in enumerate(families):
        for feature in family.features:
            if feature in moved.index:
                _interval_mark(figure, facts.record(moved, feature), y, row, column)
    vertical_zero(figure, row=row, col=column)


def _interval_mark(figure: go.Figure, record: pd.Series, y: float, row: int, column: int) -> None:
    d, low, high = facts.standardised(record)
    colour = RAISED if d > 0 else LOWERED
    figure.add_trace(
        go.Scatter(
            x=[d],
            y=[y],
            mode="markers",
            marker={"size": 9, "color": colour},
            error_x=whiskers([(d, low, high)], colour),
            hovertemplate=(
                f"feature {int(record.feature)}<br>{figure_text(record.responds_to)}<br>"
                f"{number(record.reference)} → {number(record['mean'])}, Δ {facts.effect_text(record)}<extra></extra>"
            ),
        ),
        row=row,
        col=column,
    )


def _feature_axes(figure: go.Figure, families: list[_Row], limit: float, row: int, column: int) -> None:
    cell = {"row": row, "col": column}
    figure.update_xaxes(
        range=[-limit, limit], nticks=6, title={"text": "← lowered   Δ   raised →", "standoff": 4}, **cell
    )
    labels = [figure_text(family.label, 29) for family in families]
    figure.update_yaxes(
        range=[len(families) - 0.4, -0.6], tickvals=list(range(len(families))), ticktext=labels, ticks="", **cell
    )


def _outcome_rows(diff: FeatureDiff, band: str) -> pd.DataFrame:
    rows = facts.rows(diff, kind="outcome", checkpoint=diff.base, band=band)
    return facts.strongest(rows, diff.q, _MAX_ROWS)


def _outcomes(diff: FeatureDiff, bands: list[str], columns: int) -> go.Figure:
    tables = {band: _outcome_rows(diff, band) for band in bands}
    # The same share of rows for every band, so that none is crowded out.
    share = max(3, 14 // len(bands))
    chosen: list[int] = list(dict.fromkeys(int(f) for table in tables.values() for f in table.index[:share]))
    rows = [_Row(f"{f}: {diff.features.responds_to[f]}", [f]) for f in chosen]
    blocks = -(-len(bands) // columns)
    height = blocks * (len(rows) * _ROW + 12) + (blocks - 1) * 78 + 90
    figure = make_subplots(
        rows=blocks,
        cols=columns,
        vertical_spacing=78 / (height - 90) if blocks > 1 else 0,
        horizontal_spacing=0.035,
        shared_yaxes=columns > 1,
        subplot_titles=[f"<b>{band} problems</b>" for band in bands],
    )
    limit = 1.1 * max(max(abs(v) for v in facts.standardised(r)) for t in tables.values() for _, r in t.iterrows())
    for position, band in enumerate(bands):
        row, column = position // columns + 1, position % columns + 1
        full = facts.rows(diff, kind="outcome", checkpoint=diff.base, band=band)
        _forest(figure, rows, full[full.q <= diff.q], row, column)
        _feature_axes(figure, rows, limit, row, column)
        figure.update_xaxes(title={"text": "← in failures   Δ   in successes →", "standoff": 4}, row=row, col=column)
    return finish(figure, height=height, left=190, top=46, showlegend=False)
