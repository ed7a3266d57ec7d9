"""The common layout of figures: panels, named rows, margins, marks, colours.

Sizes are in pixels, for a figure about 1,000 wide. `layout.meta` says how the panels may be arranged anew; the page's
script (fit.js) does that for the width of the screen and the text that must have room.

All colours keep a contrast of at least 3:1 on the light and on the dark page, and stay apart under the common kinds of
colour blindness; marks also differ in shape or position, so that no reading depends on colour alone. Text and grid
colours are not set here: the page's script sets them for light or dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


def run_style(order: int) -> tuple[str, str]:
    """Colour and symbol of the n-th run or feature. Grey, the first colour, stands for the base."""
    return SERIES[1 + order % (len(SERIES) - 1)], SYMBOLS[order % len(SYMBOLS)]


HOVER = {"hovertemplate": "%{text}<extra></extra>"}
"""Hovering shows a trace's text and nothing else."""

Point = tuple[float, ...]
"""(value, low, high)"""


class Mark(NamedTuple):
    """A point with its interval in a row of a figure."""

    row: int
    point: Point
    hover: str
    feature: int | None = None
    """The feature that it stands for: a click opens the card."""


def whiskers(points: Sequence[Point], colour: str, thickness: float = 1.4) -> dict[str, Any]:
    """Error bars of points."""
    return {
        "array": [high - value for value, _, high in points],
        "arrayminus": [value - low for value, low, _ in points],
        "color": colour,
        "thickness": thickness,
        "width": 0,
    }


def dots(marks: Sequence[Mark], style: tuple[str, str], *, size: int = 8, up: float = 0, **trace: Any) -> go.Scatter:
    """Marks in their rows, moved by `up` rows, with horizontal intervals. A style is a colour and a symbol."""
    colour, symbol = style
    points = [mark.point for mark in marks]
    return go.Scatter(
        x=[value for value, _, _ in points],
        y=[mark.row + up for mark in marks],
        marker={"color": colour, "symbol": symbol, "size": size},
        error_x=whiskers(points, colour),
        text=[mark.hover for mark in marks],
        customdata=[mark.feature for mark in marks],
        **HOVER | {"mode": "markers"} | trace,
    )


def dots_by(
    panel: Panels,
    styles: Mapping[str, tuple[str, str]],
    marks: Callable[[int, str], Sequence[Mark]],
    *,
    step: float,
    size: int = 8,
    name: str = "{} problems",
    empty: bool = True,
) -> None:
    """Add marks of several series, beside each other in their rows, to every panel.

    Args:
        panel: where.
        styles: colour and symbol of every series.
        marks: gives those of a panel (its number) and a series.
        step: between two series, in rows.
        size: of a mark.
        name: of a series, for the legend.
        empty: whether a series without marks stands in the legend.
    """
    for place, cell in enumerate(panel.cells):
        for order, (series, style) in enumerate(styles.items()):
            if (mine := marks(place, series)) or empty:
                group = {"legendgroup": series, "showlegend": place == 0} if len(panel.cells) > 1 else {}
                up = aside(order, len(styles), step)
                panel.figure.add_trace(dots(mine, style, size=size, up=up, name=name.format(series), **group), **cell)


def aside(order: int, n: int, step: float) -> float:
    """How far the series number `order` of n stands off the middle of its row."""
    return (order - (n - 1) / 2) * step


def path(x: list[Any], points: Sequence[Point], style: tuple[str, str], text: list[str], **trace: Any) -> go.Scatter:
    """Points with vertical intervals, joined by a line."""
    colour, symbol = style
    width, size, thickness = trace.pop("widths")
    return go.Scatter(
        x=x,
        y=[value for value, _, _ in points],
        mode="lines+markers",
        line={"color": colour, "width": width},
        marker={"color": colour, "symbol": symbol, "size": size},
        error_y=whiskers(points, colour, thickness),
        text=text,
        **HOVER | trace,
    )


def area(x: list[Any], y: list[Any], colour: str, hover: str) -> go.Scatter:
    """A filled outline with its text on hovering."""
    filled = {"mode": "lines", "fill": "toself", "fillcolor": colour, "line": {"width": 0}, "hoveron": "fills"}
    return go.Scatter(x=x, y=y, **filled, hoverinfo="text", text=hover, showlegend=False)


