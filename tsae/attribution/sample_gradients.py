"""The weights that a run trains, and their gradients by single samples from one backward pass over a batch.

Every module's gradient is a function of what it read, x, and of what came back to it, δ. Both carry the batch's axis,
so the sum over samples, which autograd would take, is left out:

    linear       ∂L_i/∂W = Σ_t δ_it x_itᵀ
    others       a vector-Jacobian product of the module alone, mapped over the samples (norms, embeddings)

The loop's forward and backward pass run as they are; hooks keep x and δ, or the gradient that they make, whichever is
smaller. Whatever the loss has in it is in the gradients: clipped ratios, penalties, a scaler's factor. Products with
directions V are taken in one of two ways.

    one direction      Σ_t δ_tᵀ (V x_t): no gradient is made (the ghost dot product; Wang et al. 2024, arXiv 2406.11011)
    several            gradients of a few samples and one layer at a time, small enough for the processor's cache; their
                       products with all directions then cost next to nothing
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tsae.activations.forward_batches import pad, plan_batches
from tsae.base.usual_state import usual_state
from tsae.checkpoints.hooks import hooked, positions
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows of the rollouts; token ids, mask and mask of the response, (B, T)."""


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

    @contextmanager
    def differentiable(self) -> Iterator[dict[str, torch.nn.Parameter]]:
        """The weights, which need a gradient within the context alone, and have none afterwards."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                yield self.parameters
        finally:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)

    @torch.no_grad()
    def put(self, vector: torch.Tensor) -> None:
        """Give the model these weights, (P,)."""
        for parameter, part in zip(self.parameters.values(), vector.split(self.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def slopes_along(
    trained: TrainedWeights, direction: torch.Tensor, values: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate a function of the weights, by name, forward along a direction (P,): its values and their slopes."""
    # Of torch's attentions, this one can be differentiated forward.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings(), forward_ad.dual_level():
        # Forward differentiation in torch uses scripts that torch itself deprecates.
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
        parts = direction.to(trained.device).split(trained.sizes)
        # Not torch.func.jvp, in which LongRoPE cannot choose its factors.
        moved = {
            name: forward_ad.make_dual(weight.detach(), part.view_as(weight).to(weight.dtype))
            for (name, weight), part in zip(trained.parameters.items(), parts, strict=True)
        }
        value, slope = forward_ad.unpack_dual(values(moved))
        return value, torch.zeros_like(value) if slope is None else slope


