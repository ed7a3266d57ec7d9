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

from tsae.checkpoints.adapters import GIVE_ITS_BASE, base_of, checked_config, is_lora, said_twice
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import common_rows, folder_of, weight_files
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

    where: Path
    name: str
    scale: float
    """s = alpha / r, or alpha / √r where rank-stabilised."""
    transposed: bool
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

    def check(self, shape: tuple[int, ...], base: str) -> None:
        """Refuse an update that does not fit a tensor of this shape."""
        shapes: list[tuple[int, ...]] = []
        if (self.A is None) != (self.B is None) or (self.A is None and self.whole is None):
            raise TsaeError(f"has only part of the update of {self.name}", where=self.where)
        if self.A is not None and self.B is not None:
            if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[0] != self.B.shape[1]:
                raise TsaeError(f"A and B of {self.name} do not fit each other", where=self.where)
            out, into = self.B.shape[0], self.A.shape[1]
            shapes.append((into, out) if self.transposed else (out, into))
            if self.magnitude is not None and self.transposed:
                what = f"uses DoRA on {self.name}, whose drift is not computed"
                raise TsaeError(what, where=self.where, fix="Merge it first.")
            if self.magnitude is not None and self.magnitude.shape != shape[:1]:
                what = f"the magnitudes of {self.name} have the shape {tuple(self.magnitude.shape)}, not {shape[:1]}"
                raise TsaeError(what, where=self.where, fix=GIVE_ITS_BASE)
        if self.whole is not None:
            shapes.append(tuple(self.whole.shape))
        for found in shapes:
            if found != shape:
                what = f"updates {self.name} of shape {found}, in {base} it has {shape}"
                raise TsaeError(what, where=self.where, fix=GIVE_ITS_BASE)

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
        for name in (module_name, module_name.partition(".")[2]):
            shape = shape_of(name)
            if shape is not None:
                update.cut(shape[0] if shape else 1)
                update.check(shape, base)
                yield name, update
                break
        else:
            if module_name not in tied:
                what = f"has an update of {module_name}, which {base} does not have"
                raise TsaeError(what, where=folder, fix=GIVE_ITS_BASE)


def _lora_updates(folder: Path) -> dict[str, LoraUpdate]:
    """The updates of an adapter, by name of the tensor in the base.

    Raises:
        TsaeError: where the adapter is no LoRA, or its file holds something else than LoRA weights.
    """
    from safetensors import SafetensorError, safe_open

    config = checked_config(folder)
    if not is_lora(folder):
        what = f"is an adapter of type {config['peft_type']}; updates are computed of LORA alone"
        raise TsaeError(what, where=folder, fix="Merge the adapter into its base and save the whole model.")
    updates: dict[str, LoraUpdate] = {}
    try:
        with safe_open(weight_files(folder)[0], framework="pt") as file:
            for key in sorted({*file.keys()} - said_twice(file.keys())):
                match = _PART.fullmatch(key.removeprefix(_PREFIX))
                if match is None or not key.startswith(_PREFIX):
                    what = f"holds {key}, which is no LoRA weight that drift could be computed of"
                    raise TsaeError(what, where=folder, fix="Merge the adapter into its base and save the whole model.")
                _add(updates, folder, config, match, file.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise TsaeError(f"cannot be read ({error})", where=folder) from error
    for update in updates.values():
        if update.A is not None:
            rank = update.A.shape[0] if update.A.ndim else 0
            if not rank:
                raise TsaeError(f"A of {update.name} has no rank", where=folder, fix="Save the adapter again.")
            alpha = _alpha(config, update.name.removesuffix(".weight"))
            update.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return updates


def _add(
    updates: dict[str, LoraUpdate], folder: Path, config: dict[str, Any], match: re.Match[str], value: torch.Tensor
) -> None:
    part = match["part"] or ""
    name = f"{match['module']}.{match['whole'] or 'weight'}"
    transposed = "embedding" in part or bool(config.get("fan_in_fan_out"))
    update = updates.setdefault(name, LoraUpdate(folder, name, 1.0, transposed))
    update.transposed |= transposed
    if match["whole"]:
        update.whole = value
    elif part == "lora_magnitude_vector":
        update.magnitude = value
    elif part.endswith("_A"):
        update.A = value
    else:
        update.B = value


def _finite(alpha: Any) -> float:
    found = float(alpha)
    if not math.isfinite(found):
        raise ValueError(f"it is {found}")
    return found


def _alpha(config: dict[str, Any], module: str) -> float:
    """lora_alpha of a module, which a pattern may set."""
    try:
        for pattern, alpha in (config.get("alpha_pattern") or {}).items():
            if _ENDLESS.search(pattern):
                raise ValueError(f"alpha_pattern {pattern[:60]!r} repeats what is repeated")
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return _finite(alpha)
        return _finite(config["lora_alpha"])
    except (re.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TsaeError(f"gives no usable lora_alpha ({type(error).__name__}: {error})", where=module) from error
