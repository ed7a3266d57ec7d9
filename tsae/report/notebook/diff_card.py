"""A feature diff in a notebook: its largest shifts with a small line by band and along the steps, sorted by a click."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.notebook.cards import Spark, card
from tsae.report.story.facts import bands_of

_ROWS = 100
_KEPT = ["checkpoint", "feature", "group", "responds_to"]
_NUMBERS = ["delta", "delta_low", "delta_high", "q", "survives_length", "survives_position", "survives_token"]


def diff_card(diff: FeatureDiff) -> str:
    """See `tsae.base.views.Views.diff_card`."""
    drawn = diff.contrasts[(diff.contrasts.band == "all") & (diff.contrasts.outcome == "all")]
    drawn = drawn[["kind", "checkpoint", "part", "n_problems", "n_tested", "n_discoveries", "n_null"]]
    top = diff.top(_ROWS)
    lines = {"by_band": list(_by_band(diff, top)), "by_step": list(_by_step(diff, top))}
    of_each = pd.DataFrame({name: line for name, line in lines.items() if line}, index=top.index, dtype=object)
    shown = pd.concat([top[_KEPT], of_each, top[_NUMBERS]], axis=1)
    return card(
        "FeatureDiff",
        {"features": len(diff.features), "base": diff.base, "compared": diff.checkpoints, "q ≤": f"{diff.q:g}"},
        ("largest shifts (delta: standard deviations over base trajectories)", shown),
        ("contrasts over all problems", drawn),
        ("reconstruction per reader", pd.DataFrame(diff.info["readers"])[["id", "fve", "flagged"]]),
        note="Correlational: not causally tested. See diff.plot, diff.feature(i).show() and diff.to_html(path).",
        sortable=_ROWS,
    )


def by_band(effects: pd.DataFrame, chosen: pd.DataFrame, bands: list[str]) -> Iterator[Spark]:
    """Δ of chosen effects over all problems, in the order of the bands, for rows of `FeatureDiff.table`."""
    keys = ["kind", "checkpoint", "part", "feature", "band"]
    known: dict[Any, float] = effects[effects.outcome == "all"].set_index(keys).delta.to_dict()
    for row in chosen.itertuples():
        of = (row.kind, row.checkpoint, row.part, row.feature)
        yield Spark(bands, [known.get((*of, band), np.nan) for band in bands])


def _by_band(diff: FeatureDiff, top: pd.DataFrame) -> Iterator[Spark]:
    bands = bands_of(diff)
    if len(bands) > 1:
        yield from by_band(diff.shifts[diff.shifts.feature.isin(top.feature)], top, bands)


def _by_step(diff: FeatureDiff, top: pd.DataFrame) -> Iterator[Spark]:
    if diff.dynamics is None or diff.dynamics.empty:
        return
    along = diff.dynamics[diff.dynamics.feature.isin(top.feature)].sort_values("step")
    known = {key: (rows.step.tolist(), rows.delta.tolist()) for key, rows in along.groupby(["run", "feature"])}
    for row in top.itertuples():
        steps, deltas = known.get((row.run, row.feature), ([], []))
        yield Spark([f"step {step}" for step in steps], deltas)
