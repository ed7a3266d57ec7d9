"""What lies on both sides of a mirror: of every such file, its state at the URL and that of its copy.

It is kept beside the copy, in NAME.remote.json. Several processes may share a cache. So for every change, a process
takes a lock, reads the file again, and replaces it with a new one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock

from tsae.base.files import write_json, writing
from tsae.base.untrusted import parse_json

INDEX = ".remote.json"
_lock = threading.RLock()


class Index:
    """The index of one mirror.

    Args:
        root: the copy of the URL.
    """

    def __init__(self, root: Path) -> None:
        self._file = root.with_name(f"{root.name}{INDEX}")
        self._noted: dict[str, Any] | None = None

    def noted(self) -> dict[str, Any]:
        """Path below the URL -> its state there and here, as this process knows it. It is not changed in place."""
        return self.read() if self._noted is None else self._noted

    def read(self) -> dict[str, Any]:
        """The same, with what other processes have noted since."""
        try:
            found = parse_json(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self._noted = found if isinstance(found, dict) else {}
        return self._noted

    def note(self, name: str, there: str, here: list[int]) -> None:
        """Note the state of a file.

        Raises:
            TsaeError: where the index cannot be written.
        """
        self._change(lambda noted: noted | {name: {"there": there, "here": here}})

    def forget(self, name: str) -> None:
        """Forget a file, or a folder and all files in it.

        Raises:
            TsaeError: where the index cannot be written.
        """
        self._change(lambda noted: without(noted, name))

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with _lock, writing(self._file, "Make room there, or set TSAE_CACHE to another folder."), self._alone():
            before = self.read()
            self._noted = change(before)
            if self._noted != before:
                # A name of its own, for where there are no locks.
                own = write_json(self._file.with_name(f"{self._file.name}.{uuid4().hex}"), self._noted)
                os.replace(own, self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file.with_name(f".{self._file.name}.lock"))
        # Without locks, as on some file systems, a note may be lost. Its file is then fetched or uploaded once more.
        with suppress(OSError):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def without(names: dict[str, Any], gone: str) -> dict[str, Any]:
    """The names without one file, or without one folder and all files in it."""
    inside = f"{gone}/" if gone else ""
    return {name: state for name, state in names.items() if name != gone and not name.startswith(inside)}
