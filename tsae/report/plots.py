"""`diff.plot`: the report's figures one by one, as Plotly figures with titles, for notebooks and papers.

In a notebook a figure is shown by the front end's own Plotly where it has one. Elsewhere it draws itself with Plotly's
script, which comes from the installed package and is put into the notebook once: nothing is fetched. (Plotly's own
default in a Jupyter kernel is blank without an extension in the server.)
"""

from __future__ import annotations

import uuid
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

from tsae.diff.result import FeatureDiff
from tsae.errors import TsaeError
from tsae.report import evidence_figures, figures
from tsae.report.overview import overview
from tsae.report.packing import packed_plotly
from tsae.report.steps_figure import steps_figure
from tsae.report.story import evidence, facts
from tsae.report.style import BAND_STYLE, LOWERED, NEUTRAL, RAISED, finish, vertical_zero, whiskers
from tsae.report.text import figure_text

MIMETYPE = "application/vnd.plotly.v1+json"
_INK, _GRID = "#1d2228", "#e3e6ea"


class Figure(go.Figure):
    """A Plotly figure that shows itself in a notebook without network and without an extension."""

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(*args, **kwargs)
        if set(bundle) == {MIMETYPE}:
            bundle["text/html"] = _html(self)
        return bundle

    def _ipython_display_(self) -> None:
        self.show()

    def show(self, *args: Any, **kwargs: Any) -> Any:
        """As of Plotly; in a Jupyter kernel with its default renderer, as above."""
        if args or kwargs or pio.renderers.default != "plotly_mimetype":
            return super().show(*args, **kwargs)
        from IPython.display import display

        return display(self._repr_mimebundle_(), raw=True)


class Plots:
    """Figures of a diff. Effects are Δ, standard deviations over base trajectories; hover gives activations and q."""

    def __init__(self, diff: FeatureDiff) -> None:
        self.diff = diff

    def __repr__(self) -> str:
        return "diff.plot: " + ", ".join(name for name in sorted(dir(self)) if name[0] != "_" and name != "diff")

    def overview(self) -> Figure:
        """The report's first picture: the clearest features in every run."""
        return _titled(overview(self.diff), "What every run did", f"against {self.diff.base}")

    def behaviours(self) -> Figure:
        """Accuracy, length and every other behaviour by checkpoint and band, with intervals."""
        return _titled(figures.behaviour_figure(self.diff), "Behaviour by band", "mean over problems, with interval")

    def bands(self, n: int = 8) -> Figure:
        """Shifts of each run's n most moved features by band and by outcome, as heat maps."""
        title = "Shift of the most moved features, by band and outcome"
        told = "Δ, in standard deviations over base trajectories; a dot: no discovery; blank: not tested"
        return _titled(figures.band_figure(self.diff, n=n), title, told)

    def volcano(self) -> Figure:
        """Every tested feature of every run: size of the shift against its q-value."""
        title = "Shift of every tested feature"
        return _titled(_volcano(self.diff), title, f"line: q = {self.diff.q:g}; circles high-level, diamonds low-level")

    def spread(self) -> Figure:
        """Every tested feature of every run: size of the shift against how active the feature is."""
        return _titled(evidence_figures.spread_figure(self.diff), "Shift of every tested feature, by its activity", "")

    def families(self) -> Figure:
        """Mean shift of every family of features in every run."""
        return _titled(evidence_figures.family_figure(self.diff), "Families of features", f"against {self.diff.base}")

    def predictions(self) -> Figure:
        """Shifts that rollouts predict beside those that came; see `FeatureDiff.with_reinforcement`."""
        title = "Predicted and realised shifts"
        return _titled(evidence_figures.prediction_figure(self.diff), title, "rank correlation over features, interval")

    def steps(self, n: int = 6) -> Figure:
        """Features and behaviours along the steps of runs."""
        chosen = evidence.step_features(self.diff, n)
        return _titled(steps_figure(self.diff, chosen), "Along the steps of the runs", "")

    def causal(self) -> Figure:
        """What interventions changed, beside their controls; see `Intervention.mark`."""
        return _titled(evidence_figures.causal_figure(self.diff), "Causal tests", "paired changes against no edit")

    def decomposition(self, n: int = 8) -> Figure:
        """Total shift of each run's n most moved features as policy part and representation part."""
        title = "Total shift = policy part + representation part"
        told = "new responses under the base's reading, and a new reading of the same responses"
        return _titled(figures.decomposition_figure(self.diff, n=n), title, told)

    def opposed(self, up: str, down: str, n: int = 12) -> Figure:
        """Features that one checkpoint raised and another lowered, in every run."""
        found = [int(feature) for feature in self.diff.opposed(up, down).head(n).index]
        title = f"Raised by {up}, lowered by {down}"
        return _titled(figures.opposed_figure(self.diff, found), title, f"shift against {self.diff.base}")

    def outcomes(self, n: int = 6) -> Figure:
        """Success − failure within problem: the n clearest features of every band, as the base reads its responses."""
        title = "Success − failure within problem"
        return _titled(figures.outcome_figure(self.diff, n=n), title, f"as {self.diff.base} reads its own responses")

    def feature(self, feature: int) -> Figure:
        """Shift of one feature in every run, over all problems and by band, with intervals.

        Raises:
            TsaeError: where there is no such feature.
        """
        described = facts.named(self.diff, self.diff.feature(feature).index)
        return _titled(_feature(self.diff, feature), f"Feature {described}", f"shift against {self.diff.base}")


