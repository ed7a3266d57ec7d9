"""Parts of an import: pieces of a log, and one Parquet file of what was read of each.

A part is some small files, one file, or a piece of a large file of JSON lines. Where parts begin depends only on the
log, never on who reads them. Its file holds the rows of the table, with a few numbers for each by which repeats are
found and the log is checked, and in its metadata the `Findings`. The file's name follows from the part's files, from
how they are read, and from the tokenizer, so an import that is run again uses the files that it finds.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.files import replacing
from tsae.base.hashed_parquet import add_hash, check_parquet
from tsae.errors import TsaeError
from tsae.rollouts.logs.entry import Findings, writable
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.readers import LONGEST_LINE, grows
from tsae.rollouts.schema import SCHEMA, TRAINING
from tsae.rollouts.token_parts import FIELD

PART_BYTES = 1 << 24
_PART_FILES = 4096
_PART_NAME = re.compile(r"\.?[0-9a-f]{24}\.parquet.*")
"""Of `Part.name`, and of a file that is being written under it."""
_BATCH_ROWS, _BATCH_TOKENS = 1024, 1 << 20
_OTHERS = "others"
"""Rewards and extra columns of a row as one JSON object: their names are known at the end."""
_OPTIONAL = (FIELD, *TRAINING)
"""Columns that the table has if a row has them."""
_LISTS = ("prompt_ids", "response_ids", *(field.name for field in _OPTIONAL))
_ROW = (pa.field("step", pa.int64()), pa.field("round_trip", pa.bool_()))
_HASHES = ("problem", "prompt", "key", "trajectory", "content", "group", "asked", "gold", "batch")
_INDEX = pa.schema(
    [
        pa.field("file", pa.uint32()),
        pa.field("number", pa.uint64()),  # of the line or row
        *(pa.field(name, pa.uint64()) for name in _HASHES),
        pa.field("same_text", pa.uint8()),  # whether the ids decode to the log's text: 0 no, 1 yes, 2 no text
        pa.field("retokenised", pa.bool_()),  # whether the ids were made from the text
        pa.field("trained_on", pa.float64()),  # reward by the log
        pa.field("compared", pa.float64()),  # advantage that can be compared with rewards
        pa.field("parts_of_reward", pa.list_(pa.float64())),  # the rewards, where there are several
    ]
)
_FILE = pa.schema(
    [*SCHEMA, *_OPTIONAL, *_ROW, pa.field(_OTHERS, pa.string()), *(f.with_name(f"index/{f.name}") for f in _INDEX)]
)
_KINDS = {bool: "flag", int: "whole", float: "number"}
"""By type of a value in an extra column; any other is text."""
_TYPES = ((pa.bool_(), {"flag"}), (pa.int64(), {"whole"}), (pa.float64(), {"whole", "number"}))
"""Type of a column with values of such kinds; any other is text."""


@dataclass(frozen=True)
class Part:
    """Pieces of files that are read one after another."""

    files: tuple[LogFile, ...]
    first: int
    """Number of its first file among the log's; the others follow it."""
    bytes: int
    """On disk, about."""

    def as_dict(self) -> dict[str, Any]:
        """For another process."""
        files = [(str(f.path), f.run, f.step, f.start, f.stop, f.before, f.several) for f in self.files]
        return {"files": files, "first": self.first, "bytes": self.bytes}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Part:
        files = (LogFile(Path(path), *others) for path, *others in found["files"])
        return cls(tuple(files), found["first"], found["bytes"])

    def name(self, settings: str, *, by_content: bool) -> str:
        """Name of its file.

        Args:
            settings: what it depends on beside its files.
            by_content: whether the bytes of a file that grows count, and not when it was written.
        """
        digest = hashlib.blake2b((settings + json.dumps(self.as_dict())).encode(), digest_size=12)
        for file in self.files:
            if by_content and grows(file.path):
                with file.path.open("rb") as stream:
                    stream.seek(file.start)
                    left = file.path.stat().st_size if file.stop is None else file.stop - file.start
                    while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                        digest.update(chunk)
                        left -= len(chunk)
            else:
                stat = file.path.stat()
                digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        return f"{digest.hexdigest()}.parquet"


