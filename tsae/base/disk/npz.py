"""Files of numpy.savez from strangers: arrays without pickles, none larger than what the file holds of it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from tsae.base.untrusted import check_zip

_TIMES = 16
"""Times the file's size that an array may unpack to; weights hardly shrink."""


def read_npz(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in a file.

    Raises:
        ValueError: where an array unpacks to far more than the file, names a larger shape than it has bytes for, or
            holds objects.
        OSError, BadZipFile, zlib.error: where it cannot be read.
    """
    check_zip(file, most=_TIMES * file.stat().st_size)
    with np.load(file, allow_pickle=False) as data:
        for member in data.zip.infolist():
            with data.zip.open(member) as stream:
                needed = _bytes_of(stream)
            if needed > member.file_size:
                raise ValueError(f"its part {member.filename[:60]} has {member.file_size:,} bytes, not {needed:,}")
        return {name: data[name] for name in data}


def _bytes_of(stream: IO[bytes]) -> int:
    """What the header of an array says that it has. numpy makes room for as much before it reads."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"it is of version {version} of numpy's format")
    shape, _, dtype = read(stream)
    return int(prod(shape) * dtype.itemsize)
