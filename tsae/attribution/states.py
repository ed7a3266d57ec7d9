"""The optimiser between two steps, its steps on vectors of all trained weights, and the states of a replay on disk.

Weights along the path are on disk within a budget. Every step has the weights before it and the scale that multiplied
its gradient: 8 bytes a weight. Where all of them do not fit, weights and optimiser state are kept at every n-th step,
and the steps between are taken again when they are needed, one stretch at a time.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.settings import Optimiser
from tsae.base.files import replacing
from tsae.errors import TsaeError


@dataclass
class State:
    """The optimiser between two steps. Changed in place."""

    weights: torch.Tensor
    """(P,)."""
    first: torch.Tensor
    second: torch.Tensor
    """(P,) Adam's running means of gradients and of their squares; `second` stays 0 for SGD."""
    step: int = 0
    """Steps that are finished."""
    taken: int = 0
    """Steps of which the running means know."""

    @classmethod
    def at(cls, weights: torch.Tensor) -> State:
        return cls(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights))

    def copy(self) -> State:
        return State(self.weights.clone(), self.first.clone(), self.second.clone(), self.step, self.taken)


@dataclass(frozen=True)
class Stepped:
    """What the sweep needs of a step."""

    before: torch.Tensor
    """(P,) weights before it."""
    scale: torch.Tensor
    """(P,) what multiplied its clipped gradient."""


class States:
    """The states of a replay.

    Args:
        folder: for the files.
        n_steps: of the replay.
        size: weights.
        budget: bytes.

    Raises:
        TsaeError: where not even every n-th state fits.
    """

    def __init__(self, folder: Path, n_steps: int, size: int, budget: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        whole = 8 * size * n_steps
        self.every = 1 if whole <= budget else max(2, ceil(sqrt(1.5 * n_steps)))
        """Steps between two kept states; 1: everything is kept."""
        self.bytes = whole if self.every == 1 else 4 * size * (3 * ceil(n_steps / self.every) + 2 * self.every)
        if self.bytes > budget:
            what = f"the path of {n_steps} steps of {size:,} weights takes {self.bytes / 1e9:.1f} GB"
            fix = f"Raise --budget-gb ({budget / 1e9:.1f}), or attribute fewer steps (--steps)."
            raise TsaeError(what, where=folder, fix=fix)

    def keep(self, state: State) -> None:
        """Keep the state between two steps."""
        self._write("state", state.step, weights=state.weights, first=state.first, second=state.second)

    def kept(self, step: int, taken: int, device: torch.device) -> State:
        """The state that was kept after a step."""
        return State(**self._read("state", step, device), step=step, taken=taken)

    def put(self, step: int, of: Stepped) -> None:
        self._write("step", step, before=of.before, scale=of.scale)

    def get(self, step: int, device: torch.device) -> Stepped:
        return Stepped(**self._read("step", step, device))

    def drop(self, step: int) -> None:
        self._file("step", step).unlink(missing_ok=True)

    def remove(self) -> None:
        """All files, when the sweep is over; also those of a replay that was killed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, kind: str, step: int, **tensors: torch.Tensor) -> None:
        with replacing(self._file(kind, step)) as partial:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)

    def _read(self, kind: str, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in load_file(self._file(kind, step)).items()}

    def _file(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{step:06d}.safetensors"


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
        """Share of the momentum that the next step keeps."""
        return self.optimiser.momentum if self.optimiser.name == "sgd" else self.optimiser.betas[0]
