"""manifest.json: what an activation store holds, checked when it is loaded. It carries its own hash.

While a capture goes on, every finished shard has a record of its own beside it (READER/NUMBER.json), so that processes
that know nothing of each other can write into one store. When all shards are there, their records go into the manifest.
A shard that is captured again, because it was damaged, has a record again until the manifest has taken it in.
A record says of which capture it is, for parts of several machines may be copied into one folder.
`check_store` finds damaged shards by their hashes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from tsae.activations.shard import DTYPES, open_shard
from tsae.base.artefact import Kind, OtherVersion, read_record
from tsae.base.part import digest_of
from tsae.base.remote.mirror import local, refreshed
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

KIND, VERSION = "store", 4

_FIX = "Capture again."
_LATER = ("complete", "inputs", "gives", "versions", "command", "from")
"""What the manifest of a finished store also says."""
_SHARD: dict[str, Any] = {"file": str, "hash": str, "n_tokens": int, "n_trajectories": int}
_READER: dict[str, Any] = {
    "id": str,
    "run": (str, NoneType),
    "step": int,
    "trained_on": (str, NoneType),
    "weights": (str, NoneType),
    "shards": list,
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Load the manifest of a store; of an unfinished one with the records of the shards that are there."""
    refreshed(folder)
    file = folder / "manifest.json"
    if not file.is_file():
        raise TsaeError("no activation store (no manifest.json)", where=folder, fix="Make one with `tsae capture`.")
    try:
        manifest = read_record(file, _FIX)
        known = manifest["kind"] == KIND and manifest["version"] == VERSION
        if known:
            _check_structure(manifest)
            _add_records(folder, manifest)
    except FileNotFoundError:
        # Another part completed the store in this moment, and took the records away.
        return read_manifest(folder)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise TsaeError(f"not a manifest ({type(error).__name__}: {error})", where=file, fix=_FIX) from error
    if not known:
        found = f"{manifest['kind']!s:.40} of version {manifest['version']!s:.40}"
        raise OtherVersion(f"is a {found}, expected a {KIND} of version {VERSION}", where=file, fix=_FIX)
    return dict(manifest)


def essence(manifest: dict[str, Any]) -> dict[str, Any]:
    """What makes a capture this one: the manifest without what is done already."""
    readers = [{k: v for k, v in reader.items() if k != "shards"} for reader in manifest["readers"]]
    return {**{k: v for k, v in manifest.items() if k not in _LATER}, "readers": readers}


def inside(folder: Path, file: str) -> Path:
    """The path of a file of a store.

    Raises:
        TsaeError: where it leads out of the store, by ".." or by a link, or nowhere.
    """
    try:
        path = (folder / file).resolve()
        path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; NUL in a name
        what = f"the shard path {file!r} leads nowhere"
        raise TsaeError(what, where=folder / "manifest.json", fix="Capture again.") from error
    if not path.is_relative_to(folder.resolve()):
        raise TsaeError(
            f"the shard path {file!r} leaves the store", where=folder / "manifest.json", fix="Capture again."
        )
    return path


def record_file(shard: str) -> str:
    """Where the record of a shard lies until the capture is complete."""
    return str(Path(shard).with_suffix(".json"))


