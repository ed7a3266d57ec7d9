"""Files of tensors that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from tsae.base.files import as_path, partial_name


@contextmanager
def tensors_replacing(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Write a safetensors file under a temporary name and yield that name. If the block succeeds, rename it to `path`.

    safetensors itself writes under a random name in the same folder, and a process that is killed leaves that behind.
    Here the folder is a temporary one beside `path`, which is removed before the block begins: so a kill leaves
    something only where `path` is still to be written, and the next writer of it removes that.

    Args:
        path: missing folders are made.
        tensors: contiguous, on any device.
        metadata: of the file.
    """
    path = as_path(path)
    partial, room = partial_name(path), partial_name(path.with_name(f"{path.name}.writing"))
    _clear(partial, room)
    room.mkdir(parents=True)
    try:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, room / path.name, metadata=None if metadata is None else dict(metadata))
        os.replace(room / path.name, partial)
        _clear(room)
        yield partial
        os.replace(partial, path)
    finally:
        _clear(partial, room)


def write_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file whole or not at all."""
    with tensors_replacing(path, tensors, metadata):
        return as_path(path)


def _clear(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
