"""For mkdocs: lines of docstrings that are aligned in columns stay aligned, as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_COLUMNS = re.compile(r"\s*\S.*?\S\s{2,}\S")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)


class DocstringTables(Extension):
    """Fences every paragraph in which at least two lines are set in columns."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        base, paragraphs = 0, re.split(r"\n\s*\n", obj.docstring.value)
        for i, paragraph in enumerate(paragraphs):
            base = 4 if _SECTION.search(paragraph) else base
            # Two colons say that what follows is code: it is indented, which says so in Markdown.
            paragraphs[i] = _fenced(paragraph.removesuffix(":") if paragraph.endswith("::") else paragraph, base)
        obj.docstring.value = "\n\n".join(paragraphs)


def _fenced(paragraph: str, base: int) -> str:
    lines = paragraph.strip("\n").split("\n")
    if sum(bool(_COLUMNS.match(line)) for line in lines) < 2:
        return paragraph
    heading = lines.pop(0) if lines[0].endswith(":") else None
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    if indent >= base + 4:
        return paragraph
    fence = " " * indent + "```"
    return "\n".join([*([heading, ""] if heading else []), f"{fence}text", *lines, fence])
