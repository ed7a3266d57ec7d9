"""What is attributed where nobody names targets: outcomes, behaviours, a first token, and the features that moved.

All are measured on fixed trajectories that the run's first policy sampled. For a covariance with advantages every
target has a number of single samples too: whether the sample succeeds, shows the behaviour, begins with the token, or
how active the feature is on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tsae.attribution.config import AttributionConfig
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.attribution.targets import FeatureMeans, LogLikelihood, NextToken, Targets, Together
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import behaviours_named
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

OnSamples = Callable[[TrainedWeights, Rollouts], np.ndarray]
"""(n, n_targets) what every sample shows of each target; NaN where that is not known."""

_PER_PROBLEM = 4
"""Responses to a problem that are fixed, at least, so that right and wrong ones are among them."""
_FEWEST = 3
"""Responses of each kind that a comparison needs."""


@dataclass(frozen=True)
class Wanted:
    """Targets, and the same of single samples."""

    targets: Targets
    on_samples: OnSamples | None
    """None where targets came from outside."""


def find_targets(
    path: TrainingPath,
    rollouts: Rollouts,
    first_batch: np.ndarray,
    *,
    sae: TemporalSAE | None,
    first_token: int | None,
    special: list[int],
    temperature: float,
    config: AttributionConfig,
    notes: list[str],
) -> Wanted:
    """Find what to attribute.

    Args:
        path: of the run.
        rollouts: with behaviours, where the log has texts (`tsae.rollouts.behaviours.with_behaviours`).
        first_batch: rows that the first policy sampled.
        sae: gives features.
        first_token: token id.
        special: token ids that count in no feature.
        temperature: of the sampling.
        config: which targets, and over how many trajectories.
        notes: says what was chosen, and what is missing.

    Raises:
        TsaeError: where there is nothing to attribute.
    """
    fixed = _fixed(rollouts, first_batch, config)
    notes.append(
        f"Targets are measured on {len(fixed)} responses to {fixed.n_problems} problems that the run's first policy "
        "sampled."
    )
    parts: list[Targets] = []
    on_samples: list[OnSamples] = []
    if first_token is not None:
        token = first_token
        prompts = {fixed.frame.problem_id[row]: fixed.tokens(row)[0] for row in range(len(fixed))}
        parts.append(NextToken(list(prompts.values()), ["first token"] * len(prompts), token, what="P"))
        on_samples.append(lambda _, some: _begins(some, token))
    kinds = _kinds(fixed, config, notes)
    if kinds:
        names = {name: f"log-likelihood, {what}" for name, (what, _) in kinds.items()}
        shows = {names[name]: values == 1 for name, (_, values) in kinds.items()}
        lacks = {names[name]: values == 0 for name, (_, values) in kinds.items()}
        parts.append(LogLikelihood(fixed, shows, lacks, batch_tokens=config.batch_tokens, temperature=temperature))
        on_samples.append(lambda _, some: np.column_stack([_column(some, name) for name in kinds]))
    if sae is not None and "features" in config.targets:
        chosen = list(config.features) or _moved_most(path, sae, fixed, special, config)
        features = FeatureMeans(sae, chosen, fixed, special, batch_tokens=config.batch_tokens)
        parts.append(features)
        on_samples.append(features.each)
    elif config.features:
        raise TsaeError(
            "features are asked for, and there is no SAE", where="attribute", fix="Give the SAE (sae=…, --sae)."
        )
    if not parts:
        raise TsaeError(
            "nothing is there to attribute: " + (notes[-1] if len(notes) > 1 else "no target is asked for"),
            where=rollouts.origin,
            fix="Give an SAE (--sae), or the token that a behaviour begins with (--first-token).",
        )
    return Wanted(Together(*parts), lambda trained, some: np.column_stack([one(trained, some) for one in on_samples]))


def _fixed(rollouts: Rollouts, batch: np.ndarray, config: AttributionConfig) -> Rollouts:
    """Some responses to each of some problems, n_fixed in all if there are as many."""
    rng, problem = np.random.default_rng(config.seed), rollouts.frame.problem_id.to_numpy()[batch]
    names = rng.permutation(np.unique(problem))
    each = max(_PER_PROBLEM, -(-config.n_fixed // len(names)))
    rows = np.concatenate([rng.permutation(batch[problem == name])[:each] for name in names])
    return rollouts.select(np.sort(rows[: config.n_fixed]))


def _begins(rollouts: Rollouts, token: int) -> np.ndarray:
    """(n, 1) whether responses begin with a token."""
    return np.array([[float(rollouts.tokens(row)[1][0] == token)] for row in range(len(rollouts))])


def _column(rollouts: Rollouts, name: str) -> np.ndarray:
    """(n,) 1 for a sample that shows it, 0 for one that does not, else NaN."""
    if name != "outcome":
        found: np.ndarray = rollouts.frame[name].to_numpy(dtype=float)
        return found
    outcome = rollouts.frame.outcome
    return np.where(outcome == "unknown", np.nan, (outcome == "success").astype(float))


def _kinds(fixed: Rollouts, config: AttributionConfig, notes: list[str]) -> dict[str, tuple[str, np.ndarray]]:
    """Comparisons of responses by column: what the target is called, and (n,) 1, 0 or NaN."""
    wanted = ["outcome"] if "outcome" in config.targets else []
    if "behaviours" in config.targets:
        wanted += [name for name in behaviours_named(fixed) if name in fixed.frame.columns]
    found, problem = {}, fixed.frame.problem_id.to_numpy()
    for name in wanted:
        values = _column(fixed, name)
        known = np.isfinite(values)
        if not np.isin(values[known], (0, 1)).all():
            continue  # A degree, such as a length, does not divide responses into two kinds.
        both = np.intersect1d(problem[values == 1], problem[values == 0])
        counted = known & np.isin(problem, both)
        if min((values[counted] == 1).sum(), (values[counted] == 0).sum()) >= _FEWEST:
            found[name] = ("right − wrong" if name == "outcome" else name.replace("_", " "), values)
        elif name == "outcome":
            notes.append("Too few problems of these have both right and wrong responses: no target of outcomes.")
    return found


def _moved_most(
    path: TrainingPath, sae: TemporalSAE, fixed: Rollouts, special: list[int], config: AttributionConfig
) -> list[int]:
    """Features by the change of their means, in standard deviations over trajectories of the base."""
    every = FeatureMeans(sae, range(sae.config.d_sae), fixed, special, batch_tokens=config.batch_tokens)
    path.put(path.steps[0])
    before = every.each(path.trained, fixed, soft=False)
    path.put(path.last)
    moved, deviation = every.each(path.trained, fixed, soft=False).mean(0) - before.mean(0), before.std(0)
    size = np.where((before > 0).mean(0) >= 0.05, np.abs(moved) / np.where(deviation > 0, deviation, 1.0), 0.0)
    chosen = [int(feature) for feature in np.argsort(-size, kind="stable")[: config.n_features] if size[feature] > 0]
    if not chosen:
        raise TsaeError(
            f"no feature of the SAE at {sae.site} fires on the fixed trajectories, or none moved",
            where="attribute",
            fix="Give the SAE of this model, or features by number.",
        )
    return chosen
