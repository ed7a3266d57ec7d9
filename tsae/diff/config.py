"""Config of a feature diff. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError

FalseDiscoveries = Literal["bh", "by"]


@dataclass(frozen=True)
class DiffConfig:
    """Which contrasts are drawn and how their uncertainty is estimated."""

    span: Literal["response", "prompt", "all"] = "response"
    """Tokens over which a trajectory's mean activation is taken; special tokens never count."""
    bands: tuple[str, ...] | None = None
    """Bands to split by; by default those of the rollouts, and none where the rollouts have none."""
    n_bootstrap: int = 1000
    """Bootstrap draws of problems, for intervals."""
    n_permutations: int = 10_000
    """Sign flips or label permutations, for p-values; no p-value is below 1 / (n_permutations + 1)."""
    confidence: float = 0.95
    """Of the intervals."""
    q: float = 0.05
    """False-discovery rate at which a feature counts as a discovery."""
    fdr: FalseDiscoveries = "bh"
    """q-values over the features of a contrast: Benjamini–Hochberg, or Benjamini–Yekutieli (any dependence)."""
    min_problems: int = 5
    """A contrast with fewer problems is refused; a feature active in fewer problems of a contrast is not tested."""
    min_fve: float = 0.5
    """A reader that the SAE reconstructs worse than this is flagged, and so is every shift of it."""
    seed: int = 0
    """Of the bootstrap and the permutations."""

    def __post_init__(self) -> None:
        if self.n_bootstrap < 100 or self.n_permutations < 100:
            raise TsaeError(
                f"n_bootstrap={self.n_bootstrap} and n_permutations={self.n_permutations} must be at least 100",
                where="DiffConfig",
            )
        if not 0 < self.confidence < 1 or not 0 < self.q < 1:
            raise TsaeError(f"confidence={self.confidence} and q={self.q} must lie between 0 and 1", where="DiffConfig")
        if self.min_problems < 2:
            raise TsaeError(f"min_problems={self.min_problems} must be at least 2", where="DiffConfig")
