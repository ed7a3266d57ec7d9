"""Stamps of whole runs: what a run's folder was asked for, so that no other run goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsae.base.files import partial_name, write_json
from tsae.base.seal import read_sealed, with_checksum
from tsae.errors import TsaeError, public

STAMPS = {"demo.json": "demo", "run.json": "run"}
"""Stamps of whole runs (see `claim`): the file, and the key of the settings in it."""
_FOUND = "found"
"""Key in a stamp (see `claim`) of what the stages found, which is no setting."""
CONTENTS = "contents of what was read"  # checksums; stamps of earlier versions and of growing logs have none


def claim(folder: Path, name: str, stamp: dict[str, Any], what: str, adds: Sequence[str] = ()) -> None:
    """Write a stamp into a new folder. Where one lies, check that settings, inputs and versions are the same.

    Args:
        folder: of the run.
        name: of the stamp.
        stamp: what it is to say.
        what: names the run in messages.
        adds: settings of a stage, first the one that asks for it. If it is asked for, and the folder's run left it out,
            the stage is added: the rest stays, and the page is written anew.

    Raises:
        TsaeError: where the folder holds something else; the message names what differs.
    """
    wanted = compared = public(json.loads(json.dumps(stamp, default=str)))
    copy = stamp_copy(folder, name)
    # A kill during the first write leaves only the temporary file (of an earlier version: NAME.tmp), or the copy.
    files = (copy, folder / name)
    beginning = {copy.name, *(partial_name(file).name for file in files), *(f"{file.name}.tmp" for file in files)}
    if folder.is_dir() and any(path.name not in beginning for path in folder.iterdir()):
        found = read_stamp(folder, name)
        if found is not None and CONTENTS not in found:
            compared = {key: value for key, value in wanted.items() if key != CONTENTS}
        # Compared as JSON, where a tuple is a list and a path a string. What the stages found is no setting.
        if found is not None and adds and _left_out(found, compared, STAMPS[name], adds):
            (folder / "report.html").unlink(missing_ok=True)
        elif found is None or {key: value for key, value in found.items() if key != _FOUND} != compared:
            differing = sorted(key for key in compared if found is not None and found.get(key) != compared[key])
            raise TsaeError(
                f"holds something else than {what} of these settings and versions"
                + (f" (differing: {', '.join(differing)})" if differing else ""),
                where=folder,
                fix="Delete that folder, or give another one with --to."
                if found is None or "sae" not in found
                else "`tsae watch` wrote it, and goes on with it; else delete that folder, or give another one (--to).",
            )
    _write_stamp(folder, name, wanted)


def _left_out(found: Mapping[str, Any], wanted: Mapping[str, Any], key: str, adds: Sequence[str]) -> bool:
    """Whether a stamp is of the run that is wanted, but without the stage of some settings."""
    before = {**wanted[key], **{name: found.get(key, {}).get(name) for name in adds}}
    asked = wanted[key][adds[0]] and not before[adds[0]]
    return bool(asked) and {name: value for name, value in found.items() if name != _FOUND} == {**wanted, key: before}


def stamp_copy(folder: Path, name: str) -> Path:
    """The second copy of a stamp. No other file says the same, so `tsae repair` mends the first copy from this one."""
    return folder / f".{name}.copy"


def read_stamp(folder: Path, name: str) -> dict[str, Any] | None:
    """A stamp that `claim` wrote; None where there is none.

    Raises:
        TsaeError: where it is damaged.
    """
    file = folder / name
    return read_sealed(file, f"Mend it: tsae repair {folder}.") if file.is_file() else None


def _write_stamp(folder: Path, name: str, stamp: Mapping[str, Any]) -> None:
    content = with_checksum(stamp)
    write_json(stamp_copy(folder, name), content)
    write_json(folder / name, content)


def add_found(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Add what the stages found to a stamp that `claim` wrote."""
    _write_stamp(folder, name, {**(read_stamp(folder, name) or {}), _FOUND: found})
