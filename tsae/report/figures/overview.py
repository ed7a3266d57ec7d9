"""The one picture of the first screen: what each run did to behaviour, and to which kinds of features.

A column a run. Above, behaviour: grey ring = base, filled mark = run, whiskers = intervals. Below, features: a dot for
every feature that moved, placed by how far and which way; a row is a kind of feature (an annotator's class), or one
feature where no annotator named classes. Where there are no runs, the picture is of successes against failures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures import layout
from tsae.report.figures.features import drawn_runs
from tsae.report.figures.layout import HOVER, LOWERED, NEUTRAL, RAISED, Mark
from tsae.report.story import facts
from tsae.report.story.statements import surviving, survivors
from tsae.report.story.verdict import clear_changes, measured_changes
from tsae.report.text import capitalised, figure_text, number, percent

_OTHERS = "others"
_MAX_RUNS, _MAX_ROWS, _MAX_LINES, _LEFT = 4, 9, 8, 178
_ROW, _TOP, _BOTTOM = 27, 100, 44  # pixels
# Between panels: axis labels and a heading.
_GAP = 64


def overview(diff: FeatureDiff) -> go.Figure | None:
    """Draw it. None where there is nothing to draw."""
    if runs := drawn_runs(diff)[:_MAX_RUNS]:
        return _runs(diff, runs)
    tables = {band: _outcome_rows(diff, band) for band in ["all", *facts.bands_of(diff)]}
    tables = {band: table for band, table in tables.items() if len(table)}
    return _outcomes(diff, tables) if tables else None


def overview_caption(diff: FeatureDiff) -> str:
    """What the marks mean."""
    runs = drawn_runs(diff)
    if not runs:
        return (
            "Each mark is a feature, placed by how much more (right) or less (left) active it is in successes than in "
            "failures of the same problem (Δ), with its interval."
        )
    below = (
        "no feature moved"
        if all(diff.main_shift(run, discoveries=True).empty for run in runs)
        else "a dot is one feature that moved, placed by Δ; strong ones survive the controls for length, position and "
        "tokens; numbers count dots; a click opens the feature's card"
        if facts.has_classes(diff)
        else "the features that moved most, with Δ and its interval"
    )
    shown = f" The first {_MAX_RUNS} of {len(runs)} runs are shown." if len(runs) > _MAX_RUNS else ""
    above = "Above: ring = base, filled = run, bars = intervals (grey: no clear change). Below: "
    if not _behaviour_lines(diff, runs):
        above, below = "", capitalised(below)
    return f"{above}{below}.{shown}"


def _behaviour_lines(diff: FeatureDiff, runs: list[str]) -> list[tuple[str, str, str]]:
    """(label, behaviour, band): accuracy by band, other shares over everything."""
    lines = []
    for name in (name for name in facts.behaviours_of(diff) if facts.is_share(diff, name)):
        bands = [b for b in facts.BANDS if facts.behaviour(diff, diff.base, b, name) is not None]
        for band in bands if name == "accuracy" and bands else ["all"]:
            if any(facts.change_of(diff, run, band, name) is not None for run in runs):
                label = facts.behaviour_name(name) + ("" if band == "all" else f", {band}")
                lines.append((label, name, band))
    return lines


def _runs(diff: FeatureDiff, runs: list[str]) -> go.Figure:
    lines = _behaviour_lines(diff, runs)[:_MAX_LINES]
    shifts = {run: facts.main_shift(diff, run) for run in runs}
    moved = {run: shift[shift.q <= diff.q] for run, shift in shifts.items()}
    by_class = facts.has_classes(diff)
    rows = _largest(moved, "responds_to" if by_class else "feature")
    if by_class:  # every feature that moved is one of the dots
        moved = {
            run: m.assign(responds_to=m.responds_to.where(m.responds_to.isin(rows), _OTHERS))
            for run, m in moved.items()
        }
        rows += [_OTHERS] * any(_OTHERS in set(m.responds_to) for m in moved.values())
    heads = {"<b>behaviour</b>": len(lines), "<b>features that respond to</b>": len(rows)}
    heads = {head: n for head, n in heads.items() if n} or {"": 1}
    figure, cells, height = layout.panels(
        [_header(diff, run, moved[run]) for run in runs],
        len(runs),
        panel=[n * _ROW + 12 for n in heads.values()],
        gap=_GAP,
        horizontal=0.035,
        heads=list(heads) if lines or rows else [],
        beside=True,
        align="left",
        size=12.5 if len(runs) < 4 else 11,
        shared_yaxes=len(runs) > 1,
    )
    limit = max([0.5, *(float(m.delta.abs().max()) for m in moved.values() if len(m))]) * 1.3
    for run, first in zip(runs, range(0, len(cells), len(heads)), strict=True):
        if lines:
            _behaviours(figure, diff, run, lines, cells[first])
        if rows:
            cell = cells[first + len(heads) - 1]
            (_strip if by_class else _forest)(figure, rows, moved[run], cell, **{"limit": limit} if by_class else {})
            _feature_axes(figure, rows if by_class else _named(diff, rows), limit, "← lowered   Δ   raised →", cell)
    return layout.finish(figure, height=height + _TOP + _BOTTOM, left=_LEFT, top=_TOP, bottom=_BOTTOM, showlegend=False)


def _header(diff: FeatureDiff, run: str, moved: pd.DataFrame) -> str:
    """A run's name, band, length of responses and number of features that moved, a line each."""
    lines = [f"<b>{figure_text(run, 28)}</b>"]
    if band := facts.trained_on(diff, run):
        lines.append(f"trained on {figure_text(band, 16)}")
    if (both := facts.change_of(diff, run, "all", "response_length")) is not None:
        before, after = both
        lines.append(f"length {number(before['mean'])} → {number(after['mean'])} tokens")
    contrast = diff.contrast(kind="shift", checkpoint=run, part=diff.main_part(run), band="all")
    if contrast is not None:
        found = f"{contrast.n_discoveries} of {contrast.n_tested} features moved"
        lines.append("features: not drawn" if contrast.note else found)
        if survivors(moved):
            lines.append(f"{len(surviving(moved)) or 'none'} of them survive all controls")
    return "<br>".join(lines)


