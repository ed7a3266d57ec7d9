"""What attribution found: shares of samples, effects of kinds and problems, and how far both can be believed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.files import replacing, write_json
from tsae.errors import TsaeError

_TABLES = ("targets", "samples", "groups", "problems", "segments")


@dataclass(frozen=True)
class Attribution:
    """Which samples moved what.

    Two questions have two answers. *Share*: who did it; shares of all samples add up to what happened. *Effect*: what
    would have been without it, by simulation; effects do not add up. docs/attribution.md tells when to use which.
    """

    targets: pd.DataFrame
    """One row a target: target, before, after, realised (after − before), simulated (the same with all samples, by
    simulation), remainder (what shares leave unexplained, as a share of realised), flagged."""
    samples: pd.DataFrame
    """One row a sample and target: trajectory (row of the rollouts), step, target, share in the target's units, and
    the baselines product_base and product_path (plain inner products, TracIn)."""
    groups: pd.DataFrame
    """One row a kind of samples and target: group, n, target, share (the sum of theirs), without (what the target's
    change would have been without them), effect (realised change − without, both simulated), alone (the change with
    them only)."""
    problems: pd.DataFrame
    """One row a problem and target: problem_id, n, target, share, effect (Banzhaf value: the mean of what the problem
    adds to random halves of the others), low, high (95 % interval over the simulated halves). Empty without subsets."""
    segments: pd.DataFrame
    """One row a target and stretch between checkpoints; see `tsae.attribution.shares.Shares`."""
    info: dict[str, Any]
    """recipe, config, fingerprint of the rollouts, fit (R² of the problems' effects on halves left out, by target), and
    notes: what was assumed or left out."""

    def of_target(self, target: str, n: int = 10) -> pd.DataFrame:
        """The samples with the largest shares for and against a target, n each.

        Raises:
            TsaeError: for an unknown target.
        """
        mine = self._of(self.samples, target).sort_values("share", ascending=False)
        return pd.concat([mine.head(n), mine.tail(n)]).drop_duplicates("trajectory")

    def of_sample(self, trajectory: int) -> pd.DataFrame:
        """What a sample did to every target: a row each, the largest part of its realised change first.

        Raises:
            TsaeError: where no step was trained on it.
        """
        mine = self.samples[self.samples.trajectory == trajectory].merge(self.targets[["target", "realised"]])
        if mine.empty:
            raise TsaeError(f"no step was trained on trajectory {trajectory}", where="of_sample")
        part = (mine.share / mine.realised.abs().clip(lower=1e-30)).abs()
        return mine.assign(part=part).sort_values("part", ascending=False, ignore_index=True)

    def _of(self, table: pd.DataFrame, target: str) -> pd.DataFrame:
        if target not in set(self.targets.target):
            raise TsaeError(f"no target {target!r}; there are {', '.join(self.targets.target)}", where="Attribution")
        return table[table.target == target]

    def save(self, folder: str | Path) -> Path:
        """Write the tables as Parquet, and info as attribution.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _TABLES:
            with replacing(folder / f"{name}.parquet") as partial:
                getattr(self, name).to_parquet(partial, index=False)
        write_json(folder / "attribution.json", self.info)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Attribution:
        """Read what `save` wrote.

        Raises:
            TsaeError: where the folder holds no attribution.
        """
        folder = Path(folder)
        missing = [
            name for name in ("attribution.json", *(f"{t}.parquet" for t in _TABLES)) if not (folder / name).is_file()
        ]
        if missing:
            raise TsaeError(f"holds no {missing[0]}", where=folder, fix="Give a folder that `tsae attribute` wrote.")
        tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in _TABLES}
        return cls(**tables, info=json.loads((folder / "attribution.json").read_text(encoding="utf-8")))

    def __repr__(self) -> str:
        return (
            f"Attribution({len(self.targets)} targets, {self.samples.trajectory.nunique():,} samples, "
            f"{self.groups.group.nunique()} kinds)"
        )


def banzhaf(
    kept: np.ndarray, changes: np.ndarray, *, draws: int = 200, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Effects of units from what random halves of them gave (Wang & Jia 2023: a regression of the subsets' values).

    Args:
        kept: (K, n) bool, which units a subset kept.
        changes: (K, n_targets).
        draws: of the bootstrap over subsets.
        seed: of the bootstrap, and of the parts of the check.

    Returns:
        effects (n, n_targets); their 2.5 and 97.5 percentiles; and R² (n_targets,) on fifths of the subsets that the
        regression has not seen.
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
    r2 = 1 - (left**2).sum(0) / np.where(spread > 0, spread, 1.0)
    return whole[1:], *np.quantile(drawn, [0.025, 0.975], axis=0), np.where(spread > 0, r2, np.nan)
