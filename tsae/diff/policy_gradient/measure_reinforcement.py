"""Measure the reinforcement of every feature by a policy's rollouts.

*Size.* Δ = reinforcement / standard deviation of the feature over base trajectories: deviations per unit of learning
rate, with advantages as they are. It is a rate of change and not a shift, so the test is for 0 and not for a least
size.

*p-values* are the larger of two. Permuting advantages within groups asks which rollout has which. Flipping the signs of
problems covers features that go with success in some problems and against it in others: permuted advantages reject far
too often there. Where the interval contains 0, p is at least the bootstrap's own. Intervals draw problems.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.draw_contrast import active_features
from tsae.diff.contrast.problem_means import side_means
from tsae.diff.contrast.rows import Rows, scales
from tsae.diff.policy_gradient.covariance import Samples, effective_responses, graded_groups, sums
from tsae.diff.policy_gradient.log_probabilities import logged, response_logprobs
from tsae.diff.policy_gradient.reinforcement import Reinforcement
from tsae.diff.significance.inference import infer, weighted
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.rewards import KINDS
from tsae.rollouts.schema import BANDS, OUTCOMES, problem_bands


@one_blas_thread
def reinforcement(
    features: FeatureTable | str | Path,
    config: DiffConfig | None = None,
    *,
    policy: str | None = None,
    series: CheckpointSeries | None = None,
    device: str = "cpu",
) -> Reinforcement:
    """Measure the covariance of advantage and feature within rollout groups, as the base reads the rollouts.

    Args:
        features: or its folder; its rollouts carry advantages.
        config: defaults of `DiffConfig`; bands are those of the rollouts.
        policy: whose rollouts count; by default the base's, or all where it sampled none.
        series: has the checkpoints that sampled them, for the vanilla gradient: where the rollouts carry no column
            logprob, these checkpoints read their responses again.
        device: torch device for that.

    Raises:
        TsaeError: where an advantage is missing or not finite, no group has rollouts that differ in advantage, or the
            span is within the prompt.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    config = config or DiffConfig()
    if config.within_prompt:
        raise TsaeError(
            f"span={config.span!r} is the same for all rollouts of a problem, and no advantage goes with it",
            where="reinforcement",
            fix="Use span='response' or 'all'.",
        )
    rows, base = Rows.of(features, config), features.readers[0]
    if policy is None and len(rows.by_reader[base, base]):
        policy = base
    read = features.rows(reader=base, policy=policy)
    if not len(read):
        raise TsaeError(
            f"{base} read no trajectory of {policy!r}; policies are {', '.join(features.rollouts.policies)}",
            where=features.origin,
            fix="Give one of these.",
        )
    picked = read[rows.n_tokens[read] > 0]
    if not len(picked):
        raise TsaeError(
            f"no trajectory has a token of the span {config.span}", where=features.origin, fix="Choose another span."
        )
    picked = picked[np.argsort(rows.problem[picked], kind="stable")]
    trajectories = features.trajectory[picked]
    frame = features.rollouts.frame.iloc[trajectories].reset_index(drop=True)
    logprob = logged(features.rollouts, trajectories)
    if logprob is None and series is not None:
        for checkpoint in series:
            features.need_weights(checkpoint)
        logprob = response_logprobs(features.rollouts, trajectories, series, device=device)
    samples = Samples.of(frame, logprob, features.origin)
    values = sp.csr_array(rows.values[picked].astype(np.float64))
    problems = np.unique(samples.problem)
    tested = active_features(config, side_means(values, np.arange(len(picked)), samples.problem, problems))
    groups = _group_frame(samples)
    graded = graded_groups(samples)
    masks = _parts(frame, groups.kind.to_numpy()[samples.group], by_outcome=graded > 0)
    dense = values[:, tested].toarray()
    (scale,) = scales(rows, rows.by_reader[base, rows.own(base)], [picked], config)
    # A feature that does not vary has no covariance: its Δ is 0 in any unit.
    deviation = np.where(scale.deviation > 0, scale.deviation, 1.0)[tested]
    scaled_by = np.where(scale.silent, "pooled", "base")[tested]
    n_problems, tables = len(problems), []
    for gradient in samples.relative:
        moved = samples.moved(dense, gradient)
        for (by, part), mask in masks.items():
            weight = samples.weight * mask
            each = (sums(samples.problem, weight) @ moved) * n_problems  # the mean over problems is the part's share
            asked = weighted(each, deviation, moved, weight, samples.group, config.seed)
            found = infer(asked, replace(config, minimum_effect=0.0))
            keys = {"gradient": gradient, "by": by, "part": part}
            n_moving = len(np.unique(samples.problem[weight != 0]))
            part_table = pd.DataFrame({**keys, "n_problems": n_moving, "feature": tested})
            part_table["reinforcement"] = found.difference
            for name in ("low", "high", "delta", "delta_low", "delta_high"):
                part_table[name] = getattr(found, name)
            tables.append(part_table.assign(scale=scaled_by, p=found.p, q=found.q))
    return Reinforcement(
        table=pd.concat(tables, ignore_index=True),
        groups=groups,
        per_group={gradient: samples.per_group(values, gradient) for gradient in samples.relative},
        notes=_notes(samples, graded, len(read), config),
        source=features,
        rows=rows,
        picked=picked,
        samples=samples,
        config=config,
    )


