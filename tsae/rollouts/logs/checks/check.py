"""Check: the result of one comparison of what a log says twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """What one comparison found."""

    name: str
    unit: str
    """What is counted."""
    compared: int
    differ: int
    not_compared: int = 0
    example: str | None = None
    """File and line of the first difference."""
    disagrees: bool = False
    """Whether that contradicts the log; verifiers may differ on single answers without doing so."""
    note: str = ""
    """How it was compared, what follows, or why nothing was."""

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.name}: not compared ({self.note})"
        verb = "disagree" if self.disagrees or not self.differ else "differ"
        text = f"{self.name}: {self.compared:,} {self.unit} compared, {self.differ:,} {verb}"
        text += f" (first: {self.example})" if self.example else ""
        text += f", {self.not_compared:,} cannot be compared" if self.not_compared else ""
        return text + (f"; {self.note}" if self.note else "")

    def as_dict(self) -> dict[str, Any]:
        """What goes into the table's info and into run.json."""
        return {
            "unit": self.unit,
            "compared": self.compared,
            "differ": self.differ,
            "share": self.differ / self.compared if self.compared else None,
            "not_compared": self.not_compared,
            "disagrees": self.disagrees,
            "example": self.example,
            "line": str(self),
        }
