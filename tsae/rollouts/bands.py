"""Bands: easy, medium or hard, by a policy's pass rate on a problem that the trajectory itself is not part of.

`confounding` measures whether the bands of a log are really its training steps. In a trainer's log, most problems come
from the policy of one step. Where the run learns, problems of late steps are solved more often, so bands from such a
log say when a problem was asked, not how hard it is for the base. The measure is the share of the differences between
the problems' pass rates that their steps explain: the adjusted R² of pass rate on step, with the problems in order of
step cut into at most 10 groups. Dealing the problems to the steps at random gives its p-value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from tsae.base.statistics import jeffreys_interval, wilson_interval
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
    "shuffled": bool,
    "unbanded": int,
    "quantiles": dict,
    "step": dict,
    "confounded_with_step": dict,
    "refused": str,
    "source": dict,
}
"""What `Bands.info` holds, and what `tsae.rollouts.bands.band_problems` adds."""


BAND_COLUMNS = ("band", "pass_rate", "pass_rate_low", "pass_rate_high")
"""Columns of `Bands.rows` that rollouts take."""
_NEARLY_EVERY = 0.95


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
    unbanded (problems without one), shuffled where responses were sorted by outcome, and quantiles where these were
    asked for."""
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
                found = f"pass rates of {bands_label(used) or who} run from {rates.min():.2f} to {rates.max():.2f}"
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
    """Find the band of every trajectory, by a pass rate that it is not part of.

    With `measured_on`, a problem's band is that of its pass rate there. Without, bands are cross-fitted: a trajectory's
    half is its rank within problem and policy modulo 2 (with all policies together, its rank within the problem, since
    each policy may have one trajectory), and its pass rate that of the reference's trajectories in the other half.
    Where the responses to nearly every problem are sorted by outcome, ranks would make its halves alike: the rank is
    then that of a hash.
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
    halved, shuffled = 0, False
    if measured_on is not None:
        used = _cutoffs(cutoffs, measured)
        mine = measured.reindex(rows.problem_id).reset_index(drop=True)
        rows["band"] = cut_bands(mine.pass_rate, used)
    else:
        shuffled = _sorted_by_outcome(frame)
        half = halves(frame, reference, shuffled=shuffled).to_numpy()
        rates = [
            pass_rates(part, where, reference) if _known(part, reference).any() else measured.iloc[:0]
            for part in (frame[half == 1], frame[half == 0])  # for half 0, and for half 1
        ]
        both = rates[0].index.intersection(rates[1].index)
        used = _cutoffs(cutoffs, pd.concat([rate.loc[both] for rate in rates])) if len(both) else BandCutoffs()
        of_half = [rate.loc[both].reindex(rows.problem_id).reset_index(drop=True) for rate in rates]
        first = pd.Series(half == 0)
        mine = of_half[0].where(first, of_half[1])
        bands = [cut_bands(rate.pass_rate, used) for rate in of_half]
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
    info |= {"shuffled": True} if shuffled else {}
    if isinstance(cutoffs, BandQuantiles):
        info["quantiles"] = asdict(cutoffs)
    return Bands(rows, info, where)


def halves(frame: pd.DataFrame, reference: str | None, *, shuffled: bool) -> pd.Series:
    """0 or 1 for every trajectory: its rank within problem and policy modulo 2; see `find_bands`.

    Args:
        frame: trajectories.
        reference: the policy of the pass rates; None for all.
        shuffled: whether the rank is that of a hash, and not of the place.
    """
    of = [frame[name] for name in (["problem_id"] if reference is None else ["problem_id", "policy"])]
    place = frame.problem_id.groupby(of, sort=False).cumcount()
    if shuffled:
        drawn = pd.Series(_drawn(frame.problem_id + "\0" + place.astype(str)), index=frame.index)
        place = drawn.groupby(of, sort=False).rank(method="first").astype(int)
    return place % 2


def _sorted_by_outcome(frame: pd.DataFrame) -> bool:
    """Whether nearly every group with both outcomes has its successes first, or its failures."""
    known = frame[frame.outcome != "unknown"]
    of = [known[name] for name in ("problem_id", "policy", "step") if name in known]
    change = (known.outcome == "success").astype(int).groupby(of, sort=False, dropna=False, observed=True).diff()
    steps = change.groupby(of, sort=False, dropna=False, observed=True).agg(["min", "max"])
    mixed = steps[(steps["min"] < 0) | (steps["max"] > 0)]
    shares = (mixed["max"] <= 0).mean(), (mixed["min"] >= 0).mean()
    return len(mixed) >= FEWEST and bool(max(shares) >= _NEARLY_EVERY)


def _drawn(texts: Iterable[str]) -> list[float]:
    """A number from 0 to 1 for every text, by its hash."""
    return [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64 for text in texts]


def _cutoffs(cutoffs: BandCutoffs | BandQuantiles | None, rates: pd.DataFrame) -> BandCutoffs:
    return (cutoffs or BandCutoffs()).cutoffs(rates.pass_rate.to_numpy())


def cut_bands(rate: pd.Series, cutoffs: BandCutoffs) -> pd.Series:
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
    return (pd.Series(_drawn(ids), index=ids) < share).astype(int)


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
        what = 'does not describe in a known way what its bands were measured on (info["bands"])'
        raise TsaeError(what, where=where, fix="Band the rollouts again (tsae rollouts bands).")
    return bands


def kind_of_bands(info: Mapping[str, Any] | None) -> str:
    """own, difficulty or level, from ``rollouts.info["bands"]``."""
    return str(((info or {}).get("source") or {}).get("kind", "own"))


def bands_label(info: Mapping[str, Any] | None) -> str:
    """What bands from elsewhere are: "difficulty for model X", "level of the data set"; empty for the policies' own."""
    return str(((info or {}).get("source") or {}).get("label", ""))


