"""Log files other than JSON lines and Parquet: JSON, CSV, slime's ``.pt``, Inspect's ``.eval``, trackio's ``.db``.

No code in a file is run: ``.pt`` files are loaded as tensors and plain containers only, and pickles are refused.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tsae.base.disk.torch_file import cause, read_torch_file
from tsae.base.untrusted import check_zip, parse_json, weighs_within
from tsae.errors import TsaeError
from tsae.rollouts.logs.on_disk.packed import unpacked

_LARGEST_SAMPLE = 1 << 28
"""Bytes of one sample of an Inspect log, unpacked."""
_LEAST = 1_000_000
"""Values that a small file may stand for too."""
_ROWS = ("data", "results", "rows", "samples", "rollouts")
_ROWS_BEGIN = re.compile(rb'^(\xef\xbb\xbf)?\s*\[\s*\{|"(columns|%s)"\s*:\s*\[' % "|".join(_ROWS).encode())


def read_torch(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file that slime saved with ``torch.save``, each with the ``rollout_id`` of the file.

    The file is one object, and stays in memory while it is read.

    Raises:
        TsaeError: if it holds more than tensors and plain containers, or no samples.
    """
    found = read_torch_file(
        path,
        refused="Save its samples again without other objects: images and arrays as tensors, lists or nothing.",
        damaged="Copy the file again, or leave it out.",
    )
    # A list that is in many places takes a byte or more in the file for each.
    if not weighs_within(found, max(_LEAST, path.stat().st_size)):
        what = "stands for more values than it has bytes: its lists hold each other"
        raise TsaeError(what, where=path, fix="Leave it out, and ask where it is from.")
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        columns = f"; its keys are {', '.join(map(str, found))}" if isinstance(found, dict) else ""
        what = f"has no list of samples{columns}"
        fix = "Give what slime saves with --save-debug-rollout-data or --dump-details (rollout_data/)."
        raise TsaeError(what, where=path, fix=fix)
    for sample in samples:
        # A sample's own rollout_id numbers rollouts, not steps, and is None by default.
        yield {**sample, "rollout_id": found.get("rollout_id")}


def holds_rows(path: Path) -> bool:
    """Whether a JSON file begins as a list of rows does, or is an episode of rLLM; folders are full of other JSON."""
    try:
        with unpacked(path) as (file, _):
            return path.name.startswith("episode_hash") or _ROWS_BEGIN.search(file.read(1 << 12)) is not None
    except OSError:
        return False


