"""Files from strangers: parsed without surprises, and never larger in memory than what was read allows.

A few hundred bytes can stand for more than any memory holds: YAML and pickles of tensors may name one list many times,
a zip archive may unpack to anything, JSON may be nested deeper than the interpreter's stack.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

_HOLDERS = (Mapping, list, tuple, set, frozenset)
_MOST_YAML = 100_000  # values, when each alias is counted again
# Characters that reorder or hide the text around them; shown by code point instead.
_INVISIBLE = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200E, 0x200F, 0x061C, 0x2028, 0x2029, 0xFEFF}
_KEPT_CONTROLS = {"\n", "\t"}


def parse_json(text: str | bytes, *, names_once: bool = False) -> Any:
    """What a JSON text says.

    Args:
        text: to parse.
        names_once: refuse an object that has two values of one name. By default the last of them counts.

    Raises:
        json.JSONDecodeError: also where it is nested too deeply, or a number has thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_named_once if names_once else None)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (RecursionError, ValueError) as error:
        raise json.JSONDecodeError(_said(error), "", 0) from error


def _said(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # As texts, since NaN is not equal to itself.
        twice = next((name for name, value in pairs if repr(found[name]) != repr(value)), None)
        if twice is not None:
            raise ValueError(f"{twice[:40]!r} comes twice, with different values")
    return found


def parse_yaml(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: also where it is nested too deeply, has an impossible date, or its aliases stand for too much.
    """
    try:
        found = yaml.safe_load(text)
    except (RecursionError, ValueError) as error:
        raise yaml.YAMLError(_said(error)) from error
    if not weighs_within(found, _MOST_YAML):
        raise yaml.YAMLError(f"stands for more than {_MOST_YAML:,} values")
    return found


def weighs_within(content: Any, most: int) -> bool:
    """Whether lists and objects hold at most so many values, when one that is in several places counts in each."""
    total, waiting = 0, [content]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, _HOLDERS):
            continue
        total += len(found)
        if total > most:
            return False
        values = found.values() if isinstance(found, Mapping) else found
        waiting += [value for value in values if isinstance(value, _HOLDERS)]
    return True


def check_zip(file: str | Path | IO[bytes], *, most: int | None = None) -> None:
    """Refuse a zip archive that would unpack to more than it should. Nothing is unpacked.

    Args:
        file: the archive.
        most: bytes that one member may have; by default members must be stored as they are, not compressed.

    Raises:
        ValueError: where a member is larger, or is compressed.
        zipfile.BadZipFile: where it is not an archive.
    """
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if most is None and (member.compress_type != zipfile.ZIP_STORED or member.file_size > member.compress_size):
                raise ValueError(f"its part {member.filename} is compressed, but tsae writes no compressed parts")
            if most is not None and member.file_size > most:
                raise ValueError(f"its part {member.filename} unpacks to {member.file_size:,} bytes")


def visible(text: str) -> str:
    """The text with controls, marks of direction and lone surrogates replaced by their code points."""
    return "".join(f"‹U+{ord(c):04X}›" if _unprintable(c) else c for c in text)


def one_line(text: str) -> str:
    """The same in one line: a name with a line break in it could pass for lines of ours."""
    return visible(text).replace("\n", "‹U+000A›").replace("\t", "‹U+0009›")


def _unprintable(c: str) -> bool:
    point = ord(c)
    if c in _KEPT_CONTROLS:
        return False
    return point < 0x20 or 0x7F <= point < 0xA0 or 0xD800 <= point < 0xE000 or point in _INVISIBLE
