"""Difficulty along training: pass rates of every problem and checkpoint, bands along runs, pass@k, and groups.

A band belongs to a problem and a model, so training moves problems from band to band. `difficulty` measures where every
checkpoint finds every problem, and which moves go beyond chance.

`band_migration` measures how much of that is chance. With eight responses to a problem its measured pass rate jumps, so
problems change bands even if nothing changed. The null hypothesis: both checkpoints solve a problem equally often. Then
their outcomes could have come in any order, and dealing the outcomes of every problem anew to both sides shows how many
changes chance makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base import display
from tsae.base.artefact import Kind, versions, write_artefact
from tsae.base.statistics import change_interval, mean_interval
from tsae.base.table_export import Tables, table_files
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.bands import bands_info, find_bands, halves, pass_rates
from tsae.rollouts.config import BandCutoffs, BandQuantiles, DifficultyConfig
from tsae.rollouts.rewards import group_table
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_TABLES = ("rates", "migration", "pass_at_k", "groups")
DIFFICULTY = Kind("difficulty", 1, "difficulty.json", "Make it with `tsae rollouts difficulty`.")


@dataclass(frozen=True)
class Difficulty(Tables):
    """Where every policy finds every problem."""

    rates: pd.DataFrame
    """One row a policy and problem: n, successes, pass_rate with its interval low, high; band, and sure: whether the
    whole interval lies in that band."""
    migration: pd.DataFrame
    """See `tsae.rollouts.difficulty.band_migration`; with the run."""
    pass_at_k: pd.DataFrame
    """See `tsae.rollouts.difficulty`; bands are those of the problems before training."""
    groups: pd.DataFrame
    """See `tsae.rollouts.rewards.group_table`."""
    paths: dict[str, list[str]] = field(default_factory=dict)
    """Policies in the order of training, by run."""
    info: dict[str, Any] = field(default_factory=dict)
    """config, reference, cut-offs, where bands were measured, hash of the rollouts, versions."""

    def bands(self) -> pd.DataFrame:
        """Numbers of problems by policy and band; sure counts those whose whole interval lies in their band."""
        counts = self.rates.pivot_table(index="policy", columns="band", values="n", aggfunc="size", fill_value=0)
        table = counts.reindex(index=list(dict.fromkeys(self.rates.policy)), columns=list(BANDS), fill_value=0)
        table["sure"] = self.rates.groupby("policy").sure.sum()
        table["mean_pass_rate"] = self.rates.groupby("policy").pass_rate.mean()
        return table.rename_axis(columns=None)

    def save(self, folder: str | Path) -> Path:
        """Write the tables as Parquet, difficulty.json, and the page difficulty.html."""
        files: dict[str, Callable[[Path], object]] = {"difficulty.html": self.to_html}
        files |= table_files({name: getattr(self, name) for name in _TABLES})
        content = {**self.info, "paths": self.paths}
        return write_artefact(folder, DIFFICULTY, content, files, inputs={"rollouts": self.info.get("rollouts")})

    def to_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML file that opens with no network."""
        return display.write_difficulty(self, path, title=title)

    def _repr_html_(self) -> str:
        kinds = self.groups.groupby(["policy", "kind"], sort=False).size().unstack(fill_value=0).reset_index()
        return display.card(
            "Difficulty",
            {"reference": self.info["reference"], "problems": self.rates.problem_id.nunique()},
            ("problems by band; sure: the whole interval lies in the band", self.bands().reset_index()),
            ("groups by what their rewards teach", kinds),
            note="difficulty.save(folder) writes the page with bands that move, pass@k and groups.",
        )

    def __str__(self) -> str:
        return display.difficulty_text(self)


def difficulty(
    rollouts: Rollouts,
    config: DifficultyConfig | None = None,
    *,
    series: CheckpointSeries | None = None,
    reference: str | None = None,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
) -> Difficulty:
    """Measure how hard every problem is for every policy, and how that moved.

    Args:
        rollouts: of several policies; trajectories of unknown outcome are left out. Its bands sort pass@k and groups;
            without bands, cross-fitted ones do (`tsae.rollouts.bands.find_bands`).
        config: defaults of `DifficultyConfig`.
        series: names runs and their steps; without it all policies in their order of appearance are one run.
        reference: the policy whose pass rates set quantiles and bands and that others are compared with; by default
            the base of the series if it sampled rollouts, else the first policy.
        cutoffs: pass rates, or shares of the reference's problems, applied to every policy alike.

    Raises:
        TsaeError: where the reference sampled nothing of known outcome.
    """
    config = config or DifficultyConfig()
    policies, where = rollouts.policies, rollouts.origin
    if reference is None:
        reference = series.base.id if series is not None and series.base.id in policies else policies[0]
    measured = pass_rates(rollouts.frame, where, reference)
    used = (cutoffs or BandCutoffs()).cutoffs(measured.pass_rate.to_numpy())
    if rollouts.frame.band.isna().all():
        rollouts = rollouts.in_bands(find_bands(rollouts.frame, where, reference, used, partly=True))
    frame = rollouts.frame[rollouts.frame.outcome != "unknown"]
    parts = []
    for policy in policies:
        if (frame.policy == policy).any():
            part = pass_rates(frame, where, policy, config.confidence, config.interval).reset_index()
            part.insert(0, "policy", policy)
            parts.append(part)
    rates = pd.concat(parts, ignore_index=True)
    rates["band"] = used.band(rates.pass_rate.to_numpy())
    low, high = rates.low.to_numpy(), rates.high.to_numpy()
    rates["sure"] = (used.band(low) == used.band(high)) & np.isfinite(low) & np.isfinite(high)
    half = _halves(rollouts)[frame.index]
    sides = (frame.outcome == "success").groupby([frame.policy, frame.problem_id, frame.band, half], sort=False)
    banded = pd.DataFrame({"n": sides.size(), "successes": sides.sum()}).reset_index()
    ways = paths(rollouts, series)
    migration = [
        band_migration(rates, path, used, n_draws=config.n_draws, seed=config.seed).assign(run=run)
        for run, path in ways.items()
    ]
    if series is not None and not migration:
        what = f"no run of the series sampled these rollouts; their policies are {', '.join(policies)}"
        raise TsaeError(what, where=where, fix="Give the series that the policies are of, or none.")
    return Difficulty(
        rates=rates,
        migration=pd.concat(migration, ignore_index=True),
        pass_at_k=pass_at_k(rates, banded, reference=reference, k=config.k, confidence=config.confidence),
        groups=group_table(rollouts.frame, config.advantage),
        paths=ways,
        info={
            "config": asdict(config),
            "reference": reference,
            "cutoffs": asdict(used),
            "quantiles": asdict(cutoffs) if isinstance(cutoffs, BandQuantiles) else None,
            "bands": bands_info(rollouts.info, where),
            "rollouts": rollouts.fingerprint,
            "versions": versions(),
        },
    )


