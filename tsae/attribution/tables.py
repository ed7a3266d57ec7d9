"""Tables of an `Attribution`, from shares and simulated runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from tsae.attribution.credit.banzhaf import Banzhaf
from tsae.attribution.credit.replays import Agreement
from tsae.attribution.credit.shares import Shares
from tsae.rollouts.advantages import group_names
from tsae.rollouts.table import Rollouts

TEXTS = 20
"""Samples for and against each target whose texts are kept, so that a page needs no log."""


def target_table(
    split: Shares, before: np.ndarray, whole: np.ndarray, r2: np.ndarray, agreement: Agreement | None, flag: float
) -> pd.DataFrame:
    unknown = np.full(len(split.targets), np.nan)
    remainder = split.remainder / np.where(split.realised == 0, np.nan, split.realised)
    return pd.DataFrame(
        {
            "target": split.targets,
            "before": before,
            "after": before + split.realised,
            "realised": split.realised,
            "simulated": whole,
            "decay": split.decay,
            "remainder": remainder,
            "flagged": ~(np.abs(remainder) <= flag),
            "r2": r2,
            "validated": unknown if agreement is None else agreement.rank_correlation,
            "validated_error": unknown if agreement is None else agreement.error,
        }
    )


def segment_table(split: Shares, begin: int, flag: float) -> pd.DataFrame:
    """Segments with the run's own steps. A segment that hardly moved the target is compared with the mean segment."""
    table = split.segments.assign(first=split.segments["first"] + begin, last=split.segments["last"] + begin)
    n = table.groupby("target").target.transform("size")
    usual = table.groupby("target").realised.transform("sum").abs() / n
    return table.assign(flagged=~(table.remainder.abs() <= flag * np.maximum(table.realised.abs(), usual)))


def sample_table(split: Shares, covariances: np.ndarray, singles: Mapping[int, np.ndarray], begin: int) -> pd.DataFrame:
    """(n · n_targets) rows.

    Args:
        split: the shares.
        covariances: (n, n_targets) in the order of the shares' rows.
        singles: (n_targets,) effects of leaving a row of the rollouts out, by row.
        begin: steps before the first.
    """
    n, names = len(split.rows), split.targets
    effects = np.full((n, len(names)), np.nan)
    place = {row: i for i, row in enumerate(split.rows.tolist())}
    for row, effect in singles.items():
        effects[place[row]] = effect
    return pd.DataFrame(
        {
            "trajectory": np.repeat(split.rows, len(names)),
            "step": np.repeat(split.steps + begin, len(names)),
            "target": np.tile(names, n),
            "share": split.shares.ravel(),
            "effect": effects.ravel(),
            "product_base": split.plain["base"].ravel(),
            "product_path": split.plain["path"].ravel(),
            "covariance": covariances.ravel(),
        }
    )


def strongest(split: Shares, n: int) -> list[int]:
    """Rows of the rollouts with the largest shares, n for and n against each target."""
    found: dict[int, None] = {}
    for values in split.shares.T if n else ():
        order = np.argsort(values, kind="stable")
        ends = [*order[:n][values[order[:n]] < 0], *order[-n:][values[order[-n:]] > 0]]
        found |= dict.fromkeys(int(split.rows[i]) for i in ends)
    return list(found)


def fact_table(split: Shares, rollouts: Rollouts, begin: int) -> pd.DataFrame:
    frame = rollouts.frame.iloc[split.rows]
    texts = {name: frame[name].astype(object) for name in ("problem_id", "band", "outcome")}
    told = np.isin(split.rows, strongest(split, TEXTS))
    texts |= {name: frame[name].astype(object).where(told) for name in ("prompt", "response")}
    columns = {name: values.where(values.notna(), None).to_numpy() for name, values in texts.items()}
    columns |= {name: frame[name].to_numpy(dtype=float) for name in ("reward", "advantage")}
    return pd.DataFrame(
        {
            "trajectory": split.rows,
            "step": split.steps + begin,
            **columns,
            "length": frame.response_length.to_numpy(),
            "gradient_norm": split.norms,
        }
    )


def covariances(shown: np.ndarray, rollouts: Rollouts, rows: np.ndarray) -> np.ndarray:
    """(n, n_targets) every sample's summand of the covariance with advantages within prompt groups.

    Args:
        shown: (n, n_targets) what each sample shows of the targets; NaN counts as the group's mean.
        rollouts: of the log.
        rows: (n,) of the rollouts.
    """
    group = np.unique(group_names(rollouts.frame)[rows], return_inverse=True)[1]
    advantage = rollouts.frame.advantage.to_numpy(dtype=float)[rows]
    found = np.zeros(shown.shape)
    for j, values in enumerate(shown.T):
        known = np.isfinite(values)
        n = np.maximum(np.bincount(group, weights=known), 1)
        mean = np.bincount(group, weights=np.where(known, values, 0.0)) / n
        found[:, j] = np.where(known, advantage * (values - mean[group]), 0.0)
    return found


def group_table(
    kinds: Mapping[str, tuple[str, np.ndarray]], changes: np.ndarray, whole: np.ndarray, split: Shares
) -> pd.DataFrame:
    """Rows of groups: `changes` are those without each, then those of each alone, (2 · n_groups, n_targets)."""
    tables = []
    for i, (name, (kind, mask)) in enumerate(kinds.items()):
        without, alone = changes[i], changes[len(kinds) + i]
        columns = {
            "share": split.shares[mask[split.rows]].sum(0),
            "without": without,
            "effect": whole - without,
            "alone": alone,
        }
        first = {"kind": kind, "group": name, "n": int(mask.sum()), "target": split.targets}
        tables.append(pd.DataFrame({**first, **columns}))
    names = ["kind", "group", "n", "target", "share", "without", "effect", "alone"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)


def problem_table(names: np.ndarray, problem: np.ndarray, found: Banzhaf | None, split: Shares) -> pd.DataFrame:
    """Rows of problems; `problem` are the names of all rows of the rollouts."""
    if found is None:
        nothing = {name: pd.Series(dtype=float) for name in ("share", "effect", "low", "high")}
        texts = {"problem_id": pd.Series(dtype=object), "n": pd.Series(dtype=int), "target": pd.Series(dtype=object)}
        return pd.DataFrame({**texts, **nothing})
    tables = []
    for i, name in enumerate(names):
        mine = problem[split.rows] == name
        numbers = {"effect": found.effects[i], "low": found.low[i], "high": found.high[i]}
        columns = {"n": int(mine.sum()), "target": split.targets, "share": split.shares[mine].sum(0), **numbers}
        tables.append(pd.DataFrame({"problem_id": name, **columns}))
    return pd.concat(tables, ignore_index=True)