def _behaviours(
    figure: go.Figure, diff: FeatureDiff, run: str, lines: list[tuple[str, str, str]], cell: dict[str, int]
) -> None:
    # As the verdict has it: of several measures side by side, some intervals leave out 0 by chance.
    found = clear_changes(measured_changes(diff, run), float(diff.info["config"]["confidence"]))
    clear = {(change.name, change.band) for change in found}
    for y, (label, name, band) in enumerate(lines):
        before, after = (facts.behaviour(diff, policy, band, name) for policy in (diff.base, run))
        if before is None or after is None:
            continue
        colour = {1: RAISED, -1: LOWERED, 0: NEUTRAL}[facts.direction(after) if (name, band) in clear else 0]
        line = {"color": colour, "width": 2.5}
        x = [100 * before["mean"], 100 * after["mean"]]
        figure.add_trace(go.Scatter(x=x, y=[y, y], mode="lines", line=line, opacity=0.55, hoverinfo="skip"), **cell)
        side = "right" if after["mean"] >= before["mean"] else "left"
        for who, point, symbol, size, ink in (
            (diff.base, before, "circle-open", 9, NEUTRAL),
            (run, after, "circle", 10, colour),
        ):
            hover = (
                f"{figure_text(who)}<br>{figure_text(label)}: {percent(point['mean'])} % "
                f"[{percent(point['low'])}, {percent(point['high'])}]<br>{int(point['n_problems'])} problems"
            )
            ends = tuple(100 * point[end] for end in ("mean", "low", "high"))
            mark = layout.dots([Mark(y, ends, "")], (ink, symbol), size=size)
            mark.marker.line = {"width": 2, "color": ink}
            mark.update(hovertemplate=f"{hover}<extra></extra>")
            figure.add_trace(mark, **cell)
        # The number stands beyond mark and interval.
        end = max(after["mean"], after["high"]) if side == "right" else min(after["mean"], after["low"])
        beyond = after["mean"] if pd.isna(end) else end
        figure.add_trace(
            go.Scatter(
                x=[100 * beyond], y=[y], mode="text", text=[f"  {percent(after['mean'])}  "],
                textposition=f"middle {side}", textfont={"size": 11}, hoverinfo="skip",
            ),
            **cell,
        )  # fmt: skip
    # Room for the number beside a mark at either end; fit.js keeps it in pixels.
    figure.update_layout(meta={**figure.layout.meta, "pad": 48})
    figure.update_xaxes(range=[-25, 125], tickvals=[0, 50, 100], ticktext=["0 %", "50 %", "100 %"], **cell)
    layout.label_rows(figure, [figure_text(label, 29) for label, _, _ in lines], **cell)


def _largest(moved: dict[str, pd.DataFrame], by: str) -> list:
    """Classes with the most shift over all runs, or features with the largest, by what the last run did to them."""
    everything = pd.concat(list(moved.values()))
    if everything.empty:
        return []
    sizes = everything.delta.abs().groupby(everything[by])
    size = (sizes.sum() if by == "responds_to" else sizes.max()).sort_values(ascending=False, kind="stable")
    last = next(table for table in reversed(list(moved.values())) if len(table))
    mean = last.delta.groupby(last[by]).mean()
    kept = [row for row in size.index if row != "never active"][:_MAX_ROWS]
    return sorted(kept, key=lambda row: -float(mean.get(row, 0.0)))


def _named(diff: FeatureDiff, features: Sequence[int]) -> list[str]:
    return [f"{f}: {diff.names[f]}" for f in features]


