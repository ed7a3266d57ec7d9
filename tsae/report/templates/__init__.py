"""Templates of pages and notebook cards, and how they are rendered: every text is escaped on its way in."""

from __future__ import annotations

from functools import cache

import jinja2
from markupsafe import Markup

from tsae.report.text import count, html_text


@cache
def environment() -> jinja2.Environment:
    """Templates of this folder. What is missing is an error, and None writes nothing."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("tsae.report", "templates"),
        autoescape=True,
        finalize=_harmless,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["flowing"] = _flowing
    made.globals["count"] = count
    return made


def macro(template: str, name: str, *arguments: object) -> str:
    """HTML that one macro of a template writes."""
    return str(getattr(environment().get_template(template).module, name)(*arguments))


def _harmless(value: object) -> object:
    """Text as `html_text` writes it: escaped, and with what reorders or hides text shown by code point."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else Markup(html_text(value))


def _flowing(text: Markup) -> Markup:
    """Finished HTML with its line breaks as spaces."""
    return Markup(" ".join(text.split()))
