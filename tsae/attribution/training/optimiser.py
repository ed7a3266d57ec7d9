"""The run's optimiser: simulated on other gradients, and its steps taken apart into the gradients they are made of.

A step moves the weights by

    u_t = −lr_t Σ_{s ≤ t} k_{t−s,t} ∘ c_s g_s  −  lr_t λ θ_{t−1}        g_s: the gradient of the loss at step s

c_s is the factor of gradient clipping. Adam has k_{d,t} = (1 − β₁) β₁^d / ((1 − β₁^t) (√v̂_t + ε)), with the run's own v̂
(Kingma & Ba 2015); SGD has k_{d,t} = μ^d. The last term is decoupled weight decay (AdamW; Loshchilov & Hutter 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

import numpy as np
import torch

from tsae.base.ranges import need_numbers
from tsae.errors import TsaeError

_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Optimiser:
    """What turned gradients into steps."""

    name: Literal["adam", "adamw", "sgd"] = "adamw"
    """adam takes weight decay into the gradient, as torch's does; adamw shrinks the weights beside it."""
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the rate falls to 0 at the last step; constant keeps it."""
    warmup: int = 0
    """Steps over which the rate rises from 0."""
    n_steps: int | None = None
    """Steps of the whole training, for the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    """Of SGD."""
    max_grad_norm: float | None = 1.0
    """Norm to which a batch's gradient is clipped; None does not clip."""
    points: tuple[tuple[float, float], ...] = ()
    """In place of schedule and warm-up: (steps done, factor of the rate), in order, with straight lines between."""
    every: int = 1
    """Optimiser steps that share a rate, of which the schedule counts one (verl and NeMo-RL: all of a generation)."""

    def __post_init__(self) -> None:
        if self.name not in ("adam", "adamw", "sgd"):
            raise TsaeError(f"optimiser {self.name!r} is none of adam, adamw, sgd", where="Optimiser")
        need_numbers(self)
        checks = {
            f"schedule={self.schedule!r} is none of constant, linear, cosine": self.schedule in _SCHEDULES,
            f"learning_rate={self.learning_rate} must be above 0": self.learning_rate > 0,
            f"betas={self.betas} and momentum={self.momentum} must be at least 0, and less than 1": (
                all(0 <= beta < 1 for beta in (*self.betas, self.momentum))
            ),
            f"eps={self.eps} and weight_decay={self.weight_decay} must be at least 0": (
                min(self.eps, self.weight_decay) >= 0
            ),
            f"warmup={self.warmup} must be a number of steps": self.warmup >= 0,
            f"n_steps={self.n_steps} must be at least 1": self.n_steps is None or self.n_steps >= 1,
            f"max_grad_norm={self.max_grad_norm} must be above 0, or None": (
                self.max_grad_norm is None or self.max_grad_norm > 0
            ),
        }
        for what, holds in checks.items():
            if not holds:
                raise TsaeError(what, where="Optimiser")
        if self.schedule != "constant" and self.n_steps is None:
            raise TsaeError(
                f"a {self.schedule} schedule needs the number of steps of the whole training",
                where="Optimiser.n_steps",
                fix="Give n_steps, or schedule=constant.",
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step; the first is 1. As transformers schedules it."""
        done = (step - 1) // self.every
        if self.points:
            return self.learning_rate * float(np.interp(done, *zip(*self.points, strict=True)))
        if done < self.warmup:
            return self.learning_rate * done / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        assert self.n_steps is not None
        left = (self.n_steps - done) / max(1, self.n_steps - self.warmup)
        return self.learning_rate * max(0.0, left if self.schedule == "linear" else (1 - cos(pi * left)) / 2)

    def clip(self, norm: torch.Tensor) -> torch.Tensor:
        """Factor of gradients whose norm this is, as `torch.nn.utils.clip_grad_norm_` has it."""
        if self.max_grad_norm is None:
            return torch.ones_like(norm)
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class LaterOptimiser(Optimiser):
    """The same, of whose steps some are done: its step 1 is the schedule's step `done` + 1."""

    done: int = 0

    def rate(self, step: int) -> float:
        return super().rate(step + self.done)


class Simulation:
    """Several trainings at once, each a row of weights with its own optimiser state.

    Args:
        optimiser: of all rows.
        weights: (K, P) before the first step; changed in place.
    """

    def __init__(self, optimiser: Optimiser, weights: torch.Tensor) -> None:
        self.optimiser, self.weights = optimiser, weights
        self.step_number = 0
        self.first = torch.zeros_like(weights)
        self.second = torch.zeros_like(weights) if optimiser.name != "sgd" else None

    @torch.no_grad()
    def step(self, gradient: torch.Tensor) -> None:
        """Take the next step of all rows on the gradients of their losses, (K, P)."""
        o, self.step_number = self.optimiser, self.step_number + 1
        t, rate = self.step_number, o.rate(self.step_number)
        gradient = gradient * o.clip(gradient.norm(dim=1))[:, None]
        if o.weight_decay and o.name == "adamw":
            self.weights.mul_(1 - rate * o.weight_decay)
        elif o.weight_decay:
            gradient = gradient + o.weight_decay * self.weights
        if self.second is None:
            self.first.mul_(o.momentum).add_(gradient)
            self.weights.add_(self.first, alpha=-rate)
            return
        self.first.lerp_(gradient, 1 - o.betas[0])
        self.second.mul_(o.betas[1]).addcmul_(gradient, gradient, value=1 - o.betas[1])
        self.weights.addcdiv_(self.first, self.scale(), value=-rate / (1 - o.betas[0] ** t))

    def scale(self) -> torch.Tensor:
        """(K, P) √v̂ + ε of the last step, by which Adam divides."""
        assert self.second is not None
        return (self.second / (1 - self.optimiser.betas[1] ** self.step_number)).sqrt_().add_(self.optimiser.eps)
