"""Whose log is it? Recognised by the names of its files and the columns of their first rows.

For an unknown log, `suggest` names the columns by what they are called, and tries them on its first rows.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import islice, pairwise, product
from pathlib import Path
from shlex import quote

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.known_logs import KNOWN
from tsae.rollouts.logs.adapters import TABLES, Format
from tsae.rollouts.logs.entry import Entry, Row, some_of, writable
from tsae.rollouts.logs.log_files import (
    LogFile,
    NoLog,
    find_files,
    first_row,
    leave_copies,
    leave_held_out,
    leftovers,
    name_runs,
    run_folder,
)
from tsae.rollouts.logs.readers import bare, grows, kind_of
from tsae.rollouts.rewards import outcome_reward
from tsae.rollouts.trainers import plain, token_logs

_MODULES = {known.module: import_module(f"tsae.rollouts.trainers.{known.module}") for known in KNOWN}
_FOUND = {form.name: form for module in _MODULES.values() for form in vars(module).values() if isinstance(form, Format)}
_BY_NAME = {name: _FOUND[name] for known in KNOWN for name in known.formats}
FORMATS = tuple(_BY_NAME.values())
"""In the order in which they are tried."""

_SHOWN = 40


def find_log(
    path: Path, config: ImportConfig, only: Mapping[Path, int] | None = None
) -> tuple[Format, list[LogFile], list[str]]:
    """The format of a log, its files by run and step, and notes about them.

    Args:
        path: of the log.
        config: of the import.
        only: the files that count, and how many bytes of each: JSON lines are read up to there. By default all of them.

    Raises:
        TsaeError: if no format fits, several do, or files disagree.
    """
    form, found, notes = _find_log(path, config, find_files(path, only))
    if only is not None:
        found = [replace(file, stop=only[file.path]) if grows(file.path) else file for file in found]
    return form, found, notes


def _find_log(path: Path, config: ImportConfig, files: Sequence[Path]) -> tuple[Format, list[LogFile], list[str]]:
    if config.format != "auto":
        chosen = _BY_NAME[config.format]
        if path.is_file() and kind_of(path) not in chosen.suffixes:
            what = f"{chosen.files.title} are {' or '.join(chosen.suffixes)} files, and this file is not"
            fix = "Name its columns (--format plain --column response=NAME …), or leave --format out."
            raise TsaeError(what, where=path, fix=fix)
        matching = [f for f in files if chosen.named(_name(f))]
        # One file, or files with other names than the trainer's, are what the user says.
        matching = matching or list(files)
        return _ordered(chosen, [f for f in matching if kind_of(f) in TABLES] or matching, path, config)
    unknown, notes = None, list[str]()
    # Other trainers keep evaluations and tensors beside their logs. These are read only if there is no log.
    for tables in (True, False):
        group = [file for file in files if (kind_of(file) in TABLES) == tables]
        named, others, empty = _by_name(group, config), list[Path](), list[Path]()
        if not named:
            named, others, empty = _by_columns(group, config)
            unknown = unknown or next(iter(others), None)
        if named:
            break
    if len(named) > 1 and (own := named.get(token_logs.TSAE.name)):
        # The trainer's own log of the same run holds less of it.
        runs = {_resolved(file.parent).parents[1] for file in own}
        beside = [f for files in named.values() for f in files if f not in own and _resolved(f.parent).parent in runs]
        named = {name: left for name, files in named.items() if (left := [f for f in files if f not in beside])}
        notes += [f"the trainer's own log of the run, such as {file}, is not read" for file in beside[:1]]
    if len(named) > 1:
        shown = "; ".join(f"{name} ({fs[0].name}{', …' if len(fs) > 1 else ''})" for name, fs in named.items())
        what = f"may be a log of several formats: {shown}"
        fix = f"Say which with --format {' or '.join(named)}, or give the folder of one log."
        raise TsaeError(what, where=path, fix=fix)
    if not named:
        if unknown is None:
            raise TsaeError("holds no trajectories", where=path, fix="Give a log with at least one row.")
        error = _unknown_columns(path, unknown, first_row(unknown) or {}, config)
        # There may be no log yet where other tables are.
        raise error if path.is_file() or kind_of(unknown) in TABLES else NoLog(error.what, where=unknown, fix=error.fix)
    ((name, matching),) = named.items()
    chosen = _BY_NAME[name]
    if others and not tables:
        shown = some_of((file.name for file in others), 3)
        notes += [f"{len(others):,} files have other columns than a {chosen.files.title}, and are left out: {shown}"]
    elif others:  # The files were recognised by their columns, and some have other columns.
        raise TsaeError(
            f"has not the columns of a {chosen.files.title}, as the other files have; its columns are "
            f"{', '.join(first_row(others[0]) or {})}",
            where=others[0],
            fix="Move it out of the folder.",
        )
    form, found, more = _ordered(chosen, matching + empty, path, config)
    return form, found, [*notes, *more]


def _by_name(files: Sequence[Path], config: ImportConfig) -> dict[str, list[Path]]:
    """By format, the files whose names match, if the first with a row has the format's columns."""
    named = {}
    paths = [(file, _name(file)) for file in files]
    for form in FORMATS:
        matching = [file for file, name in paths if form.named(name)]
        first = next(((f, row) for f in matching if (row := first_row(f)) is not None), None)
        if first is not None and form.takes(*first, config):
            named[form.name] = matching
    return named


