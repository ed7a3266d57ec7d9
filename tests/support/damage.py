"""Bytes that flip, and folders as earlier versions wrote them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tsae.base.seal import SEAL


def flip(file: Path, place: int, bit: int = 1) -> None:
    """Flip a bit of a file; what knows the file by its times sees that it was written."""
    content = bytearray(file.read_bytes())
    content[place] ^= bit
    before = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def unsealed(folder: Path, *more: str) -> Path:
    """The folder without its seal, and without the words that there was one."""
    (folder / SEAL).unlink(missing_ok=True)
    for manifest in folder.glob("*.json"):
        content = json.loads(manifest.read_text())
        if content.pop("sealed", False):
            for name in ("checksum", *more):
                content.pop(name, None)
            manifest.write_text(json.dumps(content))
    return folder
