"""Inject random faults into tsae, and see whether it reports them: none may become a plausible number.

Small real artefacts are made twice, for two runs: checkpoints, an adapter, a trainer's folder, rollouts, store, SAE,
features, diff, causal test, attribution, credit, the folder of `tsae run`. Then every case is drawn from its number and
the seed alone, and runs the real command in a process of its own. `KINDS` has the kinds of cases:

- damaged: one file of one artefact is changed (`DAMAGES`), an artefact is exchanged with that of the other run, or all
  inputs are read-only. A command that reads the artefact follows, or the one that wrote it;
- log: one to three places of a trainer's log are changed, and it is imported;
- command: one or two options of a valid command line get a value that nobody means, or options from the command's own
  parser are added, or a command is put together from its parser alone;
- fault: a command that writes meets one of `FAULTS`. Then the same command is given again;
- kill: only the faults that kill, the command or one of its workers (only with `--only kill`);
- numbers: models and data with nothing to find or with numbers that cannot be (`NUMBERS`); every stage follows;
- text: rollouts with hostile text, whose page is opened in a browser, and whose terminal output is looked at.

A case is good if the command ends well with the results of the undamaged artefacts, or if it ends with exit code 2 and
one paragraph, and no file that it did not write is changed. Of a changed checkpoint, problem file, trainer's folder or
log nobody knows what it held: results may differ where no other artefact remembers it. A finished result that is
damaged may stay as it is if the commands that read it refuse it. After a fault the same command must end with the same
bytes as if there had been none, and leave nothing behind.

    python scripts/torture.py --cases 200 --seed 1
    python scripts/torture.py --seed 1 --case 37          # one of them again
    python scripts/torture.py --each remove               # every file of every artefact, for each command that reads it

Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from fault_injection import artefacts, process
from fault_injection.commands import ARTEFACTS, BY_NAME, READERS, SITE, STAGES, WRITERS, Stage
from fault_injection.inputs import Found, Rng, bad_numbers, changed_log, hostile_text, pick

from tsae import cli

# --- damaged artefacts

DAMAGES = ("flip", "zeros", "cut", "empty", "remove", "exchange", "folder", "link", "outside", "rename", "double",
           "of another run", "version", "value")  # fmt: skip
_JSON_VALUES: tuple[Any, ...] = (None, -1, 0, 1, 3, 10**9, 0.5, "x", "", "../elsewhere", [], {}, True)


def damage(how: str, file: Path, other: Path, strange: Path, elsewhere: Path, rng: Rng) -> None:
    """Change a file in one of the ways of `DAMAGES`.

    It may be exchanged with another file of its artefact, or with the same file of another run, which need not exist.
    """
    whole = bytearray(file.read_bytes())
    place = int(rng.integers(0, max(len(whole), 1)))
    page = slice(place // 4096 * 4096, place // 4096 * 4096 + 4096)
    if how in ("flip", "zeros", "cut", "empty"):
        if how == "flip" and whole:
            whole[place] ^= 1 << int(rng.integers(0, 8))
        elif how == "zeros":
            whole[page] = bytes(len(whole[page]))
        file.write_bytes(whole[:place] if how == "cut" else b"" if how == "empty" else whole)
    elif how == "exchange":
        file.write_bytes(other.read_bytes())
        other.write_bytes(whole)
    elif how == "rename":
        file.rename(file.with_name(pick(rng, [f"{file.name}.old", f"old-{file.name}", f"00099{file.suffix}"])))
    elif how == "double":
        shutil.copy(file, file.with_name(f"old-{file.name}"))
    elif how == "of another run":
        if strange.is_file() and strange != file:  # another table of rollouts is as good
            shutil.copy(strange, file)
    elif how in ("version", "value"):
        _change_json(file, rng, ("version", "format", "written_by") if how == "version" else ("",))
    else:
        shutil.move(file, elsewhere) if how == "outside" else file.unlink()
        if how == "folder":
            file.mkdir()
        elif how != "remove":
            file.symlink_to(elsewhere if how == "outside" else file.parent / "nowhere")


def _change_json(file: Path, rng: Rng, names: tuple[str, ...]) -> None:
    """Change a value of a JSON file whose name holds one of these words, or cut a file that holds no such value."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        holder, key = pick(rng, list(_places(content, names)))
    except (ValueError, RecursionError):
        file.write_bytes(file.read_bytes()[:-2])  # more than the last newline
    else:
        holder[key] = pick(rng, _JSON_VALUES) if names == ("",) else f"9{holder[key]}"
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _places(content: Any, names: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Every (object or list, key) in a JSON value whose key holds one of the names."""
    keys = list(content) if isinstance(content, dict) else [*range(len(content))] if isinstance(content, list) else []
    found = [(content, key) for key in keys if any(name in str(key) for name in names)]
    return found + [place for key in keys for place in _places(content[key], names)]


@dataclass(frozen=True)
class Place:
    """A file of an artefact, and the command that follows once it is damaged."""

    stage: Stage
    file: str
    """Its path, relative to the folder of the case."""
    again: bool = False
    """Whether it is of the results of the command, which finds them."""


def places(made: Path) -> list[Place]:
    """Every file of every artefact, with each command that reads it and the one that wrote it."""
    read = [
        Place(stage, name if (made / whole).is_file() else f"{name}/{file}")
        for stage in READERS
        for name in stage.reads
        for whole in [stage.begun if name.startswith("out/") else name]
        for file in _files(made / whole)
    ]
    return read + [Place(s, f"out/{file}", True) for s in WRITERS for file in _files(made / f"expected-{s.name}")]


def _files(whole: Path) -> list[str]:
    """Files of an artefact, relative to it: "." for a file. The page of an analysis stays as it is."""
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != "report.html"]
    return sorted(path.relative_to(whole).as_posix() for path in files) if whole.is_dir() else ["."]


def damaged_at(place: Place, how: str, rng: Rng, made: Path, here: Path) -> Found:
    """This damage to one file."""
    _lay_out(place.stage, made, here, again=place.again)
    parts = Path(place.file).parts[: 2 if place.file.startswith("out/") else 1]
    return _after(place.stage, here.joinpath(*parts), rng, made, here, place.again, here / place.file, how)


def damaged(rng: Rng, made: Path, here: Path) -> Found:
    """A drawn damage, an artefact of another run, or read-only inputs."""
    again = rng.random() < 0.2
    stage = pick(rng, WRITERS if again else READERS)
    _lay_out(stage, made, here, again=again)
    if again:
        results = sorted(path for path in (here / "out").iterdir() if path.name[0] != ".")
        return _after(stage, pick(rng, results), rng, made, here, again)
    whole = here / pick(rng, stage.reads)
    if stage.bound and rng.random() < 0.15:
        name = pick(rng, stage.bound.split())
        shutil.rmtree(here / name) if (here / name).is_dir() else (here / name).unlink()
        artefacts.copy(made / "other" / name, here / name)
        return f"{stage.name}: {name} of another run", _followed(stage, name, made, here)
    if not stage.begun and rng.random() < 0.05:
        for path in [here, *here.rglob("*")]:
            if path != here / "out":
                path.chmod(0o555 if path.is_dir() else 0o444)
        return f"{stage.name}: read-only inputs", _followed(stage, whole.name, made, here, humble=True)
    return _after(stage, whole, rng, made, here, again)


def _lay_out(stage: Stage, made: Path, here: Path, *, again: bool) -> None:
    """Copy what a command reads, and the results that it makes of it where it finds them."""
    artefacts.lay_out(stage, made, here)
    if again:
        artefacts.copy(made / f"expected-{stage.name}", here / "out")


def _after(
    stage: Stage, whole: Path, rng: Rng, made: Path, here: Path, again: bool, file: Path | None = None, how: str = ""
) -> Found:
    """Damage a file of an artefact, and run the command. Which file, and how, is drawn where it is not given."""
    readers = [words for folder in (here / "out").rglob("*") for words in _reading(folder)] if again else []
    files = [whole / name for name in _files(whole)]
    file, how = file or pick(rng, files), how or pick(rng, DAMAGES)
    alike = [p for p in files if p != file and p.suffix == file.suffix] or files
    strange = made / "other" / whole.name
    same = strange / file.relative_to(whole) if whole.is_dir() else file
    what = f"{how} {file.relative_to(here)}"
    damage(how, file, pick(rng, alike), same, here / "elsewhere", rng)
    if again:
        return f"{stage.name} again: {what}", _found_again(stage, made, here, readers)
    return f"{stage.name}: {what}", _followed(stage, whole.name, made, here)


def _followed(stage: Stage, name: str, made: Path, here: Path, *, humble: bool = False) -> str:
    """What is bad of a command that reads a damaged artefact of this name."""
    ended, wrong = artefacts.watched(stage.command, here, humble=humble)
    if wrong or ended is None:
        return wrong
    if ended.returncode:
        return f"read-only inputs are refused: {ended.stderr.strip()[-300:]}" if humble else ""
    if name in stage.open.split():
        return ""
    expected = made / f"expected-{stage.name}"
    return artefacts.difference(here / "out", expected, extra=bool(stage.begun), pattern=stage.compared)


def _found_again(stage: Stage, made: Path, here: Path, readers: list[tuple[str, ...]]) -> str:
    """What is bad of a command that finds its results damaged, and of those that read them."""
    ended, wrong = artefacts.watched(stage.command, here)
    if not wrong and ended is not None and ended.returncode == 0:
        wrong = artefacts.difference(here / "out", made / f"expected-{stage.name}", extra=True)
    if wrong.startswith("silently different"):  # what is finished may stay as it is, if its readers refuse it
        ends = [artefacts.watched(words, here, elsewhere=True) for words in readers]
        bad = [bad for _, bad in ends if bad]
        if bad or any(ended is not None and ended.returncode == 2 for ended, _ in ends):
            wrong = ", ".join(bad)
    return wrong


def _reading(folder: Path) -> list[tuple[str, ...]]:
    """A command that reads all of a folder, if it is an artefact."""
    to = f"read-{folder.name}"
    known = {
        "manifest.json": ("verify", str(folder)),
        "sae.safetensors": ("export", "--sae", str(folder), "--to", to),
        "features.json": ("reinforcement", "--features", str(folder), "--n-permutations", "10", "--to", to),
        "diff.json": ("report", "--diff", str(folder), "--to", f"{to}.html"),
    }
    return [words for name, words in known.items() if (folder / name).is_file()]


# --- nonsense on the command line

NONSENSE = ("-1", "0", "1e18", "999999999999", "nan", "x", "", "\u202e", "-", "missing/file", "/dev/null",
            "raw.parquet", "acts", "out", ".", "precious.txt", "precious.json", "precious.parquet")  # fmt: skip
_POSSIBLE = ("0", "1", "2", "3", "0.5", "base", "hard-100", SITE, "tsae.testbed.annotate:verify", "os:getcwd", "1/2",
             "series/base", "out/more", *ARTEFACTS)  # fmt: skip
_NOT_DRAWN = {"--executor", "--ray", "--server.url", "--open", "--training.log-to", "--log-to"}
"""Options that ask others: a cluster, a server, a browser."""


def odd_command(rng: Rng, made: Path, here: Path) -> Found:
    """A command line with nonsense, with more options, or invented."""
    command, how = pick(rng, STAGES).command, rng.random()
    command = disturb(rng, command) if how < 0.4 else add_options(rng, command) if how < 0.8 else invent(rng)
    for name in ARTEFACTS:
        if any(word.split("/")[0] == name for word in command):
            artefacts.copy(made / name, here / name)
    (here / "out").mkdir()
    for name in ("precious.txt", "precious.json", "precious.parquet"):
        (here / name).write_text('{"precious": 1}')
    return f"tsae {' '.join(map(repr, command))}", artefacts.watched(command, here, elsewhere=True)[1]


def disturb(rng: Rng, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one or two values exchanged for nonsense."""
    words = list(command)
    values = [i for i, word in enumerate(words) if i and words[i - 1].startswith("--")]
    for place in rng.permutation(values)[: rng.integers(1, 3)].tolist():
        words[place] = pick(rng, NONSENSE)
    return tuple(words)


@cache
def commands() -> Mapping[tuple[str, ...], argparse.ArgumentParser]:
    """Every command of the command line, by its words."""
    with warnings.catch_warnings():  # tyro wants to drop it, and has nothing in its place
        warnings.simplefilter("ignore", DeprecationWarning)
        whole: Any = tyro.extras.get_parser(cli.Command)
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    left: list[tuple[tuple[str, ...], argparse.ArgumentParser]] = [((), whole)]
    while left:
        words, parser = left.pop()
        below = next((dict(a.choices) for a in parser._actions if isinstance(a.choices, Mapping)), {})
        left += [((*words, name), one) for name, one in below.items()]
        if not below:
            found[words] = parser
    return dict(sorted(found.items()))


def options_of(command: Sequence[str]) -> list[argparse.Action]:
    """The options of a command line's command."""
    words = next(words for words in commands() if tuple(command[: len(words)]) == words)
    options = [a for a in commands()[words]._actions if a.option_strings and a.dest != "help"]
    return [a for a in options if not _NOT_DRAWN & {*a.option_strings}]


def _option(rng: Rng, action: argparse.Action) -> list[str]:
    """An option with a possible choice, a small number, an artefact, or nonsense."""
    words = list(action.option_strings[:1])
    if action.nargs == 0:
        return words
    choices = [str(choice) for choice in action.choices or _POSSIBLE]
    wanted = action.nargs if isinstance(action.nargs, int) else 2 if action.nargs in ("*", "+") else 1
    for _ in range(wanted if rng.random() < 0.7 else 1):
        words.append(pick(rng, choices if rng.random() < 0.7 else NONSENSE))
    return words


def add_options(rng: Rng, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one to three more options."""
    possible = [action for action in options_of(command) if action.option_strings[0] not in command]
    chosen = rng.permutation(len(possible))[: rng.integers(1, 4)].tolist()
    return (*command, *(word for place in chosen for word in _option(rng, possible[place])))


def invent(rng: Rng) -> tuple[str, ...]:
    """A command with all that it requires, and some options, each with a value drawn."""
    words = pick(rng, [words for words in commands() if words != ("demo",)])  # the demo takes minutes
    found = [*words, *(["--once"] if words == ("watch",) else [])]  # else it waits for ever, as it should
    for action in commands()[words]._actions:
        if not action.option_strings:
            found.append(pick(rng, [str(c) for c in action.choices or ARTEFACTS]))
        elif action.dest == "to" and rng.random() < 0.8:
            found += [action.option_strings[0], f"out/{pick(rng, ['made', 'made.parquet', 'made.html', 'made.jsonl'])}"]
        elif action.required and action.dest != "help":
            found += _option(rng, action)
    return add_options(rng, found) if rng.random() < 0.7 and options_of(found) else tuple(found)


# --- faults while a command writes

KILLS = (*("kill", "kill later", "kill twice") * 3, "kill worker")
FAULTS = ("kill", "kill later", "kill twice", "kill worker", "int", "term", "full", "size", "files", "memory", "two",
          "clock", "reader")  # fmt: skip


def kill(rng: Rng, made: Path, here: Path) -> Found:
    """As `fault`, but for kills alone."""
    return fault(rng, made, here, KILLS)


def fault(rng: Rng, made: Path, here: Path, kinds: tuple[str, ...] = FAULTS) -> Found:
    """A command is stopped or starved while it writes, and given again afterwards."""
    stage, kind = pick(rng, WRITERS), pick(rng, kinds)
    if kind == "kill worker":
        stage = pick(rng, [stage for stage in WRITERS if "--workers" in stage.command])
    elif kind == "reader":
        stage = BY_NAME[pick(rng, ("capture", "encode"))]
    moments, seconds, _ = json.loads((made / "writes.json").read_text())[stage.name]
    artefacts.lay_out(stage, made, here)
    if kind in ("two", "reader"):
        after = float(rng.uniform(0.3, 1.0)) * seconds
        wrong = _two(stage, here) if kind == "two" else _read_early(stage, after, here)
        return f"{stage.name}: {kind} (after {after:.1f} s)", wrong or _again(stage, made, here)
    said = []
    for _ in range(2 if kind == "kill twice" else 1):
        what, when = kind.split()[0].replace("clock", "kill"), int(rng.integers(moments))
        limits = {"size": int(2 ** rng.uniform(4, 18)), "files": int(rng.integers(0, 8)),
                  "memory": int(2 ** rng.uniform(16, 28))}  # fmt: skip
        if kind == "size":
            process.afresh(True)  # whose words go through pipes, which have no size
        if kind in ("kill later", "kill worker"):
            after = float(rng.uniform(0.1, 1.1)) * seconds
            said.append(f"{'a worker ' if kind == 'kill worker' else ''}killed after {after:.1f} s")
            wrong = _killed_at(stage, after, here, rng if kind == "kill worker" else None)
        else:
            what = f"{what}-{limits[what]}" if what in limits else what
            said.append(f"{what} at moment {when} of {moments}")
            ended, wrong = artefacts.watched(stage.command, here, {"FAULT": f"{what}:{when}:{here / 'out'}"})
            if ended is not None and _as_expected(what, ended):
                wrong = ""
        if wrong:
            return f"{stage.name}: {', '.join(said)}", wrong
    if kind == "clock":
        for path in (here / "out").rglob("*"):
            os.utime(path, (time.time() + 86_400,) * 2)
        said.append("then the clock set back by a day")
    return f"{stage.name}: {', '.join(said)}", _again(stage, made, here)


def _as_expected(what: str, ended: subprocess.CompletedProcess[str]) -> bool:
    """Whether a disturbed command ended as such a disturbance makes it end."""
    # Native code ends the process where it gets no memory: by a signal, or OpenBLAS with a word of its own.
    gave_up = ended.returncode < 0 or (ended.returncode == 1 and "OpenBLAS error: Memory allocation" in ended.stderr)
    quiet = "Traceback" not in ended.stderr
    known = {"kill": True, "int": ended.returncode == 130 and quiet, "term": ended.returncode in (-15, 143)}
    return known.get(what, what.startswith("memory") and quiet and gave_up)


def _again(stage: Stage, made: Path, here: Path) -> str:
    """What is bad of the same command, undisturbed."""
    ended, wrong = artefacts.watched(stage.command, here)
    if wrong or ended is None:
        return f"again: {wrong}"
    if ended.returncode:
        return f"again: refused: {ended.stderr.strip()[-300:]}"
    left = [path.name for path in (here / "out").rglob("*") if path.name.endswith((".tmp", ".lock"))]
    if left:
        return f"again: leaves {', '.join(left)}"
    artefacts.clear_words(here / "out")
    return artefacts.difference(here / "out", made / f"expected-{stage.name}")


def _ended(started: process.Process, stage: Stage) -> str:
    """What is bad of how a command ends that was started."""
    try:
        out, err = started.communicate(timeout=process.limit(stage.command))
    except subprocess.TimeoutExpired:
        process.end(started)
        return "takes too long"
    return artefacts.unusual_end(subprocess.CompletedProcess(started.args, started.returncode or 0, out, err))


def _killed_at(stage: Stage, seconds: float, here: Path, rng: Rng | None) -> str:
    """Kill a command after some time, or one of its workers if there is a generator that draws it."""
    started = process.start(stage.command, here)
    try:
        started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if rng is None:
            process.end(started)
            return ""
    if started.returncode is not None:
        return ""
    if rng is not None and (workers := process.started_by(started.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pick(rng, workers), signal.SIGKILL)
    return _ended(started, stage)


def _two(stage: Stage, here: Path) -> str:
    """Start a command twice at once."""
    both = [process.start(stage.command, here) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda started: _ended(started, stage), both))
    return next(filter(None, ends), "")


def _read_early(stage: Stage, seconds: float, here: Path) -> str:
    """Read what a command has written before it has ended."""
    words = (
        "store show out/acts"
        if stage.name == "capture"
        else "reinforcement --features out/features --n-permutations 10"
    )
    reader = [*words.split(), "--json", "out/shown.json"]
    started = process.start(stage.command, here)
    time.sleep(seconds)
    ended, wrong = artefacts.watched(reader, here)
    _, err = started.communicate(timeout=process.limit(stage.command))
    shown = here / "out/shown.json"
    if not wrong and started.returncode:
        wrong = f"a reader stops the writer: {err[-200:]}"
    if not wrong and ended is not None and ended.returncode == 0:
        early = shown.read_bytes()
        process.run(reader, here)
        # Of a store that is being captured, its state is shown: it says that it is not complete.
        same = shown.read_bytes() == early or json.loads(early).get("complete") is False
        wrong = "" if same else "read early, other results"
    shown.unlink(missing_ok=True)
    return wrong


# --- the campaign

KINDS: dict[str, tuple[Callable[[Rng, Path, Path], Found], float]] = {
    "damaged": (damaged, 0.3), "log": (changed_log, 0.24), "command": (odd_command, 0.24), "fault": (fault, 0.14),
    "kill": (kill, 0.0), "numbers": (bad_numbers, 0.04), "text": (hostile_text, 0.04),
}  # fmt: skip
"""Of each kind what attempts it, and its share of the cases."""


@dataclass(frozen=True)
class Torture:
    """How many cases, and which."""

    cases: int = 200
    """How many are drawn."""
    seed: int = 1
    only: Literal["damaged", "log", "command", "fault", "kill", "numbers", "text"] | None = None
    """Cases of one kind."""
    each: str | None = None
    """Instead of cases that are drawn: this damage, such as remove, to each file of each artefact."""
    case: int | None = None
    """Only the case of this number."""
    all: bool = False
    """Print good cases, too."""
    workers: int = 2
    """Cases at once."""
    afresh: bool = False
    """Start every command as a fresh process. By default nine in ten are forked off a process that has imported
    everything, which is several times as quick."""
    to: Path | None = None
    """Folder of the artefacts, which is kept and used again; by default a temporary one."""
    keep: Path | None = None
    """Folder in which every case leaves its files, in a folder named after its number."""


def attempt(number: int, torture: Torture, made: Path, room: Path) -> tuple[str, str, str]:
    """(kind, what was done, what is bad: empty where the case is good)."""
    rng = np.random.default_rng([torture.seed, number])
    drawn = str(rng.choice(list(KINDS), p=[share for _, share in KINDS.values()]))
    kind = torture.each or torture.only or drawn
    here = room / str(number)
    here.mkdir()
    process.afresh(torture.afresh or rng.random() < 0.1)
    try:
        if torture.each:
            return kind, *damaged_at(places(made)[number], torture.each, rng, made, here)
        return kind, *KINDS[kind][0](rng, made, here)
    finally:
        if torture.keep is None:
            artefacts.clear(here)


def main() -> None:
    torture = tyro.cli(Torture, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        made = (torture.to or Path(temporary) / "made").absolute()
        room = (torture.keep or Path(temporary) / "cases").absolute()
        process.warm(artefacts.modules())
        artefacts.make(made)
        room.mkdir(exist_ok=True)
        cases = len(places(made)) if torture.each else torture.cases
        numbers = range(cases) if torture.case is None else [torture.case]
        kinds: Counter[str] = Counter()
        bad = []
        with ThreadPoolExecutor(torture.workers) as pool:
            found = pool.map(lambda number: attempt(number, torture, made, room), numbers)
            for number, (kind, what, wrong) in zip(numbers, found, strict=True):
                kinds[f"{kind}, {'bad' if wrong else 'good'}"] += 1
                if wrong or torture.all or torture.case is not None:
                    print(f"{number}: {what}\n    {wrong or 'good'}", flush=True)
                if wrong:
                    bad.append({"case": number, "kind": kind, "what": what, "wrong": wrong})
    figures = {"cases": len(numbers), "seed": torture.seed, "kinds": dict(sorted(kinds.items())), "bad": bad}
    print(json.dumps({"name": "torture", "ratio": len(bad) / max(len(numbers), 1), **figures}))


if __name__ == "__main__":
    main()
