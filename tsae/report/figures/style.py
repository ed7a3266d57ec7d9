"""Colours, symbols and fonts of the figures.

All colours keep a contrast of at least 3:1 on the light and on the dark page, and stay apart under the common kinds of
colour blindness; marks also differ in shape or position, so that no reading depends on colour alone. Text and grid
colours are not set here: the page's script sets them for light or dark.
"""

from __future__ import annotations

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


def run_style(order: int) -> tuple[str, str]:
    """Colour and symbol of the n-th run or feature. Grey, the first colour, stands for the base."""
    return SERIES[1 + order % (len(SERIES) - 1)], SYMBOLS[order % len(SYMBOLS)]
