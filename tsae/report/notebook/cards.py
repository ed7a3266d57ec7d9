"""Results in a notebook: escaped HTML that needs no script, no style sheet and no network.

Styles are attributes, because much of what shows notebooks drops style sheets (GitHub, a notebook that is not trusted).
Colours are translucent, so that text stays readable on a light and on a dark page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd

from tsae.report.text import html_text, number

_CELL = "padding:2px 10px 2px 0;text-align:{align};vertical-align:top;border:0;white-space:nowrap"
_QUIET = "opacity:.7"
_MARK = "background:rgba(212,98,42,{alpha:.2f});border-radius:2px"
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;font-family:ui-monospace,monospace;"
    "font-size:12px;line-height:1.7"
)


def card(title: str, facts: Mapping[str, object], *tables: tuple[str, pd.DataFrame], note: str = "") -> str:
    """A result at a glance.

    Args:
        title: the class.
        facts: what it holds, by name; None is left out.
        tables: (caption, table), see `table_html`.
        note: what to know before believing it.
    """
    shown = "".join(
        f'<span style="display:inline-block;margin-right:18px"><span style="{_QUIET}">{html_text(name)}</span> '
        f"{html_text(_plain(value))}</span>"
        for name, value in facts.items()
        if value is not None
    )
    parts = [f'<div><b>{html_text(title)}</b></div><div style="margin:2px 0 6px">{shown}</div>']
    parts += [table_html(table, caption) for caption, table in tables if len(table)]
    if note:
        parts.append(f'<div style="{_QUIET}">{html_text(note)}</div>')
    return f'<div class="tsae" style="max-width:1100px;overflow-x:auto;font-size:13px">{"".join(parts)}</div>'


def table_html(table: pd.DataFrame, caption: str = "", limit: int = 12) -> str:
    """The first rows of a table, numbers to three significant digits; its index is left out."""
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
    align = [_CELL.format(align="right" if is_number else "left") for is_number in numeric]
    head = "".join(
        f'<th scope="col" style="{style};{_QUIET};font-weight:400">{html_text(str(name).replace("_", " "))}</th>'
        for name, style in zip(table.columns, align, strict=True)
    )
    rows = "".join(
        "<tr style='background:transparent'>"
        + "".join(
            f'<td style="{style}">{html_text(_plain(value))}</td>' for value, style in zip(row, align, strict=True)
        )
        + "</tr>"
        for row in table.head(limit).itertuples(index=False)
    )
    more = f"the first {limit} of {len(table):,} rows" if len(table) > limit else ""
    told = " – ".join(part for part in (caption, more) if part)
    title = f'<caption style="text-align:left;caption-side:top;padding:4px 0;{_QUIET}">{html_text(told)}</caption>'
    return (
        f'<table style="border-collapse:collapse;margin:4px 0 8px;border:0;font-size:13px">{title if told else ""}'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


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
    parts = []
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        if i == n_prompt and i:
            parts.append(f'<span title="the response starts here" style="{_QUIET}">▸</span>')
        shown = html_text(token).replace("\n", "⏎\n")
        if value > 0:
            style = _MARK.format(alpha=0.12 + 0.48 * min(1.0, float(value) / strongest))
            shown = f'<mark style="{style};color:inherit" title="{number(float(value))}">{shown}</mark>'
        parts.append(shown)
    return f'<div dir="ltr" style="{_TEXT}">{"".join(parts)}</div>'


def text_html(text: str) -> str:
    """Text as it is."""
    return f'<div dir="auto" style="{_TEXT}">{html_text(text)}</div>'


def heading_html(text: str) -> str:
    """A line above a passage."""
    return f'<div style="margin-top:8px;{_QUIET}">{html_text(text)}</div>'


def show(html: str, text: str) -> None:
    """Display HTML in a notebook, and print text anywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import HTML, display

        display(HTML(html))
    else:
        print(text)


def _plain(value: Any) -> str:
    """A value as people read it."""
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
