"""Rollouts on disk: Parquet, read and written a piece at a time, so that memory does not grow with the tokens.

What is read is not held in memory either. Parquet is packed; unpacked pieces go into a temporary file in the layout
that Arrow has in memory, and the table is a map of that file, whose pages the system reads when they are looked at and
drops when it needs room. The file takes 4 bytes a token and the texts, has no name, and goes with the table. It lies
where Python's `tempfile` puts it: where /tmp is itself kept in memory, let TMPDIR name a folder on a disk.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError

_PIECE_ROWS, _PIECE_VALUES = 1024, 1 << 18
"""Of what is read at a time, at most, where a single row is not more. A value is a token id, or all of a text."""
_GROUP_TOKENS = 1 << 18
"""Of a row group that is written, about; memory holds it meanwhile."""
_OUTLINE = ["problem_id", "policy", "outcome"]


def read_pieces(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """All rows of a Parquet file in order, some at a time; first an empty table, so that its columns are known.

    Raises:
        TsaeError: where it is no Parquet file, or a damaged one.
    """
    try:
        # Otherwise whole columns of a row group are read at once, still packed.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            empty = file.schema_arrow.empty_table()
            yield empty if columns is None else empty.select(columns)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                values = sum(group.column(i).num_values for i in range(group.num_columns))
                rows = min(_PIECE_ROWS, max(1, _PIECE_VALUES * group.num_rows // max(1, values)))
                # Threads, each with memory of its own, are not faster on pieces of this size.
                for batch in file.iter_batches(rows, [number], columns, use_threads=False):
                    yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise TsaeError(
            f"not a Parquet file ({str(error).splitlines()[0]})",
            where=path,
            fix="Give the Parquet file that `tsae rollouts` wrote.",
        ) from error


def mapped(tables: Iterable[pa.Table]) -> pa.Table:
    """Tables of one schema, the first of which gives its metadata too, after one another in a mapped temporary file.

    Raises:
        TsaeError: where there is no room for it.
    """
    tables = iter(tables)
    first = next(tables)
    try:
        with tempfile.TemporaryFile() as file:
            # A stream, not a file, of Arrow's: in it, categories may differ from piece to piece.
            with pa.ipc.new_stream(file, first.schema) as stream:
                for table in tables:
                    stream.write_table(table)
            file.flush()
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TsaeError(
            f"cannot unpack rollouts into a temporary file ({error.strerror})",
            where=tempfile.tempdir or "TMPDIR",
            fix="Make room there, or let TMPDIR name another folder",
        ) from error
    return pa.ipc.open_stream(pa.py_buffer(found)).read_all()


def read_outline(path: str | Path) -> pd.DataFrame:
    """Whose trajectories a file of `Rollouts.write` holds, and how long they are.

    Returns:
        a row a trajectory: problem_id, policy, outcome, step and rewards where the file has them, prompt_length and
        response_length (tokens).
    """
    parts = []
    names = pq.read_schema(path).names
    columns = [*_OUTLINE, *(name for name in names if name == "step" or name.startswith("reward/"))]
    for table in read_pieces(path, [*columns, "prompt_ids", "response_ids"]):
        frame = table.select(columns).to_pandas()
        for name in ("prompt", "response"):
            frame[f"{name}_length"] = list_lengths(table[f"{name}_ids"])
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def read_info(table: pa.Table) -> dict[str, Any]:
    """The `info` that a table was written with."""
    return dict(json.loads((table.schema.metadata or {}).get(b"tsae", b"{}")))


def write_table(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], info: Mapping[str, Any]) -> Path:
    """Write tables of one schema after one another as one Parquet file, whole or not at all; each is a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    schema = schema.with_metadata({b"tsae": json.dumps(info, sort_keys=True).encode()})
    with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata))
    os.replace(partial, path)
    return path


def row_groups(table: pa.Table, lengths: np.ndarray) -> Iterator[pa.Table]:
    """Consecutive rows of a table, about as many as have `_GROUP_TOKENS`, however the table lies in memory.

    Args:
        table: what is to be written.
        lengths: (n,) tokens of every row.
    """
    group = (lengths.cumsum(dtype=np.int64) - 1) // _GROUP_TOKENS
    bounds = np.flatnonzero(np.diff(group, prepend=-1, append=group[-1] + 1))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        # In one piece: where pages of the file end would depend on where pieces do.
        yield table.slice(low, high - low).combine_chunks()


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) lengths of the lists of a column without nulls."""
    none: list[np.ndarray] = [np.empty(0, np.int32)]
    return np.concatenate(none + [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks])
