"""Steps of the optimiser: against torch's own, with transformers' schedules and torch's clipping."""

from __future__ import annotations

import multiprocessing.reduction
from typing import Any

import pytest
import torch
import transformers

from support.refusals import refuses
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.settings import Optimiser
from tsae.attribution.states import State, Stepper

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
def test_steps_are_torchs_own(optimiser: Optimiser) -> None:
    random = torch.Generator().manual_seed(0)
    model: Any = torch.nn.Linear(29, 1, bias=False).double()
    start = torch.randn(29, generator=random, dtype=torch.float64)
    for size in (0.1, 0.2, 0.5, 2.0):  # norms on both sides of the limits at which they are clipped
        gradients = size * torch.randn(N_STEPS, 29, generator=random, dtype=torch.float64)
        state, stepper = State.at(start), Stepper(TrainedWeights(model), optimiser)
        for gradient in gradients:
            before, decay = state.weights.clone(), stepper.decay_of(state.weights, state.step + 1)
            scale, clip, norm = stepper.take(state, gradient)
            assert (norm, clip) == (float(gradient.norm()), float(optimiser.clip(gradient.norm())))
        torch.testing.assert_close(state.weights, really(optimiser, start, gradients), rtol=1e-12, atol=1e-12)
        assert (state.weights - start).abs().max() > 0.01
        assert (state.step, state.taken) == (N_STEPS, N_STEPS)
        # The step is its scale times what the running mean holds, of which (1 − β₁) is the gradient, and weight decay.
        made = state.first / (1 - optimiser.betas[0] if optimiser.name != "sgd" else 1)
        torch.testing.assert_close(state.weights, before + decay - scale * made, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
        ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 6, "min_lr_ratio": 0.2}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_schedules_are_those_of_transformers(name: str, shape: dict[str, Any], warmup: int) -> None:
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = transformers.get_scheduler(name, made, warmup, N_STEPS, scheduler_specific_kwargs=shape)
    known: Any = "constant" if name == "constant_with_warmup" else name
    optimiser = Optimiser("sgd", 1e-3, known, warmup, N_STEPS, shape=shape)
    for step in range(1, N_STEPS + 4):  # the last ones: after the training's end
        assert optimiser.rate(step) == pytest.approx(made.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        made.step()
        schedule.step()


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
def test_settings_go_to_other_processes(schedule: Any) -> None:
    sent = Optimiser("adamw", 1e-3, schedule, 5, 20)
    assert multiprocessing.reduction.ForkingPickler.dumps(sent)
    assert 0 < sent.rate(9) < 1e-3


@pytest.mark.parametrize(
    ("schedule", "shape", "said"),
    [
        ("linear", {"num_cycles": 2}, "does not fit a linear schedule"),
        ("cosine", {"num_cycles": "many"}, "does not fit a cosine"),
        ("cosine_with_min_lr", {"min_lr": float("nan")}, "a number is not finite"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "steep"}, "does not fit .*decay type"),
        ("warmup_stable_decay", {}, "does not fit .*num_decay_steps"),
        ("cosine", None, "needs the number of steps"),
    ],
)
def test_schedules_that_cannot_be_are_refused(schedule: Any, shape: dict[str, Any] | None, said: str) -> None:
    refuses(said, Optimiser, "adam", 1e-3, schedule, n_steps=None if shape is None else 9, shape=shape or {})
