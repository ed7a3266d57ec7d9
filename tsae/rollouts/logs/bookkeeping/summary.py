"""Summary: what an import read, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tsae.rollouts.logs.checks.check import Check

_CELLS = (14, 10, 9, 8, 13, 13, 20)


@dataclass(frozen=True)
class Summary:
    """What an import read."""

    format: str
    n_files: int
    table: pd.DataFrame
    """One row for each policy and step: policy, step, trajectories, problems, groups (a problem in that step),
    no_variance (groups of two or more with equal rewards), success_rate (of known outcomes), retokenised (responses
    whose ids were made from text), not_round_tripping (responses whose ids do not decode to the logged text)."""
    total: dict[str, float]
    """The same over the whole log."""
    skipped: dict[str, int]
    """Trajectories left out, by kind."""
    notes: tuple[str, ...]
    """What was assumed."""
    odd: tuple[str, ...] = ()
    """Those of the notes that are about padding, problem ids and copies: what most logs do not have."""
    second_look: tuple[Check, ...] = ()
    """Comparisons of what the log says twice."""

    def as_dict(self) -> dict[str, object]:
        """What goes into the table's info."""
        return {
            "format": self.format,
            "files": self.n_files,
            "skipped": self.skipped,
            "notes": list(self.notes),
            "second_look": {check.name: check.as_dict() for check in self.second_look},
        }

    def __str__(self) -> str:
        steps = self.table.step.dropna()
        span = f", {steps.nunique()} steps from {steps.min()} to {steps.max()}" if steps.nunique() > 1 else ""
        lines = [f"{self.format}: {self.n_files} file{'s' * (self.n_files != 1)}{span}"]
        width = max(8, *(len(policy) for policy in self.table.policy))
        names = ("trajectories", "problems", "success", "groups", "no variance", "retokenised", "not round-tripping")
        head = "".join(f"{name:>{cell}}" for name, cell in zip(names, _CELLS, strict=True))
        lines.append(f"  {'policy':<{width}}{'step':>8}{head}")
        # Names come from the log, and must not control the terminal.
        rows = [
            (_printable(row.policy), "–" if pd.isna(row.step) else str(row.step), row._asdict())
            for row in self.table.itertuples()
        ]
        if len(rows) > 24:
            rows = [*rows[:12], ("…", "", {}), *rows[-12:]]
        for policy, step, counts in (*rows, ("all", "", self.total)):
            lines.append(f"  {policy:<{width}}{step:>8}{_cells(counts)}".rstrip())
        for kind, n in sorted(self.skipped.items()):
            lines.append(f"left out: {n:,} {kind}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"second look at {check}" for check in self.second_look)])


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in name)


def _cells(counts: dict[str, float]) -> str:
    if not counts:
        return ""
    rate = "–" if np.isnan(counts["success_rate"]) else f"{counts['success_rate']:.3f}"
    names = ("trajectories", "problems", "groups", "no_variance", "retokenised", "not_round_tripping")
    shown = [f"{counts[name]:,}" for name in names]
    cells = (*shown[:2], rate, *shown[2:])
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _CELLS, strict=True))