def _by_columns(files: Sequence[Path], config: ImportConfig) -> tuple[dict[str, list[Path]], list[Path], list[Path]]:
    """By format, the files whose first row has its columns; the files that no format fits; the empty files.

    Every file is opened once, and no row is kept.
    """
    found: dict[str, list[Path]] = {}
    unknown, empty = list[Path](), list[Path]()
    for file in files:
        row = first_row(file)
        if row is None:
            empty.append(file)
            continue
        names = [form.name for form in FORMATS if form.takes(file, row, config)]
        for name in names:
            found.setdefault(name, []).append(file)
        if not names:
            unknown.append(file)
    return found, unknown, empty


def _unknown_columns(path: Path, file: Path, row: Row, config: ImportConfig) -> TsaeError:
    """The error for a log of unknown columns: what it has, and how to name what is needed.

    Args:
        path: the log as it was given.
        file: the first of its files that has rows.
        row: its first row.
        config: of the import.
    """
    options, tried = suggest(LogFile(file, ""), config)
    example = "for example" + f" (tried on {tried:,} of its rows)" * bool(tried)
    return TsaeError(
        f"no known log has the columns {some_of(row, _SHOWN)}; known are {', '.join(_BY_NAME)}",
        where=file,
        fix=f"Name the columns, {example}: tsae rollouts import {quote(str(path))} {' '.join(options)}. "
        "In Python, tsae.Rollouts.read takes any DataFrame.",
    )


def _name(file: Path) -> str:
    """The path that identifies a trainer's file, however it is compressed."""
    return (_resolved(file.parent) / bare(file).name).as_posix()


@cache
def _resolved(folder: Path) -> Path:
    return folder.resolve()


