"""Weights that FSDP has divided among processes, as verl saves them: merged once, into a folder of the cache.

``model_world_size_8_rank_0.pt`` and its like hold DTensors: this process's part of every weight, and how the parts make
the whole. They are read as tensors and plain containers alone (`tsae.base.array_files`); beside them, the folder
huggingface has config and tokenizer.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from tsae.base.array_files import read_torch_file
from tsae.base.files import new_folder, write_json, writing
from tsae.base.mirror import CACHE, cache_folder
from tsae.errors import TsaeError

if TYPE_CHECKING:
    import torch

_RANK = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
BESIDE = "huggingface"
"""The folder with config and tokenizer, in that with the shards."""
_AT_ONCE = 4 << 30  # bytes of a file of merged weights
_FIX = "Merge them by the trainer's own command: python -m verl.model_merger merge --backend fsdp --local_dir {}."


def fsdp_shards(folder: Path) -> list[Path]:
    """The shards in a folder, by rank, if all are there with the model's config, and no whole weights beside them."""
    whole = (folder / "config.json").is_file() or any((folder / BESIDE).glob("*.safetensors"))
    if whole or not (folder / BESIDE / "config.json").is_file():
        return []
    found = sorted((int(m[2]), int(m[1]), file) for file in folder.iterdir() if (m := _RANK.fullmatch(file.name)))
    there = [(rank, size) for rank, size, _ in found]
    return [file for *_, file in found] if there == [(rank, len(found)) for rank in range(len(found))] else []


def merged(folder: Path) -> Path:
    """The folder of the cache with the whole model of a folder with shards. Merged weights are kept as they are.

    Raises:
        TsaeError: where a shard is damaged, needs pickle, or does not fit the others.
    """
    shards, beside = fsdp_shards(folder), folder / BESIDE
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in (*shards, beside / "config.json")]
    key = hashlib.sha256(repr((str(folder.resolve()), states)).encode()).hexdigest()[:24]
    to = cache_folder() / "merged" / key
    if to.is_dir():
        return to
    with writing(to, f"Make room there, or set {CACHE} to a folder on a larger disk."):
        to.parent.mkdir(parents=True, exist_ok=True)
        # Workers of one command come here together: one merges, the others wait.
        with FileLock(f"{to}.lock"):
            if not to.is_dir():
                with new_folder(to) as partial:
                    for file in beside.iterdir():
                        if file.is_file() and not file.is_symlink():
                            shutil.copyfile(file, partial / file.name)
                    _write(_merged(folder, shards), partial)
    return to


def _write(weights: Iterator[tuple[str, torch.Tensor]], to: Path) -> None:
    """As transformers writes them: files of a few GB, and an index."""
    from safetensors.torch import save_file

    held: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(held, to / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(held, name))
        held.clear()

    for name, weight in weights:
        held[name] = weight
        if sum(each.nbytes for each in held.values()) >= _AT_ONCE:
            flush()
    if held:
        flush()
    write_json(to / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def _merged(folder: Path, shards: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight, one after another."""
    import torch
    import torch.distributed.tensor  # DTensor becomes one of the kinds that are read

    fix = _FIX.format(folder)
    parts: list[dict[str, Any]] = [
        read_torch_file(file, refused=fix, damaged="Copy the shard again.", mapped=True) for file in shards
    ]
    for part, file in zip(parts, shards, strict=True):
        if not isinstance(part, dict) or part.keys() != parts[0].keys():
            raise TsaeError(f"holds other weights than {shards[0].name}", where=file, fix="Copy the shards again.")
    for name, first in parts[0].items():
        if "base_model.model." in name:
            raise TsaeError("holds an adapter and its base in one", where=shards[0], fix=fix)
        if isinstance(first, torch.Tensor):
            yield name, _whole(name, [part[name] for part in parts], folder, fix)


def _whole(name: str, parts: Sequence[torch.Tensor], folder: Path, fix: str) -> torch.Tensor:
    """A weight from every process's part of it."""
    import torch

    local = [getattr(part, "_local_tensor", part) for part in parts]
    placements, mesh = getattr(parts[0], "placements", ()), getattr(parts[0], "device_mesh", None)
    divided = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if mesh is None or not divided:
        return local[0].clone()
    # Where a process stands in the mesh is in its own shard: one that was copied twice is noticed.
    at = [tuple(part.device_mesh.get_coordinate() or ()) for part in parts]  # type: ignore[attr-defined]
    if len(divided) == 1 and placements[(axis := divided[0])].is_shard() and sorted(at) == [*np.ndindex(*mesh.shape)]:
        first = sorted((c[axis], i) for i, c in enumerate(at) if not any(c[:axis] + c[axis + 1 :]))  # of equal copies
        found = torch.cat([local[i] for _, i in first], dim=placements[axis].dim)
        if found.shape == parts[0].shape:
            return found
    what = f"the parts of {name} do not make a weight of shape {tuple(parts[0].shape)}"
    raise TsaeError(what, where=folder, fix=fix)
