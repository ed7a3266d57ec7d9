"""Damaged shards of a store, found by their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.shard import open_shard
from tsae.activations.shards.manifest import KIND, VERSION, inside, read_manifest
from tsae.base.artefact import Kind
from tsae.base.remote.mirror import local
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


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
