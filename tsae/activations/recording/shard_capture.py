"""Capture of one shard: a reader reads its trajectories, and what it computed is checked and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.reader.assignment import Piece
from tsae.activations.reader.forward_passes import (
    Batch,
    Misread,
    OutOfMemory,
    Reader,
    read_batches,
    stored_texts,
)
from tsae.activations.reader.states import Sample, StatesReader
from tsae.activations.shards.manifest import inside
from tsae.activations.shards.shard import STATISTICS
from tsae.activations.shards.writer import ShardWriter
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


def capture_shard(
    reader: Reader,
    checkpoint: str,
    rollouts: Rollouts,
    piece: Piece,
    folder: Path,
    manifest: Mapping[str, Any],
    batch_tokens: int,
    bar: Any,
) -> dict[str, Any]:
    """Read the trajectories of a shard, write it, and return its entry for the manifest.

    Args:
        reader: of the piece's checkpoint.
        checkpoint: its path, for messages.
        rollouts: the trajectories.
        piece: what to read.
        folder: of the store.
        manifest: of the store.
        batch_tokens: budget of a forward pass. Where memory runs out, the shard begins again with half of it.
        bar: progress, in tokens.

    Raises:
        TsaeError: where activations are not finite or overflow, one trajectory alone does not fit into memory, or a
            server gives other activations than the checkpoint computes.
    """
    ids, offsets = texts_of(piece, rollouts)
    texts = np.split(ids, offsets[1:-1])
    before = bar.n
    while True:
        short: OutOfMemory | None = None
        again = Sample(reader, texts, piece.file) if isinstance(reader, StatesReader) else None
        with shard_writer(piece, ids, offsets, folder, manifest) as writer:
            try:
                for batch in read_batches(reader, texts, batch_tokens):
                    if again is not None:
                        again.compare(batch)
                    _put(writer, batch, piece, rollouts, manifest, checkpoint)
                    bar.update(sum(batch.lengths))
            except OutOfMemory as error:
                short = error
            except Misread as error:
                row = int(piece.rows[error.text])
                problem = rollouts.table["problem_id"][row].as_py()
                raise TsaeError(
                    f"{error.what} (trajectory {row} of {piece.reader}, problem {problem})",
                    where=error.where,
                    fix=error.fix,
                ) from error
            if short is None:
                entry = {
                    "file": piece.file,
                    "n_tokens": int(offsets[-1]),
                    "n_trajectories": len(piece.rows),
                    "batch_tokens": batch_tokens,
                    "sha256": writer.finish(),
                }
                if again is not None:
                    entry["read_again"] = {"trajectories": len(again.chosen), "largest_difference": again.largest}
                return entry
        if len(short.texts) == 1:
            t = int(short.texts[0])
            raise TsaeError(
                f"trajectory {piece.rows[t]} of {len(texts[t])} tokens does not fit into memory by itself",
                where=checkpoint,
                fix="Leave it out, compute in bfloat16 (--model-dtype), or use a device with more memory.",
            ) from short
        batch_tokens = max(1, batch_tokens // 2)
        bar.update(before - bar.n)
        bar.set_postfix_str(f"{piece.reader}, out of memory: {batch_tokens} tokens a batch")


def texts_of(piece: Piece, rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (n_tokens,) of a shard's trajectories, and their offsets (n_trajectories + 1,)."""
    texts = [np.concatenate(rollouts.tokens(int(row))) for row in piece.rows]
    return np.concatenate(texts), np.concatenate([[0], np.cumsum([len(text) for text in texts])])


def shard_writer(
    piece: Piece, ids: np.ndarray, offsets: np.ndarray, folder: Path, manifest: Mapping[str, Any]
) -> ShardWriter:
    """Writes the shard of a piece, which holds these tokens."""
    sites = {site: int(info["d_model"]) for site, info in manifest["sites"].items()}
    weights = next(r["weights"] for r in manifest["readers"] if r["id"] == piece.reader)
    origin = {"weights": weights, "rollouts": manifest["rollouts"]}
    statistics = STATISTICS if manifest["config"]["token_statistics"] else ()
    return ShardWriter(
        inside(folder, piece.file), sites, manifest["dtype"], ids, offsets, piece.rows, origin, statistics
    )


def _put(
    writer: ShardWriter, batch: Batch, piece: Piece, rollouts: Rollouts, manifest: Mapping[str, Any], checkpoint: str
) -> None:
    """Check what the reader computed on a batch, and write it."""
    for site in writer.sites:
        for t, text in stored_texts(batch, site, piece, rollouts, manifest, checkpoint):
            writer.put(site, t, text)
    for name in [name for name in STATISTICS if name in batch.values]:
        for t, text in batch.each(name):
            if bool(text[1:].isnan().any()):
                row = int(piece.rows[t])
                problem = rollouts.table["problem_id"][row].as_py()
                raise TsaeError(
                    f"the {name} of a token is not a number while reader {piece.reader} reads trajectory {row} "
                    f"(problem {problem})",
                    where=checkpoint,
                    fix="Check that checkpoint's weights, or compute in float32 (--model-dtype float32).",
                )
            writer.put_statistic(name, t, text)