def _volcano(diff: FeatureDiff) -> go.Figure | None:
    runs = [run for run in facts.final_checkpoints(diff) if diff.main_part(run)]
    if not runs:
        return None
    figure = make_subplots(
        rows=1,
        cols=len(runs),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"<b>{figure_text(run, 24)}</b>" for run in runs],
    )
    for column, run in enumerate(runs, start=1):
        table = facts.main_shift(diff, run)
        found = table.q <= diff.q
        for name, colour, part in (
            ("raised", RAISED, table[found & (table.delta > 0)]),
            ("lowered", LOWERED, table[found & (table.delta < 0)]),
            ("no discovery", NEUTRAL, table[~found]),
        ):
            figure.add_trace(
                go.Scatter(
                    x=part.delta.tolist(),
                    # No permutation p is 0, and so no q is.
                    y=part.q.tolist(),
                    mode="markers",
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                    marker={
                        "color": colour,
                        "size": 6,
                        "opacity": 0.75,
                        "symbol": ["circle" if group == "high" else "diamond-open" for group in part.group],
                    },
                    text=[figures._hover(row, run) for _, row in part.iterrows()],
                    hovertemplate="%{text}<extra></extra>",
                ),
                row=1,
                col=column,
            )
        figure.add_hline(y=diff.q, line={"color": NEUTRAL, "width": 1, "dash": "dot"}, row=1, col=column)
        vertical_zero(figure, row=1, col=column)
        figure.update_xaxes(title={"text": "Δ (standard deviations over base trajectories)"}, row=1, col=column)
    figure.update_yaxes(type="log", autorange="reversed", exponentformat="power", dtick=1)
    figure.update_yaxes(title={"text": "q (clearer upwards)"}, row=1, col=1)
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0}
    return finish(figure, height=420, left=70, top=60, bottom=50, legend=legend)


