"""Which experts a mixture of experts chooses for every token, read with hooks on its routers.

A router is the outermost module of a block whose class is named so in transformers. What it returns has the chosen
experts (int) and their weights, or scores that are 0 for the others (Llama 4). Either is what the block goes on with,
whatever the rule: bias corrections and groups of experts, as DeepSeek's, are in it. An expert with the weight 0 is not
chosen: Zaya gives that to tokens that skip the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.hooks import decoder_blocks, hooked, input_device, run_body
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
        blocks = enumerate(decoder_blocks(model))
        found = {layer: module for layer, block in blocks for module in _outermost(block)}
        self.where = where = str(model.config._name_or_path)
        unknown = [layer for layer in layers or () if layer not in found]
        if unknown or not found:
            what = f"{type(model).__name__} has routers in the blocks ({', '.join(map(str, found)) or 'none'})"
            what += f", not in {unknown[0]}" if unknown else ": it is not a mixture of experts that is known here"
            raise TsaeError(what, where=where, fix="Give a mixture of experts, such as Mixtral or Qwen3-MoE.")
        self.routers = {layer: found[layer] for layer in (layers or found)}

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the model on a padded batch.

        Args:
            input_ids: (B, T) token ids on any device.
            attention_mask: (B, T) 1 for real tokens.

        Returns:
            by layer, as text, (B, T, n_experts) bool: the experts that a token goes to; at padding they mean nothing.

        Raises:
            TsaeError: where a router gives no choices, or NaN or infinity on a token that is not padding.
        """
        found: dict[str, torch.Tensor] = {}
        real = attention_mask.flatten().bool()

        def keep(layer: int, output: Any) -> None:
            router = self.routers[layer]
            parts = [p for p in (output if isinstance(output, tuple) else (output,)) if isinstance(p, torch.Tensor)]
            try:
                for part in parts:
                    if part.is_floating_point() and part.numel() % len(real) == 0:
                        values = part.reshape(len(real), -1)[real.to(part.device)]
                        if (values.isnan() | values.isposinf()).any():  # scores of what is left out may be -inf
                            raise ValueError("gives NaN or infinity")
                chosen = _chosen(parts, self._top_k(router), real)
            except ValueError as error:
                what = f"the router of block {layer}, {type(router).__name__}, {error}"
                fix = "Give a mixture of experts whose routers name the chosen ones, such as Mixtral or Qwen3-MoE."
                raise TsaeError(what, where=self.where, fix=fix) from error
            found[str(layer)] = chosen.reshape(*input_ids.shape, -1)

        handles = [
            module.register_forward_hook(lambda _m, _i, output, layer=layer: keep(layer, output))
            for layer, module in self.routers.items()
        ]
        with hooked(*handles):
            run_body(self.model, input_ids.to(self.device), attention_mask.to(self.device))
        return found

    def _top_k(self, router: torch.nn.Module) -> int | None:
        """How many experts a router chooses for a token; None where nothing says so."""
        config = self.model.config.get_text_config()
        found = getattr(router, "top_k", None) or getattr(config, "num_experts_per_tok", None)
        return found if isinstance(found, int) else None


def _outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The routers in a module that are in no other router: Zaya's has a part of that name."""
    if "router" in type(module).__name__.lower():
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _chosen(parts: Sequence[torch.Tensor], top_k: int | None, real: torch.Tensor) -> torch.Tensor:
    """(n_tokens, n_experts) bool: which experts a router chose. `real` marks the tokens that are not padding.

    Raises:
        ValueError: where these are not choices; it says what they are.
    """
    n_tokens = len(real)
    if not parts or not parts[0].is_floating_point() or parts[0].numel() % n_tokens:
        raise ValueError("returns no scores of its experts")
    scores = parts[0].reshape(n_tokens, -1)
    n_experts = scores.shape[1]
    for place, part in enumerate(parts):
        if part.is_floating_point():
            continue
        indices = part.reshape(n_tokens, -1) if part.numel() % n_tokens == 0 else part[None]
        k = top_k or indices.shape[1]
        if indices.shape != (n_tokens, k) or not ((indices >= 0) & (indices < n_experts)).all():
            raise ValueError(f"returns whole numbers that are not {k} of {n_experts} experts a token")
        weighted = place > 1 and parts[place - 1].shape == part.shape  # the first part is of all experts
        taken = parts[place - 1].reshape(n_tokens, -1) != 0 if weighted else torch.ones_like(indices)
        return torch.zeros_like(scores, dtype=torch.int).scatter_add_(1, indices.long(), taken.int()) > 0
    chosen = scores > 0
    if top_k is None or not (chosen.sum(1) == top_k)[real.to(chosen.device)].all():
        raise ValueError("returns scores, not choices")
    return chosen
