"""Outputs of a command: they never replace an input, nor what another program or command wrote.

The same command may write its own output again. What it would replace is known by its content, not by its name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tsae.base.artefact import manifest_of
from tsae.errors import TsaeError


def check_outputs(options: Any) -> None:
    """Look at the paths that a command will write, before it starts.

    Args:
        options: of the command.

    Raises:
        TsaeError: where an output is an input too, a file stands where a folder is to be written or the reverse, or
            something else lies there than this command writes.
    """
    for what, option, path in _faults(options):
        fix = "Give another path, or move away what lies there."
        raise TsaeError(what, where=f"{option} {path}", fix=fix)


def _faults(options: Any) -> Iterator[tuple[str, str, Path]]:
    """What is wrong with an output, its option, and its path."""
    name, to = type(options).__name__, output(options)
    beside = {f"--{option}": path for option in _BESIDE if (path := _path(options, option)) not in (None, Path("-"))}
    written = ({} if to is None else {"--to": to}) | beside
    for option, path in written.items():
        there = os.path.exists(path)
        if there and not (path.is_file() or path.is_dir()):
            yield "is a device or a pipe, expected a file, a folder or a new name", option, path
        for field, other in _inputs(options):
            if there and os.path.exists(other) and path.samefile(other):
                yield f"is an input too ({field})", option, path
        if option != "--to" and to is not None and name in FOLDERS and _real(path).is_relative_to(_real(to)):
            yield f"lies in the folder that is written (--to {to})", option, path
        if option == "--to" and name in FOLDERS:
            fault = _fault_of_folder(path, name)
        else:
            fault = _fault_of_file(path, *(FILES[name] if option == "--to" else _BESIDE[option[2:]]))
        if fault:
            yield fault, option, path
    for first, second in combinations(written, 2):
        if _real(written[first]) == _real(written[second]):
            yield f"is the output of {first}, too", second, written[second]


def output(options: Any) -> Path | None:
    """The file or folder that a command writes, if it writes one."""
    return _path(options, "to") or _path(getattr(options, "config", None), "to")


def _path(holder: Any, name: str) -> Path | None:
    found = getattr(holder, name, None)
    return found if isinstance(found, Path) else None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _inputs(options: Any) -> Iterator[tuple[str, Path]]:
    """Paths that a command may read, by option."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ("to", *_BESIDE):
            continue
        if is_dataclass(value) and not isinstance(value, type):
            yield from _inputs(value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Path | str) and one and len(str(one)) < 4096 and "\0" not in str(one):
                yield f"--{field.name.replace('_', '-')}", Path(one)


def _fault_of_folder(to: Path, name: str) -> str:
    """Whether a folder holds the results of another command, or files that this command did not write."""
    if not to.is_dir():
        return "is a file, and a folder is to be written" if os.path.exists(to) else ""
    run = any((to / file).is_file() for file in ("stages.json", "demo.json"))
    found = "run" if run else (manifest_of(to) or {}).get("kind")
    if found is not None:
        return "" if found == FOLDERS[name] else f"holds the results of another command ({found})"
    strange = sorted(path.name for path in to.iterdir() if not path.name.startswith(".") and path.name != "pieces")
    if name in LOOK_THEMSELVES or not strange or any((to / file).is_file() for file in _UNFINISHED):
        return ""
    return f"holds {strange[0]}, which this command did not write"


def _fault_of_file(path: Path, what: str, known: Callable[[Path], bool]) -> str:
    if path.is_dir():
        return "is a folder, and a file is to be written"
    known_or_new = not os.path.exists(path) or not path.stat().st_size or known(path)
    return "" if known_or_new else f"exists, and is not a file with {what} that this command could replace"


def _begins(pattern: bytes) -> Callable[[Path], bool]:
    """Whether the first lines of a file hold a mark of tsae."""

    def known(path: Path) -> bool:
        with path.open("rb") as stream:
            return re.search(pattern, stream.read(4096)) is not None

    return known


def _made_by(*words: str) -> Callable[[Path], bool]:
    """Whether a Parquet file was written by this command, or is damaged so that nobody can read it."""

    def known(path: Path) -> bool:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            facts = (pq.read_schema(path).metadata or {}).get(b"tsae.command", b"{}")
            return tuple(json.loads(facts).get("command", ())[: len(words)]) == words
        except (OSError, ValueError, pa.ArrowException):
            with path.open("rb") as stream:
                return stream.read(4) == b"PAR1"

    return known


_BESIDE: dict[str, tuple[str, Callable[[Path], bool]]] = {
    "json": ("JSON results of tsae", _begins(rb'\A\s*\{\s*"written_by": "tsae ')),
    "markdown": ("a Markdown table of tsae", _begins(rb"\A\| kind \| checkpoint \| part \| band \| feature \|")),
}
"""Options that name a file beside --to: what it holds, and whether an existing one holds that."""
FILES: dict[str, tuple[str, Callable[[Path], bool]]] = {
    "Report": ("a page of tsae", _begins(b'<meta name="generator" content="tsae">')),
    "Reformulate": ("reformulated problems", _begins(rb'\A\{"id": .*"parent": .*"hidden": .*"accepted": ')),
    "Weights": ("token weights", _made_by("credit", "weights")),
    "Statistics": ("token statistics", _made_by("store", "statistics")),
    "Sample": ("sampled rollouts", _made_by("rollouts", "sample")),
    "Import": ("imported rollouts", _made_by("rollouts", "import")),
    "Bands": ("rollouts in bands", _made_by("rollouts", "bands")),
    "Behaviours": ("rollouts with behaviours", _made_by("rollouts", "behaviours")),
}
"""Commands whose --to is a file: what it holds, and whether an existing one holds that."""
FOLDERS = {
    "Run": "run", "Watch": "run", "Demo": "run", "Capture": "store", "Train": "SAE", "Crosscoder": "SAE",
    "Encode": "features", "Diff": "diff", "Attribute": "attribution", "Causal": "causal test",
    "Influence": "influence", "Explain": "explanations", "Reinforcement": "reinforcement", "Fit": "credit",
    "Drift": "drift", "Difficulty": "difficulty", "Export": "export",
}  # fmt: skip
"""Commands whose --to is a folder, and the kind of artefact that they write."""
LOOK_THEMSELVES = ("Run", "Watch", "Demo", "Capture", "Train", "Crosscoder", "Export")
_UNFINISHED = ("pieces/encoding.json", "answers.jsonl")
"""Files by which an unfinished artefact is known."""
