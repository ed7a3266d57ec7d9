"""Shards that an earlier store holds already: found by their content, and copied.

A shard is a function of weights, trajectories and config. Its file also names the rollouts and its rows in them; these
may be others in a log that has grown. So a copy is written anew, and has the bytes that a capture would give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.reader.assignment import Piece
from tsae.activations.recording.shard_capture import shard_writer, texts_of
from tsae.activations.shards.manifest import inside, read_manifest
from tsae.activations.shards.shard import STATISTICS, Shard, as_torch, open_shard
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_SAME = ("dtype", "sites", "tokenizer", "special_ids", "config")


def content_of(weights: str, ids: np.ndarray, offsets: np.ndarray) -> str:
    """Hash of what a shard holds: the reader's weights, token ids (n_tokens,), and offsets (n_trajectories + 1,)."""
    digest = hashlib.sha256(weights.encode())
    digest.update(np.ascontiguousarray(ids, np.int32).data)
    digest.update(np.ascontiguousarray(offsets, np.int64).data)
    return digest.hexdigest()


def shards_by_content(folder: Path, wanted: Mapping[str, Any]) -> dict[str, tuple[Shard, Mapping[str, Any]]]:
    """Shards of a store that a capture could use, with their records in its manifest, by `content_of`.

    A damaged shard, and one of other weights, is left out: it is captured again.

    Args:
        folder: of the store; there may be none.
        wanted: manifest of the capture.
    """
    try:
        manifest = read_manifest(folder)
    except TsaeError:
        return {}
    if any(manifest.get(name) != wanted[name] for name in _SAME):
        return {}
    weights = {record["weights"] for record in wanted["readers"]}
    found: dict[str, tuple[Shard, Mapping[str, Any]]] = {}
    for reader in manifest["readers"]:
        for record in reader["shards"] if reader["weights"] in weights else ():
            try:
                shard = open_shard(inside(folder, record["file"]), manifest, reader["id"], record)
            except TsaeError:
                continue
            found[content_of(reader["weights"], shard.token_ids, shard.offsets)] = shard, record
    return found


def copy_shard(
    shard: Shard,
    record: Mapping[str, Any],
    rollouts: Rollouts,
    piece: Piece,
    folder: Path,
    manifest: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a shard from one that holds the same, and return its entry for the manifest.

    Args:
        shard: of an earlier store.
        record: its entry there.
        rollouts: the trajectories.
        piece: what the shard is to hold.
        folder: of the store.
        manifest: of the store.
    """
    with shard_writer(piece, *texts_of(piece, rollouts), folder, manifest) as writer:
        for i in range(len(piece.rows)):
            tokens = slice(shard.offsets[i], shard.offsets[i + 1])
            for site in writer.sites:
                writer.put(site, i, as_torch(np.array(shard.raw(site)[tokens]), shard.dtype))
            for name in STATISTICS if manifest["config"]["token_statistics"] else ():
                writer.put_statistic(name, i, as_torch(np.array(getattr(shard, name)[tokens]), "float32"))
        return {**record, "file": piece.file, "sha256": writer.finish()}
