"""The chat template's arguments from a trainer's own config, if that lies beside the log.

Hydra writes verl's config to ``.hydra/config.yaml`` in the run's folder. Its ``data.apply_chat_template_kwargs`` are
the template's arguments (verl 0.5 and later). Other trainers whose logs need the template (TRL, open-r1) keep their
settings in pickles, which are never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsae.base.untrusted import parse_yaml

_CONFIG = Path(".hydra") / "config.yaml"
_LEVELS_UP = 2  # From the folder of the log to that of the run.


class Settings(NamedTuple):
    """Settings of the chat template."""

    template_arguments: dict[str, Any]
    file: Path


def find_settings(log: Path) -> Settings | None:
    """The arguments of the chat template in the nearest config; None if there are none."""
    folder = (log if log.is_dir() else log.parent).resolve()
    for above in (folder, *list(folder.parents)[:_LEVELS_UP]):
        if not (above / _CONFIG).is_file():
            continue
        try:
            config = parse_yaml((above / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return None  # An import does not need the trainer's config.
        data = config.get("data") if isinstance(config, dict) else None
        arguments = data.get("apply_chat_template_kwargs") if isinstance(data, dict) else None
        return Settings(arguments, above / _CONFIG) if isinstance(arguments, dict) and arguments else None
    return None
