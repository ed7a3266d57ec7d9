"""Files of a log: found below a folder, and read row by row in bounded memory.

A file, or a range of its lines or row groups, is read as it was when the import began: later additions are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.logs.on_disk import containers
from tsae.rollouts.logs.on_disk.packed import bare, is_packed, unpacked
from tsae.rollouts.parquet import rows_at_once

_A_LOG = re.compile(
    # Folders of checkpoints are full of .pt files: only names as slime gives them are logs. `datasets` keeps what it
    # computed beside its data.
    r"\.(jsonl(\.gz|\.zst)?|parquet|eval)$|^((rollout|data|debug)[^/]*_)?\d+\.pt$|\.([ct]sv|json)(\.gz|\.zst)?$|"
    r"\.db$|^(?!cache-|indices)[^/]*\.(arrow|feather)$"
)
_CONTAINERS = {
    ".pt": containers.read_torch,
    ".eval": containers.read_inspect,
    ".json": lambda path: containers.read_json(path, LONGEST_LINE),
    **dict.fromkeys((".csv", ".tsv"), lambda path: containers.read_csv(path, LONGEST_LINE)),
    **dict.fromkeys((".arrow", ".feather"), lambda path: _read_arrow(path)),
    ".db": lambda path: containers.read_trackio(path, LONGEST_LINE),
    ".pkl": containers.refuse_pickle,
    ".pickle": containers.refuse_pickle,
}
OTHER_TABLES = (".json", ".csv", ".tsv", ".arrow", ".feather", ".db")
"""Files of rows that also lie beside logs: they are read where there is no other log."""
LONGEST_LINE = 1 << 28
"""Bytes; a longer line is no trajectory, and reading it would need as much memory."""

# Folders that trainers make below a run's own; the run is the first folder above them.
_NOT_A_RUN = re.compile(
    r"(step|exp)_\d+|completions|rollouts?|rollout_data(_dir)?|validation_data(_dir)?|generations|traces|logs?|train|"
    r"eval|all|effective|token_exports|monitors|file|stream|files|media|table|artifacts|run-.+[:-]v\d+"
)
_CHECKPOINT = re.compile(r"checkpoint-\d+")
WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")
_MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put before UTF-8."""


class NoLog(TsaeError):
    """There is no file that may be a log."""


class HalfLine(TsaeError):
    """A last line that has no line break, and is no JSON."""


@dataclass
class Seen:
    """How much of a file was read."""

    bytes: int = 0
    """Of the file on disk."""


@dataclass(frozen=True)
class LogFile:
    """One file of a log, or a piece of one."""

    path: Path
    run: str
    """Name of the run: its folder, below which trainers make folders of their own."""
    step: int | None = None
    """The trainer's step, if the file's name says it."""
    start: int = 0
    """Where the piece begins: a byte, or a row group of a Parquet file."""
    stop: int | None = None
    """Where it ends; None for the end of the file."""
    before: int = 0
    """Lines or rows of the file before the piece."""
    seen: Seen = field(default_factory=Seen, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The path that identifies a trainer's file, however it is compressed."""
        return bare(self.path).as_posix()

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, row) of every row: lines are counted from 1, rows of other files from 0.

        Raises:
            TsaeError: naming the line, for a line that is no JSON object in UTF-8; and for an unreadable file.
        """
        kind, self.seen.bytes = kind_of(self.path), 0
        if not self.path.stat().st_size:  # The file of a step may still be empty.
            return
        if is_packed(self.path) and kind not in (".jsonl", ".json", ".csv", ".tsv"):
            raise TsaeError(
                f"a compressed {kind} file; of compressed files only text is read", where=self.path, fix="Unpack it."
            )
        if kind == ".jsonl":
            yield from _read_lines(self)
        elif kind == ".parquet":
            yield from _read_parquet(self)
        else:
            yield from enumerate(_CONTAINERS[kind](self.path))

    def place(self, number: int) -> str:
        """Where a row is, for error messages."""
        return f"{self.path}:{number}" if kind_of(self.path) == ".jsonl" else f"{self.path}: row {number}"


def run_folder(path: Path) -> Path:
    """The folder of the run that a log lies in."""
    folder = path.resolve()
    while _NOT_A_RUN.fullmatch(folder.name):
        folder = folder.parent
    return folder


def find_files(path: Path, only: Mapping[Path, int] | None = None) -> list[Path]:
    """The files that may be logs, sorted: those of a folder and its subfolders, or the one file.

    Hidden folders, ``checkpoint-N`` and JSON without a list of rows are left out. Links that stay inside the folder are
    ignored, since their targets are read where they lie.

    Args:
        path: a folder or a file.
        only: the files that count; by default all.

    Raises:
        TsaeError: if there is none, or a link leaves the folder.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoLog("no such log", where=path, fix="Give a file that a trainer wrote, or a folder of them.")
    root, found = path.resolve(), []
    for folder, below, names in os.walk(path):
        kept = [name for name in below if not name.startswith(".") and not _CHECKPOINT.fullmatch(name)]
        if any(WANDB_RUN.match(name) for name in kept):  # A copy of a folder holds its link as a folder.
            kept = [name for name in kept if name != "latest-run"]
        below[:] = sorted(kept)
        for name in (*kept, *(name for name in names if _A_LOG.search(name))):
            file = Path(folder, name)
            if _beside_a_log(file):
                continue
            if file.is_symlink():
                if not file.resolve().is_relative_to(root):
                    what = "this link leaves the folder of the log"
                    raise TsaeError(what, where=file, fix="Give the log where it lies, or copy it into the folder.")
            elif file.is_file() and (only is None or file in only):
                found.append(file)
    if not found:
        raise NoLog(
            "holds no .jsonl or .parquet file, nor another table (.json, .csv, .tsv, .arrow, .feather), nor one that "
            "slime (.pt), trackio (.db) or Inspect (.eval) wrote",
            where=path,
            fix="Give the folder into which the trainer writes its rollouts.",
        )
    return sorted(found)


