"""Group-relative advantages, as the trainers define them. A group is the rollouts of one policy on one problem."""

from __future__ import annotations

from typing import Literal

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_EPSILON = 1e-4  # TRL's, added to the standard deviation


def group_advantages(
    rewards: np.ndarray, groups: np.ndarray, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
) -> np.ndarray:
    """Advantages within groups.

    - grpo: (r − mean) / (s + 1e-4), s the unbiased standard deviation (as TRL);
    - dr_grpo: r − mean (Liu et al. 2025);
    - rloo: r − mean of the others = n/(n − 1) · (r − mean) (Ahmadian et al. 2024).

    A group of one has advantage 0.

    Args:
        rewards: (n,) finite.
        groups: (n,) group labels.

    Returns:
        (n,) float64.
    """
    _, group = np.unique(groups, return_inverse=True)
    n = np.bincount(group)
    centred = rewards - (np.bincount(group, weights=rewards) / n)[group]
    # Rounding leaves 1e-17 in groups whose rewards are all equal; divided by a deviation of 0 it must stay 0.
    centred[np.abs(centred) < 1e-12] = 0.0
    if kind == "dr_grpo":
        return centred
    others = np.maximum(n - 1, 1)
    if kind == "rloo":
        return centred * (n / others)[group]
    deviation = np.sqrt(np.bincount(group, weights=centred**2) / others)
    return centred / (deviation + _EPSILON)[group]


def with_advantages(rollouts: Rollouts, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo") -> Rollouts:
    """Set the advantage of every trajectory.

    Raises:
        TsaeError: where a reward is missing.
    """
    rewards = rollouts.table["reward"]
    if rewards.null_count:
        raise TsaeError(
            f"{rewards.null_count} trajectories have no reward",
            where=rollouts.origin,
            fix="Fill rewards, or drop the rows.",
        )
    frame = rollouts.frame
    groups = (frame.policy + "\0" + frame.problem_id).to_numpy()
    return rollouts.with_column("advantage", group_advantages(rewards.to_numpy(), groups, kind))
