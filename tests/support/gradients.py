"""Gradients of single samples, by a backward pass for each."""

from __future__ import annotations

import torch

from tsae.attribution.sample_gradients import TrainedWeights, log_probabilities


def sample_gradients(
    trained: TrainedWeights, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """(B, P) of every sample's Σ_t weight_t log π(token t), without its padding; weight is (B, T − 1)."""
    found, leaves = [], {name: p.requires_grad_() for name, p in trained.parameters.items()}
    for row, kept, by in zip(ids, mask, weight, strict=True):
        n = int(kept.sum())
        log = log_probabilities(trained.model, row[None, :n], kept[None, :n])
        grads = torch.autograd.grad((log[0] * by[: n - 1]).sum(), list(leaves.values()), allow_unused=True)
        found.append(trained.join({name: g for name, g in zip(leaves, grads, strict=True) if g is not None}))
    trained.model.requires_grad_(False)
    return torch.stack(found)
