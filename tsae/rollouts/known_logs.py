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


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["log"]
KNOWN = tuple(Known(**listed) for listed in _LISTED)

if TYPE_CHECKING:
    LogFormat = str
else:
    LogFormat = Literal[("auto", *(name for known in KNOWN for name in known.formats))]
"""Names for --format."""


def formats_text(width: int = 100) -> str:
    """The table of docs/logs.md for a terminal."""
    parts = []
    for known in KNOWN:
        parts.append(f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}")
        told = ", ".join(name if when == "yes" else f"{name} ({when})" for name, when in known.tells.items())
        for label, text in (("switch on", known.setting), ("tells", told), ("lacks", known.lacks)):
            if text:
                parts.append(textwrap.fill(f"{label}: {text}", width, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(parts)
