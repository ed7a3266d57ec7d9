"""Spread models that are too large for one device over all devices, as accelerate's device_map="auto" does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def spread(model: PreTrainedModel) -> None:
    """Spread a model from the CPU's memory evenly over all GPUs; what does not fit there stays on the CPU.

    Decoder blocks stay whole. Every block runs on the GPU that holds it; blocks on the CPU move to a GPU while they
    run. Without GPUs the model stays where it is.

    Raises:
        TsaeError: where it does not fit into the memory of all devices together.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = sorted(getattr(model, "_no_split_modules", None) or ())
    memory = get_balanced_memory(model, dtype=model.dtype, no_split_module_classes=whole)
    places = infer_auto_device_map(model, max_memory=memory, dtype=model.dtype, no_split_module_classes=whole)
    if "disk" in places.values():
        raise TsaeError(
            "does not fit into the memory of all devices together",
            where=model.config._name_or_path,
            fix="Use a smaller precision (--model-dtype bfloat16) or a machine with more memory.",
        )
    # Hooks even on one device, so that inputs move the same way everywhere.
    dispatch_model(model, device_map=places, force_hooks=True)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embedding's, or the one where accelerate's hook runs it."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    while hook is not None:
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
        hook = next(iter(getattr(hook, "hooks", ())), None)
    return next(embedding.parameters()).device
