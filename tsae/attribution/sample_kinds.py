"""Kinds of samples that attribution adds up, leaves out and keeps alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsae.rollouts.advantages import group_names
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts


def sample_kinds(rollouts: Rollouts, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """(n,) masks of trajectories by the name of the kind; a kind that is empty or everything is left out.

    Args:
        rollouts: with steps.
        wanted: of band, outcome, band and outcome, lone success, third of the run.
    """
    frame = rollouts.frame
    bands = {f"{band}": (frame.band == band).to_numpy() for band in BANDS}
    outcomes = {what: (frame.outcome == what).to_numpy() for what in ("success", "failure")}
    found: dict[str, np.ndarray] = {}
    for kind in wanted:
        if kind == "band":
            found |= bands
        elif kind == "outcome":
            found |= outcomes
        elif kind == "band and outcome":
            found |= {f"{b}, {o}": in_band & has for b, in_band in bands.items() for o, has in outcomes.items()}
        elif kind == "lone success":
            group = np.unique(group_names(frame), return_inverse=True)[1]
            lone = np.bincount(group, weights=outcomes["success"]) == 1
            found[kind] = outcomes["success"] & lone[group]
        else:
            order = np.unique(frame["step"].to_numpy(), return_inverse=True)[1]
            third = order * 3 // (order.max() + 1)
            found |= {f"{name} third of the run": third == i for i, name in enumerate(("first", "second", "last"))}
    return {name: mask for name, mask in found.items() if mask.any() and not mask.all()}
