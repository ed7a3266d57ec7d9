"""Rotary embeddings that depend on a text's length: every row of a batch gets those that it has alone.

LongRoPE (Phi-3, Phi-4-mini) chooses its factors, and dynamic NTK its base, by the longest text of a batch. Dynamic NTK
also keeps the base of a longer text for the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel


def rotate_rows_alone(model: PreTrainedModel) -> list[RemovableHandle]:
    """Have every row of a batch rotated by its own length: one more than its largest position.

    Returns:
        a handle for each module that depends on the length; none for most models.
    """
    return [module.register_forward_hook(_each_row, with_kwargs=True) for module in depends_on_length(model)]


@contextmanager
def rotated_alone(model: PreTrainedModel) -> Iterator[None]:
    """`rotate_rows_alone` while it is open, for a model that somebody else loaded."""
    handles = rotate_rows_alone(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def depends_on_length(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules whose rotations depend on a text's length."""
    return [m for m in model.modules() if re.search("longrope|dynamic", str(getattr(m, "rope_type", "")))]


def _each_row(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What the module gives for rows of one length after another, each time as if it had read nothing before."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    places = given["position_ids"]  # (B, T)
    length = places.amax(-1)
    parts = [part.new_empty(len(places), *part.shape[1:]) for part in output]  # cosines and sines
    for own in length.unique():
        _forget(module, f"{given['layer_type']}_" if given.get("layer_type") else "")
        found = module.forward(**{**given, "position_ids": places[length == own]})
        for part, rows in zip(parts, found, strict=True):
            part[length == own] = rows
    return tuple(parts)


def _forget(module: Any, prefix: str) -> None:
    """Forget the longest text that the module has read."""
    before = getattr(module, f"{prefix}inv_freq")
    fresh = getattr(module, f"{prefix}original_inv_freq").clone().to(before.device)  # LongRoPE writes into it
    module.register_buffer(f"{prefix}inv_freq", fresh, persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