def parts_of(files: Sequence[LogFile], *, cut: bool) -> Iterator[Part]:
    """The parts of a log, in order.

    Args:
        files: the log's.
        cut: whether a piece of a file can be read without what comes before it.
    """
    pending, full = list[LogFile](), False
    first = n_bytes = 0
    for number, file in enumerate(files):
        size = file.path.stat().st_size
        if file.stop is not None and grows(file.path):
            size = min(size, file.stop)
        for piece, length in _pieces(file, size, cut=cut):
            of_a_file = length < size
            if pending and (full or of_a_file or n_bytes + length > PART_BYTES or len(pending) >= _PART_FILES):
                yield Part(tuple(pending), first, n_bytes)
                pending, n_bytes = [], 0
            first = first if pending else number
            pending.append(piece)
            n_bytes, full = n_bytes + length, of_a_file
    if pending:
        yield Part(tuple(pending), first, n_bytes)


def _pieces(file: LogFile, size: int, *, cut: bool) -> Iterator[tuple[LogFile, int]]:
    """(piece, bytes) of every piece of a file; a file of JSON lines is cut where lines end."""
    if not grows(file.path) or size == 0 or not (cut and size > PART_BYTES):
        yield replace(file, stop=size) if grows(file.path) else file, size
        return
    start = before = 0
    with file.path.open("rb") as lines:
        while start < size:
            left, n = min(PART_BYTES, size - start), 0
            stop = start + left
            while left and (chunk := lines.read(min(left, 1 << 20))):
                n += chunk.count(b"\n")
                left -= len(chunk)
            rest = lines.readline(LONGEST_LINE + 1) if stop < size else b""
            stop, n = min(stop + len(rest), size), n + rest.count(b"\n")
            yield replace(file, start=start, stop=stop, before=before), stop - start
            start, before = stop, before + n


def write_part(path: Path, records: Iterable[tuple[dict[str, Any], dict[str, Any]]], findings: Findings) -> None:
    """Write what was read of a part, whole or not at all.

    Args:
        path: of its file.
        records: (row of the table, its numbers) of every trajectory.
        findings: complete when all records were taken.
    """
    pending: list[dict[str, Any]] = []
    n_tokens = 0
    with replacing(path) as partial:
        with pq.ParquetWriter(partial, _FILE, compression="lz4") as writer:
            for record, numbers in records:
                pending.append(_as_written(record, numbers, findings))
                n_tokens += len(record["prompt_ids"]) + len(record["response_ids"])
                if len(pending) >= _BATCH_ROWS or n_tokens >= _BATCH_TOKENS:
                    writer.write_table(_table(pending))
                    pending, n_tokens = [], 0
            if pending:
                writer.write_table(_table(pending))
            writer.add_key_value_metadata({"findings": json.dumps(vars(findings))})
        add_hash(partial)


def _as_written(record: dict[str, Any], numbers: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """A row without lone surrogates, which no file can hold: they become their code points (``\\ud800``)."""
    # Names of rewards, and names inside of extra columns, come from the log too.
    record = {writable(name): value if name in _LISTS else writable(value) for name, value in record.items()}
    others = {name: value for name, value in record.items() if name.startswith(("reward/", "extra/"))}
    for name, value in others.items():
        if name.startswith("reward/"):
            findings.counts["reward columns"][name] += 1
        else:  # A number that no column of numbers holds makes a column of texts.
            huge = isinstance(value, int) and value.bit_length() > 63
            findings.counts[name]["text" if huge else _KINDS.get(type(value), "text")] += 1
    findings.counts["columns"].update(field.name for field in _OPTIONAL if record.get(field.name) is not None)
    return {**record, _OTHERS: _json(others), **{f"index/{name}": value for name, value in numbers.items()}}


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.table([pa.array([row.get(field.name) for row in rows], field.type) for field in _FILE], schema=_FILE)


def read_index(paths: Sequence[Path], names: Sequence[str]) -> pd.DataFrame:
    """Columns of all parts, a row a trajectory: step, policy, outcome, reward of the table, or numbers of the index."""
    columns = [f"index/{name}" if name in _INDEX.names else name for name in names]
    tables = []
    for path in paths:
        table = pq.read_table(path, columns=columns).select(columns).rename_columns(list(names))
        for name in {"policy", "outcome"} & set(names):
            table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
        tables.append(table)
    return pa.concat_tables(tables).unify_dictionaries().to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)


