"""One training step: what its optimizer remembers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import synthetic_store

from tsae.activations.windows import Windows
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.distributed import ALONE
from tsae.sae.loss import temporal_loss
from tsae.sae.training import _Trainer

D = 32


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> _Trainer:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(40, D))
    texts = [(rng.random((25, 40)) < 0.08) @ mixing + rng.normal(size=D) for _ in range(30)]
    windows = Windows(synthetic_store(tmp_path_factory.mktemp("step") / "acts", texts), "x.site")
    config = SAEConfig(d_sae=64, k=3, dead_after_tokens=2000)
    return _Trainer(windows, config, TrainingConfig(tokens=4000, batch_tokens=200), ALONE)


def test_adam_remembers_nothing_along_the_decoder_rows(trainer: _Trainer) -> None:
    rows = trainer.sae.W_dec.detach().clone()
    batch = next(trainer.batches())
    loss = temporal_loss(trainer.sae, torch.from_numpy(batch.x) * trainer.scale, torch.from_numpy(batch.pairs)).total
    (gradient,) = torch.autograd.grad(loss, [trainer.sae.W_dec])
    along = (gradient * rows).sum(1, keepdim=True)
    assert (along.abs() > 0.1 * gradient.norm(dim=1, keepdim=True)).float().mean() > 0.5
    trainer.step(batch)
    remembered = trainer.optimizer.state[trainer.sae.W_dec]["exp_avg"]
    assert (remembered * rows).sum(1).abs().max() < 1e-6 * remembered.abs().max()
    # The rest is kept, up to the clipping of the norm and Adam's 1 − β₁.
    across = gradient - along * rows
    factor = (remembered * across).sum() / across.square().sum()
    torch.testing.assert_close(remembered, factor * across, atol=1e-6 * float(remembered.abs().max()), rtol=1e-4)
