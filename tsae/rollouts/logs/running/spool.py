"""The spool of an import: batches of rows on disk, until the whole log is read and its columns are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.rollouts import parts
from tsae.rollouts.parquet import write_table
from tsae.rollouts.table import SCHEMA, Rollouts

_BATCH_ROWS, _BATCH_TOKENS = 1024, 1 << 20
_KINDS = {bool: "flag", int: "whole", float: "number"}
"""Of the types of extra columns' values; any other is text."""
_EXTRAS = (pa.field("step", pa.int64()), pa.field("round_trip", pa.bool_()))


class Spool:
    """Batches of a part of the log on disk, one Parquet file for every set of reward and extra columns that occurs.

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
        self._files = 0

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

    def close(self) -> dict[str, Any]:
        """Write what is left; returns what `Spools.add` takes, as JSON has it."""
        self._flush()
        self._close()
        kinds = {name: sorted({_KINDS.get(kind, "text") for kind in seen}) for name, seen in self._extras.items()}
        return {"rewards": self.rewards, "parts": self._parts_known, "extras": kinds, "files": self._files}

    def _schema(self) -> pa.Schema:
        return _schema(self.rewards, dict.fromkeys(self._extras, pa.string()), with_parts=self._parts_known)

    def _flush(self) -> None:
        if not self._pending:
            return
        arrays = [pa.array([r.get(field.name) for r in self._pending], type=field.type) for field in self._schema()]
        table = Rollouts(pa.table(arrays, schema=self._schema())).table
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / f"{self._files}.parquet", table.schema, compression="lz4")
            self._files += 1
        self._writer.write_table(table)
        self._pending, self._tokens = [], 0

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Spools:
    """The spools of all parts of a log, in order."""

    def __init__(self) -> None:
        self.rewards: list[str] = []
        self._parts_known = False
        self._extras: dict[str, set[str]] = {}
        self._files: list[Path] = []

    def add(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Put a part behind those that are there."""
        self.rewards += [name for name in state["rewards"] if name not in self.rewards]
        self._parts_known |= state["parts"]
        for name, kinds in state["extras"].items():
            self._extras.setdefault(name, set()).update(kinds)
        self._files += [folder / f"{number}.parquet" for number in range(state["files"])]

    def write(self, to: Path, kept: np.ndarray, info: Mapping[str, Any], policies: Mapping[str, str]) -> None:
        """All rows that are kept, as one file; policies are renamed, by their old names."""
        extras = {name: _type(kinds) for name, kinds in self._extras.items()}
        schema = _schema(self.rewards, extras, with_parts=self._parts_known)
        write_table(to, schema, self._batches(schema, kept, policies), info)

    def _batches(self, schema: pa.Schema, kept: np.ndarray, policies: Mapping[str, str]) -> Iterator[pa.Table]:
        start = 0
        for part in self._files:
            with pq.ParquetFile(part, pre_buffer=False) as file:
                # A row group is a batch as it was spooled, and bounded in tokens.
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, use_threads=False)
                    for field in schema:
                        if field.name not in table.column_names:
                            table = table.append_column(field, pa.nulls(len(table), field.type))
                        elif field.name in self._extras:
                            values = [_value(text, field.type) for text in table[field.name].to_pylist()]
                            place = table.column_names.index(field.name)
                            table = table.set_column(place, field, pa.array(values, field.type))
                    if policies:
                        named = pa.array([policies.get(name, name) for name in table["policy"].to_pylist()])
                        table = table.set_column(table.column_names.index("policy"), "policy", named)
                    rows = np.flatnonzero(kept[start : start + len(table)])
                    start += len(table)
                    table = table.select(schema.names)
                    if len(rows):
                        yield (table if len(rows) == len(table) else table.take(pa.array(rows))).cast(schema)


def _schema(rewards: Sequence[str], extras: Mapping[str, pa.DataType], *, with_parts: bool) -> pa.Schema:
    of_tokens = [parts.FIELD] * with_parts
    fields = (pa.field(f"reward/{name}", pa.float64()) for name in rewards)
    others = (pa.field(name, kind) for name, kind in extras.items())
    return pa.schema([*SCHEMA, *of_tokens, *_EXTRAS, *fields, *others])


def _type(seen: set[str]) -> pa.DataType:
    """Of a column with values of these kinds."""
    for kind, kinds in ((pa.bool_(), {"flag"}), (pa.int64(), {"whole"}), (pa.float64(), {"whole", "number"})):
        if seen <= kinds:
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
