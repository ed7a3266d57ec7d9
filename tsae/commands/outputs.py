"""Outputs of a command: they never replace an input, nor a file that another program or command wrote.

The same command may write its own output again. What it would replace is known by its content, not by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tsae.base.artefact import manifest_of
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError


def check_outputs(options: Any) -> None:
    """Look at the paths that a command will write, before it begins.

    Args:
        options: of the command.

    Raises:
        TsaeError: where an output is an input too, a file stands where a folder is to be written or the reverse, or a
            file, also one in a folder, holds something else than this command writes.
    """
    name = type(options).__name__
    to = output(options)
    written = {f"--{name}": _path(options, name) for name in _BESIDE}
    for option, path in (("--to", to), *written.items()):
        if path is None or path == Path("-"):
            continue
        if os.path.exists(path) and not (path.is_file() or path.is_dir()):
            what = "is a device or a pipe, expected a file, a folder or a new name"
            raise TsaeError(what, where=f"{option} {path}", fix="Give another path.")
        for field, other in _inputs(options):
            if os.path.exists(other) and os.path.exists(path) and path.samefile(other):
                raise TsaeError(f"is an input too ({field})", where=f"{option} {path}", fix="Give another path.")
    _check_apart({"--to": to, **written}, within=to if name not in FILES else None)
    if to is not None and name in FILES:
        _check_file("--to", to, *FILES[name])
    elif to is not None and os.path.exists(to) and not to.is_dir():
        raise TsaeError("is a file, and a folder is to be written", where=f"--to {to}", fix="Give another path.")
    elif to is not None:
        _check_folder(to, name)
    for option, path in written.items():
        if path is not None and path != Path("-"):
            _check_file(option, path, *_BESIDE[option[2:]])


def _check_apart(outputs: dict[str, Path | None], within: Path | None) -> None:
    """Refuse two outputs of the same path, and a file inside the folder that is written."""
    named = {option: os.path.realpath(path) for option, path in outputs.items() if path not in (None, Path("-"))}
    for one, other in combinations(named, 2):
        if named[one] == named[other]:
            raise TsaeError(f"is the output of {one}, too", where=f"{other} {outputs[other]}", fix="Give another path.")
    for option, path in named.items():
        if within is not None and option != "--to" and Path(path).is_relative_to(os.path.realpath(within)):
            what = f"lies in the folder that is written (--to {within})"
            raise TsaeError(what, where=f"{option} {outputs[option]}", fix="Give a path outside of it.")


def output(options: Any) -> Path | None:
    """The file or folder that a command writes, if it writes one."""
    return _path(options, "to") or _path(getattr(options, "config", None), "to")


def _check_file(option: str, path: Path, what: str, known: Callable[[bytes, Path], bool]) -> None:
    if path.is_dir():
        raise TsaeError(
            "is a folder, and a file is to be written", where=f"{option} {path}", fix="Give the path of a file."
        )
    if not os.path.exists(path):
        return
    with path.open("rb") as stream:
        begin = stream.read(4096)
    if begin and not known(begin, path):
        raise TsaeError(
            f"exists, and is no file with {what} that it could replace",
            where=f"{option} {path}",
            fix="Give another path, or remove this file.",
        )


def _check_folder(to: Path, name: str) -> None:
    """Refuse a folder that holds the results of another command, or files that this command did not write."""
    found, wanted = _kind_in(to), KINDS.get(name)
    if found is not None and found != wanted:
        what = f"holds the results of another command ({found})"
        raise TsaeError(what, where=f"--to {to}", fix="Give another folder.")
    if found is None and name in _ALONE and to.is_dir():
        strange = sorted(path.name for path in to.iterdir() if not path.name.startswith(".") and path.name != "pieces")
        if strange and not any((to / file).is_file() for file in _UNFINISHED):
            what = f"holds {strange[0]}, which `tsae {' '.join(_words(name))}` did not write"
            raise TsaeError(what, where=f"--to {to}", fix="Move that away, or give another folder.")


def _kind_in(folder: Path) -> str | None:
    """The kind of what lies in a folder, whole or unfinished."""
    if any((folder / name).is_file() for name in ("stages.json", "demo.json")):
        return "run"
    found = manifest_of(folder)
    return None if found is None else str(found["kind"])


def _words(name: str) -> tuple[str, ...]:
    """How a command is called."""
    return (*_GROUPS.get(name, ()), name.lower())


def _path(holder: Any, name: str) -> Path | None:
    found = getattr(holder, name, None)
    return found if isinstance(found, Path) else None


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


def _tables(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.parquet" for name in names)


def _is_page(begin: bytes, _: Path) -> bool:
    return b'<meta name="generator" content="tsae">' in begin


def _is_json(begin: bytes, _: Path) -> bool:
    return re.match(rb'\s*\{\s*"written_by": "tsae ', begin) is not None


def _is_table(begin: bytes, _: Path) -> bool:
    return begin.startswith(b"| kind | checkpoint | part | band | feature |")


def _is_problems(begin: bytes, _: Path) -> bool:
    try:
        return {"prompt", "parent", "kind", "hidden", "accepted"} <= set(parse_json(begin.splitlines()[0]))
    except (ValueError, TypeError):
        return False


def _holds(kind: str) -> Callable[[bytes, Path], bool]:
    """Whether a Parquet file is of this kind; rollouts have none."""

    def known(begin: bytes, path: Path) -> bool:
        found = _facts(begin, path)
        return found is None or found.get("kind") == kind

    return known


def _facts(begin: bytes, path: Path) -> dict[str, Any] | None:
    """What a Parquet file says of itself: nothing if tsae did not write it, None if it is damaged or unfinished."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        known = (pq.read_schema(path).metadata or {}) if begin.startswith(b"PAR1") else {}
        if b"tsae" not in known:
            return {}
        made = {"made": parse_json(known[b"tsae.command"])["command"]} if b"tsae.command" in known else {}
        return {"kind": ROLLOUTS, **parse_json(known[b"tsae"]), **made}
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return None