def _feature(diff: FeatureDiff, feature: int) -> go.Figure | None:
    runs = [run for run in facts.final_checkpoints(diff) if diff.main_part(run)]
    bands = ["all", *facts.bands_of(diff)]
    figure = go.Figure()
    for order, band in enumerate(bands):
        rows: list[tuple[int, pd.Series]] = []
        for position, run in enumerate(runs):
            part = diff.main_part(run) or "total"
            found = facts.rows(diff, kind="shift", checkpoint=run, part=part, band=band, outcome="all")
            if feature in found.index:
                rows.append((position, found.loc[feature]))
        points = [facts.standardised(row) for _, row in rows]
        colour, symbol = BAND_STYLE[band]
        figure.add_trace(
            go.Scatter(
                x=[value for value, _, _ in points],
                y=[position + (order - (len(bands) - 1) / 2) * 0.18 for position, _ in rows],
                mode="markers",
                name=f"{band} problems",
                marker={"color": colour, "symbol": symbol, "size": 9},
                error_x=whiskers(points, colour),
                text=[figures._hover(row, f"{runs[position]}, {band} problems") for position, row in rows],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    if not any(len(trace.x) for trace in figure.data):
        return None
    vertical_zero(figure)
    ticks = [figure_text(run, 18) for run in runs]
    figure.update_yaxes(range=[len(runs) - 0.45, -0.55], tickvals=list(range(len(runs))), ticktext=ticks, ticks="")
    figure.update_xaxes(title={"text": "Δ (standard deviations over base trajectories)", "standoff": 6})
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0}
    return finish(figure, height=52 * len(runs) + 110, left=140, top=40, bottom=50, legend=legend, showlegend=True)


def _titled(figure: go.Figure | None, title: str, subtitle: str) -> Figure:
    """With a title, above where the legend lies, and colours that need no page around them.

    Raises:
        TsaeError: where there is nothing to draw.
    """
    if figure is None:
        raise TsaeError("the diff holds nothing to draw there", where=title)
    found, space = Figure(figure), 62
    height, top = int(found.layout.height) + space, int(found.layout.margin.t) + space
    found.update_layout(
        title={
            "text": f"<b>{figure_text(title, 90)}</b><br><sub>{figure_text(subtitle, 110)}</sub>",
            "x": 0,
            "xref": "paper",
            "y": 1 - 18 / height,
            "yref": "container",
            "yanchor": "top",
            "font": {"size": 16},
        },
        height=height,
        margin={"t": top},
        paper_bgcolor="#fff",
        plot_bgcolor="#fff",
        font={"color": _INK},
    )
    if found.layout.legend.yref == "container":
        found.update_layout(legend={"y": 1 - space / height})
    found.update_xaxes(gridcolor=_GRID)
    found.update_yaxes(gridcolor=_GRID)
    return found


_embedded_by: list[str | None] = []
"""The notebook cell whose output carries Plotly's script, once there is one."""


def _html(figure: go.Figure) -> str:
    """An element that draws the figure as soon as the page knows Plotly, with the script where this is its carrier."""
    from IPython import get_ipython

    shell = get_ipython()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell = parent.get("metadata", {}).get("cellId")
    # A cell that is run again loses its output, and with it the script; front ends that do not name cells keep it.
    if not _embedded_by or (cell is not None and cell == _embedded_by[0]):
        _embedded_by[:] = [cell]
        loader = f"<script>{_LOADER.replace('SCRIPT', packed_plotly())}</script>"
    else:
        loader = ""
    name = f"tsae-{uuid.uuid4().hex}"
    content = figure.to_json().replace("<", "\\u003c")
    return (
        f'{loader}<div id="{name}" style="height:{int(figure.layout.height or 450)}px"></div>'
        f"<script>{_DRAW.replace('NAME', name).replace('CONTENT', content)}</script>"
    )


_LOADER = """window.tsaePlotly = window.tsaePlotly || (async () => {
  const bytes = Uint8Array.from(atob("SCRIPT"), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const source = await new Response(stream).text();
  document.head.appendChild(Object.assign(document.createElement("script"), {text: source}));
  return window.Plotly;
})();"""

_DRAW = """(() => {
  const figure = CONTENT;
  const draw = async () => {
    for (let i = 0; !window.tsaePlotly && i < 100; i++) await new Promise((done) => setTimeout(done, 100));
    const plotly = await window.tsaePlotly;
    const place = document.getElementById("NAME");
    if (plotly) plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
    else place.textContent = "Run the cell of the first figure again: it carries Plotly's script.";
  };
  draw();
})();"""
