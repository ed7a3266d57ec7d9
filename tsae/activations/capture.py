"""Capture: every reader reads its trajectories, and the residual stream at the chosen sites goes into the store.

1. Plan: which reader reads which trajectories (`CaptureConfig.plan`), cut into shards of whole trajectories.
2. For every shard: batches of similar length under a token budget, right-padded with true attention masks; one
   forward pass that stops after the last site, or goes through the model's head where token statistics are wanted
   (`tsae.checkpoints.forward.predictions`); padding never reaches the store (`tsae.activations.reading`).
3. A shard is written under a temporary name, renamed, then entered in the manifest. A rerun skips entered shards, so
   that an interrupted capture goes on where it stopped and ends with the same bytes.

Same bytes: a shard is a function of weights, trajectories and batches, on the same hardware, threads and versions.
Batches depend on the config, except where one does not fit into memory: then the shard is begun again with half the
budget, which its entry in the manifest names (``batch_tokens``). Every shard starts from the budget of the config, so
that where memory runs out at the same sizes as before, what was interrupted also ends with the same bytes; where other
programs took the memory, last bits may differ, and the manifest shows it.

Under torchrun, n processes take every n-th shard each, whatever its reader. The first enters them in order, so that
the store is that of one process and may be completed by any number.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.activations.config import CaptureConfig
from tsae.activations.plan import Piece, cut
from tsae.activations.readers import as_reader, open_base
from tsae.activations.reading import OutOfMemory, Reader, read_batches
from tsae.activations.store import (
    FORMAT,
    STATISTICS,
    VERSION,
    ActivationStore,
    inside,
    read_manifest,
)
from tsae.activations.writing import ShardWriter, put_batch
from tsae.base.provenance import write_json, write_run
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tsae.base.distributed import Processes
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.rollouts.table import Rollouts


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
        to: folder of the store. One that an interrupted capture left is completed; a finished one is opened.
        config: defaults of `CaptureConfig`.
        progress: show a bar.

    Raises:
        TsaeError: for unknown sites, tokenizers that do not fit the rollouts, trajectories longer than the context or
            too long for memory, non-finite activations, or a folder that holds another capture. A capture begun by
            this call leaves nothing behind then, except where memory was short; one that it went on with stays as it
            was found.
    """
    from tsae.base.distributed import join

    config, auto = config or CaptureConfig(), config is not None and config.device == "auto"
    if auto and int(os.environ.get("WORLD_SIZE", "1")) > 1:
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
    from tqdm.auto import tqdm

    from tsae.checkpoints.forward.predictions import PredictingReader

    base = open_base(series, rollouts, sites or (), config, device)
    model: PreTrainedModel | None = base.model
    sites, plan, loader = base.sites, base.plan, base.loader
    readers = [{**record, "n_trajectories": len(plan[record["id"]]), "shards": []} for record in base.readers]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "complete": False,
        **base.facts,
        "config": asdict(config),
        "readers": readers,
    }
    del base  # The model goes when the base has read.
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
    shown = progress and processes.first
    reader: Reader | None = None
    current = ""
    with tqdm(total=sum(sizes), desc="capture", unit="token", unit_scale=True, disable=not shown) as bar:
        for start in range(done, len(pieces), processes.size):
            bar.update(sum(sizes[:start]) - bar.n)
            told: dict[str, Any] = {}
            refusal: TsaeError | None = None
            try:
                for piece in pieces[start + processes.rank : start + processes.rank + 1]:
                    if piece.reader != current:
                        # The last reader goes before the next comes; the base's model is there already.
                        reader, current, kept = None, piece.reader, model if piece.reader == series.base.id else None
                        model = None
                        bar.set_postfix_str(current, refresh=False)
                        reader, kept = as_reader(series[current], sites, config, device, loader, kept), None
                        if config.token_statistics:
                            reader = PredictingReader(reader)
                    assert reader is not None
                    told = capture_shard(
                        reader, series[current].path, rollouts, piece, to, manifest, config.batch_tokens, bar
                    )
            except TsaeError as error:
                refusal, told = error, {"refused": True, "memory": isinstance(error.__cause__, OutOfMemory)}
            everyone = [json.loads(text) for text in processes.gather_texts(json.dumps(told))]
            refused = [told for told in everyone if "refused" in told]
            if refused:
                # What puts this right changes a reader or the config, so that no shard could be used again; memory
                # may be enough the next time.
                if processes.first and fresh and not any(told["memory"] for told in refused):
                    shutil.rmtree(to)
                raise refusal or TsaeError("another process stopped the capture", where=to, fix="See its message.")
            for piece, record in zip(pieces[start:], everyone, strict=False):
                records[piece.reader].append(record)
            if processes.first:
                write_json(to / "manifest.json", manifest)
        bar.update(sum(sizes) - bar.n)
    processes.first_does(lambda: _finish(to, manifest, config, rollouts, series.name))
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
    found = _resumable(read_manifest(to), wanted, to)
    for reader in found["readers"]:
        for shard in reader["shards"]:
            if not inside(to, shard["file"]).is_file():
                raise TsaeError(
                    f"the shard {shard['file']} of the manifest is missing",
                    where=to,
                    fix="Recapture it with `tsae store check --repair`, or delete this folder.",
                )
    # Activations depend on the tokens alone; outcomes, bands and other columns may have been measured since.
    rollouts.write(to / "rollouts.parquet")
    written = to / "run.json"
    if found["complete"] and written.is_file():
        run = json.loads(written.read_text(encoding="utf-8"))
        write_json(written, {**run, "inputs": {**run["inputs"], "labels": rollouts.labels_fingerprint}})


def _finish(to: Path, manifest: dict[str, Any], config: CaptureConfig, rollouts: Rollouts, series: str) -> None:
    inputs = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint, "series": series}
    write_run(to, "capture", config, inputs)
    write_json(to / "manifest.json", {**manifest, "complete": True})


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
        batch_tokens: budget of a forward pass; halved, and the shard begun again, where memory runs out.
        bar: progress, in tokens.

    Raises:
        TsaeError: where activations are not finite or overflow, or one trajectory alone does not fit into memory.
    """
    texts = [np.concatenate(rollouts.tokens(int(row))) for row in piece.rows]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    sites = {site: int(info["d_model"]) for site, info in manifest["sites"].items()}
    weights = next(r["weights"] for r in manifest["readers"] if r["id"] == piece.reader)
    origin = {"weights": weights, "rollouts": manifest["rollouts"]}
    statistics = STATISTICS if manifest["config"]["token_statistics"] else ()
    path, before = inside(folder, piece.file), bar.n
    while True:
        short: OutOfMemory | None = None
        ids, dtype = np.concatenate(texts), manifest["dtype"]
        with ShardWriter(path, sites, dtype, ids, offsets, piece.rows, origin, statistics) as writer:
            try:
                for batch in read_batches(reader, texts, batch_tokens):
                    put_batch(writer, batch, piece, rollouts, checkpoint)
                    bar.update(int(np.diff(offsets)[batch.texts].sum()))
            except OutOfMemory as error:
                short = error
            if short is None:
                return {
                    "file": piece.file,
                    "n_tokens": int(offsets[-1]),
                    "n_trajectories": len(piece.rows),
                    "batch_tokens": batch_tokens,
                    "sha256": writer.finish(),
                }
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


def _resumable(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> dict[str, Any]:
    """The manifest found, where it is of the same capture."""

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
    return found
