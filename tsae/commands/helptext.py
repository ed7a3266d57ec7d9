"""What --help shows: the options that matter, and field docstrings as running text with defaults shown once.

tyro takes the lines of a docstring from the source, where they are wrapped for the editor. In a terminal they would
break at the same places. tyro prefers a field's metadata, so the joined text goes there. The docstring explains a
default of None or of nothing ("by default …"): neither is shown again, nor None as a choice.

Where a command has many options, --help shows those that are marked `Daily`, and --help-all shows every option.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Suppress, arg

from tsae.base.validation import Daily

_MANY = 25
"""Options of a command that --help shows whole."""
_WORDS = {Path: "PATH", str: "STR", int: "INT", float: "FLOAT"}


def join_lines(kind: Any) -> None:
    """Give every field of a dataclass, and of those that its fields are, its docstring as one paragraph.

    Args:
        kind: a dataclass, or a union or annotation of some; other types are left alone.
    """
    for part in typing.get_args(kind):
        join_lines(part)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return
    owners = [owner for owner in reversed(kind.__mro__) if dataclasses.is_dataclass(owner)]
    texts = {name: text for owner in owners for name, text in _docstrings(owner.__module__)[owner.__name__].items()}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        text = texts.get(field.name)
        if text and "help" not in field.metadata:
            paragraphs = re.split(r"\n\s*\n", text.strip())
            joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            field.metadata = MappingProxyType({**field.metadata, "help": joined})
            if field.default is None or field.default == ():
                _hide_default(kind, field.name, hints[field.name])
        join_lines(hints[field.name])


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of a module's classes, by class and field. A module is parsed once."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                line.target.id: inspect.cleandoc(below.value.value)
                for line, below in pairwise(node.body)
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(below.value.value, str)
            }
    return found


def _hide_default(kind: type, name: str, hint: Any) -> None:
    inner = [part for part in typing.get_args(_plain(hint)) if part is not type(None)]
    optional = typing.get_origin(_plain(hint)) in (types.UnionType, typing.Union) and len(inner) == 1
    shown = arg(help_behavior_hint="", metavar=_metavar(inner[0]) if optional else None)
    _annotations(kind, name)[name] = Annotated[hint, shown]


def _annotations(kind: type, name: str) -> dict[str, Any]:
    """The annotations of the class that declares a field."""
    return next(c for c in kind.__mro__ if name in vars(c).get("__annotations__", {})).__annotations__


def subcommands(kind: type) -> dict[str, type]:
    """The commands of a group, such as `tsae store`, by name; none of a command that does something itself."""
    parts = typing.get_args(_plain(typing.get_type_hints(kind, include_extras=True).get("command")))
    return {mark.name: _plain(part) for part in parts for mark in part.__metadata__ if hasattr(mark, "name")}


@contextmanager
def daily_options(kind: type) -> Iterator[int]:
    """Leave out of the help what is not `Daily`, where a command has many options. Yields how many are left out."""
    options = list(_options(kind))
    many = len(options) > _MANY
    left_out = [(owner, name) for owner, name, shown in options if many and not shown]
    kept = {(owner, name): _annotations(owner, name)[name] for owner, name in left_out}
    for owner, name in kept:
        _annotations(owner, name)[name] = Annotated[typing.get_type_hints(owner, include_extras=True)[name], Suppress]
    try:
        yield len(left_out)
    finally:
        for (owner, name), hint in kept.items():
            _annotations(owner, name)[name] = hint


def _options(kind: type, within: tuple[type, str] | None = None) -> Iterator[tuple[type, str, bool]]:
    """The options of a command: the class and the field that decide whether --help shows them, and whether it does.

    Args:
        within: the config that holds all of them, if it is shown or left out as a whole: its options have a prefix.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks, inner = getattr(hint, "__metadata__", ()), _plain(hint)
        made = any(
            getattr(mark, "constructor_factory", None) for mark in marks
        )  # by a function, from options of its own
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
