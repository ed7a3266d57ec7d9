"""The reading plan: which checkpoint reads which trajectories, in which shards.

`open_base` checks that every checkpoint can read its trajectories (tokenizer, context, vocabulary) before anything is
computed. `as_reader` loads a checkpoint and gives it hooks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tsae.activations.catalogue import READER_INFO
from tsae.activations.config import CaptureConfig, ReadingConfig, StatesConfig
from tsae.activations.forward_batches import Reader
from tsae.activations.shard import DTYPES, Piece
from tsae.activations.vllm_reader import START, StatesReader
from tsae.checkpoints.bridge import TransformerLensReader
from tsae.checkpoints.hooks import HuggingFaceReader, PredictingReader, spread
from tsae.checkpoints.loading import Checkpoint, ModelLoader, check_places, need_unchanged, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.sites import check_sites
from tsae.checkpoints.tokenizers import (
    load_tokenizer,
    noted_tokens,
    reading_limits,
    some_strings,
    tokenizer_fingerprint,
    tokens_by_id,
)
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def plan_readers(ids: Sequence[str], rollouts: Rollouts, config: ReadingConfig) -> dict[str, np.ndarray]:
    """Row ids of the trajectories that each reader reads; the first of the ids is the base's."""
    base, plan, policies = ids[0], config.plan, rollouts.policies
    if plan == "auto":
        plan = "paired" if set(policies) <= set(ids) and base in policies else "all"
    everything = np.arange(len(rollouts))
    if plan == "all":
        return dict.fromkeys(ids, everything)
    own = plan == "own"
    missing = next((id for id in (ids if own else [base]) if id not in policies), None)
    if missing is not None:
        what = f"no trajectory was sampled by {missing!r}; policies are {', '.join(policies)}"
        fix = "Sample from it too, or leave that checkpoint out." if own else 'Sample from the base, or use plan="all".'
        raise TsaeError(what, where="CaptureConfig.plan", fix=fix)
    if own:
        return {id: _rows_of([id], rollouts) for id in ids}
    return {id: everything if id == base else _rows_of([base, id], rollouts) for id in ids}


def _rows_of(policies: list[str], rollouts: Rollouts) -> np.ndarray:
    """Row ids of the trajectories that some policies sampled."""
    return np.flatnonzero(pc.is_in(rollouts.table["policy"], value_set=pa.array(policies)).to_numpy())


def cut(
    plan: Mapping[str, np.ndarray], lengths: np.ndarray, shard_tokens: int, begins: np.ndarray | None = None
) -> Iterator[Piece]:
    """Consecutive whole trajectories of each reader; the next shard begins where one would exceed the budget.

    Args:
        plan: row ids of the trajectories that each reader reads.
        lengths: (n,) tokens of every trajectory.
        shard_tokens: the budget.
        begins: (n,) bool, trajectories with which a shard begins in any case; see `beginnings`.
    """
    for reader, rows in plan.items():
        number, start, tokens = 0, 0, 0
        for end, row in enumerate(rows):
            if tokens and (tokens + lengths[row] > shard_tokens or (begins is not None and begins[row])):
                yield Piece(reader, f"{reader}/{number:05d}.h5", rows[start:end])
                number, start, tokens = number + 1, end, 0
            tokens += int(lengths[row])
        yield Piece(reader, f"{reader}/{number:05d}.h5", rows[start:])


def beginnings(rollouts: Rollouts, lengths: np.ndarray, config: CaptureConfig) -> np.ndarray | None:
    """(n,) bool, trajectories with which a shard begins in any case; None without `CaptureConfig.steady_shards`.

    A shard begins with a problem whose hash says so. One problem in 2^m does; m depends on the tokens of a problem, to
    a power of two. So a shard does not depend on trajectories before or after it, and most shards of a log that has
    grown, or of another part of it, are those of before.
    """
    if not config.steady_shards:
        return None
    problem = rollouts.table["problem_id"].to_pandas().to_numpy()
    first = np.concatenate([[True], problem[1:] != problem[:-1]])
    one_in = max(1.0, config.shard_tokens / 4 * first.sum() / max(int(lengths.sum()), 1))
    mask = (1 << round(np.log2(one_in))) - 1
    chosen = {id: _hash(id) & mask == 0 for id in set(problem[first])}
    return first & np.array([chosen[id] for id in problem])


