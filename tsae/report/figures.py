"""Plotly figures as functions of a FeatureDiff. Each returns None where the diff holds nothing to draw.

Effects are drawn in Δ, standard deviations of the feature over base trajectories, since units of activation differ from
feature to feature; hover gives the units of activation.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from tsae.diff.result import FeatureDiff
from tsae.report.story import facts
from tsae.report.style import (
    BAND_STYLE,
    DIVERGING,
    LEGEND,
    NEUTRAL,
    SERIES,
    SYMBOLS,
    finish,
    name_rows,
    panels,
    vertical_zero,
    whiskers,
)
from tsae.report.text import figure_text, number, percent

_LEFT = 226


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
    figure, cells, height = panels(titles, 4, panel=panel, gap=80, horizontal=0.03, shared_yaxes=True)
    for position, (name, cell) in enumerate(zip(names, cells, strict=True)):
        share = facts.is_share(diff, name)
        factor = 100.0 if share else 1.0
        for order, band in enumerate(bands):
            mine = table[(table.behaviour == name) & (table.band == band)]
            colour, symbol = BAND_STYLE[band]
            unit = " %" if share else " tokens" if name == "response_length" else ""
            figure.add_trace(
                go.Scatter(
                    x=(factor * mine["mean"]).tolist(),
                    y=[policies.index(p) + (order - (len(bands) - 1) / 2) * 0.24 for p in mine.policy],
                    mode="markers",
                    name=f"{band} problems",
                    legendgroup=band,
                    showlegend=position == 0,
                    marker={"color": colour, "symbol": symbol, "size": 8},
                    error_x=whiskers(
                        list(zip(*(factor * mine[c] for c in ("mean", "low", "high")), strict=True)), colour
                    ),
                    text=[
                        f"{figure_text(r.policy)}, {band}: {_shown(r.mean, share)}{unit} "
                        f"[{_shown(r.low, share)}, {_shown(r.high, share)}]<br>"
                        f"{r.n_problems} problems, {r.n_trajectories} trajectories"
                        for r in facts.records(mine)
                    ],
                    hovertemplate="%{text}<extra></extra>",
                ),
                **cell,
            )
        if share:
            figure.update_xaxes(range=[-3, 103], ticksuffix=" %", nticks=5, **cell)
        else:
            title = "tokens" if name == "response_length" else ""
            figure.update_xaxes(rangemode="tozero", nticks=5, title={"text": title, "standoff": 4}, **cell)
        name_rows(figure, policies, **cell)
    return finish(figure, height=height + 110, left=130, top=66, legend=LEGEND)


def opposed_figure(diff: FeatureDiff, features: Sequence[int]) -> go.Figure | None:
    """Shift of the given features in every run, one line a feature: marks far apart were moved apart."""
    runs = [c for c in facts.final_checkpoints(diff) if diff.main_part(c)]
    if not features or not runs:
        return None
    features = list(features)
    figure = go.Figure()
    for order, run in enumerate(runs):
        shifts = facts.main_shift(diff, run)
        shown = [f for f in features if f in shifts.index]
        points = [facts.standardised(facts.record(shifts, f)) for f in shown]
        colour, symbol = SERIES[1 + order % (len(SERIES) - 1)], SYMBOLS[order % len(SYMBOLS)]
        figure.add_trace(
            go.Scatter(
                x=[d for d, _, _ in points],
                y=[features.index(f) for f in shown],
                mode="markers",
                name=figure_text(run),
                marker={"color": colour, "symbol": symbol, "size": 10},
                error_x=whiskers(points, colour),
                text=[_hover(facts.record(shifts, f), run) for f in shown],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    vertical_zero(figure)
    figure.update_xaxes(title={"text": "Δ against base (standard deviations over base trajectories)", "standoff": 6})
    _feature_rows(figure, diff, features)
    return finish(figure, height=26 * len(features) + 100, left=_LEFT, top=40, bottom=50, legend=LEGEND)


def band_figure(diff: FeatureDiff, *, n: int = 8) -> go.Figure | None:
    """Shift of each run's most moved features by band and by outcome, as a heat map per run."""
    runs = [c for c in facts.final_checkpoints(diff) if diff.main_part(c)]
    features = top_features(diff, runs, n)
    if not features:
        return None
    bands = facts.bands_of(diff)
    columns = [("all", "all"), *((b, "all") for b in bands), ("all", "success"), ("all", "failure")]
    names = ["all", *bands, "success", "failure"]
    limit = 0.0
    grids = []
    for run in runs:
        part = diff.main_part(run) or "total"
        cells = [facts.rows(diff, kind="shift", checkpoint=run, part=part, band=b, outcome=o) for b, o in columns]
        z = [[float(c.delta[f]) if f in c.index else None for c in cells] for f in features]
        text = [
            [
                _hover(facts.record(c, f), f"{run}, {name}") if f in c.index else "not tested"
                for c, name in zip(cells, names, strict=True)
            ]
            for f in features
        ]
        bold = [
            ["" if f not in c.index else f"{c.delta[f]:+.1f}".replace("-", "−") if c.moved[f] else "·" for c in cells]
            for f in features
        ]
        limit = max([limit, *(abs(v) for line in z for v in line if v is not None)])
        grids.append((run, z, text, bold))
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, places, height = panels(
        titles, len(runs), panel=24 * len(features), gap=0, horizontal=0.02, shared_yaxes=True
    )
    for (_, z, text, bold), cell in zip(grids, places, strict=True):
        figure.add_trace(
            go.Heatmap(
                z=z,
                x=names,
                y=list(range(len(features))),
                text=bold,
                texttemplate="%{text}",
                textfont={"size": 10.5, "color": "#1d2228"},
                customdata=text,
                hovertemplate="%{customdata}<extra></extra>",
                colorscale=DIVERGING,
                zmin=-limit,
                zmax=limit,
                showscale=False,
                xgap=1,
                ygap=1,
                hoverongaps=False,
            ),
            **cell,
        )
    figure.update_xaxes(side="bottom", showgrid=False, ticks="", tickangle=-35)
    _feature_rows(figure, diff, features)
    return finish(figure, height=height + 120, left=_LEFT, bottom=64)


