"""Statistics of problems, for every room: one bootstrap, intervals of few problems, and intervals of proportions.

Trajectories of a problem are not independent, so problems are drawn, with all their trajectories.

The studentised interval of a mean is symmetric (Hall 1988): mean ± the quantile of |t*| times the standard error, with
the same draws for all features. Percentile intervals of means cover too little with few problems (84 % in place of
95 % with five). Equal-tailed studentised ones do where most problems differ by nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from scipy.special import betaincinv, ndtri, stdtrit

_WIDE = 512  # features drawn at once, so that their draws stay in a core's cache


def counts(n: int, n_draws: int, seed: int | Sequence[int] | np.random.Generator) -> np.ndarray:
    """(n_draws, n) how often each of n units is drawn in every draw; a row adds up to n."""
    drawn: np.ndarray = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=n_draws)
    return drawn


def percentile_interval(
    draws: np.ndarray, confidence: float = 0.95, *, method: Literal["linear", "nearest"] = "linear"
) -> tuple[Any, Any]:
    """(low, high) percentiles over the first axis of the draws, NaN aside: floats, or arrays of the other axes."""
    tail = (1 - confidence) / 2
    quantile = np.nanquantile if np.isnan(draws).any() else np.quantile  # The second is faster.
    low, high = quantile(draws, [tail, 1 - tail], axis=0, method=method)
    return low, high


def bootstrap_interval(
    differences: np.ndarray, n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) studentised interval of the mean over problems; (n_problems, n_features) in, (n_features,) out."""
    _, low, high = group_interval([differences], n_bootstrap, confidence, seed)
    return low, high


