"""One step of the run's optimiser, on vectors of all trained weights, as torch takes it."""

from __future__ import annotations

import re

import torch

from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.attribution.replay.states import State
from tsae.attribution.training.optimiser import Optimiser

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of weights that transformers' Trainer does not decay (`Trainer.get_decay_parameter_names`)."""


def decayed(trained: TrainedWeights, optimiser: Optimiser) -> list[bool]:
    """Which of the weights decay."""
    if optimiser.decay_all:
        return [True] * len(trained.parameters)
    norms = {id(p) for m in trained.model.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}
    return [id(p) not in norms and not _NOT_DECAYED.search(n.lower()) for n, p in trained.parameters.items()]


class Stepper:
    """Takes steps.

    Args:
        trained: the weights.
        optimiser: of the run.
        rounded: whether weights and state are kept in bfloat16.
    """

    def __init__(self, trained: TrainedWeights, optimiser: Optimiser, *, rounded: bool = False) -> None:
        self.optimiser, self.rounded, self.sizes = optimiser, rounded, trained.sizes
        self.decays = decayed(trained, optimiser)

    def decay_of(self, weights: torch.Tensor, step: int) -> torch.Tensor:
        """(P,) what decoupled weight decay adds to the weights in a step."""
        if not self.optimiser.weight_decay or self.optimiser.name != "adamw":
            return torch.zeros_like(weights)
        return self.decaying(weights) * (-self.optimiser.rate(step) * self.optimiser.weight_decay)

    def decaying(self, weights: torch.Tensor) -> torch.Tensor:
        """(P,) weights that decay; 0 in place of the others."""
        parts = zip(weights.split(self.sizes), self.decays, strict=True)
        return torch.cat([part if decays else torch.zeros_like(part) for part, decays in parts])

    @torch.no_grad()
    def take(self, state: State, gradient: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """Take a step; changes the state.

        Args:
            state: before it.
            gradient: (P,) of the loss.

        Returns:
            (P,) what multiplied the clipped gradient, the factor of clipping, and the gradient's norm before it.
        """
        o = self.optimiser
        state.step, state.taken = state.step + 1, state.taken + 1
        rate, t = o.rate(state.step), state.taken
        norm = gradient.norm()
        clip = o.clip(norm)
        gradient = gradient * clip
        if o.weight_decay and o.name == "adamw":
            for part, decays in zip(state.weights.split(self.sizes), self.decays, strict=True):
                if decays:
                    part.mul_(1 - rate * o.weight_decay)
        elif o.weight_decay:
            gradient = gradient + o.weight_decay * self.decaying(state.weights)
        if o.name == "sgd":
            state.first.mul_(o.momentum).add_(gradient)
            state.weights.add_(state.first, alpha=-rate)
            scale = torch.full_like(gradient, rate)
        else:
            state.first.lerp_(gradient, 1 - o.betas[0])
            state.second.mul_(o.betas[1]).addcmul_(gradient, gradient, value=1 - o.betas[1])
            divisor = state.second.sqrt().div_((1 - o.betas[1] ** t) ** 0.5).add_(o.eps)
            by = rate / (1 - o.betas[0] ** t)
            state.weights.addcdiv_(state.first, divisor, value=-by)
            scale = divisor.reciprocal_().mul_(by * (1 - o.betas[0]))
        if self.rounded:
            for tensor in (state.weights, state.first, state.second):
                tensor.copy_(tensor.bfloat16())
        return scale, float(clip), float(norm)

    @property
    def carried(self) -> float:
        """Share of the momentum that goes on to the next step."""
        return self.optimiser.momentum if self.optimiser.name == "sgd" else self.optimiser.betas[0]
