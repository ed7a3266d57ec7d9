"""Difficulty: a property of a problem *and* a model, measured by the model's pass rate with its interval."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import betaincinv, ndtri

from tsae.errors import TsaeError
from tsae.rollouts.config import BandCutoffs, BandQuantiles
from tsae.rollouts.table import BANDS, Rollouts, problem_bands


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
    counted = frame[known(frame, policy)]
    if counted.empty:
        raise TsaeError(
            f"no trajectory of known outcome was sampled by {policy or 'any policy'}; "
            f"there are the policies {', '.join(frame.policy.unique())}",
            where=where,
            fix="Name a policy that sampled rollouts, or sample some from it.",
        )
    grouped = (counted.outcome == "success").groupby(counted.problem_id)
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

    Problems that are called hard for few successes do better in the next sample by chance alone. So the pass rate that
    decides on a trajectory's band is that of separate rollouts (`measured_on`), or of the other half of these
    (`find_bands`).

    Args:
        rollouts: gets the columns band, pass_rate, pass_rate_low and pass_rate_high.
        reference: the policy whose pass rate counts; None pools all policies.
        cutoffs: pass rates, by default easy >= .75, hard <= .25; or shares of the problems that are measured.
        measured_on: separate rollouts of the same problems.

    Raises:
        TsaeError: where a problem was not measured, or a band is empty.
    """
    other = None if measured_on is None else measured_on.frame
    found = find_bands(rollouts.frame, rollouts.origin, reference, cutoffs, other)
    found.check()
    return found.put_on(rollouts)


class Bands(NamedTuple):
    """The band of every trajectory, and how it was found."""

    rows: pd.DataFrame
    """One row a trajectory, in order: problem_id, band (or null), pass_rate, pass_rate_low, pass_rate_high."""
    info: dict[str, Any]
    """reference, easy and hard (pass rates), separate, cross_fitted, halved (problems of which one half has no band),
    unbanded (problems without one), and quantiles where these were asked for."""
    where: str | Path
    """Named in error messages."""

    def check(self) -> None:
        """That no band is empty.

        Raises:
            TsaeError: where one is.
        """
        band, used = problem_bands(self.rows), self.info
        empty = [name for name in BANDS if not (band == name).any()]
        if empty:
            rates = self.rows.pass_rate
            found = (
                f"pass rates of {used['reference'] or 'all policies'} run from {rates.min():.2f} to {rates.max():.2f}"
                if rates.notna().any()
                else "no problem has two responses, one to measure its pass rate on and one to analyse"
            )
            raise TsaeError(
                f"no problem falls into the band {' or '.join(empty)}: {found} over {len(band)} problems, with easy >= "
                f"{used['easy']:g} and hard <= {used['hard']:g}",
                where=self.where,
                fix="Add problems of that difficulty, move the cut-offs, or sample more responses to a problem.",
            )

    def select(self, rows: np.ndarray) -> Bands:
        """Those of some of the trajectories, (n,) bool."""
        return self._replace(rows=self.rows[rows])

    def put_on(self, rollouts: Rollouts) -> Rollouts:
        """These very trajectories with the columns band, pass_rate, pass_rate_low and pass_rate_high."""
        for column in ("band", "pass_rate", "pass_rate_low", "pass_rate_high"):
            rollouts = rollouts.with_column(column, self.rows[column].to_numpy())
        return Rollouts(rollouts.table, {**rollouts.info, "bands": self.info}, rollouts.origin)


