"""Checkpoints as readers: held against the trajectories that they are to read, loaded, and given hooks.

Capture and the live source begin alike, with `open_base`: what can be known before anything is computed is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsae.activations.config import ReadingConfig
from tsae.activations.plan import check_context, check_tokenizer, plan_readers
from tsae.activations.reading import Reader
from tsae.activations.store import DTYPES
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tsae.checkpoints.checkpoint import Checkpoint
    from tsae.checkpoints.loading import ModelLoader
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.rollouts.table import Rollouts


class Base(NamedTuple):
    """A series whose readers may begin, its base loaded."""

    model: PreTrainedModel
    loader: ModelLoader | None
    """Loaded it, and loads the other readers; None where models are spread over all devices."""
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
        TsaeError: for tokenizers that do not fit the rollouts, trajectories longer than the context, unknown sites, or
            a precision that cannot be stored.
    """
    from tsae.checkpoints.forward.hooks import check_sites
    from tsae.checkpoints.loading import ModelLoader, load_tokenizer, tokenizer_fingerprint, weights_fingerprint

    tokenizers = [load_tokenizer(checkpoint) for checkpoint in series]
    for checkpoint, tokenizer in zip(series, tokenizers, strict=True):
        check_tokenizer(checkpoint, tokenizer_fingerprint(tokenizer), rollouts)
    loader = None if device == "auto" else ModelLoader(device=device, dtype=config.model_dtype)
    model = _load(series.base, config, loader)
    text_config = model.config.get_text_config()
    depth, d_model = text_config.num_hidden_layers, text_config.hidden_size
    check_context(rollouts, getattr(text_config, "max_position_embeddings", None), text_config.vocab_size)
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
    readers = [
        {
            "id": checkpoint.id,
            "run": checkpoint.run,
            "step": checkpoint.step,
            "trained_on": checkpoint.trained_on,
            "weights": weights_fingerprint(checkpoint),
        }
        for checkpoint in series
    ]
    return Base(model, loader, sites, plan_readers([c.id for c in series], rollouts, config), facts, readers)


def as_reader(
    checkpoint: Checkpoint,
    sites: list[str],
    config: ReadingConfig,
    device: str,
    loader: ModelLoader | None,
    model: PreTrainedModel | None,
) -> Reader:
    """The model is the checkpoint's own, where it is loaded already."""
    if config.backend == "transformer_lens":
        from tsae.checkpoints.forward.bridge import TransformerLensReader

        return TransformerLensReader(checkpoint, sites, device=device, dtype=config.model_dtype)
    from tsae.checkpoints.forward.hooks import HuggingFaceReader

    return HuggingFaceReader(_load(checkpoint, config, loader) if model is None else model, sites)


def open_reader(checkpoint: Checkpoint, sites: list[str], config: ReadingConfig) -> Reader:
    """A reader of its own for one checkpoint."""
    from tsae.checkpoints.loading import ModelLoader

    loader = None if config.device == "auto" else ModelLoader(device=config.device, dtype=config.model_dtype)
    return as_reader(checkpoint, sites, config, config.device, loader, None)


def _load(checkpoint: Checkpoint, config: ReadingConfig, loader: ModelLoader | None) -> PreTrainedModel:
    """Without a loader the model is spread over all devices."""
    if loader is not None:
        return loader.load(checkpoint)
    from tsae.checkpoints.forward.placement import spread

    model = checkpoint.load_model(dtype=config.model_dtype)
    spread(model)
    return model
