"""One training step of other trainers of SAEs, each by its own code, on the batch of our step.

- sparsify (`eai-sparsify`): `Trainer.fit` over one batch: TopK, its Triton kernels on a GPU, with its default optimizer
  (signs of a momentum, free of a schedule) and with Adam.
- dictionary_learning (`dictionary-learning`): `update` of BatchTopKTrainer and of MatryoshkaBatchTopKTrainer, in
  bfloat16 as `trainSAE` calls it, at a step that moves the threshold too, as all but its first thousand do.
- sae_lens (`sae-lens`): `SAETrainer.step` of BatchTopKTrainingSAE with `autocast`.
- ours: `Trainer.step`, which like theirs clips gradients and keeps the decoder's rows at unit norm, and alone has a
  contrastive term and a second group.

Nobody logs, nobody has dead latents, and all read activations that are on the device already. On a GPU all compute in
bfloat16 with float32 weights: sparsify under autocast but for its decoder, which its kernels add up in float32, the
others of them under autocast throughout. On a CPU theirs compute in float32. `scripts/gpu_suite.sh --wheels` fetches
the packages; `scripts/bench_gpu.py --parts peers` runs this.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import bench_train
import numpy as np
import torch

from tsae.activations.batches import TokenBatch
from tsae.base.distributed import Processes
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.training.trainer import Trainer

_DEAD_AFTER = 10_000_000
_STEPS = 100_000
"""Of a training, of which a few are taken."""
_NEVER_CALLED = ("wandb", "nnsight")
"""What peers import at their beginning for logs and language models: no step calls it, and it is 20 MB."""
Step = Callable[[], Any]


class _Empty(ModuleType):
    """In the place of a package that a peer imports and its step does not call."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def stand_in() -> None:
    """Put an empty module wherever one of `_NEVER_CALLED` is not installed."""
    for name in _NEVER_CALLED:
        try:
            importlib.import_module(name)
        except ImportError:
            module = sys.modules[name] = _Empty(name)
            module.__spec__ = ModuleSpec(name, None)


def ours(size: bench_train.Bench, x: torch.Tensor, pairs: torch.Tensor) -> Step:
    """A step of our trainer."""
    norms = SimpleNamespace(mean=size.d_model**0.5, centre=[0.0] * size.d_model, outlier_share=0.0)
    windows: Any = SimpleNamespace(
        first_tokens=x[:64].cpu().numpy(), norms=norms, d_model=size.d_model, site="blocks.0.hook_resid_post"
    )
    training = TrainingConfig(
        tokens=_STEPS * len(x), batch_tokens=len(x), initial_bias="mean", device=size.device, precision=size.precision
    )
    config = SAEConfig(d_sae=size.d_sae, k=size.k, dead_after_tokens=_DEAD_AFTER)
    trainer = Trainer(windows, config, training, Processes(device=size.device))
    token = np.arange(len(x))
    return partial(trainer.step, TokenBatch(x, pairs.cpu().numpy(), token // size.window, copies=token))


class _Activations(torch.nn.Module):
    """What sparsify takes for a language model: its one site gives the batch."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.site, self.x, self.device = torch.nn.Identity(), x, x.device
        self.base_model, self.dummy_inputs = self, {"input_ids": torch.zeros(1, len(x), dtype=torch.long)}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.site(self.x[None])


class _OneBatch(list[dict[str, torch.Tensor]]):
    """What sparsify takes for a dataset, whatever the step that it resumes at."""

    def select(self, rows: range) -> _OneBatch:
        return self


def _sparsify(size: bench_train.Bench, x: torch.Tensor, *, optimizer: Any) -> Step:
    from sparsify import SaeConfig, TrainConfig
    from sparsify import Trainer as Peer

    sae = SaeConfig(num_latents=size.d_sae, k=size.k)
    config = TrainConfig(sae, batch_size=1, hookpoints=["site"], optimizer=optimizer, log_to_wandb=False)
    tokens = _OneBatch([{"input_ids": torch.zeros(len(x), dtype=torch.long)}])
    with redirect_stdout(io.StringIO()):
        trainer = Peer(config, tokens, _Activations(x))
    trainer.save = lambda: None

    def step() -> None:
        before = torch.get_float32_matmul_precision()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            trainer.fit()
        torch.set_float32_matmul_precision(before)  # fit's "high" is not to reach our step

    return step


def _dictionary_learning(size: bench_train.Bench, x: torch.Tensor, *, groups: bool) -> Step:
    from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer

    high = SAEConfig(d_sae=size.d_sae, k=size.k).d_high / size.d_sae
    kind = partial(MatryoshkaBatchTopKTrainer, group_fractions=[high, 1 - high]) if groups else BatchTopKTrainer
    with torch.device(size.device):
        trainer = kind(
            steps=_STEPS, activation_dim=size.d_model, dict_size=size.d_sae, k=size.k, layer=0, lm_name="none",
            device=size.device,
        )  # fmt: skip
    on_gpu = x.is_cuda
    x = x.bfloat16() if on_gpu else x

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=on_gpu):
            trainer.update(trainer.threshold_start_step + 1, x)

    return step


def _sae_lens(size: bench_train.Bench, x: torch.Tensor) -> Step:
    from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, SAETrainer
    from sae_lens.config import SAETrainerConfig

    config = BatchTopKTrainingSAEConfig(d_in=size.d_model, d_sae=size.d_sae, k=size.k, device=size.device)
    training = SAETrainerConfig(
        total_training_samples=_STEPS * len(x), train_batch_size_samples=len(x), lr_end=3e-4, device=size.device,
        autocast=x.is_cuda,
    )  # fmt: skip
    trainer = SAETrainer(training, BatchTopKTrainingSAE(config), iter(()))

    def step() -> None:
        trainer.step(x)
        trainer.n_training_steps += 1

    return step


class Peer(NamedTuple):
    """A step of another package."""

    package: str
    """On PyPI."""
    step: str
    make: Callable[[bench_train.Bench, torch.Tensor], Step]
    """Given a size and a batch; raises where the package cannot be imported."""
    precision: str = "bfloat16 by autocast"
    """On a GPU."""


_DECODER_FLOAT32 = "bfloat16 by autocast, decoder in float32"
PEERS = (
    Peer("sae-lens", "BatchTopK, Adam", _sae_lens),
    Peer("dictionary-learning", "BatchTopK, Adam", partial(_dictionary_learning, groups=False)),
    Peer(
        "eai-sparsify", "TopK, its default optimizer signum", partial(_sparsify, optimizer="signum"), _DECODER_FLOAT32
    ),
    Peer("eai-sparsify", "TopK, Adam", partial(_sparsify, optimizer="adam"), _DECODER_FLOAT32),
    Peer("dictionary-learning", "Matryoshka BatchTopK of two groups, Adam", partial(_dictionary_learning, groups=True)),
)
"""In the order of their worth."""
