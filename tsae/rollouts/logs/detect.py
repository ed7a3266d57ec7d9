"""Whose log is it? Told by the names of its files and the columns of their first rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs import (
    areal,
    inspect_logs,
    ms_swift,
    nemo_rl,
    open_instruct,
    open_r1,
    openrlhf,
    plain,
    prime_rl,
    rllm,
    roll,
    skyrl,
    slime,
    trl,
    verifiers,
    verl,
)
from tsae.rollouts.logs.entry import Reader, Row
from tsae.rollouts.logs.files import LogFile, find_files, first_row, kind_of, run_folder
from tsae.rollouts.logs.leftovers import leftovers, refuse_copies
from tsae.rollouts.logs.packed import bare
from tsae.rollouts.logs.unknown import unknown_columns

_TABLES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Format:
    """One trainer's way of logging rollouts."""

    name: str
    title: str
    file: re.Pattern[str] | None
    """Matches the path of its files, with named groups step, run and subset; None where names say nothing."""
    fits: Callable[[Row, ImportConfig], bool]
    """Whether a row has its columns."""
    read: Reader
    a_file_a_step: bool = False
    """Two files of one run and step are then one too many."""
    synchronous: bool = True
    """Whether the weights that sampled for a step are those right before its update."""
    validates: Callable[[Path], bool] | None = None
    """Whether a file is a validation's, by its name."""
    suffixes: tuple[str, ...] = _TABLES
    """Of its files, by `kind_of`."""
    cut: bool = True
    """Whether rows are read alike wherever a file begins: nothing is remembered from one to the next."""

    def takes(self, file: Path, row: Row, config: ImportConfig) -> bool:
        """Whether a file with this first row may be its."""
        return kind_of(file) in self.suffixes and self.fits(row, config)


FORMATS = (
    Format("trl", "TRL completions", trl.FILE, trl.fits, trl.read, a_file_a_step=True, cut=False),
    Format("verl", "verl rollout data", verl.FILE, verl.fits, verl.read, a_file_a_step=True, validates=verl.validates),
    Format(
        "open-instruct",
        "open-instruct traces",
        open_instruct.FILE,
        open_instruct.fits,
        open_instruct.read,
        synchronous=False,
    ),
    Format("nemo-rl", "NeMo-RL training data", nemo_rl.FILE, nemo_rl.fits, nemo_rl.read, a_file_a_step=True),
    Format(
        "prime-rl", "prime-rl traces", prime_rl.TRACES, prime_rl.fits_traces, prime_rl.read_traces, synchronous=False
    ),
    Format(
        "prime-rl-tokens",
        "prime-rl token exports",
        prime_rl.TOKENS,
        prime_rl.fits_tokens,
        prime_rl.read_tokens,
        synchronous=False,
    ),
    Format("open-r1", "open-r1 generations", None, open_r1.fits, open_r1.read),
    Format(
        "ms-swift",
        "ms-swift completions",
        ms_swift.FILE,
        ms_swift.fits,
        ms_swift.read,
        suffixes=(".jsonl",),
        cut=False,
    ),
    Format("slime", "slime rollout data", slime.FILE, slime.fits, slime.read, a_file_a_step=True, suffixes=(".pt",)),
    Format("areal", "AReaL trajectories", areal.FILE, areal.fits, areal.read, synchronous=False),
    Format("roll", "ROLL rollout dump", roll.FILE, roll.fits, roll.read, a_file_a_step=True),
    Format("verifiers", "verifiers rollouts", verifiers.FILE, verifiers.fits, verifiers.read, synchronous=False),
    Format("rllm", "rLLM episodes", rllm.FILE, rllm.fits, rllm.read, suffixes=(".json",)),
    Format("skyrl", "SkyRL evaluations", skyrl.FILE, skyrl.fits, skyrl.read),
    Format("openrlhf", "OpenRLHF batch inference", None, openrlhf.fits, openrlhf.read),
    Format("inspect", "Inspect log", inspect_logs.FILE, inspect_logs.fits, inspect_logs.read, suffixes=(".eval",)),
    Format("plain", "plain log", None, plain.fits, plain.read),
)


