"""Damaged artefacts: one file is changed, and a command that reads the artefact, or wrote it, follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torments import artefacts
from torments.stages import READERS, WRITERS, Stage

_AGAIN = 0.2
"""Share of the cases in which a command finds its own results damaged."""
_KEPT = "report.html"
"""The page of an analysis, which stays as it is while it is there."""
_VALUES: tuple[Any, ...] = (None, -1, 0, 1, 3, 10**9, 0.5, "x", "", "../elsewhere", [], {}, True)


def damages(
    file: Path, other: Path, strange: Path, elsewhere: Path, rng: np.random.Generator
) -> Mapping[str, Callable[[], object]]:
    """What can be done to a file.

    Args:
        file: to damage.
        other: a file of the same artefact that it is exchanged with.
        strange: the same file of another run; it need not exist.
        elsewhere: path outside of the artefact.
        rng: draws places.
    """
    whole = bytearray(file.read_bytes())
    place = int(rng.integers(0, max(len(whole), 1)))

    def flip() -> None:
        if whole:
            whole[place] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(whole)

    def zeros() -> None:
        page = place // 4096 * 4096
        whole[page : page + 4096] = bytes(len(whole[page : page + 4096]))
        file.write_bytes(whole)

    def exchange() -> None:
        content = other.read_bytes()
        other.write_bytes(file.read_bytes())
        file.write_bytes(content)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def link() -> None:
        file.unlink()
        file.symlink_to(file.parent / "nowhere")

    def outside() -> None:
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)

    def rename() -> None:
        file.rename(file.with_name(str(rng.choice([f"{file.name}.old", f"old-{file.name}", f"00099{file.suffix}"]))))

    def of_another() -> None:
        if strange.is_file() and strange != file:  # another table of rollouts is as good
            shutil.copy(strange, file)

    return {
        "flip": flip, "zeros": zeros, "cut": lambda: file.write_bytes(whole[:place]),
        "empty": lambda: file.write_bytes(b""), "remove": file.unlink, "exchange": exchange, "folder": folder,
        "link": link, "outside": outside, "rename": rename,
        "double": lambda: shutil.copy(file, file.with_name(f"old-{file.name}")), "of another run": of_another,
        "version": lambda: _change_json(file, rng, ("version", "format", "written_by")),
        "value": lambda: _change_json(file, rng, ("",)),
    }  # fmt: skip


def _change_json(file: Path, rng: np.random.Generator, names: tuple[str, ...]) -> None:
    """Change a value of a JSON file whose name holds one of these words, or cut a file that holds no such value."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        places = list(_places(content, names))
        holder, key = places[int(rng.integers(len(places)))]
    except (ValueError, RecursionError):
        file.write_bytes(file.read_bytes()[:-2])  # more than the last newline
    else:
        holder[key] = _VALUES[int(rng.integers(len(_VALUES)))] if names == ("",) else f"9{holder[key]}"
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _places(content: Any, names: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Every (object or list, key) in a JSON value whose key holds one of the names."""
    keys = (
        list(content) if isinstance(content, dict) else list(range(len(content))) if isinstance(content, list) else []
    )
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
    found = [
        Place(stage, f"out/{file}", again=True) for stage in WRITERS for file in _files(made / f"expected-{stage.name}")
    ]
    return [*read, *found]


def attempt_at(place: Place, how: str, rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows), after this damage to one file."""
    lay_out = _lay_out_again if place.again else artefacts.lay_out
    lay_out(place.stage, made, here)
    file = here / place.file
    artefact = here.joinpath(*Path(place.file).parts[: 2 if place.file.startswith("out/") else 1])
    readers = _reading_all(here) if place.again else []
    what = _damage(artefact, made / "other" / artefact.name, here, rng, file=file, how=how)
    if place.again:
        return f"{place.stage.name} again: {what}", _found_again(place.stage, made, here, readers)
    return f"{place.stage.name}: {what}", _followed(place.stage, artefact.name, made, here)


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    if rng.random() < _AGAIN:
        return _again(rng, made, here)
    stage = READERS[int(rng.integers(len(READERS)))]
    artefacts.lay_out(stage, made, here)
    whole = here / str(rng.choice(stage.reads))
    name = whole.name
    humble = False
    if stage.bound and rng.random() < 0.15:
        name = str(rng.choice(stage.bound))
        shutil.rmtree(here / name) if (here / name).is_dir() else (here / name).unlink()
        artefacts.copy(made / "other" / name, here / name)
        what = f"{name} of another run"
    elif not stage.begun and rng.random() < 0.05:
        what, humble = "read-only inputs", True
        _read_only(here)
    else:
        what = _damage(whole, made / "other" / name, here, rng)
    return f"{stage.name}: {what}", _followed(stage, name, made, here, humble=humble)


def _followed(stage: Stage, name: str, made: Path, here: Path, *, humble: bool = False) -> str:
    """What is bad of a command that reads a damaged artefact of this name."""
    ended, wrong = artefacts.watched(stage.command, here, humble=humble)
    if not wrong and ended is not None and ended.returncode == 0 and name not in stage.open:
        wrong = artefacts.difference(
            here / "out", made / f"expected-{stage.name}", extra=bool(stage.begun), pattern=stage.compared
        )
    if humble and not wrong and ended is not None and ended.returncode:
        wrong = f"read-only inputs are refused: {ended.stderr.strip()[-300:]}"
    return wrong


def _files(whole: Path) -> list[str]:
    """Files of an artefact that can be damaged, relative to it: "." for an artefact that is a file."""
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != _KEPT]
    return sorted(path.relative_to(whole).as_posix() for path in files) if whole.is_dir() else ["."]


