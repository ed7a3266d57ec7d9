"""Rotary embeddings that depend on a text's length: every row of a batch gets those that it has alone.

LongRoPE (Phi-3, Phi-4-mini) chooses its factors, and dynamic NTK its base, by the longest text of a batch. Dynamic NTK
also keeps the base of a longer text for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
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
    return [m for m in model.modules() if any(_changes(kind) for kind in _kinds(m).values())]


def _kinds(module: torch.nn.Module) -> dict[str | None, Any]:
    """Kind of rotary embedding, by type of layer where these differ."""
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, dict) else {None: kind}


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _each_row(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    layer, places = given.get("layer_type"), given["position_ids"]  # (B, T)
    kind = _kinds(module).get(layer)
    if not _changes(kind) or places.ndim != 2:
        return None
    length, dynamic = places.amax(1) + 1, kind != "longrope"
    if dynamic:
        border = module.original_max_seq_len
        own = length.where(length > border, 0)
    else:
        parameters = module.config.rope_parameters
        own = length > (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]
    several = own.unique()
    if len(several) == 1 and not dynamic:
        return None
    parts = [output] if isinstance(output, torch.Tensor) else list(output)
    parts = [part.new_empty(len(places), *part.shape[1:]) for part in parts]
    for each in several:
        if dynamic:
            _forget(module, "" if layer is None else f"{layer}_")
        found = module.forward(**{**given, "position_ids": places[own == each]})
        for part, rows in zip(parts, [found] if isinstance(found, torch.Tensor) else found, strict=True):
            part[own == each] = rows
    return parts[0] if isinstance(output, torch.Tensor) else tuple(parts)


def _forget(module: Any, prefix: str) -> None:
    """Forget the longest text that the module has read."""
    before = getattr(module, f"{prefix}inv_freq")
    fresh = getattr(module, f"{prefix}original_inv_freq").to(before.device)
    module.register_buffer(f"{prefix}inv_freq", fresh, persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
