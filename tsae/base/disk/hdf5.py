"""HDF5 files on a disk that may be full.

If a write fails inside the HDF5 library, the file can no longer be closed, and the process crashes when it ends. So the
library writes through an object of ours. It keeps the first error to itself, and `close` raises it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py


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