def read_json(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file: a list of objects, an object with such a list, or JSON lines. Other objects are one row.

    Weights & Biases and mlflow write a table as the names of its columns, and a list of lists.

    Raises:
        TsaeError: if it holds anything else, or has more than `most` bytes.
    """
    try:
        with unpacked(path) as (file, _):
            whole = file.read(most + 1)
        if len(whole) > most:
            raise TsaeError(
                f"has more than {most >> 20} MiB", where=path, fix="Give JSON lines, one trajectory a line."
            )
        parts = [whole]
        if re.match(rb"(\xef\xbb\xbf)?{.*}\r?\n{", whole):  # JSON lines, as `datasets` writes them
            parts = [line for line in whole.split(b"\n") if line.strip()]
        read = [parse_json(part.decode("utf-8-sig"), names_once=True) for part in parts]
        found = read if len(parts) > 1 else read[0]
    except (OSError, ValueError, RecursionError) as error:
        raise TsaeError(
            f"not a file of JSON in UTF-8 ({error})", where=path, fix="Correct or delete that file."
        ) from error
    del whole, parts
    rows, names = found, None
    if isinstance(found, dict):
        rows = next((found[name] for name in _ROWS if isinstance(found.get(name), list)), [found])
        names = found.get("columns") if isinstance(found.get("columns"), list) else None
        refuse_twice(names or (), path)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if names is not None and isinstance(row, list) and len(row) == len(names):
            yield dict(zip(names, row, strict=True))
        elif isinstance(row, dict):
            yield row
        else:
            expected = "an object" if names is None else f"{len(names)} values, one for each of its columns"
            what = f"row {number} is a JSON {type(row).__name__}, expected {expected}"
            raise TsaeError(what, where=path, fix="Write it as JSON lines (.jsonl), a trajectory a line.")


def read_csv(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or TSV file under the names of its first line, as texts; an empty field is None.

    What parts the fields is what the first line has most of: tabs, semicolons or commas.

    Raises:
        TsaeError: naming the row, if it has another number of fields, or a field of more than `most` characters.
    """
    number = 0
    try:
        with unpacked(path) as (file, _), io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            bounded = _bounded(text, most)
            head = next(bounded, "")
            lines = csv.reader(chain([head], bounded), delimiter=max("\t;,", key=head.count), strict=True)
            names: list[str] = []
            while (row := _next_line(lines, most)) is not None:
                if row and not names:
                    refuse_twice(names := row, path)
                elif row:
                    if len(row) != len(names):
                        raise ValueError(f"{len(row)} fields, expected {len(names)}")
                    yield {name: value or None for name, value in zip(names, row, strict=True)}
                    number += 1
    except (OSError, ValueError, csv.Error) as error:
        what = f"row {number} cannot be read as CSV in UTF-8 ({error})"
        fix = "Save it in UTF-8, with quotes around fields that have commas or line breaks, and quotes twice."
        raise TsaeError(what, where=path, fix=fix) from error


def _bounded(text: io.TextIOWrapper, most: int) -> Iterator[str]:
    while line := text.readline(most + 1):
        if len(line) > most:
            raise ValueError(f"a line of more than {most >> 20} MiB")
        yield line


def _next_line(lines: Iterator[list[str]], most: int) -> list[str] | None:
    before = csv.field_size_limit(most)  # A setting of the whole process.
    try:
        return next(lines, None)
    finally:
        csv.field_size_limit(before)


def read_trackio(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """What a run of trackio logged with tables, a row for each time; nothing for another database.

    Raises:
        TsaeError: for a damaged database.
    """
    # A database without a journal is opened without locks, which a folder that cannot be written to does not allow.
    mode = "mode=ro" if path.with_name(path.name + "-wal").is_file() else "immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?{mode}", uri=True)) as base:
            base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            # Not a view, which could compute without end. mlflow has another table of that name.
            ours = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'metrics' AND instr(sql, 'run_name')"
            query = "SELECT run_name, metrics FROM metrics WHERE instr(metrics, 'trackio.table') ORDER BY id"
            for run, logged in base.execute(query) if base.execute(ours).fetchone() else ():
                yield {**parse_json(logged), "run_name": run}
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise TsaeError(
            f"cannot be read as a database of trackio ({error})", where=path, fix="Copy it again, with its -wal file."
        ) from error


def refuse_twice(names: Sequence[Any], path: Path) -> None:
    """Refuse a table with two columns of one name."""
    twice = [name for name, n in Counter(map(str, names)).items() if n > 1]
    if twice:
        what = f"has several columns {twice[0]!r}, and nothing says which of them counts"
        raise TsaeError(what, where=path, fix="Rename or drop all but one of them.")


def read_inspect(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of an Inspect log, each with the ``model`` and ``task`` of the log, one in memory at a time.

    Raises:
        TsaeError: if inspect_ai is not installed, or cannot read the file.
    """
    try:
        from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
    except ImportError as error:
        what = "logs of Inspect are read by inspect_ai, which is not installed"
        raise TsaeError(what, where=path, fix="pip install 'tsae[inspect]'.") from error
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
        raise TsaeError(
            f"inspect_ai does not read it ({cause(error)})", where=path, fix="Copy the file again, or leave it out."
        ) from error


def refuse_pickle(path: Path) -> Iterator[dict[str, Any]]:
    """Refuse a pickle."""
    raise TsaeError(
        "is a pickle, which can run code where it is opened, and is never read",
        where=path,
        fix="Load it where you trust it and write JSON lines or Parquet, with token ids where it has them "
        "(prompt_ids, response_ids).",
    )
