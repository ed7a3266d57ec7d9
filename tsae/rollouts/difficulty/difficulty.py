"""Difficulty along training: pass rates of every problem and checkpoint, bands along runs, pass@k, and groups.

A band belongs to a problem and a model, so training moves problems from band to band. `difficulty` measures where every
checkpoint finds every problem, and which moves go beyond chance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.files import as_path, write_json
from tsae.base.provenance import versions
from tsae.base.table_export import Tables, write_table
from tsae.base.views import views
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.advantages import group_table
from tsae.rollouts.bands import bands_info, find_bands, halves, pass_rates
from tsae.rollouts.config import BandCutoffs, BandQuantiles, DifficultyConfig
from tsae.rollouts.difficulty.migration import band_migration, paths
from tsae.rollouts.difficulty.pass_at_k import pass_at_k
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_TABLES = ("rates", "migration", "pass_at_k", "groups")


@dataclass(frozen=True)
class Difficulty(Tables):
    """Where every policy finds every problem."""

    rates: pd.DataFrame
    """One row a policy and problem: n, successes, pass_rate with its interval low, high; band, and sure: whether the
    whole interval lies in that band."""
    migration: pd.DataFrame
    """See `tsae.rollouts.difficulty.migration.band_migration`; with the run."""
    pass_at_k: pd.DataFrame
    """See `tsae.rollouts.difficulty.pass_at_k.pass_at_k`; bands are those of the problems before training."""
    groups: pd.DataFrame
    """See `tsae.rollouts.advantages.group_table`."""
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
        folder = as_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _TABLES:
            write_table(folder / f"{name}.parquet", getattr(self, name))
        self.to_html(folder / "difficulty.html")
        write_json(folder / "difficulty.json", {**self.info, "paths": self.paths})
        return folder

    def to_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML file that opens with no network."""
        return views().write_difficulty(self, path, title=title)

    def _repr_html_(self) -> str:
        kinds = self.groups.groupby(["policy", "kind"], sort=False).size().unstack(fill_value=0).reset_index()
        return views().card(
            "Difficulty",
            {"reference": self.info["reference"], "problems": self.rates.problem_id.nunique()},
            ("problems by band; sure: the whole interval lies in the band", self.bands().reset_index()),
            ("groups by what their rewards teach", kinds),
            note="difficulty.save(folder) writes the page with bands that move, pass@k and groups.",
        )

    def __str__(self) -> str:
        return views().difficulty_text(self)


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
    half = halves(frame, measured).rename("half")
    return half if measured is None else half.where(frame.policy == measured, 0)
