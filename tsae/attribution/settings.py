"""The settings of a run, in words that do not depend on the trainer (`tsae.attribution.find_settings` reads
them), and the run's optimiser: its rates, and the parts of its steps (`tsae.attribution.states` takes them).

A step moves the weights by

    u_t = −lr_t Σ_{s ≤ t} k_{t−s,t} ∘ c_s g_s  −  lr_t λ θ_{t−1}        g_s: the gradient of the loss at step s

c_s is the factor of gradient clipping. Adam has k_{d,t} = (1 − β₁) β₁^d / ((1 − β₁^t) (√v̂_t + ε)), with the run's own v̂
(Kingma & Ba 2015); SGD has k_{d,t} = μ^d. The last term is decoupled weight decay (AdamW; Loshchilov & Hutter 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import cos, isfinite, pi
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from tsae.attribution.loss import PolicyLoss, RewardKL
from tsae.base.validation import Count, NotNegative, Positive, Size, config
from tsae.errors import TsaeError

if TYPE_CHECKING:
    import torch

_CLOSED: dict[str, Callable[[int, int], float]] = {
    "constant": lambda done, left: 1.0,
    "linear": lambda done, left: max(0.0, (left - done) / max(1, left)),
    "cosine": lambda done, left: max(0.0, 0.5 * (1 + cos(pi * done / max(1, left)))),
}
"""Factors of the learning rate, so many steps after the warmup of so many: as transformers' schedules, without it."""


@config
class Batching:
    """How the rows that were sampled together became steps of the optimiser.

    A generation is a batch of responses that one policy sampled. It is split into `per_generation` micro-batches, and
    `accumulation` of them make a step. All of it is repeated `iterations` times before the next generation.
    """

    accumulation: Count = 1
    """Micro-batches of an optimiser step (TRL: gradient_accumulation_steps)."""
    per_generation: Count | None = None
    """Micro-batches of a generation (TRL: steps_per_generation); None: as many as a step has."""
    iterations: Count = 1
    """Times that each generation is used (TRL: num_iterations; verl: ppo_epochs)."""
    processes: Count | None = None
    """Processes of the training; None where it is not known."""

    @property
    def parts(self) -> int:
        """Micro-batches of a generation."""
        return self.per_generation or self.accumulation

    @property
    def updates(self) -> float:
        """Steps of the optimiser from one generation to the next; less than 1 where a step uses several."""
        return self.parts * self.iterations / self.accumulation


