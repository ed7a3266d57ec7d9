"""HDF5 files: read without trust, and written on a disk that may be full.

An HDF5 file can name other files, by links, external storage and virtual datasets, and a kilobyte of it can unpack to
any size. None of our files does, so `places` refuses all of it, and no dataset is ever read through the library.

If a write fails inside the HDF5 library, the file can no longer be closed, and the process crashes when it ends. So the
library writes through an object of ours. It keeps the first error to itself, and `close` raises it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

_DEEPEST = 8  # groups in groups; a group may hold itself


class Place(NamedTuple):
    """Where a dataset lies in its file."""

    offset: int | None
    """Bytes before it; None where it is empty."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def places(file: h5py.File) -> dict[str, Place]:
    """Where every dataset of a file lies, by its path.

    Raises:
        ValueError: where a dataset is not in one plain piece of this file: it is behind a link, in other files,
            compressed, without a size in bytes, or larger than the file.
    """
    size = Path(file.filename).stat().st_size
    found = {}
    for name, dataset in _datasets(file):
        plan = dataset.id.get_create_plist()
        if plan.get_external_count() or plan.get_layout() == h5py.h5d.VIRTUAL:
            raise ValueError(f"/{name} names another file, which is not read")
        if not isinstance(dataset.shape, tuple) or dataset.dtype.hasobject:
            raise ValueError(f"/{name} is not an array of numbers")
        offset, n_bytes = dataset.id.get_offset(), dataset.dtype.itemsize * math.prod(dataset.shape)
        if n_bytes and offset is None:
            raise ValueError(f"/{name} is not stored contiguously")
        if n_bytes and offset + n_bytes > size:
            raise ValueError(f"/{name} is larger than the file")
        found[name] = Place(offset if n_bytes else None, dataset.shape, dataset.dtype)
    return found


def _datasets(group: h5py.Group, under: str = "", depth: int = 0) -> Iterator[tuple[str, h5py.Dataset]]:
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"/{under}{name} is a link to another place, which is not followed")
        item = group[name]  # raises where the header is damaged; `items()` would give None
        if isinstance(item, h5py.Dataset):
            yield under + name, item
        elif isinstance(item, h5py.Group):
            if depth == _DEEPEST:
                raise ValueError(f"/{under}{name} is nested too deeply")
            yield from _datasets(item, f"{under}{name}/", depth + 1)


def words(of: h5py.File | h5py.Group | h5py.Dataset) -> Iterator[tuple[str, str]]:
    """Attributes of a fixed length.

    HDF5 keeps the others in a heap, in which it walks in a circle for ever when a byte of it is damaged.
    """
    for name in of.attrs:
        found = of.attrs.get_id(name)
        if found.shape == () and found.dtype.kind == "S":
            yield name, bytes(of.attrs[name]).decode()


class HDF5Writer:
    """An HDF5 file to write.

    Args:
        path: the file. One that exists is replaced, unless it is to be extended.
        extend: write into a file that exists.

    Raises:
        OSError: where it cannot be opened.
    """

    file: h5py.File

    def __init__(self, path: str | Path, *, extend: bool = False) -> None:
        extend = extend and Path(path).is_file()
        self._stream = _Stream(path, "r+b" if extend else "w+b")
        self.file = h5py.File(self._stream, "r+" if extend else "w", libver="latest", locking=False)

    def close(self) -> None:
        """Write what is left.

        Raises:
            OSError: where anything could not be written, now or before.
        """
        self.file.close()
        self._stream.close()
        if self._stream.error is not None:
            raise self._stream.error

    def __enter__(self) -> h5py.File:
        return self.file

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:
                raise


class _Stream(io.RawIOBase):
    """A file that swallows errors of writing. After the first, nothing more is written."""

    def __init__(self, path: str | Path, mode: str) -> None:
        self._file: Any = open(path, mode, buffering=0)  # noqa: SIM115
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        n = len(rest)
        while self.error is None and rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self.error = error
        return n

    def truncate(self, size: int | None = None) -> int:
        if self.error is None:
            try:
                return int(self._file.truncate(size))
            except OSError as error:
                self.error = error
        return size or 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        n = self._file.readinto(view)
        if self.error is not None:
            view[n:] = bytes(len(view) - n)  # in place of what could not be written
            return len(view)
        return int(n)

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        pass  # nothing is buffered

    def close(self) -> None:
        self._file.close()
        super().close()
