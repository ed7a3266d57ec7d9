"""What a trainer's own config says of its chat template, where that config lies beside the log.

verl is run by Hydra, which writes the config of a run to ``.hydra/config.yaml`` in the run's folder. Its
``data.apply_chat_template_kwargs`` is what the template was given (verl 0.5 and later). Other trainers whose logs need
the template (TRL, open-r1) keep their settings in pickles, which are never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

_CONFIG = Path(".hydra") / "config.yaml"
_LEVELS_UP = 2  # From the folder of the log to that of the run.


class Settings(NamedTuple):
    """What was found."""

    template_arguments: dict[str, Any]
    file: Path


def find_settings(log: Path) -> Settings | None:
    """The arguments of the chat template in the nearest config, or None where nothing says any."""
    folder = (log if log.is_dir() else log.parent).resolve()
    for above in (folder, *list(folder.parents)[:_LEVELS_UP]):
        if not (above / _CONFIG).is_file():
            continue
        try:
            config = yaml.safe_load((above / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return None  # It is the trainer's, and nothing that an import has to have.
        data = config.get("data") if isinstance(config, dict) else None
        arguments = data.get("apply_chat_template_kwargs") if isinstance(data, dict) else None
        return Settings(arguments, above / _CONFIG) if isinstance(arguments, dict) and arguments else None
    return None
