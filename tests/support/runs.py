"""Folders of runs as `tsae run` leaves them, with tables that a test makes by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.diffs import make, reader
from tsae.rollouts.table import Rollouts

BANDS = ("easy", "medium", "hard")


def answer(problem: str, policy: str, right: bool | None, **more: Any) -> dict[str, Any]:
    """One response; `length` tokens, one by default."""
    length = more.pop("length", 1)
    outcome = "unknown" if right is None else "success" if right else "failure"
    text = {"prompt": problem, "response": "#1", "prompt_ids": [1], "response_ids": [2] * length}
    return {"problem_id": problem, "policy": policy, "outcome": outcome, **text, **more}


def answers(policy: str, rates: Mapping[str, Sequence[int]], n: int = 4, **more: Any) -> list[dict[str, Any]]:
    """n responses of a policy to problems of every band: of how many each is right, problem by problem."""
    return [
        answer(f"{band}{i}", policy, k < right, band=band, **more)
        for band, of_problem in rates.items()
        for i, right in enumerate(of_problem)
        for k in range(n)
    ]


def checkpoint(id: str, run: str, step: int = 10, trained_on: str | None = None) -> dict[str, Any]:
    """A reader of the diff."""
    return {**reader(id, run), "step": step, "trained_on": trained_on}


def write_run(
    folder: Path,
    records: list[dict[str, Any]],
    checkpoints: Sequence[dict[str, Any]],
    log: list[dict[str, Any]] | None = None,
    *,
    steps: Sequence[dict[str, Any]] = (),
    info: dict[str, Any] | None = None,
) -> Path:
    """Rollouts, sampled unless their info says else, a diff that names the readers, and a log."""
    facts = {"sampled": {"n_samples": 4}} if info is None else info
    rollouts = Rollouts.from_records(records, facts)
    rollouts.write(folder / "rollouts" / "rollouts.parquet")
    diff = make()
    of = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint}
    diff.info.update(**of, readers=[reader("base", None), *checkpoints], steps=list(steps))
    diff.save(folder / "diff")
    if log is not None:
        Rollouts.from_records(log).write(folder / "rollouts" / "log.parquet")
    return folder