def decomposition_figure(diff: FeatureDiff, *, n: int = 8) -> go.Figure | None:
    """Policy and representation part of each run's largest shifts, stacked; the diamond is their sum, the total."""
    runs = [c for c in facts.final_checkpoints(diff) if diff.main_part(c) == "total"]
    chosen = {run: top_features(diff, [run], n) for run in runs}
    runs = [run for run in runs if chosen[run]]
    if not runs:
        return None
    depth = max(len(features) for features in chosen.values())
    titles = [f"<b>{figure_text(run)}</b>" for run in runs]
    figure, cells, height = panels(titles, 2, panel=depth * 26 + 10, gap=90, horizontal=0.2)
    for position, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        total = facts.main_shift(diff, run)
        features = chosen[run]
        for order, part in enumerate(("policy", "representation")):
            found = facts.rows(diff, kind="shift", checkpoint=run, part=part, band="all", outcome="all")
            shown = [f for f in features if f in found.index]
            figure.add_trace(
                go.Bar(
                    x=[float(found.delta[f]) for f in shown],
                    y=[features.index(f) for f in shown],
                    orientation="h",
                    name=f"{facts.PART_NAMES[part]} ({('new responses', 'new reader')[order]})",
                    legendgroup=part,
                    showlegend=position == 0,
                    marker={
                        "color": ("#1b9381", "#a55cc0")[order],
                        "pattern": {
                            "shape": ("", "/")[order],
                            "fillmode": "overlay",
                            "fgcolor": "#fff",
                            "fgopacity": 0.4,
                            "size": 7,
                        },
                    },
                    width=0.62,
                    text=[_hover(facts.record(found, f), f"{run}, {facts.PART_NAMES[part]}") for f in shown],
                    textposition="none",
                    hovertemplate="%{text}<extra></extra>",
                ),
                **cell,
            )
        points = [facts.standardised(facts.record(total, f)) for f in features]
        figure.add_trace(
            go.Scatter(
                x=[d for d, _, _ in points],
                y=list(range(len(features))),
                mode="markers",
                name="total, with interval",
                legendgroup="total",
                showlegend=position == 0,
                marker={"symbol": "diamond", "size": 8, "color": NEUTRAL, "line": {"width": 1.5, "color": "#fff"}},
                error_x=whiskers(points, NEUTRAL),
                text=[_hover(facts.record(total, f), f"{run}, total") for f in features],
                hovertemplate="%{text}<extra></extra>",
            ),
            **cell,
        )
        vertical_zero(figure, **cell)
        figure.update_xaxes(title={"text": "Δ (standard deviations over base trajectories)", "standoff": 4}, **cell)
        _feature_rows(figure, diff, features, **cell)
    return finish(figure, height=height + 130, left=_LEFT, top=70, bottom=54, barmode="relative", legend=LEGEND)


