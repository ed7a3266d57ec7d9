"""Band migration: how problems move between bands along a run, and how much of that is chance.

With eight responses to a problem its measured pass rate jumps, so problems change bands even if nothing changed. The
null hypothesis: both checkpoints solve a problem equally often. Then their outcomes could have come in any order, and
dealing the outcomes of every problem anew to both sides shows how many changes chance makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from tsae.checkpoints.series import CheckpointSeries
from tsae.rollouts.config import BandCutoffs
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_COLUMNS = [
    "start", "end", "from_band", "to_band", "n", "n_problems", "share", "expected", "null_low", "null_high", "p",
]  # fmt: skip

_DEALT = 2**20
"""Problems of all draws that are dealt at once: 270 MB at four times as many."""


def paths(rollouts: Rollouts, series: CheckpointSeries | None = None) -> dict[str, list[str]]:
    """Policies in the order of training, by run; every run starts with the policy that training started from.

    With a series these are its base and the steps of every run, as far as they sampled rollouts. Without one, all
    policies in their order of appearance are one run.
    """
    policies = rollouts.policies
    if series is None:
        return {"": policies}
    found = {}
    for run in series.runs:
        steps = sorted((c for c in series if c.run == run), key=lambda c: c.step)
        path = [c.id for c in (series.base, *steps) if c.id in policies]
        if len(path) > 1:
            found[run] = path
    return found


def band_migration(
    rates: pd.DataFrame, path: Sequence[str], cutoffs: BandCutoffs, *, n_draws: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Count problems by band before and after every step of a path, and from its start to every later policy.

    Args:
        rates: of `difficulty`: n, successes and pass_rate of every policy and problem.
        path: policies in order.
        cutoffs: of the bands.
        n_draws: deals of the null.
        seed: of the deals.

    Returns:
        one row a pair of policies and pair of bands: start, end, from_band, to_band; n problems of the n_problems that
        all policies of the path were measured on; share of those that started in from_band; expected, null_low and
        null_high: mean and 95 % range of n by chance alone; p: how often chance alone moves as many, or, for problems
        that stayed, keeps as few. Checkpoints that were sampled with the same seed give much the same responses, which
        makes p too large, never too small.
    """
    rng = np.random.default_rng([seed, 4])
    pairs = [*pairwise(path), *((path[0], end) for end in path[2:])]
    by_policy = {policy: rates[rates.policy == policy].set_index("problem_id") for policy in path}
    common = sorted(set.intersection(*(set(table.index) for table in by_policy.values())))
    found = []
    for start, end in pairs if common else ():
        a, b = (by_policy[policy].loc[common] for policy in (start, end))
        n_a, n_b = a.n.to_numpy(), b.n.to_numpy()
        solved = (a.successes + b.successes).to_numpy()
        n = _counts(a.pass_rate.to_numpy()[None], b.pass_rate.to_numpy()[None], cutoffs)[0]
        blocks, step = [], max(1, _DEALT // len(common))
        for done in range(0, n_draws, step):  # the numbers come in the same order as all at once
            size = (min(step, n_draws - done), len(common))
            dealt = rng.hypergeometric(solved, n_a + n_b - solved, n_a, size=size)
            blocks.append(_counts(dealt / n_a, (solved - dealt) / n_b, cutoffs))
        null = np.concatenate(blocks)  # (n_draws, 3, 3)
        stays = np.eye(len(BANDS), dtype=bool)
        extreme = np.where(stays, null <= n, null >= n).sum(0)
        low, high = np.quantile(null, [0.025, 0.975], axis=0)
        started = n.sum(1, keepdims=True)
        columns = {
            "start": start,
            "end": end,
            "from_band": np.repeat(BANDS, len(BANDS)),
            "to_band": np.tile(BANDS, len(BANDS)),
            "n": n.ravel(),
            "n_problems": len(common),
            "share": np.divide(n, started, out=np.full(n.shape, np.nan), where=started > 0).ravel(),
            "expected": null.mean(0).ravel(),
            "null_low": low.ravel(),
            "null_high": high.ravel(),
            "p": (1 + extreme.ravel()) / (1 + n_draws),
        }
        found.append(pd.DataFrame(columns))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=_COLUMNS)


def _counts(before: np.ndarray, after: np.ndarray, cutoffs: BandCutoffs) -> np.ndarray:
    """(draws, 3, 3) numbers of problems by band before and after, from (draws, n_problems) pass rates."""
    cell = 3 * _position(before, cutoffs) + _position(after, cutoffs)
    draw = 9 * np.arange(len(cell))[:, None]
    return np.bincount((cell + draw).ravel(), minlength=9 * len(cell)).reshape(-1, 3, 3)


def _position(rate: np.ndarray, cutoffs: BandCutoffs) -> np.ndarray:
    """Place in `BANDS` of every pass rate."""
    band = cutoffs.band(rate)
    return np.select([band == name for name in BANDS], np.arange(len(BANDS)))
