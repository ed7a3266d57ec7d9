"""The settings of a run, in words that do not depend on the trainer. `tsae.attribution.training.read` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tsae.attribution.training.loss import PolicyLoss, RewardKL
from tsae.attribution.training.optimiser import Optimiser


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
    """File that said so."""
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
