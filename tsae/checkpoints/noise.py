"""Checkpoints that learnt nothing: a base's weights plus Gaussian noise as large as a run's update.

Any change of the weights changes what a model computes. What training did is told from that by checkpoints whose
weights moved as far, but in random directions: for every tensor W₀ of the base that a run moved to W,

    W₀ + share · ‖W − W₀‖ · N / ‖N‖        N Gaussian, norms Frobenius

A `Checkpoint` with `noise` is loaded like any other, so that it can be captured, sampled from and compared. The noise
depends on the seed and the tensor's name alone. Tied weights stay tied. In 16 bits a sum is rounded, and small noise
may be lost altogether: there noise is scaled until what is left after rounding has the norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tsae.checkpoints.files import folder_of, is_adapter, is_gguf
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tsae.checkpoints.series import Checkpoint

_CLOSE = 0.01  # Relative error of a norm that is close enough.
_TRIALS = 30  # scales tried for it


@dataclass(frozen=True)
class Noise:
    """What is added to the weights of a base."""

    norms: tuple[tuple[str, float], ...]
    """Frobenius norm of the noise, by name of the parameter; others stay as they are."""
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """How far training moved every tensor of a base."""

    norms: Mapping[str, float]
    """‖W − W₀‖, Frobenius, by name of the parameter in the loaded model."""
    relative: float
    """‖W − W₀‖ / ‖W₀‖ over all weights."""

    def noisy(self, checkpoint: Checkpoint, draw: int, *, share: float = 1.0, seed: int = 0) -> Checkpoint:
        """The base of a checkpoint with noise as large as a share of this update.

        Args:
            checkpoint: of a series; its run and step are the noisy one's.
            draw: numbers it; the id is that of the checkpoint, ``+noise`` and the number.
            share: of the update's norm.
            seed: of the noise, together with the draw.
        """
        base = checkpoint.base
        if base is None:
            raise TsaeError("belongs to no series, which names its base", where=checkpoint.path)
        norms = tuple((name, share * norm) for name, norm in self.norms.items())
        digest = hashlib.sha256(f"{checkpoint.id} {seed} {draw}".encode()).digest()
        noise = Noise(norms, int.from_bytes(digest[:6], "big"))
        id = f"{checkpoint.id}+noise{draw}"
        return replace(base, id=id, run=checkpoint.run, step=checkpoint.step, noise=noise, base=base)


def update_of(checkpoint: Checkpoint) -> Update:
    """Measure how far a checkpoint of a series is from its base, tensor by tensor, as both are loaded.

    An adapter's update is that of the base it would be merged into, computed without rounding. Two models are in memory
    for a whole checkpoint, one for an adapter.

    Raises:
        TsaeError: where the weights are not those of the base by name or shape, are quantised, or are not finite.
    """
    base = checkpoint.base
    if base is None:
        raise TsaeError("belongs to no series, which names its base", where=checkpoint.path)
    model = base.load_model()
    before = _parameters(model)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(before)
    norms = {}
    for name, update in _updates(checkpoint, base, before, tied):
        norms[name] = _norm(update)
        if not math.isfinite(norms[name]):
            raise TsaeError(f"{name} holds values that are not finite, there or in {base.path}", where=checkpoint.path)
    squared = sum(_norm(weight) ** 2 for weight in before.values() if weight.is_floating_point())
    total = sum(norm**2 for norm in norms.values())
    return Update(norms, math.sqrt(total / squared) if squared else 0.0)


def add_noise(model: PreTrainedModel, noise: Noise) -> None:
    """Add noise to the parameters of a loaded model, in place and one tensor at a time.

    Raises:
        TsaeError: where the model has no such parameter.
    """
    parameters = _parameters(model)
    for name, norm in noise.norms:
        if name not in parameters:
            raise TsaeError(
                f"has no parameter {name}, to which noise is to be added",
                where=getattr(model, "name_or_path", "model"),
                fix="Measure the update against the base that is loaded here.",
            )
        if norm > 0:
            weight = parameters[name]
            digest = hashlib.sha256(f"{noise.seed} {name}".encode()).digest()
            # On the CPU, whatever the device: generators of devices differ.
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)
            _add(weight, drawn, norm)


def _add(weight: torch.Tensor, drawn: torch.Tensor, norm: float) -> None:
    """Add noise of a norm to a parameter; its storage stays, which other names may share."""
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    scale = norm / _norm(drawn)
    low, high, moved = 0.0, float("inf"), weight
    for _ in range(_TRIALS):
        moved = (exact + scale * drawn).to(weight.dtype)
        found = _norm(moved.to(exact.dtype) - exact)
        if abs(found - norm) <= _CLOSE * norm:
            break
        low, high = (scale, high) if found < norm else (low, scale)
        scale = 2 * scale if high == float("inf") else (low + high) / 2
    with torch.no_grad():
        weight.copy_(moved)


def _updates(
    checkpoint: Checkpoint, base: Checkpoint, before: dict[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, update) of every parameter that may have moved; those tied to others have no update of their own."""
    folder = folder_of(checkpoint)
    if not is_gguf(folder) and is_adapter(folder):
        yield from _adapter_updates(checkpoint, base, before, tied)
        return
    model = checkpoint.load_model()
    after = dict(model.named_parameters(remove_duplicate=False))
    fix = "Compare checkpoints of one architecture and vocabulary, saved in the same way."
    lost = [name for name in before if name not in after]
    new = [name for name in _parameters(model) if name not in before and name not in tied]
    if lost or new:
        raise TsaeError(
            f"its weights are not those of {base.path}: {len(lost)} are missing and {len(new)} new "
            f"(first: {(lost + new)[0]}), so that it has no update whose size noise could have",
            where=checkpoint.path,
            fix=fix,
        )
    for name, weight in before.items():
        other = after[name]
        if other.shape != weight.shape:
            raise TsaeError(
                f"{name} has the shape {tuple(other.shape)}, expected {tuple(weight.shape)} as in {base.path}: it has "
                "no update whose size noise could have",
                where=checkpoint.path,
                fix=fix,
            )
        if not weight.is_floating_point() or not other.is_floating_point():
            if weight.dtype == other.dtype and torch.equal(weight, other):
                continue
            raise TsaeError(
                f"{name} is stored as {other.dtype}, in {base.path} as {weight.dtype}; noise is of floating-point "
                "weights",
                where=checkpoint.path,
                fix="Save the models without quantisation.",
            )
        exact = _exact(weight, other)
        yield name, other.detach().to(exact) - weight.to(exact)


def _adapter_updates(
    checkpoint: Checkpoint, base: Checkpoint, before: dict[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    from tsae.checkpoints.adapters import base_of
    from tsae.checkpoints.lora import lora_updates

    base_of(checkpoint)
    folder = folder_of(checkpoint)
    for module_name, update in lora_updates(folder).items():
        # Some files leave out the outermost module of their names.
        name = next((n for n in (module_name, module_name.partition(".")[2]) if n in before), None)
        if name is None:
            if module_name in tied:
                continue
            raise TsaeError(
                f"has an update of {module_name}, which {base.path} does not have",
                where=folder,
                fix="Give the base that the adapter was trained on.",
            )
        weight = before[name]
        update.check(tuple(weight.shape), base.path)
        exact = weight.to(_exact(weight))
        rows = exact if exact.ndim else exact.reshape(1)
        yield name, update.rows(0, len(rows), rows) - rows


def _parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By name, those that share their storage once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _exact(*weights: torch.Tensor) -> torch.dtype:
    wide = any(weight.dtype == torch.float64 for weight in weights)
    return torch.float64 if wide else torch.float32


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
