"""The progress bar of an import: bytes of the log, and how many trajectories were read."""

from __future__ import annotations

import sys
from threading import RLock
from types import TracebackType
from typing import Any


class Bar:
    """Bytes read of all, a second, and left to do; trajectories, and how many a second.

    Args:
        total: bytes of the log.
        shown: whether there is a bar.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self.total, self.shown = total, shown
        self.trajectories = self._found = 0
        self._so_far: dict[int, tuple[int, int]] = {}
        self._lock = RLock()

    def __enter__(self) -> Bar:
        from tqdm.auto import tqdm

        self._bar: Any = tqdm(desc="import", total=self.total, unit="B", unit_scale=True, disable=not self.shown)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self._tell()
        self._bar.close()

    def say(self, part: int, n_bytes: int, trajectories: int) -> None:
        """Show how much was read of a part; any thread may call it."""
        with self._lock:
            bytes_before, before = self._so_far.get(part, (0, 0))
            self._so_far[part] = (n_bytes, trajectories)
            self.trajectories += trajectories - before
            if self.shown and self._bar.update(n_bytes - bytes_before):
                self._tell()

    def _tell(self) -> None:
        seconds = self._bar.format_dict["elapsed"]
        rate = (self.trajectories - self._found) / seconds if seconds else 0
        self._bar.set_postfix_str(f"{self.trajectories:,} trajectories, {rate:,.0f}/s", refresh=False)

    def end(self, part: int, n_bytes: int, trajectories: int, *, found: bool) -> None:
        """A part is read; `found` if an earlier import did it, which does not count for the speed."""
        with self._lock:
            if found and self.shown:
                self._bar.initial += n_bytes
                self._found += trajectories
            self.say(part, n_bytes, trajectories)
            self._so_far.pop(part)

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        if self.shown:
            self._bar.write(line, file=sys.stderr)
