"""Short trainings, and what stops them."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.builders import synthetic_store
from support.children import free_port, start
from tsae.activations.store import ActivationStore
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.training.run_folder import RunFolder
from tsae.sae.training.train import train

D = 16


# Latents die within the run, so that AuxK and the idle counters matter to the weights.
CONFIG = SAEConfig(d_sae=128, k=3, dead_after_tokens=400)


TRAINING = TrainingConfig(tokens=24_000, batch_tokens=200, learning_rate=3e-3, save_every_steps=9)


SHORT = replace(TRAINING, tokens=5000, save_every_steps=10)  # 25 steps, two checkpoints


WRITTEN = ("sae.safetensors", "config.json", "training.json", "metrics.jsonl", "checksums.json")


def make_store(folder: Path, seed: int = 0) -> ActivationStore:
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(40, D))
    texts = [(rng.random((25, 40)) < 0.08) @ mixing + rng.normal(size=D) for _ in range(60)]
    return synthetic_store(folder, texts)


def run(store: Path, folder: Path, training: TrainingConfig = SHORT) -> None:
    train(store, CONFIG, to=folder, training=training, progress=False)


def same_files(a: Path, b: Path) -> None:
    for name in (*WRITTEN, "run.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert sorted(p.name for p in a.iterdir()) == sorted((*WRITTEN, "run.json"))


def checkpoint(folder: Path) -> int:
    """Steps of the newest checkpoint; 0 without one."""
    return max((int(p.name) for p in (folder / "checkpoint").glob("[0-9]*")), default=0)


class Interrupted(Exception):
    """Stands for a kill where the test stays in one process."""


def interrupted(
    monkeypatch: pytest.MonkeyPatch,
    store: ActivationStore,
    folder: Path,
    saves: int = 1,
    training: TrainingConfig = SHORT,
    training_of: Callable[[Path], object] | None = None,
) -> Path:
    """A folder that a training left right after so many checkpoints."""
    save, left = RunFolder.save, itertools.count(1)

    def stopping(self: RunFolder, steps: int, tensors: Any) -> None:
        save(self, steps, tensors)
        if next(left) == saves:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        with pytest.raises(Interrupted):
            training_of(folder) if training_of is not None else run(store.path, folder, training)
    assert checkpoint(folder) == saves * SHORT.save_every_steps
    return folder


def run_ranks(
    store: Path, folder: Path, config: SAEConfig, training: TrainingConfig = SHORT, die: int = 0, size: int = 2
) -> list[int]:
    """Train on several processes; all are killed once the first has saved `die` steps."""
    port = free_port()
    ranks = [start(run_rank, rank, size, port, store, folder, config, training) for rank in range(size)]
    while die and checkpoint(folder) < die:
        time.sleep(0.001)
    for child in ranks:
        if die:
            child.kill()
        child.join(60)
    return [child.exitcode for child in ranks]


def run_rank(
    rank: int, size: int, port: int, store: Path, folder: Path, config: SAEConfig, training: TrainingConfig
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        sae = train(store, config, to=folder, training=training, progress=False)
    except TsaeError:
        sys.exit(2)
    save_file(sae.state_dict(), folder.with_name(f"{folder.name}-{rank}.safetensors"))