def _halves(rollouts: Rollouts) -> pd.Series:
    """Half of every trajectory whose band was measured on responses of the other half; 0 for all others.

    The halves are those of `tsae.rollouts.bands.find_bands`.
    """
    frame, bands = rollouts.frame, bands_info(rollouts.info, rollouts.origin) or {}
    if not bands.get("cross_fitted"):
        return pd.Series(0, index=frame.index, name="half")
    measured = bands["reference"]
    half = halves(frame, measured, shuffled=bands.get("shuffled", False)).rename("half")
    return half if measured is None else half.where(frame.policy == measured, 0)


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
    # In the order of `BANDS`.
    first, second = ((rate < cutoffs.easy) * 1 + (rate <= cutoffs.hard) for rate in (before, after))
    cell = 3 * first + second
    draw = 9 * np.arange(len(cell))[:, None]
    return np.bincount((cell + draw).ravel(), minlength=9 * len(cell)).reshape(-1, 3, 3)


_PASS_COLUMNS = [
    "policy", "band", "k", "pass_at_k", "low", "high", "n_problems", "n_left_out", "difference", "difference_low",
    "difference_high", "n_paired",
]  # fmt: skip


def estimate(n: np.ndarray, successes: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of every problem (Chen et al. 2021, arXiv 2107.03374): 1 − C(n − c, k) / C(n, k).

    Args:
        n: (n_problems,) responses.
        successes: (n_problems,) right ones.
        k: responses drawn.

    Returns:
        (n_problems,) float64; NaN where there are fewer than k responses.
    """
    found = np.full(len(n), np.nan)
    for total, right in {(int(a), int(c)) for a, c in zip(n, successes, strict=True) if a >= k}:
        # 1 − ∏ (1 − k / i) over i = n − c + 1 … n, which never overflows; a factor is 0 where every draw succeeds.
        missed = np.prod(1 - k / np.arange(total - right + 1, total + 1)) if total - right >= k else 0.0
        found[(n == total) & (successes == right)] = 1 - missed
    return found


def pass_at_k(
    rates: pd.DataFrame, banded: pd.DataFrame, *, reference: str, k: Sequence[int] = (), confidence: float = 0.95
) -> pd.DataFrame:
    """pass@k by policy and band, with intervals over problems (`tsae.base.statistics`).

    Args:
        rates: of `difficulty`: n and successes of every policy and problem.
        banded: the same, with a column band, of the trajectories that are in their problem's band. A problem may have
            several rows, one a half: its pass@k is their mean. Where each half chose the other's band, responses of
            both halves must not be drawn together: halves that agree are rarely all right or all wrong in the middle.
        reference: the policy that others are compared with, problem by problem.
        k: by default powers of two up to the median number of responses to a problem.
        confidence: of the intervals.

    Returns:
        tidy: policy, band ("all" and every band present), k, pass_at_k, low, high, n_problems, n_left_out (problems
        with fewer than k responses), and difference, difference_low, difference_high against the reference on the
        n_paired problems that both have. The reference itself has NaN; fewer than 8 problems have no interval.
    """
    powers = [2**i for i in range(max(int(rates.n.median()), 1).bit_length())]
    policies = list(dict.fromkeys(rates.policy))
    rows: list[dict[str, Any]] = []
    for size in sorted(set(k)) or powers:
        for name in ("all", *(b for b in BANDS if len(banded) and (banded.band == b).any())):
            mine = rates if name == "all" else banded[banded.band == name]
            inside = (
                mine.assign(value=estimate(mine.n.to_numpy(), mine.successes.to_numpy(), size))
                .groupby(["problem_id", "policy"])
                .value.mean()
                .unstack()
                .reindex(columns=policies)
                .sort_index()
            )
            for policy in policies:
                values = inside[policy].dropna().to_numpy()
                if not len(values):
                    continue
                low, high = mean_interval(values, confidence)
                row = {"policy": policy, "band": name, "k": size, "pass_at_k": values.mean(), "low": low, "high": high}
                asked = mine.problem_id[mine.policy == policy].nunique()
                row |= {"n_problems": len(values), "n_left_out": asked - len(values)}
                paired = (inside[policy] - inside[reference]).dropna().to_numpy()
                row["n_paired"] = 0 if policy == reference else len(paired)
                if row["n_paired"]:
                    row["difference"] = paired.mean()
                    row["difference_low"], row["difference_high"] = change_interval(paired, confidence)
                rows.append(row)
    return pd.DataFrame(rows, columns=_PASS_COLUMNS)
