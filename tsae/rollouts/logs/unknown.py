"""What to say of a log that no known trainer wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Row

# What such columns are called elsewhere, most telling first.
_LIKE = {
    "prompt": ("prompt", "question", "problem", "query", "input", "instruction", "messages"),
    "response": ("response", "completion", "output", "generation", "answer", "text"),
    "reward": ("reward", "score", "acc"),
}
_SHOWN = 40


def unknown_columns(path: Path, file: Path, row: Row, config: ImportConfig, known: Sequence[str]) -> TsaeError:
    """The error for a log of unknown columns: what it has, and how to name what is needed.

    Args:
        path: the log as it was given.
        file: the first of its files that has rows.
        row: its first row.
        config: of the import.
        known: the formats that were tried.
    """
    names = list(row)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    named = {field: getattr(config.columns, field) for field in _LIKE}
    missing = [field for field in ("prompt", "response") if named[field] not in row]
    if named["reward"] not in row and not {config.columns.correct, *config.rewards} & row.keys():
        missing.append("reward")
    taken = {name for field, name in named.items() if field not in missing}
    options = []
    for field in missing:
        name = _likely(field, [name for name in names if name not in taken])
        if name is not None:
            taken.add(name)
        if name is not None or field != "reward":
            options.append("--column " + quote(f"{field}={name or 'NAME'}"))
    return TsaeError(
        f"no known log has the columns {shown}; known are {', '.join(known)}",
        where=file,
        fix=f"Name the columns, for example: tsae rollouts import {quote(str(path))} {' '.join(options)}. "
        "In Python, tsae.rollouts.frames.read_frame takes any DataFrame.",
    )


def _likely(field: str, names: Sequence[str]) -> str | None:
    """A column that may hold it, to show in an example; the user decides."""
    return next((name for like in _LIKE[field] for name in names if like in name.lower()), None)
