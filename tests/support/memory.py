"""Models that run out of memory."""

from __future__ import annotations

import pytest
import torch

from tsae.checkpoints.hooks import HuggingFaceReader


def short_of_memory(monkeypatch: pytest.MonkeyPatch, tokens: int, error: Exception) -> list[int]:
    """Let forward passes of more tokens fail; returns the sizes of all that were tried."""
    read, tried = HuggingFaceReader.read, []

    def limited(self: HuggingFaceReader, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        tried.append(ids.numel())
        if ids.numel() > tokens:
            raise error
        return read(self, ids, mask)

    monkeypatch.setattr(HuggingFaceReader, "read", limited)
    return tried


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you tried to …"),
]
