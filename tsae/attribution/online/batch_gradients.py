"""Gradients of the samples of a step, picked up from the training's own backward pass.

The loop's forward and backward pass run as they are. Hooks keep what every module with trained weights read, x, and
what came back to it, δ. A sample's gradient of a linear layer is Σ_t δ_t x_tᵀ, so its product with a direction D is

    ⟨g_i, D⟩ = Σ_t δ_itᵀ D x_it

which takes one matrix product and no gradient of a sample (the ghost dot product; Wang et al. 2024, arXiv 2406.11011).
What is smaller is kept: x and δ, or the gradient that they make. Whatever the loss has in it is in the gradients:
clipped ratios, penalties, a scaler's factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tsae.attribution.gradients.sample_gradients import TrainedWeights, module_gradients
from tsae.errors import TsaeError


@dataclass
class _Part:
    """A micro-batch of B samples."""

    size: int
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """What a linear layer read (B, T, in), and what came back (B, T, out), by its weight."""
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    """(B,) squared norms of the gradients that the factors make."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """(B, …) of the other weights."""
    rest: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Modules that are no linear layers, what they read and what came back, until the hooks are gone."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient


class BatchGradients:
    """Holds the gradients of the samples of one optimiser step, of all its micro-batches.

    Args:
        trained: weights that are followed.
    """

    def __init__(self, trained: TrainedWeights) -> None:
        self.trained = trained
        self._names = {id(parameter): name for name, parameter in trained.parameters.items()}
        self._uses = Counter(id(p) for module in trained.model.modules() for p in module.parameters(recurse=False))
        self._parts: list[_Part] = []

    def __len__(self) -> int:
        return sum(part.size for part in self._parts)

    def clear(self) -> None:
        self._parts.clear()

    @contextmanager
    def micro_batch(self, size: int) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch of `size` samples.

        Raises:
            TsaeError: where nothing came back, or a module mixes the samples.
        """
        part = _Part(size)

        def after(module: torch.nn.Module, read: tuple[Any, ...], given: torch.Tensor) -> None:
            if torch.is_grad_enabled() and given.requires_grad:
                x = read[0].detach()
                # What can be worked out at once is, while both are in the processor's cache.
                given.register_hook(lambda back: self._keep(part, module, x, back.detach()))

        handles = [
            module.register_forward_hook(after)
            for module in self.trained.model.modules()
            if any(id(p) in self._names for p in module.parameters(recurse=False))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._finish(part)
        if not part.factors and not part.gradients:
            raise TsaeError(
                "no gradient came back",
                where="BatchGradients.micro_batch",
                fix="Put the forward and the backward pass of the micro-batch inside.",
            )
        self._parts.append(part)

    @torch.no_grad()
    def _keep(self, part: _Part, module: torch.nn.Module, read: torch.Tensor, back: torch.Tensor) -> None:
        parameters = list(module.parameters(recurse=False))
        if len(back) != part.size:
            raise TsaeError(
                f"{type(module).__name__} gives {len(back)} samples, expected {part.size}",
                where="BatchGradients.micro_batch",
                fix="Leave its weights out if it mixes samples; else give the batch's own number of samples.",
            )
        if type(module) is torch.nn.Linear and len(parameters) == 1 and self._uses[id(module.weight)] == 1:
            name = self._names[id(module.weight)]
            x, d = (each.reshape(part.size, -1, each.shape[-1]) for each in (read, back))
            again = name in part.factors or name in part.gradients  # A layer that is called twice.
            if not again and x.shape[1] * (x.shape[2] + d.shape[2]) < module.weight.numel():
                part.factors[name] = (x, d)
                # ‖Σ_t δ_t x_tᵀ‖² = Σ_tu (δ_t·δ_u)(x_t·x_u)
                part.squares[name] = _dot(torch.bmm(x, x.mT).float(), torch.bmm(d, d.mT).float())
                return
            if name in part.factors:
                del part.squares[name]
                first_x, first_d = part.factors.pop(name)
                part.add_gradient(name, torch.bmm(first_d.mT, first_x.to(first_d.dtype)))
            part.add_gradient(name, torch.bmm(d.mT, x.to(d.dtype)))
            return
        part.rest.append((module, read, back))

    @torch.no_grad()
    def _finish(self, part: _Part) -> None:
        """The other modules are called once more for their gradients, so their hooks must be gone."""
        for module, read, back in part.rest:
            for parameter, gradient in module_gradients(module, read, back).items():
                name = self._names.get(id(parameter))
                if name is not None:
                    part.add_gradient(name, gradient)
        part.rest.clear()

    @torch.no_grad()
    def products(self, directions: torch.Tensor) -> torch.Tensor:
        """(n, k) inner products of the samples' gradients of the loss with directions, (k, P)."""
        split = dict(zip(self.trained.parameters, directions.split(self.trained.sizes, dim=1), strict=True))
        found = [torch.zeros(0, len(directions), device=directions.device)]
        for part in self._parts:
            sums = torch.zeros(part.size, len(directions), device=directions.device)
            for name, (x, back) in part.factors.items():
                for k, direction in enumerate(split[name]):
                    moved = x.float() @ direction.view(back.shape[2], x.shape[2]).T  # (B, T, out)
                    sums[:, k] += _dot(moved, back.float())
            for name, gradient in part.gradients.items():
                sums += gradient.float().flatten(1) @ split[name].T
            found.append(sums)
        return torch.cat(found)

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """(n,) norms of the samples' gradients."""
        found = [torch.zeros(0, device=self.trained.device)]
        for part in self._parts:
            square = torch.zeros(part.size, device=self.trained.device)
            for of_factors in part.squares.values():
                square += of_factors
            for gradient in part.gradients.values():
                square += gradient.float().flatten(1).square().sum(1)
            found.append(square.clamp_min(0).sqrt())
        return torch.cat(found)

    @torch.no_grad()
    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Σ_i weight_i g_i by name of the weight, from (n,) weights; samples of weight 0 cost nothing."""
        found: dict[str, torch.Tensor] = {}
        for part, of in zip(self._parts, weights.split([part.size for part in self._parts]), strict=True):
            rows = of.nonzero()[:, 0]
            by = of[rows].float()
            for name, (x, back) in part.factors.items():
                left = (back[rows] * by[:, None, None]).flatten(0, 1)
                summand = left.T @ x[rows].flatten(0, 1).to(left.dtype)
                found[name] = found[name] + summand if name in found else summand
            for name, gradient in part.gradients.items():
                summand = torch.tensordot(by, gradient[rows].float(), dims=1)
                found[name] = found[name] + summand if name in found else summand
        return found


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(B,) inner products of what two tensors, (B, …), hold."""
    return torch.bmm(a.reshape(len(a), 1, -1), b.reshape(len(b), -1, 1))[:, 0, 0]