@dataclass(frozen=True)
class RunSettings:
    """How a run was trained."""

    optimiser: Optimiser
    loss: PolicyLoss
    batching: Batching = field(default_factory=Batching)
    source: str = ""
    """The file that these were read from."""
    trainer: str = "trl"
    """Whose words the file uses: trl, verl, open_instruct, prime_rl, nemo_rl, openrlhf, ms_swift."""
    version: str | None = None
    """Of the trainer that wrote the run."""
    base: str | None = None
    """The model that training started from, as the file names it: a path or a name on the Hub."""
    seed: int | None = None
    autocast: Literal["float32", "bfloat16"] = "float32"
    """In what forward passes were computed. Weights and optimiser state are float32 with bfloat16 autocast."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """In what trained weights were kept."""
    dropout: bool = False
    """Whether forward passes of the training dropped something (LoRA's dropout): a replay cannot repeat that."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a log is compared with, in TRL's words where there are: num_generations, max_completion_length, max_steps,
    scale_rewards, logging_steps, use_vllm, reward_weights, …"""
    notes: tuple[str, ...] = ()
    """What was assumed, such as the defaults of a version."""
    reward_kl: RewardKL | None = None
    """The KL penalty in the rewards, which the replay computes where the log has no advantages."""

    @property
    def needs_ref(self) -> bool:
        """Whether log-probabilities of a reference model are needed."""
        return self.loss.needs_ref or self.reward_kl is not None

    def __str__(self) -> str:
        o, loss = self.optimiser, self.loss
        low, high = 1 - (loss.epsilon or 0), 1 + (loss.epsilon_high or loss.epsilon or 0)
        clipped = {"clip": f"ratios clipped at {low:g} and {high:g}", "cispo": f"ratios truncated at {high - 1:g}"}
        warmup = f", {o.warmup} steps of warm-up" if o.warmup else ""
        parts = [
            f"{o.name}, learning rate {o.learning_rate:g} ({o.schedule}{warmup})",
            f"weight decay {o.weight_decay:g}" if o.weight_decay else "no weight decay",
            "no clipping of gradients" if o.max_grad_norm is None else f"gradients clipped at norm {o.max_grad_norm:g}",
            f"loss {loss.kind}",
            clipped.get(loss.surrogate, loss.surrogate) if loss.epsilon is not None else "no ratios",
            *([f"KL penalty {loss.beta:g}"] if loss.beta else []),
            *([f"KL penalty {self.reward_kl.beta:g} in the rewards"] if self.reward_kl else []),
            *([f"{self.batching.updates:g} updates a generation"] if self.batching.updates > 1 else []),
            *([self.autocast] if self.autocast != "float32" else []),
        ]
        by = f" (by {Path(self.source).name}; {self.trainer} {self.version or ''}".rstrip() + ")" if self.source else ""
        return ", ".join(parts) + by


Schedule = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt",
    "warmup_stable_decay",
]  # fmt: skip
"""Names of transformers."""

Part = Annotated[float, Field(ge=0, lt=1)]
_ENDLESS = ("constant", "inverse_sqrt")


@config
class Optimiser:
    """What turned gradients into steps."""

    name: Literal["adam", "adamw", "sgd"] = "adamw"
    """adam takes weight decay into the gradient, as torch's does; adamw shrinks the weights beside it."""
    learning_rate: Positive = 1e-6
    schedule: Schedule = "linear"
    """How the rate falls until the last step; constant keeps it."""
    warmup: Size = 0
    """Steps over which the rate rises from 0."""
    n_steps: Count | None = None
    """Steps of the whole training, for the schedule."""
    betas: tuple[Part, Part] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    momentum: Part = 0.0
    """Of SGD."""
    max_grad_norm: Positive | None = 1.0
    """Norm to which a batch's gradient is clipped; None does not clip."""
    points: tuple[tuple[float, float], ...] = ()
    """In place of schedule and warm-up: (steps done, factor of the rate), in order, with straight lines between."""
    every: Count = 1
    """Optimiser steps that share a rate, of which the schedule counts one (verl and NeMo-RL: all of a generation)."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """What shapes the schedule, in the words of transformers' `lr_scheduler_kwargs`."""
    decay_all: bool = True
    """Whether weight decay acts on all weights; otherwise not on biases and on the weights of norms, as transformers'
    Trainer has it."""

    def __post_init__(self) -> None:
        if self.schedule not in _ENDLESS and self.n_steps is None:
            what = f"a {self.schedule} schedule needs the number of steps of the whole training"
            raise TsaeError(what, where="Optimiser.n_steps", fix="Give n_steps, or schedule=constant.")
        try:
            places = {0, self.warmup, (self.n_steps or 0) // 2, self.n_steps or 0}
            numbers = [value for value in self.shape.values() if isinstance(value, float)]
            if not all(map(isfinite, [*numbers, *map(self._factor, places)])):
                raise ValueError("a number is not finite")
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            what = f"shape={dict(self.shape)} does not fit a {self.schedule} schedule ({error})"
            fix = "Give the words and numbers that transformers' schedule takes (lr_scheduler_kwargs)."
            raise TsaeError(what, where="Optimiser", fix=fix) from error

    def rate(self, step: int) -> float:
        """Learning rate of a step; the first is 1. As transformers schedules it."""
        done = (step - 1) // self.every
        if not self.points:
            return self.learning_rate * self._factor(done)
        return self.learning_rate * float(np.interp(float(done), *np.array(self.points, dtype=float).T))

    def _factor(self, done: int) -> float:
        """The factor of the learning rate after so many steps of the schedule."""
        if self.shape or (closed := _CLOSED.get(self.schedule)) is None:
            return self._of_transformers(done)
        if done < self.warmup:
            return done / max(1, self.warmup)
        return closed(done - self.warmup, (self.n_steps or 0) - self.warmup)

    @cached_property
    def _of_transformers(self) -> Callable[[int], float]:
        import torch
        from transformers import get_scheduler

        optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self.learning_rate)
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        n_steps = None if "num_stable_steps" in self.shape else self.n_steps
        schedule: Any = get_scheduler(name, optimiser, self.warmup, n_steps, dict(self.shape))
        factor: Callable[[int], float] = schedule.lr_lambdas[0]
        return factor

    def clip(self, norm: torch.Tensor) -> torch.Tensor:
        """Factor of gradients whose norm this is, as `torch.nn.utils.clip_grad_norm_` has it."""
        if self.max_grad_norm is None:
            return norm.new_ones(norm.shape)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
