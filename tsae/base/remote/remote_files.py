"""What lies at a place of a file system of fsspec: the state of a file, and its removal."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import uuid4

_VERSIONS = ("ETag", "etag", "blob_id", "sha", "Content-MD5", "Digest")
_TIMES = ("mtime", "created", "modify", "modified", "last_modified", "Last-Modified", "LastModified", "updated")


def state(fs: Any, place: str, info: dict[str, Any]) -> str:
    """A text that changes when the file changes: its version, or its size and time.

    Args:
        fs: the file system.
        place: of the file.
        info: what a listing says of it. Where that is too little, as over HTTP, the file itself is asked about.

    Returns:
        of a file of which nothing is said: a text that no other is equal to, so that no copy passes for current.
    """
    found = _told(info)
    if found is None:
        with suppress(Exception):  # of a file that can be read, but not be asked about
            found = _told(fs.info(place))
    return found or f"unknown {uuid4().hex}"


def delete(fs: Any, place: str) -> None:
    """Delete a file, or a folder with all that is in it. The name means itself: to `fs.rm` a * or [ is a pattern."""
    found = fs.find(place, withdirs=True, detail=True)
    inside = {name: info for name, info in found.items() if name == place or name.startswith(f"{place}/")}
    for name in sorted(inside, reverse=True):
        if inside[name].get("type") != "directory":
            fs.rm_file(name)
    for folder in (*(name for name in sorted(inside, reverse=True) if inside[name].get("type") == "directory"), place):
        with suppress(OSError, NotImplementedError):  # object stores have no folders
            fs.rmdir(folder)


def _told(info: dict[str, Any]) -> str | None:
    version = next((info[name] for name in _VERSIONS if info.get(name)), None)
    if version is not None:
        return str(version)
    time = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    return None if time is None else f"{info.get('size')} {time}"
