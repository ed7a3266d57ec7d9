"""Difficulty: a property of a problem *and* a model, measured by the model's pass rate with its interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import betaincinv, ndtri

from tsae.errors import TsaeError
from tsae.rollouts.config import BandCutoffs, BandQuantiles
from tsae.rollouts.table import BANDS, Rollouts


def wilson_interval(
    successes: np.ndarray | float, trials: np.ndarray | float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval for a proportion (Wilson 1927): (low, high); (0, 1) where there are no trials."""
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
    """Quantiles of Beta(successes + ½, failures + ½), the ends 0 and 1 where no or all trials succeeded.

    As Brown, Cai & DasGupta (2001), Statistical Science 16. (0, 1) where there are no trials.
    """
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    tail = (1 - confidence) / 2
    a, b = successes + 0.5, trials - successes + 0.5
    low, high = betaincinv(a, b, tail), betaincinv(a, b, 1 - tail)
    return np.where(successes > 0, low, 0.0), np.where(successes < trials, high, 1.0)


def pass_rates(
    rollouts: Rollouts,
    policy: str | None = None,
    confidence: float = 0.95,
    interval: Literal["wilson", "jeffreys"] = "wilson",
) -> pd.DataFrame:
    """Pass rate of every problem.

    Args:
        rollouts: trajectories of unknown outcome are left out.
        policy: whose trajectories count; None pools all policies.
        confidence: of the interval.
        interval: Wilson's score interval, or Jeffreys' of the Beta posterior.

    Returns:
        one row a problem, indexed by problem_id: n, successes, pass_rate, low, high.

    Raises:
        TsaeError: where the policy has no trajectories of known outcome.
    """
    return rates_of(rollouts.frame, rollouts.origin, policy, confidence, interval)


def rates_of(
    frame: pd.DataFrame,
    where: str | Path,
    policy: str | None = None,
    confidence: float = 0.95,
    interval: Literal["wilson", "jeffreys"] = "wilson",
) -> pd.DataFrame:
    """`pass_rates` of a frame with the columns problem_id, policy and outcome, read from `where`."""
    known = frame[frame.outcome != "unknown"]
    if policy is not None:
        known = known[known.policy == policy]
    if known.empty:
        raise TsaeError(
            f"no trajectory of known outcome was sampled by {policy or 'any policy'}; "
            f"there are the policies {', '.join(frame.policy.unique())}",
            where=where,
            fix="Name a policy that sampled rollouts, or sample some from it.",
        )
    grouped = (known.outcome == "success").groupby(known.problem_id)
    table = pd.DataFrame({"n": grouped.size(), "successes": grouped.sum()})
    table["pass_rate"] = table.successes / table.n
    bounds = {"wilson": wilson_interval, "jeffreys": jeffreys_interval}[interval]
    table["low"], table["high"] = bounds(table.successes.to_numpy(), table.n.to_numpy(), confidence)
    return table


def with_bands(
    rollouts: Rollouts,
    reference: str | None,
    *,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
    measured_on: Rollouts | None = None,
) -> Rollouts:
    """Put every problem into a band by a reference policy's pass rate.

    Problems chosen for low pass rates in a sample look better in the next one by chance alone. Where the same
    rollouts are compared with others afterwards, measure the bands on separate ones (`measured_on`).

    Args:
        rollouts: gets the columns band, pass_rate, pass_rate_low and pass_rate_high.
        reference: the policy whose pass rate counts; None pools all policies.
        cutoffs: pass rates, by default easy >= .75, hard <= .25; or shares of the problems that are measured.
        measured_on: rollouts of the same problems to measure on, by default `rollouts` itself.

    Raises:
        TsaeError: where a problem was not measured, or a band is empty.
    """
    rates = pass_rates(measured_on or rollouts, reference)
    found = find_bands(rates, rollouts.table["problem_id"].to_pylist(), rollouts.origin, reference, cutoffs)
    found.info["separate"] = measured_on is not None
    return found.put_on(rollouts)


class Bands(NamedTuple):
    """Every problem's band, and how it was found."""

    problems: pd.DataFrame
    """As `pass_rates`, with a column band."""
    info: dict[str, Any]
    """reference, easy and hard (pass rates), separate, and quantiles where these were asked for."""

    def put_on(self, rollouts: Rollouts) -> Rollouts:
        """Rollouts of such problems with the columns band, pass_rate, pass_rate_low and pass_rate_high."""
        rows = self.problems.loc[pd.Index(rollouts.table["problem_id"].to_pylist())]
        for column, source in (
            ("band", "band"),
            ("pass_rate", "pass_rate"),
            ("pass_rate_low", "low"),
            ("pass_rate_high", "high"),
        ):
            rollouts = rollouts.with_column(column, rows[source].to_numpy())
        return Rollouts(rollouts.table, {**rollouts.info, "bands": self.info}, rollouts.origin)


def find_bands(
    rates: pd.DataFrame,
    problem_ids: Iterable[str],
    where: str | Path,
    reference: str | None = None,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
) -> Bands:
    """The bands of problems by their pass rates.

    Args:
        rates: of `pass_rates`; the bands of quantiles are shares of all of them.
        problem_ids: the problems that need a band; an id may come several times.
        where: named in error messages.
        reference: the policy of the pass rates; None for all.
        cutoffs: as in `with_bands`.

    Raises:
        TsaeError: where a problem was not measured, or a band is empty.
    """
    used = resolve(cutoffs, rates)
    rates = rates.assign(band=used.band(rates.pass_rate.to_numpy()))
    ids = pd.Index(problem_ids).unique()
    unmeasured = ids.difference(rates.index)
    if len(unmeasured):
        raise TsaeError(
            f"{len(unmeasured)} problems have no rollouts of known outcome from {reference or 'any policy'} "
            f"(first: {unmeasured[0]})",
            where=where,
            fix="Sample rollouts of these problems from the reference checkpoint, or leave the problems out.",
        )
    mine = rates.loc[ids]
    empty = [band for band in BANDS if not (mine.band == band).any()]
    if empty:
        low, high = mine.pass_rate.min(), mine.pass_rate.max()
        raise TsaeError(
            f"no problem falls into the band {' or '.join(empty)}: pass rates of {reference or 'all policies'} run "
            f"from {low:.2f} to {high:.2f} over {len(mine)} problems, with easy >= {used.easy} and hard <= {used.hard}",
            where=where,
            fix="Add problems of that difficulty, or move the cut-offs.",
        )
    info = {"reference": reference, **asdict(used), "separate": False}
    if isinstance(cutoffs, BandQuantiles):
        info["quantiles"] = asdict(cutoffs)
    return Bands(mine, info)


def resolve(cutoffs: BandCutoffs | BandQuantiles | None, rates: pd.DataFrame) -> BandCutoffs:
    """Cut-offs in pass rate: as given, or from shares of the problems of `pass_rates`."""
    if isinstance(cutoffs, BandQuantiles):
        return cutoffs.cutoffs(rates.pass_rate.to_numpy())
    return cutoffs or BandCutoffs()
