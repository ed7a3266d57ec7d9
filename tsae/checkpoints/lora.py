"""The weights of a LoRA adapter as updates of its base's tensors, from the safetensors file alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.base.files import reading
from tsae.checkpoints.adapters import GIVE_ITS_BASE, base_of, checked_config, is_lora, said_twice
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import ADAPTER_CONFIG, common_rows, folder_of, weight_files
from tsae.errors import TsaeError

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>(?:(?!\.lora_).)+?)\.(?:"
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
    r"|(?:base_layer\.)?(?P<whole>weight|bias))"
)


_ENDLESS = re.compile(r"[*+}]\)*[*+{]|[*+}][^()]*\)[*+{]")
"""A repetition within a repetition, which may take for ever to match."""


@dataclass
class LoraUpdate:
    """What an adapter makes of one tensor W₀: m/‖·‖ (W + s·B·A), with the parts that it has."""

    name: str
    scale: float = 1.0
    """s = alpha / r, or alpha / √r where rank-stabilised."""
    transposed: bool = False
    """The product is that of the transposed tensor, as in embeddings and GPT-2's Conv1D."""
    A: torch.Tensor | None = None
    """(r, in)"""
    B: torch.Tensor | None = None
    """(out, r)"""
    magnitude: torch.Tensor | None = None
    """(out,) norm of every output's weights (DoRA; Liu et al. 2024)."""
    whole: torch.Tensor | None = None
    """What the tensor itself was trained to, of the tensor's shape."""

    @property
    def is_plain(self) -> bool:
        """Whether the whole update is s·B·A."""
        return self.A is not None and self.magnitude is None and self.whole is None

    def cut(self, n_rows: int) -> None:
        """Leave out the rows of tokens that the base does not have, where the run's vocabulary is larger."""
        if common_rows(self.name, (0,), (n_rows,)) is not None:
            for part in ("whole", "magnitude", *(() if self.transposed else ("B",))):
                if getattr(self, part) is not None:
                    setattr(self, part, getattr(self, part)[:n_rows])
            if self.transposed and self.A is not None:
                self.A = self.A[:, :n_rows]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the update has all its parts, and is one of a tensor of this shape."""
        A, B, found = self.A, self.B, [] if self.whole is None else [tuple(self.whole.shape)]
        if A is not None and B is not None:
            if A.ndim != 2 or B.ndim != 2 or A.shape[0] != B.shape[1]:
                return False
            found.append((A.shape[1], B.shape[0]) if self.transposed else (B.shape[0], A.shape[1]))
        if self.magnitude is not None and (self.transposed or self.magnitude.shape != shape[:1]):
            return False
        return (A is None) == (B is None) and bool(found) and set(found) == {shape}

    def singular_values(self) -> np.ndarray:
        """(r,) of s·B·A, largest first, without forming it."""
        assert self.A is not None
        assert self.B is not None
        core = torch.linalg.qr(self.B.double(), mode="r").R @ torch.linalg.qr(self.A.double().T, mode="r").R.T
        return (abs(self.scale) * torch.linalg.svdvals(core)).numpy()

    def rows(self, start: int, stop: int, before: torch.Tensor) -> torch.Tensor:
        """The updated rows, given the base's."""
        after = before if self.whole is None else self.whole[start:stop].to(before.dtype)
        if self.A is None or self.B is None:
            return after
        A, B = self.A.to(before.dtype), self.B.to(before.dtype)
        after = after + self.scale * ((B @ A[:, start:stop]).T if self.transposed else B[start:stop] @ A)
        if self.magnitude is None:
            return after
        return (self.magnitude[start:stop].to(before.dtype) / after.norm(dim=1)).unsqueeze(1) * after


def fitting_updates(
    checkpoint: CheckpointRecord,
    shape_of: Callable[[str], tuple[int, ...] | None],
    base: str,
    tied: Collection[str] = (),
) -> Iterator[tuple[str, LoraUpdate]]:
    """The updates of an adapter, each checked to fit the base.

    Args:
        checkpoint: an adapter.
        shape_of: (name) -> shape of a tensor of the base; None for a name that it does not have.
        base: named in error messages.
        tied: names of tensors that are tied to others, whose updates are left out.

    Yields:
        name in the base, update.

    Raises:
        TsaeError: where the adapter is of another base, or an update does not fit.
    """
    base_of(checkpoint)
    folder = folder_of(checkpoint)
    for module_name, update in _lora_updates(folder).items():
        # Some files leave out the outermost module of their names.
        names = (module_name, module_name.partition(".")[2])
        name = next((name for name in names if shape_of(name) is not None), None)
        if name is None and module_name in tied:
            continue
        shape = None if name is None else shape_of(name)
        if shape is not None:
            update.cut(shape[0] if shape else 1)
        if name is None or shape is None or not update.fits(shape):
            what = f"its update of {module_name} does not fit {base}, where that is {shape or 'missing'}"
            raise TsaeError(what, where=folder, fix=f"{GIVE_ITS_BASE} An embedding with DoRA has to be merged first.")
        yield name, update


def _lora_updates(folder: Path) -> dict[str, LoraUpdate]:
    """The updates of an adapter, by name of the tensor in the base.

    Raises:
        TsaeError: where the adapter is not a LoRA, or its file holds something else than LoRA weights.
    """
    from safetensors import safe_open

    config, updates = checked_config(folder), dict[str, LoraUpdate]()
    file = weight_files(folder)[0]
    with reading(file, "Save the adapter again."), safe_open(file, framework="pt") as stream:
        for key in sorted({*stream.keys()} - said_twice(stream.keys())):
            match = _PART.fullmatch(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) and is_lora(folder) else None
            if match is None:
                what = (
                    f"an adapter of type {config['peft_type']} with {key}, which is not a LoRA weight: it has no update"
                )
                raise TsaeError(what, where=folder, fix="Merge the adapter into its base and save the whole model.")
            part, name = match["part"] or "", f"{match['module']}.{match['whole'] or 'weight'}"
            update = updates.setdefault(name, LoraUpdate(name))
            update.transposed |= "embedding" in part or bool(config.get("fan_in_fan_out"))
            kind = "whole" if match["whole"] else "magnitude" if part == "lora_magnitude_vector" else part[-1]
            setattr(update, kind, stream.get_tensor(key))
    for update in updates.values():
        if update.A is not None and update.A.numel():
            rank = update.A.shape[0] if update.A.ndim else 1
            alpha = _alpha(config, update.name.removesuffix(".weight"))
            update.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return updates


def _alpha(config: dict[str, Any], module: str) -> float:
    """lora_alpha of a module, which a pattern may set."""
    with reading(ADAPTER_CONFIG, "Give a usable lora_alpha and alpha_pattern."):
        alpha = config["lora_alpha"]
        for pattern, own in (config.get("alpha_pattern") or {}).items():
            if _ENDLESS.search(pattern):
                raise ValueError(f"alpha_pattern {pattern[:60]!r} repeats what is repeated")
            try:
                if re.fullmatch(rf"(.*\.)?({pattern})", module):
                    alpha = own
                    break
            except re.error as error:
                raise ValueError(f"alpha_pattern {pattern[:60]!r}: {error}") from error
        if not math.isfinite(found := float(alpha)):
            raise ValueError(f"lora_alpha of {module} is {found}")
        return found
