"""Readers: the rows of a log file by its kind, in bounded memory.

JSON lines and Parquet; JSON, CSV, Arrow, slime's ``.pt``, Inspect's ``.eval``, trackio's ``.db``. Files of text may be
compressed (.gz, .zst). No code in a file is run: ``.pt`` files are loaded as tensors and plain containers only, and
pickles are refused.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.array_files import cause, read_torch_file
from tsae.base.files import reading
from tsae.base.untrusted import check_zip, parse_json, weighs_within
from tsae.errors import TsaeError, needing
from tsae.rollouts.parquet import refuse_twice, rows_at_once

LONGEST_LINE = 1 << 28
"""Bytes; a longer line is not a trajectory, and reading it would need as much memory."""
OTHER_TABLES = (".json", ".csv", ".tsv", ".arrow", ".feather", ".db")
"""Files of rows that also lie beside logs: they are read where there is no other log."""
_MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put before UTF-8."""
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BUFFER = 1 << 20
_LARGEST_SAMPLE = 1 << 28
"""Bytes of one sample of an Inspect log, unpacked."""
_LEAST = 1_000_000
"""Values that a small file may stand for too."""
_ROWS = ("data", "results", "rows", "samples", "rollouts")
_ROWS_BEGIN = re.compile(rb'^(\xef\xbb\xbf)?\s*\[\s*\{|"(columns|%s)"\s*:\s*\[' % "|".join(_ROWS).encode())


class HalfLine(TsaeError):
    """A last line that has no line break, and is not JSON."""


