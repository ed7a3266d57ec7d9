"""Forward passes over whole trajectories, in batches of similar length under a token budget.

The last bits of a token's activations depend on its batch, because matrix products of another shape add up in another
order. So batches are planned from lengths and budget alone. Where one does not fit into memory, `OutOfMemory` is
raised, and the caller starts again with half the budget and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from einops import rearrange

from tsae.activations.shard import Piece
from tsae.base.beside import to_cpu
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


class Reader(Protocol):
    """A model with hooks."""

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, T) right-padded token ids and mask -> by name (B, T, …) what the model computed."""


class Batch(NamedTuple):
    """What a reader computed on some trajectories."""

    texts: np.ndarray
    """(b,) positions in the sequence that was read."""
    values: dict[str, torch.Tensor]
    """By site (n_tokens, d_model) of these trajectories, one after another, without padding."""
    lengths: list[int]
    """Tokens of each trajectory."""

    def each(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(position, (n_tokens, …) of a site or prediction) of every trajectory."""
        return zip(self.texts.tolist(), self.values[name].split(self.lengths), strict=True)


class OutOfMemory(Exception):
    """A batch did not fit into memory."""

    def __init__(self, texts: np.ndarray) -> None:
        self.texts = texts
        """(b,) trajectories of the batch, the longest first."""


class Misread(Exception):
    """What came back for a trajectory is not what the model computes on it."""

    def __init__(self, text: int, what: str, where: str, fix: str) -> None:
        self.text = text
        """Position of the trajectory in what was read."""
        self.what, self.where, self.fix = what, where, fix
        """The parts of the message for the user."""


def plan_batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Positions of trajectories of similar length; a batch holds at most batch_tokens with padding, or one trajectory.

    The longest come first: attention's memory grows with the square of the length, so that a batch that does not fit
    comes at once.
    """
    order, start = np.argsort(-lengths, kind="stable"), 0
    while start < len(order):
        end = start + max(1, batch_tokens // max(1, int(lengths[order[start]])))
        yield order[start:end]
        start = end


def read_batches(reader: Reader, texts: Sequence[np.ndarray], batch_tokens: int) -> Iterator[Batch]:
    """Read trajectories, given as token ids, in planned batches.

    Raises:
        OutOfMemory: where a batch does not fit.
        Misread: as the reader, of a trajectory's position in the texts.
    """
    lengths = np.array([len(text) for text in texts])
    for batch in plan_batches(lengths, batch_tokens):
        ids, mask = pad([texts[t] for t in batch])
        try:
            values = reader.read(ids, mask)
            found = {name: _without_padding(value, mask) for name, value in values.items()}
        except Misread as error:
            raise Misread(int(batch[error.text]), error.what, error.where, error.fix) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is None:
            # Not in the except block, whose traceback keeps what the forward pass had computed.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise OutOfMemory(batch)
        yield Batch(batch, found, lengths[batch].tolist())


@contextmanager
def fitting(batch_tokens: int, where: str) -> Iterator[None]:
    """Turn `OutOfMemory` into a TsaeError that names the budget."""
    try:
        yield
    except OutOfMemory as error:
        what = f"a batch of {batch_tokens} tokens does not fit into memory"
        raise TsaeError(what, where=where, fix="Set a smaller batch_tokens (--batch-tokens).") from error


def pad(texts: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) token ids and mask of texts, padded on the right."""
    ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.from_numpy(text.astype(np.int64))
        mask[i, : len(text)] = 1
    return ids, mask


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, where torch has no class of its own for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("DefaultCPUAllocator", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _without_padding(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    flat = rearrange(value, "text token ... -> (text token) ...")
    real = mask.flatten().nonzero()[:, 0]  # of the mask on the CPU: a GPU that counts is waited for
    return flat if len(real) == len(flat) else flat.index_select(0, real.to(value.device, non_blocking=True))


def storing(
    batch: Batch, name: str, manifest: Mapping[str, Any], checkpoint: str
) -> Callable[[], Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]]:
    """Start to copy to the CPU what is stored of a site or statistic. The result waits for the copy, in any thread.

    Args:
        batch: what a reader computed.
        name: of a site or statistic.
        manifest: says d_model and the stored precision.
        checkpoint: the reader's path, for messages.

    Returns:
        (position, (n_tokens, …) in the stored precision, (n_tokens,) float32 norms of these if a GPU computed them) of
        every trajectory.

    Raises:
        Misread: where a reader has another d_model than the base; the result, where a value is not finite once it is
            stored. The first token of a text has no statistics.
    """
    value, site = batch.values[name], manifest["sites"].get(name)
    if site is not None and value.shape[-1] != site["d_model"]:
        what = f"activations have d_model {value.shape[-1]}, expected {site['d_model']} as the base,"
        raise Misread(int(batch.texts[0]), what, checkpoint, "Use checkpoints of one model together.")
    stored = value.to(torch.float32 if site is None else getattr(torch, manifest["dtype"]))
    on_gpu = site is not None and stored.device.type == "cuda"
    norms = to_cpu(torch.linalg.vector_norm(stored, dim=1, dtype=torch.float32)) if on_gpu else None
    copy = to_cpu(stored)

    def arrived() -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        kept, lengths = copy(), None if norms is None else norms()
        each = kept.split(batch.lengths)
        # A norm is finite only if all values are. A token without a chance has the log-probability -inf.
        if (lengths is None or not lengths.isfinite().all()) and not kept.isfinite().all():
            for (t, computed), text in zip(batch.each(name), each, strict=True):
                if text[1:].isnan().any() if site is None else not text.isfinite().all():
                    raise _not_finite(t, name, computed, manifest["dtype"], checkpoint)
        of = [None] * len(each) if lengths is None else [*lengths.split(batch.lengths)]
        yield from zip(batch.texts.tolist(), each, of, strict=True)

    return arrived


def _not_finite(text: int, name: str, computed: torch.Tensor, dtype: str, checkpoint: str) -> Misread:
    what, fix = "are not finite", "Check that checkpoint's weights, or compute in float32 (--model-dtype float32)."
    if bool(computed.isfinite().all()):
        what, fix = f"overflow {dtype}", "Store bfloat16 or float32 (--dtype)."
    return Misread(text, f"values up to {computed.abs().max().item():.3g} at {name} {what}", checkpoint, fix)


@contextmanager
def naming_trajectories(piece: Piece, rollouts: Rollouts) -> Iterator[None]:
    """Say of which trajectory a `Misread` is.

    Args:
        piece: what is read.
        rollouts: the trajectories.
    """
    try:
        yield
    except Misread as error:
        row = int(piece.rows[error.text])
        problem = rollouts.table["problem_id"][row].as_py()
        what = f"{error.what} while reader {piece.reader} reads trajectory {row} (problem {problem})"
        raise TsaeError(what, where=error.where, fix=error.fix) from error
