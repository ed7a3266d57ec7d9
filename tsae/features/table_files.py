"""The arrays of a FeatureTable on disk. They are written block by block, and read in parts.

    features.h5        /indices, /values (nnz,), /offsets (n_tokens + 1,): compressed sparse rows, a row a token
                       /token_ids, /outlier (n_tokens,), /row_offsets (n_rows + 1,), /reader, /trajectory (n_rows,)
    columns.h5         /columns: the same codes by features
    means.h5           /SPAN/rows, /SPAN/columns: mean activations of every row over a span, by rows and by features;
                       /SPAN has the attribute mask, a digest of the tokens that counted

`tsae encode` writes all three.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import scipy.sparse as sp

from tsae.base.disk.hdf5 import HDF5Writer
from tsae.base.files import replacing
from tsae.errors import TsaeError
from tsae.features.stored import StoredColumns, StoredFile, StoredRows, write_columns, write_rows

CODES, COLUMNS, MEANS = "features.h5", "columns.h5", "means.h5"
ARRAYS = ("token_ids", "row_offsets", "reader", "trajectory", "outlier")
_FIX = "Encode again."


def write_codes(
    folder: Path, arrays: Mapping[str, np.ndarray], blocks: Iterable[sp.csr_array], shape: tuple[int, int], nnz: int
) -> StoredRows:
    """Write features.h5 and columns.h5, and read them back.

    Args:
        folder: for the files.
        arrays: those of `ARRAYS`.
        blocks: the codes, block of tokens by block.
        shape: (n_tokens, n_features).
        nnz: non-zeros of the codes.
    """
    with replacing(folder / CODES) as partial, HDF5Writer(partial) as file:
        for name in ARRAYS:
            file.create_dataset(name, data=arrays[name])
        counts = write_rows(file, blocks, shape, nnz)
    rows = StoredRows(StoredFile(folder / CODES), "", shape[1], None)
    with replacing(folder / COLUMNS) as partial:
        write_columns(partial, "columns", rows, counts)
    rows.columns = StoredColumns(StoredFile(folder / COLUMNS), "columns", shape[0])
    return rows


def write_means(folder: Path, means: Mapping[str, tuple[str, Iterable[sp.csr_array]]], shape: tuple[int, int]) -> None:
    """Write means.h5.

    Args:
        folder: for the file.
        means: of each span the digest of its mask, and its means in blocks of rows.
        shape: (n_rows, n_features).
    """
    with replacing(folder / MEANS) as partial:
        for span, (mask, blocks) in means.items():
            with tempfile.TemporaryFile(dir=folder) as spool:
                sizes = []
                for block in blocks:
                    sizes.append((block.shape[0], block.nnz))
                    for array, kind in ((block.indptr, np.int64), (block.indices, np.int32), (block.data, np.float32)):
                        spool.write(array.astype(kind, copy=False).data)
                spool.seek(0)
                with HDF5Writer(partial, extend=True) as file:
                    group = file.create_group(span)
                    group.attrs["mask"] = np.bytes_(mask.encode())
                    nnz = sum(n for _, n in sizes)
                    counts = write_rows(group.create_group("rows"), _spooled(spool, sizes, shape[1]), shape, nnz)
            rows = StoredRows(StoredFile(partial), f"{span}/rows", shape[1], None)
            write_columns(partial, f"{span}/columns", rows, counts)


def _spooled(spool: IO[bytes], sizes: list[tuple[int, int]], n_columns: int) -> Iterator[sp.csr_array]:
    for n, nnz in sizes:
        ends, indices, values = (
            np.frombuffer(spool.read(count * np.dtype(kind).itemsize), dtype=kind)
            for count, kind in ((n + 1, np.int64), (nnz, np.int32), (nnz, np.float32))
        )
        yield sp.csr_array((values, indices, ends), shape=(n, n_columns))


def read_codes(folder: Path, n_features: int) -> tuple[StoredRows, dict[str, np.ndarray]]:
    """The codes, with their columns and means, and the arrays of `ARRAYS`.

    Raises:
        TsaeError: where a file cannot be read, or they do not fit each other.
    """
    try:
        file = StoredFile(folder / CODES)
        for name in ARRAYS:
            file.need(name, "b" if name == "outlier" else "i")
        arrays = {name: file.read(name) for name in ARRAYS}
        codes = StoredRows(file, "", n_features, None)
        _check_sizes(arrays, codes.shape[0])
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(folder, CODES, error) from error
    try:
        codes.columns = StoredColumns(StoredFile(folder / COLUMNS), "columns", codes.shape[0])
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(folder, COLUMNS, error) from error
    if codes.columns.shape != codes.shape or codes.columns.nnz != codes.nnz:
        raise TsaeError(f"{COLUMNS} is not that of {CODES}", where=folder, fix=_FIX)
    try:
        found = StoredFile(folder / MEANS)
        n_rows = len(arrays["trajectory"])
        for name, mask in found.attributes.items():
            span = name.removesuffix("/mask")
            columns = StoredColumns(found, f"{span}/columns", n_rows)
            rows = StoredRows(found, f"{span}/rows", n_features, columns)
            if not rows.shape == columns.shape == (n_rows, n_features):
                raise ValueError(f"/{span} has means of {rows.shape} and {columns.shape}, expected {n_rows} rows")
            codes.means[span] = str(mask), rows
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(folder, MEANS, error) from error
    return codes, arrays


def _check_sizes(arrays: Mapping[str, np.ndarray], n_tokens: int) -> None:
    """Check that the arrays are of so many tokens, and of equally many rows.

    Raises:
        ValueError: where they are not.
    """
    sizes, ends = {name: len(found) for name, found in arrays.items()}, arrays["row_offsets"]
    if not sizes["token_ids"] == sizes["outlier"] == n_tokens:
        raise ValueError(f"it has {n_tokens} tokens, {sizes['token_ids']} ids and {sizes['outlier']} marks of outliers")
    if not sizes["reader"] == sizes["trajectory"] == sizes["row_offsets"] - 1:
        raise ValueError(f"it has {sizes['reader']} readers and {sizes['trajectory']} trajectories of rows")
    if ends[0] != 0 or ends[-1] != n_tokens or (np.diff(ends) < 0).any():
        raise ValueError(f"/row_offsets do not divide its {n_tokens} tokens")


def _unreadable(folder: Path, name: str, error: Exception) -> TsaeError:
    return TsaeError(f"{name} cannot be read ({str(error).splitlines()[0]})", where=folder, fix=_FIX)
