"""The policy-gradient loss of GRPO and its relatives, as a sum over samples.

    −loss = Σ_i w_i A_i Σ_t ρ_it      over the tokens that the policy sampled

ρ_it is the probability of token t against its probability when it was sampled. A batch that was sampled for its step
alone has ρ = 1: its gradient is that of log π, and clipping never acts. A_i is the advantage, w_i the normalisation. It
belongs to the whole batch, so leaving a sample out takes its summand away and changes no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tsae.errors import TsaeError


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

    def __post_init__(self) -> None:
        if self.kind not in ("grpo", "bnpo", "dapo", "dr_grpo"):
            raise TsaeError(f"loss {self.kind!r} is none of grpo, bnpo, dapo, dr_grpo", where="PolicyLoss")
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
