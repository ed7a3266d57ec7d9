"""Figures of behaviours, steps, families, predictions, noise and causal tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures import layout
from tsae.report.figures.layout import BAND_STYLE, LEGEND, LOWERED, NEUTRAL, RAISED, Mark
from tsae.report.story import facts
from tsae.report.story.statements import main_predictions
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
    made = layout.panels(titles, 4, panel=panel, gap=80, shared_yaxes=True)
    shares = [facts.is_share(diff, name) for name in names]

    def marks(place: int, band: str) -> list[Mark]:
        factor, unit = (100.0, " %") if shares[place] else (1.0, _unit(names[place]))
        shown: Callable[[float], str] = percent if shares[place] else number
        return [
            Mark(
                policies.index(r.policy),
                (factor * r.mean, factor * r.low, factor * r.high),
                f"{figure_text(r.policy)}, {band}: {shown(r.mean)}{unit} [{shown(r.low)}, {shown(r.high)}]<br>"
                f"{r.n_problems} problems, {r.n_trajectories} trajectories",
            )
            for r in facts.records(table[(table.behaviour == names[place]) & (table.band == band)])
        ]

    layout.dots_by(made, {band: BAND_STYLE[band] for band in bands}, marks, step=0.24)
    for name, share, cell in zip(names, shares, made.cells, strict=True):
        if share:
            made.figure.update_xaxes(range=[-3, 103], ticksuffix=" %", nticks=5, **cell)
        else:
            made.figure.update_xaxes(rangemode="tozero", nticks=5, **cell)
            layout.x_title(made.figure, _unit(name).strip(), **cell)
        layout.name_rows(made.figure, policies, **cell)
    return layout.finish(made.figure, height=made.height + 110, left=130, top=66, legend=LEGEND)


def _unit(behaviour: str) -> str:
    return " tokens" if behaviour == "response_length" else ""


def family_figure(diff: FeatureDiff) -> go.Figure | None:
    """Shift of every family in every run, by band."""
    table = diff.families
    if table.empty or not table.note.eq("").any():
        return None
    runs = [run for run in diff.final_checkpoints if run in set(table.checkpoint)]
    families = list(table.family.unique())
    bands = [band for band in ("all", *facts.BANDS) if (table.band == band).any()]
    titles = [f"<b>{figure_text(f, 28)}</b> ({table[table.family == f].n_features.iloc[0]} features)" for f in families]
    made = layout.panels(titles, 3, panel=len(runs) * (13 * len(bands) + 12), gap=80, shared_yaxes=True)
    drawn = table[(table.note == "") & table.checkpoint.isin(runs)]

    def marks(place: int, band: str) -> list[Mark]:
        return [
            Mark(
                runs.index(r.checkpoint),
                (r.difference, r.low, r.high),
                f"{figure_text(r.checkpoint)}, {band} problems: {number(r.difference, sign=True)} "
                f"{interval(r.low, r.high, sign=True, like=r.difference)}, q {r.q:.2g}",
            )
            for r in facts.records(drawn[(drawn.family == families[place]) & (drawn.band == band)])
        ]

    layout.dots_by(made, {band: BAND_STYLE[band] for band in bands}, marks, step=0.19)
    for cell in made.cells:
        _around_zero(made.figure, "shift, in the features' standard deviations", runs, cell)
    return layout.finish(made.figure, height=made.height + 112, left=130, top=66, bottom=46, legend=LEGEND)


def _around_zero(figure: go.Figure, title: str, rows: list[str], cell: dict[str, int]) -> None:
    """A line at 0, the title below, and the names of rows."""
    layout.vertical_zero(figure, **cell)
    layout.x_title(figure, title, **cell)
    layout.name_rows(figure, rows, 18, **cell)


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
    figure, cells, height = layout.panels(
        titles, len(runs), panel=heights, gap=54, least=180, shared_yaxes="rows", shared_xaxes=True
    )
    named: set[str] = set()

    def line(
        mine: pd.DataFrame,
        value: str,
        name: str,
        style: tuple[str, str],
        text: list[str],
        place: int,
        feature: int | None = None,
    ) -> None:
        points = list(zip(mine[value], mine.low, mine.high, strict=True))
        below = place % len(heights) == len(heights) - 1
        legend = {"legend": "legend2" if below else "legend", "legendgroup": name, "showlegend": name not in named}
        line = layout.path(
            mine.step.tolist(),
            points,
            style,
            text,
            name=name,
            widths=(1.5, 7, 1.1),
            customdata=[feature] * len(mine),
            **legend,
        )
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
            label = f"{feature}: {figure_text(diff.names[feature], 26)}"
            text = [
                f"step {r.step}, feature {label}<br>shift {number(r.shift, sign=True)} "
                f"{interval(r.low, r.high, sign=True, like=r.shift)}, {figure_text(r.kind)}"
                for r in facts.records(mine)
            ]
            line(mine, "shift", label, layout.run_style(order), text, last, feature)
        layout.x_title(figure, "step", **cells[last])
    if len(lived):
        figure.update_yaxes(title={"text": "accuracy, %"}, row=1, col=1)
    figure.update_yaxes(title={"text": "shift of activation"}, row=len(heights), col=1)
    made = layout.finish(figure, height=height + 176, left=62, top=66, bottom=110, legend=LEGEND, legend2=_BELOW)
    return made.update_yaxes(showgrid=True)


def _accuracy(diff: FeatureDiff) -> pd.DataFrame:
    table = diff.behaviour_dynamics
    if table is None or table.empty:
        return pd.DataFrame()
    table = table[table.behaviour == "accuracy"]
    return table[table.band != "all"] if (table.band != "all").any() else table


CONDITIONS = {
    "features": "the features",
    "random": "matched random features",
    "same_norm": "random directions, same norm",
    "wrong_sign": "wrong sign",
    "mean_difference": "mean difference",
    "all_features": "all features",
    "whole": "whole residual stream",
    "donor": "the donor itself",
}
_MAX_TESTS, _MAX_MEASURED = 8, 3
_LEAST = 1e-5  # |Δ| below which the figure of noise does not tell sizes apart


def prediction_figure(diff: FeatureDiff) -> go.Figure | None:
    """Rank correlation of predicted with realised shifts, with its interval and the ceiling that noise sets."""
    table = main_predictions(diff)
    if table.empty:
        return None
    runs, ways = list(table.checkpoint.unique()), list(table.predicted_on.unique())
    titles = {
        "policy": "<b>policy part</b>: the base reads the run's responses",
        "total": "<b>total</b>: the run reads them",
    }
    made = layout.panels(list(titles.values()), 2, panel=len(runs) * (18 * len(ways) + 14), gap=0, shared_yaxes=True)

    def chosen(place: int, way: str) -> pd.DataFrame:
        return table[(table.part == list(titles)[place]) & (table.predicted_on == way)]

    def marks(place: int, way: str) -> list[Mark]:
        return [
            Mark(
                runs.index(r.checkpoint),
                (r.rho, r.low, r.high),
                f"{figure_text(r.checkpoint)}, {r.part}, predicted on {r.predicted_on} problems"
                f"{' (what it was trained on)' if r.matched else ''}<br>ρ {number(r.rho, sign=True)} "
                f"{interval(r.low, r.high, sign=True)}, p {r.p:.2g}, ceiling {number(r.ceiling)}",
            )
            for r in facts.records(chosen(place, way))
        ]

    styles = {way: BAND_STYLE.get(way, BAND_STYLE["all"]) for way in ways}
    layout.dots_by(made, styles, marks, step=0.2, size=9, name="predicted on {} problems")
    for place, cell in enumerate(made.cells):
        for order, way in enumerate(ways):
            mine = chosen(place, way)
            up = layout.aside(order, len(ways), 0.2)
            ceiling = go.Scatter(
                x=mine.ceiling.tolist(), y=[runs.index(run) + up for run in mine.checkpoint], mode="markers",
                name="ceiling", legendgroup="ceiling", showlegend=place == order == 0, hoverinfo="skip",
                marker={"symbol": "line-ns-open", "size": 12, "color": NEUTRAL, "line": {"width": 2}},
            )  # fmt: skip
            made.figure.add_trace(ceiling, **cell)
        made.figure.update_xaxes(range=[-1.05, 1.05], **cell)
        _around_zero(made.figure, "rank correlation over features", runs, cell)
    return layout.finish(made.figure, height=made.height + 120, left=130, top=70, bottom=46, legend=LEGEND)


def causal_figure(diff: FeatureDiff) -> go.Figure | None:
    """What every intervention and its controls changed, paired over problems."""
    tests = [test for test in diff.info.get("causally_tested") or [] if test.get("changes")][:_MAX_TESTS]
    if not tests:
        return None
    changes = [pd.DataFrame(test["changes"]) for test in tests]
    names = facts.behaviour_order(name for table in changes for name in table.behaviour)
    measured = [name for name in names if name != "response_length"][:_MAX_MEASURED]
    rows = [[c for c in CONDITIONS if (table.condition == c).any()] for table in changes]
    figure, cells, height = layout.panels(
        [""] * len(measured),
        len(measured),
        panel=[len(r) * 20 + 12 for r in rows],
        gap=52,
        horizontal=0.025,
        heads=[f"<b>{figure_text(facts.test_name(test), 110)}</b>" for test in tests],
        least=130,
        shared_yaxes=True,
    )
    for place, (test, name) in enumerate(product(range(len(tests)), measured)):
        cell = cells[place % len(measured) * len(tests) + test]
        table, conditions = changes[test], rows[test]
        for r in facts.records(table[(table.behaviour == name) & table.condition.isin(conditions)]):
            colour = RAISED if r.change_low > 0 else LOWERED if r.change_high < 0 else NEUTRAL
            main = r.condition == "features"
            symbol, size = ("diamond", 10) if main else ("circle-open", 8)
            ends = interval(r.change_low, r.change_high, sign=True)
            hover = f"{CONDITIONS[r.condition]}: {number(r.change, sign=True)} {ends}"
            ids = tests[test]["features"]
            opens = int(ids[0]) if main and len(ids) == 1 else None
            mark = Mark(conditions.index(r.condition), (r.change, r.change_low, r.change_high), hover, opens)
            figure.add_trace(layout.dots([mark], (colour, symbol), size=size, showlegend=False), **cell)
        layout.vertical_zero(figure, **cell)
        layout.name_rows(figure, [CONDITIONS[c] for c in conditions], 30, **cell)
        figure.update_xaxes(range=[-1.05, 1.05], nticks=5, **cell)
        if test == len(tests) - 1:
            layout.x_title(figure, f"change of {figure_text(facts.behaviour_name(name))}", **cell)
    return layout.finish(figure, height=height + 90, left=190, top=34, bottom=56)


def noise_figure(diff: FeatureDiff) -> go.Figure | None:
    """The share of features with a larger |Δ|, of every run and of every draw of noise."""
    table = diff.noise
    if table is None or table.empty:
        return None
    runs = [run for run in diff.final_checkpoints if (table.checkpoint == run).any()]
    titles = [f"<b>{figure_text(run, 24)}</b>" for run in runs]
    figure, cells, height = layout.panels(titles, 4, panel=190, gap=74, horizontal=0.03, shared_yaxes=True)
    for position, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        mine = table[table.checkpoint == run]
        for draw, rows in mine.groupby("draw"):
            size, share = _survival(rows.delta)
            line = go.Scatter(
                x=size.tolist(), y=share.tolist(), mode="lines",
                line={"shape": "hv", "width": 1.2 if draw else 2.4, "color": NEUTRAL if draw else RAISED},
                name="noise of the update's size" if draw else "run", legendgroup="noise" if draw else "run",
                showlegend=position == 0 and draw in (0, 1),
                hovertemplate="%{y:.0f} % of features have |Δ| > %{x:.2g}<extra></extra>",
            )  # fmt: skip
            figure.add_trace(line, **cell)
        figure.add_vline(x=diff.minimum_effect, line={"color": NEUTRAL, "width": 1, "dash": "dot"}, **cell)
        figure.update_xaxes(type="log", exponentformat="power", dtick=1, title={"text": "|Δ|", "standoff": 2}, **cell)
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", nticks=5)
    return layout.finish(figure, height=height + 110, left=60, top=66, bottom=44, legend=LEGEND)


def _survival(delta: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Sizes in ascending order, and the per cent of features above each."""
    size = np.sort(np.maximum(delta.abs().to_numpy(), _LEAST))
    return size, 100 * (1 - (np.arange(len(size)) + 1) / len(size))
