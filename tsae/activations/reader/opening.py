"""Checkpoints opened as readers: checked against the rollouts, loaded, and given hooks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tsae.activations.catalogue import READER_INFO
from tsae.activations.config import CaptureConfig, ReadingConfig, StatesConfig
from tsae.activations.reader.assignment import check_context, check_text_alone, check_tokenizer, plan_readers
from tsae.activations.reader.forward_passes import Reader
from tsae.activations.reader.states import START, StatesReader
from tsae.activations.shards.shard import DTYPES
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.forward.bridge import TransformerLensReader
from tsae.checkpoints.forward.hooks import HuggingFaceReader, check_sites
from tsae.checkpoints.forward.placement import spread
from tsae.checkpoints.forward.predictions import PredictingReader
from tsae.checkpoints.limits import reading_limits
from tsae.checkpoints.loading import (
    ModelLoader,
    check_places,
    load_tokenizer,
    need_unchanged,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_THREADS = 4
"""Checkpoints that are hashed at the same time."""


class Base(NamedTuple):
    """A series whose checkpoints can read the rollouts, with its base loaded."""

    model: PreTrainedModel
    loader: ModelLoader | None
    """Loads the other readers; None where models are spread over all devices."""
    sites: list[str]
    plan: dict[str, np.ndarray]
    """Row ids of the trajectories that each reader reads."""
    facts: dict[str, Any]
    """What a manifest says of all readers: dtype, sites, rollouts, tokenizer, special_ids."""
    readers: list[dict[str, Any]]
    """What it says of each: id, run, step, trained_on, weights."""


def open_base(
    series: CheckpointSeries, rollouts: Rollouts, sites: Sequence[str], config: ReadingConfig, device: str
) -> Base:
    """Check that the checkpoints can read the rollouts, and load the base.

    Args:
        series: the readers.
        rollouts: what they read.
        sites: TransformerLens names; without any, the output of the middle block.
        config: how they read.
        device: where, instead of `config.device`.

    Raises:
        TsaeError: for tokenizers that do not fit the rollouts, weights without a place in their model, trajectories
            longer than the context, unknown sites, a precision that cannot be stored, or a base that is rewritten
            meanwhile.
    """
    tokenizers = [load_tokenizer(checkpoint) for checkpoint in series]
    plan = plan_readers([c.id for c in series], rollouts, config)
    for checkpoint, tokenizer in zip(series, tokenizers, strict=True):
        check_tokenizer(checkpoint, rollouts, tokenizer, others=tokenizers, rows=plan[checkpoint.id])
    check_places(series)
    loader = _loader(config, device)
    before = weights_fingerprint(series.base)
    model = _load(series.base, config, loader)
    text_config = model.config.get_text_config()
    depth, d_model = text_config.num_hidden_layers, text_config.hidden_size
    limits = getattr(text_config, "max_position_embeddings", None), text_config.vocab_size
    check_context(rollouts, *limits, rows=plan[series.base.id])
    check_text_alone(rollouts, model.config)
    sites = list(sites or [f"blocks.{depth // 2}.hook_resid_post"])
    check_sites(sites, depth, series.base.path)
    dtype = str(model.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        where = f"{type(config).__name__}.dtype"
        raise TsaeError(f"cannot store {dtype}", where=where, fix=f"Choose one of {', '.join(DTYPES)}.")
    facts = {
        "dtype": dtype,
        "sites": {site: {"d_model": d_model} for site in sites},
        "rollouts": rollouts.fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizers[0]),
        "special_ids": sorted(set(tokenizers[0].all_special_ids)),
    }
    need_unchanged(series.base, before)  # also once before all adapters ask for it
    with ThreadPoolExecutor(_THREADS) as pool:
        weights = list(pool.map(weights_fingerprint, series))
    readers = [
        {**{name: getattr(checkpoint, name) for name in READER_INFO}, "weights": hashed}
        for checkpoint, hashed in zip(series, weights, strict=True)
    ]
    for checkpoint in list(series)[1:]:
        if (found := reading_limits(checkpoint)) != limits:  # else the base's have been checked
            check_context(rollouts, *found, rows=plan[checkpoint.id], of=f"reader {checkpoint.id}")
    return Base(model, loader, sites, plan, facts, readers)


def as_reader(
    checkpoint: Checkpoint,
    sites: list[str],
    config: ReadingConfig,
    device: str,
    loader: ModelLoader | None,
    model: PreTrainedModel | None,
    server: StatesConfig | None = None,
) -> Reader:
    """A checkpoint with hooks; `model` is its own, where it is loaded already. If there is a server, that computes.

    Raises:
        TsaeError: where the backend needs a server and there is none.
    """
    reader: HuggingFaceReader | TransformerLensReader
    if config.backend == "transformer_lens":
        reader = TransformerLensReader(checkpoint, sites, device=device, dtype=config.model_dtype)
    else:
        reader = HuggingFaceReader(_load(checkpoint, config, loader) if model is None else model, sites)
    if config.backend == "vllm":
        server = check_server(server)
        dtype = reader.model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        return StatesReader(server, reader.model, sites, dtype)
    return PredictingReader(reader) if isinstance(config, CaptureConfig) and config.token_statistics else reader


def open_reader(checkpoint: Checkpoint, sites: list[str], config: ReadingConfig) -> Reader:
    """One checkpoint as a reader, with a loader of its own."""
    return as_reader(checkpoint, sites, config, config.device, _loader(config, config.device), None)


def check_server(server: StatesConfig | None) -> StatesConfig:
    """A server that can be asked.

    Raises:
        TsaeError: where there is none, or its address or folder is missing.
    """
    if server is None or not server.url or server.folder is None:
        raise TsaeError(
            "needs the address of a vLLM server and the folder into which it writes hidden states",
            where="the backend vllm",
            fix=f"Give --server.url and --server.folder; start the server as: {START}.",
        )
    return server


def _loader(config: ReadingConfig, device: str) -> ModelLoader | None:
    return None if device == "auto" else ModelLoader(device=device, dtype=config.model_dtype)


def _load(checkpoint: Checkpoint, config: ReadingConfig, loader: ModelLoader | None) -> PreTrainedModel:
    """Load a model; without a loader it is spread over all devices."""
    if loader is not None:
        return loader.load(checkpoint)
    model = checkpoint.load_model(dtype=config.model_dtype)
    spread(model)
    return model
