"""The null for changed weights, in words: what noise as large as a run's update moves, beside what the run moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsae.diff.feature_diff import FeatureDiff
from tsae.report.text import count, listed, number, visible

NOT_RUN = "null for changed weights: not run, since it reads the models (give --series and --sae)"


def noise_lines(info: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, from ``FeatureDiff.info["noise"]``."""
    return [f"{visible(id)}: {_line(record)}" for id, record in info.items()]


def noise_sentence(diff: FeatureDiff, checkpoint: str) -> str:
    """What noise of the size of a checkpoint's update moves; empty where that was not measured."""
    record = (diff.info.get("noise") or {}).get(checkpoint)
    if record is None:
        return ""
    if record["note"]:
        return f"No null for changed weights: {record['note']}."
    worst = max(zip(record["noise_moved"], record["noise_tested"], strict=True), key=lambda pair: pair[0] / pair[1])
    return (
        f"Noise of its update's size moves at most {worst[0]} of {worst[1]}, where it moves {record['n_moved']} of "
        f"{record['n_tested']} (same text, {count(record['n_problems'], 'problem')})."
    )


def noise_text(diff: FeatureDiff) -> tuple[str, ...]:
    """A paragraph a checkpoint; where the null was not run, one that says why."""
    if diff.info["config"].get("noise_draws") == 0:
        return ("The null for changed weights was left out (noise_draws=0).",)
    info = diff.info.get("noise")
    return tuple(f"{line}." for line in noise_lines(info)) if info else (f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}.",)


def _line(record: Mapping[str, Any]) -> str:
    if record["note"]:
        return visible(record["note"])
    noise = listed([f"{m} of {n}" for m, n in zip(record["noise_moved"], record["noise_tested"], strict=True)])
    size = "of the norm of its update" if record["share"] == 1 else f"of {record['share']:.3g} of its update's norm"
    return (
        f"on the same trajectories of {count(record['n_problems'], 'problem')} it moved {record['n_moved']} of "
        f"{record['n_tested']} features; noise {size} ({record['update_norm']:.2g} of the weights') moved {noise}; "
        f"median |Δ| {number(record['run']['median'])} against {number(record['noise']['median'])}"
    )
