"""Which rows each step of the optimiser used."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Update:
    """One step of the optimiser."""

    step: int
    generation: int
    first: bool
    parts: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Plan:
    updates: list[Update]
    generations: list[np.ndarray]
    how: str
    notes: list[str] = field(default_factory=list)
