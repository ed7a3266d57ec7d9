"""Figures of what stands beside the shifts: all features at once, families, predictions and causal tests.

Each returns None where the diff holds nothing to draw. Their text alternatives are the page's tables.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.diff.result import FeatureDiff
from tsae.report.story import facts
from tsae.report.style import (
    BAND_STYLE,
    LEGEND,
    LOWERED,
    NEUTRAL,
    RAISED,
    finish,
    name_rows,
    panels,
    vertical_zero,
    whiskers,
)
from tsae.report.text import figure_text, interval, number

MAX_POINTS = 1500
"""Features drawn in one panel."""
# (name, colour, symbol): direction is a shape too.
_SIDES = (("raised", RAISED, "triangle-up"), ("lowered", LOWERED, "triangle-down"), ("no discovery", NEUTRAL, "circle"))
CONDITIONS = {
    "features": "the features",
    "random": "matched random features",
    "same_norm": "random directions, same norm",
    "wrong_sign": "wrong sign",
    "mean_difference": "mean difference",
}
_MAX_TESTS, _MAX_MEASURED = 8, 3


def spread_figure(diff: FeatureDiff) -> go.Figure | None:
    """Every tested feature of every run: its shift against how active it is.

    No volcano: permutation p-values have a floor that most discoveries reach, so that a volcano's height tells little.
    """
    runs = [run for run in facts.final_checkpoints(diff) if diff.main_part(run)]
    if not runs:
        return None
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, cells, height = panels(titles, 3, panel=284, gap=74, horizontal=0.025, shared_yaxes=True, shared_xaxes=True)
    for position, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        table = _thinned(facts.main_shift(diff, run), diff.q)
        found = table.q <= diff.q
        for name, colour, symbol in _SIDES:
            part = table[{"raised": found & (table.delta > 0), "lowered": found & (table.delta < 0)}.get(name, ~found)]
            level = np.maximum((part["mean"] + part.reference) / 2, 1e-9)
            figure.add_trace(
                go.Scatter(
                    x=level.tolist(),
                    y=part.delta.tolist(),
                    customdata=[int(f) for f in part.feature],
                    mode="markers",
                    name=name,
                    legendgroup=name,
                    showlegend=position == 0,
                    marker={
                        "color": colour,
                        "symbol": symbol,
                        "size": 5 if name == "no discovery" else 7,
                        "opacity": 0.7,
                    },
                    text=[
                        f"feature {r.feature}: {figure_text(r.responds_to)}<br>{number(r.reference)} → "
                        f"{number(r.mean)}, Δ {facts.effect_text(r)}, q {r.q:.2g}"
                        for r in facts.records(part)
                    ],
                    hovertemplate="%{text}<extra></extra>",
                ),
                **cell,
            )
        figure.add_hline(y=0, line={"color": NEUTRAL, "width": 1}, layer="below", **cell)
        if {**cell, "row": cell["row"] + 1} not in cells:  # nothing is below it
            title = {"text": "mean activation of base and run", "standoff": 4}
            figure.update_xaxes(title=title, showticklabels=True, **cell)
    decades = range(-7, 5)
    figure.update_xaxes(type="log", tickvals=[10.0**e for e in decades], ticktext=[f"10{_raised(e)}" for e in decades])
    figure.update_yaxes(title={"text": "Δ (standard deviations over base trajectories)", "standoff": 4}, col=1)
    made = finish(figure, height=height + 116, left=62, top=66, bottom=50, legend=LEGEND)
    made.update_yaxes(showgrid=True)
    return made


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _thinned(table: pd.DataFrame, q: float) -> pd.DataFrame:
    """Discoveries with the largest |Δ| first, then others evenly over their |d|."""
    if len(table) <= MAX_POINTS:
        return table
    by_size = table.loc[table.delta.abs().sort_values(ascending=False, kind="stable").index]
    found, rest = by_size[by_size.q <= q].head(MAX_POINTS), by_size[by_size.q > q]
    room = MAX_POINTS - len(found)
    picked = np.unique(np.linspace(0, len(rest) - 1, min(room, len(rest))).astype(int))
    return pd.concat([found, rest.iloc[picked]])


def thinned_text(diff: FeatureDiff) -> str:
    """What `spread_figure` leaves out."""
    sizes = [len(facts.main_shift(diff, run)) for run in facts.final_checkpoints(diff)]
    return (
        f" At most {MAX_POINTS:,} features of a run are drawn, discoveries first."
        if max(sizes, default=0) > MAX_POINTS
        else ""
    )


def family_figure(diff: FeatureDiff) -> go.Figure | None:
    """Shift of every family in every run, by band."""
    table = diff.families
    if table.empty or not table.note.eq("").any():
        return None
    runs = [run for run in facts.final_checkpoints(diff) if run in set(table.checkpoint)]
    families = list(table.family.unique())
    bands = [band for band in ("all", *facts.BANDS) if (table.band == band).any()]
    titles = [f"<b>{figure_text(f, 28)}</b> ({table[table.family == f].n_features.iloc[0]} features)" for f in families]
    figure, cells, height = panels(
        titles, 3, panel=len(runs) * (13 * len(bands) + 12), gap=80, horizontal=0.03, shared_yaxes=True
    )
    for position, (family, cell) in enumerate(zip(families, cells, strict=True)):
        for order, band in enumerate(bands):
            mine = table[(table.family == family) & (table.band == band) & (table.note == "")]
            mine = mine[mine.checkpoint.isin(runs)]
            colour, symbol = BAND_STYLE[band]
            points = list(zip(mine.difference, mine.low, mine.high, strict=True))
            figure.add_trace(
                go.Scatter(
                    x=mine.difference.tolist(),
                    y=[runs.index(run) + (order - (len(bands) - 1) / 2) * 0.19 for run in mine.checkpoint],
                    mode="markers",
                    name=f"{band} problems",
                    legendgroup=band,
                    showlegend=position == 0,
                    marker={"color": colour, "symbol": symbol, "size": 8},
                    error_x=whiskers(points, colour),
                    text=[
                        f"{figure_text(r.checkpoint)}, {r.band} problems: {number(r.difference, sign=True)} "
                        f"{interval(r.low, r.high, sign=True, like=r.difference)}, q {r.q:.2g}"
                        for r in facts.records(mine)
                    ],
                    hovertemplate="%{text}<extra></extra>",
                ),
                **cell,
            )
        vertical_zero(figure, **cell)
        figure.update_xaxes(title={"text": "shift, standard deviations over trajectories", "standoff": 4}, **cell)
        name_rows(figure, runs, **cell)
    return finish(figure, height=height + 112, left=130, top=66, bottom=46, legend=LEGEND)


def prediction_figure(diff: FeatureDiff) -> go.Figure | None:
    """Rank correlation of predicted with realised shifts, with its interval and the ceiling that noise sets."""
    table = shown_predictions(diff)
    if table.empty:
        return None
    runs = list(dict.fromkeys(table.checkpoint))
    ways = list(dict.fromkeys(table.predicted_on))
    titles = ["<b>policy part</b>: the base reads the run's responses", "<b>total</b>: the run reads them"]
    figure, cells, height = panels(
        titles, 2, panel=len(runs) * (18 * len(ways) + 14), gap=0, horizontal=0.03, shared_yaxes=True
    )
    for part, cell in zip(("policy", "total"), cells, strict=True):
        for order, way in enumerate(ways):
            mine = table[(table.part == part) & (table.predicted_on == way)]
            colour, symbol = BAND_STYLE.get(way, BAND_STYLE["all"])
            y = [runs.index(run) + (order - (len(ways) - 1) / 2) * 0.2 for run in mine.checkpoint]
            figure.add_trace(
                go.Scatter(
                    x=mine.rho.tolist(),
                    y=y,
                    mode="markers",
                    name=f"predicted on {way} problems",
                    legendgroup=way,
                    showlegend=part == "policy",
                    marker={"color": colour, "symbol": symbol, "size": 9},
                    error_x=whiskers(list(zip(mine.rho, mine.low, mine.high, strict=True)), colour),
                    text=[
                        f"{figure_text(r.checkpoint)}, {part}, predicted on {r.predicted_on} problems"
                        f"{' (what it was trained on)' if r.matched else ''}<br>ρ {number(r.rho, sign=True)} "
                        f"{interval(r.low, r.high, sign=True)}, p {r.p:.2g}, ceiling {number(r.ceiling)}"
                        for r in facts.records(mine)
                    ],
                    hovertemplate="%{text}<extra></extra>",
                ),
                **cell,
            )
            figure.add_trace(
                go.Scatter(
                    x=mine.ceiling.tolist(),
                    y=y,
                    mode="markers",
                    name="ceiling",
                    legendgroup="ceiling",
                    showlegend=part == "policy" and order == 0,
                    marker={"symbol": "line-ns-open", "size": 12, "color": NEUTRAL, "line": {"width": 2}},
                    hoverinfo="skip",
                ),
                **cell,
            )
        vertical_zero(figure, **cell)
        figure.update_xaxes(
            range=[-1.05, 1.05], title={"text": "rank correlation over features", "standoff": 4}, **cell
        )
        name_rows(figure, runs, **cell)
    return finish(figure, height=height + 120, left=130, top=70, bottom=46, legend=LEGEND)


def shown_predictions(diff: FeatureDiff) -> pd.DataFrame:
    """Drawn comparisons of the natural gradient with the shift over all problems, for the last step of every run."""
    table = diff.predicted
    if table is None or table.empty:
        return pd.DataFrame(columns=["checkpoint", "predicted_on"])
    last = table.checkpoint.isin(facts.final_checkpoints(diff))
    drawn = last & (table.note == "") & (table.realised_on == "all") & (table.gradient == "natural")
    return table[drawn].reset_index(drop=True)


def causal_figure(diff: FeatureDiff) -> go.Figure | None:
    """What every intervention and its controls changed, paired over problems."""
    tests = [test for test in diff.info.get("causally_tested") or [] if test.get("changes")][:_MAX_TESTS]
    if not tests:
        return None
    changes = [pd.DataFrame(test["changes"]) for test in tests]
    measured = [
        m for m in facts.behaviour_order(c for table in changes for c in table.behaviour) if m != "response_length"
    ]
    measured = measured[:_MAX_MEASURED]
    rows = [[c for c in CONDITIONS if (table.condition == c).any()] for table in changes]
    inner = sum(len(r) * 20 + 12 for r in rows) + (len(tests) - 1) * 52
    figure = make_subplots(
        rows=len(tests),
        cols=len(measured),
        shared_yaxes=True,
        row_heights=[float(len(r) * 20 + 12) for r in rows],
        horizontal_spacing=0.025,
        vertical_spacing=52 / inner if len(tests) > 1 else 0,
    )
    for row, (test, table, conditions) in enumerate(zip(tests, changes, rows, strict=True), start=1):
        for column, name in enumerate(measured, start=1):
            mine = table[(table.behaviour == name) & table.condition.isin(conditions)]
            colours = [
                RAISED if r.change_low > 0 else LOWERED if r.change_high < 0 else NEUTRAL for r in facts.records(mine)
            ]
            for r, colour in zip(facts.records(mine), colours, strict=True):
                main = r.condition == "features"
                figure.add_trace(
                    go.Scatter(
                        x=[r.change],
                        y=[conditions.index(r.condition)],
                        mode="markers",
                        showlegend=False,
                        marker={
                            "color": colour,
                            "symbol": "diamond" if main else "circle-open",
                            "size": 10 if main else 8,
                        },
                        error_x=whiskers([(r.change, r.change_low, r.change_high)], colour),
                        hovertemplate=f"{CONDITIONS[r.condition]}: {number(r.change, sign=True)} "
                        f"{interval(r.change_low, r.change_high, sign=True)}<extra></extra>",
                    ),
                    row=row,
                    col=column,
                )
            vertical_zero(figure, row=row, col=column)
            name_rows(figure, [CONDITIONS[c] for c in conditions], 30, row=row, col=column)
            figure.update_xaxes(range=[-1.05, 1.05], nticks=5, row=row, col=column)
            if row == len(tests):
                title = {"text": f"change of {figure_text(facts.behaviour_name(name))}", "standoff": 4}
                figure.update_xaxes(title=title, row=row, col=column)
        axis = figure.get_subplot(row, 1)
        figure.add_annotation(
            text=f"<b>{figure_text(facts.test_name(test), 110)}</b>",
            xref="paper", yref="paper", x=0, y=axis.yaxis.domain[1], yshift=4, xanchor="left", yanchor="bottom",
            showarrow=False, font={"size": 12.5},
        )  # fmt: skip
    return finish(figure, height=inner + 90, left=190, top=34, bottom=56)