def _notes(samples: Samples, graded: int, n_read: int, config: DiffConfig) -> tuple[str, ...]:
    notes = []
    if (empty := n_read - len(samples.frame)) > 0:
        notes.append(
            f"{empty:,} of {n_read:,} trajectories have no token of the span {config.span}, and count nowhere: "
            "advantages are set against the others of their groups."
        )
    n_groups = len(np.unique(samples.group[samples.weight != 0]))
    if not graded:
        notes.append(
            "Not split by outcome: rewards only say right or wrong, and then the k successes among a group's n "
            "rollouts carry (n − k)/n of every feature's covariance, whatever the feature."
        )
    elif graded < n_groups:
        notes.append(
            f"In {graded} of {n_groups} groups advantages differ among successes or among failures; in the others the "
            "split by outcome is (n − k)/n for any feature."
        )
    if "vanilla" not in samples.relative:
        notes.append(
            "Vanilla gradient not computed: it needs every response's log-probability, from a column logprob or from "
            "the checkpoints that sampled them."
        )
    return tuple(notes)


def _group_frame(samples: Samples) -> pd.DataFrame:
    frame, group = samples.frame, samples.group
    names = [name for name in ("policy", "problem_id", "step") if name in frame.columns]
    _, first = np.unique(group, return_index=True)
    groups = frame[names].iloc[first].reset_index(drop=True)
    groups["band"] = groups.problem_id.map(problem_bands(frame))
    n = np.bincount(group)
    known = np.bincount(group, weights=frame.outcome != "unknown").astype(int)
    successes = np.bincount(group, weights=frame.outcome == "success").astype(int)
    groups["n"], groups["successes"] = n, successes
    groups["kind"] = np.select(
        [known < n, n == 1, successes == 0, successes == n, successes == 1],
        ["unknown outcomes", "one response", "all failures", "all successes", "single success"],
        "mixed",
    )
    if "vanilla" in samples.relative:
        groups["effective"] = effective_responses(samples.relative["vanilla"], group)
    return groups


def _parts(frame: pd.DataFrame, kind: np.ndarray, *, by_outcome: bool) -> dict[tuple[str, str], np.ndarray]:
    """Masks of rows; the masks of one `by` cover every row once."""
    parts = {("all", "all"): np.ones(len(frame), dtype=bool)}
    band = frame.band.fillna("no band").to_numpy()
    if (band != "no band").any():
        parts |= {("band", b): band == b for b in (*BANDS, "no band") if (band == b).any()}
    if by_outcome:
        outcome = frame.outcome.to_numpy()
        parts |= {("outcome", o): outcome == o for o in OUTCOMES if (outcome == o).any()}
    parts |= {("group", k): kind == k for k in (*KINDS, "unknown outcomes") if (kind == k).any()}
    return parts
