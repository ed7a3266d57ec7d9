"""Sparse matrices on disk, of which a stage reads the rows or columns that it needs.

A matrix is a group of an HDF5 file with three contiguous datasets: `indices` and `values` (nnz,), and `offsets`, where
each row begins (or each column, where the matrix lies by columns). The file is mapped into memory. Pages that were read
are given back after `_RESIDENT` bytes, so that a pass over a matrix of any size takes no more than that.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import scipy.sparse as sp

_RESIDENT = 64 << 20  # bytes of a mapped file that stay in memory
_RUNS = 256  # separate places that are read at once: each may bring in 64 KiB
_BLOCK = 4_000_000  # non-zeros transposed, or copied, at once
_COLUMNS = 8192  # columns that are written at once when a matrix is transposed: each touches a page

Key = slice | np.ndarray


class MappedFile:
    """The contiguous datasets of an HDF5 file as read-only arrays.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[int | None, tuple[int, ...], np.dtype[Any]]] = {}
        self.attributes: dict[str, Any] = {}
        """By "group/name"."""
        with h5py.File(self.path, "r") as file:
            file.visititems(self._add)
        with self.path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._touched = 0

    def _add(self, name: str, found: h5py.Dataset | h5py.Group) -> None:
        self.attributes |= {f"{name}/{key}": value for key, value in found.attrs.items()}
        if isinstance(found, h5py.Dataset):
            self._places[name] = (found.id.get_offset(), found.shape, found.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def array(self, name: str) -> np.ndarray:
        """A dataset, mapped; read into memory where it does not lie in one aligned piece.

        Raises:
            KeyError: there is none of this name.
        """
        offset, shape, dtype = self._places[name]
        count = int(np.prod(shape))
        if count == 0:
            return np.zeros(shape, dtype=dtype)
        if offset is None or offset % dtype.itemsize:
            with h5py.File(self.path, "r") as file:
                return np.asarray(file[name][()])
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def touched(self, n_bytes: int) -> None:
        """Count what was read of mapped arrays, and give pages back when it is much."""
        self._touched += n_bytes
        if self._touched > _RESIDENT:
            self._touched = 0
            self._map.madvise(mmap.MADV_DONTNEED)


class _Lines:
    """Rows or columns of a stored matrix."""

    def __init__(self, file: MappedFile, group: str) -> None:
        prefix = f"{group}/" if group else ""
        self._file = file
        self._indices, self._values = file.array(f"{prefix}indices"), file.array(f"{prefix}values")
        self.offsets = file.array(f"{prefix}offsets")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nnz(self) -> int:
        return len(self._values)

    def take(self, key: Key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, indices, offsets) of some lines, as copies."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._run(start, max(start, stop))
            key = np.arange(start, stop, step)
        key = np.flatnonzero(key) if key.dtype == bool else key.astype(np.int64, copy=False)
        if not len(key):
            return self._run(0, 0)
        first = np.flatnonzero(np.r_[True, np.diff(key) != 1])  # where a run of neighbours begins
        if len(first) == 1:
            return self._run(int(key[0]), int(key[-1]) + 1)
        parts = []
        for low in range(0, len(first), _RUNS):
            high = first[low + _RUNS] if low + _RUNS < len(first) else len(key)
            parts.append(self._places(key[first[low] : high], first[low : low + _RUNS] - first[low]))
        values, indices, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
        return values, indices, _ends(lengths)

    def _run(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ends = self.offsets[start : stop + 1] - self.offsets[start]
        place = slice(int(self.offsets[start]), int(self.offsets[stop]))
        found = self._values[place].copy(), self._indices[place].copy(), _narrow(ends)
        self._file.touched(8 * len(found[0]) + 8 * len(ends))
        return found

    def _places(self, key: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, indices, lengths) of lines that lie in few runs, of which each begins at an entry of `first`."""
        starts, ends = self.offsets[key], self.offsets[key + 1]
        last = np.r_[first[1:], len(key)] - 1
        runs = [slice(int(a), int(b)) for a, b in zip(starts[first], ends[last], strict=True)]
        values = np.concatenate([self._values[run] for run in runs])
        indices = np.concatenate([self._indices[run] for run in runs])
        self._file.touched(8 * len(values) + 3 * 65_536 * len(runs))
        return values, indices, ends - starts


def _ends(lengths: np.ndarray) -> np.ndarray:
    return _narrow(np.r_[0, lengths.cumsum()])


def _narrow(ends: np.ndarray) -> np.ndarray:
    """As 32-bit numbers where they fit: scipy would otherwise widen the indices too."""
    return ends.astype(np.int32 if ends[-1] <= np.iinfo(np.int32).max else np.int64)


class StoredColumns:
    """A matrix on disk by columns; of `scipy.sparse.csc_array` it has what is read here: ``columns[:, some]``."""

    def __init__(self, file: MappedFile, group: str, n_rows: int) -> None:
        self._lines = _Lines(file, group)
        self.shape = (n_rows, len(self._lines))

    @property
    def nnz(self) -> int:
        return self._lines.nnz

    @property
    def indptr(self) -> np.ndarray:
        """(n_columns + 1,) where each column begins."""
        return self._lines.offsets

    def __getitem__(self, key: tuple[slice, Key | list[int]]) -> sp.csc_array:
        _, columns = key
        columns = np.asarray(columns, dtype=np.int64) if isinstance(columns, list) else columns
        values, indices, offsets = self._lines.take(columns)
        return sp.csc_array((values, indices, offsets), shape=(self.shape[0], len(offsets) - 1))


class StoredRows:
    """A matrix on disk by rows; of `scipy.sparse.csr_array` it has what is read here: ``rows[some]``, nnz, shape.

    Args:
        file: that holds it.
        group: where.
        n_columns: the shape's other side.
        columns: the same matrix by columns.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, file: MappedFile, group: str, n_columns: int, columns: StoredColumns | None) -> None:
        self._lines = _Lines(file, group)
        self.shape = (len(self._lines), n_columns)
        self.columns = columns
        self.means: dict[str, tuple[str, StoredRows]] = {}
        """Of a feature table's codes: by span, a digest of the mask of tokens that counted, and the means over them."""

    @property
    def nnz(self) -> int:
        return self._lines.nnz

    def __getitem__(self, key: Key | list[int] | tuple[slice, Key | list[int]]) -> sp.csr_array:
        if isinstance(key, tuple):
            columns: Any = columns_of(self)
            return sp.csr_array(columns[key])
        key = np.asarray(key, dtype=np.int64) if isinstance(key, list) else key
        values, indices, offsets = self._lines.take(key)
        return sp.csr_array((values, indices, offsets), shape=(len(offsets) - 1, self.shape[1]))

    def toarray(self) -> np.ndarray:
        """Everything, dense."""
        return self[:].toarray()


Rows = sp.csr_array | StoredRows
Columns = sp.csc_array | StoredColumns


def columns_of(rows: Rows) -> Columns:
    """The same matrix by columns: from the disk where it lies there, else transposed in memory."""
    if isinstance(rows, StoredRows):
        return rows.columns or sp.csc_array(rows[:])
    return sp.csc_array(rows)


def row_blocks(rows: Rows, at_once: int = _BLOCK) -> Iterator[tuple[int, sp.csr_array]]:
    """(first row, rows from there on), about so many non-zeros at a time."""
    n = rows.shape[0]
    size = max(1, at_once * n // max(rows.nnz, 1))
    for start in range(0, n, size):
        yield start, rows[start : min(start + size, n)]


def aligned(path: Path, mode: Literal["w", "a"] = "w") -> h5py.File:
    """A file to write, whose datasets can be mapped."""
    return h5py.File(path, mode, libver="latest", alignment_threshold=1, alignment_interval=8)


def column_blocks(columns: Columns, widest: int, at_once: int = _BLOCK) -> Iterator[tuple[int, sp.csc_array]]:
    """(first column, columns from there on): as many as have so many non-zeros, at least one and at most `widest`."""
    ends = columns.indptr
    first, n = 0, columns.shape[1]
    while first < n:
        fitting = int(np.searchsorted(ends, int(ends[first]) + at_once, side="right")) - 1
        last = min(max(fitting, first + 1), first + widest, n)
        yield first, columns[:, first:last]
        first = last


def write_rows(group: h5py.Group, blocks: Iterable[sp.csr_array], shape: tuple[int, int], nnz: int) -> np.ndarray:
    """Write a matrix that comes in blocks of rows; gives (n_columns,) the non-zeros of each column."""
    n_rows, n_columns = shape
    indices, values, offsets = _datasets(group, n_rows, nnz)
    row, place, counts = 0, 0, np.zeros(n_columns, dtype=np.int64)
    for block in blocks:
        n = block.nnz
        indices[place : place + n], values[place : place + n] = block.indices, block.data
        offsets[row : row + block.shape[0]] = block.indptr[:-1].astype(np.int64) + place
        counts += np.bincount(block.indices, minlength=len(counts))
        row, place = row + block.shape[0], place + n
    offsets[n_rows] = place
    assert (row, place) == (n_rows, nnz), "the blocks are not the matrix that was announced"
    return counts


def write_columns(path: Path, group: str, rows: Rows, counts: np.ndarray) -> None:
    """Write a matrix by columns, in time and reading linear in the non-zeros.

    Args:
        path: a file of `aligned` that is closed.
        group: where in the file.
        rows: the matrix.
        counts: (n_columns,) non-zeros of each column.
    """
    ends = np.r_[0, counts.cumsum()]
    with aligned(path, "a") as file:
        indices, values, offsets = _datasets(file.require_group(group), len(counts), int(ends[-1]))
        offsets[:] = ends
        if not ends[-1]:
            return
        indices[-1:], values[-1:] = 0, 0  # the first write sets the whole dataset's place
        file.flush()
        places = indices.id.get_offset(), values.id.get_offset()
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        to_indices = np.frombuffer(mapped, dtype=np.int32, count=int(ends[-1]), offset=places[0])
        to_values = np.frombuffer(mapped, dtype=np.float32, count=int(ends[-1]), offset=places[1])
        filled = ends[:-1].copy()
        for first, block in row_blocks(rows):
            columns = block.tocsc()
            for low in range(0, len(counts), _COLUMNS):
                bounds = columns.indptr[low : low + _COLUMNS + 1].astype(np.int64)
                size = np.diff(bounds)
                shift = np.repeat(filled[low : low + _COLUMNS] - bounds[:-1], size)
                to = shift + np.arange(bounds[0], bounds[-1])
                to_indices[to] = columns.indices[bounds[0] : bounds[-1]] + first
                to_values[to] = columns.data[bounds[0] : bounds[-1]]
                filled[low : low + _COLUMNS] += size
                mapped.madvise(mmap.MADV_DONTNEED)
        del to_indices, to_values  # a map with views cannot be closed


def _datasets(group: h5py.Group, n_lines: int, nnz: int) -> tuple[h5py.Dataset, h5py.Dataset, h5py.Dataset]:
    return (
        group.create_dataset("indices", (nnz,), np.int32),
        group.create_dataset("values", (nnz,), np.float32),
        group.create_dataset("offsets", (n_lines + 1,), np.int64),
    )
