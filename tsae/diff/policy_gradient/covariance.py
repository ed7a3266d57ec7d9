"""Covariances of advantage and feature within groups: the first-order effect of policy gradient on a feature.

Take one problem, and a policy π with one parameter for every response y: its logit θ_y. Such a policy can change the
probability of each response on its own. A step of policy gradient on the advantages A changes the mean of a feature f
by the learning rate times

    natural   Σ_y π(y)  (A_y − E A) (f_y − E f) = Cov(A, f)              Fisher-preconditioned step, dθ_y ∝ A_y − E A
    vanilla   Σ_y π(y)² (A_y − E A) (f_y − E f) = Cov(π (A − E A), f)    plain step, dθ_y ∝ π(y) (A_y − E A)

with means and covariances under π. Rollouts are drawn from π, so a mean over n of them replaces one π. The other π
becomes a weight of each rollout:

    1/n Σ_i w_i (A_i − Ā) (f_i − f̄)      natural: w_i = 1;  vanilla: w_i = π(y_i) / mean_j π(y_j) over the group

Under the vanilla step probable responses move faster. Without a scale, the group with short, probable responses would
count e^50 times as much as another. So w has mean 1 in each group, and only the relative probabilities of a problem's
responses matter. Both covariances then have the same unit, and agree if all responses are equally probable.
Probabilities of long responses underflow, so the largest logarithm of a group is subtracted first.

A network does neither: its responses share weights, and Adam is neither step. `tsae.diff.policy_gradient.influence` has
the exact first order of plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_names

Gradient = Literal["natural", "vanilla"]


@dataclass(frozen=True)
class Samples:
    """Rollouts in groups, with the weight of each in a covariance; all arrays are (n,)."""

    frame: pd.DataFrame
    """Of the rollouts."""
    group: np.ndarray
    """Codes: policy, problem and step."""
    problem: np.ndarray
    """Codes."""
    weight: np.ndarray
    """Centred advantage / (rollouts of the problem · problems), so that a sum is a mean over problems."""
    relative: dict[Gradient, np.ndarray]
    """w of the gradients that are known: natural, and vanilla where every rollout has a log-probability."""

    @classmethod
    def of(cls, frame: pd.DataFrame, logprob: np.ndarray | None, where: str) -> Samples:
        """Group rollouts that have advantages; logprob is (n,) in nats, and `where` is named in errors.

        Raises:
            TsaeError: where an advantage is missing or not finite, no group has rollouts that differ in advantage,
                there is one problem only, or a log-probability is above 0.
        """
        group = np.unique(group_names(frame), return_inverse=True)[1]
        relative: dict[Gradient, np.ndarray] = {"natural": np.ones(len(frame))}
        if logprob is not None:
            if (logprob > 1e-3).any():
                raise TsaeError(
                    f"{(logprob > 1e-3).sum()} log-probabilities are above 0",
                    where=where,
                    fix="Give sums of natural logarithms over response tokens in the column logprob.",
                )
            relative["vanilla"] = relative_probabilities(logprob, group)
        problem = pd.factorize(frame.problem_id)[0]
        return cls(frame, group, problem, _weights(frame, group, problem, where), relative)

    def moved(self, values: np.ndarray, gradient: Gradient) -> np.ndarray:
        """(n, n_features) w_i (f_i − f̄): weighted with `weight` and summed it is the covariance."""
        mean = sums(self.group, np.ones(len(values))) @ values / np.bincount(self.group)[:, None]
        centred = values - mean[self.group]
        moved: np.ndarray = centred * self.relative[gradient][:, None]
        return moved

    def per_group(self, values: sp.csr_array, gradient: Gradient) -> sp.csr_array:
        """(n_groups, n_features) share of every group."""
        weight = within(self.weight * self.relative[gradient], self.group)
        return sp.csr_array(sums(self.group, weight) @ values)


def relative_probabilities(logprob: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) π / the group's mean of π, from logarithms."""
    largest = np.full(int(group.max()) + 1, -np.inf)
    np.maximum.at(largest, group, logprob)
    scaled = np.exp(logprob - largest[group])
    relative: np.ndarray = scaled * (np.bincount(group) / np.bincount(group, weights=scaled))[group]
    return relative


def effective_responses(relative: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n_groups,) responses that weigh as much as the weighted ones: (Σ w)² / Σ w²."""
    effective: np.ndarray = np.bincount(group, weights=relative) ** 2 / np.bincount(group, weights=relative**2)
    return effective


def within(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) minus the mean of the group. Centring the weights has the same effect as centring the activations."""
    centred: np.ndarray = values - (np.bincount(group, weights=values) / np.bincount(group))[group]
    return centred


def sums(code: np.ndarray, weights: np.ndarray) -> sp.csr_array:
    """(n_codes, n_rows): weighted sums of the rows of every code."""
    return sp.csr_array((weights, (code, np.arange(len(code)))), shape=(int(code.max()) + 1, len(code)))


def graded_groups(samples: Samples) -> int:
    """Number of groups in which advantages differ among successes, or among failures.

    In every other group all successes share one advantage and all failures another. With k successes among n rollouts
    their advantages are proportional to 1 − k/n and −k/n. The successes then carry exactly (n − k)/n of every feature's
    covariance, whatever the feature.
    """
    outcome = pd.factorize(samples.frame.outcome)[0]
    cells = pd.DataFrame({"group": samples.group, "outcome": outcome, "advantage": samples.frame.advantage.to_numpy()})
    spread = cells.groupby(["group", "outcome"]).advantage.agg(np.ptp)
    size = np.abs(cells.advantage).max()
    kinds = cells.groupby("group").outcome.nunique()
    graded = (spread > 1e-6 * max(1.0, size)).groupby("group").any() | (kinds > 2)
    return int(graded.sum())


def _weights(frame: pd.DataFrame, group: np.ndarray, problem: np.ndarray, where: str) -> np.ndarray:
    advantage = frame.advantage.to_numpy(dtype=float)
    if not np.isfinite(advantage).all():
        raise TsaeError(
            f"{(~np.isfinite(advantage)).sum()} of {len(advantage)} trajectories have no advantage",
            where=where,
            fix="Set advantages from rewards (Rollouts.with_advantages), capture and encode again.",
        )
    if problem.max() < 1:
        raise TsaeError("has one problem only, which tells nothing of others", where=where, fix="Give several.")
    centred = within(advantage, group)
    if not np.isfinite(centred).all() or not np.isfinite(np.square(centred).sum()):
        raise TsaeError(
            f"advantages as large as {np.abs(advantage).max():.3g} cannot be computed with",
            where=where,
            fix="Set advantages from rewards (Rollouts.with_advantages), capture and encode again.",
        )
    # If advantages are equal, only rounding errors are left: set them to 0.
    centred[np.abs(centred) <= 1e-12 * max(1.0, float(np.abs(advantage).max()))] = 0.0
    if not centred.any():
        raise TsaeError(
            "no group has rollouts that differ in advantage, so that nothing is reinforced",
            where=where,
            fix="Give rollouts with several responses a problem, some right and some wrong.",
        )
    return centred / (np.bincount(problem)[problem] * (problem.max() + 1))
