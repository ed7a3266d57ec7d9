"""Capture: every reader reads its trajectories, and the residual stream at the chosen sites goes into the store.

1. Plan: which reader reads which trajectories (`CaptureConfig.plan`), cut into shards of whole trajectories.
2. For every shard: batches of similar length under a token budget, right-padded with true attention masks; one
   forward pass that stops after the last site, or goes through the model's head where token statistics are wanted
   (`tsae.checkpoints.predictions`); padding never reaches the store.
3. A shard is written under a temporary name, renamed, then entered in the manifest. A rerun skips entered shards, so
   that an interrupted capture goes on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.activations.config import CaptureConfig, ReadingConfig
from tsae.activations.store import DTYPES, FORMAT, STATISTICS, VERSION, ActivationStore, read_manifest, write_shard
from tsae.errors import TsaeError
from tsae.provenance import write_json, write_run

if TYPE_CHECKING:
    import torch

    from tsae.checkpoints.series import Checkpoint, CheckpointSeries
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
        TsaeError: for unknown sites, tokenizers that do not fit the rollouts, trajectories longer than the context,
            non-finite activations, or a folder that holds another capture. A capture begun by this call leaves
            nothing behind then; one that it went on with stays as it was found.
    """
    from tqdm.auto import tqdm

    from tsae.checkpoints.loading import load_tokenizer, tokenizer_fingerprint, weights_fingerprint

    config, to = config or CaptureConfig(), Path(to)
    tokenizers = {checkpoint.id: load_tokenizer(checkpoint) for checkpoint in series}
    for checkpoint in series:
        _check_tokenizer(checkpoint, tokenizer_fingerprint(tokenizers[checkpoint.id]), rollouts)
    model = series.base.load_model(device=config.device, dtype=config.model_dtype)
    text_config = model.config.get_text_config()
    depth, d_model = text_config.num_hidden_layers, text_config.hidden_size
    _check_context(rollouts, getattr(text_config, "max_position_embeddings", None), text_config.vocab_size)
    sites = list(sites or [f"blocks.{depth // 2}.hook_resid_post"])
    from tsae.checkpoints.hooks import check_sites

    check_sites(sites, depth, series.base.path)
    dtype = str(model.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise TsaeError(f"cannot store {dtype}", where="CaptureConfig.dtype", fix=f"Choose one of {', '.join(DTYPES)}.")

    plan = _plan(series, rollouts, config)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "complete": False,
        "dtype": dtype,
        "sites": {site: {"d_model": d_model} for site in sites},
        "rollouts": rollouts.fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizers[series.base.id]),
        "special_ids": sorted(set(tokenizers[series.base.id].all_special_ids)),
        "config": asdict(config),
        "readers": [
            {
                "id": checkpoint.id,
                "run": checkpoint.run,
                "step": checkpoint.step,
                "trained_on": checkpoint.trained_on,
                "weights": weights_fingerprint(checkpoint),
                "n_trajectories": len(plan[checkpoint.id]),
                "shards": [],
            }
            for checkpoint in series
        ],
    }
    fresh = not (to / "manifest.json").is_file()
    if fresh and to.exists() and any(to.iterdir()):
        raise TsaeError("is not empty and holds no activation store", where=to, fix="Give an empty or new folder.")
    if not fresh:
        manifest = _resumable(read_manifest(to), manifest, to)
        if manifest["complete"]:
            # Activations depend on the tokens alone; outcomes, bands and other columns may have been measured since.
            rollouts.write(to / "rollouts.parquet")
            written = to / "run.json"
            if written.is_file():
                run = json.loads(written.read_text(encoding="utf-8"))
                write_json(written, {**run, "inputs": {**run["inputs"], "labels": rollouts.labels_fingerprint}})
            return ActivationStore(to)
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    total = sum(int(lengths[plan[c.id]].sum()) for c in series)
    try:
        to.mkdir(parents=True, exist_ok=True)
        rollouts.write(to / "rollouts.parquet")
        write_json(to / "manifest.json", manifest)
        with tqdm(total=total, desc="capture", unit="token", unit_scale=True, disable=not progress) as bar:
            for checkpoint, record in zip(series, manifest["readers"], strict=True):
                bar.set_postfix_str(checkpoint.id)
                pieces = list(_cut(plan[checkpoint.id], lengths, config.shard_tokens))
                done = len(record["shards"])
                bar.update(int(sum(lengths[rows].sum() for rows in pieces[:done])))
                if done == len(pieces):
                    continue
                reader = _reader(checkpoint, sites, config)
                for number, rows in enumerate(pieces[done:], done):
                    file = f"{checkpoint.id}/{number:05d}.h5"
                    token_ids, offsets, found, statistics = _read_shard(
                        reader, checkpoint, rollouts, rows, d_model, dtype, config, bar
                    )
                    write_shard(to / file, found, dtype, token_ids, offsets, rows, statistics)
                    record["shards"].append({"file": file, "n_tokens": int(offsets[-1]), "n_trajectories": len(rows)})
                    write_json(to / "manifest.json", manifest)
        inputs = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint, "series": series.name}
        write_run(to, "capture", config, inputs)
        write_json(to / "manifest.json", {**manifest, "complete": True})
    except TsaeError:
        # What puts this right changes a reader or the config, so that no shard could be used again.
        if fresh:
            shutil.rmtree(to)
        raise
    return ActivationStore(to)


