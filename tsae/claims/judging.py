"""A verdict on a claim, from effects with one value a unit.

A claim has one part or several. A part is a directed effect: a value for every unit (training seeds, or the problems of
one run), positive as the claim says. It holds if its whole interval lies beyond the margin, it is refuted if the whole
interval lies short of it, and is undecided otherwise. A part that says that two things are equal holds if the whole
interval lies within ± margin.

The interval is Student's t over the units: mean ± t · standard deviation / √n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tsae.claims.literature import Claim
from tsae.errors import TsaeError

Verdict = Literal["reproduced", "partly", "not reproduced", "undecided", "cannot be tested"]

CONFIDENCE = 0.95
"""Of the intervals."""
REPLAYED = "replayed, one run"
"""Unit of a part with the one value of a replay: it has no interval, and decides nothing."""


@dataclass(frozen=True)
class Part:
    """One thing that a claim says, as a directed effect."""

    statement: str
    """What must be true, in a sentence."""
    values: Sequence[float]
    """Effect in every unit; positive as the claim says."""
    unit: str
    """What the values are one each of, in the plural: training seeds, problems; or REPLAYED."""
    margin: float = 0.0
    """Smallest effect that counts; of an equality, the largest that does not."""
    equal: bool = False
    """The claim says that the effect is about 0."""

    def __post_init__(self) -> None:
        if len(self.values) < (1 if self.unit == REPLAYED else 2) or not np.isfinite(self.values).all():
            raise TsaeError(
                f"{len(self.values)} values, {int(np.isfinite(self.values).sum())} of them finite: no interval",
                where=self.statement,
                fix="Give a finite effect for two units or more.",
            )

    @cached_property
    def interval(self) -> tuple[float, float, float]:
        """Mean, and its 95 % interval over the units; of one replay, its value three times."""
        from scipy.stats import t

        if self.unit == REPLAYED:
            return (float(self.values[0]),) * 3
        array = np.asarray(self.values, dtype=np.float64)
        mean, n = float(array.mean()), len(array)
        half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * float(array.std(ddof=1)) / n**0.5
        return mean, mean - half, mean + half

    @property
    def holds(self) -> bool | None:
        """True as claimed, False if refuted, None if the interval does not decide."""
        _, low, high = self.interval
        if self.unit == REPLAYED:
            return None
        if self.equal:
            if -self.margin <= low and high <= self.margin:
                return True
            return False if low > self.margin or high < -self.margin else None
        if low > self.margin:
            return True
        return False if high < self.margin else None


@dataclass(frozen=True)
class Judgement:
    """What was found of one claim."""

    claim: Claim
    parts: tuple[Part, ...] = ()
    """Empty where the claim cannot be tested."""
    needs: str = ""
    """What is missing for a test."""
    add: str = ""
    """How to add it."""
    caveat: str = ""
    """What a reader has to know beside the verdict."""
    whole: bool = True
    """False where a part of the claim was not tested: it is reproduced partly at best."""

    @property
    def verdict(self) -> Verdict:
        """Reproduced if all parts were tested and hold, partly if only some hold, not reproduced if none does.

        This is the rule of the study of docs/claims.md, fixed before its runs; it does not say undecided.
        """
        if not self.parts:
            return "cannot be tested"
        held = [part.holds is True for part in self.parts]
        return "reproduced" if all(held) and self.whole else "partly" if any(held) else "not reproduced"

    @property
    def finer(self) -> Verdict:
        """The verdict, or "undecided" if no part holds and none is refuted."""
        undecided = self.verdict == "not reproduced" and all(part.holds is None for part in self.parts)
        return "undecided" if undecided else self.verdict

    def record(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return {
            "claim": self.claim.key,
            "title": self.claim.title,
            "verdict": self.finer,
            "parts": [
                {
                    "statement": part.statement,
                    "mean": part.interval[0],
                    "low": part.interval[1],
                    "high": part.interval[2],
                    "n": len(part.values),
                    "unit": part.unit,
                    "margin": part.margin,
                    "equal": part.equal,
                    "holds": part.holds,
                }
                for part in self.parts
            ],
            "needs": self.needs,
            "add": self.add,
            "caveat": self.caveat,
        }


def untestable(claim: Claim, needs: str, add: str) -> Judgement:
    """The judgement on a claim whose evidence is missing."""
    return Judgement(claim, needs=needs, add=add)
