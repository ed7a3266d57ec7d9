"""Do the logged advantages follow from the logged rewards? Every group is compared with the formulas of trainers.

1. For every group of two or more, each of `FORMULAS` computes advantages from the rewards. They agree if they differ by
   at most 0.4 % of the largest, the precision of bfloat16. Batch-normalised ones are a line in reward and group mean
   that a whole step shares; it is fitted to steps with groups of different means. GDPO (Liu et
   al. 2026; normalize_then_sum in TRL) normalises every reward in its group, and their weighted sum over the step. The
   weights are equal, or fitted to steps with more kinds of responses than weights.
2. A problem that a step asks twice makes one group of two: equal parts of a group, in the order of the log, may each
   follow a formula.
3. Nearly all of these formulas give equal advantages for equal rewards, and larger ones for larger rewards, on a line
   (on a plane in several rewards).
   A group that follows no formula but such a line may lack members, which the log or the import left out: it cannot
   be compared. Neither can a single member, nor means over tokens with different advantages.
4. Any other group contradicts its rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_advantages

_TOLERANCE = 4e-3
_NO_ADVANTAGE = 1e-2
"""Rounding of equal rewards, divided by a deviation of nearly 0, is as large as this."""
_MOST_SPLITS = 6
_EPSILON = 1e-4  # TRL's

FORMULAS = (
    "(reward − mean) / standard deviation of n − 1",
    "(reward − mean) / standard deviation of n",
    "reward − mean",
    "reward − mean of the others",
    "(reward − mean of the others) / their standard deviation",
    "normalised over a step",
)
GDPO = "each reward normalised in its group, and their sum over a step (GDPO)"


@dataclass(frozen=True)
class Recomputed:
    """How the groups of a log compare."""

    follow: int
    """Groups that follow a formula."""
    contradict: int
    """Groups whose advantages no formula, and no line, gives."""
    unclear: int
    """Groups that cannot be compared."""
    formulas: dict[str, int] = field(default_factory=dict)
    """Groups that follow a formula, by formula, without those of equal rewards; the most frequent first."""
    constant: int = 0
    """Groups that follow a formula because all of their rewards are equal."""
    first: int | None = None
    """Row of the first trajectory of the first group that contradicts."""


def recompute(
    rewards: np.ndarray, advantages: np.ndarray, groups: np.ndarray, steps: np.ndarray, parts: np.ndarray | None = None
) -> Recomputed:
    """Compare logged advantages with what the rewards give.

    Args:
        rewards: (n,) that were trained on; NaN if unknown.
        advantages: (n,) as logged; NaN if unknown.
        groups: (n,) labels.
        steps: (n,) labels of steps; a group lies in one step.
        parts: (n, n_rewards) the rewards that make up the total, if there are several; NaN if unknown.
    """
    rows = np.flatnonzero(np.isfinite(rewards) & np.isfinite(advantages))
    told = np.unique(groups[np.isfinite(advantages)])
    if not len(rows):
        return Recomputed(0, 0, len(told))
    found = _Groups(rewards, advantages, groups, steps, rows)
    several = np.zeros((len(found.rows), 0)) if parts is None else parts[found.rows]
    decoupled = found.decoupled(several)
    by_formula = np.stack([*(found.within(expected) for expected in found.expected()), decoupled & ~found.constant])
    follow = by_formula.any(axis=0) | found.quiet | decoupled  # (n_groups,), of (n_formulas, n_groups)
    counts = {name: int(agrees.sum()) for name, agrees in zip((*FORMULAS, GDPO), by_formula, strict=True)}
    follow |= _follow_in_parts(found, ~follow & (found.size > 1))
    # A multiple of the usual size: several groups under one label.
    usual = int(np.bincount(found.size).argmax())
    mixed = (found.size > usual) & (found.size % usual == 0) & (usual > 1)
    follow &= found.size > 1
    wrong = ~follow & ~found.on_a_line() & ~mixed & (found.size > 1)
    wrong &= ~found.on_a_plane(several, wrong)
    first = found.rows[np.isin(found.group, np.flatnonzero(wrong))]
    return Recomputed(
        int(follow.sum()),
        int(wrong.sum()),
        len(told) - int(follow.sum()) - int(wrong.sum()),
        {name: n for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n},
        int((follow & found.constant).sum()),
        int(first.min()) if len(first) else None,
    )


class _Groups:
    """The rows that can be compared, ordered by group."""

    def __init__(
        self, rewards: np.ndarray, advantages: np.ndarray, groups: np.ndarray, steps: np.ndarray, rows: np.ndarray
    ) -> None:
        self.rows = rows[np.argsort(groups[rows], kind="stable")]
        self.reward, self.advantage = rewards[self.rows], advantages[self.rows]
        _, starts, self.group, self.size = np.unique(
            groups[self.rows], return_index=True, return_inverse=True, return_counts=True
        )
        self.starts = starts
        self.step = np.unique(steps[self.rows], return_inverse=True)[1]
        low, high = (extreme.reduceat(self.reward, starts) for extreme in (np.minimum, np.maximum))
        self.constant = low == high
        """(n_groups,) whether all rewards are equal."""
        self.largest = np.maximum.reduceat(np.abs(self.advantage), starts)
        self.quiet = self.constant & (self.largest <= _NO_ADVANTAGE)

    def within(self, expected: np.ndarray) -> np.ndarray:
        """(n_groups,) whether the advantages are the expected ones; never for groups of equal rewards."""
        off = np.maximum.reduceat(np.abs(self.advantage - expected), self.starts)
        return np.asarray(~self.constant & (off <= self._allowed(self.largest)))

    def on_a_line(self) -> np.ndarray:
        """(n_groups,) whether the advantages are a non-decreasing line in the rewards."""
        n = self.size
        mean = [np.add.reduceat(values, self.starts) / n for values in (self.reward, self.advantage)]
        reward, advantage = self.reward - mean[0][self.group], self.advantage - mean[1][self.group]
        reward[self.constant[self.group]] = 0
        along, square = (np.add.reduceat(reward * values, self.starts) for values in (advantage, reward))
        slope = np.divide(along, square, out=np.zeros(len(n)), where=square > 0)
        off = np.maximum.reduceat(np.abs(advantage - slope[self.group] * reward), self.starts)
        allowed = self._allowed(self.largest)
        return (slope >= 0) & (off <= allowed) | (self.largest <= allowed)

    def on_a_plane(self, parts: np.ndarray, which: np.ndarray) -> np.ndarray:
        """(n_groups,) whether the advantages of a group are linear in its (n, n_rewards) rewards."""
        found = np.zeros(len(self.size), dtype=bool)
        for group in np.flatnonzero(which) if parts.shape[1] > 1 else ():
            rows = slice(self.starts[group], self.starts[group] + self.size[group])
            off = np.abs(_fitted(np.nan_to_num(parts[rows]), self.advantage[rows]) - self.advantage[rows])
            found[group] = off.max() <= self._allowed(self.largest[group])
        return found

    def expected(self) -> list[np.ndarray]:
        """(n,) the advantages by each of `FORMULAS`, with the small ε that fits better."""
        reward, group = self.reward, self.group
        mean = (np.add.reduceat(reward, self.starts) / self.size)[group]
        found = []
        for ddof in (1, 0):
            found.append(self._closest([group_advantages(reward, group, ddof=ddof, epsilon=e) for e in (1e-4, 1e-6)]))
        found += [group_advantages(reward, group, kind) for kind in ("dr_grpo", "rloo")]
        found.append(self._closest([self._by_the_others(ddof) for ddof in (0, 1)]))
        found.append(self._closest([self._over_a_step(x) for x in (reward - mean, reward)]))
        return found

    def _by_the_others(self, ddof: int) -> np.ndarray:
        n = self.size[self.group]
        others = np.maximum(n - 1, 1)
        total, squares = (np.add.reduceat(v, self.starts)[self.group] for v in (self.reward, self.reward**2))
        mean = (total - self.reward) / others
        variance = np.maximum((squares - self.reward**2) / others - mean**2, 0) * others / np.maximum(others - ddof, 1)
        deviation = np.sqrt(np.where(variance < 1e-12, 0, variance))
        scale = np.where(deviation > 0, deviation + 1e-6, 1)
        return np.asarray((self.reward - mean) / scale)

    def _over_a_step(self, x: np.ndarray) -> np.ndarray:
        """The line in `x` that fits a step's advantages; NaN for steps whose groups are too similar to tell."""
        n = np.bincount(self.step)
        mean_x, mean_a = (np.bincount(self.step, values) / n for values in (x, self.advantage))
        dx, da = x - mean_x[self.step], self.advantage - mean_a[self.step]
        square = np.bincount(self.step, dx**2)
        slope = np.divide(np.bincount(self.step, dx * da), square, out=np.zeros(len(n)), where=square > 0)
        varied = np.flatnonzero(~self.constant)
        means = np.round(np.add.reduceat(self.reward, self.starts) / self.size, 6)[varied]
        kinds = np.unique(np.stack([self.step[self.starts[varied]], means]), axis=1)[0].astype(int)
        tells = (np.bincount(kinds, minlength=len(n)) > 1) & (slope > 0)
        return np.where(tells[self.step], mean_a[self.step] + slope[self.step] * dx, np.nan)

    def decoupled(self, parts: np.ndarray) -> np.ndarray:
        """(n_groups,) whether the advantages are those of GDPO, from (n, n_rewards) rewards."""
        scores, off = np.zeros(parts.shape), np.full((2, len(self.rows)), np.inf)
        for reward, score in zip(parts.T, scores.T, strict=True):
            if len(known := np.flatnonzero(np.isfinite(reward))):
                score[known] = group_advantages(reward[known], self.group[known])
        by_step = np.split(np.argsort(self.step, kind="stable"), np.cumsum(np.bincount(self.step))[:-1])
        for rows in by_step if parts.shape[1] > 1 else ():
            x, y = scores[rows], self.advantage[rows]
            total = x.sum(axis=1) - x.sum(axis=1).mean()
            scale = np.std(total, ddof=1) + _EPSILON if len(rows) > 1 else 1
            off[:, rows] = np.abs([total / scale - y, _fitted(x, y) - y])
        return np.asarray((np.maximum.reduceat(off, self.starts, axis=1) <= self._allowed(self.largest)).any(axis=0))

    def _closest(self, candidates: Sequence[np.ndarray]) -> np.ndarray:
        """For each group, the candidate that is closest to its advantages."""
        off = np.stack([np.maximum.reduceat(np.abs(self.advantage - c), self.starts) for c in candidates])
        best = np.where(np.isnan(off), np.inf, off).argmin(axis=0)[self.group]
        return np.choose(best, list(candidates))

    def _allowed(self, largest: np.ndarray) -> np.ndarray:
        return np.asarray(_TOLERANCE * largest + 1e-5)


