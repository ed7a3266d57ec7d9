"""What torchrun tells each process through the environment; without torchrun there is one process."""

from __future__ import annotations

import os


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Place of this process among those of its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def first_process() -> bool:
    """Whether this process is the first, which prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"
