"""Gradients of single samples: against a backward pass for each."""

from __future__ import annotations

from pathlib import Path

import torch

from tsae.attribution.gradients.sample_gradients import (
    TrainedWeights,
    gradients_and_spread,
    log_probabilities,
    sample_gradients,
)
from tsae.checkpoints.checkpoint import Checkpoint


def batch(n: int = 5, width: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and a weight of every token after the first, of texts of several lengths."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 17, (n, width), generator=random)
    lengths = torch.arange(n) % 4 + width - 3
    mask = (torch.arange(width) < lengths[:, None]).long()
    weight = torch.randn(n, width - 1, generator=random) * mask[:, 1:]
    return ids * mask, mask, weight


def one_by_one(trained: TrainedWeights, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The oracle: a backward pass for every sample, without its padding."""
    found = []
    for row, kept, by in zip(ids, mask, weight, strict=True):
        n = int(kept.sum())
        leaves = {name: p.requires_grad_() for name, p in trained.parameters.items()}
        log = log_probabilities(trained.model, row[None, :n], kept[None, :n])
        grads = torch.autograd.grad((log[0] * by[: n - 1]).sum(), list(leaves.values()), allow_unused=True)
        found.append(trained.join({name: g for name, g in zip(leaves, grads, strict=True) if g is not None}))
    for parameter in trained.parameters.values():
        parameter.requires_grad_(False)
    return torch.stack(found)


def test_a_batch_gives_what_every_sample_gives_alone(any_model: Path) -> None:
    """Of every architecture, for every weight: embeddings (tied or not), projections, biases, norms."""
    model = Checkpoint(id="base", path=str(any_model)).load_model(dtype="float64")
    trained = TrainedWeights(model)
    ids, mask, weight = batch()
    found = sample_gradients(trained, ids, mask, weight)
    expected = one_by_one(trained, ids, mask, weight)
    assert found.shape == (5, sum(p.numel() for p in model.parameters()))
    assert all(part.abs().max() > 0 for part in expected.split(trained.sizes, dim=1))
    # Some norms go through float32 whatever the weights are.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not any(p.requires_grad for p in model.parameters())


def test_in_single_precision_to_five_digits(llama: Path) -> None:
    trained = TrainedWeights(Checkpoint(id="base", path=str(llama)).load_model())
    ids, mask, weight = batch(seed=1)
    found = sample_gradients(trained, ids, mask, weight)
    expected = one_by_one(trained, ids, mask, weight)
    assert ((found - expected).norm(dim=1) < 1e-5 * expected.norm(dim=1)).all()


def test_the_spread_is_the_squared_gradient_in_the_logits(llama: Path) -> None:
    trained = TrainedWeights(Checkpoint(id="base", path=str(llama)).load_model(dtype="float64"))
    ids, mask, weight = batch(seed=2)
    found = gradients_and_spread(trained, ids, mask, weight, temperature=0.7)[1]
    for row in range(len(ids)):
        n = int(mask[row].sum())
        logits = trained.model(input_ids=ids[row : row + 1, :n]).logits[0, : n - 1].detach()
        scaled = (logits / 0.7).requires_grad_()
        torch.log_softmax(scaled, -1).gather(-1, ids[row, 1:n, None]).sum().backward()
        assert scaled.grad is not None
        torch.testing.assert_close(found[row, : n - 1], scaled.grad.pow(2).sum(-1))


def test_of_the_last_tokens_alone(any_model: Path) -> None:
    """The head does not see the others, where the model's forward pass can leave them out."""
    model = Checkpoint(id="base", path=str(any_model)).load_model(dtype="float64")
    ids, mask, _ = batch()
    whole, seen = log_probabilities(model, ids, mask), []
    model.get_output_embeddings().register_forward_hook(lambda _m, read, _out: seen.append(read[0].shape[1]))
    torch.testing.assert_close(log_probabilities(model, ids, mask, last=3), whole[:, -3:])
    assert seen == [4]
