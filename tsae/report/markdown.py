"""Tables as Markdown, with text that cannot leave its cell."""

from __future__ import annotations

import html
import re

import pandas as pd

from tsae.report.text import visible


def markdown_table(table: pd.DataFrame) -> str:
    """A GitHub-flavoured table; numbers have three significant digits."""
    lines = [list(table.columns), ["---"] * table.shape[1]]
    lines += [[markdown_cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def markdown_cell(value: object) -> str:
    """A value as text that Markdown and HTML leave as it is."""
    if isinstance(value, float):
        return f"{value:.3g}"
    text = html.escape(visible(str(value)).replace("\n", "⏎").replace("\t", "⇥"), quote=False)
    return re.sub(r"([\\`*_\[\]|~!#])", r"\\\1", text)
