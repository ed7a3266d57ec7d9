"""Options of `tsae store show`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Show:
    """Show what an activation store holds."""

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
