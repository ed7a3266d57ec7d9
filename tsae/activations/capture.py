"""Capture: every reader reads its trajectories, and the residual stream at the chosen sites goes into the store.

1. Plan: which reader reads which trajectories (`CaptureConfig.plan`), cut into shards of whole trajectories.
2. For every shard: batches of similar length under a token budget, right-padded with true attention masks. One forward
   pass a batch stops after the last site, or goes through the model's head for token statistics. Padding never reaches
   the store (`tsae.activations.forward_batches`).
3. A shard is written under a temporary name, renamed, then recorded (`tsae.activations.manifest`). A rerun skips
   recorded shards, so that it completes an interrupted capture and ends with the same bytes.

Same bytes: a shard is a function of weights, trajectories and batches, on the same hardware, threads and versions.
Batches depend on the config alone, unless one does not fit into memory. Then the shard begins again with half the
budget, and its entry in the manifest says so (``batch_tokens``). Every shard starts from the config's budget. So a
rerun gives the same bytes where memory runs out at the same sizes; where other programs took the memory, last bits may
differ, and the manifest shows it.

Parts: `capture_part` takes every n-th shard, whatever its reader, and knows nothing of the others. The part that finds
all shards recorded completes the store, which is that of one process, whatever n was. Any number of parts can complete
what others left. Under torchrun each process is a part, and they meet once, at the end.

Copies: the file of a shard also names the rollouts and its rows in them, and these change as a log grows. So a shard
that an earlier store holds already is found by weights and token ids, and written anew with the bytes of a capture.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.activations.config import CaptureConfig, StatesConfig
from tsae.activations.forward_batches import (
    Batch,
    OutOfMemory,
    Reader,
    naming_trajectories,
    read_batches,
    storing,
)
from tsae.activations.manifest import (
    KIND,
    STORE,
    VERSION,
    as_record,
    damage_of,
    essence,
    inside,
    read_manifest,
    record_file,
)
from tsae.activations.reading_plan import as_reader, beginnings, check_server, cut, open_base
from tsae.activations.shard import STATISTICS, Piece, Shard, ShardWriter, as_torch, open_shard
from tsae.activations.store import ActivationStore
from tsae.activations.vllm_reader import Sample, StatesReader
from tsae.base.artefact import command_facts, read_record, versions, write_record
from tsae.base.beside import Beside
from tsae.base.distributed import join
from tsae.base.files import clear_first
from tsae.base.mirror import local, published, removed, shown, there
from tsae.base.output_lock import output_lock
from tsae.base.part import Part, begin, world_size
from tsae.base.progress import progress_bar
from tsae.checkpoints.loading import need_unchanged, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_THREADS = 4
"""Shards that are compared with their checksums at once."""

_BATCHES = 2
"""That a GPU has read, and that may wait to be written."""


def capture(
    series: CheckpointSeries,
    rollouts: Rollouts,
    sites: Sequence[str] | None = None,
    *,
    to: str | Path,
    config: CaptureConfig | None = None,
    server: StatesConfig | None = None,
    earlier: str | Path | None = None,
    progress: bool = True,
) -> ActivationStore:
    """Record residual-stream activations of every reader over its trajectories.

    Args:
        series: the readers.
        rollouts: what they read; a copy goes into the store.
        sites: TransformerLens names; by default the output of the middle block.
        to: folder of the store. An interrupted capture is completed; in a finished one damaged shards are captured
            again.
        config: defaults of `CaptureConfig`.
        server: that computes for one of the readers, with the backend "vllm".
        earlier: folder of a finished store of the same config. Shards of it that hold what one of these is to hold, the
            same trajectories read by the same weights, are copied instead of captured; the bytes are the same.
        progress: show a bar.

    Raises:
        TsaeError: for unknown sites, tokenizers that do not fit the rollouts, trajectories longer than the context or
            too long for memory, non-finite activations, a checkpoint that is rewritten meanwhile, or a folder that
            holds another capture. What is recorded by then stays; a new capture that has recorded nothing leaves
            nothing behind. Also where a server computed for one reader, and others have still to read.
    """
    config, auto = config or CaptureConfig(), config is not None and config.device == "auto"
    what = 'device="auto" spreads one model over all GPUs, which several processes cannot share'
    refuse("CaptureConfig.device", (auto and world_size() > 1, what, "Start one process, or use --device cuda."))
    to = local(to)
    # A process that is done waits for the slowest.
    with output_lock(to), join("cpu" if auto else config.device, timeout=timedelta(days=7)) as processes:
        fresh = not (to / "manifest.json").is_file()
        processes.wait()
        part, device = Part(processes.rank, processes.size), "auto" if auto else processes.device
        refusal: TsaeError | None = None
        missing: list[str] = []
        try:
            shown, before = progress and processes.first, None if earlier is None else local(earlier)
            missing = _capture(series, rollouts, sites, to, config, shown, part, device, server, before)
        except TsaeError as error:
            refusal = error
        if any(processes.counts(int(refusal is not None))):
            # Recorded shards may be hours of work, and a network or a server may only have failed for a moment.
            if fresh and processes.first and (to / "manifest.json").is_file() and not _recorded(to):
                removed(to)
            raise refusal or TsaeError("another process stopped the capture", where=to, fix="See its message.")
        if server is not None and missing:
            what = f"other readers have {len(missing)} shards still to record, such as {missing[0]}"
            raise TsaeError(what, where=to, fix="Capture these with servers of their own.")
        if processes.first:
            for name in ("manifest.json", "rollouts.parquet"):  # of parts that were killed
                for left in to.glob(f"*{name}.part-[0-9]*"):
                    left.unlink()
        return ActivationStore(to)


def capture_part(
    series: CheckpointSeries,
    rollouts: Rollouts,
    sites: Sequence[str] | None = None,
    *,
    to: str | Path,
    part: Part,
    config: CaptureConfig | None = None,
    server: StatesConfig | None = None,
    progress: bool = True,
) -> list[str]:
    """Record one part of the shards, as `capture` would; start the others wherever the folder can be reached.

    Args:
        series, rollouts, sites, to, config, progress: as for `capture`, the same in all parts.
        part: which shards.
        server: as for `capture`; other parts may have others.

    Returns:
        shards that other parts have still to record. If there are none, the store is complete.

    Raises:
        TsaeError: as `capture`; what other parts wrote is kept.
    """
    config = config or CaptureConfig()
    refuse("part", (world_size() > 1, "parts are for processes that torchrun did not start", "Leave one of them out."))
    return _capture(series, rollouts, sites, local(to), config, progress, part, config.device, server)


def _capture(
    series: CheckpointSeries,
    rollouts: Rollouts,
    sites: Sequence[str] | None,
    to: Path,
    config: CaptureConfig,
    progress: bool,
    part: Part,
    device: str,
    server: StatesConfig | None = None,
    earlier: Path | None = None,
) -> list[str]:
    served = _served(series, config, server)
    base = open_base(series, rollouts, sites or (), config, device)
    model: PreTrainedModel | None = base.model
    sites, plan, loader = base.sites, base.plan, base.loader
    readers = [{**record, "n_trajectories": len(plan[record["id"]]), "shards": []} for record in base.readers]
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "complete": False,
        **base.facts,
        "config": asdict(config),
        "readers": readers,
    }
    del base  # So that the model can be freed when the base has read.
    _begin(to, manifest, rollouts, part)
    manifest = read_manifest(to)
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    pieces = list(cut(plan, lengths, config.shard_tokens, beginnings(rollouts, lengths, config)))
    mine = [piece for piece in pieces if served in (None, piece.reader)][part.index :: part.n]
    done = _whole(to, manifest, {piece.file for piece in mine})
    sizes = {piece.file: int(lengths[piece.rows].sum()) for piece in mine}
    found = {} if earlier is None else shards_by_content(earlier, manifest)
    reader: Reader | None = None
    current = ""

    def end(finish: Callable[[], dict[str, Any]], piece: Piece, weights: str) -> None:
        entry = finish()
        need_unchanged(series[piece.reader], weights, loaded=True)  # before the shard counts
        record = write_record(inside(to, record_file(piece.file)), as_record(entry, manifest))
        uploads.run(partial(published, inside(to, piece.file), record))

    with (
        progress_bar("capture", "token", sum(sizes.values()), shown=progress) as bar,
        Beside(2) as uploads,
        Beside(0 if device == "cpu" else 1) as ends,
    ):
        bar.update(sum(size for file, size in sizes.items() if file in done))
        for file in sorted(done):  # whose upload may have failed
            uploads.run(partial(published, inside(to, file), inside(to, record_file(file))))
        for piece in [piece for piece in mine if piece.file not in done]:
            weights = next(record["weights"] for record in manifest["readers"] if record["id"] == piece.reader)
            before = found.get(content_of(weights, *texts_of(piece, rollouts))) if found else None
            if before is not None:
                entry = copy_shard(*before, rollouts, piece, to, manifest)
                write_record(inside(to, record_file(piece.file)), as_record(entry, manifest))
                bar.update(sizes[piece.file])
                continue
            if piece.reader != current:
                # Free the last reader before loading the next. The base's model is loaded already.
                reader, current, kept = None, piece.reader, model if piece.reader == series.base.id else None
                model = None
                bar.set_postfix_str(current, refresh=False)
                reader, kept = as_reader(series[current], sites, config, device, loader, kept, server), None
                need_unchanged(series[current], weights)
            assert reader is not None
            path = series[current].path
            finish = capture_shard(reader, path, rollouts, piece, to, manifest, config.batch_tokens, bar)
            ends.run(partial(end, finish, piece, weights))
    return _complete(to, pieces, rollouts, series, part)


def _whole(to: Path, manifest: dict[str, Any], mine: set[str]) -> set[str]:
    """Which of some shards are recorded and have their hash; each file is read once in a process.

    Of a store at a URL, only the shards on this machine are compared now,
    and the others when they are fetched.
    """
    recorded = [(reader["id"], record) for reader in manifest["readers"] for record in reader["shards"]]
    shards = [(reader, record) for reader, record in recorded if record["file"] in mine]
    away = shown(to) != str(to)

    def whole(shard: tuple[str, dict[str, Any]]) -> bool:
        file = to / shard[1]["file"]
        inside(to, str(Path(shard[1]["file"]).parent))
        refuse(file, (file.is_dir(), "is a folder, expected a shard", "Remove it."))
        what = "" if away and not file.is_file() else damage_of(to, manifest, *shard)
        if what:
            print(f"{file}: {what}; it is captured again", file=sys.stderr)
        return not what

    with ThreadPoolExecutor(_THREADS) as pool:
        return {shard[1]["file"] for shard, found in zip(shards, pool.map(whole, shards), strict=True) if found}


def _recorded(to: Path) -> bool:
    """Whether a capture has recorded any shard; also where that cannot be told, such as without a network."""
    try:
        return any(reader["shards"] for reader in read_manifest(to)["readers"])
    except TsaeError:
        return True


def _served(series: CheckpointSeries, config: CaptureConfig, server: StatesConfig | None) -> str | None:
    """The only reader that can read here, because a server serves it; None where all can."""
    if config.backend != "vllm":
        refuse("server", (server is not None, f"is given, and the backend is {config.backend}", "Add --backend vllm."))
        return None
    server = check_server(server)
    if server.reader is None and len(series) > 1:
        what = f"a server serves one checkpoint, and here are {', '.join(checkpoint.id for checkpoint in series)}"
        fix = "Name it (--server.reader), and give the command again for each of the others."
        raise TsaeError(what, where="StatesConfig.reader", fix=fix)
    return series[server.reader].id if server.reader else series.base.id


def _complete(to: Path, pieces: Sequence[Piece], rollouts: Rollouts, series: CheckpointSeries, part: Part) -> list[str]:
    """Put the records into the manifest if all shards are there; else say which are missing."""
    manifest = read_manifest(to)
    recorded = {shard["file"] for record in manifest["readers"] for shard in record["shards"]}
    missing = [piece.file for piece in pieces if piece.file not in recorded]
    for reader in manifest["readers"]:
        reader["shards"] = [shard for shard in reader["shards"] if shard["file"] in {piece.file for piece in pieces}]
    if not missing:
        of = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint}
        closed = {"inputs": {**of, "series": series.name}, "gives": of, "versions": versions(), **command_facts(to)}
        _put(part, to / "manifest.json", {**manifest, "complete": True, **({} if manifest["complete"] else closed)})
        published(to / "manifest.json")
        _clear(to, manifest)
    return missing


def _clear(to: Path, manifest: dict[str, Any]) -> None:
    """Remove what a finished store does not need: records, which its manifest has taken in, and what killed parts left.

    Another part may do the same at this moment. None can still begin.
    """
    clear_first(to / "manifest.json")
    for reader in manifest["readers"]:
        for shard in reader["shards"]:
            record = inside(to, record_file(shard["file"]))
            if there(record):
                removed(record)


def _put(part: Part, file: Path, content: dict[str, Any]) -> None:
    """Write a record whole or not at all, also where other parts write the same file at this moment."""
    os.replace(write_record(part.own(file), content), file)


def _begin(to: Path, wanted: dict[str, Any], rollouts: Rollouts, part: Part) -> None:
    """Write the manifest of a new capture, or check that the folder holds the same one."""
    manifest = to / "manifest.json"
    # Where another part was first, its manifest is compared.
    begin(manifest, wanted, "is not empty and holds no activation store", "Give an empty or new folder.", write_record)
    found = read_manifest(to)
    ours, theirs = essence(wanted), essence(found)
    different = sorted(key for key in ours if theirs.get(key) != ours[key])
    what = f"holds another capture: {', '.join(different)} differ"
    refuse(to, (different, what, "Give another folder, or delete this one."))
    # Activations depend on the tokens alone; outcomes, bands and other columns may have changed since.
    os.replace(rollouts.write(part.own(to / "rollouts.parquet")), to / "rollouts.parquet")
    labels = rollouts.labels_fingerprint
    if found["complete"] and found["gives"]["labels"] != labels:
        of = {name: {**found[name], "labels": labels} for name in ("inputs", "gives")}
        _put(part, manifest, {**read_record(manifest, STORE.fix), **of})
    for file in (manifest, to / "rollouts.parquet"):
        published(file)


def capture_shard(
    reader: Reader,
    checkpoint: str,
    rollouts: Rollouts,
    piece: Piece,
    folder: Path,
    manifest: Mapping[str, Any],
    batch_tokens: int,
    bar: Any,
) -> Callable[[], dict[str, Any]]:
    """Read the trajectories of a shard.

    What a GPU computes is written in a thread while it reads on. The result waits for that, in any thread; it flushes
    the shard to disk and gives its entry for the manifest.

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
        TsaeError: here or by the result, where activations are not finite or overflow, one trajectory alone does not
            fit into memory, or a server gives other activations than the checkpoint computes.
    """
    ids, offsets = texts_of(piece, rollouts)
    texts = np.split(ids, offsets[1:-1])
    before = bar.n
    while True:
        short: OutOfMemory | None = None
        again = Sample(reader, texts, piece.file) if isinstance(reader, StatesReader) else None
        with ExitStack() as held:
            held.enter_context(naming_trajectories(piece, rollouts))
            writer = held.enter_context(shard_writer(piece, ids, offsets, folder, manifest))
            writing = held.enter_context(Beside(_BATCHES))
            try:
                for batch in read_batches(reader, texts, batch_tokens):
                    if again is not None:
                        again.compare(batch)
                    put = _putting(writer, batch, manifest, checkpoint)
                    if any(value.device.type == "cuda" for value in batch.values.values()):
                        writing.run(put)
                    else:
                        put()
                    bar.update(sum(batch.lengths))
                    del batch, put
            except OutOfMemory as error:
                short = error
            if short is None:
                entry: dict[str, Any] = {
                    "file": piece.file,
                    "n_tokens": int(offsets[-1]),
                    "n_trajectories": len(piece.rows),
                    "batch_tokens": batch_tokens,
                    "hash": "",  # until it is finished
                }
                if again is not None:
                    entry["read_again"] = {"trajectories": len(again.chosen), "largest_difference": again.largest}
                return partial(_finish, writer, writing, held.pop_all(), entry)
        if len(short.texts) == 1:
            t = int(short.texts[0])
            what = f"trajectory {piece.rows[t]} of {len(texts[t])} tokens does not fit into memory by itself"
            fix = "Leave it out, compute in bfloat16 (--model-dtype), or use a device with more memory."
            raise TsaeError(what, where=checkpoint, fix=fix) from short
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
    # The shard's own name may be a link, whose place it takes.
    file = inside(folder, str(Path(piece.file).parent)) / Path(piece.file).name
    return ShardWriter(file, sites, manifest["dtype"], ids, offsets, piece.rows, origin, statistics)


def _finish(writer: ShardWriter, writing: Beside, held: ExitStack, entry: dict[str, Any]) -> dict[str, Any]:
    with held:
        writing.wait()
        return {**entry, "hash": writer.finish()}


def _putting(writer: ShardWriter, batch: Batch, manifest: Mapping[str, Any], checkpoint: str) -> Callable[[], None]:
    """Begin to bring what the reader computed on a batch to the CPU. The result checks it and writes it."""
    coming = {name: storing(batch, name, manifest, checkpoint) for name in (*writer.sites, *writer.statistics)}

    def put() -> None:
        for name, arrived in coming.items():
            for t, values, norms in arrived():
                writer.put(name, t, values, norms)

    return put


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
            for name in writer.statistics:
                writer.put(name, i, as_torch(np.array(getattr(shard, name)[tokens]), "float32"))
        return {**record, "file": piece.file, "hash": writer.finish()}


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
