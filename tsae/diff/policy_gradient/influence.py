"""The influence of every training sample on chosen features, as a table.

A step of plain SGD with learning rate η on the policy-gradient loss of a batch moves the weights by η Σ_i g_i, with

    g_i = w_i A_i Σ_t ∇ log π(y_it)            w_i by the loss's normalisation, over the response tokens of sample i

It moves a feature's mean F by η Σ_i ⟨∇F, g_i⟩ + O(η²). The influence of sample i on the feature is ⟨∇F, g_i⟩: the
change of its mean per unit of learning rate. F is the mean of the feature's activation f(τ) on response tokens, over
fixed trajectories τ in which problems count alike. It depends on the weights in two ways, so ∇F has two parts:

    representation   E_τ[∇f(τ)]               the model reads the same trajectories differently
    policy           E_τ[f(τ) ∇ log π(τ)]     the model writes other trajectories (the score function; subtracting
                                              the mean f of the problem's other responses leaves it unbiased)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tsae.base.files import as_path, reading
from tsae.base.filters import several
from tsae.base.seal import read_whole, write_whole
from tsae.base.table_export import Tables, write_table
from tsae.base.views import views
from tsae.errors import TsaeError

_FILES = ("influence.json", "influence.parquet")


@dataclass(frozen=True)
class Influence(Tables):
    """The first-order influence of every training sample on every chosen feature."""

    table: pd.DataFrame
    """One row a trajectory and feature:

    trajectory      row of the training samples
    problem_id, policy, band, outcome, advantage, response_length
    feature         index
    representation, policy_part, total  change of the feature's mean activation per unit of learning rate
    """
    info: dict[str, Any] = field(default_factory=dict)
    """config, checkpoint, sae, rollouts, and per feature its mean over the fixed trajectories."""

    def __repr__(self) -> str:
        n, m = self.table.trajectory.nunique(), self.table.feature.nunique()
        return f"Influence({n:,} samples on {m:,} features of {self.info['checkpoint']})"

    def _repr_html_(self) -> str:
        facts = {"samples": self.table.trajectory.nunique(), "checkpoint": self.info["checkpoint"]}
        caption = "change of the feature's mean activation per unit of learning rate, summed over samples"
        return views().card("Influence", facts, (caption, self.by("band", "outcome")))

    def by(self, *columns: str) -> pd.DataFrame:
        """Sums over the samples of every feature and value of the columns, such as band and outcome."""
        unknown = [name for name in columns if name not in self.table.columns]
        if unknown:
            raise TsaeError(f"no column {unknown[0]!r}", where="Influence.by", fix=", ".join(self.table.columns))
        keys = ["feature", *columns]
        sums = self.table.groupby(keys, dropna=False, sort=True)
        found = sums[["representation", "policy_part", "total"]].sum()
        found["n_samples"] = sums.trajectory.nunique()
        return found.reset_index()

    def top(self, feature: int | Sequence[int], n: int = 10) -> pd.DataFrame:
        """The n samples with the largest |total| on a feature, or on one of several."""
        for one in several(feature):
            if not (self.table.feature == one).any():
                raise TsaeError(f"feature {one} was not asked for", where="Influence.top")
        found = self.table[self.table.feature.isin(several(feature))]
        order = found.total.abs().sort_values(ascending=False, kind="stable").index
        return found.loc[order].head(n).reset_index(drop=True)

    def save(self, folder: str | Path) -> Path:
        """Write influence.parquet, and influence.json last."""
        write = partial(write_table, table=self.table)
        return write_whole(folder, "influence.json", self.info, {"influence.parquet": write})

    @classmethod
    def load(cls, folder: str | Path) -> Influence:
        """Read a folder that `save` wrote."""
        folder = as_path(folder)
        fix = "Make it again with `tsae influence`."
        info = read_whole(folder, _FILES, fix, "Make it with `tsae influence`.")
        with reading(folder / "influence.parquet", fix):
            return cls(pd.read_parquet(folder / "influence.parquet"), info)
