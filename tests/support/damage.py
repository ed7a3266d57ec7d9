"""Bytes that flip, and folders whose hashes fit what was changed in them."""

from __future__ import annotations

import os
from pathlib import Path

from tsae.base.artefact import MANIFEST, file_hash, read_record, write_record


def flip(file: Path, place: int | None = None, bit: int = 1) -> None:
    """Flip a bit of a file, by default in its middle; what knows the file by its times sees that it was written."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= bit
    before = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def resealed(folder: Path) -> Path:
    """The folder with the hashes of what its files hold now: only their content can be refused."""
    facts = read_record(folder / MANIFEST, "")
    files = {name: file_hash(folder / name) for name in facts["files"] if (folder / name).is_file()}
    write_record(folder / MANIFEST, {**facts, "files": files})
    return folder