def _rollouts(
    name: str, own: Callable[[dict[str, Any]], bool], later: tuple[str, ...] = ()
) -> Callable[[bytes, Path], bool]:
    """A test for whether a Parquet file holds rollouts that this command wrote.

    A command keeps the info of the rollouts that it reads. So the info alone does not show which command came last. The
    command in the file does. Where there is none, a file with anything that later commands add is refused.

    Args:
        name: of the command.
        own: whether what a file says of itself fits.
        later: what other commands add.
    """

    def known(begin: bytes, path: Path) -> bool:
        found = _facts(begin, path)
        if found is not None and not (found.get("kind") == ROLLOUTS and own(found)):
            return False
        if found is not None and "made" in found:
            return tuple(found["made"][: len(_words(name))]) == _words(name)
        return not any(key in (found or ()) for key in later)

    return known


_BESIDE: dict[str, tuple[str, Callable[[bytes, Path], bool]]] = {
    "json": ("JSON results of tsae", _is_json),
    "markdown": ("a Markdown table of tsae", _is_table),
}
"""Options that name a file beside --to: what it holds, and whether an existing one holds that."""
ROLLOUTS = "rollouts"
FILES: dict[str, tuple[str, Callable[[bytes, Path], bool]]] = {
    "Report": ("a page of tsae", _is_page),
    "Reformulate": ("reformulated problems", _is_problems),
    "Weights": ("token weights of tsae", _holds("token weights")),
    "Statistics": ("token statistics of tsae", _holds("token statistics")),
    "Sample": ("sampled rollouts of tsae", _rollouts("Sample", lambda of: "log" not in of, ("bands", "behaviours"))),
    "Import": ("imported rollouts of tsae", _rollouts("Import", lambda of: "log" in of, ("bands", "behaviours"))),
    "Bands": ("rollouts in bands", _rollouts("Bands", lambda of: "bands" in of, ("behaviours",))),
    "Behaviours": ("rollouts with behaviours", _rollouts("Behaviours", lambda of: "behaviours" in of)),
}
"""Commands whose --to is a file: what it holds, and whether an existing one holds that. Others write folders."""
KINDS = {
    "Run": "run", "Watch": "run", "Demo": "run", "Capture": "store", "Train": "SAE", "Crosscoder": "SAE",
    "Encode": "features", "Diff": "diff", "Attribute": "attribution", "Causal": "causal test",
    "Influence": "influence", "Explain": "explanations", "Reinforcement": "reinforcement", "Fit": "credit",
    "Drift": "drift", "Difficulty": "difficulty", "Export": "export",
}  # fmt: skip
"""Commands whose --to is a folder, and the kind of artefact that they write."""
_ALONE = tuple(
    name for name in KINDS if name not in ("Run", "Watch", "Demo", "Capture", "Train", "Crosscoder", "Export")
)
"""Those of them that do not look at the folder themselves."""
_UNFINISHED = ("pieces/encoding.json", "answers.jsonl")
"""Files by which an unfinished artefact is known."""
_GROUPS = {"Difficulty": ("rollouts",), "Fit": ("credit",), "Bands": ("rollouts",), "Behaviours": ("rollouts",),
           "Import": ("rollouts",), "Sample": ("rollouts",)}  # fmt: skip
"""Commands of a group, such as `tsae rollouts bands`."""