def _fitted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(n,) the linear function of (n, k) `x` that is closest to `y`; NaN where any y would be one."""
    x = np.c_[x, np.ones(len(x))]
    if len(np.unique(np.round(x, 6), axis=0)) <= x.shape[1] + 1:
        return np.full(len(y), np.nan)
    return np.asarray(x @ np.linalg.lstsq(x, y, rcond=None)[0])


def _follow_in_parts(found: _Groups, which: np.ndarray) -> np.ndarray:
    """(n_groups,) whether a group consists of equal parts, each of which follows a formula."""
    follow = np.zeros(len(found.size), dtype=bool)
    place = np.arange(len(found.group)) - found.starts[found.group]
    sizes = np.unique(found.size[which])
    parts = sorted({d for size in sizes for d in range(2, size // 2 + 1) if size % d == 0}, reverse=True)
    for length in parts[:_MOST_SPLITS]:
        tried = which & ~follow & (found.size % length == 0) & (found.size > length)
        rows = np.flatnonzero(tried[found.group])
        if not len(rows):
            continue
        labels = np.full(len(found.group), -1)
        labels[rows] = found.group[rows] * (int(found.size.max()) + 1) + place[rows] // length
        part = _Groups(found.reward, found.advantage, labels, found.step, rows)
        # The last formula, a line for a whole step, says nothing about parts of one group.
        agrees = np.stack([part.within(expected) for expected in part.expected()[:-1]]).any(axis=0) | part.quiet
        # A part with equal rewards says little: some other part has to follow by its numbers.
        whole = found.group[part.rows[part.starts]]
        good, numbers = (np.bincount(whole, votes, len(follow)) for votes in (agrees, agrees & ~part.constant))
        follow |= tried & (good == found.size // length) & (numbers > 0)
    return follow


def check_sum(
    groups: Mapping[str, Sequence[tuple[float | None, ...]]], rewards: Sequence[str], where: str | Path
) -> None:
    """Check that logged advantages can follow from the sum of several reward columns, or from each of them (GDPO).

    Args:
        groups: (advantage, sum of the rewards, reward, …) of the trajectories of a step, by group.
        rewards: names of the columns.
        where: file and line.

    Raises:
        TsaeError: if they do not in some group: a column is not a reward, or has a weight.
    """
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
    rows = np.array([row for group in groups.values() for row in group], dtype=float).reshape(-1, 2 + len(rewards))
    if recompute(rows[:, 1], rows[:, 0], labels, np.zeros(len(labels)), rows[:, 2:]).contradict:
        raise TsaeError(
            f"the logged advantages do not follow from the sum of {', '.join(rewards)}: not all of them are rewards, "
            "or they have weights, which the log does not hold",
            where=where,
            fix="Name the columns that are rewards, to be added up with weight 1 (--rewards).",
        )
