"""The common layout of figures: panels beside and above each other, named rows, margins.

Sizes are in pixels, for a figure about 1,000 wide. `layout.meta` says how the panels may be arranged anew; the page's
script (fit.js) does that for the width of the screen and the text that must have room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tsae.report.figures.style import FONT, NEUTRAL
from tsae.report.text import figure_text

DELTA = "Δ (standard deviations over base trajectories)"


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


def one_panel(height: int) -> go.Figure:
    """An empty figure of a single panel."""
    return panels([""], 1, panel=height, gap=0).figure


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
