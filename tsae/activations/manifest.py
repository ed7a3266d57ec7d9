"""manifest.json: what an activation store holds, checked when it is loaded. It carries its own hash.

While a capture goes on, every finished shard has a record of its own beside it (READER/NUMBER.json), so that processes
that know nothing of each other can write into one store. When all shards are there, their records go into the manifest.
A shard that is captured again, because it was damaged, has a record again until the manifest has taken it in.
A record says of which capture it is, for parts of several machines may be copied into one folder.
`check_store` finds damaged shards by their hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from tsae.activations.shard import open_shard
from tsae.base.artefact import Kind, OtherVersion, read_record
from tsae.base.files import reading
from tsae.base.mirror import local, refreshed
from tsae.base.part import digest_of
from tsae.base.validation import check_content
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts

KIND, VERSION = "store", 4

_FIX = "Capture again."
_LATER = ("complete", "inputs", "gives", "versions", "command", "from")
"""What the manifest of a finished store also says."""


class _ShardRecord(BaseModel):
    file: str
    hash: str
    n_tokens: int
    n_trajectories: int


class _ReaderRecord(BaseModel):
    id: str
    run: str | None
    step: int
    trained_on: str | None
    weights: str | None
    shards: list[_ShardRecord]


class _Site(BaseModel):
    d_model: int


class _Manifest(BaseModel):
    dtype: Literal["float32", "float16", "bfloat16"]
    complete: bool
    rollouts: str
    sites: dict[str, _Site]
    special_ids: list[int]
    readers: list[_ReaderRecord]
    config: dict[str, Any]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Load the manifest of a store; of an unfinished one with the records of the shards that are there."""
    refreshed(folder)
    file = folder / "manifest.json"
    refuse(folder, (not file.is_file(), "no activation store (no manifest.json)", "Make one with `tsae capture`."))
    manifest = read_record(file, _FIX)
    if (manifest.get("kind"), manifest.get("version")) != (KIND, VERSION):
        found = f"{manifest.get('kind')!s:.40} of version {manifest.get('version')!s:.40}"
        raise OtherVersion(f"is a {found}, expected a {KIND} of version {VERSION}", where=file, fix=_FIX)
    with reading(file, _FIX, "is not a manifest"):
        check_content(manifest, _Manifest)
        readers = [reader["id"] for reader in manifest["readers"]]
        shards = [shard["file"] for reader in manifest["readers"] for shard in reader["shards"]]
        if twice := [name for name, n in Counter([*readers, *shards]).items() if n > 1]:
            raise ValueError(f"{twice[0]} comes twice")
        _add_records(folder, manifest)
    return manifest


def essence(manifest: dict[str, Any]) -> dict[str, Any]:
    """What makes a capture this one: the manifest without what is done already."""
    readers = [{k: v for k, v in reader.items() if k != "shards"} for reader in manifest["readers"]]
    return {**{k: v for k, v in manifest.items() if k not in _LATER}, "readers": readers}


def inside(folder: Path, file: str) -> Path:
    """The path of a file of a store.

    Raises:
        TsaeError: where it leads out of the store, by ".." or by a link, or nowhere.
    """
    manifest = folder / "manifest.json"
    with reading(manifest, _FIX, f"the shard path {file!r} leads nowhere"):  # links in a circle; NUL in a name
        path = (folder / file).resolve()
        path.is_file()
    refuse(manifest, (not path.is_relative_to(folder.resolve()), f"the shard path {file!r} leaves the store", _FIX))
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
                check_content(record, _ShardRecord)
            except (TsaeError, ValueError):
                continue  # its shard counts as not recorded, and is captured again
            if record["file"] != name:
                raise ValueError(f"the record {file.name} of {reader['id']} is that of {record['file']}")
            if record.pop("capture") != capture:
                foreign.append(name)
            known[name] = record
        reader["shards"] = [known[name] for name in sorted(known)]
    if foreign:
        first = min(foreign)
        what = f"{len(foreign)} shards are of another capture than the manifest, such as {first}"
        fix = f"Remove these with their records, such as {record_file(first)}, and give the same capture again."
        raise TsaeError(what, where=folder, fix=fix)


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
        Damage(reader["id"], number, record["file"], damage_of(path, manifest, reader["id"], record, lengths))
        for reader in manifest["readers"]
        for number, record in enumerate(reader["shards"])
    ]
    return [damage for damage in found if damage.what]


def _check(path: Path) -> None:
    damages = check_store(path)
    what = "; ".join(f"{damage.file}: {damage.what}" for damage in damages)
    refuse(path, (damages, what, STORE.fix))


STORE = Kind(KIND, VERSION, "manifest.json", "Make it with `tsae capture`.", _check)


def damage_of(
    path: Path, manifest: Mapping[str, Any], reader: str, record: Mapping[str, Any], lengths: np.ndarray | None = None
) -> str:
    """What is wrong with a shard; empty where nothing is."""
    try:
        with reading(path / record["file"], _FIX):
            open_shard(inside(path, record["file"]), manifest, reader, record, lengths=lengths)
    except TsaeError as error:
        return error.what
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
    refuse(file, (rollouts.fingerprint != manifest["rollouts"], "these are not the rollouts that were captured", fix))
    return rollouts
