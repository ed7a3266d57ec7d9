"""What stands beside the shifts: predictions, what happened along the steps of runs, and causal tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.diff.dynamics import FLAT, KINDS
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts


@dataclass(frozen=True)
class Steps:
    """What happened along the steps of one run."""

    run: str
    steps: tuple[int, ...]
    last: pd.DataFrame
    """Rows of `FeatureDiff.dynamics` at the last step."""
    kinds: dict[str, int]
    """Features of every kind."""


def along_steps(diff: FeatureDiff) -> list[Steps]:
    """Of every run that was followed."""
    if diff.dynamics is None or diff.dynamics.empty:
        return []
    found = []
    for run, rows in diff.dynamics.groupby("run", sort=False):
        last = rows[rows.step == rows.step.max()]
        kinds = last.kind.value_counts().reindex(KINDS, fill_value=0)
        found.append(Steps(str(run), tuple(sorted(rows.step.unique())), last, kinds.to_dict()))
    return found


def step_features(diff: FeatureDiff, n: int = 6) -> list[int]:
    """Features to draw along steps: the largest shifts in standard deviations, of every run in turn."""
    if diff.dynamics is None or diff.dynamics.empty:
        return []
    queues = []
    for _, rows in diff.dynamics[diff.dynamics.kind != FLAT].groupby("run", sort=False):
        size = rows.groupby("feature").delta.agg(lambda d: d.abs().max()).sort_values(ascending=False, kind="stable")
        queues.append([int(feature) for feature in size.index[:n]])
    return facts.in_turn(queues, n)


def predictions(diff: FeatureDiff) -> pd.DataFrame:
    """Predicted beside realised shifts, of the last step of every run."""
    table = diff.predicted
    if table is None or table.empty:
        return pd.DataFrame(columns=["checkpoint", "part", "gradient", "predicted_on", "realised_on", "note"])
    return table[table.checkpoint.isin(facts.final_checkpoints(diff))]


def tests(diff: FeatureDiff) -> list[dict[str, Any]]:
    """Records of the interventions that tested features causally."""
    return diff.info.get("causally_tested") or []
