"""Folders as earlier versions wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from tsae.base.seal import SEAL


def unsealed(folder: Path) -> Path:
    """The folder without its seal, and without the word that there was one."""
    (folder / SEAL).unlink()
    for manifest in folder.glob("*.json"):
        content = json.loads(manifest.read_text())
        if content.pop("sealed", False):
            manifest.write_text(json.dumps(content))
    return folder