def find_log(path: Path, config: ImportConfig) -> tuple[Format, list[LogFile], list[str]]:
    """The format of a log, its files by run and step, and what is to be said of them.

    Raises:
        TsaeError: where no format fits, several do, or files disagree.
    """
    files = find_files(path)
    if config.format != "auto":
        chosen = next(form for form in FORMATS if form.name == config.format)
        odd = next((file for file in files if path.is_file() and kind_of(file) not in chosen.suffixes), None)
        if odd is not None:
            raise TsaeError(
                f"{chosen.title} are {' or '.join(chosen.suffixes)} files, and this is none",
                where=odd,
                fix="Name its columns (--format plain --column response=NAME …), or say no --format.",
            )
        matching = [f for f in files if chosen.file is None or chosen.file.search(_name(f))]
        # One file, or files of other names than the trainer's, are taken at the user's word.
        return _ordered(chosen, matching or files, path, config)
    named: dict[str, list[Path]] = {}
    others, empty = list[Path](), list[Path]()
    unknown: Path | None = None
    tables = [file for file in files if kind_of(file) in _TABLES]
    # Other trainers keep evaluations and tensors beside their logs. These are read only where there is no log.
    for group in (tables, [file for file in files if kind_of(file) not in _TABLES]):
        named, others, empty = _by_name(group, config), [], []
        if not named:
            named, others, empty = _by_columns(group, config)
            unknown = unknown or next(iter(others), None)
        if named:
            break
    if not named and unknown is None:
        raise TsaeError("holds no trajectories", where=path, fix="Give a log with at least one row.")
    if len(named) > 1:
        shown = "; ".join(f"{name} ({fs[0].name}{', …' if len(fs) > 1 else ''})" for name, fs in named.items())
        raise TsaeError(
            f"may be a log of several formats: {shown}",
            where=path,
            fix=f"Say which with --format {' or '.join(named)}, or give the folder of one log.",
        )
    if unknown is not None and not named:
        raise unknown_columns(path, unknown, first_row(unknown) or {}, config, [form.name for form in FORMATS])
    ((name, matching),) = named.items()
    chosen = next(form for form in FORMATS if form.name == name)
    if others:  # They were told by their columns, and some have others.
        raise TsaeError(
            f"has not the columns of a {chosen.title}, as the other files have; its columns are "
            f"{', '.join(first_row(others[0]) or {})}",
            where=others[0],
            fix="Move it out of the folder.",
        )
    return _ordered(chosen, matching + empty, path, config)


def _by_name(files: Sequence[Path], config: ImportConfig) -> dict[str, list[Path]]:
    """By format, the files that are called as its are, where the first with a row has its columns."""
    named = {}
    paths = [(file, _name(file)) for file in files]
    for form in FORMATS:
        matching = [file for file, name in paths if form.file is not None and form.file.search(name)]
        first = next(((f, row) for f in matching if (row := first_row(f)) is not None), None)
        if first is not None and form.takes(*first, config):
            named[form.name] = matching
    return named


def _by_columns(files: Sequence[Path], config: ImportConfig) -> tuple[dict[str, list[Path]], list[Path], list[Path]]:
    """By format, the files whose first row has its columns; where a single one has files, the others; the empty ones.

    Every file is opened once, and no row is kept.
    """
    found: dict[str, list[Path]] = {}
    fitting: list[tuple[Path, list[str]]] = []
    empty = []
    for file in files:
        row = first_row(file)
        if row is None:
            empty.append(file)
            continue
        names = [form.name for form in FORMATS if form.takes(file, row, config)]
        fitting.append((file, names))
        for name in names:
            found.setdefault(name, []).append(file)
    return found, [file for file, names in fitting if not names], empty


def _name(file: Path) -> str:
    """The path by which a trainer's files are known, however they are compressed."""
    return (_resolved(file.parent) / bare(file).name).as_posix()


@cache
def _resolved(folder: Path) -> Path:
    return folder.resolve()


def _counted(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts numbers in a path as numbers: 2.jsonl comes before 10.jsonl."""
    parts = re.split(r"(\d+)", path.as_posix())
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _ordered(
    form: Format, files: Sequence[Path], path: Path, config: ImportConfig
) -> tuple[Format, list[LogFile], list[str]]:
    found, notes = [], []
    if form.validates is not None:
        apart = {file.parent for file in files if form.validates(file)}
        if 0 < len(apart) < len({file.parent for file in files}):
            left = [file for file in files if file.parent in apart]
            files = [file for file in files if file.parent not in apart]
            notes.append(
                f"{len(left):,} files of {', '.join(sorted(folder.name for folder in apart))} are a validation's and "
                "stay apart: give that folder to read them"
            )
    subsets: Counter[str] = Counter()
    for file in files:
        match = form.file.search(_name(file)) if form.file is not None else None
        parts = {} if match is None else match.groupdict()
        if parts.get("subset") is not None:
            subsets[parts["subset"]] += 1
            if parts["subset"] != config.subset and not path.is_file():
                continue
        step = parts.get("step")
        run = config.run or parts.get("run") or run_folder(file.parent).name or "run"
        found.append(LogFile(file, run, None if step is None else int(step)))
    if not found:
        raise TsaeError(
            f"holds no {config.subset}, but {', '.join(subsets)}",
            where=path,
            fix=f"Say --subset {next(iter(subsets))}.",
        )
    found.sort(key=lambda f: (f.run, -1 if f.step is None else f.step, _counted(f.path)))
    if form.a_file_a_step:
        for a, b in pairwise(found):
            if a.step is not None and (a.run, a.step) == (b.run, b.step):
                raise TsaeError(
                    f"step {a.step} of run {a.run} is here and in {a.path}",
                    where=b.path,
                    fix="Give the folder of one of them.",
                )
    refuse_copies(found)
    return form, found, [*notes, *leftovers(found)]
