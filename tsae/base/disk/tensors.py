"""Files of tensors that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file


@contextmanager
def tensors_replacing(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Write a safetensors file, and give its temporary name; it takes the place of `path` when the block ends well.

    safetensors itself writes under a random name in the same folder, and a process that is killed leaves that behind.
    Here the folder is a temporary one beside `path`, which the next writer of the same file removes.

    Args:
        path: missing folders are made.
        tensors: contiguous, on any device.
        metadata: of the file.
    """
    path = Path(path)
    room = path.with_name(f"{path.name}.tmp")
    _clear(room)
    room.mkdir(parents=True)
    try:
        partial = room / room.name  # no other stage takes a file of this name for a finished one
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, partial, metadata=None if metadata is None else dict(metadata))
        yield partial
        os.replace(partial, path)
    finally:
        _clear(room)


def write_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file whole or not at all."""
    with tensors_replacing(path, tensors, metadata):
        return Path(path)


def _clear(room: Path) -> None:
    shutil.rmtree(room, ignore_errors=True)
    room.unlink(missing_ok=True)  # a file that an earlier version left
