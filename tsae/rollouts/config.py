"""Configs of sampling, importing and banding. Imports nothing heavy: the CLI builds its options from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled."""

    n_samples: int = 8
    """Responses per problem (the group size)."""
    temperature: float = 1.0
    """Softmax temperature; training rollouts use 1."""
    max_new_tokens: int = 512
    """Tokens after which a response is cut off (finish_reason "length")."""
    batch_size: int = 256
    """Responses generated at once."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """"chat" applies the tokenizer's chat template, "plain" does not; "auto" applies it where there is one."""
    seed: int = 0
    """The same seed, batch size and machine give the same responses."""
    device: str = "cpu"
    """A torch device."""

    def __post_init__(self) -> None:
        for name in ("n_samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="SamplingConfig")
        if not self.temperature > 0:
            raise TsaeError(f"temperature={self.temperature} is not positive", where="SamplingConfig")


@dataclass(frozen=True)
class ImportConfig:
    """Which column of the log holds what."""

    prompt: str = "prompt"
    """Text of the problem, before any chat template."""
    response: str = "response"
    """Text of the response."""
    problem_id: str = "problem_id"
    """Problem id; where the log has no such column, equal prompts are one problem."""
    policy: str = "policy"
    """What sampled the response; where the log has no such column, `default_policy`."""
    default_policy: str = "unknown"
    """Policy id for a log without a policy column."""
    correct: str = "correct"
    """true or false; where the log has no such column, `verifier` decides, or a reward above 0."""
    reward: str = "reward"
    """Reward; where the log has no such column, 1 for correct and 0 for incorrect."""
    answer: str = "answer"
    """Reference answer; only needed for a verifier."""
    level: str = "level"
    """The author's difficulty label, if any."""
    verifier: str | None = None
    """exact, last_number, or module:function, for logs that do not say what is correct."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """Whether the checkpoint's chat template is applied to prompts."""


@dataclass(frozen=True)
class BandCutoffs:
    """Where the bands end, in pass rate."""

    easy: float = 0.75
    """Easy: a pass rate of at least this."""
    hard: float = 0.25
    """Hard: a pass rate of at most this; medium lies between."""

    def __post_init__(self) -> None:
        if not 0 <= self.hard < self.easy <= 1:
            raise TsaeError(
                f"band cut-offs hard={self.hard}, easy={self.easy} are not in order",
                where="BandCutoffs",
                fix="Give 0 <= hard < easy <= 1.",
            )
