"""Renders a template as one HTML file that loads nothing, and links its words to the glossary.

The content security policy forbids every request and every script but ours and Plotly's, by hash. Templates escape all
text on its way in; if some of it ever were not escaped, it still could not run. `explained` adds links around words. It
reads no markup but ours: all text is escaped by then."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tsae.base.artefact import version_of
from tsae.base.files import as_path, replacing
from tsae.errors import TsaeError
from tsae.report.text import count, html_text, script_json


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
    made.filters["explained"] = explained
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


def packed(content: Any) -> str:
    """Base64 of deflated JSON, or of text as it is; `inflate` of report/templates/data.js undoes it.

    It holds no character that HTML knows.
    """
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")


@cache
def packed_plotly() -> str:
    """Plotly's script, from the installed package: packed it has two fifths of its size."""
    return packed(get_plotlyjs())


def number_array(values: np.ndarray, digits: int = 3) -> str:
    """JSON of an array with so many significant digits; what is not finite becomes null."""
    values = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        places = np.clip(digits - 1 - np.floor(np.log10(np.abs(values))), -22, 22)
        # Whole numbers and powers of ten up to 22 are exact: their quotient is the float nearest to the decimal.
        up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
        rounded = np.where(values == 0, 0.0, np.rint(values * up / down) / up * down)
    rounded[~np.isfinite(values)] = np.nan
    return json.dumps(rounded.tolist(), separators=(",", ":")).replace("NaN", "null")


def render_page(
    template: str,
    title: str,
    drawn: Mapping[str, go.Figure | None],
    parts: Mapping[str, str] | None = None,
    *,
    connect: str = "'none'",
    scripts: Sequence[str] = (),
    **of: Any,
) -> Iterator[str]:
    """Render a template that extends document.html, piece by piece; the same input gives the same page.

    Args:
        template: name of its file.
        title: of the page.
        drawn: figures by name; the template leaves out those that are None.
        parts: packed data of the explorer by name; without it the page has none.
        connect: where its scripts may ask for more, as a content security policy says it.
        scripts: files of further scripts, which come last.
        of: what else the template asks for.
    """
    explorer = [] if parts is None else ["card.js", "show.js", "explorer.js"]
    modules = ["data.js", *explorer, "fit.js", "report.js", *scripts]
    ours = "\n".join(map(_resource, modules)) + ("" if parts is None else "startExplorer().then(startShow);\n")
    figures = {name: figure for name, figure in drawn.items() if figure is not None}
    return (
        environment()
        .get_template(template)
        .generate(
            title=title,
            connect=Markup(connect),
            figures=figures,
            heights={name: int(figure.layout.height) for name, figure in figures.items()},
            figures_json=Markup(script_json({name: _plain(figure) for name, figure in figures.items()})),
            # Base64 has no character to escape, and escaping would search megabytes of it.
            packs={name: Markup(text) for name, text in (parts or {}).items()},
            plotly=Markup(packed_plotly()),
            style=Markup(_resource("report.css")),
            script=Markup(ours),
            hashes=Markup(f"{_digest(get_plotlyjs())} {_digest(ours)}"),
            **of,
        )
    )


def write_page(path: str | Path, content: Iterable[str]) -> Path:
    """Write a page whole or not at all; its folder is made.

    Args:
        path: of the page.
        content: its pieces, so that a large page is never in memory as a whole.

    Raises:
        TsaeError: where the path is a folder.
    """
    path = target(path)
    with replacing(path) as partial, partial.open("wb") as file:
        for piece in content:
            # Lone surrogates are shown by code point long before this; what escaped that must not stop the report.
            file.write(piece.encode("utf-8", "replace"))
    return path


def target(path: str | Path) -> Path:
    """The path of a page that is to be written.

    Raises:
        TsaeError: where it is a folder.
    """
    if as_path(path).is_dir():
        raise TsaeError("is a folder", where=path, fix="Name the .html file to write.")
    return as_path(path)


def written_with() -> dict[str, str]:
    """Versions of what writes the page."""
    return {package: found for package in ("tsae", "plotly") if (found := version_of(package)) is not None}


def _plain(figure: go.Figure) -> dict[str, object]:
    content = json.loads(figure.to_json())
    return {"data": content["data"], "layout": content["layout"]}


@cache
def _resource(name: str) -> str:
    """A script or style sheet without indentation and lines of comment, which make a tenth of it."""
    lines = map(str.strip, files("tsae.report").joinpath("templates", name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


@cache
def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'"


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
