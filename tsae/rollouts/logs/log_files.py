"""Files of a log: found below a folder; which of them do not belong to it, and which a trainer is still writing.

A file, or a range of its lines, is read as it was when the import began: later additions are ignored.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.artefact import file_hash
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.logs.readers import LONGEST_LINE, OTHER_TABLES, HalfLine, bare, grows, holds_rows, kind_of, read_rows

_A_LOG = re.compile(
    # Folders of checkpoints are full of .pt files: only names as slime gives them are logs. `datasets` keeps what it
    # computed beside its data.
    r"\.(jsonl(\.gz|\.zst)?|parquet|eval)$|^((rollout|data|debug)[^/]*_)?\d+\.pt$|\.([ct]sv|json)(\.gz|\.zst)?$|"
    r"\.db$|^(?!cache-|indices)[^/]*\.(arrow|feather)$"
)
# Folders that trainers make below a run's own; the run is the first folder above them.
_NOT_A_RUN = re.compile(
    r"step_\d+|completions|rollouts?|rollout_data(_dir)?|validation_data(_dir)?|generations|traces|logs?|train|"
    r"eval|all|effective|token_exports|monitors|file|stream|files|media|table|artifacts|run-.+[:-]v\d+"
)
_OF_NEMO_RL = re.compile(r"exp_\d{3}")  # of its own logs; another's exp_001 is a run
_TRAINED, HELD_OUT = (
    re.compile(rf"(^|[^a-z])({words})(?![a-z])", re.IGNORECASE)
    for words in ("train(ing)?", "vals?|valid(ation)?s?|evals?|evaluations?|tests?|dev")
)
"""In the name of a file or folder, these words say that its rows were trained on, or that they were not."""
_CHECKPOINT = re.compile(r"checkpoint-\d+")
WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")
_BLOCK = 1 << 16


class NoLog(TsaeError):
    """There is no file that may be a log."""


@dataclass(frozen=True)
class LogFile:
    """One file of a log, or a piece of one."""

    path: Path
    run: str
    """Name of the run: its folder, below which trainers make folders of their own."""
    step: int | None = None
    """The trainer's step, if the file's name says it."""
    start: int = 0
    """Byte at which the piece begins; only JSON lines are cut."""
    stop: int | None = None
    """Byte at which it ends; None for the end of the file."""
    before: int = 0
    """Lines of the file before the piece."""
    several: bool = False
    """Whether the log has several runs."""

    @property
    def name(self) -> str:
        """The path that identifies a trainer's file, however it is compressed."""
        return bare(self.path).as_posix()

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, row) of every row; see `read_rows`."""
        return read_rows(self.path, self.start, self.stop, self.before)

    def place(self, number: int) -> str:
        """Where a row is, for error messages."""
        return f"{self.path}:{number}" if kind_of(self.path) == ".jsonl" else f"{self.path}: row {number}"


def run_folder(path: Path) -> Path:
    """The folder of the run that a log lies in."""
    folder = path.resolve()
    while _NOT_A_RUN.fullmatch(folder.name) or (
        _OF_NEMO_RL.fullmatch(folder.name) and any(folder.glob("train_data_step*"))
    ):
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
            "holds no .jsonl or .parquet file, nor another table (.json, .csv, .tsv, .arrow, .feather), nor a file "
            "of slime (.pt), trackio (.db) or Inspect (.eval)",
            where=path,
            fix="Give the folder into which the trainer writes its rollouts.",
        )
    return sorted(found)


def _beside_a_log(file: Path) -> bool:
    """Whether it is a JSON file without a list of rows, or an export of trackio's database that holds no more."""
    if kind_of(file) == ".json":
        return file.is_file() and not holds_rows(file)
    exported = file.with_suffix(".db").is_file() or re.search(r"_(system|configs)$", file.stem) is not None
    return file.suffix == ".parquet" and exported


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row; None for a file without rows."""
    try:
        return next((row for _, row in LogFile(path, "").rows()), None)
    except HalfLine:
        return None


def name_in(log: Path, file: Path) -> str:
    """The name of a file of a log: its path below the log's folder."""
    return file.relative_to(log).as_posix() if log.is_dir() else log.name


def leave_copies(files: Sequence[LogFile]) -> tuple[list[LogFile], list[str]]:
    """Leave out files that are copies of others of the same step, or of no known step. They would count twice.

    A trainer's own log is refused if it has a copy. Tables of services, and others beside a log, may have copies.
    Returns the other files, and a note.

    Raises:
        TsaeError: naming both, for a copy of a trainer's own log.
    """
    left: list[LogFile] = []
    alike: dict[tuple[int | None, int], list[LogFile]] = {}
    for file in files:
        alike.setdefault((file.step, file.path.stat().st_size), []).append(file)
    for (_, size), group in alike.items():
        first = dict[str, LogFile]()
        for file in group if len(group) > 1 and size else ():
            if (same := first.setdefault(file_hash(file.path), file)) is file:
                continue
            if kind_of(file.path) not in OTHER_TABLES:
                what = f"is the same file as {same.path}, byte for byte"
                raise TsaeError(what, where=file.path, fix="Leave one of them out: its trajectories would count twice.")
            left.append(file)
    gone = {file.path for file in left}
    notes = [f"{len(left):,} files are copies of others and count once, such as {left[0].path}"] if left else []
    return [file for file in files if file.path not in gone], notes