def find_bands(
    frame: pd.DataFrame,
    where: str | Path,
    reference: str | None = None,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
    measured_on: pd.DataFrame | None = None,
    *,
    partly: bool = False,
) -> Bands:
    """The band of every trajectory, by a pass rate that it is no part of.

    With `measured_on`, a problem's band is that of its pass rate there. Without, bands are cross-fitted: a trajectory's
    half is its rank within problem and policy modulo 2 (where all policies count together, its rank within the problem,
    since each may have one trajectory), and its pass rate that of the reference's trajectories of the other half. Where
    both rates of a problem lie in one band, this is the band of all its trajectories. Where they do not, chance (a hash
    of the problem's id) chooses one half, whose trajectories get their band; the other half gets none. So every problem
    has one band at most, and the mean over the problems of a band is unbiased: with R_h the mean of half h, the problem
    adds ½ Σ_h R_h · 1[R_(1−h) in the band] in expectation. Were both halves kept, each in a band of its own, problems
    whose halves agree would count half as much as they must, and hard problems would look easier than they are.

    Args:
        frame: trajectories with the columns problem_id, policy and outcome.
        where: named in error messages.
        reference: the policy of the pass rates; None for all.
        cutoffs: as in `with_bands`; the bands of quantiles are shares of all problems that are measured, of both
            halves together.
        measured_on: separate trajectories.
        partly: whether problems that were not measured are without a band, instead of an error.

    Raises:
        TsaeError: where a problem was not measured at all, or no cut-offs give the shares that are asked for.
    """
    if measured_on is not None:
        rates = rates_of(measured_on, where, reference)
        used, halves = resolve(cutoffs, rates), (rates, rates)
    else:
        of = ["problem_id"] if reference is None else ["problem_id", "policy"]
        half = frame.groupby(of, sort=False).cumcount().to_numpy() % 2
        measured = rates_of(frame, where, reference)  # Says what is wrong where nothing is known.
        by_half = [frame[half == 1 - h] for h in (0, 1)]
        halves = tuple(
            rates_of(part, where, reference) if known(part, reference).any() else measured.iloc[:0] for part in by_half
        )
        both = halves[0].index.intersection(halves[1].index)
        rates = measured
        used = resolve(cutoffs, pd.concat([h.loc[both] for h in halves])) if len(both) else BandCutoffs()
        halves = tuple(h.loc[both] for h in halves)
    ids = pd.Index(frame.problem_id.unique())
    unmeasured = ids.difference(rates.index)
    if len(unmeasured) and not partly:
        raise TsaeError(
            f"{len(unmeasured)} problems have no rollouts of known outcome from {reference or 'any policy'} "
            f"(first: {unmeasured[0]})",
            where=where,
            fix="Sample rollouts of these problems from the reference checkpoint, or leave the problems out.",
        )
    rows = frame[["problem_id"]].reset_index(drop=True)
    info = {"reference": reference, **asdict(used), "separate": measured_on is not None}
    info |= {"cross_fitted": measured_on is None, "halved": 0, "unbanded": 0}
    if measured_on is not None:
        mine = rates.reindex(pd.Index(rows.problem_id)).reset_index(drop=True)
        rows["band"] = _bands_of(mine.pass_rate, used)
    else:
        stacked = [h.reindex(pd.Index(rows.problem_id)).reset_index(drop=True) for h in halves]
        first = pd.Series(half == 0)
        mine = stacked[0].where(first, stacked[1])
        bands = [_bands_of(h.pass_rate, used) for h in stacked]
        kept = _kept_half(frame, half, reference)[rows.problem_id].to_numpy()
        chosen = bands[0].where(kept == 0, bands[1])
        # A trajectory of the other half keeps its band where it is the same.
        rows["band"] = chosen.where(bands[0].where(first, bands[1]) == chosen, None)
        differ = (bands[0] != bands[1]) & bands[0].notna()
        info["halved"] = int(rows.problem_id[differ].nunique())
    info["unbanded"] = int(problem_bands(rows).isna().sum())
    for column, source in (("pass_rate", "pass_rate"), ("pass_rate_low", "low"), ("pass_rate_high", "high")):
        rows[column] = mine[source].to_numpy()
    if isinstance(cutoffs, BandQuantiles):
        info["quantiles"] = asdict(cutoffs)
    return Bands(rows, info, where)


def _bands_of(rate: pd.Series, cutoffs: BandCutoffs) -> pd.Series:
    """The band of every pass rate, None where there is none."""
    return pd.Series(cutoffs.band(rate.to_numpy()), index=rate.index, dtype=object).where(rate.notna(), None)


def known(frame: pd.DataFrame, policy: str | None) -> pd.Series:
    """Which trajectories have a known outcome and were sampled by the policy; None for any."""
    return (frame.outcome != "unknown") & ((frame.policy == policy) if policy is not None else True)


def _kept_half(frame: pd.DataFrame, half: np.ndarray, reference: str | None) -> pd.Series:
    """0 or 1 of every problem, by its id alone, with chances like the halves' numbers of the reference's trajectories.

    Where one half has a trajectory more, equal chances would not make up for its larger part in the problem's mean.
    """
    mine = (frame.policy == reference) if reference is not None else pd.Series(True, index=frame.index)
    share = pd.Series(half[mine.to_numpy()]).groupby(frame.problem_id[mine].to_numpy()).mean()
    ids = pd.Index(frame.problem_id.unique())
    share = share.reindex(ids).fillna(0.5)
    drawn = [int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") / 2**64 for id in ids]
    return (pd.Series(drawn, index=ids) < share).astype(int)


def resolve(cutoffs: BandCutoffs | BandQuantiles | None, rates: pd.DataFrame) -> BandCutoffs:
    """Cut-offs in pass rate: as given, or from shares of the problems of `pass_rates`."""
    if isinstance(cutoffs, BandQuantiles):
        return cutoffs.cutoffs(rates.pass_rate.to_numpy())
    return cutoffs or BandCutoffs()


def band_counts(band: pd.Series) -> str:
    """How many problems are in every band, given each one's."""
    return ", ".join(f"{name} {(band == name).sum():,}" for name in BANDS)


def found_how(info: Mapping[str, Any] | None) -> str:
    """What bands were measured on, from ``rollouts.info["bands"]``."""
    if not info:
        return "what the bands were measured on is not known"
    who = info["reference"] or "all policies"
    if info["separate"]:
        text = f"bands were measured on separate rollouts of {who}"
    else:
        text = f"a response's band is measured on the other half of the responses of {who} to its problem"
        if info.get("halved"):
            text += f"; {info['halved']:,} problems, whose halves differ, are in a band with one half"
    if info.get("unbanded"):
        why = "which were not measured" if info["separate"] else f"of which {who} gave fewer than two responses"
        text += f"; {info['unbanded']:,} problems, {why}, have no band"
    return text
