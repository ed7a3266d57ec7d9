"""Hashes by which trajectories are compared without being kept in memory."""

from __future__ import annotations

import hashlib
from pathlib import PurePath


def hash64(*parts: str | bytes) -> int:
    """64 bits of the parts, kept apart."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def place_hash(where: str) -> int:
    """64 bits of a file's name and a row, without its folder: a log that was moved draws the same samples."""
    return hash64(PurePath(where).name)