DELTA = "Δ (standard deviations, with a floor)"


class Panels(NamedTuple):
    """An empty figure of panels."""

    figure: go.Figure
    cells: list[dict[str, int]]
    """row and col of every panel, as Plotly's functions take them; the panels of one column follow each other."""
    height: int
    """Of all panels with the gaps between them, without the figure's margins."""


def panels(
    titles: Sequence[str],
    most: int,
    *,
    panel: int | Sequence[int],
    gap: int,
    horizontal: float = 0.03,
    heads: Sequence[str] = (),
    beside: bool = False,
    least: int = 150,
    align: str = "center",
    size: float = 13,
    **options: Any,
) -> Panels:
    """A column of one or more panels for every title, row by row.

    Args:
        titles: bold where they name something; "" for none.
        most: columns beside each other.
        panel: height of a panel, or of each panel of a column from the top.
        gap: between two rows of panels.
        horizontal: between two panels, as a share of the width.
        heads: a heading for every panel of a column, written once a row.
        beside: headings stand in the left margin, and not above the panels.
        least: the smallest width of a panel.
        align: of titles: center, or left.
        size: of their font.
        options: of Plotly's make_subplots.
    """
    heights = [panel] if isinstance(panel, int) else list(panel)
    columns, per = min(len(titles), most), len(heights)
    blocks = -(-len(titles) // columns)
    rows = blocks * per
    height = blocks * sum(heights) + (rows - 1) * gap
    figure = make_subplots(
        rows=rows,
        cols=columns,
        row_heights=[float(h) for h in heights] * blocks,
        horizontal_spacing=horizontal if columns > 1 else 0,
        vertical_spacing=gap / height if rows > 1 else 0,
        **options,
    )
    cells = [
        {"row": i // columns * per + p + 1, "col": i % columns + 1} for i in range(len(titles)) for p in range(per)
    ]
    for title, cell in zip(titles, cells[::per], strict=True):
        x, top = figure.get_subplot(**cell).xaxis.domain, figure.get_subplot(**cell).yaxis.domain[1]
        if align == "left":
            _above(figure, title, x[0], top, size, xanchor="left", align="left", yshift=8)
        else:
            _above(figure, title, sum(x) / 2, top, size)
    for row in range(rows if heads else 0):
        place = {"xanchor": "right", "xshift": -6, "yshift": 2} if beside else {"xanchor": "left", "yshift": 4}
        _above(figure, heads[row % per], 0, figure.get_subplot(row + 1, 1).yaxis.domain[1], 12, **place)
    figure.update_layout(
        meta={
            "titles": list(titles), "columns": columns, "heights": heights, "gap": gap, "heads": list(heads),
            "beside": beside, "least": least, "align": align, "size": size, "own": not options.get("shared_yaxes"),
        }
    )  # fmt: skip
    return Panels(figure, cells, height)


def _above(figure: go.Figure, text: str, x: float, y: float, size: float, **place: Any) -> None:
    if text:
        place = {"xanchor": "center", "xref": "paper", "yref": "paper", "yanchor": "bottom", **place}
        figure.add_annotation(text=text, x=x, y=y, showarrow=False, font={"size": size}, name="title", **place)


def one_panel(height: int) -> Panels:
    """An empty figure of a single panel."""
    return panels([""], 1, panel=height, gap=0)


def label_rows(figure: go.Figure, labels: Sequence[str], *, edge: float = 0.6, **cell: int) -> None:
    """Finished labels on the vertical axis, at 0, 1, … from the top; `edge` is the room above and below them."""
    figure.update_yaxes(
        range=[len(labels) - 1 + edge, -edge],
        tickvals=list(range(len(labels))),
        ticktext=list(labels),
        ticks="",
        **cell,
    )


def name_rows(figure: go.Figure, names: Sequence[str], width: int = 18, **cell: int) -> None:
    """Names on the vertical axis, cut to `width` characters."""
    label_rows(figure, [figure_text(name, width) for name in names], edge=0.55, **cell)


def x_title(figure: go.Figure, text: str, standoff: int = 4, **cell: int) -> None:
    """The title of the horizontal axes."""
    figure.update_xaxes(title={"text": text, "standoff": standoff}, **cell)


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
