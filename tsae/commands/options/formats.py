"""`tsae rollouts formats`, which takes no options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Formats:
    """List the trainers whose logs are read, in which versions, what to switch on there, and what each log lacks."""
