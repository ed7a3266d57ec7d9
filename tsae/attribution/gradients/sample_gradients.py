"""The weights that a run trains, and their gradients by single samples from one backward pass over a batch.

Every module's gradient is a function of what it read and of what came back to it. Both carry the batch's axis, so the
sum over samples, which autograd would take, is left out:

    linear       ∂L_i/∂W = Σ_t δ_it x_itᵀ
    others       a vector-Jacobian product of the module alone, mapped over the samples (norms, embeddings)

Only the activations are differentiated by autograd; the sums of weight gradients are never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from einops import einsum, rearrange, reduce

from tsae.checkpoints.hooks import positions
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainedWeights:
    """The weights that a run trains, as one vector in a fixed order.

    Args:
        model: has them.
        names: of parameters, as `model.named_parameters` gives them; by default all.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str] | None = None) -> None:
        all_of = dict(model.named_parameters())
        unknown = [name for name in names or () if name not in all_of]
        if unknown:
            raise TsaeError(f"the model has no weight {unknown[0]!r}", where="TrainedWeights")
        self.model = model
        self.parameters = {name: all_of[name] for name in (names if names is not None else all_of)}
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]

    def __len__(self) -> int:
        return sum(self.sizes)

    def vector(self) -> torch.Tensor:
        """(P,) a copy of the weights, float32 or wider."""
        return self.join({name: p.detach() for name, p in self.parameters.items()})

    def join(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """(P,) of tensors by name; one that is missing counts as zeros."""
        flat = []
        for name, parameter in self.parameters.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            flat.append(parts.get(name, torch.zeros(parameter.numel())).detach().to(wide).flatten())
        return torch.cat([part.to(self.device) for part in flat])

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @torch.no_grad()
    def put(self, vector: torch.Tensor) -> None:
        """Give the model these weights, (P,)."""
        for parameter, part in zip(self.parameters.values(), vector.split(self.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def log_probabilities(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0, last: int | None = None
) -> torch.Tensor:
    """(B, last) log-probability of the last tokens, in nats; by default (B, T − 1) of every token after the first.

    Logits are computed for these tokens only, where the model can do that.
    """
    n = ids.shape[1] - 1 if last is None else last
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False, **keep_logits(model, n)
    ).logits[:, -n - 1 : -1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide) / temperature, dim=-1).gather(-1, ids[:, -n:, None])[..., 0]


def keep_logits(model: PreTrainedModel, last: int) -> dict[str, int]:
    """The argument that asks a model for the logits that predict the last tokens; nothing if it does not know it."""
    return {"logits_to_keep": last + 1} if "logits_to_keep" in signature(model.forward).parameters else {}


def module_gradients(
    module: torch.nn.Module, read: torch.Tensor, back: torch.Tensor
) -> dict[torch.Tensor, torch.Tensor]:
    """Gradient of every sample, (B, …) by parameter of the module itself."""
    if type(module) is torch.nn.Linear:
        found = {module.weight: einsum(back, read.to(back.dtype), "b ... o, b ... i -> b o i")}
        if module.bias is not None:
            found[module.bias] = reduce(back, "b ... o -> b o", "sum")
        return found
    if type(module) is torch.nn.Embedding:
        # Learned positions are read once for all samples.
        ids = read.expand(len(back), *read.shape[1:]).flatten(1)  # (B, T)
        rows = rearrange(back, "b ... d -> b (...) d")
        table = rows.new_zeros(len(back), *module.weight.shape)
        table.scatter_add_(1, ids[..., None].expand_as(rows), rows)
        if module.padding_idx is not None:
            table[:, module.padding_idx] = 0
        return {module.weight: table}
    parameters = dict(module.named_parameters(recurse=False))
    if type(module).__name__.endswith("RMSNorm") and list(parameters) == ["weight"]:
        # Linear in the weight, coordinate by coordinate: what a weight larger by 1 adds is the derivative.
        at = [
            torch.func.functional_call(module, {"weight": torch.full_like(module.weight, by)}, (read,))  # type: ignore[arg-type]
            for by in (0.0, 1.0)
        ]
        return {parameters["weight"]: einsum(back, (at[1] - at[0]).to(back.dtype), "b ... d, b ... d -> b d")}

    def one(x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        def run(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(module, weights, (x[None],))[0]

        pull: Any = torch.func.vjp(run, {name: p.detach() for name, p in parameters.items()})[1]
        pulled: dict[str, torch.Tensor] = pull(gradient)[0]
        return pulled

    pulled = torch.func.vmap(one)(read.expand(len(back), *read.shape[1:]), back)
    return {parameter: pulled[name] for name, parameter in parameters.items()}
