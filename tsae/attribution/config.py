"""Options of attribution. Imports nothing heavy: the command line builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tsae.base.ranges import need_at_most, need_numbers
from tsae.errors import TsaeError

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


@dataclass(frozen=True)
class AttributionConfig:
    """What is attributed, and how much is computed for it."""

    targets: tuple[Subject, ...] = get_args(Subject)
    """What is attributed: features (needs an SAE); outcome: log-likelihood of right against wrong responses;
    behaviours: the same of responses that show one, such as direct answers, against those that do not."""
    features: tuple[int, ...] = ()
    """Features by number; by default those that moved most."""
    n_features: int = 8
    """How many features, where none is named."""
    n_fixed: int = 128
    """Trajectories of the base over which features and likelihoods are averaged; every checkpoint reads the same."""
    steps: tuple[int, int] | None = None
    """Only the stretch between two checkpoints, given by their steps; by default the whole run."""
    groups: tuple[Kind, ...] = get_args(Kind)
    """Kinds of samples that are left out and kept alone, by simulation."""
    subsets: int = 120
    """Random halves of the problems that are simulated to find the effect of each problem; 0 leaves this out."""
    validate: int = 0
    """Trainings that are really replayed on random halves of the problems, to say how well simulation predicts them; 8
    or more say something. Each takes about half as long as the run's own passes over its log."""
    singles: int = 3
    """Samples with the largest shares, for and against each target, that are left out one by one, by simulation."""
    again: Literal["on-policy", "replayed"] = "on-policy"
    """Whether a run without some samples is imagined to sample its responses anew, or to replay those of the log."""
    every: int = 1
    """Differentiate targets at every n-th checkpoint; what is between is interpolated."""
    max_samples: int = 1_000_000
    """Of a larger log, prompt groups are drawn at random within every step."""
    budget_gb: float = 8.0
    """Disk for the samples' gradients; they are kept in 16 bits where 32 do not fit."""
    batch_tokens: int = 4096
    """Tokens of a forward pass, with padding."""
    seed: int = 0
    """Of the random halves, and of the choice of trajectories."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    flag_remainder: float = 0.1
    """Share of a change that its samples may leave unexplained before it is flagged."""

    def __post_init__(self) -> None:
        need_numbers(self)
        need_at_most(self, subsets=100_000, validate=100_000, singles=100_000)
        least = {"n_features": 1, "n_fixed": 2, "subsets": 0, "validate": 0, "singles": 0, "every": 1, "max_samples": 2}
        for name, smallest in {**least, "batch_tokens": 1}.items():
            if getattr(self, name) < smallest:
                raise TsaeError(f"is {getattr(self, name)}, expected at least {smallest}", where=name)
        if len(set(self.features)) < len(self.features) or min(self.features, default=0) < 0:
            raise TsaeError(f"features={self.features} are negative, or repeated", where="AttributionConfig")
        if self.validate and self.validate < 3:
            raise TsaeError(f"is {self.validate}, expected 0, or 3 and more to rank", where="validate")
        if self.budget_gb <= 0 or self.flag_remainder <= 0:
            raise TsaeError("budget_gb and flag_remainder must be positive", where="AttributionConfig")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise TsaeError(
                f"steps={self.steps} is no stretch of a run",
                where="AttributionConfig",
                fix="Give the steps of two checkpoints, the earlier first.",
            )
        for name, known in (("targets", get_args(Subject)), ("groups", get_args(Kind))):
            unknown = [one for one in getattr(self, name) if one not in known]
            if unknown:
                raise TsaeError(f"{unknown[0]!r} is none of {', '.join(known)}", where=f"AttributionConfig.{name}")
