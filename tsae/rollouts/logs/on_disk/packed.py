"""Files of text that may be compressed (.gz, .zst), unpacked while they are read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BUFFER = 1 << 20


def is_packed(path: Path) -> bool:
    return path.suffix in _CODECS


def bare(path: Path) -> Path:
    """A path without the suffix that says how the file is compressed."""
    return path.with_suffix("") if is_packed(path) else path


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The uncompressed bytes of a file, and a function that counts the bytes that were read of the file itself.

    Reading raises OSError if the file is damaged or ends too early.
    """
    if not is_packed(path):
        with path.open("rb", buffering=_BUFFER) as plain:
            yield plain, plain.tell
        return
    with (
        pa.OSFile(str(path)) as raw,
        pa.CompressedInputStream(raw, _CODECS[path.suffix]) as stream,
        io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER) as buffered,
    ):
        yield cast(BinaryIO, buffered), raw.tell
