"""The size of a checkpoint's update, tensor by tensor as the model is loaded, and noise of the same size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.loading import ModelLoader
from tsae.checkpoints.noise import Noise, frobenius
from tsae.checkpoints.updates.lora import fitting_updates
from tsae.checkpoints.weight_files import common_rows, folder_of, is_adapter
from tsae.errors import TsaeError


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
            checkpoint: of a series; the noisy checkpoint gets its run and step, and its id with ``+noise`` and the
                number of the draw.
            draw: number of the draw.
            share: of the update's norm.
            seed: of the noise, together with the draw.
        """
        base = _base_of(checkpoint)
        norms = tuple((name, share * norm) for name, norm in self.norms.items())
        digest = hashlib.sha256(f"{checkpoint.id} {seed} {draw}".encode()).digest()
        noise = Noise(norms, int.from_bytes(digest[:6], "big"))
        id = f"{checkpoint.id}+noise{draw}"
        return replace(base, id=id, run=checkpoint.run, step=checkpoint.step, noise=noise, base=base)


def update_of(checkpoint: Checkpoint) -> Update:
    """Measure how far a checkpoint of a series is from its base, tensor by tensor, as both are loaded.

    A head that was trained apart from the embeddings to which the base ties it is left out: no activation depends on
    it. An adapter's update is computed without rounding, as if merged. Memory holds two models for a whole checkpoint,
    one for an adapter.

    Raises:
        TsaeError: where the weights are not those of the base by name or shape, are quantised, or are not finite.
    """
    base, loader = _base_of(checkpoint), ModelLoader()
    model = loader.load(base)
    before = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(before)
    norms, adapter = {}, is_adapter(folder_of(checkpoint))
    if adapter:
        loader.load(checkpoint)  # refuses weights that have no place in the base, which stays as it is
    updates = _adapter_updates if adapter else _whole_updates
    for name, update in updates(checkpoint, base, before, tied):
        norms[name] = frobenius(update)
        if not math.isfinite(norms[name]):
            raise TsaeError(f"{name} holds values that are not finite, there or in {base.path}", where=checkpoint.path)
    squared = sum(frobenius(weight) ** 2 for weight in before.values() if weight.is_floating_point())
    total = sum(norm**2 for norm in norms.values())
    return Update(norms, math.sqrt(total / squared) if squared else 0.0)


def _base_of(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.base is None:
        raise TsaeError("belongs to no series, which names its base", where=checkpoint.path)
    return checkpoint.base


def _whole_updates(
    checkpoint: Checkpoint, base: Checkpoint, before: Mapping[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, update) of every parameter but those tied to others."""
    model = checkpoint.load_model()
    after = dict(model.named_parameters(remove_duplicate=False))
    fix = "Compare checkpoints of one architecture and vocabulary, saved in the same way."
    lost = [name for name in before if name not in after]
    new = [name for name, _ in model.named_parameters() if name not in before and name not in tied]
    if lost or new:
        raise TsaeError(
            f"its weights are not those of {base.path}: {len(lost)} are missing and {len(new)} new "
            f"(first: {(lost + new)[0]}), so its update has no size that noise could match",
            where=checkpoint.path,
            fix=fix,
        )
    for name, weight in before.items():
        other = after[name]
        n = common_rows(name, other.shape, weight.shape)
        if n is None:
            raise TsaeError(
                f"{name} has the shape {tuple(other.shape)}, expected {tuple(weight.shape)} as in {base.path}: its "
                "update has no size that noise could match",
                where=checkpoint.path,
                fix=fix,
            )
        if weight.is_floating_point() and other.is_floating_point():
            exact = _exact(weight, other)
            if weight.ndim:  # noise goes to all rows; those that the run lacks belong to tokens that no text holds
                other, weight = other[:n], weight[:n]
            yield name, other.to(exact) - weight.to(exact)
        elif weight.dtype != other.dtype or not torch.equal(weight, other):
            raise TsaeError(
                f"{name} is stored as {other.dtype}, in {base.path} as {weight.dtype}; noise is of floating-point "
                "weights",
                where=checkpoint.path,
                fix="Save the models without quantisation.",
            )


def _adapter_updates(
    checkpoint: Checkpoint, base: Checkpoint, before: Mapping[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, update) of every parameter that an adapter changes, but those tied to others."""
    shapes = {name: tuple(weight.shape) for name, weight in before.items()}
    for name, update in fitting_updates(checkpoint, shapes.get, base.path, tied):
        exact = before[name].to(_exact(before[name]))
        rows = exact if exact.ndim else exact.reshape(1)
        yield name, update.rows(0, len(rows), rows) - rows


def _exact(*weights: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32
