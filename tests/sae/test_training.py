"""One training step: what its optimizer remembers, and what bfloat16 rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.builders import synthetic_store
from tsae.activations.batches import Windows
from tsae.base.distributed import ALONE
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.loss import temporal_loss
from tsae.sae.training.trainer import Trainer

D, D_SAE, K, N = 32, 200, 5, 120


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(40, D))
    texts = [(rng.random((25, 40)) < 0.08) @ mixing + rng.normal(size=D) for _ in range(30)]
    windows = Windows(synthetic_store(tmp_path_factory.mktemp("step") / "acts", texts), "x.site")
    config = SAEConfig(d_sae=64, k=3, dead_after_tokens=2000)
    return Trainer(windows, config, TrainingConfig(tokens=4000, batch_tokens=200), ALONE)


def test_adam_remembers_nothing_along_the_decoder_rows(trainer: Trainer) -> None:
    rows = trainer.sae.W_dec.detach().clone()
    batch = next(trainer.batches())
    loss = temporal_loss(trainer.sae, trainer.scaled(batch.x), torch.from_numpy(batch.pairs)).total
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


# --- bfloat16


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().double()


def straight(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value of the one, the gradient of the other."""
    return like + (value - like).detach()


@pytest.fixture
def case() -> tuple[TemporalSAE, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    sae = TemporalSAE(D, SAEConfig(d_sae=D_SAE, k=K, aux_weight=0.1))
    sae.initialize(torch.randn(D, generator=generator), generator)
    x = 2 * torch.randn(N, D, generator=generator)
    start = torch.arange(N - 1)
    return sae, x, torch.stack([start, start + 1], dim=1)[start % 8 != 7]


def expected(sae: TemporalSAE, x: torch.Tensor, pairs: torch.Tensor, dead: torch.Tensor) -> dict[str, torch.Tensor]:
    """Terms by the dense formulas, with the rounding that is documented."""
    c, x = sae.config, x.double()
    W_enc, W_dec, b_enc, b_dec = (p.double() for p in (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec))
    pre = straight(rounded(x - b_dec) @ rounded(sae.W_enc), (x - b_dec) @ W_enc) + b_enc
    limit = pre.flatten().sort(descending=True).values[c.k * len(x) - 1]
    codes = pre * (pre >= limit)
    errors = []
    for stop in (c.d_high, c.d_sae):
        errors.append(x - b_dec - codes[:, :stop] @ W_dec[:stop])
    high = torch.nn.functional.normalize(codes[:, : c.d_high], dim=1)
    logits = high[pairs[:, 1]] @ high[pairs[:, 0]].T / c.temperature
    temporal = -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()).mean() / 2
    kept = (rounded(x) @ rounded(sae.W_enc) + b_enc - b_dec @ W_enc).detach().relu() * dead
    kept = kept * (kept >= kept.sort(1, descending=True).values[:, [D // 2 - 1]])
    residual = errors[-1].detach()
    aux = (residual - rounded(kept) @ rounded(sae.W_dec)).pow(2).mean() / (residual - residual.mean(0)).pow(2).mean()
    return {
        "reconstruction_high": errors[0].pow(2).mean(),
        "reconstruction": errors[1].pow(2).mean(),
        "temporal": temporal,
        "aux": aux,
    }


def test_bfloat16_rounds_the_factors_of_large_products_alone(
    case: tuple[TemporalSAE, torch.Tensor, torch.Tensor],
) -> None:
    sae, x, pairs = case
    dead = torch.arange(D_SAE) % 4 == 0
    terms = expected(sae, x, pairs, dead)
    found = temporal_loss(sae, x, pairs, dead, precision="bfloat16")
    exact = temporal_loss(sae, x, pairs, dead)
    values = torch.stack(list(terms.values()))
    in_bfloat16, in_float32 = (torch.stack([getattr(t, name) for name in terms]) for t in (found, exact))
    assert ((in_bfloat16 / values - 1).abs() < 1e-6).all()
    assert 1e-5 < (in_float32 / values - 1).abs().max() < 5e-3
    # Without AuxK, whose gradient is rounded too, the gradients are those of the exact factors.
    parameters = list(sae.parameters())
    gradients = [
        torch.autograd.grad(of["reconstruction_high"] + of["reconstruction"] + of["temporal"], parameters)
        for of in (found._asdict(), terms)
    ]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-5 * b.norm()
    # AuxK's are rounded on every device.
    weights = [sae.W_enc, sae.W_dec]
    again = temporal_loss(sae, x, pairs, dead, precision="bfloat16").aux
    for a, b in zip(torch.autograd.grad(again, weights), torch.autograd.grad(exact.aux, weights), strict=True):
        assert 1e-6 * b.norm() < (a - b).norm() < 2e-2 * b.norm()
