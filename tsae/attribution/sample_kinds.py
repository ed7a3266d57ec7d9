"""Kinds of samples that attribution adds up, leaves out and keeps alone; and problems that a run did not train on.

band                     easy, medium, hard; where the log has no bands, the author's level; and samples without one
outcome                  success, failure
band and outcome         both together
lone success             the only success of its prompt group, which has other responses
third of the run         by the steps that trained on them
band and outcome and third  all three together; where the log has no bands, outcome and third
behaviour                responses that show one (`tsae.rollouts.behaviours`)
reward                   where several functions rewarded: samples above their prompt group's mean of one
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.bands import bands_label
from tsae.rollouts.behaviours import behaviours_named
from tsae.rollouts.rewards import group_names
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

Masks = dict[str, np.ndarray]

UNBANDED = "unbanded"
"""The samples without a band, in a log that has bands. With their share, the shares of all bands add up."""
_REWARD = "reward/"
_MOST_LEVELS = 6


def sample_kinds(rollouts: Rollouts, wanted: Sequence[str], used: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """(kind, (n,) mask of trajectories) by the name of the group; one that is empty or everything is left out.

    Args:
        rollouts: with steps.
        wanted: of the kinds above.
        used: (n,) which trajectories the run trained on.
    """
    frame = rollouts.frame
    bands = _bands(rollouts)
    outcomes = {what: (frame.outcome == what).to_numpy() for what in ("success", "failure")}
    group = np.unique(group_names(frame), return_inverse=True)[1]
    both, thirds = _crossed(bands, outcomes), _thirds(rollouts, used)
    found: dict[str, Masks] = {
        "band": bands,
        "outcome": outcomes,
        "band and outcome": both,
        "lone success": _lone(outcomes["success"], group),
        "third of the run": thirds,
        "band and outcome and third": _crossed(both or outcomes, thirds),
        "behaviour": _behaviours(rollouts),
        "reward": _rewarded(rollouts, group),
    }
    chosen = [(kind, name, mask & used) for kind in wanted for name, mask in found[kind].items()]
    return {name: (kind, mask) for kind, name, mask in chosen if mask.any() and (mask != used).any()}


def has_bands(rollouts: Rollouts) -> bool:
    """Whether there are bands, or levels in place of them."""
    return bool(_bands(rollouts))


def label_of_bands(rollouts: Rollouts) -> str:
    """What the bands are, where they are not the policies' own (`tsae.rollouts.bands.bands_label`)."""
    if rollouts.frame.band.isna().all():
        return "level of the data set" if has_bands(rollouts) else ""
    return bands_label(rollouts.info.get("bands"))


def band_of(rollouts: Rollouts) -> np.ndarray:
    """(n,) the band of every trajectory, or the author's level in its place; None where the log has neither."""
    found = np.full(len(rollouts), None, dtype=object)
    for name, mask in _bands(rollouts).items():
        found[mask] = name
    return found


def _bands(rollouts: Rollouts) -> Masks:
    column, names = rollouts.frame.band, list(BANDS)
    if column.isna().all():
        column = rollouts.frame.level
        names = list(column.dropna().unique())
        if not 2 <= len(names) <= _MOST_LEVELS:
            return {}
        names.sort(key=lambda level: (BANDS.index(level) if level in BANDS else len(BANDS), level))
    none = column.isna().to_numpy()
    return {str(name): (column == name).to_numpy() for name in names} | ({UNBANDED: none} if none.any() else {})


def _crossed(first: Masks, second: Masks) -> Masks:
    return {f"{a}, {b}": in_a & in_b for a, in_a in first.items() for b, in_b in second.items()}


def _lone(success: np.ndarray, group: np.ndarray) -> Masks:
    lone = (np.bincount(group, weights=success) == 1) & (np.bincount(group) > 1)
    return {"lone success": success & lone[group]}


def _thirds(rollouts: Rollouts, used: np.ndarray) -> Masks:
    step = rollouts.frame["step"].to_numpy()
    steps = np.unique(step[used])
    third = np.searchsorted(steps, step).clip(max=len(steps) - 1) * 3 // len(steps)
    return {f"{name} third of the run": third == i for i, name in enumerate(("first", "second", "last"))}


def _behaviours(rollouts: Rollouts) -> Masks:
    found = {}
    for name in behaviours_named(rollouts):
        values = rollouts.frame[name].to_numpy(dtype=float)
        if np.isin(values[np.isfinite(values)], (0, 1)).all():
            found[name.replace("_", " ")] = values == 1
    return found


def _rewarded(rollouts: Rollouts, group: np.ndarray) -> Masks:
    names = [name for name in rollouts.frame.columns if name.startswith(_REWARD)]
    found = {}
    for name in names if len(names) > 1 else ():
        values = rollouts.frame[name].to_numpy(dtype=float)
        known = np.isfinite(values)
        n = np.maximum(np.bincount(group, weights=known), 1)
        mean = np.bincount(group, weights=np.where(known, values, 0.0)) / n
        found[f"rewarded by {name.removeprefix(_REWARD)}"] = known & (values > mean[group] + 1e-9)
    return found


def other_problems(path: str | Path, log: Rollouts, base: str) -> Rollouts:
    """Read the base's responses to problems that are not those of a log; two are the same if their prompts are equal.

    Args:
        path: Parquet file of rollouts.
        log: of the run.
        base: id of the model that training started from; responses of other policies are left out.

    Returns:
        the responses, in bands by the base's pass rates where there are problems of every band.

    Raises:
        TsaeError: where none is left.
    """
    found = Rollouts.read(path)
    first = np.flatnonzero(~log.frame.problem_id.duplicated())
    trained = {log.tokens(int(row))[0].tobytes() for row in first}
    others = np.array([found.tokens(row)[0].tobytes() not in trained for row in range(len(found))], dtype=bool)
    mine = others & ((found.frame.policy == base) | (len(found.policies) == 1)).to_numpy()
    if not mine.any():
        what = f"asks no other problems than the run's log, or has no response of {base} to them"
        raise TsaeError(what, where=path, fix="Sample others from the base (tsae rollouts sample), or leave it out.")
    found = found.select(np.flatnonzero(mine))
    if found.frame.band.isna().all():
        with suppress(TsaeError):  # a band has no problem: levels take their place, or nothing does
            found = found.with_bands(None)
    return found
