"""Bytes that flip, and folders whose checksums fit what was changed in them."""

from __future__ import annotations

import os
from pathlib import Path

from tsae.base.seal import seal, sealed_names


def flip(file: Path, place: int, bit: int = 1) -> None:
    """Flip a bit of a file; what knows the file by its times sees that it was written."""
    content = bytearray(file.read_bytes())
    content[place] ^= bit
    before = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def resealed(folder: Path) -> Path:
    """The folder with the checksums of what its files hold now: only their content can be refused."""
    seal(folder, sealed_names(folder))
    return folder