def _plan(series: CheckpointSeries, rollouts: Rollouts, config: ReadingConfig) -> dict[str, np.ndarray]:
    """Row ids of the trajectories that each reader reads."""
    policy = np.array(rollouts.table["policy"].to_pylist())
    ids = {checkpoint.id for checkpoint in series}
    plan = config.plan
    if plan == "auto":
        plan = "paired" if set(policy) <= ids and series.base.id in policy else "all"
    everything = np.arange(len(rollouts))
    if plan == "all":
        return {checkpoint.id: everything for checkpoint in series}
    if series.base.id not in policy:
        raise TsaeError(
            f"no trajectory was sampled by the base {series.base.id!r}; policies are {', '.join(rollouts.policies)}",
            where="CaptureConfig.plan",
            fix='Sample from the base too, or use plan="all".',
        )
    return {
        checkpoint.id: everything
        if checkpoint.is_base
        else np.flatnonzero((policy == series.base.id) | (policy == checkpoint.id))
        for checkpoint in series
    }


def _cut(rows: np.ndarray, lengths: np.ndarray, shard_tokens: int) -> Iterator[np.ndarray]:
    """Consecutive pieces of whole trajectories; a piece starts anew where the budget would be passed."""
    start, tokens = 0, 0
    for end, row in enumerate(rows):
        if tokens and tokens + lengths[row] > shard_tokens:
            yield rows[start:end]
            start, tokens = end, 0
        tokens += int(lengths[row])
    yield rows[start:]


def _reader(checkpoint: Checkpoint, sites: list[str], config: ReadingConfig) -> Any:
    if config.backend == "transformer_lens":
        from tsae.checkpoints.bridge import TransformerLensReader

        return TransformerLensReader(checkpoint, sites, device=config.device, dtype=config.model_dtype)
    from tsae.checkpoints.hooks import HuggingFaceReader

    return HuggingFaceReader(checkpoint.load_model(device=config.device, dtype=config.model_dtype), sites)


