"""Config of a causal test. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from tsae.base.validation import Confidence, Count, Daily, Draws, Seed, config
from tsae.errors import refuse
from tsae.rollouts.config import SamplingConfig

Where = Literal["predicting", "first", "response", "all"]
Backend = Literal["huggingface", "transformer_lens"]
Mode = Literal["ablate", "mean", "clamp", "steer", "transplant"]


@config
class InterventionConfig:
    """What is done to features while a checkpoint generates."""

    mode: Daily[Mode] = "ablate"
    """ablate sets features to 0. mean sets them to their mean over such tokens of the checkpoint's own. clamp sets them
    to amount × their typical activation. steer adds amount × their typical activation. transplant sets them to what
    another checkpoint (--donor), which reads the same tokens, computes for them."""
    amount: Daily[float] = 1.0
    """For clamp and steer, in units of the feature's mean activation where it fires in responses; negative steers the
    other way."""
    tokens: Where = "predicting"
    """Where features are edited. predicting: the prompt's last token, from which the first token is drawn, and the
    response. first: that token alone. response: the response alone. all: the whole prompt and the response. Special
    tokens of prompts are never edited, except the last token, which some chat templates end in."""
    n_random: Daily[Annotated[int, Field(ge=1, le=10_000)]] = 12
    """Sets of random features to compare with, matched on firing rate on such tokens and on magnitude. Each set is two
    conditions: with 12 sets there are 28, with 5 sets 14. An effect of 4 standard deviations of random sets is found 9
    times in 10 with 12 sets, and 3 times in 4 with 5. With one set it is never found."""
    backend: Backend = "huggingface"
    """Forward hooks on the Hugging Face model, or a TransformerBridge (eager attention, slower)."""
    confidence: Confidence = 0.95
    """Confidence level of the intervals."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Every condition draws with the same seed, so that problems and random numbers are paired."""

    def __post_init__(self) -> None:
        bridged = (
            f'mode="transplant" with backend={self.backend!r}: the other checkpoint reads along through hooks on the '
            "Hugging Face model"
        )
        negative = f"amount={self.amount} with mode clamp: activations are not negative"
        refuse(
            "InterventionConfig",
            (self.mode == "clamp" and self.amount < 0, negative, 'Use mode "steer" to push below zero.'),
            (self.mode == "steer" and self.amount == 0, "amount=0 with mode steer changes nothing", None),
            (self.mode == "transplant" and self.backend != "huggingface", bridged, 'Use backend="huggingface".'),
        )


@config
class CausalConfig:
    """How `tsae run --causal` tests the features that a run moved."""

    features: Count = 8
    """Number of features of every run, tested together: those that it most clearly raised, or lowered if it raised
    none."""
    problems: Count = 64
    """Problems to answer; all, if there are fewer."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 2
    """Responses to a problem under every condition. A test has 2 · n_random + 6 conditions, a transplant three more."""
    n_random: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Sets of matched random features."""
    amount: float = 1.0
    """Strength of steering, in units of a feature's typical activation."""


@config
class InsertionConfig:
    """How top tokens of features are inserted into other contexts."""

    n_tokens: Count = 3
    """Top tokens of a feature that are inserted, by their share of its activation."""
    n_contexts: Count = 64
    """Places a feature, each in another trajectory; in each a top token and its control are read."""
    min_problems: Annotated[int, Field(ge=2)] = 5
    """Places in fewer problems than this say nothing."""
    batch_tokens: Count = 4096
    """Tokens of one forward pass, padding included."""
    n_bootstrap: Draws = 1000
    """Draws of problems, for intervals."""
    confidence: Confidence = 0.95
    """Confidence level of the intervals."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    seed: Seed = 0
    """Seed of the halves of problems, the places and the tokens."""
