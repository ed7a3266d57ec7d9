"""Step confounding: whether the bands of a log are really its training steps.

In a trainer's log, most problems come from the policy of one step. Where the run learns, problems of late steps are
solved more often, so bands from such a log say when a problem was asked, not how hard it is for the base. The measure
is the share of the differences between the problems' pass rates that their steps explain: the adjusted R² of pass rate
on step, with the problems in order of step cut into at most 10 groups. Dealing the problems to the steps at random
gives its p-value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tsae.rollouts.schema import BANDS, problem_bands

_GROUPS, _PROBLEMS_A_GROUP = 10, 5
_SHARE, _LEVEL, _DRAWS = 0.1, 0.05, 2000
"""Bands are refused where steps explain at least this share of the pass rates, with p at most this level."""


@dataclass(frozen=True)
class Confounding:
    """Band against step, over the problems of a log."""

    table: pd.DataFrame
    """Numbers of problems: one row a band, one column a group of steps."""
    n_problems: int
    n_steps: int
    share: float
    """Adjusted R² of pass rate on step; NaN where either does not vary."""
    p: float
    late: str
    """Which steps the problems of each band come from, in words."""

    @property
    def told_apart(self) -> bool:
        """Whether a band is more than a step."""
        return not (self.share >= _SHARE and self.p <= _LEVEL)

    def __str__(self) -> str:
        if self.n_steps < 2:
            return "the log is of one training step, so that bands are not steps, and shows nothing of the run's course"
        if np.isnan(self.share):
            return "all problems have the same pass rate"
        p = f"p < {1 / _DRAWS:g}" if self.p <= 1 / _DRAWS else f"p {self.p:.2g}"
        return (
            f"the training step explains {max(self.share, 0):.0%} of the differences of pass rate between "
            f"{self.n_problems:,} problems ({p})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        table = {band: {str(step): int(n) for step, n in row.items()} for band, row in self.table.iterrows()}
        share, p = (None if np.isnan(value) else float(value) for value in (self.share, self.p))
        return {"table": table, "statistic": share, "p": p, "n_problems": self.n_problems, "sentence": str(self)}


def confounding(frame: pd.DataFrame, seed: int = 0) -> Confounding:
    """Measure how far the training step explains the problems' pass rates.

    Args:
        frame: trajectories with the columns problem_id, policy, outcome and band; and step, if it is known; otherwise
            the policies' order of appearance replaces it. Unknown outcomes are left out.
        seed: of the draws.
    """
    frame = frame[frame.outcome != "unknown"]
    known = "step" in frame.columns and bool(frame["step"].notna().all())
    step = frame["step"].astype(float) if known else pd.Series(pd.factorize(frame.policy)[0] + 1.0, index=frame.index)
    problem = frame.problem_id
    rates = (frame.outcome == "success").groupby(problem, sort=False).mean()
    steps = step.groupby(problem, sort=False).mean().loc[rates.index]
    band = problem_bands(frame).loc[rates.index]
    group, labels = _groups(steps.to_numpy())
    table = pd.crosstab(band, pd.Series(group, index=band.index)).reindex(
        index=list(BANDS), columns=range(len(labels)), fill_value=0
    )
    table.columns = pd.Index(labels, name="step" if known else "policy, in order of appearance")
    share, p = _explained(rates.to_numpy(dtype=float), group, seed)
    return Confounding(table, len(rates), int(step.nunique()), share, p, _late(steps, band))


def _groups(step: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """(n,) group of every problem, and the groups' names; problems of one step are in one group."""
    least = max(_PROBLEMS_A_GROUP, -(-len(step) // _GROUPS))
    values, counts = np.unique(step, return_counts=True)
    ends: list[int] = []
    size = 0
    for place, n in enumerate(counts):
        size += n
        if size >= least:
            ends.append(place)
            size = 0
    # Leftover problems go to the last group.
    ends = [*ends[:-1], len(values) - 1] if ends else [len(values) - 1]
    group = np.searchsorted(values[ends], step)
    starts = [0, *(end + 1 for end in ends[:-1])]
    names = [f"{values[a]:g}" if a == b else f"{values[a]:g}-{values[b]:g}" for a, b in zip(starts, ends, strict=True)]
    return group, names


def _explained(rate: np.ndarray, group: np.ndarray, seed: int) -> tuple[float, float]:
    """Adjusted R² of the rates on the groups, and its p-value over permuted problems."""
    n, k = len(rate), int(group.max()) + 1
    centred = rate - rate.mean()
    total = float((centred**2).sum())
    if k < 2 or n <= k or total <= 1e-12:
        return np.nan, np.nan
    one_hot = np.eye(k)[group] / np.sqrt(np.bincount(group, minlength=k))
    explained = float(((centred @ one_hot) ** 2).sum())
    rng = np.random.default_rng([seed, 8])
    drawn = np.array([((rng.permutation(centred) @ one_hot) ** 2).sum() for _ in range(_DRAWS)])
    p = (1 + int((drawn >= explained * (1 - 1e-12)).sum())) / (1 + _DRAWS)
    return 1 - (1 - explained / total) * (n - 1) / (n - k), p


def _late(step: pd.Series, band: pd.Series) -> str:
    """The median step of each band's problems."""
    parts = [f"{name} {step[band == name].median():g}" for name in BANDS if (band == name).any()]
    return f"median step of the problems: {', '.join(parts)}"