def read_rows(
    path: Path, start: int = 0, stop: int | None = None, before: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of every row: lines are counted from 1, rows of other files from 0.

    Args:
        path: the file.
        start, stop: of JSON lines, the bytes that are read; by default to the end.
        before: lines before `start`.

    Raises:
        TsaeError: naming the line, for a line that is not a JSON object in UTF-8; and for an unreadable file.
    """
    kind = kind_of(path)
    if not path.stat().st_size:  # The file of a step may still be empty.
        return
    if is_packed(path) and kind not in (".jsonl", ".json", ".csv", ".tsv"):
        _refuse(path, f"a compressed {kind} file; of compressed files only text is read", "Unpack it.")
    if kind == ".jsonl":
        yield from _read_lines(path, start, stop, before)
    else:
        yield from enumerate(_READERS[kind](path))


def kind_of(path: Path) -> str:
    """The suffix that decides how a file is read, such as .parquet, .json or .csv; .jsonl for unknown ones."""
    suffix = bare(path).suffix
    return suffix if suffix in _READERS else ".jsonl"


def grows(path: Path) -> bool:
    """Whether a file is written line by line, so that its beginning can be read while it is written."""
    return kind_of(path) == ".jsonl" and not is_packed(path)


def is_packed(path: Path) -> bool:
    return path.suffix in _CODECS


def bare(path: Path) -> Path:
    """A path without the suffix that says how the file is compressed."""
    return path.with_suffix("") if is_packed(path) else path


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a file. Reading raises OSError if the file is damaged or ends too early."""
    if not is_packed(path):
        with path.open("rb", buffering=_BUFFER) as plain:
            yield plain
        return
    with (
        pa.CompressedInputStream(pa.OSFile(str(path)), _CODECS[path.suffix]) as stream,
        io.BufferedReader(cast(io.RawIOBase, stream), _BUFFER) as buffered,
    ):
        yield cast(BinaryIO, buffered)


_LEAVE = "Copy the file again, or leave it out."
_AS_LINES = "Give JSON lines, one trajectory a line."


def _refuse(path: str | Path, what: str, fix: str, cause: Exception | None = None) -> NoReturn:
    """Raise a `TsaeError` at a file, or a line of it."""
    raise TsaeError(what, where=path, fix=fix) from cause


def _read_lines(path: Path, start: int, stop: int | None, before: int) -> Iterator[tuple[int, dict[str, Any]]]:
    number, position = before, start
    with reading(path, _LEAVE, lambda: f"cannot be read beyond line {number}"), unpacked(path) as lines:
        if position:
            lines.seek(position)
        while stop is None or position < stop:
            line = lines.readline(LONGEST_LINE + 1)
            if not line:
                break
            position += len(line)
            if stop is not None and position > stop:  # The file has grown.
                line = line[: stop - position]
            number += 1
            if (row := _row_of(line, number, f"{path}:{number}")) is not None:
                yield number, row


def _need_short(size: int, what: str, where: str | Path, fix: str = _AS_LINES) -> None:
    """Refuse what has more bytes than any trajectory: a line, a row or a file."""
    if size > LONGEST_LINE:
        _refuse(where, f"{what} more than {LONGEST_LINE >> 20} MiB", fix)


def _row_of(line: bytes, number: int, where: str) -> dict[str, Any] | None:
    """The row of a line; None for an empty line."""
    _need_short(len(line), "a line of", where)
    if number == 1:
        line = line.removeprefix(_MARK)
    if not line.strip():
        return None
    try:
        row = parse_json(line.decode("utf-8"), names_once=True)
    except (ValueError, RecursionError) as error:
        whole = line.endswith(b"\n")
        what = f"not a line of JSON in UTF-8 ({error})"
        what += "; the line has no end: was the run killed while it wrote?" * (not whole)
        raise (TsaeError if whole else HalfLine)(what, where=where, fix="Correct or delete that line.") from error
    if not isinstance(row, dict):
        _refuse(where, f"a JSON {type(row).__name__}, expected an object", "Correct that line.")
    return row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    # Buffered: otherwise whole columns of a row group are read at once.
    with (
        reading(path, _LEAVE, lambda: f"cannot be read beyond row {number}" if number else "not a Parquet file"),
        pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table,
    ):
        refuse_twice(table.schema_arrow.names, path)
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(rows_at_once(table, group, 256), [group], use_threads=False):
                yield from _rows_of(batch, number, path)
                number += len(batch)


def _read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow file, or of a stream, as `datasets` saves it."""
    number = 0
    beyond = lambda: f"cannot be read as Arrow beyond row {number}"  # noqa: E731
    with reading(path, _LEAVE, beyond), pa.memory_map(str(path)) as source:
        try:
            batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        for batch in batches:
            refuse_twice(batch.schema.names, path)
            batch.validate(full=True)  # Offsets of a damaged file may lie outside of it.
            for start in range(0, len(batch), 256):
                some = batch.slice(start, 256)
                yield from _rows_of(some, number, path)
                number += len(some)


def _rows_of(batch: pa.RecordBatch, first: int, path: Path) -> list[dict[str, Any]]:
    """The rows of a batch, none of which is too long."""
    sizes = [batch.slice(row, 1).nbytes for row in range(len(batch))] if batch.nbytes > LONGEST_LINE else [0]
    row = first + sizes.index(max(sizes))
    _need_short(max(sizes), f"row {row} has", path, "Leave it out: no trajectory is as long.")
    return list(batch.to_pylist())


def read_torch(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file that slime saved with ``torch.save``, each with the ``rollout_id`` of the file.

    The file is one object, and stays in memory while it is read.

    Raises:
        TsaeError: if it holds more than tensors and plain containers, or no samples.
    """
    refused = "Save its samples again without other objects: images and arrays as tensors, lists or nothing."
    found = read_torch_file(path, refused=refused, damaged=_LEAVE)
    # Every reference to a list takes at least one byte in the file.
    if not weighs_within(found, max(_LEAST, path.stat().st_size)):
        what = "stands for more values than it has bytes: its lists hold each other"
        _refuse(path, what, "Leave it out, and ask where it is from.")
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        columns = f"; its keys are {', '.join(map(str, found))}" if isinstance(found, dict) else ""
        fix = "Give what slime saves with --save-debug-rollout-data or --dump-details (rollout_data/)."
        _refuse(path, f"has no list of samples{columns}", fix)
    for sample in samples:
        # A sample's own rollout_id numbers rollouts, not steps, and is None by default.
        yield {**sample, "rollout_id": found.get("rollout_id")}


def holds_rows(path: Path) -> bool:
    """Whether a JSON file begins as a list of rows does, or is an episode of rLLM; folders are full of other JSON."""
    try:
        with unpacked(path) as file:
            return path.name.startswith("episode_hash") or _ROWS_BEGIN.search(file.read(1 << 12)) is not None
    except OSError:
        return False


def read_json(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file: a list of objects, an object with such a list, or JSON lines. Other objects are one row.

    Weights & Biases and mlflow write a table as the names of its columns, and a list of lists.

    Raises:
        TsaeError: if it holds anything else, or is too long.
    """
    with reading(path, "Correct or delete that file.", "not a file of JSON in UTF-8"):
        with unpacked(path) as file:
            whole = file.read(LONGEST_LINE + 1)
        _need_short(len(whole), "has", path)
        parts = [whole]
        if re.match(rb"(\xef\xbb\xbf)?{.*}\r?\n{", whole):  # JSON lines, as `datasets` writes them
            parts = [line for line in whole.split(b"\n") if line.strip()]
        read = [parse_json(part.decode("utf-8-sig"), names_once=True) for part in parts]
        found = read if len(parts) > 1 else read[0]
    del whole, parts
    rows, names = found, None
    if isinstance(found, dict):
        rows = next((found[name] for name in _ROWS if isinstance(found.get(name), list)), [found])
        names = [str(name) for name in found["columns"]] if isinstance(found.get("columns"), list) else None
        refuse_twice(names or (), path)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if names is not None and isinstance(row, list) and len(row) == len(names):
            yield dict(zip(names, row, strict=True))
        elif isinstance(row, dict):
            yield row
        else:
            expected = "an object" if names is None else f"{len(names)} values, one for each of its columns"
            what = f"row {number} is a JSON {type(row).__name__}, expected {expected}"
            _refuse(path, what, "Write it as JSON lines (.jsonl), a trajectory a line.")


def read_csv(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or TSV file under the names of its first line, as texts; an empty field is None.

    What parts the fields is what the first line has most of: tabs, semicolons or commas.

    Raises:
        TsaeError: naming the row, if it has another number of fields, or a field that is too long.
    """
    number = 0
    fix = "Save it in UTF-8, with quotes around fields that have commas or line breaks, and quotes twice."
    with (
        reading(path, fix, lambda: f"row {number} cannot be read as CSV in UTF-8"),
        unpacked(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        bounded = _bounded(text)
        head = next(bounded, "")
        lines = csv.reader(chain([head], bounded), delimiter=max("\t;,", key=head.count), strict=True)
        names: list[str] = []
        while (row := _next_line(lines)) is not None:
            if row and not names:
                refuse_twice(names := row, path)
            elif row:
                if len(row) != len(names):
                    raise ValueError(f"{len(row)} fields, expected {len(names)}")
                yield {name: value or None for name, value in zip(names, row, strict=True)}
                number += 1


def _bounded(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"a line of more than {LONGEST_LINE >> 20} MiB")
        yield line


def _next_line(lines: Iterator[list[str]]) -> list[str] | None:
    before = csv.field_size_limit(LONGEST_LINE)  # A setting of the whole process.
    try:
        return next(lines, None)
    finally:
        csv.field_size_limit(before)


def read_trackio(path: Path) -> Iterator[dict[str, Any]]:
    """What a run of trackio logged with tables, a row for each time; nothing for another database.

    Raises:
        TsaeError: for a damaged database.
    """
    # A database without a journal is opened without locks, which a folder that cannot be written to does not allow.
    mode = "mode=ro" if path.with_name(path.name + "-wal").is_file() else "immutable=1"
    with (
        reading(path, "Copy it again, with its -wal file.", "cannot be read as a database of trackio"),
        closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?{mode}", uri=True)) as base,
    ):
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_LINE)
        # Not a view, which could compute without end. mlflow has another table of that name.
        ours = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'metrics' AND instr(sql, 'run_name')"
        query = "SELECT run_name, metrics FROM metrics WHERE instr(metrics, 'trackio.table') ORDER BY id"
        for run, logged in base.execute(query) if base.execute(ours).fetchone() else ():
            yield {**parse_json(logged), "run_name": run}


def read_inspect(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of an Inspect log, each with the ``model`` and ``task`` of the log, one in memory at a time.

    Raises:
        TsaeError: if inspect_ai is not installed, or cannot read the file.
    """
    with needing("inspect_ai", "reading a log of Inspect", path):
        from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
    try:
        check_zip(path, most=_LARGEST_SAMPLE)
        log = read_eval_log(str(path), header_only=True)
        head = {"model": log.eval.model, "task": log.eval.task}
        # A run that was stopped has fewer samples than the header says; summaries exist only for these.
        for summary in read_eval_log_sample_summaries(str(path)):
            sample = read_eval_log_sample(str(path), summary.id, summary.epoch, resolve_attachments=True)
            yield head | sample.model_dump(
                mode="json", include={"id", "epoch", "input", "target", "messages", "output", "scores", "error"}
            )
    except (OSError, RuntimeError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        _refuse(path, f"inspect_ai does not read it ({cause(error)})", _LEAVE, error)


def refuse_pickle(path: Path) -> Iterator[dict[str, Any]]:
    """Refuse a pickle."""
    fix = "Load it where you trust it and write JSON lines or Parquet, with token ids where it has them "
    fix += "(prompt_ids, response_ids)."
    _refuse(path, "is a pickle, which can run code where it is opened, and is never read", fix)


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".parquet": _read_parquet,
    ".json": read_json,
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".arrow", ".feather"), _read_arrow),
    ".pt": read_torch,
    ".eval": read_inspect,
    ".db": read_trackio,
    **dict.fromkeys((".pkl", ".pickle"), refuse_pickle),
}
"""By `kind_of`, what reads a file; JSON lines are read by `read_rows` itself."""
