"""For mkdocs: lines of docstrings that are aligned in columns stay aligned, as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_COLUMNS = re.compile(r"\s*\S.*?\S\s{2,}\S")


class DocstringTables(Extension):
    """Fences every paragraph in which at least two lines are set in columns."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            paragraphs, literal = re.split(r"\n\s*\n", obj.docstring.value), False
            for i, paragraph in enumerate(paragraphs):
                # What follows two colons is indented, and so is code already.
                paragraphs[i] = paragraph.removesuffix(":") if paragraph.endswith("::") else paragraph
                paragraphs[i] = paragraphs[i] if literal else _fenced(paragraphs[i])
                literal = paragraph.endswith("::")
            obj.docstring.value = "\n\n".join(paragraphs)


def _fenced(paragraph: str) -> str:
    lines = paragraph.strip("\n").split("\n")
    if sum(bool(_COLUMNS.match(line)) for line in lines) < 2 or "```" in paragraph:
        return paragraph
    heading = lines.pop(0) if lines[0].endswith(":") else None
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    fence = " " * indent + "```"
    return "\n".join([*([heading, ""] if heading else []), f"{fence}text", *lines, fence])