def reward_parts(paths: Sequence[Path], findings: Sequence[Findings]) -> np.ndarray:
    """(n, n_rewards) rewards of every trajectory that has several; NaN where there is none."""
    names = list(dict.fromkeys(name for found in findings for name in found.counts["several rewards"]))
    parts = []
    for path, found in zip(paths, findings, strict=True):
        rows = pq.read_table(path, columns=["index/parts_of_reward"])["index/parts_of_reward"].to_pylist()
        values = np.full((len(rows), len(names)), np.nan)
        own = [names.index(name) for name in found.counts["several rewards"]]
        for row, given in enumerate(rows):
            values[row, own[: len(given or ())]] = given or ()
        parts.append(values)
    return np.concatenate(parts)


def table_schema(findings: Findings) -> pa.Schema:
    """The columns of the table, by the findings of all parts."""
    types = dict.fromkeys(findings.counts["reward columns"], pa.float64())
    for name, kinds in findings.counts.items():
        if name.startswith("extra/"):
            types[name] = next((kind for kind, fitting in _TYPES if kinds.keys() <= fitting), pa.string())
    optional = [field for field in _OPTIONAL if field.name in findings.counts["columns"]]
    return pa.schema([*SCHEMA, *optional, *_ROW, *(pa.field(name, kind) for name, kind in types.items())])


def table_rows(paths: Sequence[Path], schema: pa.Schema, kept: np.ndarray) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """(rows of the table, their numbers) that are kept, a batch at a time."""
    start = 0
    others = [field for field in schema if field.name.startswith(("reward/", "extra/"))]
    written = [field.name for field in _FILE if not field.name.startswith("index/")]
    for path in paths:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=written, use_threads=False)
                rows = np.flatnonzero(kept[start : start + len(table)])
                numbers = start + rows
                start += len(table)
                if not len(rows):
                    continue
                table = table if len(rows) == len(table) else table.take(pa.array(rows))
                found = [json.loads(text) for text in table[_OTHERS].to_pylist()]
                for field in others:
                    values = [_value(row.get(field.name), field.type) for row in found]
                    table = table.append_column(field, pa.array(values, field.type))
                yield table.select(schema.names).cast(schema), numbers


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _value(value: Any, kind: pa.DataType) -> Any:
    """A value for its column; a column of texts holds JSON for what is not a text."""
    return _json(value) if kind == pa.string() and value is not None and not isinstance(value, str) else value


class PartFiles:
    """The files of an import's parts, in a hidden folder beside its target, or in one that is kept.

    Args:
        to: the target.
        settings: what parts depend on beside their files.
        kept: folder for the parts, in which those of this log stay.
    """

    def __init__(self, to: Path, settings: str, kept: Path | None) -> None:
        self.folder, self.settings, self.stays = kept or to.with_name(f".{to.name}.parts"), settings, kept is not None
        self.names: dict[str, None] = {}

    def __enter__(self) -> PartFiles:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.stays:
            for path in self.folder.iterdir() if kind is None else ():
                if path.name not in self.names and _PART_NAME.fullmatch(path.name):
                    path.unlink()
        elif kind is None or len(list(self.folder.glob("*.parquet"))) < 2:
            shutil.rmtree(self.folder, ignore_errors=True)

    def of(self, part: Part) -> Path:
        """The file of a part, which may not be there yet."""
        name = part.name(self.settings, by_content=self.stays)
        self.names[name] = None
        return self.folder / name


def found_part(path: Path) -> Findings | None:
    """What was found in a part; None where its file is not there, or is damaged and will be made again."""
    if not path.is_file():
        return None
    found = Findings()
    try:
        check_parquet(path, "Import again.")
        found.add(json.loads(pq.read_metadata(path).metadata[b"findings"]))
    except (TsaeError, OSError, ValueError, LookupError, pa.ArrowException):
        return None
    return found
