"""The policy-gradient loss of GRPO and its relatives, as a sum over samples.

    −loss = Σ_i w_i Σ_t min(ρ_it A_i, clip(ρ_it, 1 − ε, 1 + ε) A_i)      over the tokens that the policy sampled

ρ_it is the probability of token t against its probability when it was sampled (Schulman et al. 2017; Shao et al. 2024).
A batch that was sampled for its step alone has ρ = 1: its gradient is that of log π, and clipping never acts. On
another path of training the same samples have other ratios. A_i is the advantage, w_i the normalisation. It belongs to
the whole batch, so leaving a sample out takes its summand away and changes no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tsae.base.ranges import need_numbers
from tsae.errors import TsaeError

Again = Literal["on-policy", "replayed"]
"""How a run is imagined anew: with responses that its policy samples, or with those of the log."""

_LARGEST = 3.0
"""Ratios are extrapolated, and far ones would rule."""


@dataclass(frozen=True)
class PolicyLoss:
    """What a step made of samples and their advantages."""

    kind: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = "dapo"
    """Normalisation: by every response's own tokens (grpo), by the batch's tokens (bnpo, dapo), or by
    max_completion_length (dr_grpo). TRL's default is dapo."""
    max_completion_length: int | None = None
    """For dr_grpo alone: the limit in tokens."""
    temperature: float = 1.0
    """Of the sampling, by which the trainer divides logits."""
    epsilon: float | None = 0.2
    """How far below 1 the ratio may fall before a token with negative advantage stops to count; None: no ratio."""
    epsilon_high: float | None = None
    """How far above 1 it may rise with positive advantage; by default epsilon."""

    def __post_init__(self) -> None:
        if self.kind not in ("grpo", "bnpo", "dapo", "dr_grpo"):
            raise TsaeError(f"loss {self.kind!r} is none of grpo, bnpo, dapo, dr_grpo", where="PolicyLoss")
        need_numbers(self)
        bounds = [bound for bound in (self.epsilon, self.epsilon_high) if bound is not None]
        if not self.temperature > 0 or min(bounds, default=0) < 0:
            raise TsaeError(
                f"temperature={self.temperature} must be above 0, epsilon={self.epsilon} and "
                f"epsilon_high={self.epsilon_high} at least 0",
                where="PolicyLoss",
            )
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise TsaeError(f"max_completion_length={self.max_completion_length} is less than 1", where="PolicyLoss")
        if (self.kind == "dr_grpo") != (self.max_completion_length is not None):
            raise TsaeError(
                f"kind={self.kind} and max_completion_length={self.max_completion_length} do not go together",
                where="PolicyLoss",
                fix="Give max_completion_length for dr_grpo, and only there.",
            )

    def weights(self, n_tokens: np.ndarray) -> np.ndarray:
        """(n,) w_i of the samples of one batch, from the tokens of each that the policy sampled."""
        if self.kind in ("bnpo", "dapo"):
            return np.full(len(n_tokens), 1 / n_tokens.sum())
        own = np.full(len(n_tokens), self.max_completion_length or np.maximum(n_tokens, 1))
        weights: np.ndarray = 1 / (len(n_tokens) * own)
        return weights

    def summands(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """min(ρ A, clip(ρ) A) of tokens, by log ρ in nats; without ratios A log ρ, with the gradient of A log π."""
        if self.epsilon is None:
            return advantage * log_ratio
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        ratio = log_ratio.exp()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.epsilon, 1 + high) * advantage)

    def pull(self, log_ratio: torch.Tensor, positive: torch.Tensor, again: Again = "replayed") -> torch.Tensor:
        """Factor of a token's gradient A ∇log π on another path.

        Args:
            log_ratio: log ρ, in nats.
            positive: whether the advantage is; broadcasts.
            again: replayed: the logged responses are used again, and the loss weighs and clips them: ρ, or 0 where it
                is clipped. on-policy: the policy samples anew; ρ makes the logged responses stand for those (importance
                weights, truncated; Ionides 2008).
        """
        ratio = log_ratio.exp().clamp(max=_LARGEST)
        if again == "on-policy":
            return ratio
        if self.epsilon is None:
            return torch.ones_like(log_ratio)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return ratio * torch.where(positive, ratio < 1 + high, ratio > 1 - self.epsilon)
