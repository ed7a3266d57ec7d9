"""The spool of an import: batches of rows on disk, until the whole log is read and its columns are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.rollouts import parts
from tsae.rollouts.parquet import write_table
from tsae.rollouts.table import SCHEMA, Rollouts

_BATCH_ROWS, _BATCH_TOKENS = 1024, 1 << 20
_EXTRAS = (pa.field("step", pa.int64()), pa.field("round_trip", pa.bool_()))


class Spool:
    """Batches on disk, one Parquet file for every set of reward and extra columns that occurs.

    Extra columns are JSON there: which type one has is known when the whole log is read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rewards: list[str] = []
        self._parts_known = False
        self._extras: dict[str, set[type]] = {}
        """By column, the types of its values."""
        self._pending: list[Mapping[str, Any]] = []
        self._tokens = 0
        self._writer: pq.ParquetWriter | None = None
        self._parts: list[Path] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one row."""
        new = [name for name in record if name.startswith("reward/") and name[7:] not in self.rewards]
        if new:
            self._flush()
            self._close()
            self.rewards += [name[7:] for name in new]
        if record.get(parts.COLUMN) is not None and not self._parts_known:
            self._flush()
            self._close()
            self._parts_known = True
        extras = {name: value for name, value in record.items() if name.startswith("extra/")}
        if extras.keys() - self._extras.keys():
            self._flush()
            self._close()
        for name, value in extras.items():
            # A number that no column of numbers holds makes a column of texts.
            huge = isinstance(value, int) and value.bit_length() > 63
            self._extras.setdefault(name, set()).add(str if huge else type(value))
        self._pending.append({**record, **{name: _json(value) for name, value in extras.items()}})
        self._tokens += len(record["prompt_ids"]) + len(record["response_ids"])
        if len(self._pending) >= _BATCH_ROWS or self._tokens >= _BATCH_TOKENS:
            self._flush()

    def write(self, to: Path, kept: np.ndarray, info: Mapping[str, Any], policies: Mapping[str, str]) -> None:
        """All rows that are kept, as one file; policies are renamed, by their old names."""
        self._flush()
        self._close()
        write_table(to, self._schema(final=True), self._batches(kept, policies), info)

    def _batches(self, kept: np.ndarray, policies: Mapping[str, str]) -> Iterator[pa.Table]:
        schema, start = self._schema(final=True), 0
        for part in self._parts:
            with pq.ParquetFile(part) as file:
                # A row group is a batch as it was spooled, and bounded in tokens.
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    for field in schema:
                        if field.name not in table.column_names:
                            table = table.append_column(field, pa.nulls(len(table), field.type))
                        elif field.name in self._extras:
                            values = [_value(text, field.type) for text in table[field.name].to_pylist()]
                            place = table.column_names.index(field.name)
                            table = table.set_column(place, field, pa.array(values, field.type))
                    named = pa.array([policies.get(name, name) for name in table["policy"].to_pylist()])
                    table = table.set_column(table.column_names.index("policy"), "policy", named)
                    rows = np.flatnonzero(kept[start : start + len(table)])
                    start += len(table)
                    if len(rows):
                        yield table.select(schema.names).take(pa.array(rows)).cast(schema)

    def _schema(self, *, final: bool = False) -> pa.Schema:
        rewards = (pa.field(f"reward/{name}", pa.float64()) for name in self.rewards)
        extras = (pa.field(name, _type(seen) if final else pa.string()) for name, seen in self._extras.items())
        of_tokens = [parts.FIELD] * self._parts_known
        return pa.schema([*SCHEMA, *of_tokens, *_EXTRAS, *rewards, *extras])

    def _flush(self) -> None:
        if not self._pending:
            return
        arrays = [pa.array([r.get(field.name) for r in self._pending], type=field.type) for field in self._schema()]
        table = Rollouts(pa.table(arrays, schema=self._schema())).table
        if self._writer is None:
            self._parts.append(self.folder / f"{len(self._parts)}.parquet")
            self._writer = pq.ParquetWriter(self._parts[-1], table.schema, compression="lz4")
        self._writer.write_table(table)
        self._pending, self._tokens = [], 0

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _type(seen: set[type]) -> pa.DataType:
    """Of a column with values of these types."""
    for kind, types in ((pa.bool_(), {bool}), (pa.int64(), {int}), (pa.float64(), {int, float})):
        if seen <= types:
            return kind
    return pa.string()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _value(text: str | None, kind: pa.DataType) -> Any:
    """What was spooled; in a column of texts, what is none stays JSON."""
    if text is None:
        return None
    value = json.loads(text)
    return text if kind == pa.string() and not isinstance(value, str) else value