def name_runs(files: Sequence[LogFile], folders: Mapping[str, Mapping[Path, Path]]) -> tuple[list[LogFile], list[str]]:
    """Rename runs that share a name after their folders. Returns the files with these names, and notes.

    Args:
        files: of the log.
        folders: by name of a run, the folder of the run of each of its files.
    """
    notes, longer = [], dict[Path, str]()
    for run, of in folders.items():
        # An id of wandb is one run's, wherever its folder was copied to.
        if len(set(of.values())) > 1 and not WANDB_RUN.match(run):
            above = os.path.commonpath([folder.parent for folder in of.values()])
            for file, folder in of.items():
                longer[file] = str(folder.relative_to(above)).encode("utf-8", "backslashreplace").decode()
            notes.append(f"several runs are called {run}, and are named by their folders (--run, if they are one)")
    return [replace(file, run=longer.get(file.path, file.run)) for file in files], notes


def leave_held_out(files: Sequence[LogFile], path: Path) -> tuple[list[LogFile], list[str]]:
    """Leave out the files of evaluations. Returns the other files, and a note.

    They are known by their names, and only where the names of other files say that these are the training's.
    """
    names = {file.path: bare(Path(name_in(path, file.path))).with_suffix("").as_posix() for file in files}
    held_out = {file: name for file, name in names.items() if HELD_OUT.search(name) and not _TRAINED.search(name)}
    if not held_out or not any(_TRAINED.search(name) and not HELD_OUT.search(name) for name in names.values()):
        return [*files], []
    first = next(iter(held_out.values()))
    return [file for file in files if file.path not in held_out], [
        f"{len(held_out):,} files are by their names of an evaluation, beside others of the training, and stay apart: "
        f"give them alone to read them (such as {first})"
    ]


def leftovers(files: Sequence[LogFile]) -> list[str]:
    """A note for every step whose file is older than that of an earlier step: a resumed run has not come so far again.

    Files that were copied without their times differ by seconds, so a minute is allowed.
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


class StableFiles:
    """Looks at files again and again, and says what has stopped changing.

    Args:
        quiet: seconds without a change.
    """

    def __init__(self, quiet: float) -> None:
        self.quiet = quiet
        self.waits = False
        """Whether something was not complete when it was last asked for. Set it back before a look."""
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}
        self._grew: dict[Path, tuple[int, float]] = {}
        self._lines: dict[Path, int] = {}

    def rests(self, path: Path) -> bool:
        """Whether a file, or every file below a folder, has not changed for the time.

        The time of its last change decides; if that lies ahead, as clocks of other machines do, what was seen.
        """
        found = [file.stat() for file in ((p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])]
        newest = max((stat.st_mtime_ns for stat in found), default=0)
        state, now = (sum(stat.st_size for stat in found), newest), time.monotonic()
        before, since = self._seen.get(path, (None, now))
        since = since if before == state else now
        self._seen[path] = state, since
        rests = time.time() - self.quiet - newest / 1e9 >= 0 or now - since >= self.quiet
        self.waits |= not rests
        return rests

    def bytes_of(self, file: Path) -> int:
        """How many bytes of a file of a log are complete; 0 for none."""
        size = file.stat().st_size
        if not grows(file):
            return size if self.rests(file) and _readable(file) else 0
        if self.rests(file):
            return _whole_lines(file, size, rests=True)
        before, since = self._grew.setdefault(file, (size, time.monotonic()))
        if time.monotonic() - since >= self.quiet:
            self._lines[file] = _whole_lines(file, min(before, size), rests=False)
            self._grew[file] = size, time.monotonic()
        return self._lines.get(file, 0)

    def forget(self, others: Iterable[Path]) -> None:
        """Forget all files but these."""
        kept = set(others)
        for known in (self._seen, self._grew, self._lines):
            for path in known.keys() - kept:
                del known[path]


def _readable(file: Path) -> bool:
    """Whether a file has its end, if it is one that can tell."""
    if kind_of(file) != ".parquet":
        return True
    try:
        pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return False
    return True


def _whole_lines(file: Path, size: int, *, rests: bool) -> int:
    """Bytes of a file's first bytes up to the end of a line; a last line without an end counts if it rests and is JSON.

    Args:
        file: of JSON lines.
        size: of the beginning.
        rests: whether it is not being written.
    """
    with file.open("rb") as stream:
        end = size
        while end > 0:
            start = max(0, end - _BLOCK)
            stream.seek(start)
            at = stream.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if rests and 0 < size - end <= LONGEST_LINE:
            stream.seek(end)
            try:
                parse_json(stream.read(size - end))
                return size
            except ValueError:
                pass
    return end
