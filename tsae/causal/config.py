"""Config of a causal test. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, get_args

from tsae.base.ranges import need_at_most, need_numbers
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig

Where = Literal["predicting", "first", "response", "all"]
Backend = Literal["huggingface", "transformer_lens"]
Mode = Literal["ablate", "mean", "clamp", "steer", "transplant"]


@dataclass(frozen=True)
class InterventionConfig:
    """What is done to features while a checkpoint generates."""

    mode: Mode = "ablate"
    """ablate: to 0; mean: to its mean over such tokens of the checkpoint's own; clamp: to amount × the feature's
    typical activation; steer: amount × the typical activation is added; transplant: to what another checkpoint, which
    reads the same tokens, computes for it (--donor)."""
    amount: float = 1.0
    """For clamp and steer, in units of the feature's mean activation where it fires in responses; negative steers the
    other way."""
    tokens: Where = "predicting"
    """Where: predicting takes the prompt's last token, which the first token is drawn from, and the response; first
    takes the former alone, response the latter; all takes the whole prompt and the response. Special tokens of prompts
    are never edited, except the last token, which some chat templates end in."""
    n_random: int = 12
    """Sets of random features to compare with, matched on firing rate on such tokens and on magnitude. Each is two
    conditions (and as many samples): with 12 sets there are 28, with 5 sets 14. An effect of 4 standard deviations of
    random sets is found 9 times in 10 with 12 sets, 3 times in 4 with 5; with one set nothing can be."""
    backend: Backend = "huggingface"
    """Forward hooks on the Hugging Face model, or a TransformerBridge (eager attention, slower)."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Every condition draws with the same seed, so that problems and random numbers are paired."""

    def __post_init__(self) -> None:
        need_numbers(self)
        need_at_most(self, n_random=10_000)
        where = "InterventionConfig"
        for name, known in (("mode", get_args(Mode)), ("tokens", get_args(Where)), ("backend", get_args(Backend))):
            if getattr(self, name) not in known:
                raise TsaeError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}", where=where)
        if not isfinite(self.amount):
            raise TsaeError(f"amount={self.amount} is not finite", where=where)
        if self.mode == "clamp" and self.amount < 0:
            raise TsaeError(
                f"amount={self.amount} with mode clamp: activations are not negative",
                where=where,
                fix='Use mode "steer" to push below zero.',
            )
        if self.mode == "steer" and self.amount == 0:
            raise TsaeError("amount=0 with mode steer changes nothing", where=where)
        if self.mode == "transplant" and self.backend != "huggingface":
            raise TsaeError(
                f'mode="transplant" with backend={self.backend!r}: the other checkpoint reads along through hooks on '
                "the Hugging Face model",
                where=where,
                fix='Use backend="huggingface".',
            )
        if self.n_random < 1:
            raise TsaeError(
                f"n_random={self.n_random}: without random features an effect cannot be told from that of any edit",
                where=where,
                fix="Give at least 1.",
            )


@dataclass(frozen=True)
class CausalConfig:
    """How `tsae run --causal` tests the features that a run moved."""

    features: int = 8
    """Features of every run, tested together: those that it most clearly raised, or where it raised none, lowered."""
    problems: int = 64
    """Problems that are answered; all, if there are fewer."""
    samples: int = 2
    """Responses to a problem under every condition. A test has 2 · n_random + 6 conditions, a transplant three more."""
    n_random: int = 12
    """Sets of matched random features."""
    amount: float = 1.0
    """Of steering, in units of a feature's typical activation."""

    def __post_init__(self) -> None:
        need_numbers(self)
        need_at_most(self, samples=100_000, n_random=10_000)
        for name in ("features", "problems", "samples", "n_random"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="CausalConfig")


@dataclass(frozen=True)
class InsertionConfig:
    """How top tokens of features are inserted into other contexts."""

    n_tokens: int = 3
    """Top tokens of a feature that are inserted, by their share of its activation."""
    n_contexts: int = 64
    """Places a feature, each in another trajectory; in each a top token and its control are read."""
    min_problems: int = 5
    """Places in fewer problems than this say nothing."""
    batch_tokens: int = 4096
    """Tokens of one forward pass, padding included."""
    n_bootstrap: int = 1000
    """Draws of problems, for intervals."""
    confidence: float = 0.95
    """Of the intervals."""
    device: str = "cpu"
    """A torch device."""
    seed: int = 0
    """Of the halves of problems, the places and the tokens."""

    def __post_init__(self) -> None:
        need_numbers(self)
        need_at_most(self, n_bootstrap=10_000_000)
        for name in ("n_tokens", "n_contexts", "batch_tokens"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="InsertionConfig")
        if self.min_problems < 2 or self.n_bootstrap < 100:
            raise TsaeError(
                f"min_problems={self.min_problems} must be at least 2, and n_bootstrap={self.n_bootstrap} at least 100",
                where="InsertionConfig",
            )
