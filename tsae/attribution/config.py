"""Options of attribution and of influence. Imports nothing heavy: the command line builds its options from it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from tsae.base.validation import Count, Daily, Positive, Seed, Size, config
from tsae.errors import refuse

Kind = Literal[
    "band",
    "outcome",
    "band and outcome",
    "lone success",
    "third of the run",
    "band and outcome and third",
    "behaviour",
    "reward",
]
"""Kinds of samples; see `tsae.attribution.sample_kinds`."""

Subject = Literal["features", "outcome", "behaviours"]


@config
class AttributionConfig:
    """What is attributed, and how much is computed for it."""

    targets: Daily[tuple[Subject, ...]] = get_args(Subject)
    """What is attributed. features: by the SAE. outcome: log-likelihood of right against wrong responses, by band.
    behaviours: log-likelihood of responses that show one, such as direct answers, against the others."""
    features: tuple[Size, ...] = ()
    """Features by number; by default those that moved most."""
    n_features: Daily[Count] = 8
    """Number of features, if none is named."""
    n_fixed: Annotated[int, Field(ge=2)] = 128
    """Responses over which features and likelihoods are averaged; every checkpoint reads the same."""
    steps: Daily[tuple[Size, Count] | None] = None
    """Only the steps after one checkpoint up to another; by default the whole run. A stretch that does not begin at the
    run's first step needs optimizer.pt beside that checkpoint."""
    groups: tuple[Kind, ...] = get_args(Kind)
    """Kinds of samples whose shares are added up. Bands are really replayed, without them and with one alone. The other
    kinds are simulated, except the finest."""
    effects: bool = True
    """Replay the run without each band and with it alone (three times the replay); simulate it without other kinds."""
    again: Literal["on-policy", "replayed"] = "on-policy"
    """Whether a simulated training is imagined to sample its responses anew, or to replay those of the log."""
    shown: Annotated[int, Field(ge=0, le=1000)] = 10
    """Samples to read, with the share of every token."""
    tokens_of: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Samples, in prompt groups at random, whose tokens say where in the text the signal sits."""
    points: Count = 20
    """Weights along the path at which targets are differentiated. Between them, derivatives are interpolated."""
    budget_gb: Positive = 4.0
    """Disk for the path of the replay. If the path is larger, every n-th state is kept, and the others are computed
    again."""
    memory_gb: Positive = 8.0
    """Memory for directions and for simulated trainings, beside the model."""
    batch_tokens: Count = 4096
    """Tokens of a forward pass, with padding."""
    seed: Seed = 0
    """Seed of the choice of responses and samples."""
    device: Daily[str] = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    flag_remainder: Positive = 0.1
    """Share of a change that its samples may leave unexplained before it is flagged."""

    def __post_init__(self) -> None:
        refuse(
            "AttributionConfig",
            (len(set(self.features)) < len(self.features), f"features={self.features} has a feature twice", None),
            (
                self.steps is not None and self.steps[0] >= self.steps[1],
                f"steps={self.steps} is not a stretch of a run",
                "Give the steps of two checkpoints, the earlier first.",
            ),
        )


@config
class InfluenceConfig:
    """The policy-gradient step whose first order is taken."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """How the trainer normalises: over all response tokens of the batch (dapo, TRL's default), over every response's
    own tokens (grpo), or by max_completion_length (dr_grpo)."""
    max_completion_length: Count | None = None
    """The trainer's limit in tokens, by which dr_grpo divides; for dr_grpo alone."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Temperature of the trainer's sampling, by which it divides logits."""
    batch_tokens: Count = 4096
    """Tokens per forward pass, padding included."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    model_dtype: Literal["auto", "float32", "float64"] = "float32"
    """Precision of the weights and of the differentiation; auto keeps that of the file."""

    def __post_init__(self) -> None:
        what = f"loss_type={self.loss_type} and max_completion_length={self.max_completion_length} do not go together"
        wrong = (self.loss_type == "dr_grpo") != (self.max_completion_length is not None)
        refuse("InfluenceConfig", (wrong, what, "Give max_completion_length for dr_grpo, and only there."))
