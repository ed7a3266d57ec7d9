"""Where training wrote: how far every checkpoint is from the base, and which tensors moved furthest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.checkpoints.drift import drift_by
from tsae.report.text import percent

_MOST = 3


@dataclass(frozen=True)
class Written:
    """One checkpoint against the base."""

    checkpoint: str
    relative: str
    """‖W − W₀‖ / ‖W₀‖ of all weights as one."""
    changed: str
    """Per cent of weights."""
    rank: str
    """Median stable rank of the updates."""
    most: str
    """The tensors that moved furthest for their size."""


def written(drift: pd.DataFrame) -> Iterator[Written]:
    """Of every checkpoint."""
    for row in drift_by(drift, []).itertuples():
        mine = drift[drift.checkpoint == row.checkpoint]
        rank = mine.stable_rank.median()
        # Norms and biases, which are small, are left out.
        matrices = mine[mine.spectral.notna() | (mine.n_weights >= mine.n_weights.max() / 100)]
        most = matrices.sort_values("relative", ascending=False, kind="stable").head(_MOST)
        yield Written(
            checkpoint=str(row.checkpoint),
            relative=relative_text(row.relative),
            changed="–" if pd.isna(row.changed) else f"{percent(row.changed)} %",
            rank="–" if math.isnan(rank) else f"{rank:.1f}",
            most="; ".join(f"{_place(tensor)} {relative_text(tensor.relative)}" for tensor in most.itertuples()),
        )


def last_of_runs(drift: pd.DataFrame) -> list[str]:
    """The last checkpoint of every run."""
    order = drift.drop_duplicates("checkpoint").reset_index(drop=True)
    return order.loc[order.groupby(order.run.fillna(""), sort=False).step.idxmax()].checkpoint.tolist()


def relative_text(value: float) -> str:
    """A share of a norm in per cent."""
    return "–" if math.isnan(value) else f"{100 * value:.3g} %"


def _place(row: Any) -> str:
    return row.module if pd.isna(row.layer) else f"{row.layer}.{row.module}"
