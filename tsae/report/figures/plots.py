"""`diff.plot`: the report's figures one by one, as Plotly figures with titles, for notebooks and papers.

In a Jupyter kernel Plotly's default renderer needs an extension in the server, and shows nothing without it. Plotly's
other renderers for notebooks load the script from the network, or put all 4.6 MB of it into the notebook. So a figure
here adds HTML to Plotly's default: Plotly's own `to_html`, and before the first figure of the notebook Plotly's script
from the installed package, deflated to two fifths."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.io.base_renderers import MimetypeRenderer

from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.report.document import packed_plotly
from tsae.report.figures import checks, features
from tsae.report.figures.layout import DELTA
from tsae.report.figures.overview import overview
from tsae.report.story import facts
from tsae.report.story.statements import step_features
from tsae.report.text import figure_text

MIMETYPE = "application/vnd.plotly.v1+json"
_INK, _GRID = "#1d2228", "#e3e6ea"
_OFFLINE = "tsae_offline"

# Figures that come before the script is unpacked wait for it.
_LOADER = """<script>window.Plotly || (() => {
  const unpacked = (async () => {
    const bytes = Uint8Array.from(atob("SCRIPT"), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const text = await new Response(stream).text();
    delete window.Plotly;
    document.head.appendChild(Object.assign(document.createElement("script"), {text}));
  })();
  window.Plotly = {newPlot: (...plot) => unpacked.then(() => window.Plotly.newPlot(...plot))};
})();</script>"""
_MISSING = """<script>window.Plotly || document.currentScript.insertAdjacentText(
  "afterend", "Run the cell of the first figure again: it carries Plotly's script.");</script>"""


class _Offline(MimetypeRenderer):
    """HTML that draws a figure with no network; the first figure of a notebook carries Plotly's script."""

    def __init__(self) -> None:
        self.carrier: list[str | None] = []
        """The notebook cell whose output has the script, once there is one."""

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, str]:
        from IPython import get_ipython

        shell = get_ipython()
        parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
        cell = parent.get("metadata", {}).get("cellId")
        script = _MISSING
        # A cell that is run again loses its output, and with it the script; front ends that do not name cells keep it.
        if not self.carrier or (cell is not None and cell == self.carrier[0]):
            self.carrier[:] = [cell]  # Plotly draws with a copy of the renderer.
            script = _LOADER.replace("SCRIPT", packed_plotly())
        options = {"include_plotlyjs": False, "full_html": False, "config": {"displaylogo": False}}
        height = fig_dict["layout"].get("height", 450)
        return {"text/html": script + pio.to_html(fig_dict, default_height=height, validate=False, **options)}


pio.renderers[_OFFLINE] = _Offline()


class Figure(go.Figure):
    """A Plotly figure that shows itself in a notebook without network and without an extension."""

    def _ipython_display_(self) -> None:
        self.show()

    def show(self, *args: Any, **kwargs: Any) -> Any:
        """As of Plotly; in a Jupyter kernel with its default renderer, as above."""
        if not args and not kwargs and pio.renderers.default == "plotly_mimetype":
            kwargs = {"renderer": f"plotly_mimetype+{_OFFLINE}"}
        return super().show(*args, **kwargs)


