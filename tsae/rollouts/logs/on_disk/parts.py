"""Parts of a log. One process reads one part at a time, and a finished part is not read again.

A part is some small files, one file, or a piece of a large file: JSON lines from one line's end to another's, or some
row groups of Parquet. Where parts begin depends only on the log, never on who reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError
from tsae.rollouts.logs.on_disk.log_files import LONGEST_LINE, LogFile, group_bytes, grows, kind_of

PART_BYTES = 1 << 24
_PART_FILES = 4096


@dataclass(frozen=True)
class Part:
    """Pieces of files that are read one after another."""

    files: tuple[LogFile, ...]
    first: int
    """Number of its first file among the log's; the others follow it."""
    bytes: int
    """On disk, about."""

    def as_dict(self) -> dict[str, Any]:
        """For another process, and to compare: paths, ranges, and when the files were last written."""
        rows = [
            (str(f.path), f.run, f.step, f.start, f.stop, f.before, (stat := f.path.stat()).st_size, stat.st_mtime_ns)
            for f in self.files
        ]
        return {"first": self.first, "bytes": self.bytes, "files": rows}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Part:
        """The part that `as_dict` described."""
        files = (LogFile(Path(path), *others) for path, *others, _, _ in found["files"])
        return cls(tuple(files), found["first"], found["bytes"])


def total_bytes(files: Sequence[LogFile]) -> int:
    """Bytes of a log on disk."""
    return sum(_size(file) for file in files)


def _size(file: LogFile) -> int:
    """Bytes of a file, or of its beginning where only that is read."""
    size = file.path.stat().st_size
    return min(size, file.stop) if file.stop is not None and grows(file.path) else size


def parts_of(files: Sequence[LogFile], *, cut: bool) -> Iterator[Part]:
    """The parts of a log, in order; each part's line ends are searched when it is asked for.

    Args:
        files: the log's.
        cut: whether a piece of a file can be read without what comes before it.
    """
    pending: list[LogFile] = []
    first = n_bytes = 0
    for number, file in enumerate(files):
        size = _size(file)
        for piece, length in _pieces(file, size, cut=cut):
            whole = piece.start == 0 and length == size
            if pending and (not whole or n_bytes + length > PART_BYTES or len(pending) >= _PART_FILES):
                yield Part(tuple(pending), first, n_bytes)
                pending, n_bytes = [], 0
            if not pending:
                first = number
            pending.append(piece)
            n_bytes += length
            if not whole:
                yield Part(tuple(pending), first, n_bytes)
                pending, n_bytes = [], 0
    if pending:
        yield Part(tuple(pending), first, n_bytes)


def _pieces(file: LogFile, size: int, *, cut: bool) -> Iterator[tuple[LogFile, int]]:
    """(piece, bytes) of every piece of a file."""
    kind = kind_of(file.path)
    if cut and size > PART_BYTES and kind == ".parquet":
        yield from _row_groups(file, size)
    elif grows(file.path):
        yield from _lines(file, size, PART_BYTES if cut else size)
    else:
        yield file, size


def _lines(file: LogFile, size: int, most: int) -> Iterator[tuple[LogFile, int]]:
    start = before = 0
    with file.path.open("rb") as lines:
        while start < size or start == 0:
            stop, n = min(start + most, size), 0
            if (start, stop) != (0, size):
                lines.seek(start)
                left = stop - start
                while left and (chunk := lines.read(min(left, 1 << 20))):
                    n += chunk.count(b"\n")
                    left -= len(chunk)
                rest = lines.readline(LONGEST_LINE + 1) if stop < size else b""
                stop, n = min(stop + len(rest), size), n + rest.count(b"\n")
            yield replace(file, start=start, stop=stop, before=before), stop - start
            if stop == 0:
                return
            start, before = stop, before + n


def _row_groups(file: LogFile, size: int) -> Iterator[tuple[LogFile, int]]:
    try:
        with pq.ParquetFile(file.path) as table:
            rows = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
            packed = group_bytes(table)
    except (pa.ArrowException, OSError) as error:
        raise TsaeError("not a Parquet file", where=file.path, fix="Copy the file again, or leave it out.") from error
    start = before = done = 0
    for stop in range(1, len(rows) + 1):
        length = size * sum(packed[start:stop]) // max(1, sum(packed))
        if length >= PART_BYTES or stop == len(rows):
            length = size - done if stop == len(rows) else length
            yield replace(file, start=start, stop=stop, before=before), length
            start, before, done = stop, before + sum(rows[start:stop]), done + length
    if not rows:
        yield file, size