def found_how(info: Mapping[str, Any] | None) -> str:
    """What bands were measured on, from ``rollouts.info["bands"]``."""
    if not info:
        return "what the bands were measured on is not known"
    if label := bands_label(info):
        source = info["source"]
        text = (
            f"bands are the {label} ({source['column']}{' of ' if source.get('file') else ''}{source.get('file', '')})"
        )
        if "matched" in source:
            text += f"; {source['matched']:,} problems are matched, {source['by_id']:,} of them by id"
        return text + (f"; {info['unbanded']:,} problems have no band" if info.get("unbanded") else "")
    who = info["reference"] or "all policies"
    if info["separate"]:
        text = f"bands were measured on separate rollouts of {who}"
    else:
        text = f"a response's band is measured on the other half of the responses of {who} to its problem"
        if info.get("shuffled"):
            text += ", which are dealt by chance, since the log has them sorted by outcome"
        if info.get("halved"):
            text += f"; {info['halved']:,} problems, whose halves differ, are in a band with one half"
    if info.get("unbanded"):
        why = "which were not measured" if info["separate"] else f"of which {who} gave fewer than two responses"
        text += f"; {info['unbanded']:,} problems, {why}, have no band"
    return text


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
            return "the log is of one training step, so that bands are not steps, and the run's course does not show"
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


def of_steps(bands: Bands, outline: pd.DataFrame, seed: int) -> str:
    """Say how far training steps explain bands from elsewhere, and refuse their contrasts where they do."""
    rank = problem_bands(bands.rows).map(dict(zip(BANDS, (1.0, 0.5, 0.0), strict=True))).dropna()
    banded = outline.assign(band=bands.rows.band.to_numpy())
    measured = confounding(banded[banded.problem_id.isin(rank.index)], seed, rank)
    told = str(measured).replace("pass rate", "difficulty")
    return (
        told if measured.told_apart else _are_steps(bands, measured, told, "Let all checkpoints answer anew (--sample)")
    )


def _are_steps(bands: Bands, measured: Confounding, told: str, instead: str) -> str:
    """Refuse contrasts of bands that are training steps; returns why, and what to do instead."""
    why = f"bands and training steps cannot be separated: {told}; {measured.late}. A difference between bands would be "
    why += f"one between steps. {instead}"
    bands.info["refused"] = why
    bands.info["confounded_with_step"] = measured.as_dict() | {"sentence": why}
    return why


def confounding(frame: pd.DataFrame, seed: int = 0, difficulty: pd.Series | None = None) -> Confounding:
    """Measure how far the training step explains the problems' pass rates.

    Args:
        frame: trajectories with the columns problem_id, policy, outcome and band; and step, if it is known; otherwise
            the policies' order of appearance replaces it. Unknown outcomes are left out.
        seed: of the draws.
        difficulty: of every problem, in place of its pass rate here; unknown outcomes then count.
    """
    frame = frame[frame.outcome != "unknown"] if difficulty is None else frame
    known = "step" in frame.columns and bool(frame["step"].notna().all())
    step = frame["step"].astype(float) if known else pd.Series(pd.factorize(frame.policy)[0] + 1.0, index=frame.index)
    problem = frame.problem_id
    rates = (frame.outcome == "success").groupby(problem, sort=False).mean()
    if difficulty is not None:
        rates = difficulty.reindex(rates.index)
    steps = step.groupby(problem, sort=False).mean().loc[rates.index]
    band = problem_bands(frame).loc[rates.index]
    group, labels = _step_groups(steps.to_numpy())
    table = pd.crosstab(band, pd.Series(group, index=band.index)).reindex(
        index=list(BANDS), columns=range(len(labels)), fill_value=0
    )
    table.columns = pd.Index(labels, name="step" if known else "policy, in order of appearance")
    share, p = _explained(rates.to_numpy(dtype=float), group, seed)
    late = ", ".join(f"{name} {steps[band == name].median():g}" for name in BANDS if (band == name).any())
    return Confounding(table, len(rates), int(step.nunique()), share, p, f"median step of the problems: {late}")