def _read_shard(
    reader: Any,
    checkpoint: Checkpoint,
    rollouts: Rollouts,
    rows: np.ndarray,
    d_model: int,
    dtype: str,
    config: CaptureConfig,
    bar: Any,
) -> tuple[np.ndarray, np.ndarray, dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """(token_ids, offsets, {site: (n_tokens, d_model)}, {statistic: (n_tokens,)}) of one shard."""
    import torch

    texts = [np.concatenate(rollouts.tokens(int(row))) for row in rows]
    lengths = np.array([len(text) for text in texts])
    offsets = np.concatenate([[0], lengths.cumsum()])
    stored = getattr(torch, dtype)
    found: dict[str, torch.Tensor] = {}
    statistics = {name: np.empty(offsets[-1], np.float32) for name in STATISTICS if config.token_statistics}
    for batch in _batches(lengths, config.batch_tokens):
        width = int(lengths[batch].max())
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, t in enumerate(batch):
            ids[i, : lengths[t]] = torch.from_numpy(texts[t].astype(np.int64))
            mask[i, : lengths[t]] = 1
        ids, mask = ids.to(config.device), mask.to(config.device)
        if config.token_statistics:
            values, predicted = reader.read_and_predict(ids, mask)
            for name, of_batch in zip(statistics, predicted, strict=True):
                for i, t in enumerate(batch):
                    values_of_text = of_batch[i, : lengths[t]].cpu().numpy()
                    _check_predictions(values_of_text[1:], name, checkpoint, rollouts, int(rows[t]))
                    statistics[name][offsets[t] : offsets[t + 1]] = values_of_text
        else:
            values = reader.read(ids, mask)
        for site, value in values.items():
            if value.shape[-1] != d_model:
                raise TsaeError(
                    f"reader {checkpoint.id} has d_model {value.shape[-1]}, expected {d_model} as the base",
                    where=checkpoint.path,
                    fix="Capture checkpoints of other models into stores of their own.",
                )
            if site not in found:
                found[site] = torch.empty((int(offsets[-1]), value.shape[-1]), dtype=stored)
            for i, t in enumerate(batch):
                piece = value[i, : lengths[t]].to(stored)
                if not torch.isfinite(piece).all():
                    _raise_not_finite(value[i, : lengths[t]], checkpoint, rollouts, int(rows[t]), site, dtype)
                found[site][offsets[t] : offsets[t + 1]] = piece.cpu()
        bar.update(int(lengths[batch].sum()))
    return np.concatenate(texts), offsets, found, statistics


def _batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Trajectories of similar length together; a batch holds at most batch_tokens with padding, or one trajectory."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        # Sorted ascending: the newest is the longest, and sets the width.
        if end == len(order) or (end - start + 1) * lengths[order[end]] > batch_tokens:
            yield order[start:end]
            start = end


def _raise_not_finite(
    value: torch.Tensor, checkpoint: Checkpoint, rollouts: Rollouts, row: int, site: str, dtype: str
) -> None:
    import torch

    problem = rollouts.table["problem_id"][row].as_py()
    if bool(torch.isfinite(value).all()):
        raise TsaeError(
            f"activations up to {value.abs().max().item():.3g} at {site} overflow {dtype} "
            f"(trajectory {row}, problem {problem})",
            where=checkpoint.path,
            fix="Store bfloat16 or float32 (--dtype).",
        )
    raise TsaeError(
        f"activations at {site} are not finite while reader {checkpoint.id} reads trajectory {row} (problem {problem})",
        where=checkpoint.path,
        fix="Check that checkpoint's weights, or compute in float32 (--model-dtype float32).",
    )


def _check_predictions(values: np.ndarray, name: str, checkpoint: Checkpoint, rollouts: Rollouts, row: int) -> None:
    if np.isnan(values).any():
        problem = rollouts.table["problem_id"][row].as_py()
        raise TsaeError(
            f"the {name} of a token is not a number while reader {checkpoint.id} reads trajectory {row} "
            f"(problem {problem})",
            where=checkpoint.path,
            fix="Check that checkpoint's weights, or compute in float32 (--model-dtype float32).",
        )


def _check_tokenizer(checkpoint: Checkpoint, fingerprint: str, rollouts: Rollouts) -> None:
    expected = rollouts.info.get("tokenizer")
    if expected is not None and expected != fingerprint:
        raise TsaeError(
            f"its tokenizer ({fingerprint}) is not the one that the trajectories were tokenised with ({expected})",
            where=checkpoint.path,
            fix="Use rollouts tokenised for this model; import the log again with its tokenizer.",
        )


def _check_context(rollouts: Rollouts, context: int | None, vocabulary: int) -> None:
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    longest = int(lengths.argmax())
    if context is not None and lengths[longest] > context:
        raise TsaeError(
            f"trajectory {longest} has {lengths[longest]} tokens, more than the model's context of {context}",
            where=rollouts.origin,
            fix="Leave out trajectories longer than the context.",
        )
    for name in ("prompt_ids", "response_ids"):
        values = rollouts.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if values.min() < 0 or values.max() >= vocabulary:
            raise TsaeError(
                f"{name} holds token id {values.max() if values.max() >= vocabulary else values.min()}, "
                f"outside the model's vocabulary of {vocabulary}",
                where=rollouts.origin,
                fix="These trajectories were tokenised for another model; import them with this model's tokenizer.",
            )


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
