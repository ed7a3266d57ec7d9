"""What of a growing log is complete: a trainer may be writing it at this moment.

A file is complete when it has not changed for some seconds. Of one that is written line by line, the whole lines count
that were there some seconds ago, so that a log that never rests is read too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.untrusted import parse_json
from tsae.rollouts.logs.on_disk.log_files import LONGEST_LINE, grows, kind_of

_BLOCK = 1 << 16


class Settling:
    """Looks at files again and again, and says what has stopped changing.

    Args:
        quiet: seconds without a change.
    """

    def __init__(self, quiet: float) -> None:
        self.quiet = quiet
        self.waits = False
        """Whether something was not complete when it was last asked for. Set it back before a look."""
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}
        self._grew: dict[Path, tuple[int, float]] = {}
        self._lines: dict[Path, int] = {}

    def rests(self, path: Path) -> bool:
        """Whether a file, or every file below a folder, has not changed for the time.

        The time of its last change decides; if that lies ahead, as clocks of other machines do, what was seen.
        """
        found = [file.stat() for file in ((p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])]
        newest = max((stat.st_mtime_ns for stat in found), default=0)
        state, now = (sum(stat.st_size for stat in found), newest), time.monotonic()
        before, since = self._seen.get(path, (None, now))
        since = since if before == state else now
        self._seen[path] = state, since
        rests = time.time() - self.quiet - newest / 1e9 >= 0 or now - since >= self.quiet
        self.waits |= not rests
        return rests

    def bytes_of(self, file: Path) -> int:
        """How many bytes of a file of a log are complete; 0 for none."""
        size = file.stat().st_size
        if not grows(file):
            return size if self.rests(file) and _readable(file) else 0
        if self.rests(file):
            return _whole_lines(file, size, rests=True)
        before, since = self._grew.setdefault(file, (size, time.monotonic()))
        if time.monotonic() - since >= self.quiet:
            self._lines[file] = _whole_lines(file, min(before, size), rests=False)
            self._grew[file] = size, time.monotonic()
        return self._lines.get(file, 0)

    def forget(self, others: Iterable[Path]) -> None:
        """Forget all files but these."""
        kept = set(others)
        for known in (self._seen, self._grew, self._lines):
            for path in known.keys() - kept:
                del known[path]


def _readable(file: Path) -> bool:
    """Whether a file has its end, if it is one that can tell."""
    if kind_of(file) != ".parquet":
        return True
    try:
        pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return False
    return True


def _whole_lines(file: Path, size: int, *, rests: bool) -> int:
    """Bytes of a file's first bytes up to the end of a line; a last line without an end counts if it rests and is JSON.

    Args:
        file: of JSON lines.
        size: of the beginning.
        rests: whether it is not being written.
    """
    with file.open("rb") as stream:
        end = size
        while end > 0:
            start = max(0, end - _BLOCK)
            stream.seek(start)
            at = stream.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if rests and 0 < size - end <= LONGEST_LINE:
            stream.seek(end)
            try:
                parse_json(stream.read(size - end))
                return size
            except ValueError:
                pass
    return end
