"""Tables of an `Attribution`, from shares and replayed or simulated trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tsae.attribution.replay.sweep import Shares
from tsae.attribution.sample_kinds import band_of
from tsae.rollouts.table import Rollouts

TEXTS = 20
"""Samples for and against each target whose texts are kept, so that a page needs no log."""


def target_table(split: Shares, flag: float) -> pd.DataFrame:
    remainder = split.remainder / np.where(split.realised == 0, np.nan, split.realised)
    return pd.DataFrame(
        {
            "target": split.targets,
            "before": split.before,
            "after": split.after,
            "realised": split.realised,
            "predicted": split.predicted,
            "decay": split.decay,
            "remainder": remainder,
            "flagged": ~(np.abs(remainder) <= flag),
        }
    )


def sample_table(split: Shares) -> pd.DataFrame:
    """(n · n_targets) rows."""
    n, names = len(split.rows), split.targets
    return pd.DataFrame(
        {
            "trajectory": np.repeat(split.rows, len(names)),
            "step": np.repeat(split.steps, len(names)),
            "target": np.tile(names, n),
            "share": split.shares.ravel(),
            "policy": split.policy.ravel(),
            "kl": split.kl.ravel(),
        }
    )


def share_of_rows(split: Shares, n: int) -> np.ndarray:
    """(n, n_targets) share of every row of the rollouts, over all steps that used it."""
    found = np.zeros((n, len(split.targets)))
    np.add.at(found, split.rows, split.shares)
    return found


def fact_table(split: Shares, rollouts: Rollouts, shown: Sequence[int]) -> pd.DataFrame:
    """Rows of the samples, with texts of those that are shown and of the largest shares."""
    rows, first = np.unique(split.rows, return_index=True)
    of_rows, told = share_of_rows(split, len(rollouts))[rows], set(shown)
    for values in of_rows.T:
        order = np.argsort(values, kind="stable")
        told |= set(rows[[*order[:TEXTS], *order[-TEXTS:]]].tolist())
    frame = rollouts.frame.iloc[rows]
    texts = {name: frame[name].astype(object) for name in ("problem_id", "outcome")}
    mine = np.isin(rows, list(told))
    texts |= {name: frame[name].astype(object).where(mine) for name in ("prompt", "response")}
    columns = {name: values.where(values.notna(), None).to_numpy() for name, values in texts.items()}
    columns |= {name: frame[name].to_numpy(dtype=float) for name in ("reward", "advantage")}
    band = pd.Series(band_of(rollouts)[rows], dtype=object)
    return pd.DataFrame(
        {
            "trajectory": rows,
            "step": split.steps[first],
            **columns,
            "band": band.where(band.notna(), None).to_numpy(),
            "length": rollouts.n_sampled[rows],
        }
    )


def group_table(
    kinds: Mapping[str, tuple[str, np.ndarray]],
    found: Mapping[tuple[str, str], tuple[np.ndarray, str]],
    whole: Mapping[str, np.ndarray],
    split: Shares,
) -> pd.DataFrame:
    """One row a group and target.

    Args:
        kinds: (kind, mask of trajectories) by the name of the group.
        found: (n_targets,) changes of trainings and how they were found, by ("without" or "alone", group).
        whole: (n_targets,) change with all samples, by how.
        split: the shares.
    """
    names = ["kind", "group", "n", "target", "share", "without", "effect", "alone", "how"]
    nothing, tables = np.full(len(split.targets), np.nan), []
    for name, (kind, mask) in kinds.items():
        without, how = found.get(("without", name), (nothing, ""))
        alone = found.get(("alone", name), (nothing, ""))[0]
        columns = {
            "share": split.shares[mask[split.rows]].sum(0),
            "without": without,
            "effect": whole.get(how, nothing) - without,
            "alone": alone,
            "how": how,
        }
        first = {"kind": kind, "group": name, "n": int(mask.sum()), "target": split.targets}
        tables.append(pd.DataFrame({**first, **columns}))
    return pd.concat(tables, ignore_index=True)[names] if tables else pd.DataFrame(columns=names)
