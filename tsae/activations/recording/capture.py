"""Capture: every reader reads its trajectories, and the residual stream at the chosen sites goes into the store.

1. Plan: which reader reads which trajectories (`CaptureConfig.plan`), cut into shards of whole trajectories.
2. For every shard: batches of similar length under a token budget, right-padded with true attention masks. One forward
   pass a batch stops after the last site, or goes through the model's head for token statistics. Padding never reaches
   the store (`tsae.activations.reader.forward_passes`).
3. A shard is written under a temporary name, renamed, then entered in the manifest. A rerun skips entered shards, so
   that it completes an interrupted capture and ends with the same bytes.

Same bytes: a shard is a function of weights, trajectories and batches, on the same hardware, threads and versions.
Batches depend on the config alone, unless one does not fit into memory. Then the shard begins again with half the
budget, and its entry in the manifest says so (``batch_tokens``). Every shard starts from the config's budget. So a
rerun gives the same bytes where memory runs out at the same sizes; where other programs took the memory, last bits may
differ, and the manifest shows it.

Under torchrun, each of n processes takes every n-th shard, whatever its reader. The first process enters them in order,
so that the store is that of one process and any number of processes can complete it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.activations.config import CaptureConfig
from tsae.activations.reader.assignment import cut
from tsae.activations.reader.forward_passes import OutOfMemory, Reader
from tsae.activations.reader.opening import as_reader, open_base
from tsae.activations.recording.shard_capture import capture_shard
from tsae.activations.shards.manifest import FORMAT, VERSION, inside, read_manifest
from tsae.activations.store import ActivationStore
from tsae.base.distributed import Processes, join
from tsae.base.files import write_json
from tsae.base.progress import progress_bar
from tsae.base.provenance import write_run
from tsae.base.torchrun import world_size
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def capture(
    series: CheckpointSeries,
    rollouts: Rollouts,
    sites: Sequence[str] | None = None,
    *,
    to: str | Path,
    config: CaptureConfig | None = None,
    progress: bool = True,
) -> ActivationStore:
    """Record residual-stream activations of every reader over its trajectories.

    Args:
        series: the readers.
        rollouts: what they read; a copy goes into the store.
        sites: TransformerLens names; by default the output of the middle block.
        to: folder of the store. An interrupted capture is completed; a finished one is opened.
        config: defaults of `CaptureConfig`.
        progress: show a bar.

    Raises:
        TsaeError: for unknown sites, tokenizers that do not fit the rollouts, trajectories longer than the context or
            too long for memory, non-finite activations, or a folder that holds another capture. A new capture then
            leaves nothing behind, except where memory was short; a resumed one keeps what it had.
    """
    config, auto = config or CaptureConfig(), config is not None and config.device == "auto"
    if auto and world_size() > 1:
        raise TsaeError(
            'device="auto" spreads one model over all GPUs, which several processes cannot share',
            where="CaptureConfig.device",
            fix="Start one process, or use --device cuda.",
        )
    # A process whose last shard is short waits for the others as long as a shard takes.
    with join("cpu" if auto else config.device, timeout=timedelta(days=1)) as processes:
        device = "auto" if auto else processes.device
        return _capture(series, rollouts, sites, Path(to), config, progress, processes, device)


def _capture(
    series: CheckpointSeries,
    rollouts: Rollouts,
    sites: Sequence[str] | None,
    to: Path,
    config: CaptureConfig,
    progress: bool,
    processes: Processes,
    device: str,
) -> ActivationStore:
    base = open_base(series, rollouts, sites or (), config, device)
    model: PreTrainedModel | None = base.model
    sites, plan, loader = base.sites, base.plan, base.loader
    readers = [{**record, "n_trajectories": len(plan[record["id"]]), "shards": []} for record in base.readers]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "complete": False,
        **base.facts,
        "config": asdict(config),
        "readers": readers,
    }
    del base  # So that the model can be freed when the base has read.
    fresh = not (to / "manifest.json").is_file()
    processes.first_does(lambda: _begin(to, fresh, manifest, rollouts))
    manifest = read_manifest(to)
    if manifest["complete"]:
        return ActivationStore(to)
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    pieces = list(cut(plan, lengths, config.shard_tokens))
    records = {record["id"]: record["shards"] for record in manifest["readers"]}
    done = sum(len(shards) for shards in records.values())
    sizes = [int(lengths[piece.rows].sum()) for piece in pieces]

    def finish() -> None:
        labels = rollouts.labels_fingerprint
        write_run(to, "capture", config, {"rollouts": rollouts.fingerprint, "labels": labels, "series": series.name})
        write_json(to / "manifest.json", {**manifest, "complete": True})

    reader: Reader | None = None
    current = ""
    with progress_bar("capture", "token", sum(sizes), shown=progress and processes.first) as bar:
        for start in range(done, len(pieces), processes.size):
            bar.update(sum(sizes[:start]) - bar.n)
            entry: dict[str, Any] = {}
            refusal: TsaeError | None = None
            try:
                for piece in pieces[start + processes.rank : start + processes.rank + 1]:
                    if piece.reader != current:
                        # Free the last reader before loading the next. The base's model is loaded already.
                        reader, current, kept = None, piece.reader, model if piece.reader == series.base.id else None
                        model = None
                        bar.set_postfix_str(current, refresh=False)
                        reader, kept = as_reader(series[current], sites, config, device, loader, kept), None
                    assert reader is not None
                    entry = capture_shard(
                        reader, series[current].path, rollouts, piece, to, manifest, config.batch_tokens, bar
                    )
            except TsaeError as error:
                refusal, entry = error, {"refused": True, "memory": isinstance(error.__cause__, OutOfMemory)}
            entries = [json.loads(text) for text in processes.gather_texts(json.dumps(entry))]
            refused = [entry for entry in entries if "refused" in entry]
            if refused:
                # The user will change a reader or the config, and then no shard can be used again. Memory alone may
                # suffice the next time.
                if processes.first and fresh and not any(entry["memory"] for entry in refused):
                    shutil.rmtree(to)
                raise refusal or TsaeError("another process stopped the capture", where=to, fix="See its message.")
            for piece, entry in zip(pieces[start:], entries, strict=False):
                records[piece.reader].append(entry)
            if processes.first:
                write_json(to / "manifest.json", manifest)
        bar.update(sum(sizes) - bar.n)
    processes.first_does(finish)
    return ActivationStore(to)


def _begin(to: Path, fresh: bool, wanted: dict[str, Any], rollouts: Rollouts) -> None:
    """Write the manifest of a new capture, or check that the folder holds the same one."""
    if fresh and to.exists() and any(to.iterdir()):
        raise TsaeError("is not empty and holds no activation store", where=to, fix="Give an empty or new folder.")
    to.mkdir(parents=True, exist_ok=True)
    if fresh:
        rollouts.write(to / "rollouts.parquet")
        write_json(to / "manifest.json", wanted)
        return
    found = read_manifest(to)
    _check_same_capture(found, wanted, to)
    for reader in found["readers"]:
        for shard in reader["shards"]:
            if not inside(to, shard["file"]).is_file():
                raise TsaeError(
                    f"the shard {shard['file']} of the manifest is missing",
                    where=to,
                    fix="Recapture it with `tsae store check --repair`, or delete this folder.",
                )
    # Activations depend on the tokens alone; outcomes, bands and other columns may have changed since.
    rollouts.write(to / "rollouts.parquet")
    written = to / "run.json"
    if found["complete"] and written.is_file():
        run = json.loads(written.read_text(encoding="utf-8"))
        write_json(written, {**run, "inputs": {**run["inputs"], "labels": rollouts.labels_fingerprint}})


def _check_same_capture(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Refuse a manifest of another capture."""

    def essence(manifest: dict[str, Any]) -> dict[str, Any]:
        readers = [{k: v for k, v in reader.items() if k != "shards"} for reader in manifest["readers"]]
        return {**{k: v for k, v in manifest.items() if k != "complete"}, "readers": readers}

    a, b = essence(found), essence(wanted)
    different = sorted(key for key in b if a.get(key) != b[key])
    if different:
        raise TsaeError(
            f"holds another capture: {', '.join(different)} differ",
            where=where,
            fix="Give another folder, or delete this one.",
        )
