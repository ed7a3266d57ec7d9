"""Effects of units, from simulated runs on random halves of them.

The Banzhaf value of a unit is the mean, over all subsets of the others, of what it adds (Wang & Jia 2023). If every
unit is kept with a chance of one half, independently, it is the coefficient of a least-squares regression of the
subsets' values on who was kept. n coefficients need more than n subsets: with fewer, no regression tells units apart,
however it is regularised. So units are as fine as the subsets allow, and a fit on subsets that the regression has not
seen says whether a sum of effects describes the run at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PER_UNIT = 3
"""Subsets for each unit, below which the regression says little."""


@dataclass(frozen=True)
class Banzhaf:
    """Effects of units on targets."""

    effects: np.ndarray
    """(n, n_targets)."""
    low: np.ndarray
    """(n, n_targets) 2.5th percentile over draws of the subsets; `high` the 97.5th."""
    high: np.ndarray
    r2: np.ndarray
    """(n_targets,) on fifths of the subsets that the regression has not seen; NaN where nothing varies."""


def banzhaf(kept: np.ndarray, changes: np.ndarray, *, draws: int = 200, seed: int = 0) -> Banzhaf:
    """Regress the values of subsets on the units that they kept.

    Args:
        kept: (K, n) bool.
        changes: (K, n_targets).
        draws: of the bootstrap over subsets.
        seed: of the bootstrap, and of the fifths.
    """
    rng, x = np.random.default_rng(seed), np.column_stack([np.ones(len(kept)), kept.astype(float)])

    def fit(rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.linalg.lstsq(x[rows], changes[rows], rcond=None)[0]
        return found

    whole = fit(np.arange(len(kept)))
    drawn = np.array([fit(rng.integers(0, len(kept), len(kept)))[1:] for _ in range(draws)])
    fold, left = rng.permutation(len(kept)) % 5, np.zeros_like(changes)
    for i in range(5):
        left[fold == i] = changes[fold == i] - x[fold == i] @ fit(np.flatnonzero(fold != i))
    spread = ((changes - changes.mean(0)) ** 2).sum(0)
    r2 = np.where(spread > 0, 1 - (left**2).sum(0) / np.where(spread > 0, spread, 1.0), np.nan)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return Banzhaf(whole[1:], low, high, r2)


def random_halves(n: int, n_subsets: int, seed: int) -> np.ndarray:
    """(n_subsets, n) bool: every unit is kept with a chance of one half."""
    found: np.ndarray = np.random.default_rng([seed, 1]).random((n_subsets, n)) < 0.5
    return found
