"""Files of a log: finding them below a folder, and reading them row by row in bounded memory."""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError
from tsae.rollouts.logs import containers

_A_LOG = re.compile(
    # Folders of checkpoints are full of .pt and .json files: of these only what is called as slime's and rLLM's.
    r"\.(jsonl|parquet|eval)$|^((rollout|data|debug)[^/]*_)?\d+\.pt$|^episode_hash[^/]*\.json$"
)
_CONTAINERS = {
    ".pt": containers.read_torch,
    ".eval": containers.read_inspect,
    ".json": containers.read_json,
    ".pkl": containers.refuse_pickle,
    ".pickle": containers.refuse_pickle,
}
LONGEST_LINE = 1 << 28
"""Bytes; a longer line is no trajectory, and reading it would need as much memory."""

# Folders that trainers make below a run's own; the run is the first folder above them.
_NOT_A_RUN = re.compile(
    r"(step|exp)_\d+|completions|rollouts?|rollout_data(_dir)?|validation_data(_dir)?|generations|traces|logs?|train|"
    r"eval|all|effective|token_exports|monitors|file|stream"
)
_CHECKPOINT = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True)
class LogFile:
    """One file of a log."""

    path: Path
    run: str
    """Name of the run: the folder that it lies in, below which trainers make folders of their own."""
    step: int | None = None
    """The trainer's step, where the file's name says it."""

    def place(self, number: int) -> str:
        """Where a row is, for error messages."""
        return f"{self.path}:{number}" if kind_of(self.path) == ".jsonl" else f"{self.path}: row {number}"


def run_folder(path: Path) -> Path:
    """The folder of the run that a log lies in."""
    folder = path.resolve()
    while _NOT_A_RUN.fullmatch(folder.name):
        folder = folder.parent
    return folder


def find_files(path: Path) -> list[Path]:
    """The files that may be logs, sorted: those of a folder and of its subfolders, or the one file.

    Hidden folders and ``checkpoint-N`` are left out. Links that stay inside the folder are passed over, since what
    they lead to is read where it lies.

    Raises:
        TsaeError: where there is nothing, or a link leaves the folder.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TsaeError("no such log", where=path, fix="Give a file that a trainer wrote, or a folder of them.")
    root, found = path.resolve(), []
    for folder, below, names in os.walk(path):
        kept = [name for name in below if not name.startswith(".") and not _CHECKPOINT.fullmatch(name)]
        below[:] = sorted(kept)
        for name in (*kept, *(name for name in names if _A_LOG.search(name))):
            file = Path(folder, name)
            if file.is_symlink():
                if not file.resolve().is_relative_to(root):
                    raise TsaeError(
                        "this link leaves the folder of the log",
                        where=file,
                        fix="Give the log where it lies, or copy it into the folder.",
                    )
            elif file.is_file():
                found.append(file)
    if not found:
        raise TsaeError(
            "holds no .jsonl or .parquet file, nor one that slime (.pt), rLLM (.json) or Inspect (.eval) wrote",
            where=path,
            fix="Give the folder into which the trainer writes its rollouts.",
        )
    return sorted(found)


def refuse_copies(files: Sequence[LogFile]) -> None:
    """Of a step, or where no step is known, a file that is another one over again would count twice.

    Raises:
        TsaeError: naming both.
    """
    alike: dict[tuple[int | None, int], list[LogFile]] = {}
    for file in files:
        alike.setdefault((file.step, file.path.stat().st_size), []).append(file)
    for group in alike.values():
        heads: dict[bytes, list[LogFile]] = {}
        for file in group if len(group) > 1 and group[0].path.stat().st_size else ():
            with file.path.open("rb") as opened:
                heads.setdefault(opened.read(1 << 12), []).append(file)
        for some in heads.values():
            for first, second in pairwise(some):
                if filecmp.cmp(first.path, second.path, shallow=False):
                    raise TsaeError(
                        f"is the same file as {first.path}, byte for byte",
                        where=second.path,
                        fix="Leave one of them out: its trajectories would count twice.",
                    )


def leftovers(files: Sequence[LogFile]) -> list[str]:
    """A note for every run whose files get older at a later step, as where a resumed run has not come as far again.

    Files that were copied without their times differ by seconds; a minute is more.
    """
    notes: list[str] = []
    times: dict[str, tuple[int, float]] = {}
    for file in files:
        if file.step is None:
            continue
        time = file.path.stat().st_mtime
        step, before = times.get(file.run, (file.step, time))
        if file.step > step and time < before - 60:
            notes.append(
                f"{file.path.name} of step {file.step} is older than the file of step {step}: from there on the files "
                "may be those of another run, or of before a resume"
            )
        times[file.run] = (file.step, time)
    return notes


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read: .parquet, .pt, .eval, .json or .pkl, and for any other .jsonl."""
    return path.suffix if path.suffix in (".parquet", *_CONTAINERS) else ".jsonl"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of every row: lines are counted from 1, rows of other files from 0.

    Raises:
        TsaeError: naming the line, for what is no JSON object in UTF-8; and for files that are no Parquet.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    if path.suffix in _CONTAINERS:
        yield from enumerate(_CONTAINERS[path.suffix](path))
        return
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > LONGEST_LINE:
                raise TsaeError(
                    f"a line of more than {LONGEST_LINE >> 20} MiB",
                    where=where,
                    fix="Give JSON lines, one trajectory a line.",
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                cut = "" if line.endswith(b"\n") else "; the line has no end: was the run killed while it wrote?"
                raise TsaeError(
                    f"not a line of JSON in UTF-8 ({error}){cut}", where=where, fix="Correct or delete that line."
                ) from error
            if not isinstance(row, dict):
                raise TsaeError(
                    f"a JSON {type(row).__name__}, expected an object", where=where, fix="Correct that line."
                )
            yield number, row


def _read_parquet(path: Path, batch_size: int = 256) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TsaeError(
            f"not a Parquet file ({first})" if number == 0 else f"cannot be read beyond row {number} ({first})",
            where=path,
            fix="Copy the file again, or leave it out.",
        ) from error


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row; None for a file without rows."""
    rows = _read_parquet(path, batch_size=1) if path.suffix == ".parquet" else read_rows(path)
    return next((row for _, row in rows), None)
