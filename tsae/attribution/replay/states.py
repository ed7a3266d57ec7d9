"""Weights along a replayed run, on disk within a budget.

Every step has the weights before it and the scale that multiplied its gradient: 8 bytes a weight. Where all of them do
not fit, weights and optimiser state are kept at every n-th step, and the steps between are taken again when they are
needed, one stretch at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
            raise TsaeError(
                f"the path of {n_steps} steps of {size:,} weights takes {self.bytes / 1e9:.1f} GB",
                where=folder,
                fix=f"Raise --budget-gb ({budget / 1e9:.1f}), or attribute fewer steps (--steps).",
            )

    def keep(self, state: State) -> None:
        """Keep the state between two steps."""
        self._write(self._state(state.step), {"weights": state.weights, "first": state.first, "second": state.second})

    def kept(self, step: int, taken: int, device: torch.device) -> State:
        """The state that was kept after a step."""
        found = {name: tensor.to(device) for name, tensor in load_file(self._state(step)).items()}
        return State(found["weights"], found["first"], found["second"], step, taken)

    def put(self, step: int, of: Stepped) -> None:
        self._write(self._step(step), {"before": of.before, "scale": of.scale})

    def get(self, step: int, device: torch.device) -> Stepped:
        found = {name: tensor.to(device) for name, tensor in load_file(self._step(step)).items()}
        return Stepped(found["before"], found["scale"])

    def drop(self, step: int) -> None:
        self._step(step).unlink(missing_ok=True)

    def remove(self) -> None:
        """All files, when the sweep is over; also those of a replay that was killed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, file: Path, tensors: dict[str, torch.Tensor]) -> None:
        with replacing(file) as partial:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)

    def _state(self, step: int) -> Path:
        return self.folder / f"state-{step:06d}.safetensors"

    def _step(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"
