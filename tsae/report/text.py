"""Text for the page: numbers as people read them, and strings from files made harmless.

Rollout text is written by models and by strangers. It reaches the page by four ways only: `html_text` for markup,
`figure_text` for Plotly (which reads a subset of HTML in labels), `script_json` for data inside a script element, and
base64 for the examples (`packed`), which the browser puts into text nodes. Tables in Markdown have a way of their own
(`markdown_cell`)."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tsae.base.untrusted import visible as visible

if TYPE_CHECKING:  # the command line imports this module
    import pandas as pd


def html_text(text: object) -> str:
    """Safe inside elements and quoted attributes."""
    return html.escape(visible(str(text)))


def figure_text(text: object, limit: int = 60) -> str:
    """Safe as a Plotly label: shown as it is, at most `limit` characters of it."""
    shown = shortened(visible(str(text)).replace("\n", "⏎").replace("\t", "⇥"), limit)
    return html.escape(shown, quote=False)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, the last an ellipsis where some were cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def script_json(content: Any) -> str:
    """JSON that no script element's parser can mistake for markup; NaN becomes null."""
    # Five digits are more than a screen shows and keep the file small.
    text = json.dumps(for_json(content, 5), separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float, *, sign: bool = False, like: float | None = None) -> str:
    """About three significant digits, never in exponents, with a true minus.

    Args:
        value: to write.
        sign: write + too.
        like: a number with whose decimals to write it, so that an interval matches what it belongs to.
    """
    if not math.isfinite(value):
        return "–"
    size = abs(value if like is None else like)
    digits = 0 if size >= 100 else 1 if size >= 3 else 2 if size >= 0.095 else 3 if size >= 0.0095 else 4
    if size < 0.00005:
        digits = 2
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", "−")


def interval(low: float, high: float, *, sign: bool = False, like: float | None = None) -> str:
    return f"[{number(low, sign=sign, like=like)}, {number(high, sign=sign, like=like)}]"


def percent(value: float) -> str:
    """A share as a whole percentage, without the sign %; one decimal close to 0 and 100, where it matters."""
    share = 100 * value
    if not math.isfinite(share):
        return "–"
    text = f"{share:.1f}" if 0 < share < 1 or 99 < share < 100 else f"{share:.0f}"
    return "0" if text == "-0" else text.replace("-", "−")


def q_value(q: float) -> str:
    if not math.isfinite(q):
        return "–"
    return "< 0.001" if q < 0.001 else f"{q:.3f}" if q < 0.1 else f"{q:.2f}"


def count(n: int, noun: str) -> str:
    """“1 problem”, “2 problems”."""
    return f"{n:,} {noun if n == 1 else noun + 's'}"


def capitalised(text: str) -> str:
    """The text with a capital letter first; the others stay."""
    return text[:1].upper() + text[1:]


def listed(words: Sequence[str]) -> str:
    """“a, b and c”."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def for_json(value: Any, digits: int = 17) -> Any:
    """A value for JSON: tables become lists of rows; NaN and infinity, which JSON does not know, become null.

    Args:
        value: a table, an array, or whatever holds them.
        digits: significant ones of a number; 17 keep it as it is.
    """
    if isinstance(value, Mapping):
        return {str(name): for_json(item, digits) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item, digits) for item in value]
    if hasattr(value, "tolist"):
        return for_json(value.tolist(), digits)
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if hasattr(value, "to_dict"):
        return for_json(value.to_dict("records"), digits)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


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
