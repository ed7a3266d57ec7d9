"""Options of attribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError


@dataclass(frozen=True)
class AttributionConfig:
    """What is attributed, and how much is computed for it."""

    features: tuple[int, ...] = ()
    """Features by number; by default those that moved most."""
    n_features: int = 8
    """How many features, where none is named."""
    n_fixed: int = 128
    """Trajectories of the base over which features and likelihoods are averaged; every checkpoint reads the same."""
    groups: tuple[Literal["band", "outcome", "band and outcome", "lone success", "third of the run"], ...] = (
        "band",
        "outcome",
        "band and outcome",
        "lone success",
        "third of the run",
    )
    """Kinds of samples that are left out and kept alone, by simulation."""
    subsets: int = 120
    """Random halves of the problems that are simulated to find the effect of each problem; 0 leaves this out."""
    every: int = 1
    """Differentiate targets at every n-th checkpoint; what is between is interpolated."""
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
        least = {"n_features": 1, "n_fixed": 2, "subsets": 0, "every": 1, "batch_tokens": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise TsaeError(f"is {getattr(self, name)}, expected at least {smallest}", where=name)
        if self.budget_gb <= 0 or self.flag_remainder <= 0:
            raise TsaeError("budget_gb and flag_remainder must be positive", where="AttributionConfig")
