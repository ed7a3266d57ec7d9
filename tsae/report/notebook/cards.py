"""Results in a notebook: escaped HTML that needs no style sheet and no network (templates/cards.html).

It needs no script either: where scripts do not run, as in a notebook that is not trusted, tables cannot be sorted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd

from tsae.report.templates import macro
from tsae.report.text import number


@dataclass(frozen=True)
class Spark:
    """Numbers that a cell shows as a small line, with another at 0; NaN for what is not known."""

    names: Sequence[str]
    values: Sequence[float]
    width, height = 72, 18

    @property
    def known(self) -> list[tuple[int, float]]:
        return [(i, float(value)) for i, value in enumerate(self.values) if np.isfinite(value)]

    @property
    def said(self) -> str:
        """The numbers in words."""
        return ", ".join(f"{self.names[i]} {number(value, sign=True)}" for i, value in self.known) or "–"

    @property
    def zero(self) -> float:
        """Height of 0, from above."""
        return self._y(0.0)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Places of the known numbers."""
        step = (self.width - 6) / max(1, len(self.values) - 1)
        return [(round(3 + step * i, 1), self._y(value)) for i, value in self.known]

    def _y(self, value: float) -> float:
        values = [0.0, *(known for _, known in self.known)]
        low, high = min(values), max(values)
        return round(3 + (self.height - 6) * (high - value) / ((high - low) or 1.0), 1)


def card(
    title: str, facts: Mapping[str, object], *tables: tuple[str, pd.DataFrame], note: str = "", sortable: int = 0
) -> str:
    """A result at a glance.

    Args:
        title: the class.
        facts: what it holds, by name; None is left out.
        tables: (caption, table): the first rows, numbers to three significant digits; an index is left out.
        note: what to know before believing it.
        sortable: rows of the first table, if it scrolls and a click on a head sorts it; 0 for one like the others.
    """
    known = [(name, _plain(value)) for name, value in facts.items() if value is not None]
    sorted_one = bool(sortable and tables and len(tables[0][1]))
    kept = [(caption, table) for caption, table in tables if len(table)]
    limits = [sortable if sorted_one else 12, *[12] * len(kept)]
    shown = [_cells(table, caption, limit) for (caption, table), limit in zip(kept, limits, strict=False)]
    return macro("cards.html", "card", title, known, shown, note, sorted_one)


def tokens_html(
    tokens: Sequence[str], values: Sequence[float] | np.ndarray, *, strongest: float, n_prompt: int = 0
) -> str:
    """Tokens with their activations as colour: the deeper, the nearer to the strongest; ▸ starts the response.

    Args:
        tokens: their texts.
        values: an activation each; the exact number is the token's title.
        strongest: the activation of the deepest colour.
        n_prompt: tokens of the prompt, which come first.
    """
    shown = [
        (
            token.replace("\n", "⏎\n"),
            f"{0.12 + 0.48 * min(1.0, float(value) / (strongest or 1.0)):.2f}",
            number(float(value)) if value > 0 else "",
        )
        for token, value in zip(tokens, values, strict=True)
    ]
    return macro("cards.html", "tokens", shown, n_prompt)


def text_html(text: str) -> str:
    """Text as it is."""
    return macro("cards.html", "text", text)


def heading_html(text: str) -> str:
    """A line above a passage."""
    return macro("cards.html", "heading", text)


def show(html: str, text: str) -> None:
    """Display HTML in a notebook, and print text anywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import HTML, display

        display(HTML(html))
    else:
        print(text)


def _cells(table: pd.DataFrame, caption: str, limit: int = 12) -> tuple[str, list[tuple[str, str]], list[list[Any]]]:
    """Caption, heads with how their columns are aligned, and rows of cells: what is shown, and by what it is sorted."""
    aligned = ["right" if pd.api.types.is_numeric_dtype(kind) else "left" for kind in table.dtypes]
    heads = [(str(name).replace("_", " "), align) for name, align in zip(table.columns, aligned, strict=True)]
    rows = [[(_plain(value), _key(value)) for value in row] for row in table.head(limit).itertuples(index=False)]
    more = f"the first {limit} of {len(table):,} rows" if len(table) > limit else ""
    return " – ".join(part for part in (caption, more) if part), heads, rows


def _key(value: Any) -> str:
    """What a cell is sorted by: a number as it is, the last one of several, or the text."""
    if isinstance(value, Spark):
        value = value.known[-1][1] if value.known else None
    if value is None or value is pd.NA or (isinstance(value, Real) and pd.isna(value)):
        return ""
    return repr(float(value)) if isinstance(value, Real) else str(value)


def _plain(value: Any) -> str | Spark:
    """A value as people read it."""
    if isinstance(value, Spark):
        return value
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if isinstance(value, Real):
        return "–" if pd.isna(value) else number(float(value))
    if value is None or value is pd.NA:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
