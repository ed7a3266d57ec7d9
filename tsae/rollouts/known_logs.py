"""The logs that can be imported: versions, settings, and what each log holds. Imports nothing heavy.

`known_logs.toml` lists them.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

TELLS = ("prompt ids", "response ids", "log-probabilities", "advantages", "ends", "answers", "steps", "policies")
"""What a log may tell about a trajectory: token ids of prompt and response, log-probabilities of sampled tokens, the
advantage that was used, whether the response ended by itself or was cut, a reference answer, the trainer's step, and
the number of updates of the weights that sampled it."""


class Known(NamedTuple):
    """A trainer's log."""

    module: str
    """Its adapter, in `tsae.rollouts.trainers`."""
    formats: Sequence[str]
    """Names for --format."""
    trainer: str
    versions: str
    """Versions whose logs, or whose source, were studied."""
    setting: str = ""
    """What users switch on; empty if it is written anyway."""
    lacks: str = ""
    """What the log does not hold."""
    tells: Mapping[str, str] = {}
    """What it holds of `TELLS`, each with when: yes, or for which logs."""


class FormatFiles(NamedTuple):
    """The files of a format, and how they are recognised."""

    title: str
    columns: Sequence[str] = ()
    """Columns that a row has, parted by spaces; several, if one of them is enough."""
    path: str = ""
    """Pattern of the path of its files, with named groups step, run and subset; empty if names say nothing."""
    a_file_a_step: bool = False
    """A run has one file a step: two are an error."""
    synchronous: bool = True
    """Whether the weights that sampled for a step are those right before its update."""
    suffixes: Sequence[str] = ()
    """By `tsae.rollouts.logs.readers.kind_of`; by default JSON lines and all tables."""
    cut: bool = True
    """Whether a file can be read from any of its lines: nothing is remembered from one line to the next."""


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN = tuple(Known(**listed) for listed in _LISTED["log"])
FORMAT_FILES = {name: FormatFiles(**listed) for name, listed in _LISTED["format"].items()}

if TYPE_CHECKING:
    LogFormat = str
else:
    LogFormat = Literal[("auto", *(name for known in KNOWN for name in known.formats))]
"""Names for --format."""


def formats_text(width: int) -> str:
    """The table of docs/logs.md for a terminal."""
    parts = []
    for known in KNOWN:
        parts.append(f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}")
        told = ", ".join(name if when == "yes" else f"{name} ({when})" for name, when in known.tells.items())
        for label, text in (("switch on", known.setting), ("tells", told), ("lacks", known.lacks)):
            if text:
                parts.append(textwrap.fill(f"{label}: {text}", width, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(parts)
