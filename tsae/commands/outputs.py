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
    name, to = type(options).__name__, output(options)
    beside = {f"--{option}": path for option in _BESIDE if (path := _path(options, option)) not in (None, Path("-"))}
    written = ({} if to is None else {"--to": to}) | beside
    for option, path in written.items():
        if os.path.exists(path) and not (path.is_file() or path.is_dir()):
            raise _refusal("is a device or a pipe, expected a file, a folder or a new name", option, path)
        for field, other in _inputs(options):
            if os.path.exists(other) and os.path.exists(path) and path.samefile(other):
                raise _refusal(f"is an input too ({field})", option, path)
        if option != "--to" and to is not None and name in FOLDERS and _real(path).is_relative_to(_real(to)):
            raise _refusal(f"lies in the folder that is written (--to {to})", option, path)
        if option == "--to" and name in FOLDERS:
            _check_folder(path, name)
        else:
            _check_file(option, path, *(FILES[name] if option == "--to" else _BESIDE[option[2:]]))
    for first, second in combinations(written, 2):
        if _real(written[first]) == _real(written[second]):
            raise _refusal(f"is the output of {first}, too", second, written[second])


def output(options: Any) -> Path | None:
    """The file or folder that a command writes, if it writes one."""
    return _path(options, "to") or _path(getattr(options, "config", None), "to")


def _path(holder: Any, name: str) -> Path | None:
    found = getattr(holder, name, None)
    return found if isinstance(found, Path) else None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _refusal(what: str, option: str, path: Path) -> TsaeError:
    return TsaeError(what, where=f"{option} {path}", fix="Give another path, or move away what lies there.")


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


def _check_folder(to: Path, name: str) -> None:
    """Refuse a folder that holds the results of another command, or files that this command did not write."""
    if os.path.exists(to) and not to.is_dir():
        raise _refusal("is a file, and a folder is to be written", "--to", to)
    run = any((to / file).is_file() for file in ("stages.json", "demo.json"))
    found = "run" if run else (manifest_of(to) or {}).get("kind")
    if found is not None and found != FOLDERS[name]:
        raise _refusal(f"holds the results of another command ({found})", "--to", to)
    if found is None and name not in _LOOK_THEMSELVES and to.is_dir():
        strange = sorted(path.name for path in to.iterdir() if not path.name.startswith(".") and path.name != "pieces")
        if strange and not any((to / file).is_file() for file in _UNFINISHED):
            raise _refusal(f"holds {strange[0]}, which this command did not write", "--to", to)


def _check_file(option: str, path: Path, what: str, known: Callable[[Path], bool]) -> None:
    if path.is_dir():
        raise _refusal("is a folder, and a file is to be written", option, path)
    if os.path.exists(path) and path.stat().st_size and not known(path):
        raise _refusal(f"exists, and is not a file with {what} that this command could replace", option, path)


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
_LOOK_THEMSELVES = ("Run", "Watch", "Demo", "Capture", "Train", "Crosscoder", "Export")
_UNFINISHED = ("pieces/encoding.json", "answers.jsonl")
"""Files by which an unfinished artefact is known."""
