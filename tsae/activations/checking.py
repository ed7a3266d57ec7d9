"""Finding damaged shards of a store by their checksums, and capturing just these again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.activations.config import CaptureConfig
from tsae.activations.store import inside, open_shard, read_manifest, sha256
from tsae.base.provenance import write_json
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from tsae.checkpoints.series import CheckpointSeries


@dataclass(frozen=True)
class Damage:
    """A shard that is not what the manifest says."""

    reader: str
    number: int
    """Place among the reader's shards, from 0."""
    file: str
    what: str
    """What was found."""


@dataclass(frozen=True)
class Repair:
    """A shard that was captured again."""

    file: str
    same: bool
    """Whether it has the bytes that were first captured. Other hardware, thread counts and versions change last bits;
    the manifest then holds the new checksum."""


def check_store(path: str | Path) -> list[Damage]:
    """Compare every shard with its checksum; reads the whole store.

    Raises:
        TsaeError: where the manifest or the copy of the rollouts is damaged, which no recapture of shards can mend.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _rollouts(path, manifest)
    damages = []
    for reader in manifest["readers"]:
        for number, record in enumerate(reader["shards"]):
            what = _damage(path, manifest, reader["id"], record)
            if what is not None:
                damages.append(Damage(reader["id"], number, record["file"], what))
    return damages


def repair_store(
    path: str | Path, series: CheckpointSeries, damages: Sequence[Damage], *, progress: bool = True
) -> list[Repair]:
    """Capture damaged shards again, with the config and the batches of the first capture.

    Args:
        path: folder of the store.
        series: holds the readers of the damaged shards.
        damages: as `check_store` found them.
        progress: show a bar.

    Raises:
        TsaeError: where a checkpoint is not the one that was captured.
    """
    from tqdm.auto import tqdm

    from tsae.activations.capture import capture_shard
    from tsae.activations.plan import cut, plan_readers
    from tsae.activations.readers import open_reader
    from tsae.checkpoints.forward.predictions import PredictingReader
    from tsae.checkpoints.loading import weights_fingerprint

    path = Path(path)
    manifest = read_manifest(path)
    rollouts, config = _rollouts(path, manifest), CaptureConfig(**manifest["config"])
    readers = {reader["id"]: reader for reader in manifest["readers"]}
    damaged = list(dict.fromkeys(damage.reader for damage in damages))
    for id in damaged:
        found, expected = weights_fingerprint(series[id]), readers[id]["weights"]
        if found != expected:
            raise TsaeError(
                f"these are not the weights that were captured as {id} (hash {found}, expected {expected})",
                where=series[id].path,
                fix="Give the series that the store was captured from.",
            )
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    pieces = list(cut(plan_readers(list(readers), rollouts, config), lengths, config.shard_tokens))
    repaired = []
    total = sum(int(readers[d.reader]["shards"][d.number]["n_tokens"]) for d in damages)
    with tqdm(total=total, desc="repair", unit="token", unit_scale=True, disable=not progress) as bar:
        for id in damaged:
            mine = [piece for piece in pieces if piece.reader == id]
            reader = open_reader(series[id], list(manifest["sites"]), config)
            if config.token_statistics:
                reader = PredictingReader(reader)
            for damage in damages:
                if damage.reader != id:
                    continue
                if damage.number >= len(mine):
                    raise TsaeError(
                        f"names {len(readers[id]['shards'])} shards of {id}, whose trajectories make {len(mine)}",
                        where=path / "manifest.json",
                        fix="Capture again.",
                    )
                piece, record = mine[damage.number], readers[id]["shards"][damage.number]
                # What lies there may be a link to somewhere else.
                inside(path, str(Path(piece.file).parent))
                (path / piece.file).unlink(missing_ok=True)
                again = capture_shard(
                    reader, series[id].path, rollouts, piece, path, manifest, record["batch_tokens"], bar
                )
                readers[id]["shards"][damage.number] = again
                write_json(path / "manifest.json", manifest)
                repaired.append(Repair(piece.file, again == record))
    return repaired


def _damage(path: Path, manifest: dict[str, Any], reader: str, record: dict[str, Any]) -> str | None:
    try:
        file = inside(path, record["file"])
        whole = file.is_file() and sha256(file) == record.get("sha256")
        # Opened even where the bytes are right: the manifest's entry may be another shard's.
        open_shard(path, manifest, reader, record)
    except TsaeError as error:
        return error.what
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if whole else "its bytes have changed: the SHA-256 is not that of the manifest"


def _rollouts(path: Path, manifest: dict[str, Any]) -> Rollouts:
    file = path / "rollouts.parquet"
    rollouts = Rollouts.read(file)
    if rollouts.fingerprint != manifest["rollouts"]:
        raise TsaeError(
            "these are not the rollouts that were captured",
            where=file,
            fix="Run the same `tsae capture` again, with the rollouts: it puts the copy right and keeps the shards.",
        )
    return rollouts
