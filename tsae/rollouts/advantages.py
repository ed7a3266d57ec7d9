"""Group-relative advantages, as the trainers define them, and what each group teaches.

A group is the rollouts of one policy on one problem, in one step where the table has a column step.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from tsae.rollouts.schema import BANDS, problem_bands

_EPSILON = 1e-4  # TRL's, added to the standard deviation
KINDS = ("all failures", "single success", "mixed", "all successes", "one response")


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo",
    *,
    ddof: int = 1,
    epsilon: float = _EPSILON,
) -> np.ndarray:
    """Advantages within groups.

    - grpo: (r − mean) / (s + ε), s the standard deviation, by default the unbiased one and ε = 1e-4 (as TRL);
    - dr_grpo: r − mean (Liu et al. 2025);
    - rloo: r − mean of the others = n/(n − 1) · (r − mean) (Ahmadian et al. 2024).

    A group of one, or of equal rewards, has advantage 0.

    Args:
        rewards: (n,) finite.
        groups: (n,) group labels.
        kind: one of these.
        ddof: 1 for the unbiased standard deviation, 0 for that of the group itself.
        epsilon: added to the standard deviation.

    Returns:
        (n,) float64.
    """
    _, group = np.unique(groups, return_inverse=True)
    n = np.bincount(group)
    rewards = np.asarray(rewards, dtype=float)
    centred = rewards - (np.bincount(group, weights=rewards) / n)[group]
    # Rounding leaves 1e-17 in groups of equal rewards; divided by a deviation of 0 it must stay 0.
    centred[_constant(rewards, group)[group]] = 0.0
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return centred * (n / np.maximum(n - 1, 1))[group]
    deviation = np.sqrt(np.bincount(group, weights=centred**2) / np.maximum(n - ddof, 1))
    return np.divide(centred, (deviation + epsilon)[group], out=np.zeros(len(rewards)), where=centred != 0)


def group_table(frame: pd.DataFrame, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo") -> pd.DataFrame:
    """What every group teaches.

    Args:
        frame: of `Rollouts.frame`. Trajectories of unknown outcome are left out, and those without a reward if others
            have one. If none has, a success counts 1 and a failure 0.
        kind: of the advantages.

    Returns:
        one row a group: policy, problem_id, band, n, successes, kind (one of `KINDS`, by outcomes), no_variance (all
        rewards are equal, so the group teaches nothing), top_advantage (the largest) and positive (sum of the positive
        advantages: what the group reinforces).
    """
    bands = problem_bands(frame)
    frame = frame[frame.outcome != "unknown"]
    if frame.reward.notna().any():
        frame = frame[frame.reward.notna()]
    right = (frame.outcome == "success").astype(float)
    rewards = (frame.reward if frame.reward.notna().any() else right).to_numpy()
    _, first, group = np.unique(group_names(frame), return_index=True, return_inverse=True)
    n, successes = np.bincount(group), np.bincount(group, weights=right).astype(int)
    advantages = group_advantages(rewards, group, kind)
    top = np.full(len(n), -np.inf)
    np.maximum.at(top, group, advantages)
    table = frame[["policy", "problem_id"]].iloc[first].reset_index(drop=True)
    table["band"] = table.problem_id.map(bands)
    table["n"], table["successes"] = n, successes
    table["kind"] = np.select(
        [n == 1, successes == 0, successes == n, successes == 1],
        ["one response", "all failures", "all successes", "single success"],
        "mixed",
    )
    table["no_variance"] = _constant(rewards, group)
    table["top_advantage"] = top
    table["positive"] = np.bincount(group, weights=np.maximum(advantages, 0))
    return table


def group_summary(groups: pd.DataFrame) -> pd.DataFrame:
    """Count the groups of `group_table` by policy and band.

    Returns:
        policy, band ("all" and every band present), n_groups, a column of counts for every kind, no_variance, and
        single_success_share: the part of all positive advantage that single successes carry. In a band where nearly
        everything fails, training imitates these, whether a success was earned or luck.
    """
    rows = []
    for policy in dict.fromkeys(groups.policy):
        mine = groups[groups.policy == policy]
        for band in ("all", *(b for b in BANDS if (mine.band == b).any())):
            picked = mine if band == "all" else mine[mine.band == band]
            total, single = picked.positive.sum(), picked.positive[picked.kind == "single success"].sum()
            rows.append(
                {"policy": policy, "band": band, "n_groups": len(picked)}
                | {name: int((picked.kind == name).sum()) for name in KINDS}
                | {"no_variance": int(picked.no_variance.sum())}
                | {"single_success_share": single / total if total > 0 else np.nan}
            )
    return pd.DataFrame(rows)


def group_names(frame: pd.DataFrame) -> np.ndarray:
    """(n,) names of the trajectories' groups: same policy, same problem and, if steps are known, same step."""
    names = frame.policy + "\0" + frame.problem_id
    return (names + "\0" + frame["step"].astype(str) if "step" in frame.columns else names).to_numpy()


def _constant(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n_groups,) whether all rewards of a group are equal."""
    low, high = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return low == high