def outcome_figure(diff: FeatureDiff, *, n: int = 6) -> go.Figure | None:
    """Success − failure within problem: the clearest features of every band, as the base reads (its own) responses."""
    base = diff.base
    bands = ["all", *facts.bands_of(diff)]
    tables = {b: facts.rows(diff, kind="outcome", checkpoint=base, band=b) for b in bands}
    top = {b: facts.strongest(table, diff.q, n) for b, table in tables.items()}
    features = list(dict.fromkeys(int(f) for table in top.values() for f in table.index))
    if not features:
        return None
    figure = go.Figure()
    for order, band in enumerate(bands):
        shown = [f for f in features if f in tables[band].index and tables[band].q[f] <= diff.q]
        points = [facts.standardised(facts.record(tables[band], f)) for f in shown]
        if not points:
            continue
        colour, symbol = BAND_STYLE[band]
        figure.add_trace(
            go.Scatter(
                x=[d for d, _, _ in points],
                y=[features.index(f) + (order - (len(bands) - 1) / 2) * 0.18 for f in shown],
                mode="markers",
                name=f"{band} problems",
                marker={"color": colour, "symbol": symbol, "size": 8},
                error_x=whiskers(points, colour),
                text=[_hover(facts.record(tables[band], f), f"{band} problems") for f in shown],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    vertical_zero(figure)
    figure.update_xaxes(
        title={
            "text": "← in failures    in successes →    (Δ, standard deviations over base trajectories)",
            "standoff": 6,
        }
    )
    _feature_rows(figure, diff, features)
    return finish(
        figure, height=30 * len(features) + 110, left=_LEFT, top=40, bottom=56, legend=LEGEND, showlegend=True
    )


def top_features(diff: FeatureDiff, runs: list[str], n: int) -> list[int]:
    """The n most moved features of every run, put together; most raised by the last run first."""
    chosen: dict[int, None] = {}
    for run in runs:
        chosen |= dict.fromkeys(int(f) for f in facts.strongest(facts.main_shift(diff, run), diff.q, n).index)
    if not chosen:
        return []
    last = facts.main_shift(diff, runs[-1])
    return sorted(chosen, key=lambda f: -float(last.delta[f]) if f in last.index else 0.0)


def _feature_rows(figure: go.Figure, diff: FeatureDiff, features: list[int], **cell: int) -> None:
    labels = [f"<b>{f}</b> {figure_text(diff.features.responds_to[f], 28)}" for f in features]
    figure.update_yaxes(
        range=[len(features) - 0.4, -0.6], tickvals=list(range(len(features))), ticktext=labels, ticks="", **cell
    )


def _hover(record: pd.Series, who: str) -> str:
    described = figure_text(record.responds_to)
    return (
        f"{figure_text(who)}<br>feature {int(record.feature)}: {described}<br>"
        f"{number(record.reference)} → {number(record['mean'])}, difference {number(record.difference, sign=True)} "
        f"[{number(record.low, sign=True)}, {number(record.high, sign=True)}]<br>"
        f"Δ {facts.effect_text(record)}, q = {record.q:.4f}"
    )


def _shown(value: float, share: bool) -> str:
    return percent(value) if share else number(value)
