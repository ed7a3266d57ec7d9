"""Colours and the common layout of figures.

All colours keep a contrast of at least 3:1 on the light and on the dark page, and stay apart under the common kinds of
colour blindness; marks also differ in shape or position, so that no reading hangs on colour alone. Text and grid
colours are left out here: the page's script sets them for light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.report.text import figure_text

RAISED, LOWERED, NEUTRAL = "#d4622a", "#2f7fc1", "#858b95"
SERIES = ("#858b95", "#1b9381", "#a55cc0", "#b8860b", "#d4622a", "#2f7fc1", "#c2527b", "#6b8e23")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
BAND_STYLE = {
    "easy": ("#168f57", "circle"),
    "medium": ("#a55cc0", "diamond"),
    "hard": ("#b8860b", "square"),
    "all": ("#858b95", "circle-open"),
}
LEGEND = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0}
"""Above the figure, from its left."""
# Light tiles on either page, so that dark numbers on them are always readable.
DIVERGING = [[0.0, "#67a6db"], [0.5, "#eceef1"], [1.0, "#ec8f64"]]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


class Panels(NamedTuple):
    """An empty figure of panels."""

    figure: go.Figure
    cells: list[dict[str, int]]
    """row and col of every panel, as Plotly's functions take them."""
    height: int
    """Of all panels with the gaps between them, in pixels, without the figure's margins."""


def panels(titles: Sequence[str], most: int, *, panel: int, gap: int, horizontal: float, **options: Any) -> Panels:
    """A panel for every title, row by row.

    Args:
        titles: bold where they name something; "" for none.
        most: panels beside each other.
        panel: height of a panel in pixels.
        gap: between two rows of panels, in pixels.
        horizontal: between two panels, as a share of the width.
        options: of Plotly's make_subplots.
    """
    columns = min(len(titles), most)
    rows = -(-len(titles) // columns)
    height = rows * panel + (rows - 1) * gap
    figure = make_subplots(
        rows=rows,
        cols=columns,
        horizontal_spacing=horizontal if columns > 1 else 0,
        vertical_spacing=gap / height if rows > 1 else 0,
        subplot_titles=list(titles),
        **options,
    )
    cells = [{"row": place // columns + 1, "col": place % columns + 1} for place in range(len(titles))]
    return Panels(figure, cells, height)


def name_rows(figure: go.Figure, names: Sequence[str], width: int = 18, **cell: int) -> None:
    """Names on the vertical axis, at 0, 1, … from the top, cut to so many characters."""
    figure.update_yaxes(
        range=[len(names) - 0.45, -0.55],
        tickvals=list(range(len(names))),
        ticktext=[figure_text(name, width) for name in names],
        ticks="",
        **cell,
    )


def finish(
    figure: go.Figure, *, height: int, left: int = 10, top: int = 40, bottom: int = 44, **layout: Any
) -> go.Figure:
    """Set what all figures share."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": left, "r": 14, "t": top, "b": bottom},
        font={"family": FONT, "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"align": "left"},
        **layout,
    )
    # Plotly's own size for the titles of panels does not fit narrow ones.
    figure.for_each_annotation(lambda title: title.update(font={"size": 13}), selector={"font": {"size": 16}})
    figure.update_xaxes(title={"font": {"size": 12}}, zeroline=False, automargin=False)
    figure.update_yaxes(zeroline=False, showgrid=False, automargin=False)
    return figure


def vertical_zero(figure: go.Figure, **cell: Any) -> None:
    """A line at x = 0, behind the marks."""
    figure.add_vline(x=0, line={"color": NEUTRAL, "width": 1}, layer="below", **cell)


def whiskers(points: Sequence[tuple[float, ...]], colour: str) -> dict[str, Any]:
    """Horizontal error bars of points (value, low, high)."""
    return {
        "array": [high - value for value, _, high in points],
        "arrayminus": [value - low for value, low, _ in points],
        "color": colour,
        "thickness": 1.4,
        "width": 0,
    }
