"""Spool: rows on disk, batch by batch, until the whole log is read and its columns are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.rollouts.logs.entry import writable
from tsae.rollouts.parquet import write_table
from tsae.rollouts.schema import SCHEMA, TRAINING
from tsae.rollouts.token_parts import FIELD, check_parts

Rename = Callable[[pa.Table, np.ndarray], Mapping[str, list[str]]]
"""(rows, their numbers) -> columns with other names."""
_BATCH_ROWS, _BATCH_TOKENS = 1024, 1 << 20
_OTHERS = "others"
"""Rewards and extra columns of a row as one JSON object: their names are known at the end."""
_OPTIONAL = (FIELD, *TRAINING)
"""Columns that the file has if a row has them."""
_LISTS = ("prompt_ids", "response_ids", *(field.name for field in _OPTIONAL))
_STEP, _ROUND_TRIP = pa.field("step", pa.int64()), pa.field("round_trip", pa.bool_())
_SPOOLED = pa.schema([*SCHEMA, *_OPTIONAL, _STEP, _ROUND_TRIP, pa.field(_OTHERS, pa.string())])
_KINDS = {bool: "flag", int: "whole", float: "number"}
"""By type of a value in an extra column; any other is text."""
_TYPES = ((pa.bool_(), {"flag"}), (pa.int64(), {"whole"}), (pa.float64(), {"whole", "number"}))
"""Type of a column with values of such kinds; any other is text."""


class Spool:
    """Rows of a part of the log, in one Parquet file.

    Args:
        file: to write.
    """

    def __init__(self, file: Path) -> None:
        self._rewards: dict[str, None] = {}
        self._known: set[str] = set()
        """Names of the optional columns."""
        self._extras: dict[str, set[str]] = {}
        """By extra column, the kinds of its values."""
        self._pending: list[Mapping[str, Any]] = []
        self._tokens = 0
        self._writer = pq.ParquetWriter(file, _SPOOLED, compression="lz4")

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one row. Lone surrogates, which no file can hold, become their code points (``\\ud800``)."""
        # Names of rewards, and names inside of extra columns, come from the log too.
        record = {writable(name): value if name in _LISTS else writable(value) for name, value in record.items()}
        others = {name: value for name, value in record.items() if name.startswith(("reward/", "extra/"))}
        known = {field.name for field in _OPTIONAL if record.get(field.name) is not None}
        if others.keys() - self._rewards.keys() - self._extras.keys() or known - self._known:
            self._flush()  # A new column begins a new row group.
        for name, value in others.items():
            if name.startswith("reward/"):
                self._rewards[name] = None
                continue
            # A number that no column of numbers holds makes a column of texts.
            huge = isinstance(value, int) and value.bit_length() > 63
            self._extras.setdefault(name, set()).add("text" if huge else _KINDS.get(type(value), "text"))
        self._known |= known
        self._pending.append({**record, _OTHERS: _json(others)})
        self._tokens += len(record["prompt_ids"]) + len(record["response_ids"])
        if len(self._pending) >= _BATCH_ROWS or self._tokens >= _BATCH_TOKENS:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Write the remaining rows; returns what `Spools.add` takes, for JSON."""
        self._flush()
        self._writer.close()
        kinds = {name: sorted(found) for name, found in self._extras.items()}
        return {"rewards": list(self._rewards), "known": sorted(self._known), "extras": kinds}

    def _flush(self) -> None:
        if self._pending:
            arrays = [pa.array([row.get(field.name) for row in self._pending], field.type) for field in _SPOOLED]
            table = pa.table(arrays, schema=_SPOOLED)
            check_parts(table, "rollouts")
            self._writer.write_table(table)
        self._pending, self._tokens = [], 0


class Spools:
    """The spools of all parts of a log, in order."""

    def __init__(self) -> None:
        self._rewards: dict[str, None] = {}
        self._known: set[str] = set()
        self._extras: dict[str, set[str]] = {}
        self._files: list[Path] = []

    @property
    def rewards(self) -> list[str]:
        """Names of all rewards."""
        return [name.removeprefix("reward/") for name in self._rewards]

    def add(self, file: Path, state: Mapping[str, Any]) -> None:
        """Append the spool of a further part."""
        self._rewards.update(dict.fromkeys(state["rewards"]))
        self._known.update(state["known"])
        for name, kinds in state["extras"].items():
            self._extras.setdefault(name, set()).update(kinds)
        self._files.append(file)

    def write(self, to: Path, kept: np.ndarray, info: Mapping[str, Any], rename: Rename) -> None:
        """Write the kept rows to one file."""
        types = dict.fromkeys(self._rewards, pa.float64())
        for name, kinds in self._extras.items():
            types[name] = next((kind for kind, fitting in _TYPES if kinds <= fitting), pa.string())
        others = [pa.field(name, kind) for name, kind in types.items()]
        optional = [field for field in _OPTIONAL if field.name in self._known]
        schema = pa.schema([*SCHEMA, *optional, _STEP, _ROUND_TRIP, *others])
        write_table(to, schema, self._batches(schema, others, kept, rename), info)

    def _batches(
        self, schema: pa.Schema, others: list[pa.Field], kept: np.ndarray, rename: Rename
    ) -> Iterator[pa.Table]:
        start = 0
        for path in self._files:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                # A row group is a batch as it was spooled, so its number of tokens is bounded.
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, use_threads=False)
                    rows = np.flatnonzero(kept[start : start + len(table)])
                    numbers = start + rows
                    start += len(table)
                    if not len(rows):
                        continue
                    if len(rows) < len(table):
                        table = table.take(pa.array(rows))
                    found = [json.loads(text) for text in table[_OTHERS].to_pylist()]
                    for field in others:
                        values = [_value(row.get(field.name), field.type) for row in found]
                        table = table.append_column(field, pa.array(values, field.type))
                    for name, values in rename(table, numbers).items():
                        table = table.set_column(table.column_names.index(name), name, pa.array(values))
                    yield table.select(schema.names).cast(schema)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _value(value: Any, kind: pa.DataType) -> Any:
    """A value for its column; a column of texts holds JSON for what is no text."""
    return _json(value) if kind == pa.string() and value is not None and not isinstance(value, str) else value
