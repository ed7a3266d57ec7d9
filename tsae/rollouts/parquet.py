"""Rollouts on disk: Parquet, read and written in pieces, so that memory does not grow with the tokens.

A table that was read is not in memory either. Parquet is compressed; its unpacked pieces go into a temporary file in
Arrow's own layout, and the table is a map of that file: the system reads pages when they are used and drops them when
it needs room. The file takes 4 bytes a token plus the texts, has no name, and disappears with the table. It lies in
Python's temporary folder; if that is /tmp in memory, set TMPDIR to a folder on a disk.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.artefact import command_facts
from tsae.base.files import reading, replacing
from tsae.base.hashed_parquet import add_hash, check_parquet
from tsae.errors import TsaeError

_PIECE_ROWS, _PIECE_VALUES = 1024, 1 << 18
"""Most rows and values to read at a time, unless one row has more. A value is a token id, or a whole text."""
_PIECE_BYTES = 1 << 28
"""Bytes of one column to read at a time, if every value were as long as the column in the file."""
_GROUP_TOKENS = 1 << 18
"""About so many tokens are one row group; memory holds one while it is written."""
_OUTLINE = ["problem_id", "policy", "outcome"]
_FIX = "Give the Parquet file that `tsae rollouts` wrote."


def read_pieces(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """All rows of a Parquet file in order, in pieces; first an empty table with its columns.

    Raises:
        TsaeError: where it is not a Parquet file, or a damaged one.
    """
    check_parquet(path, _FIX)
    try:
        # With the defaults, whole columns of a row group would be read at once.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            empty = file.schema_arrow.empty_table()
            yield empty if columns is None else empty.select(columns)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                values = sum(group.column(i).num_values for i in range(group.num_columns))
                rows = min(_PIECE_ROWS, max(1, _PIECE_VALUES * group.num_rows // max(1, values)))
                rows = rows_at_once(file, number, rows)
                # Threads take memory of their own, and are not faster on pieces of this size.
                for batch in file.iter_batches(rows, [number], columns, use_threads=False):
                    yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError, ValueError) as error:
        what = f"not a Parquet file ({str(error).splitlines()[0]})"
        raise TsaeError(what, where=path, fix=_FIX) from error


def rows_at_once(file: pq.ParquetFile, group: int, most: int) -> int:
    """How many rows of a row group to unpack at once.

    A text that comes again and again is in the file once, as an entry of a dictionary, and so is a run of equal token
    ids. So only the whole column bounds the size of a row: a kilobyte can hold a million rows of a gigabyte.
    """
    meta = file.metadata.row_group(group)
    columns = (meta.column(i) for i in range(meta.num_columns))
    widest = max((max(column.total_uncompressed_size, 4 * column.num_values) for column in columns), default=0)
    return min(most, max(1, _PIECE_BYTES // max(1, widest)))


def mapped(tables: Iterable[pa.Table]) -> pa.Table:
    """Join tables of one schema in a mapped temporary file; the metadata is that of the first.

    Raises:
        TsaeError: where there is no room for it.
    """
    tables = iter(tables)
    first = next(tables)
    try:
        with tempfile.TemporaryFile() as file:
            # Arrow's stream, not its file: there, categories may differ from piece to piece.
            with pa.ipc.new_stream(file, first.schema) as stream:
                for table in tables:
                    stream.write_table(table)
            file.flush()
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        what = f"cannot unpack rollouts into a temporary file ({error.strerror})"
        fix = "Make room there, or let TMPDIR name another folder"
        raise TsaeError(what, where=tempfile.tempdir or "TMPDIR", fix=fix) from error
    return pa.ipc.open_stream(pa.py_buffer(found)).read_all()


def read_outline(path: Path) -> pd.DataFrame:
    """The outline of a file of `Rollouts.write`.

    Returns:
        one row a trajectory: problem_id, policy, outcome, step and rewards if the file has them, prompt_length and
        response_length (tokens).
    """
    parts = []
    with reading(path, _FIX):
        names = pq.read_schema(path).names
    columns = [*_OUTLINE, *(name for name in names if name == "step" or name.startswith("reward/"))]
    for table in read_pieces(path, [*columns, "prompt_ids", "response_ids"]):
        frame = table.select(columns).to_pandas()
        for name in ("prompt", "response"):
            frame[f"{name}_length"] = list_lengths(table[f"{name}_ids"])
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def read_info(table: pa.Table, where: str | Path) -> dict[str, Any]:
    """The `info` in the metadata of a table.

    Raises:
        TsaeError: where it is damaged.
    """
    with reading(where, _FIX):
        return dict(json.loads((table.schema.metadata or {}).get(b"tsae", b"{}")))


def write_table(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], info: Mapping[str, Any]) -> Path:
    """Write tables of one schema after one another as one Parquet file, whole or not at all; each is a row group.

    The file carries its hash (`tsae.base.hashed_parquet`), and the command whose output it is.
    """
    made = {b"tsae.command": json.dumps(found).encode()} if (found := command_facts(path, alone=True)) else {}
    schema = schema.with_metadata({b"tsae": json.dumps(info, sort_keys=True).encode(), **made})
    with replacing(path) as partial:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(schema.metadata))
        add_hash(partial)
    return path


def row_groups(table: pa.Table, lengths: np.ndarray) -> Iterator[pa.Table]:
    """Cut a table, with lengths (n,) in tokens of its rows, into row groups of about `_GROUP_TOKENS`."""
    group = (lengths.cumsum(dtype=np.int64) - 1) // _GROUP_TOKENS
    bounds = np.flatnonzero(np.diff(group, prepend=-1, append=group[-1] + 1))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        # In one piece: otherwise the pages of the file would depend on the pieces in memory.
        yield table.slice(low, high - low).combine_chunks()


def refuse_twice(names: Iterable[Any], where: str | Path) -> None:
    """Refuse a table with two columns of one name."""
    twice = [name for name, n in Counter(map(str, names)).items() if n > 1]
    if twice:
        what = f"has several columns {twice[0]!r}, and nothing says which of them counts"
        raise TsaeError(what, where=where, fix="Rename or drop all but one of them.")


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) lengths of the lists of a column without nulls."""
    none: list[np.ndarray] = [np.empty(0, np.int32)]
    return np.concatenate(none + [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks])
