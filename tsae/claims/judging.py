"""A verdict on a claim, from effects with one value a unit.

A claim has one part or several. A part is a directed effect: a value for every unit (training seeds, or the problems of
one run), positive as the claim says. It holds if its whole interval lies beyond the margin, it is refuted if the whole
interval lies short of it, and is undecided otherwise. A part that says that two things are equal holds if the whole
interval lies within ± margin. The interval is Student's t over the units: mean ± t · standard deviation / √n.

A difference within problems has its own value in every problem. For a difference of two means over different problems,
such as medium − easy, or over problems that partly agree, the values are the jackknife's (Tukey 1958): with θ of all N
problems and θ₋ᵢ without problem i, problem i has N θ − (N − 1) θ₋ᵢ. Their mean is θ. With few problems on one side the
interval is a little too narrow: with 8 and 100 it covers 93.5 % instead of 95 %.

Where all problems of one side have one value, such as 0 of 8, their spread is not 0 but unknown: a further problem may
differ. That side is given the spread of the other."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import pandas as pd

from tsae.base.statistics import FEWEST
from tsae.claims.evidence import Missing, need
from tsae.errors import refuse


@dataclass(frozen=True)
class Claim:
    """One thing that the literature says."""

    key: str
    """A letter."""
    title: str
    """A few words."""
    sentence: str
    """The claim."""
    source: str
    """An arXiv id, or how it is known."""
    needs: str = ""
    """What a single run lacks for a test; empty where it can test the claim."""
    add: str = ""
    """How to add that."""


STUDIED = "abcdefghijklmnopqrstuv"
"""Letters of the claims that docs/claims.md tests on the testbed."""

CLAIMS: dict[str, Claim] = {
    key: Claim(key, **claim)
    for key, claim in tomllib.loads(files("tsae.claims").joinpath("literature.toml").read_text("utf-8")).items()
}

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
        n, n_finite = len(self.values), int(np.isfinite(self.values).sum())
        few, what = n < (1 if self.unit == REPLAYED else 2), f"{n} values, {n_finite} of them finite: no interval"
        refuse(self.statement, (few or n_finite < n, what, "Give a finite effect for two units or more."))

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

    def record(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        ends = dict(zip(("mean", "low", "high"), self.interval, strict=True))
        kept = {name: getattr(self, name) for name in ("unit", "margin", "equal", "holds")}
        return {"statement": self.statement, **ends, "n": len(self.values), **kept}


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
            "parts": [part.record() for part in self.parts],
            "needs": self.needs,
            "add": self.add,
            "caveat": self.caveat,
        }


UNIT = "problems"


def within(statement: str, after: pd.Series, before: pd.Series, add: str, *, margin: float = 0.0) -> Part:
    """A part whose values are differences within the problems that both sides have.

    Args:
        statement: of the part.
        after: value of every problem, by problem_id; the larger one if the claim holds.
        before: the same.
        add: how to get more problems.
        margin: see `Part`.

    Raises:
        Missing: where there are too few problems, or all have the same difference.
    """
    return part(statement, (after - before).dropna().to_numpy(dtype=float), add, margin=margin)


def between(statement: str, first: pd.Series, second: pd.Series, add: str) -> Part:
    """A part with the mean over some problems − the mean over others, of which some may be the same.

    Raises:
        Missing: where one side has too few problems, or both sides have one value alone.
    """
    first, second = first.dropna(), second.dropna()
    for side in (first, second):
        _enough(statement, len(side), add)
    differ = len(set(first)) > 1 or len(set(second)) > 1
    need(differ, f"problems that differ (“{statement}”: {_same(first)} and {_same(second)} in every one)", add)
    whole, ids = float(first.mean() - second.mean()), first.index.union(second.index)
    if len(set(first)) == 1:
        first = _spread(first, second)
    elif len(set(second)) == 1:
        second = _spread(second, first)
    without = [
        (side.sum() - side.reindex(ids).fillna(0)) / (len(side) - ids.isin(side.index)) for side in (first, second)
    ]
    n = len(ids)
    values = n * whole - (n - 1) * (without[0] - without[1]).to_numpy()
    return Part(statement, tuple(map(float, values)), UNIT, 0.0)


def part(statement: str, values: np.ndarray, add: str, *, margin: float = 0.0, same: float | None = None) -> Part:
    """A part with these values.

    Args:
        statement: of the part.
        values: (n_problems,).
        add: how to get more problems.
        margin: see `Part`.
        same: a value that all problems may have.

    Raises:
        Missing: where there are too few of them, or all are the same.
    """
    _enough(statement, len(values), add)
    differ = values[0] == same or not (values == values[0]).all()
    need(differ, f"problems that differ (“{statement}”: {_same(values)} in all {len(values)})", add)
    return Part(statement, tuple(map(float, values)), UNIT, margin)


def those_that_can(makers: Sequence[Callable[[], Part]]) -> tuple[tuple[Part, ...], str]:
    """The parts that can be made, and a sentence on the others.

    Raises:
        Missing: where none can.
    """
    parts, left = [], []
    for make in makers:
        try:
            parts.append(make())
        except Missing as reason:
            left.append(reason)
    if not parts:
        raise left[0]
    return tuple(parts), left_out(left)


def left_out(reasons: Sequence[Missing]) -> str:
    """A sentence on every part that could not be made."""
    return "".join(f"Left out for lack of {reason.needs}. " for reason in reasons)


def _spread(constant: pd.Series, other: pd.Series) -> pd.Series:
    """Values with the mean of `constant` and the standard deviation of `other`."""
    sign = np.where(np.arange(len(constant)) % 2, -1.0, 1.0)
    sign -= sign.mean()
    return constant + sign / sign.std(ddof=1) * other.std(ddof=1)


def _enough(statement: str, n: int, add: str) -> None:
    need(n >= FEWEST, f"{FEWEST} problems or more for “{statement}” (there are {n})", add)


def _same(values: pd.Series | np.ndarray) -> str:
    return f"{float(np.asarray(values)[0]):.3g}"
