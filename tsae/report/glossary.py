"""The words that the page explains: the glossary's table, and links to it from the words of finished HTML.

`explained` adds links around words. It reads no markup but ours: all text is escaped by then.
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from typing import NamedTuple

from markupsafe import Markup

from tsae.report.text import html_text


class Term(NamedTuple):
    """A word of the page."""

    key: str
    """Of its place in the glossary."""
    name: str
    meaning: str
    pattern: str = ""
    """Finds the word in a text; empty where it is too common to be marked."""


GLOSSARY = tuple(
    Term(key, **term)
    for key, term in tomllib.loads(
        files("tsae.report").joinpath("templates", "glossary.toml").read_text(encoding="utf-8")
    ).items()
)
_WORDS = re.compile(
    "|".join(rf"(?P<term{i}>(?<!\w)(?:{term.pattern})(?!\w))" for i, term in enumerate(GLOSSARY) if term.pattern)
    + r"|(?<![\w.])(?:arXiv[: ])?(?P<paper>\d\d(?:0[1-9]|1[0-2])\.\d{5})(?![\w.]*\d)"
)
_TAG = re.compile(r"(<[^>]*>)")
_SILENT = {"a", "bdi", "button", "code", "h1", "h2", "h3", "label", "mark", "select", "summary"}
"""Elements whose words stay as they are: links, headings, and text of files. So does the text of responses."""


def explained(html: Markup | str) -> Markup:
    """HTML whose arXiv ids are links, as is the first of every word in a section, a table and a caption."""
    seen: set[str] = set()
    silent, depth, written = "", 0, []
    for piece in _TAG.split(html if isinstance(html, Markup) else html_text(html)):
        if piece.startswith("<"):
            name = piece.strip("</>").partition(" ")[0]
            if depth:
                depth += (name == silent) * (-1 if piece[1] == "/" else 1)
            elif name in _SILENT or 'class="tokens' in piece:
                silent, depth = name, 1
            elif name in ("section", "table", "figcaption"):
                seen.clear()
        elif not depth:
            piece = _WORDS.sub(lambda found: _link(found, seen), piece)
        written.append(piece)
    return Markup("".join(written))


def _link(found: re.Match[str], seen: set[str]) -> str:
    word, kind = found.group(), str(found.lastgroup)
    if kind == "paper":
        id = found["paper"]
        return f'<a href="https://arxiv.org/abs/{id}">arXiv {id}</a>'
    if kind in seen:
        return word
    seen.add(kind)
    return f'<a class="term" href="#term-{GLOSSARY[int(kind.removeprefix("term"))].key}">{word}</a>'