def _beside_a_log(file: Path) -> bool:
    """Whether it is a JSON file without a list of rows, or an export of trackio's database that holds no more."""
    if kind_of(file) == ".json":
        return file.is_file() and not containers.holds_rows(file)
    exported = file.with_suffix(".db").is_file() or re.search(r"_(system|configs)$", file.stem) is not None
    return file.suffix == ".parquet" and exported


def kind_of(path: Path) -> str:
    """The suffix that decides how a file is read, such as .parquet, .json or .csv; .jsonl for unknown ones."""
    suffix = bare(path).suffix
    return suffix if suffix in (".parquet", *_CONTAINERS) else ".jsonl"


def grows(path: Path) -> bool:
    """Whether a file is written line by line, so that its beginning can be read while it is written."""
    return kind_of(path) == ".jsonl" and not is_packed(path)


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row; None for a file without rows."""
    try:
        return next((row for _, row in LogFile(path, "").rows()), None)
    except HalfLine:
        return None


def _read_lines(file: LogFile) -> Iterator[tuple[int, dict[str, Any]]]:
    number, position = file.before, file.start
    try:
        with unpacked(file.path) as (lines, read):
            if position:
                lines.seek(position)
            while file.stop is None or position < file.stop:
                line = lines.readline(LONGEST_LINE + 1)
                if not line:
                    break
                position += len(line)
                if file.stop is not None and position > file.stop:  # The file has grown.
                    line = line[: file.stop - position]
                number += 1
                row = _row_of(line, number, f"{file.path}:{number}")
                file.seen.bytes = read() if is_packed(file.path) else position - file.start
                if row is not None:
                    yield number, row
    except OSError as error:
        raise _damaged(f"cannot be read beyond line {number}", file.path, error) from error


def _row_of(line: bytes, number: int, where: str) -> dict[str, Any] | None:
    """The row of a line; None for an empty line."""
    if len(line) > LONGEST_LINE:
        raise TsaeError(
            f"a line of more than {LONGEST_LINE >> 20} MiB", where=where, fix="Give JSON lines, one trajectory a line."
        )
    if number == 1:
        line = line.removeprefix(_MARK)
    if not line.strip():
        return None
    try:
        row = parse_json(line.decode("utf-8"), names_once=True)
    except (ValueError, RecursionError) as error:
        kind, cut = TsaeError, ""
        if not line.endswith(b"\n"):
            kind, cut = HalfLine, "; the line has no end: was the run killed while it wrote?"
        what = f"not a line of JSON in UTF-8 ({error}){cut}"
        raise kind(what, where=where, fix="Correct or delete that line.") from error
    if not isinstance(row, dict):
        raise TsaeError(f"a JSON {type(row).__name__}, expected an object", where=where, fix="Correct that line.")
    return row


def _read_parquet(file: LogFile) -> Iterator[tuple[int, dict[str, Any]]]:
    number = file.before
    try:
        # Buffered: otherwise whole columns of a row group are read at once.
        with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as table:
            sizes, size = group_bytes(table), file.path.stat().st_size
            containers.refuse_twice(table.schema_arrow.names, file.path)
            for group in range(file.start, len(sizes) if file.stop is None else file.stop):
                for batch in table.iter_batches(rows_at_once(table, group, 256), [group], use_threads=False):
                    yield from enumerate(_rows_of(batch, number, file.path), number)
                    number += len(batch)
                file.seen.bytes += round(size * sizes[group] / max(1, sum(sizes)))
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # texts and times are read last
        what = "not a Parquet file" if number == file.before else f"cannot be read beyond row {number}"
        raise _damaged(what, file.path, error) from error


def _read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow file, or of a stream, as `datasets` saves it."""
    number = 0
    try:
        with pa.memory_map(str(path)) as source:
            try:
                batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                containers.refuse_twice(batch.schema.names, path)
                batch.validate(full=True)  # Offsets of a damaged file may lie outside of it.
                for start in range(0, len(batch), 256):
                    some = batch.slice(start, 256)
                    yield from _rows_of(some, number, path)
                    number += len(some)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _damaged(f"cannot be read as Arrow beyond row {number}", path, error) from error


def _rows_of(batch: pa.RecordBatch, first: int, path: Path) -> list[dict[str, Any]]:
    """The rows of a batch, none of which is too long."""
    sizes = [batch.slice(row, 1).nbytes for row in range(len(batch))] if batch.nbytes > LONGEST_LINE else [0]
    if max(sizes) > LONGEST_LINE:
        what = f"row {first + sizes.index(max(sizes))} has more than {LONGEST_LINE >> 20} MiB"
        raise TsaeError(what, where=path, fix="Leave it out: no trajectory is as long.")
    return list(batch.to_pylist())


def group_bytes(table: pq.ParquetFile) -> list[int]:
    """Compressed bytes of every row group."""
    groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
    return [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]


def _damaged(what: str, file: Path, error: Exception) -> TsaeError:
    shown = (str(error).splitlines() or [type(error).__name__])[0]
    return TsaeError(f"{what} ({shown})", where=file, fix="Copy the file again, or leave it out.")


def name_in(log: Path, file: Path) -> str:
    """The name of a file of a log: its path below the log's folder."""
    return file.relative_to(log).as_posix() if log.is_dir() else log.name