class Plots:
    """Figures of a diff. Effects are Δ, in standard deviations with a floor; hover gives activations and q."""

    def __init__(self, diff: FeatureDiff) -> None:
        self.diff = diff

    def __repr__(self) -> str:
        return "diff.plot: " + ", ".join(name for name in sorted(dir(self)) if name[0] != "_" and name != "diff")

    def overview(self) -> Figure:
        """The report's first picture: the clearest features in every run."""
        return _titled(overview(self.diff), "What every run did", f"against {facts.compared_with(self.diff)}")

    def behaviours(self) -> Figure:
        """Accuracy, length and every other behaviour by checkpoint and band, with intervals."""
        return _titled(checks.behaviour_figure(self.diff), "Behaviour by band", "mean over problems, with interval")

    def bands(self, n: int = 8) -> Figure:
        """Shifts of each run's n most moved features by band and by outcome, as heat maps."""
        title = "Shift of the most moved features, by band and outcome"
        told = f"{DELTA}; a dot: no discovery; blank: not tested"
        return _titled(features.band_figure(self.diff, n=n), title, told)

    def volcano(self) -> Figure:
        """Every tested feature of every run: size of the shift against its q-value."""
        told = f"line: q = {self.diff.q:g}; circles high-level, diamonds low-level"
        return _titled(features.volcano_figure(self.diff), "Shift of every tested feature", told)

    def spread(self) -> Figure:
        """Every tested feature of every run: size of the shift against how active the feature is."""
        return _titled(features.spread_figure(self.diff), "Shift of every tested feature, by its activity", "")

    def families(self) -> Figure:
        """Mean shift of every family of features in every run."""
        return _titled(
            checks.family_figure(self.diff), "Families of features", f"against {facts.compared_with(self.diff)}"
        )

    def predictions(self) -> Figure:
        """Shifts that rollouts predict beside those that came; see `FeatureDiff.with_reinforcement`."""
        told = "rank correlation over features, interval"
        return _titled(checks.prediction_figure(self.diff), "Predicted and realised shifts", told)

    def steps(self, n: int = 6) -> Figure:
        """Features and behaviours along the steps of runs."""
        drawn = checks.steps_figure(self.diff, step_features(self.diff, n))
        return _titled(drawn, "Along the steps of the runs", "")

    def causal(self) -> Figure:
        """What interventions changed, beside their controls; see `Intervention.mark`."""
        return _titled(checks.causal_figure(self.diff), "Causal tests", "paired changes against no edit")

    def decomposition(self, n: int = 8) -> Figure:
        """Total shift of each run's n most moved features as policy part and representation part."""
        told = "new responses under the base's reading, and a new reading of the same responses"
        drawn = features.decomposition_figure(self.diff, n=n)
        return _titled(drawn, "Total shift = policy part + representation part", told)

    def opposed(self, up: str, down: str, n: int = 12) -> Figure:
        """Features that one checkpoint raised and another lowered, in every run."""
        found = [int(feature) for feature in self.diff.opposed(up, down).head(n).index]
        drawn = features.opposed_figure(self.diff, found)
        return _titled(drawn, f"Raised by {up}, lowered by {down}", f"shift against {facts.compared_with(self.diff)}")

    def outcomes(self, n: int = 6) -> Figure:
        """Success − failure within problem: the n clearest features of every band, as the base reads its responses."""
        told = f"as {self.diff.base} reads its own responses"
        return _titled(features.outcome_figure(self.diff, n=n), "Success − failure within problem", told)

    def feature(self, feature: int) -> Figure:
        """Shift of one feature in every run, over all problems and by band, with intervals.

        Raises:
            TsaeError: where there is no such feature.
        """
        described = facts.named(self.diff, self.diff.feature(feature).index)
        return _titled(
            features.feature_figure(self.diff, feature),
            f"Feature {described}",
            f"shift against {facts.compared_with(self.diff)}",
        )


def _titled(figure: go.Figure | None, title: str, subtitle: str) -> Figure:
    """With a title, above where the legend lies, and colours that need no page around them.

    Raises:
        TsaeError: where there is nothing to draw.
    """
    if figure is None:
        raise TsaeError("the diff holds nothing to draw there", where=title)
    found, space = Figure(figure), 62
    height, top = int(found.layout.height) + space, int(found.layout.margin.t) + space
    place = {"x": 0, "xref": "paper", "y": 1 - 18 / height, "yref": "container", "yanchor": "top"}
    text = f"<b>{figure_text(title, 90)}</b><br><sub>{figure_text(subtitle, 110)}</sub>"
    colours = {"paper_bgcolor": "#fff", "plot_bgcolor": "#fff", "font": {"color": _INK}}
    found.update_layout(
        title={"text": text, "font": {"size": 16}, **place}, height=height, margin={"t": top}, **colours
    )
    if found.layout.legend.yref == "container":
        found.update_layout(legend={"y": 1 - space / height})
    return found.update_xaxes(gridcolor=_GRID).update_yaxes(gridcolor=_GRID)
