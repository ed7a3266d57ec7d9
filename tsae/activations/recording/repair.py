"""Repair of a store: damaged shards are captured again, and only these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsae.activations.capture import capture_shard
from tsae.activations.config import CaptureConfig
from tsae.activations.reading_plan import beginnings, cut, open_reader, plan_readers
from tsae.activations.shards.checksums import Damage, stored_rollouts
from tsae.activations.shards.manifest import inside, read_manifest, write_manifest
from tsae.base.files import reading
from tsae.base.progress import progress_bar
from tsae.base.remote.mirror import local, published
from tsae.checkpoints.loading import need_unchanged, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Repair:
    """A shard that was captured again."""

    file: str
    same: bool
    """Whether it has the bytes of the first capture. Other hardware, thread counts and versions change last bits; the
    manifest then holds the new checksum."""


def repair_store(
    path: str | Path, series: CheckpointSeries, damages: Sequence[Damage], *, progress: bool = True
) -> list[Repair]:
    """Capture damaged shards again, with the config and the batches of the first capture.

    Args:
        path: folder of the store.
        series: holds the readers of the damaged shards.
        damages: as `tsae.activations.shards.checksums.check_store` found them.
        progress: show a bar.

    Raises:
        TsaeError: where a checkpoint is not the one that was captured.
    """
    path = local(path)
    manifest = read_manifest(path)
    rollouts = stored_rollouts(path, manifest)
    with reading(path / "manifest.json", "Capture the store again."):
        config = CaptureConfig(**manifest["config"])
    if config.backend == "vllm":
        # The checkpoint computes the same up to rounding, and no server has to be there.
        config = replace(config, backend="huggingface")
    readers = {reader["id"]: reader for reader in manifest["readers"]}
    damaged = list(dict.fromkeys(damage.reader for damage in damages))
    for id, found, expected in changed_checkpoints(manifest, series, damaged):
        what = f"its weights or its config are not those that were captured as {id} (hash {found}, expected {expected})"
        raise TsaeError(what, where=series[id].path, fix="Give the series that the store was captured from.")
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    plan, begins = plan_readers(list(readers), rollouts, config), beginnings(rollouts, lengths, config)
    pieces = list(cut(plan, lengths, config.shard_tokens, begins))
    by_file = {piece.file: piece for piece in pieces}
    repaired = []
    total = sum(int(readers[d.reader]["shards"][d.number]["n_tokens"]) for d in damages)
    with progress_bar("repair", "token", total, shown=progress) as bar:
        for id in damaged:
            mine, shards = [piece for piece in pieces if piece.reader == id], readers[id]["shards"]
            reader = open_reader(series[id], list(manifest["sites"]), config)
            need_unchanged(series[id], readers[id]["weights"])
            for number in [damage.number for damage in damages if damage.reader == id]:
                before = shards[number]
                # By name, for shards of other parts may be missing; by place where the name itself is damaged.
                piece = by_file.get(before["file"]) or next(iter(mine[number : number + 1]), None)
                if piece is None:
                    what = f"names {len(shards)} shards of {id}, whose trajectories make {len(mine)}"
                    raise TsaeError(what, where=path / "manifest.json", fix="Capture again.")
                # The damaged file may be a link to somewhere else, or a folder. A file stays until its replacement is
                # complete, which takes its place, and not that of what a link leads to.
                inside(path, str(Path(piece.file).parent))
                file = path / piece.file
                if file.is_symlink():
                    file.unlink()
                elif file.is_dir():
                    file.rename(file.with_name(f"{file.name}.damaged"))
                shards[number] = capture_shard(
                    reader, series[id].path, rollouts, piece, path, manifest, before["batch_tokens"], bar
                )
                need_unchanged(series[id], readers[id]["weights"], loaded=True)  # before the manifest takes it in
                published(path / piece.file)
                published(write_manifest(path / "manifest.json", manifest))
                repaired.append(Repair(piece.file, shards[number] == before))
    return repaired


def changed_checkpoints(
    manifest: Mapping[str, Any], series: CheckpointSeries, ids: Iterable[str] | None = None
) -> Iterator[tuple[str, str, str | None]]:
    """Find checkpoints whose weights or config have changed since they were captured into a store.

    Args:
        manifest: of the store.
        series: that holds the checkpoints.
        ids: of readers; by default all of the store.

    Yields:
        The id, the hash of weights and config now, and the hash when it was captured.
    """
    captured = {reader["id"]: reader.get("weights") for reader in manifest["readers"]}
    for id in captured if ids is None else ids:
        found = weights_fingerprint(series[id])
        if found != captured.get(id):
            yield id, found, captured.get(id)


def rewritten_checkpoints(path: Path, series: CheckpointSeries) -> list[str]:
    """Ids of checkpoints that were written anew since they were captured into a store.

    Weights are compared where a file of the checkpoint has changed since the store's manifest was written.
    """
    manifest, captured = read_manifest(path), (path / "manifest.json").stat().st_mtime_ns
    readers = {reader["id"] for reader in manifest["readers"]}
    folders = {c.id: Path(c.path) for c in series if c.id in readers and Path(c.path).is_dir()}
    # The time of a file's content can be set by whoever copies it, that of its entry cannot.
    later = [id for id, folder in folders.items() if any(f.stat().st_ctime_ns > captured for f in folder.iterdir())]
    return [id for id, *_ in changed_checkpoints(manifest, series, later)]
