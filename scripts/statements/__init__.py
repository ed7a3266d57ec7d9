"""What a report can state, and worlds whose truth is known to check it in: a module a kind of statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tsae.diff.config import DiffConfig

Draw = Callable[[int, DiffConfig], tuple[float, float]]
"""(seed, config) -> (false statements / statements, share found of what is planted), NaN where there can be none."""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    statement: str
    where: str
    """What is planted, or that nothing is."""
    draw: Draw
    promised: float = 0.05
    """False rate that is promised."""
