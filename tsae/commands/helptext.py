"""What --help shows: the options that matter, and field docstrings as running text with defaults shown once.

tyro takes the lines of a docstring from the source, where they are wrapped for the editor. In a terminal they would
break at the same places: `help_rules` joins them. The docstring explains a default of None or of nothing ("by default
…"): neither is shown again, nor None as a choice.

Where a command has many options, --help shows those that are marked `Daily`, and --help-all shows every option.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Suppress, arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from tsae.base.validation import Daily

_MANY = 25
"""Options of a command that --help shows whole."""
_WORDS = {Path: "PATH", str: "STR", int: "INT", float: "FLOAT"}


def help_rules(hidden: Collection[tuple[type, str]] = ()) -> ConstructorRegistry:
    """Rules by which tyro reads our dataclasses for --help and for completions; the classes stay as they are.

    Args:
        hidden: classes, and fields of each, that are left out.
    """
    rules, reading = ConstructorRegistry(), list[Any]()

    @rules.struct_rule
    def documented(info: StructTypeInfo) -> StructConstructorSpec | None:
        if reading or not dataclasses.is_dataclass(info.type):
            return None  # tyro's own rules read it
        reading.append(info.type)
        found = ConstructorRegistry.get_struct_spec(info)
        reading.clear()
        if not isinstance(found, StructConstructorSpec):
            return None
        shown = [_shown(field, (info.type, field.name) in hidden) for field in found.fields]
        return dataclasses.replace(found, fields=tuple(shown))

    return rules


def _shown(field: StructFieldSpec, hidden: bool) -> StructFieldSpec:
    """A field with its docstring as running text; without a default of None or of nothing, which that explains."""
    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip())]
    kind: Any = field.type
    if hidden:
        kind = Annotated[kind, Suppress]
    elif text and (field.default is None or field.default == ()):
        inner = [part for part in typing.get_args(_plain(kind)) if part is not type(None)]
        optional = typing.get_origin(_plain(kind)) in (types.UnionType, typing.Union) and len(inner) == 1
        kind = Annotated[kind, arg(help_behavior_hint="", metavar=_metavar(inner[0]) if optional else None)]
    return dataclasses.replace(field, type=kind, helptext="\n\n".join(paragraphs) or None)


def subcommands(kind: type) -> dict[str, type]:
    """The commands of a group, such as `tsae store`, by name; none of a command that does something itself."""
    parts = typing.get_args(_plain(typing.get_type_hints(kind, include_extras=True).get("command")))
    return {mark.name: _plain(part) for part in parts for mark in part.__metadata__ if hasattr(mark, "name")}


def left_out(kind: type) -> list[tuple[type, str]]:
    """The class and the field of each option that --help does not show, where a command has many."""
    options = list(_options(kind))
    return [(owner, name) for owner, name, shown in options if not shown and len(options) > _MANY]


def _options(kind: type, within: tuple[type, str] | None = None) -> Iterator[tuple[type, str, bool]]:
    """The options of a command: the class and the field that decide whether --help shows them, and whether it does.

    Args:
        within: the config that holds all of them, if it is shown or left out as a whole: its options have a prefix.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks, inner = getattr(hint, "__metadata__", ()), _plain(hint)
        made = any(getattr(mark, "constructor_factory", None) for mark in marks)  # by a function with its own options
        if dataclasses.is_dataclass(inner) and isinstance(inner, type) and not made:
            flat = OmitArgPrefixes in marks or any(getattr(mark, "name", None) == "" for mark in marks)
            yield from _options(inner, within or (None if flat or _DAILY in marks else (kind, field.name)))
        elif within:
            yield *within, False
        else:
            needed = field.default is field.default_factory is dataclasses.MISSING
            yield kind, field.name, needed or _DAILY in marks


_DAILY = Daily.__metadata__[0]


def _metavar(kind: Any) -> str | None:
    """PATH for Path, [INT [INT ...]] for tuple[int, ...]; None where tyro is to name it."""
    kind, *parts = _plain(kind), *map(_plain, typing.get_args(_plain(kind)))
    if typing.get_origin(kind) is tuple and parts[0] in _WORDS:
        words = [_WORDS[part] for part in parts if part in _WORDS]
        return f"[{words[0]} [{words[0]} ...]]" if parts[-1] is Ellipsis else " ".join(words)
    return _WORDS.get(kind)


def _plain(kind: Any) -> Any:
    """A type without its annotations."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


class WrappedOutput(io.TextIOBase):
    """Standard output that wraps long lines at the terminal's width; tyro does not wrap a command's description."""

    def __init__(self) -> None:
        self.out, self.width = sys.stdout, shutil.get_terminal_size().columns

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.out.encoding

    def isatty(self) -> bool:
        return self.out.isatty()

    def write(self, text: str) -> int:
        return self.out.write("\n".join(map(self._wrapped, text.split("\n"))))

    def _wrapped(self, line: str) -> str:
        # Boxes are wrapped already; coloured text is longer than it looks.
        if len(line) <= self.width or "│" in line or "\x1b" in line:
            return line
        return textwrap.fill(line, self.width, break_on_hyphens=False, break_long_words=False)
