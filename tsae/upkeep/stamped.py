"""The command of a run that Python code started: its settings are in its stamp."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tsae.base.disk.made_by import MadeBy
from tsae.base.seal import read_sealed
from tsae.config import DemoConfig, RunConfig
from tsae.errors import TsaeError
from tsae.upkeep.kinds import AGAIN

_UNPREFIXED = "importing"
"""Settings of `RunConfig` whose options have no prefix."""


def stamped_command(run: Path) -> MadeBy | None:
    """The command that resumes a run with the settings in its stamp; None where the stamp cannot be read."""
    run = Path(os.path.abspath(run))
    words: list[str] | None = None
    try:
        if (run / "demo.json").is_file():
            settings = dict(read_sealed(run / "demo.json", AGAIN)["demo"])
            settings.pop("to", None)
            words = ["demo", "--to", run.name, *_options(settings, _plain(asdict(DemoConfig())))]
        elif (run / "run.json").is_file():
            stamp = read_sealed(run / "run.json", AGAIN)
            settings = dict(stamp["run"])
            path, plain = str(settings.pop("path")), asdict(RunConfig(Path()))
            settings.pop("to", None)
            if path.startswith("-"):
                return None
            plain["diff"] = RunConfig(Path()).diff.settings()
            command = "watch" if "sae" in stamp else "run"
            words = [command, path, "--to", run.name, *_options(settings, _plain(plain))]
    except (TsaeError, KeyError, TypeError, AttributeError):
        return None
    return None if words is None else MadeBy(tuple(words), run.parent)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    found: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return found


def _options(settings: Mapping[str, Any], default: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Options for what is not the default."""
    for name, value in settings.items():
        before = default.get(name)
        if value == before or value is None:
            continue
        option = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            below = "" if name == _UNPREFIXED else f"{option}."
            yield from _options(value, before if isinstance(before, Mapping) else {}, below)
        elif isinstance(value, bool):
            yield f"--{option}" if value else f"--{prefix}no-{name.replace('_', '-')}"
        elif isinstance(value, list):
            yield from (f"--{option}", *map(str, value))
        else:
            yield from (f"--{option}", str(value))