def _damage(
    whole: Path, strange: Path, here: Path, rng: np.random.Generator, *, file: Path | None = None, how: str = ""
) -> str:
    """Damage a file of an artefact, and say how. Which file, and how, is drawn where it is not given."""
    files = [whole / name for name in _files(whole)]
    file = file or files[int(rng.integers(len(files)))]
    alike = [p for p in files if p != file and p.suffix == file.suffix] or files
    same = strange / file.relative_to(whole) if whole.is_dir() else file
    possible = damages(file, alike[int(rng.integers(len(alike)))], same, here / "elsewhere", rng)
    how = how or str(rng.choice(list(possible)))
    possible[how]()
    return f"{how} {file.relative_to(here)}"


def _again(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """A command finds its own results, one of whose files is damaged."""
    stage = WRITERS[int(rng.integers(len(WRITERS)))]
    _lay_out_again(stage, made, here)
    results = sorted(path for path in (here / "out").iterdir() if path.name[0] != ".")
    whole = results[int(rng.integers(len(results)))]
    readers = _reading_all(here)
    what = _damage(whole, made / "other" / whole.name, here, rng)
    return f"{stage.name} again: {what}", _found_again(stage, made, here, readers)


def _lay_out_again(stage: Stage, made: Path, here: Path) -> None:
    """Copy what a command reads, and the results that it makes of it."""
    artefacts.lay_out(stage, made, here)
    artefacts.copy(made / f"expected-{stage.name}", here / "out")


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


def _reading_all(here: Path) -> list[tuple[str, ...]]:
    """Commands that read the results of a command."""
    return [words for folder in (here / "out").rglob("*") for words in _reading(folder)]


def _reading(folder: Path) -> list[tuple[str, ...]]:
    """A command that reads all of a folder, if it is an artefact."""
    to = f"read-{folder.name}"
    known: dict[str, tuple[str, ...]] = {
        "manifest.json": ("store", "check", str(folder)),
        "sae.safetensors": ("export", "--sae", str(folder), "--to", to),
        "features.json": ("reinforcement", "--features", str(folder), "--n-permutations", "10", "--to", to),
        "diff.json": ("report", "--diff", str(folder), "--to", f"{to}.html"),
    }
    return [words for name, words in known.items() if (folder / name).is_file()]


def _read_only(here: Path) -> None:
    """Take the right to write from everything but "out"."""
    for path in [here, *here.rglob("*")]:
        if path != here / "out":
            path.chmod(0o555 if path.is_dir() else 0o444)
