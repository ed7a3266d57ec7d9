"""Which experts a mixture of experts chooses for every token, read with hooks on its routers.

A router is the module of a block whose class is named so in transformers. What it returns has the chosen experts (int),
or scores that are 0 for the others (Llama 4). Either is what the block goes on with, whatever the rule: bias
corrections and groups of experts, as DeepSeek's, are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.forward.hooks import decoder_blocks, positions
from tsae.checkpoints.forward.placement import input_device
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RouterReader:
    """Reads the choices of routers.

    Args:
        model: a mixture of experts.
        layers: blocks whose routers are read; by default all that have one.

    Raises:
        TsaeError: where the model, or one of the layers, has no router.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] | None = None) -> None:
        self.model, self.device = model, input_device(model)
        found = {
            layer: module
            for layer, block in enumerate(decoder_blocks(model))
            for module in block.modules()
            if "router" in type(module).__name__.lower()
        }
        where = str(model.config._name_or_path)
        if not found:
            what = f"{type(model).__name__} has no routers: it is no mixture of experts that is known here"
            raise TsaeError(what, where=where, fix="Give a mixture of experts, such as Mixtral or Qwen3-MoE.")
        unknown = [layer for layer in layers or () if layer not in found]
        if unknown:
            blocks = ", ".join(map(str, found))
            raise TsaeError(f"block {unknown[0]} has no router; blocks {blocks} have one", where=where)
        self.routers = {layer: found[layer] for layer in (layers or found)}

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the model on a padded batch.

        Args:
            input_ids: (B, T) token ids on any device.
            attention_mask: (B, T) 1 for real tokens.

        Returns:
            by layer, as text, (B, T, n_experts) bool: the experts that a token goes to; at padding they mean nothing.
        """
        found: dict[str, torch.Tensor] = {}

        def keep(layer: int, output: Any) -> None:
            found[str(layer)] = _chosen(output).reshape(*input_ids.shape, -1)

        handles = [
            module.register_forward_hook(lambda _m, _i, output, layer=layer: keep(layer, output))
            for layer, module in self.routers.items()
        ]
        mask = attention_mask.to(self.device)
        try:
            self.model(
                input_ids=input_ids.to(self.device),
                attention_mask=mask,
                position_ids=positions(mask),
                use_cache=False,
                logits_to_keep=1,
            )
        finally:
            for handle in handles:
                handle.remove()
        return found


def _chosen(output: Any) -> torch.Tensor:
    """(n_tokens, n_experts) bool of what a router returns."""
    parts = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, torch.Tensor)]
    scores = parts[0].reshape(-1, parts[0].shape[-1])
    for part in parts:
        if not part.is_floating_point():
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, part.reshape(len(scores), -1), True)
    return scores > 0