def group_interval(
    groups: Sequence[np.ndarray], n_bootstrap: int, confidence: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over problems with its studentised interval (low, high), or the difference of two groups' means.

    Args:
        groups: one or two (n_problems, n_features).
        n_bootstrap: draws of problems within each group.
        confidence: of the interval.
        seed: of the draws.
    """
    mean = groups[0].mean(0) - (groups[1].mean(0) if len(groups) > 1 else 0.0)
    half, _, _ = studentised(groups, n_bootstrap, confidence, seed)
    return mean, mean - half, mean + half


def studentised(
    groups: Sequence[np.ndarray], n_bootstrap: int, confidence: float, seed: int, *leasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Half the interval, the standard error, and p of each size, of a mean or a difference of two means.

    Args:
        groups: one or two (n_problems, n_features).
        n_bootstrap: draws of problems within each group.
        confidence: of the interval.
        seed: of the draws.
        leasts: (n_features,) each: sizes that are tested.

    Returns:
        two (n_features,), and (n_leasts, n_features) p of a size of the mean up to each.
    """
    n_features = groups[0].shape[1]
    weights = _weights(tuple(len(group) for group in groups), n_bootstrap, seed)
    half, error = np.empty((2, n_features))
    p = np.empty((len(leasts), n_features))
    for start in range(0, n_features, _WIDE):
        part = slice(start, start + _WIDE)
        shift: np.ndarray | float = 0.0
        variance: np.ndarray | float = 0.0
        se_squared: np.ndarray | float = 0.0
        observed: np.ndarray | float = 0.0
        for sign, group, weight in zip((1, -1), groups, weights, strict=False):
            n = len(group)
            mean = group[:, part].mean(0)
            # Features in rows, so that the draws of one feature lie together.
            centred = np.ascontiguousarray((group[:, part] - mean).astype(np.float32).T)
            drawn = centred @ weight.T  # (features, n_bootstrap)
            np.square(centred, out=centred)
            square = centred @ weight.T
            spread = centred.mean(1, keepdims=True)
            shift = shift + drawn if sign > 0 else shift - drawn
            observed = observed + sign * mean
            # A draw of one problem alone has no variance. A floor of 1/n of the sample's variance keeps its t finite.
            square -= np.square(drawn, out=drawn)
            np.maximum(square, spread / n, out=square)
            square /= n - 1
            variance = variance + square
            se_squared = se_squared + spread[:, 0] / (n - 1)
        t = np.abs(shift) / np.sqrt(np.maximum(variance, np.finfo(np.float32).tiny))
        error[part] = np.sqrt(se_squared)
        for least, of_least in zip(leasts, p, strict=True):
            beyond = (np.abs(observed) - least[part])[:, None]
            of_least[part] = (1 + (t * error[part][:, None] >= beyond).sum(1)) / (1 + n_bootstrap)
        half[part] = _quantiles(t, confidence) * error[part]
    return half, error, p


def _quantiles(draws: np.ndarray, confidence: float) -> np.ndarray:
    """`np.quantile` of every row, in half its time; reorders the draws."""
    place = (draws.shape[1] - 1) * confidence
    below = min(int(place), draws.shape[1] - 2)
    draws.partition(below, axis=1)
    low, high = draws[:, below], draws[:, below + 1 :].min(1)
    return np.asarray(low + (high - low) * np.float32(place - below))


@lru_cache(maxsize=16)
def _weights(sizes: tuple[int, ...], n_bootstrap: int, seed: int) -> list[np.ndarray]:
    """(n_bootstrap, n_problems) weight of every problem in every draw, for each group."""
    rng = np.random.default_rng([seed, 3])
    return [counts(n, n_bootstrap, rng).astype(np.float32) / np.float32(n) for n in sizes]


FEWEST = 8
"""Fewest problems for which a change is reported. If the true change is 0, at most 6 % of draws of eight problems or
more are called a change, for every kind of difference in scripts/statements/changes.py; with two 9 % would be.
With fewer than eight, a rare behaviour cannot show a change."""


def mean_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a mean over problems; NaN for a single problem, and for fewer than `FEWEST` that are all alike.

    Two problems with the same value say nothing of how far problems lie apart. If no value is negative, neither is an
    end. If all values are shares, so are the ends.
    """
    known = len(values) >= FEWEST or values.min() < values.max()
    low, high = _interval(float(values.mean()), values, confidence) if known else (np.nan, np.nan)
    floor = 0.0 if values.min() >= 0 else -np.inf
    ceiling = 1.0 if floor == 0 and values.max() <= 1 else np.inf
    return max(low, floor), min(high, ceiling)


def change_interval(differences: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of the mean of paired differences, one a problem; NaN for fewer than `FEWEST`."""
    if len(differences) < FEWEST:
        return np.nan, np.nan
    return _interval(float(differences.mean()), differences, confidence)


def jackknife_interval(whole: float, without: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a number over problems, from its (n_problems,) values with one problem left out."""
    n = len(without)
    return _interval(whole, n * whole - (n - 1) * without, confidence)


def _interval(centre: float, values: np.ndarray, confidence: float) -> tuple[float, float]:
    n = len(values)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2) * values.std(ddof=1) / np.sqrt(n))
    return centre - half, centre + half


def too_few(n: int) -> str:
    """Say why a change is not reported."""
    return f"too few problems ({n}; {FEWEST} are needed)"


def wilson_interval(
    successes: np.ndarray | float, trials: np.ndarray | float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval (Wilson 1927): (low, high); (0, 1) where there are no trials."""
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    z = ndtri(0.5 + confidence / 2)
    n = np.where(trials > 0, trials, 1.0)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)
    return np.where(trials > 0, low, 0.0), np.where(trials > 0, high, 1.0)


def jeffreys_interval(
    successes: np.ndarray | float, trials: np.ndarray | float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Jeffreys' interval: quantiles of Beta(successes + ½, failures + ½); (0, 1) where there are no trials.

    The low end is 0 where no trial succeeded, the high end 1 where all did (Brown, Cai & DasGupta 2001, Statistical
    Science 16).
    """
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    tail = (1 - confidence) / 2
    a, b = successes + 0.5, trials - successes + 0.5
    low, high = betaincinv(a, b, tail), betaincinv(a, b, 1 - tail)
    return np.where(successes > 0, low, 0.0), np.where(successes < trials, high, 1.0)