def _counted(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts numbers in a path as numbers: 2.jsonl comes before 10.jsonl."""
    parts = re.split(r"(\d+)", path.as_posix())
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _without_replaced(found: list[LogFile], runs: set[str]) -> tuple[list[LogFile], str]:
    """The files without those that a later folder replaces, and a note.

    A folder replaces the steps from its first one on in the earlier folders of its run: the run resumed there.
    """
    first, kept = dict[str, int](), set[Path]()
    for file in sorted(found, key=lambda f: (_counted(f.path.parent), f.step or 0), reverse=True):
        if file.step is None or file.run not in runs:
            kept.add(file.path)
        elif file.step < first.get(file.run, file.step + 1):
            kept.add(file.path)
            first[file.run] = file.step
    left = [file for file in found if file.path in kept]
    return left, f"files left out, because a later folder replaces their steps: {len(found) - len(left):,}"


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
    folders: defaultdict[str, dict[Path, Path]] = defaultdict(dict)  # of the run of each file, by its name
    for file in files:
        parts = match.groupdict() if (match := form.named(_name(file))) else {}
        if parts.get("subset") is not None:
            subsets[parts["subset"]] += 1
            if parts["subset"] != config.subset and not path.is_file():
                continue
        step = parts.get("step")
        named = parts.get("run")
        folder = Path(match.string[: match.end("run")]) if match and named else run_folder(file.parent)
        run = writable(config.run or named or folder.name or "run")
        folders[run][file] = folder
        found.append(LogFile(file, run, None if step is None else int(step)))
    if not found:
        what = f"holds no {config.subset}, but {', '.join(subsets)}"
        raise TsaeError(what, where=path, fix=f"Say --subset {next(iter(subsets))}.")
    if config.run is None:
        found, renamed = name_runs(found, folders)
        notes += renamed
    found, held_out = leave_held_out(found, path)
    notes += held_out
    found.sort(key=lambda f: (f.run, -1 if f.step is None else f.step, _counted(f.path)))
    if form.files.a_file_a_step:
        twice = [(a, b) for a, b in pairwise(found) if a.step is not None and (a.run, a.step) == (b.run, b.step)]
        if twice and "repeated" not in config.skip:
            a, b = twice[0]
            what = f"step {a.step} of run {a.run} is here and in {a.path}"
            fix = "Give the folder of one of them; if the later one resumed the other, --skip repeated reads both."
            raise TsaeError(what, where=b.path, fix=fix)
        if twice:
            found, left_out = _without_replaced(found, {b.run for _, b in twice})
            notes.append(left_out)
    runs = list(dict.fromkeys(file.run for file in found))
    if len(runs) > 1 and all(run.startswith(("run-", "offline-run-")) for run in runs):
        notes.append(f"{len(runs)} runs of wandb: if they are one training that was resumed, say --run NAME")
    found, copies = leave_copies(found)
    several = len({file.run for file in found}) > 1
    found = [replace(file, several=several) for file in found]
    return form, found, [*notes, *copies, *form.notes(found), *leftovers(found)]


TRIED = 256
"""Rows."""
# Usual names, the most telling first. Of prompt, response, reward and correct, a word of a longer name counts too.
_NAMES = {
    "prompt": "prompt question problem query instruction input messages task",
    "response": "response completion model_output model_answer output generated generation generations "
    "prediction predict pred",
    "reward": "reward score rewards total_reward return acc accuracy",
    "correct": "is_correct correct correctness passed success solved right acc accuracy",
    "answer": "ground_truth answer gold target reference reference_answer label solution gts gt expected",
    "problem_id": "example_id question_id prompt_id task_id problem prompt_hash unique_id uid qid id index idx",
    "step": "global_step training_step train_step step iteration",
    "policy": "checkpoint ckpt policy_id model model_name model_id",
    "advantage": "advantages adv",
    "finish_reason": "finish stop_reason",
    "level": "difficulty",
    "prompt_ids": "prompt_ids prompt_token_ids prompt_tokens",
    "response_ids": "response_ids completion_ids response_token_ids completion_token_ids output_ids response_tokens",
    "response_mask": "completion_mask loss_mask",
}
_PERHAPS = {"response": ("answer", "text")}
"""Names that as often hold something else, such as a reference answer, or prompt and response."""
_BY_WORD = ("prompt", "response", "reward", "correct")
_ABOUT = re.compile("hash|ids?|idx|index|len|length|tokens?|count|num|n|mean|std|mask|logprobs?|time|name")
"""Words of names for something about a prompt or reward."""


def suggest(file: LogFile, config: ImportConfig) -> tuple[list[str], int]:
    """Options that name a log's columns, and the number of rows on which they were tried; 0 if no columns were found.

    Args:
        file: of the log.
        config: of the import; the columns that it names, and that are there, stay.
    """
    rows = [row for _, row in islice(file.rows(), TRIED)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    told = {field: name for field in _NAMES if (name := getattr(config.columns, field)) in names}
    found = {field: name for field, name in told.items() if field in _BY_WORD}
    tried = (
        {**found, **dict(zip(fields, pair, strict=True))}
        for fields in (("prompt", "response"), ("prompt_ids", "response_ids"))
        for pair in product(*(_candidates(field, names, found) for field in fields))
    )
    text, entries = next(((text, read) for text in tried if (read := _entries(file, config, text))), ({}, []))
    if not entries:
        return [f"--column {field}=NAME" for field in ("prompt", "response") if field not in told], 0
    found = text | {field: name for field, name in told.items() if name not in text.values()}
    for field in _NAMES:
        # One model's name for all steps would make one policy of them.
        known = field in found or (field == "policy" and "step" in found)
        for name in () if known else _candidates(field, names, found):
            read = _entries(file, config, {**found, field: name})
            if read and _tells(field, name, rows, read):
                found[field] = name
                break
    others = {name for field, name in found.items() if field != "reward"}
    # Beside a total its parts would count twice.
    total = "_".join(_words(found.get("reward", ""))) in _NAMES["reward"].split()
    several = [name for name in names if name not in others and "reward" in _words(name) and not total]
    rewards = several if len(several) > 1 and _scores(file, config, found, several) else []
    options = [
        "--column " + quote(f"{field}={found[field]}")
        for field in _NAMES
        if field in found and found[field] != getattr(config.columns, field) and not (rewards and field == "reward")
    ]
    options += ["--rewards " + " ".join(map(quote, rewards))] * bool(rewards)
    return options + ["--skip empty"] * any(entry.response == "" for entry in entries), len(rows)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _candidates(field: str, names: Sequence[str], found: dict[str, str]) -> list[str]:
    """Columns that may hold a field, the likeliest first; the one that is known, if there is one."""
    if field in found:
        return [found[field]]
    usual = _NAMES[field].split()
    free = [name for name in names if name not in found.values()]
    exact = [name for like in usual for name in free if "_".join(_words(name)) == like]
    if field not in _BY_WORD:
        return exact
    itself = [name for name in free if not any(map(_ABOUT.fullmatch, _words(name)))]
    words = (name for like in usual for name in itself if like in _words(name))
    perhaps = [name for like in _PERHAPS.get(field, ()) for name in itself if like in _words(name)]
    return list(dict.fromkeys([*exact, *words, *sorted(perhaps, key=lambda name: len(_words(name)))]))


def _entries(file: LogFile, config: ImportConfig, found: dict[str, str], rewards: tuple[str, ...] = ()) -> list[Entry]:
    """What the first rows say with these columns; nothing if they cannot be read so."""
    if len(set(found.values())) < len(found):
        return []
    named = replace(config, format="plain", columns=replace(config.columns, **found), rewards=rewards or config.rewards)
    try:
        return [entry for entry in islice(plain.FORMAT.read(file, named), TRIED) if isinstance(entry, Entry)]
    except TsaeError:
        return []


def _tells(field: str, name: str, rows: Sequence[Row], entries: Sequence[Entry]) -> bool:
    """Whether what a column holds is what the field means, beside being readable."""
    if field == "problem_id":  # The number of a row is not the id of a problem.
        pairs = {(entry.problem_id, str(entry.prompt)) for entry in entries}
        one_each = len(pairs) == len({id for id, _ in pairs}) == len({prompt for _, prompt in pairs})
        return one_each and (len(pairs) < len(entries) or "id" not in (name, *_words(name)[:1]))
    if field == "finish_reason":
        return any(entry.finish_reason is not None for entry in entries)
    if field == "reward":  # A flag is not a reward.
        return not all(isinstance(row.get(name), bool) for row in rows)
    return field != "correct" or any(entry.correct is not None for entry in entries)


def _scores(file: LogFile, config: ImportConfig, found: dict[str, str], names: Sequence[str]) -> bool:
    """Whether these columns are rewards, and the outcome is known beside their sum."""
    entries = _entries(file, config, {field: name for field, name in found.items() if field != "reward"}, tuple(names))
    try:
        return bool(entries) and ("correct" in found or bool(outcome_reward(names)))
    except TsaeError:
        return False
