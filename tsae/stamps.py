"""Stamps of whole runs: what a run's folder was asked for, so that no other run goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsae.base.artefact import command_facts, read_record, write_record
from tsae.base.files import partial_name
from tsae.errors import TsaeError, public

STAMPS = {"demo.json": "demo", "run.json": "run"}
"""Stamps of whole runs (see `claim`): the file, and the key of the settings in it."""
_FOUND = "found"
"""Key in a stamp (see `claim`) of what the stages found, which is no setting."""
CONTENTS = "contents of what was read"  # checksums; stamps of growing logs have none


def claim(
    folder: Path, name: str, stamp: dict[str, Any], what: str, adds: Sequence[str] = (), later: Sequence[str] = ()
) -> None:
    """Write a stamp into a new folder. Where one lies, check that settings, inputs and versions are the same.

    Args:
        folder: of the run.
        name: of the stamp.
        stamp: what it is to say.
        what: names the run in messages.
        adds: settings of a stage, first the one that asks for it. If it is asked for, and the folder's run left it out,
            the stage is added: the rest stays.
        later: settings of stages that have made nothing yet: a corrected command may have others.

    Raises:
        TsaeError: where the folder holds something else; the message names what differs.
    """
    wanted = public(json.loads(json.dumps(stamp, default=str)))
    beginning = partial_name(folder / name).name  # all that is there if the first write was killed
    if folder.is_dir() and any(path.name != beginning for path in folder.iterdir()):
        found = read_stamp(folder, name)
        # Compared as JSON, where a tuple is a list and a path a string. What the stages found is no setting.
        before = {key: value for key, value in (found or {}).items() if key != _FOUND}
        same = _without(before, STAMPS[name], later) == _without(wanted, STAMPS[name], later)
        if not same and not (adds and _left_out(before, wanted, STAMPS[name], adds)):
            differing = sorted(key for key in wanted if found is not None and found.get(key) != wanted[key])
            fix = "Delete that folder, or give another one with --to."
            if adds and _left_out(wanted, before, STAMPS[name], adds):
                fix = f"Its run was asked for --{adds[0]}: give that, too, or another folder with --to."
            elif "sae" in before:
                fix = "`tsae watch` wrote it, and goes on with it; else delete that folder, or give another one (--to)."
            raise TsaeError(
                f"holds something else than {what} of these settings and versions"
                + (f" (differing: {', '.join(differing)})" if differing else ""),
                where=folder,
                fix=fix,
            )
        if found is not None and _FOUND in found:
            wanted = {**wanted, _FOUND: found[_FOUND]}
    _write_stamp(folder, name, wanted)


def _without(stamp: Mapping[str, Any], key: str, names: Sequence[str]) -> dict[str, Any]:
    return {**stamp, key: {name: value for name, value in stamp.get(key, {}).items() if name not in names}}


def _left_out(less: Mapping[str, Any], more: Mapping[str, Any], key: str, adds: Sequence[str]) -> bool:
    """Whether two stamps are of the same run, and only the second asks for the added stage."""
    without = {**more.get(key, {}), **{name: less.get(key, {}).get(name) for name in adds}}
    asked = more.get(key, {}).get(adds[0]) and not without.get(adds[0])
    return bool(asked) and less == {**more, key: without}


def read_stamp(folder: Path, name: str) -> dict[str, Any] | None:
    """A stamp that `claim` wrote; None where there is none.

    Raises:
        TsaeError: where it is damaged.
    """
    file = folder / name
    if not file.is_file():
        return None
    found = read_record(file, "Delete that folder, or give another one with --to.")
    return {key: value for key, value in found.items() if key not in ("kind", "command", "from")}


def _write_stamp(folder: Path, name: str, stamp: Mapping[str, Any]) -> None:
    write_record(folder / name, {"kind": "run", **stamp, **command_facts(folder / name)})


def add_found(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Add what a stage found to a stamp that `claim` wrote. What other stages found stays."""
    stamp = read_stamp(folder, name) or {}
    _write_stamp(folder, name, {**stamp, _FOUND: {**stamp.get(_FOUND, {}), **found}})
