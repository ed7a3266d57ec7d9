"""Options of `tsae push`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tsae.report.hub.config import PushConfig


@dataclass(frozen=True)
class Push:
    """Push an SAE to the Hugging Face Hub, with a card; of a run also its features and its page.

    Shows what would be pushed, and asks. --to-folder writes just that into a folder, and pushes nothing.

    Anybody then loads it: tsae run RUN --sae org/name, or tsae.load_sae("org/name").
    """

    repo: Positional[str]
    """Name on the Hub: org/name."""
    source: Positional[Path]
    """Folder of an SAE (`tsae train`), or of a whole run (`tsae run`, `tsae demo`)."""
    config: Annotated[PushConfig, arg(name="")] = field(default_factory=PushConfig)
    to_folder: Path | None = None
    """Folder for exactly what would be pushed: model, dataset and space. Nothing is pushed."""
    yes: bool = False
    """Push without asking."""
