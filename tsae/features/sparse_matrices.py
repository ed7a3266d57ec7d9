"""Sparse matrices on disk, of which a stage reads the rows or columns that it needs, and sums over groups of rows.

A matrix is a group of an HDF5 file with three contiguous datasets: `indices` and `values` (nnz,), and `offsets`, where
each row begins (or each column, where the matrix lies by columns). A request is read from its place in the file, so
that a pass over a matrix of any size takes no more memory than one block of it. Nothing is mapped: mapped pages count
as memory of the process, and the kernel may map two megabytes around every place.

Sums take time linear in the non-zeros and memory bounded by the result. A product of two sparse matrices does the same
in five times the time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import scipy.sparse as sp

from tsae.base.files import as_path, read_at
from tsae.base.hdf5 import HDF5Writer, places, words
from tsae.errors import TsaeError

_BLOCK = 4_000_000  # non-zeros that are transposed at once
_READ = 1_000_000  # non-zeros of columns that are read at once
_SPREAD = 64  # lines from the first to the last wanted one, for each, up to which offsets are read at once
_GAP = 20_000  # non-zeros between two wanted lines that are read too, because another call would take longer

Key = slice | np.ndarray


class StoredFile:
    """The datasets of an HDF5 file.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        with h5py.File(self.path, "r", locking=False) as file:
            self._places = places(file)
            self.attributes: dict[str, str] = {}
            """By "group/name"."""
            file.visititems(self._add)
        self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)

    def _add(self, name: str, found: h5py.Dataset | h5py.Group) -> None:
        self.attributes |= {f"{name}/{key}": value for key, value in words(found)}

    def need(self, whole: bool | np.bool_, found: str) -> None:
        """Raise a TsaeError where what was found is not what a whole file has."""
        if not whole:
            raise TsaeError(f"is damaged: {found}", where=self.path, fix="Make it anew.")

    def length(self, name: str) -> int:
        """Entries of a dataset.

        Raises:
            KeyError: there is none of this name.
        """
        return int(self._places[name][1][0])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Entries of a dataset from start up to stop.

        Raises:
            KeyError: there is none of this name.
            TsaeError: where there are no such entries, or the file has become shorter.
        """
        offset, shape, dtype = self._places[name]
        stop = shape[0] if stop is None else stop
        self.need(0 <= start <= stop <= shape[0], f"it names entries {start} to {stop} of {name}, which has {shape[0]}")
        found = np.empty(stop - start, dtype=dtype)
        if offset is None:
            return found
        view, place = found.data.cast("B"), offset + start * dtype.itemsize
        while len(view):  # one read gives two gigabytes at most
            n = read_at(self._file, view, place)
            self.need(n > 0, "it has become shorter while it was read")
            view, place = view[n:], place + n
        return found


class _Lines:
    """Rows or columns of a stored matrix.

    Each has `width` entries, and what is read is compared with that: scipy trusts indices, and would write anywhere.
    """

    def __init__(self, file: StoredFile, group: str, width: int) -> None:
        prefix = f"{group}/" if group else ""
        self._file, self._width = file, width
        self._indices, self._values, self._offsets = f"{prefix}indices", f"{prefix}values", f"{prefix}offsets"
        self.n, self.nnz = file.length(self._offsets) - 1, file.length(self._values)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(n + 1,) int64, all in memory."""
        return self._ascending(self._file.read(self._offsets))

    def _ascending(self, ends: np.ndarray) -> np.ndarray:
        self._file.need((np.diff(ends) >= 0).all(), f"{self._offsets} go back")
        return ends

    def _inside(self, indices: np.ndarray) -> np.ndarray:
        low, high = indices.min(initial=0), indices.max(initial=-1)
        expected = f"expected 0 to {self._width - 1}"
        self._file.need(low >= 0 and high < self._width, f"{self._indices} go from {low} to {high}, {expected}")
        return indices

    def take(self, key: Key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, indices, offsets) of some lines."""
        if isinstance(key, slice):
            start, stop, step = key.indices(self.n)
            if step == 1:
                return self._run(start, max(start, stop))
            key = np.arange(start, stop, step)
        key = np.flatnonzero(key) if key.dtype == bool else key.astype(np.int64, copy=False)
        if not len(key):
            return self._run(0, 0)
        if key.min() < 0 or key.max() >= self.n:
            raise IndexError(f"0 to {self.n - 1} can be read, not {key.min()} to {key.max()}")
        if key.max() - key.min() < _SPREAD * len(key):
            return self._near(key)
        first = np.flatnonzero(np.r_[True, np.diff(key) != 1])  # where a run of neighbours begins
        last = np.r_[first[1:], len(key)] - 1
        runs = [self._run(start, stop + 1) for start, stop in zip(key[first].tolist(), key[last].tolist(), strict=True)]
        if len(runs) == 1:
            return runs[0]
        values, indices = (np.concatenate([run[i] for run in runs]) for i in (0, 1))
        lengths = np.concatenate([np.diff(run[2]) for run in runs])
        return values, indices, _narrow(np.r_[0, lengths.cumsum(dtype=np.int64)])

    def _near(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lines in any order that lie close together: what lies between them is read too, and left out then."""
        first = int(key.min())
        ends = self._ascending(self._file.read(self._offsets, first, int(key.max()) + 2))
        wanted = np.unique(key - first)
        cut = np.flatnonzero(ends[wanted[1:]] - ends[wanted[:-1] + 1] > _GAP)
        spans = list(zip(wanted[np.r_[0, cut + 1]].tolist(), (wanted[np.r_[cut, -1]] + 1).tolist(), strict=True))
        places = [(int(ends[start]), int(ends[stop])) for start, stop in spans]
        values = _joined([self._file.read(self._values, *place) for place in places])
        indices = self._inside(_joined([self._file.read(self._indices, *place) for place in places]))
        lengths = _joined([np.diff(ends[start : stop + 1]) for start, stop in spans])
        read = _joined([np.arange(start, stop) for start, stop in spans])
        offsets = _narrow(np.r_[0, lengths.cumsum()])
        if np.array_equal(read, key - first):
            return values, indices, offsets
        lines = sp.csr_array((values, indices, offsets), shape=(len(read), np.iinfo(np.int32).max))
        found = lines[np.searchsorted(read, key - first)]
        return found.data, found.indices, found.indptr

    def _run(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ends = self._ascending(self._file.read(self._offsets, start, stop + 1))
        low, high = int(ends[0]), int(ends[-1])
        values, indices = self._file.read(self._values, low, high), self._file.read(self._indices, low, high)
        return values, self._inside(indices), _narrow(ends - low)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _narrow(ends: np.ndarray) -> np.ndarray:
    """Offsets as 32-bit numbers, where they fit. With 64-bit offsets scipy would make the indices 64-bit too."""
    return ends.astype(np.int32 if ends[-1] <= np.iinfo(np.int32).max else np.int64)


class StoredColumns:
    """A matrix on disk by columns; of `scipy.sparse.csc_array` it has what is read here: ``columns[:, some]``."""

    def __init__(self, file: StoredFile, group: str, n_rows: int) -> None:
        self._lines = _Lines(file, group, n_rows)
        self.shape = (n_rows, self._lines.n)

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

    def __init__(self, file: StoredFile, group: str, n_columns: int, columns: StoredColumns | None) -> None:
        self._lines = _Lines(file, group, n_columns)
        self.shape = (self._lines.n, n_columns)
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

    if not TYPE_CHECKING:  # type checkers know what it has

        def __getattr__(self, name: str) -> Any:
            known = "indices, data, sum and the rest of scipy's are those of [:], which reads all, or of [rows]"
            raise AttributeError(f"a matrix on disk has no {name!r}; {known}")

    def toarray(self) -> np.ndarray:
        """Everything, dense."""
        return self[:].toarray()


Rows = sp.csr_array | StoredRows
Columns = sp.csc_array | StoredColumns


@dataclass(frozen=True)
class PickedColumns:
    """Some rows of a matrix, of which columns are read when they are asked for."""

    columns: Columns
    rows: np.ndarray
    """(n_rows,) which rows, in any order."""
    features: np.ndarray
    """(n_features,) which columns."""

    @classmethod
    def of(cls, values: sp.csr_array | sp.csc_array) -> PickedColumns:
        """All of a matrix in memory."""
        return cls(sp.csc_array(values), np.arange(values.shape[0]), np.arange(values.shape[1]))

    def in_order(self, order: np.ndarray) -> PickedColumns:
        """The same, its rows in another order."""
        return replace(self, rows=self.rows[order])

    def dense(self, some: np.ndarray) -> np.ndarray:
        """(n_rows, len(some)) float32 of the columns with these places among `features`."""
        values, wanted = np.zeros((len(self.rows), len(some)), dtype=np.float32), self.features[some]
        for low, high in stretches(self.columns.indptr[wanted + 1] - self.columns.indptr[wanted], _READ):
            found = self.columns[:, wanted[low:high]]
            row = self._place[found.indices]
            inside = row >= 0
            column = np.repeat(np.arange(low, high, dtype=np.int32), np.diff(found.indptr))
            values[row[inside], column[inside]] = found.data[inside]
        return values

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """(n_features,) float64: the rows' sum, each times its weight."""
        every = np.zeros(self.columns.shape[0])
        every[self.rows] = weights
        parts = [block.T @ every for _, block in column_blocks(self.columns, self.columns.shape[1])]
        return np.asarray(np.concatenate(parts)[self.features])

    @cached_property
    def _place(self) -> np.ndarray:
        place = np.full(self.columns.shape[0], -1, dtype=np.int32)
        place[self.rows] = np.arange(len(self.rows))
        return place


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


def column_blocks(columns: Columns, widest: int, at_once: int = _READ) -> Iterator[tuple[int, sp.csc_array]]:
    """(first column, columns from there on): as many as have so many non-zeros, at least one and at most `widest`."""
    for first, last in stretches(np.diff(columns.indptr), at_once, widest):
        yield first, columns[:, first:last]


def stretches(sizes: np.ndarray, at_once: int, widest: int | None = None) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of neighbours whose (n,) sizes add up to so much at most; at least one, at most `widest`."""
    ends, first = np.r_[0, sizes.cumsum(dtype=np.int64)], 0
    while first < len(sizes):
        fitting = int(np.searchsorted(ends, ends[first] + at_once, side="right")) - 1
        last = min(max(fitting, first + 1), first + (widest or len(sizes)))
        yield first, last
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
        path: the file, which is closed; made where it is missing.
        group: where in the file.
        rows: the matrix.
        counts: (n_columns,) non-zeros of each column.
    """
    ends = np.r_[0, counts.cumsum()]
    with HDF5Writer(path, extend=True) as file:
        indices, values, offsets = _datasets(file.require_group(group), len(counts), int(ends[-1]))
        offsets[:] = ends
        if not ends[-1]:
            return
        indices[-1:], values[-1:] = 0, 0  # the first write sets the whole dataset's place
        file.flush()
        to_indices, to_values = indices.id.get_offset(), values.id.get_offset()
    with open(path, "r+b", buffering=0) as target:
        filled = (4 * ends[:-1]).tolist()  # in bytes: both kinds of entries have four
        for first, block in row_blocks(rows):
            columns = block.tocsc()
            row, data = (columns.indices + first).astype(np.int32), columns.data
            for column, (start, stop) in enumerate(pairwise(columns.indptr.tolist())):
                if stop > start:
                    _write(target, row[start:stop], to_indices + filled[column])
                    _write(target, data[start:stop], to_values + filled[column])
                    filled[column] += 4 * (stop - start)


def _write(target: FileIO, array: np.ndarray, place: int) -> None:
    """Write all of an array: on a disk that is nearly full, one call may write a part without an error."""
    view = array.data.cast("B")
    target.seek(place)
    while len(view):
        view = view[target.write(view) :]


def _datasets(group: h5py.Group, n_lines: int, nnz: int) -> tuple[h5py.Dataset, h5py.Dataset, h5py.Dataset]:
    return (
        group.create_dataset("indices", (nnz,), np.int32),
        group.create_dataset("values", (nnz,), np.float32),
        group.create_dataset("offsets", (n_lines + 1,), np.int64),
    )


_VALUES = 250_000  # non-zeros gathered at once, roughly
_COLUMNS = 1_000_000  # non-zeros of columns multiplied at once
_GROUPS = 16  # groups summed at once: sums that stay in a core's cache
_CELLS = 4_000_000  # sums of all codes, made at once


def grouped_sums(values: Rows, rows: np.ndarray, group: np.ndarray, weight: np.ndarray, n_groups: int) -> np.ndarray:
    """(n_groups, n_features) weighted sums of rows.

    Args:
        values: (n_rows, n_features).
        rows: (n,) rows that count.
        group: (n,) of each, 0 … n_groups − 1.
        weight: (n,) of each.
        n_groups: how many there are; those without rows have sums of 0.
    """
    order = np.argsort(group, kind="stable")
    rows, group, weight = rows[order], group[order], weight[order]
    n_features = values.shape[1]
    sums = np.zeros((n_groups, n_features))
    at_once, start = max(1, _VALUES * values.shape[0] // max(values.nnz, 1)), 0
    while start < len(rows):
        first = group[start]
        stop = min(start + at_once, int(np.searchsorted(group, first + _GROUPS)))
        part = values[rows[start:stop]]
        data = part.data * np.repeat(weight[start:stop], np.diff(part.indptr))
        n = int(group[stop - 1] - first + 1)
        # One sparse row a group, in which a feature occurs several times: making it dense sums these.
        ends = part.indptr[np.searchsorted(group[start:stop], np.arange(first, first + n + 1))]
        sums[first : first + n] += sp.csr_array((data, part.indices, ends), shape=(n, n_features)).toarray()
        start = stop
    return sums


def weighted_sums(columns: Columns, weights: np.ndarray, some: np.ndarray) -> np.ndarray:
    """(len(some), n) float64: all rows' sum in some columns, each row times its weight, of (n_rows, n) weights."""
    sums = np.zeros((len(some), weights.shape[1]))
    for low, high in stretches(np.diff(columns.indptr)[some], _COLUMNS):
        sums[low:high] = columns[:, some[low:high]].T @ weights
    return sums


def sums_by_code(columns: Columns, code: np.ndarray, n_codes: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Sums of every feature over the rows of each code, some features at a time.

    Args:
        columns: (n_rows, n_features).
        code: (n_rows,) 0 … n_codes − 1 of each row; n_codes for those that do not count.
        n_codes: how many there are.

    Yields:
        (features, (n_codes, features) float64 sums), features in order.
    """
    for first, block in column_blocks(columns, max(1, _CELLS // (n_codes + 1))):
        width = block.shape[1]
        # The cells of a feature lie together, so that they stay in a core's cache.
        cell = np.repeat(np.arange(width) * (n_codes + 1), np.diff(block.indptr))
        cell += code[block.indices]
        sums = np.bincount(cell, weights=block.data, minlength=(n_codes + 1) * width)
        yield slice(first, first + width), sums.reshape(width, n_codes + 1)[:, :n_codes].T


def no_code(n_tokens: int, n_codes: int) -> np.ndarray:
    """(n_tokens,) codes for `sums_by_code`, to be filled in: all are n_codes, so that no token counts yet.

    Large tables have one of these a thread, so its numbers are as small as they can be.
    """
    return np.full(n_tokens, n_codes, dtype=np.uint16 if n_codes <= np.iinfo(np.uint16).max else np.int32)
