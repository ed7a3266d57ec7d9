"""The settings of a run, in words that do not depend on the trainer (`tsae.attribution.readers` reads them), and the
run's optimiser: its rates, and the parts of its steps (`tsae.attribution.replay.states` takes them).

A step moves the weights by

    u_t = −lr_t Σ_{s ≤ t} k_{t−s,t} ∘ c_s g_s  −  lr_t λ θ_{t−1}        g_s: the gradient of the loss at step s

c_s is the factor of gradient clipping. Adam has k_{d,t} = (1 − β₁) β₁^d / ((1 − β₁^t) (√v̂_t + ε)), with the run's own v̂
(Kingma & Ba 2015); SGD has k_{d,t} = μ^d. The last term is decoupled weight decay (AdamW; Loshchilov & Hutter 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import cos, isfinite, pi, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from tsae.attribution.training.loss import PolicyLoss, RewardKL
from tsae.base.validation import Count, NotNegative, Positive, Size, config
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Batching:
    """How the rows that were sampled together became steps of the optimiser.

    A generation is a batch of responses that one policy sampled. It is split into `per_generation` micro-batches, and
    `accumulation` of them make a step. All of it is repeated `iterations` times before the next generation.
    """

    accumulation: int = 1
    """Micro-batches of an optimiser step (TRL: gradient_accumulation_steps)."""
    per_generation: int | None = None
    """Micro-batches of a generation (TRL: steps_per_generation); None: as many as a step has."""
    iterations: int = 1
    """Times that each generation is used (TRL: num_iterations; verl: ppo_epochs)."""
    processes: int | None = None
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
    batching: Batching = Batching()
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

_SHAPES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    ),
}  # fmt: skip
"""Schedules, and the words of transformers that shape them."""
Part = Annotated[float, Field(ge=0, lt=1)]
_ENDLESS = ("constant", "inverse_sqrt")
_CURVES = ("linear", "cosine", "1-sqrt")


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
        fits = set(self.shape) <= set(_SHAPES[self.schedule]) and all(
            value in _CURVES if name.endswith("_type") else isinstance(value, (int, float)) and isfinite(value)
            for name, value in self.shape.items()
        )
        needs = {"num_decay_steps"} if self.schedule == "warmup_stable_decay" else set()
        if not fits or not needs <= set(self.shape):
            what = f"shape={dict(self.shape)} does not fit a {self.schedule} schedule"
            takes = ", ".join(_SHAPES[self.schedule]) or "none"
            raise TsaeError(what, where="Optimiser", fix=f"Its words are {takes}; curves are {', '.join(_CURVES)}.")
        if self.schedule not in _ENDLESS and self.n_steps is None:
            raise TsaeError(
                f"a {self.schedule} schedule needs the number of steps of the whole training",
                where="Optimiser.n_steps",
                fix="Give n_steps, or schedule=constant.",
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step; the first is 1. As transformers schedules it."""
        return self.learning_rate * self._part((step - 1) // self.every)

    def _part(self, done: int) -> float:
        """Part of the learning rate after so many steps of the schedule."""
        if self.points:
            return float(
                np.interp(float(done), [float(at) for at, _ in self.points], [part for _, part in self.points])
            )
        warmup, shape = self.warmup, self.shape
        if self.schedule == "warmup_stable_decay":
            return self._in_three_stages(done)
        if done < warmup:
            return done / warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            scale = shape.get("timescale") or warmup or 10_000
            return sqrt(scale / (done - warmup + scale))
        assert self.n_steps is not None
        left = (self.n_steps - done) / max(1, self.n_steps - warmup)
        if self.schedule == "linear":
            return max(0.0, left)
        if self.schedule == "polynomial":
            end = shape.get("lr_end", 1e-7) / self.learning_rate
            return end + (1 - end) * max(0.0, left) ** shape.get("power", 1.0)
        if self.schedule == "cosine_with_restarts":
            return 0.0 if left <= 0 else (1 + cos(pi * (shape.get("num_cycles", 1) * (1 - left) % 1))) / 2
        lowest = shape.get("min_lr_rate", shape.get("min_lr", 0.0) / self.learning_rate)
        return max(0.0, lowest + (1 - lowest) * _fall("cosine", 1 - left, shape.get("num_cycles", 0.5)))

    def _in_three_stages(self, done: int) -> float:
        assert self.n_steps is not None
        shape, falls = self.shape, self.shape["num_decay_steps"]
        stays = shape.get("num_stable_steps", self.n_steps - self.warmup - falls)
        lowest, cycles = shape.get("min_lr_ratio", 0.0), shape.get("num_cycles", 0.5)
        if done < self.warmup:
            to_go = 1 - done / self.warmup
            kind = shape.get("warmup_type", "linear")
            rise = 1 - sqrt(to_go) if kind == "1-sqrt" else _fall(kind, to_go)
            return lowest + (1 - lowest) * rise
        after = done - self.warmup - stays
        if after < 0:
            return 1.0
        if after >= falls:
            return lowest
        return max(0.0, lowest + (1 - lowest) * _fall(shape.get("decay_type", "cosine"), after / falls, cycles))

    def clip(self, norm: torch.Tensor) -> torch.Tensor:
        """Factor of gradients whose norm this is, as `torch.nn.utils.clip_grad_norm_` has it."""
        if self.max_grad_norm is None:
            return torch.ones_like(norm)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)


def _fall(curve: str, progress: float, cycles: float = 0.5) -> float:
    """From 1 to 0 while progress goes from 0 to 1."""
    if curve == "cosine":
        return (1 + cos(2 * pi * cycles * progress)) / 2
    return 1 - (sqrt(progress) if curve == "1-sqrt" else progress)