def padded(rollouts: Rollouts, rows: np.ndarray, batch_tokens: int, device: str) -> Iterator[Batch]:
    """Right-padded batches of rows of similar length. The mask of the response leaves out tokens that the policy did
    not sample.
    """
    prompt, response = rollouts.lengths("prompt_ids")[rows], rollouts.lengths("response_ids")[rows]
    for batch in plan_batches(prompt + response, batch_tokens):
        ids, mask = pad([np.concatenate(rollouts.tokens(int(row))) for row in rows[batch]])
        is_response = torch.zeros_like(ids, dtype=torch.bool)
        for i, t in enumerate(batch):
            is_response[i, prompt[t] : prompt[t] + response[t]] = torch.from_numpy(rollouts.sampled(int(rows[t])))
        yield rows[batch], *(part.to(device) for part in (ids, mask, is_response))


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
    """Gradient of every sample, (B, …) by parameter of the module itself: of one that is neither linear nor an
    embedding, for which `BatchGradients` has formulas."""
    parameters = dict(module.named_parameters(recurse=False))

    def one(x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        def run(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(module, weights, (x[None],))[0]

        pull: Any = torch.func.vjp(run, {name: p.detach() for name, p in parameters.items()})[1]
        pulled: dict[str, torch.Tensor] = pull(gradient)[0]
        return pulled

    pulled = torch.func.vmap(one)(read.expand(len(back), *read.shape[1:]), back)
    return {parameter: pulled[name] for name, parameter in parameters.items()}


_AT_ONCE = 2**21
"""Numbers of a layer's gradients that are made at once; one sample's at the least."""

_SLACK = 2
"""A product with one direction is cheaper without the gradient; this much more memory is worth it."""


@dataclass
class _Part:
    """A micro-batch of B samples."""

    size: int
    factors: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """What a layer read, and what came back (B, T, out), by its weight, for every call: (B, T, in) of a linear layer,
    (B, T) token ids of an embedding."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """(B, …) of the other weights."""
    rest: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Modules that are not linear layers, what they read and what came back, until the hooks are gone."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient


class BatchGradients:
    """Holds the gradients of the samples of one optimiser step, of all its micro-batches.

    Args:
        trained: weights that are followed.
        dtype: of x and δ, if they are wider. bfloat16 takes half the memory, and with several directions less time
            on a processor that multiplies it.
        n_directions: of `products`. For one, x and δ are kept up to `_SLACK` times the memory of the gradients.
        alone: whether no training is going on around it: the weights need no gradient of their own, and autograd
            differentiates activations only.
    """

    def __init__(
        self,
        trained: TrainedWeights,
        *,
        dtype: torch.dtype = torch.float32,
        n_directions: int | None = None,
        alone: bool = False,
    ) -> None:
        self.trained, self.dtype, self._alone = trained, dtype, alone
        self._slack = _SLACK if n_directions == 1 else 1
        self._names = {id(parameter): name for name, parameter in trained.parameters.items()}
        self._uses = Counter(id(p) for module in trained.model.modules() for p in module.parameters(recurse=False))
        self._modules = [
            module
            for module in trained.model.modules()
            if any(id(p) in self._names for p in module.parameters(recurse=False))
        ]
        self._parts: list[_Part] = []
        self._scales: dict[torch.nn.Module, torch.Tensor | None] = {}
        """Of norms, in the step that is going on."""

    def clear(self) -> None:
        """After the optimiser's step: the weights are others now."""
        self._parts.clear()
        self._scales.clear()

    @contextmanager
    def micro_batch(self, size: int) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch of `size` samples.

        Raises:
            TsaeError: where nothing came back, or a module mixes the samples.
        """
        self._open = [_Part(size)]

        def after(module: torch.nn.Module, read: tuple[Any, ...], given: torch.Tensor) -> torch.Tensor | None:
            made = self._alone and torch.is_grad_enabled() and not given.requires_grad
            if made:
                given = given.detach().requires_grad_()  # The graph begins here, at activations instead of weights.
            if torch.is_grad_enabled() and given.requires_grad:
                x, y = read[0].detach(), None if type(module) is torch.nn.Linear else given.detach()
                # What can be worked out at once is, while both are in the processor's cache. The hook must not hold
                # the tensor that holds the hook: the graph would stay until a circle of references is looked for.
                # Where the graph begins, the next term's backward pass adds to the same numbers.
                given.register_hook(
                    lambda back: self._keep(self._open[-1], module, x, y, back.clone() if made else back.detach())
                )
            return given if made else None

        with hooked(*(module.register_forward_hook(after) for module in self._modules)):
            yield
        for part in self._open:
            self._finish(part)
            if not part.factors and not part.gradients:
                fix = "Put the forward and the backward pass of the micro-batch inside."
                raise TsaeError("no gradient came back", where="BatchGradients.micro_batch", fix=fix)
        self._parts += self._open

    def next_term(self) -> None:
        """Between two backward passes of a micro-batch: what comes back from now on is another term of its loss, and
        counts as B samples more."""
        self._open.append(_Part(self._open[0].size))

    @usual_state()
    @torch.no_grad()
    def _keep(
        self, part: _Part, module: torch.nn.Module, read: torch.Tensor, given: torch.Tensor | None, back: torch.Tensor
    ) -> None:
        if len(back) != part.size:
            what = f"{type(module).__name__} gives {len(back)} samples, expected {part.size}"
            fix = "Leave its weights out if it mixes samples; else give the batch's own number of samples."
            raise TsaeError(what, where="BatchGradients.micro_batch", fix=fix)
        if type(module) is torch.nn.Embedding:
            # Learned positions are read once for all samples.
            ids = read.expand(part.size, *read.shape[1:]).reshape(part.size, -1)
            d = back.reshape(part.size, -1, back.shape[-1])
            if module.padding_idx is not None:
                d = d * (ids != module.padding_idx)[..., None]
            part.factors.setdefault(self._names[id(module.weight)], []).append((ids, d))
            return
        if type(module) is torch.nn.Linear and id(module.weight) in self._names:
            x, d = (each.reshape(part.size, -1, each.shape[-1]) for each in (read, back))
            if module.bias is not None and id(module.bias) in self._names:
                part.add_gradient(self._names[id(module.bias)], d.sum(1, dtype=torch.float32))
            self._keep_linear(part, self._names[id(module.weight)], x, d)
            return
        if module not in self._scales:
            self._scales[module] = _scale_of_norm(module)
        scale = self._scales[module]
        if scale is not None and given is not None:
            # torch's einsum would make B · d small products of it.
            product = (back.float() * given.float()).reshape(part.size, -1, given.shape[-1]).sum(1)
            part.add_gradient(self._names[id(module.weight)], product / scale)
            return
        part.rest.append((module, read, back))

    def _keep_linear(self, part: _Part, name: str, x: torch.Tensor, d: torch.Tensor) -> None:
        """Keep what a linear layer read, (B, T, in), and what came back, (B, T, out), or the smaller gradient."""
        narrow = min(d.dtype, self.dtype, key=lambda dtype: dtype.itemsize)
        x, d = x.to(narrow), d.to(narrow)
        if x.shape[1] * (x.shape[2] + d.shape[2]) < self._slack * x.shape[2] * d.shape[2]:
            part.factors.setdefault(name, []).append((x, d))
        else:
            part.add_gradient(name, torch.bmm(d.mT, x))

    @usual_state()
    @torch.no_grad()
    def _finish(self, part: _Part) -> None:
        """The other modules are called once more for their gradients, so their hooks must be gone."""
        for module, read, back in part.rest:
            for parameter, gradient in module_gradients(module, read, back).items():
                name = self._names.get(id(parameter))
                if name is not None:
                    part.add_gradient(name, gradient)
        part.rest.clear()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add gradients that no hook has seen to the last micro-batch: (B, …), those of one weight."""
        self._parts[-1].add_gradient(name, gradient)

    @usual_state()
    @torch.no_grad()
    def products(self, directions: torch.Tensor) -> torch.Tensor:
        """(n, k) inner products of the samples' gradients of the loss with directions, (k, P)."""
        split = dict(zip(self.trained.parameters, directions.split(self.trained.sizes, dim=1), strict=True))
        found = []
        for part in self._parts:
            sums = torch.zeros(part.size, len(directions), device=directions.device)
            for name, calls in part.factors.items():
                for x, back in calls:
                    sums += _products(x, back, split[name])
            for name, kept in part.gradients.items():
                sums += torch.nn.functional.linear(kept.float().flatten(1), split[name])
            found.append(sums)
        return torch.cat(found) if found else torch.zeros(0, len(directions), device=directions.device)

    @usual_state()
    @torch.no_grad()
    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Σ_i weight_i g_i by name of the weight, from (n,) weights; samples of weight 0 cost nothing."""
        found: dict[str, torch.Tensor] = {}
        for part, of in zip(self._parts, weights.split([part.size for part in self._parts]), strict=True):
            rows = of.nonzero()[:, 0]
            by = of[rows].float()
            for name, calls in part.factors.items():
                for x, back in calls:
                    left = (back[rows].float() * by[:, None, None]).flatten(0, 1)
                    if x.dtype.is_floating_point:
                        summand = left.T @ x[rows].flatten(0, 1).float()
                    else:
                        weight = self.trained.parameters[name]
                        summand = left.new_zeros(weight.shape).index_add_(0, x[rows].flatten(), left)
                    found[name] = found[name] + summand if name in found else summand
            for name, gradient in part.gradients.items():
                summand = torch.tensordot(by, gradient[rows].float(), dims=1)
                found[name] = found[name] + summand if name in found else summand
        return found


def _products(x: torch.Tensor, back: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """(B, k) inner products of Σ_t back_t x_tᵀ with directions, (k, out · in); x (B, T, in), back (B, T, out). Of an
    embedding x are ids, (B, T), and directions (k, tokens · out)."""
    if not x.dtype.is_floating_point:
        table = directions.view(len(directions), -1, back.shape[2])
        return torch.stack([(one[x] * back).sum((1, 2), dtype=torch.float32) for one in table], dim=1)
    size = back.shape[2] * x.shape[2]
    if len(directions) == 1:
        direction = directions.view(back.shape[2], x.shape[2]).to(x.dtype)
        # Towards the narrower side: less is written, and read again.
        one, other = (back @ direction, x) if x.shape[2] < back.shape[2] else (x @ direction.T, back)
        return one.mul_(other).sum((1, 2), dtype=torch.float32)[:, None]
    n, found = max(1, _AT_ONCE // size), []
    for low in range(0, len(x), n):
        gradient = torch.bmm(back[low : low + n].mT, x[low : low + n]).float().flatten(1)
        found.append(torch.nn.functional.linear(gradient, directions))
    return torch.cat(found)


def _scale_of_norm(module: torch.nn.Module) -> torch.Tensor | None:
    """(d,) the factor of an RMS norm: its weight, or 1 + its weight.

    The result is None for other modules. It is None too if the factor is so near 0 that one cannot divide by it.
    """
    if not type(module).__name__.endswith("RMSNorm") or [n for n, _ in module.named_parameters()] != ["weight"]:
        return None
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    probe = torch.ones(1, len(weight), dtype=weight.dtype, device=weight.device)
    at = [
        torch.func.functional_call(module, {"weight": torch.full_like(weight, by)}, (probe,)).float()
        for by in (0.0, 1.0)
    ]
    scale: torch.Tensor = (module(probe).float() / (at[1] - at[0]))[0]
    return scale if scale.abs().min() > 1e-2 * scale.abs().max() else None