def _hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def check_tokenizer(
    checkpoint: Checkpoint,
    rollouts: Rollouts,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    others: Sequence[PreTrainedTokenizerBase] = (),
    rows: np.ndarray | None = None,
) -> PreTrainedTokenizerBase:
    """Refuse a checkpoint to which a token of the trajectories means something else; tokens in none do not matter.

    Args:
        checkpoint: the reader.
        rollouts: what it reads.
        tokenizer: its own, by default loaded.
        others: tokenizers of its series, which may be that of the trajectories; by default the base's.
        rows: ids of the trajectories that it reads; by default all.

    Returns:
        its tokenizer.
    """
    tokenizer = checkpoint.load_tokenizer() if tokenizer is None else tokenizer
    expected = rollouts.info.get("tokenizer")
    if expected in (None, found := tokenizer_fingerprint(tokenizer)):
        return tokenizer
    own = tokens_by_id(tokenizer)
    if not others and checkpoint.base is not None:
        others = [checkpoint.base.load_tokenizer()]
    theirs = noted_tokens(rollouts.info, [*map(tokens_by_id, others), own])
    what = f"its tokenizer ({found}) is not the one that the trajectories were tokenised with ({expected})"
    if theirs is not None:
        other = [id for id in {*own, *theirs} if own.get(id) != theirs.get(id)]
        place = first_with(rollouts, lambda ids: np.isin(ids, other), rows)
        if place is None:
            return tokenizer
        here, there = (repr(of[place[1]])[:60] if place[1] in of else "no token" for of in (own, theirs))
        what = f"trajectory {place[0]} holds token id {place[1]}: {there} to the tokenizer of the trajectories, {here}"
        what += f" to that of {checkpoint.id}"
    fix = "Leave out trajectories with this token, or import the log again with this checkpoint's tokenizer."
    raise TsaeError(what, where=checkpoint.path, fix=fix)


def first_with(
    rollouts: Rollouts, wanted: Callable[[np.ndarray], np.ndarray], rows: np.ndarray | None = None
) -> tuple[int, int] | None:
    """The first trajectory with one of some token ids, and the id; None where there is none.

    Args:
        rollouts: the trajectories.
        wanted: ids -> bool for each.
        rows: ids of the trajectories that count; by default all.
    """
    for name in ("prompt_ids", "response_ids"):
        start = 0
        for chunk in rollouts.table[name].chunks:  # joined, they would be copied into memory
            ids, ends = chunk.flatten().to_numpy(zero_copy_only=False), chunk.value_lengths().to_numpy().cumsum()
            at = np.flatnonzero(wanted(ids))
            held = start + np.searchsorted(ends, at, side="right")
            counted = np.flatnonzero(np.ones(len(at), dtype=bool) if rows is None else np.isin(held, rows))
            if len(counted):
                return int(held[counted[0]]), int(ids[at[counted[0]]])
            start += len(chunk)
    return None


def check_text_alone(rollouts: Rollouts, config: Any) -> None:
    """Refuse trajectories with placeholders of images, video or sound, whose content the rollouts do not hold.

    Args:
        rollouts: the trajectories.
        config: the model's, which names the ids of its placeholders.
    """
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    kinds = {id: name.partition("_")[0] for name in names if (id := getattr(config, name, None)) is not None}
    if kinds and (place := first_with(rollouts, lambda ids: np.isin(ids, list(kinds)))) is not None:
        row, id = place
        what = f"trajectory {row} holds token {id}, which stands for {kinds[id]} input; images, video and sound"
        fix = "Leave these trajectories out: as text alone the model would read something else."
        raise TsaeError(f"{what} are not read", where=rollouts.origin, fix=fix)


def check_context(
    rollouts: Rollouts,
    context: int | None,
    vocabulary: int | None,
    *,
    rows: np.ndarray | None = None,
    of: str = "the model",
) -> None:
    """Refuse trajectories longer than the context, and token ids outside the vocabulary.

    Args:
        rollouts: the trajectories.
        context: tokens that the model can read; None if that is not known.
        vocabulary: token ids that it has; None if that is not known.
        rows: ids of the trajectories that it reads; by default all.
        of: whose context and vocabulary these are, for messages.
    """
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    longest = int(lengths.argmax() if rows is None else rows[lengths[rows].argmax()])
    what = None
    if context is not None and lengths[longest] > context:
        what = f"trajectory {longest} has {lengths[longest]} tokens, more than {of}'s context of {context}"
    elif vocabulary is not None and (place := first_with(rollouts, lambda ids: (ids < 0) | (ids >= vocabulary), rows)):
        what = f"trajectory {place[0]} holds token id {place[1]}, outside {of}'s vocabulary of {vocabulary}"
    if what is not None:
        fix = "Leave out such trajectories, or import the log again with this model's tokenizer."
        raise TsaeError(what, where=rollouts.origin, fix=fix)


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
    """What a manifest says of all readers: dtype, sites, rollouts, tokenizer, special_ids, token_strings."""
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
        "token_strings": some_strings(tokenizers[0], rollouts.token_ids()),
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
    what = "reads files that a vLLM server holds locks of, which is possible on Linux and macOS alone"
    refuse("the backend vllm", (os.name == "nt", what, "Leave --backend vllm out, or run the command on Linux."))
    if server is None or not server.url or server.folder is None:
        what = "needs the address of a vLLM server and the folder into which it writes hidden states"
        fix = f"Give --server.url and --server.folder; start the server as: {START}."
        raise TsaeError(what, where="the backend vllm", fix=fix)
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