def _strip(figure: go.Figure, classes: Sequence[str], moved: pd.DataFrame, cell: dict[str, int], limit: float) -> None:
    """A dot a feature; their number, lowered and raised, at the ends of its row."""
    parts: list[pd.DataFrame] = []
    counts: list[tuple[float, int, int]] = []
    for y, name in enumerate(classes):
        mine = moved[moved.responds_to == name].sort_values("delta", kind="stable")
        # Neighbours step through five heights, so that dots at the same place stay countable.
        offset = np.array([0.0, 0.22, -0.22, 0.11, -0.11])[np.arange(len(mine)) % 5]
        parts.append(mine.assign(height=y + offset))
        counts += [(y, sign, n) for sign in (-1, 1) if (n := int((np.sign(mine.delta) == sign).sum()))]
    shown = pd.concat(parts)
    left = set(surviving(shown).feature)
    points = go.Scatter(
        x=shown.delta.tolist(),
        y=shown.height.tolist(),
        mode="markers",
        marker={
            "size": 7,
            "color": list(map(_colour, shown.delta)),
            "opacity": [0.95 if feature in left else 0.35 for feature in shown.feature],
            "line": {"width": [1.2 if feature in left else 0 for feature in shown.feature], "color": NEUTRAL},
        },
        customdata=shown.feature.tolist(),
        text=[
            f"feature {r.feature}<br>{figure_text(f'{r.responds_to}, {100 * r.share:.0f} % of its activation')}<br>"
            f"{number(r.reference)} → {number(r.mean)}, shift {number(r.difference, sign=True)} "
            f"[{number(r.low, sign=True)}, {number(r.high, sign=True)}]<br>"
            f"Δ {facts.effect_text(r)}{facts.often_text(r)}"
            for r in facts.records(shown)
        ],
        **HOVER,
    )
    numbers = go.Scatter(
        x=[0.91 * limit * sign for _, sign, _ in counts],
        y=[y for y, _, _ in counts],
        mode="text",
        text=[f"<b>{n}</b>" for _, _, n in counts],
        textfont={"size": 11, "color": [_colour(sign) for _, sign, _ in counts]},
        hoverinfo="skip",
    )
    figure.add_traces([points, numbers], rows=[cell["row"]] * 2, cols=[cell["col"]] * 2)
    layout.vertical_zero(figure, **cell)


def _colour(delta: float) -> str:
    return RAISED if delta > 0 else LOWERED


def _forest(figure: go.Figure, features: Sequence[int], moved: pd.DataFrame, cell: dict[str, int]) -> None:
    """A mark with its interval for every feature."""
    for y, feature in enumerate(features):
        if feature in moved.index:
            record = facts.record(moved, feature)
            hover = (
                f"feature {feature}<br>{figure_text(facts.responds(record))}<br>"
                f"{number(record.reference)} → {number(record['mean'])}, Δ {facts.effect_text(record)}"
            )
            point = facts.standardised(record)
            figure.add_trace(
                layout.dots([Mark(y, point, hover, feature)], (_colour(point[0]), "circle"), size=9), **cell
            )
    layout.vertical_zero(figure, **cell)


def _feature_axes(figure: go.Figure, rows: Sequence[str], limit: float, title: str, cell: dict[str, int]) -> None:
    figure.update_xaxes(range=[-limit, limit], nticks=6, **cell)
    layout.x_title(figure, title, **cell)
    layout.label_rows(figure, [figure_text(row, 29) for row in rows], **cell)


def _outcome_rows(diff: FeatureDiff, band: str) -> pd.DataFrame:
    rows = facts.rows(diff, kind="outcome", checkpoint=diff.base, band=band)
    return facts.strongest(rows, diff.q, _MAX_ROWS)


def _outcomes(diff: FeatureDiff, tables: dict[str, pd.DataFrame]) -> go.Figure:
    # The same share of rows for every band, so that none is crowded out.
    share = max(3, 14 // len(tables))
    features = list(dict.fromkeys(int(f) for table in tables.values() for f in table.index[:share]))
    titles = [f"<b>{band} problems</b>" for band in tables]
    figure, cells, height = layout.panels(
        titles, len(tables), panel=len(features) * _ROW + 12, gap=78, horizontal=0.035, shared_yaxes=len(tables) > 1
    )
    limit = 1.1 * max(max(abs(v) for v in facts.standardised(r)) for t in tables.values() for _, r in t.iterrows())
    for band, cell in zip(tables, cells, strict=True):
        full = facts.rows(diff, kind="outcome", checkpoint=diff.base, band=band)
        _forest(figure, features, full[full.q <= diff.q], cell)
        _feature_axes(figure, _named(diff, features), limit, "← in failures   Δ   in successes →", cell)
    return layout.finish(figure, height=height + 90, left=190, top=46, showlegend=False)
