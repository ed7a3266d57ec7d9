"""What a checkpoint is: where its weights lie, which step of which run they come from, and which noise they get.

Noise makes checkpoints that learnt nothing, but whose weights moved as far as a run's. Any change of the weights
changes what a model computes. To tell training from that, compare with weights that moved as far in random directions:
for every tensor W₀ of the base that a run moved to W,

    W₀ + share · ‖W − W₀‖ · N / ‖N‖        N Gaussian, norms Frobenius

A checkpoint with `noise` loads like any other. The noise depends only on the seed and the tensor's name; tied weights
stay tied. In 16 bits rounding may swallow small noise, so noise is scaled until what rounding leaves has the norm.
`tsae.checkpoints.drift` measures ‖W − W₀‖.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from tsae.base.files import as_path
from tsae.base.validation import config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_CLOSE = 0.01  # Relative error of a norm that is close enough.
_TRIALS = 30  # Scales to try for it.
Id = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._@+-]*$")]


def _as_text(path: Any) -> Any:
    """A path or its text; ~ and file:/ as `as_path` understands them. Other texts, such as ids, stay as they are."""
    return path if isinstance(path, str) and not path.startswith(("~", "file:/")) else str(as_path(path))


@dataclass(frozen=True)
class Noise:
    """What is added to the weights of a base."""

    norms: tuple[tuple[str, float], ...]
    """Frobenius norm of the noise, by name of the parameter; others stay as they are."""
    seed: int = 0


@config
class CheckpointRecord:
    """The fields of a `tsae.Checkpoint`, which adds loading."""

    id: Id
    """Unique in its series; names folders, so letters, digits and . _ @ + - only."""
    path: Annotated[str, BeforeValidator(_as_text)]
    """A local Hugging Face directory, the directory of a PEFT adapter, a .gguf file, or a Hugging Face id."""
    run: str | None = None
    """The training run it comes from; None for the base."""
    step: Annotated[int, Field(gt=-(2**63), lt=2**63)] = 0
    """Optimizer steps of that run."""
    trained_on: str | None = None
    """What the run was trained on: a band, a mixture; None for the base."""
    revision: str | None = None
    """Branch, tag or commit, where path is a Hugging Face id."""
    subfolder: str | None = None
    """Folder inside path."""
    noise: Noise | None = field(default=None, repr=False)
    """Added to the weights after loading; see `tsae.checkpoints.record`. No file of a series holds it."""
    base: CheckpointRecord | None = field(default=None, compare=False, repr=False)
    """The base of its series, which an adapter is put on. The series sets it."""

    @property
    def is_base(self) -> bool:
        return self.run is None


def add_noise(model: PreTrainedModel, noise: Noise) -> None:
    """Add noise to the parameters of a loaded model, in place and one tensor at a time."""
    import torch

    parameters = dict(model.named_parameters())
    for name, norm in noise.norms:
        weight = parameters[name].detach()
        if norm > 0:
            digest = hashlib.sha256(f"{noise.seed} {name}".encode()).digest()
            # On the CPU, because every device's generator draws other numbers.
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)
            # In place, because other names may share the storage.
            weight.copy_(_moved(weight, drawn, norm))


def _moved(weight: torch.Tensor, drawn: torch.Tensor, norm: float) -> torch.Tensor:
    """A weight plus noise, scaled so that the sum in the weight's precision is `norm` away from the weight."""
    import torch

    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scale = norm / frobenius(drawn)
    low, high, moved = 0.0, float("inf"), weight
    for _ in range(_TRIALS):
        moved = (exact + scale * drawn).to(weight.dtype)
        found = frobenius(moved.to(exact.dtype) - exact)
        if abs(found - norm) <= _CLOSE * norm:
            break
        low, high = (scale, high) if found < norm else (low, scale)
        scale = 2 * scale if high == float("inf") else (low + high) / 2
    return moved


def frobenius(values: torch.Tensor) -> float:
    """The Frobenius norm, summed in float64."""
    import torch

    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