def as_record(entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """The record of a shard, from its entry for the manifest: it says of which capture the shard is."""
    return {**entry, "capture": digest_of(essence(manifest))}


def _add_records(folder: Path, manifest: dict[str, Any]) -> None:
    capture = digest_of(essence(manifest))
    foreign: list[str] = []
    for reader in manifest["readers"]:
        known = {shard["file"]: shard for shard in reader["shards"]}
        for file in inside(folder, reader["id"]).glob("*.json"):
            name = f"{reader['id']}/{file.stem}.h5"
            try:
                record = read_record(file, _FIX)
                _check_types(record, _SHARD)
            except (TsaeError, KeyError, TypeError):
                continue  # its shard counts as not recorded, and is captured again
            if record["file"] != name:
                raise ValueError(f"the record {file.name} of {reader['id']} is that of {record['file']}")
            if record.pop("capture") != capture:
                foreign.append(name)
            known[name] = record
        reader["shards"] = [known[name] for name in sorted(known)]
    if foreign:
        first = min(foreign)
        raise TsaeError(
            f"{len(foreign)} shards are of another capture than the manifest, such as {first}",
            where=folder,
            fix=f"Remove these with their records, such as {record_file(first)}, and give the same capture again.",
        )


def _check_structure(manifest: dict[str, Any]) -> None:
    _check_types(
        manifest,
        {
            "dtype": str,
            "complete": bool,
            "rollouts": str,
            "sites": dict,
            "special_ids": list,
            "readers": list,
            "config": dict,
        },
    )
    if manifest["dtype"] not in DTYPES:
        raise ValueError(f"dtype {manifest['dtype']}")
    for id in manifest["special_ids"]:
        _check_types({"special_ids": id}, {"special_ids": int})
    for info in manifest["sites"].values():
        _check_types(info, {"d_model": int})
    for reader in manifest["readers"]:
        _check_types(reader, _READER)
        for shard in reader["shards"]:
            _check_types(shard, _SHARD)
    for name, every in {
        "the reader": [reader["id"] for reader in manifest["readers"]],
        "the shard": [shard["file"] for reader in manifest["readers"] for shard in reader["shards"]],
    }.items():
        twice = next((one for one in every if every.count(one) > 1), None) if len(set(every)) < len(every) else None
        if twice is not None:
            raise ValueError(f"{name} {twice} comes twice")


def _check_types(record: dict[str, Any], types: Mapping[str, Any]) -> None:
    for name, wanted in types.items():
        if not isinstance(record[name], wanted) or isinstance(record[name], bool) is not (wanted is bool):
            raise TypeError(f"{name} is {str(record[name])[:60]!r}")


@dataclass(frozen=True)
class Damage:
    """A shard that is not what the manifest says."""

    reader: str
    number: int
    """Place among the reader's shards, from 0."""
    file: str
    what: str
    """What was found."""


def check_store(path: str | Path) -> list[Damage]:
    """Compare every shard with its hash; reads the whole store.

    Raises:
        TsaeError: where the manifest or the copy of the rollouts is damaged, which no recapture of shards can mend.
    """
    path = local(path)
    manifest = read_manifest(path)
    rollouts = stored_rollouts(path, manifest)
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    found = [
        Damage(reader["id"], number, record["file"], _damage(path, manifest, reader["id"], record, lengths))
        for reader in manifest["readers"]
        for number, record in enumerate(reader["shards"])
    ]
    return [damage for damage in found if damage.what]


def _check(path: Path) -> None:
    damages = check_store(path)
    if damages:
        more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
        raise TsaeError(f"{damages[0].what}{more}", where=path / damages[0].file, fix=STORE.fix)


STORE = Kind(KIND, VERSION, "manifest.json", "Make it with `tsae capture`.", _check)


def _damage(
    path: Path, manifest: Mapping[str, Any], reader: str, record: Mapping[str, Any], lengths: np.ndarray
) -> str:
    """What is wrong with a shard; empty where nothing is."""
    try:
        file = inside(path, record["file"])
        open_shard(file, manifest, reader, record, lengths=lengths)
    except TsaeError as error:
        return error.what
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def stored_rollouts(
    path: Path,
    manifest: Mapping[str, Any],
    fix: str = "Run the same `tsae capture` again, with the rollouts: it puts the copy right and keeps the shards.",
) -> Rollouts:
    """Load the store's copy of the rollouts.

    Raises:
        TsaeError: where the file is not that of the capture.
    """
    file = path / "rollouts.parquet"
    rollouts = Rollouts.read(file)
    if rollouts.fingerprint != manifest["rollouts"]:
        raise TsaeError("these are not the rollouts that were captured", where=file, fix=fix)
    return rollouts
