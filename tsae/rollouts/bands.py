"""Bands: easy, medium or hard, by a policy's pass rate on a problem that the trajectory itself is no part of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from tsae.base.statistics.proportions import jeffreys_interval, wilson_interval
from tsae.errors import TsaeError
from tsae.rollouts.config import BandCutoffs, BandQuantiles
from tsae.rollouts.schema import BANDS, problem_bands

_KINDS = {
    "reference": str | None,
    "easy": int | float,
    "hard": int | float,
    "separate": bool,
    "cross_fitted": bool,
    "halved": int,
    "unbanded": int,
    "quantiles": dict,
    "step": dict,
    "confounded_with_step": dict,
    "refused": str,
}
"""What `Bands.info` holds, and what `tsae.rollouts.difficulty.draw_problems.band_problems` adds."""


def pass_rates(
    frame: pd.DataFrame,
    where: str | Path,
    policy: str | None = None,
    confidence: float = 0.95,
    interval: Literal["wilson", "jeffreys"] = "wilson",
) -> pd.DataFrame:
    """Pass rate of every problem.

    Args:
        frame: trajectories with the columns problem_id, policy and outcome; those of unknown outcome are left out.
        where: named in error messages.
        policy: whose trajectories count; None pools all policies.
        confidence: of the interval.
        interval: Wilson's score interval, or Jeffreys' of the Beta posterior.

    Returns:
        one row a problem, indexed by problem_id: n, successes, pass_rate, low, high.

    Raises:
        TsaeError: where the policy has no trajectories of known outcome.
    """
    counted = frame[_known(frame, policy)]
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
        """Refuse bands of which one is empty, with a TsaeError."""
        band, used, rates = problem_bands(self.rows), self.info, self.rows.pass_rate
        empty = [name for name in BANDS if not (band == name).any()]
        if empty:
            found = "no problem has two responses, one to measure its pass rate on and one to analyse"
            if rates.notna().any():
                who = used["reference"] or "all policies"
                found = f"pass rates of {who} run from {rates.min():.2f} to {rates.max():.2f}"
            raise TsaeError(
                f"no problem falls into the band {' or '.join(empty)}: {found} over {len(band)} problems, with easy >= "
                f"{used['easy']:g} and hard <= {used['hard']:g}",
                where=self.where,
                fix="Add problems of that difficulty, move the cut-offs, or sample more responses to a problem.",
            )

    def select(self, rows: np.ndarray) -> Bands:
        """The bands of some of the trajectories, (n,) bool."""
        return self._replace(rows=self.rows[rows])


def find_bands(
    frame: pd.DataFrame,
    where: str | Path,
    reference: str | None = None,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
    measured_on: pd.DataFrame | None = None,
    *,
    partly: bool = False,
) -> Bands:
    """Find the band of every trajectory, by a pass rate that it is no part of.

    With `measured_on`, a problem's band is that of its pass rate there. Without, bands are cross-fitted: a trajectory's
    half is its rank within problem and policy modulo 2 (with all policies together, its rank within the problem, since
    each policy may have one trajectory), and its pass rate that of the reference's trajectories in the other half.
    Where both rates of a problem lie in one band, all its trajectories are in it. Where they do not, chance (a hash of
    the problem's id) chooses one half, whose trajectories get their band; the other half gets none. So every problem
    has at most one band, and the mean over the problems of a band is unbiased: with R_h the mean of half h, the problem
    adds ½ Σ_h R_h · 1[R_(1−h) in the band] in expectation. If both halves kept a band of their own, problems whose
    halves agree would count only half as much as they should, and hard problems would look easier than they are.

    Args:
        frame: trajectories with the columns problem_id, policy and outcome.
        where: named in error messages.
        reference: the policy of the pass rates; None for all.
        cutoffs: pass rates, or shares of all problems that are measured, both halves together.
        measured_on: separate trajectories.
        partly: leave problems that were not measured without a band, instead of raising an error.

    Raises:
        TsaeError: where a problem was not measured at all, or no cut-offs give the shares that are asked for.
    """
    measured = pass_rates(frame if measured_on is None else measured_on, where, reference)
    rows = frame[["problem_id"]].reset_index(drop=True)
    halved = 0
    if measured_on is not None:
        used = _cutoffs(cutoffs, measured)
        mine = measured.reindex(rows.problem_id).reset_index(drop=True)
        rows["band"] = _bands_of(mine.pass_rate, used)
    else:
        half = halves(frame, reference).to_numpy()
        rates = [
            pass_rates(part, where, reference) if _known(part, reference).any() else measured.iloc[:0]
            for part in (frame[half == 1], frame[half == 0])  # for half 0, and for half 1
        ]
        both = rates[0].index.intersection(rates[1].index)
        used = _cutoffs(cutoffs, pd.concat([rate.loc[both] for rate in rates])) if len(both) else BandCutoffs()
        of_half = [rate.loc[both].reindex(rows.problem_id).reset_index(drop=True) for rate in rates]
        first = pd.Series(half == 0)
        mine = of_half[0].where(first, of_half[1])
        bands = [_bands_of(rate.pass_rate, used) for rate in of_half]
        chosen = bands[0].where(_chosen_half(frame, half, reference)[rows.problem_id].to_numpy() == 0, bands[1])
        # A trajectory of the other half keeps its band where it is the same.
        rows["band"] = chosen.where(bands[0].where(first, bands[1]) == chosen, None)
        halved = int(rows.problem_id[(bands[0] != bands[1]) & bands[0].notna()].nunique())
    ids = pd.Index(frame.problem_id.unique())
    unmeasured = ids.difference(measured.index)
    if len(unmeasured) and not partly:
        raise TsaeError(
            f"{len(unmeasured)} problems have no rollouts of known outcome from {reference or 'any policy'} "
            f"(first: {unmeasured[0]})",
            where=where,
            fix="Sample rollouts of these problems from the reference checkpoint, or leave the problems out.",
        )
    for column, source in (("pass_rate", "pass_rate"), ("pass_rate_low", "low"), ("pass_rate_high", "high")):
        rows[column] = mine[source].to_numpy()
    info = {"reference": reference, **asdict(used), "separate": measured_on is not None}
    info |= {"cross_fitted": measured_on is None, "halved": halved, "unbanded": int(problem_bands(rows).isna().sum())}
    if isinstance(cutoffs, BandQuantiles):
        info["quantiles"] = asdict(cutoffs)
    return Bands(rows, info, where)


def halves(frame: pd.DataFrame, reference: str | None) -> pd.Series:
    """0 or 1 for every trajectory: its rank within problem and policy modulo 2; see `find_bands`."""
    of = ["problem_id"] if reference is None else ["problem_id", "policy"]
    return frame.groupby(of, sort=False).cumcount() % 2


def _cutoffs(cutoffs: BandCutoffs | BandQuantiles | None, rates: pd.DataFrame) -> BandCutoffs:
    return (cutoffs or BandCutoffs()).cutoffs(rates.pass_rate.to_numpy())


def _bands_of(rate: pd.Series, cutoffs: BandCutoffs) -> pd.Series:
    """The band of every pass rate, None where there is none."""
    return pd.Series(cutoffs.band(rate.to_numpy()), index=rate.index, dtype=object).where(rate.notna(), None)


def _known(frame: pd.DataFrame, policy: str | None) -> pd.Series:
    """Which trajectories have a known outcome and were sampled by the policy; None for any."""
    return (frame.outcome != "unknown") & ((frame.policy == policy) if policy is not None else True)


def _chosen_half(frame: pd.DataFrame, half: np.ndarray, reference: str | None) -> pd.Series:
    """0 or 1 for every problem, by its id alone; chances are the halves' shares of the reference's trajectories.

    Where one half has one trajectory more, equal chances would not make up for its larger part in the problem's mean.
    """
    mine = (frame.policy == reference) if reference is not None else pd.Series(True, index=frame.index)
    share = pd.Series(half[mine.to_numpy()]).groupby(frame.problem_id[mine].to_numpy()).mean()
    ids = pd.Index(frame.problem_id.unique())
    share = share.reindex(ids).fillna(0.5)
    drawn = [int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") / 2**64 for id in ids]
    return (pd.Series(drawn, index=ids) < share).astype(int)


def band_counts(band: pd.Series) -> str:
    """How many problems are in every band, given each problem's band."""
    return ", ".join(f"{name} {(band == name).sum():,}" for name in BANDS)


def bands_info(info: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """What bands were measured on: ``info["bands"]`` of rollouts; None where it is not known.

    Raises:
        TsaeError: where it is not as `find_bands` writes it.
    """
    bands = info.get("bands")
    if bands is None or bands == {}:
        return None
    whole = isinstance(bands, dict) and {"reference", "separate"} <= bands.keys()
    if not whole or not all(isinstance(bands[name], _KINDS[name]) for name in _KINDS.keys() & bands.keys()):
        what = 'says what its bands were measured on (info["bands"]) in no known way'
        raise TsaeError(what, where=where, fix="Band the rollouts again (tsae rollouts bands).")
    return bands


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
