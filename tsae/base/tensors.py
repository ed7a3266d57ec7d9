"""Files of tensors that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tsae.base.files import as_path, partial_name, replacing


def write_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file whole or not at all.

    safetensors itself writes under a random name in the same folder, and a process that is killed leaves that behind.
    Here the folder is a temporary one beside `path`, and the next writer of it removes what a killed process left.

    Args:
        path: missing folders are made.
        tensors: on any device.
        metadata: of the file.
    """
    path = as_path(path)
    room = partial_name(path.with_name(f"{path.name}.writing"))
    with replacing(path) as partial:
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        try:
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(kept, room / path.name, metadata=None if metadata is None else dict(metadata))
            os.replace(room / path.name, partial)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    return path
