"""Field docstrings as running text in --help.

tyro takes a docstring's lines as they stand in the source, where they are wrapped for the editor and indented; in a
terminal they would break there again. It prefers a field's metadata, where the joined text goes.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from types import MappingProxyType
from typing import Any


def join_lines(kind: Any) -> None:
    """Give every field of a dataclass, and of those that its fields are, its docstring as one paragraph.

    Args:
        kind: a dataclass, or a union or annotation of some; other types are left alone.
    """
    for part in typing.get_args(kind):
        join_lines(part)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return
    import docstring_parser

    said = {
        found.arg_name: found.description
        for owner in reversed(kind.__mro__)
        if dataclasses.is_dataclass(owner)
        for found in docstring_parser.parse_from_object(owner).params
    }
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        text = said.get(field.name)
        if text and "help" not in field.metadata:
            paragraphs = re.split(r"\n\s*\n", text.strip())
            joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            field.metadata = MappingProxyType({**field.metadata, "help": joined})
        join_lines(hints[field.name])
