"""Forward passes over whole trajectories: batches of similar length under a token budget, the longest first.

What a token's activations are depends on its batch in their last bits: matrix products of another shape add up in
another order. So batches are planned from lengths and budget alone, and where one does not fit into memory, nothing is
changed in silence: `OutOfMemory` is raised, and the caller starts over with half the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class Reader(Protocol):
    """A model with hooks."""

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, T) right-padded token ids and mask -> by name (B, T, …) what the model computed."""


class Batch(NamedTuple):
    """What a reader computed on some trajectories."""

    texts: np.ndarray
    """(b,) positions in the sequence that was read."""
    values: dict[str, torch.Tensor]
    """By site (n_tokens, d_model) of these trajectories after one another, without padding."""


class OutOfMemory(Exception):
    """A batch did not fit into memory."""

    def __init__(self, texts: np.ndarray) -> None:
        self.texts = texts
        """(b,) trajectories of the batch, the longest first."""


def plan_batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Positions of trajectories of similar length; a batch holds at most batch_tokens with padding, or one trajectory.

    The longest come first: what attention needs grows with the square, so that memory runs out at once or not at all.
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
    """
    import torch

    lengths = np.array([len(text) for text in texts])
    for batch in plan_batches(lengths, batch_tokens):
        ids, mask = pad([texts[t] for t in batch])
        try:
            values = reader.read(ids, mask)
            found = {name: _without_padding(value, mask) for name, value in values.items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is None:
            # Out of the except block, whose traceback holds on to what the forward pass had made.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise OutOfMemory(batch)
        yield Batch(batch, found)


def pad(texts: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) token ids and mask of texts, padded on the right."""
    import torch

    ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.from_numpy(text.astype(np.int64))
        mask[i, : len(text)] = 1
    return ids, mask


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, where torch has no class of its own for that."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("DefaultCPUAllocator", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _without_padding(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    real = mask.bool()
    return value.flatten(0, 1) if bool(real.all()) else value[real.to(value.device)]
