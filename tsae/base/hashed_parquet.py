"""Parquet files that carry their own hash.

A lone Parquet file has no folder whose manifest could name it, and Parquet's own checksums cover neither the
headers of its pages nor its footer. So the file ends with::

    … row groups, mark (12 bytes), XXH3 (16 bytes), footer, length of the footer (4 bytes), "PAR1"

The hash is that of all other bytes, without the mark. Readers of Parquet find the footer from the end, and the row
groups by their offsets, so that every one reads the file. A copy that another program writes has none, and is read as
it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pyarrow.parquet as pq
import xxhash

from tsae.base.files import once_a_state, reading
from tsae.errors import refuse

_MARK = b"tsae:xxh3-16"
_SIZE = len(_MARK) + xxhash.xxh3_128().digest_size
_END = 8
"""Bytes behind the footer."""
_AT_ONCE = 1 << 20


def add_hash(path: str | Path) -> None:
    """Put the hash into a Parquet file that was just written."""
    with Path(path).open("r+b") as file:
        start = _footer(file)
        file.seek(start)
        footer = file.read()
        digest = _hash(file, [(0, file.tell())])
        file.seek(start)
        file.write(_MARK + digest + footer)


def check_parquet(path: str | Path, fix: str) -> bool:
    """Compare a Parquet file with the hash that it carries; whether it carries one.

    Raises:
        TsaeError: where its bytes have changed since it was written, or it had a hash and has lost it.
    """
    with reading(path, fix):
        state = _state(path)
    refuse(path, (state is False, "is damaged: its bytes have changed since it was written", fix))
    return state is True


@once_a_state
def _state(path: str) -> bool | None:
    """Whether a file is as it was written; None if it carries no hash."""
    with open(path, "rb") as file:
        try:
            start = _footer(file)
            file.seek(max(0, start - _SIZE))
            mark = file.read(_SIZE)
            if not mark.startswith(_MARK):
                # Between the data and the footer there is room for a hash, and none of it.
                return False if _end_of_data(path) == start - _SIZE else None
        except ValueError:
            return None  # no Parquet file: its readers say so
        end = file.seek(0, os.SEEK_END)
        return _hash(file, [(0, start - _SIZE), (start, end)]) == mark[len(_MARK) :]


def _footer(file: BinaryIO) -> int:
    """Where the footer begins.

    Raises:
        ValueError: no Parquet file ends like this one.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END))
    end = file.read(_END)
    start = size - _END - int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or start < len(b"PAR1"):
        raise ValueError("it does not end like a Parquet file")
    return start


def _end_of_data(path: str) -> int:
    """Where the row groups end, by the footer."""
    metadata = pq.read_metadata(path)
    ends = [4]
    for g in range(metadata.num_row_groups):
        for c in range(metadata.num_columns):
            column = metadata.row_group(g).column(c)
            first = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            ends.append(first + column.total_compressed_size)
    return max(ends)


def _hash(file: BinaryIO, parts: list[tuple[int, int]]) -> bytes:
    digest = xxhash.xxh3_128()
    for start, stop in parts:
        file.seek(start)
        while start < stop:
            piece = file.read(min(_AT_ONCE, stop - start))
            digest.update(piece)
            start += len(piece) or stop
    return digest.digest()
