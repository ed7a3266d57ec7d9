"""Effects with one value a problem, which is what `tsae.claims.judging.Part` takes.

A difference within problems has its own value in every problem. For a difference of two means over different problems,
such as medium − easy, or over problems that partly agree, the values are the jackknife's (Tukey 1958): with θ of all N
problems and θ₋ᵢ without problem i, problem i has N θ − (N − 1) θ₋ᵢ. Their mean is θ. With few problems on one side the
interval is a little too narrow: with 8 and 100 it covers 93.5 % instead of 95 %.

Where all problems of one side have one value, such as 0 of 8, their spread is not 0 but unknown: a further problem may
differ. That side is given the spread of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from tsae.base.statistics.intervals import FEWEST
from tsae.claims.evidence import Missing
from tsae.claims.judging import Part

UNIT = "problems"


def within(
    statement: str, after: pd.Series, before: pd.Series, add: str, *, margin: float = 0.0, equal: bool = False
) -> Part:
    """A part whose values are differences within the problems that both sides have.

    Args:
        statement: of the part.
        after: value of every problem, by problem_id; the larger one if the claim holds.
        before: the same.
        add: how to get more problems.
        margin: see `Part`.
        equal: see `Part`.

    Raises:
        Missing: where there are too few problems, or all have the same difference.
    """
    return part(statement, (after - before).dropna().to_numpy(dtype=float), add, margin=margin, equal=equal)


def between(statement: str, first: pd.Series, second: pd.Series, add: str, *, margin: float = 0.0) -> Part:
    """A part with the mean over some problems − the mean over others, of which some may be the same.

    Raises:
        Missing: where one side has too few problems, or both sides have one value alone.
    """
    first, second = first.dropna(), second.dropna()
    for side in (first, second):
        _enough(statement, len(side), add)
    if len(set(first)) == len(set(second)) == 1:
        raise Missing(f"problems that differ (“{statement}”: {_same(first)} and {_same(second)} in every one)", add)
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
    return Part(statement, tuple(map(float, values)), UNIT, margin)


def part(
    statement: str, values: np.ndarray, add: str, *, margin: float = 0.0, equal: bool = False, same: float | None = None
) -> Part:
    """A part with these values.

    Args:
        statement: of the part.
        values: (n_problems,).
        add: how to get more problems.
        margin: see `Part`.
        equal: see `Part`.
        same: a value that all problems may have.

    Raises:
        Missing: where there are too few of them, or all are the same.
    """
    _enough(statement, len(values), add)
    if (values == values[0]).all() and values[0] != same:
        raise Missing(f"problems that differ (“{statement}”: {_same(values)} in all {len(values)})", add)
    return Part(statement, tuple(map(float, values)), UNIT, margin, equal)


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
    return tuple(parts), "".join(f"Left out for lack of {reason.needs}. " for reason in left)


def _spread(constant: pd.Series, other: pd.Series) -> pd.Series:
    """Values with the mean of `constant` and the standard deviation of `other`."""
    sign = np.where(np.arange(len(constant)) % 2, -1.0, 1.0)
    sign -= sign.mean()
    return constant + sign / sign.std(ddof=1) * other.std(ddof=1)


def _enough(statement: str, n: int, add: str) -> None:
    if n < FEWEST:
        raise Missing(f"{FEWEST} problems or more for “{statement}” (there are {n})", add)


def _same(values: pd.Series | np.ndarray) -> str:
    return f"{float(np.asarray(values)[0]):.3g}"