def _step_groups(step: np.ndarray) -> tuple[np.ndarray, list[str]]:
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


FEWEST = 8
"""Fewest problems of a band to find anything in it: seven signs that all agree have p = .016 at best, and a band has
hundreds of features."""


def band_problems(
    outline: pd.DataFrame,
    where: str | Path,
    *,
    base: str | None = None,
    measured_on: pd.DataFrame | None = None,
    seed: int = 0,
) -> tuple[Bands | None, str]:
    """Bands of a log's problems, and a line about them.

    Pass rates are the first of these that exist: those of separate rollouts of the base; the base's own in the log, if
    it answered every problem at least twice; those of all policies in the log. Where the run learns, the last are
    training steps (`tsae.rollouts.bands`). Then the bands cover only the problems that the base
    answered itself, if every band has at least 8 of them; otherwise ``info["refused"]`` of the bands says why bands are
    not compared. Cut-offs are the usual ones, or thirds if these leave a band with fewer than 8 problems and thirds do
    not.

    Args:
        outline: of `tsae.rollouts.parquet.read_outline`.
        where: named in messages.
        base: id of the model that training started from.
        measured_on: separate rollouts of the base: problem_id, as in the log, policy and outcome.
        seed: of the permutations.

    Returns:
        the bands of all trajectories of the outline, None if no cut-offs tell easy from hard; and a line.
    """
    if measured_on is not None:
        return _by_cutoffs(outline, where, base, measured_on)
    outcomes = set(outline.outcome) - {"unknown"}
    if len(outcomes) == 1:
        same = "right" if outcomes == {"success"} else "wrong"
        return None, (
            f"none: every response is {same}, so that no problem is harder than another here. Successes and failures "
            "cannot be compared; how checkpoints read these responses can"
        )
    enough = outline[(outline.policy == base) & (outline.outcome != "unknown")].problem_id.value_counts() >= 2
    answered = set(enough.index[enough])
    if base is not None and answered == set(outline.problem_id):
        return _by_cutoffs(outline, where, base)
    bands, told = _by_cutoffs(outline, where, None)
    if bands is None:
        return None, told
    measured = confounding(outline.assign(band=bands.rows.band.to_numpy()), seed)
    if measured.told_apart:
        bands.info["step"] = measured.as_dict()
        return bands, f"{told}; {measured}"
    own, of_base = _by_cutoffs(outline, where, base) if answered else (None, "")
    if own is not None and _smallest_band(own) >= FEWEST:
        return own, f"{of_base}; of the log's other responses {measured}"
    instead = "Give the base's own pass rates on these problems (--bands-from), or bands from elsewhere (--difficulty, "
    refused = _are_steps(bands, measured, str(measured), f"{instead}--bands-column)")
    return bands, f"{refused}. Bands are shown, and not compared: {told}"


def _smallest_band(bands: Bands) -> int:
    """The number of problems in the smallest band."""
    return int(problem_bands(bands.rows).value_counts().reindex(BANDS, fill_value=0).min())


def _by_cutoffs(
    outline: pd.DataFrame, where: str | Path, reference: str | None, measured_on: pd.DataFrame | None = None
) -> tuple[Bands | None, str]:
    return by_cutoffs(lambda cutoffs: find_bands(outline, where, reference, cutoffs, measured_on, partly=True))


def by_cutoffs(find: Callable[[BandCutoffs | BandQuantiles], Bands]) -> tuple[Bands | None, str]:
    """The bands by the usual cut-offs or by thirds, and how many problems they have; None and why not."""
    found, refused = [], ""
    for cutoffs in (BandCutoffs(), BandQuantiles()):
        try:
            bands = find(cutoffs)
            bands.check()
        except TsaeError as error:
            refused = error.what
            continue
        found.append(bands)
    if not found:
        return None, f"none: {refused}"
    bands = max(found, key=lambda bands: _smallest_band(bands) >= FEWEST)  # The first, where both are as good.
    band, used = problem_bands(bands.rows), bands.info
    thirds = f"; thirds, since the usual cut-offs leave a band with fewer than {FEWEST} problems"
    few = [f"{name} {(band == name).sum()}" for name in BANDS if (band == name).sum() < FEWEST]
    parts = [f"problems: {band_counts(band)}"]
    if few:
        parts.append(f"too few to find anything in {', '.join(few)} ({FEWEST} are needed)")
    end = f"(easy >= {used['easy']:g}, hard <= {used['hard']:g}{thirds if 'quantiles' in used else ''})"
    return bands, "; ".join([*parts, found_how(used)]) + f" {end}"
