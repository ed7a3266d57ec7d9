"""The null for changed weights in words: what noise as large as a run's update moves, beside what the run moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsae.report.text import count, listed, number, visible

NOT_RUN = "null for changed weights: not run, since it reads the models (give --series and --sae)"


def noise_lines(info: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, from ``FeatureDiff.info["noise"]``."""
    return [f"{visible(id)}: {_sentence(record)}" for id, record in info.items()]


def _sentence(record: Mapping[str, Any]) -> str:
    if record["note"]:
        return visible(record["note"])
    noise = listed([f"{m} of {n}" for m, n in zip(record["noise_moved"], record["noise_tested"], strict=True)])
    size = "of the norm of its update" if record["share"] == 1 else f"of {record['share']:.3g} of its update's norm"
    return (
        f"on the same trajectories of {count(record['n_problems'], 'problem')} it moved {record['n_moved']} of "
        f"{record['n_tested']} features; noise {size} ({record['update_norm']:.2g} of the weights') moved {noise}; "
        f"median |Δ| {number(record['run']['median'])} against {number(record['noise']['median'])}"
    )
