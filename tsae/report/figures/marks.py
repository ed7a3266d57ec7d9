"""The marks that figures are made of: points with intervals, lines with intervals, areas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

HOVER = {"hovertemplate": "%{text}<extra></extra>"}
"""Hovering shows a trace's text and nothing else."""

Point = tuple[float, ...]
"""(value, low, high)"""


class Mark(NamedTuple):
    """A point with its interval in a row of a figure."""

    row: int
    point: Point
    hover: str


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
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": size},
        error_x=whiskers(points, colour),
        text=[mark.hover for mark in marks],
        **HOVER | trace,
    )


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
    """A filled outline that tells its text."""
    filled = {"mode": "lines", "fill": "toself", "fillcolor": colour, "line": {"width": 0}, "hoveron": "fills"}
    return go.Scatter(x=x, y=y, **filled, hoverinfo="text", text=hover, showlegend=False)
