"""The simulated optimiser: against torch's own, with transformers' schedules and torch's clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tsae.attribution.training.optimiser import Optimiser, Simulation
from tsae.errors import TsaeError

N_STEPS = 25


def really(optimiser: Optimiser, start: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """The oracle: one training with torch's optimiser."""
    weights = torch.nn.Parameter(start.clone())
    o = optimiser
    made: Any = (
        torch.optim.SGD([weights], lr=o.learning_rate, momentum=o.momentum, weight_decay=o.weight_decay)
        if o.name == "sgd"
        else {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name](
            [weights], lr=o.learning_rate, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
        )
    )
    schedule = transformers.get_scheduler(
        "constant_with_warmup" if o.schedule == "constant" else o.schedule, made, o.warmup, o.n_steps
    )
    for gradient in gradients:
        weights.grad = gradient.clone()
        if o.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([weights], o.max_grad_norm)
        made.step()
        schedule.step()
    return weights.detach()


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("adam", 1e-2, "constant", max_grad_norm=None),
        Optimiser("adam", 1e-2, "linear", warmup=5, n_steps=N_STEPS, weight_decay=0.1),
        Optimiser("adamw", 1e-2, "cosine", warmup=3, n_steps=N_STEPS, weight_decay=0.1, betas=(0.8, 0.95)),
        Optimiser("sgd", 1e-2, "linear", n_steps=2 * N_STEPS, momentum=0.9, max_grad_norm=2.0),
        Optimiser("sgd", 1e-2, "constant", weight_decay=0.2, max_grad_norm=None),
    ],
    ids=lambda o: f"{o.name}-{o.schedule}",
)
def test_many_trainings_at_once_are_torchs_own(optimiser: Optimiser) -> None:
    random = torch.Generator().manual_seed(0)
    start = torch.randn(4, 30, generator=random, dtype=torch.float64)
    # Norms on both sides of the limits at which they are clipped.
    gradients = (
        torch.randn(N_STEPS, 4, 30, generator=random, dtype=torch.float64) * torch.tensor([0.1, 0.2, 0.5, 2.0])[:, None]
    )
    simulation = Simulation(optimiser, start.clone())
    for gradient in gradients:
        simulation.step(gradient)
    expected = torch.stack([really(optimiser, start[k], gradients[:, k]) for k in range(4)])
    torch.testing.assert_close(simulation.weights, expected, rtol=1e-12, atol=1e-12)
    assert (simulation.weights - start).abs().max() > 0.01


def test_a_schedule_that_ends_needs_its_end() -> None:
    with pytest.raises(TsaeError, match="needs the number of steps"):
        Optimiser("adam", 1e-3, "cosine")
