"""What is attributed where nobody names targets: outcomes by band, behaviours, a first token, and features that moved.

All are measured on fixed responses: to problems of the user's (`problems`), else to those of the log's first steps.
"""

from __future__ import annotations

import numpy as np
import torch

from tsae.attribution.config import AttributionConfig
from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.attribution.sample_kinds import band_of
from tsae.attribution.targets import FeatureMeans, LogLikelihood, NextToken, Targets, Together
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import behaviours_named
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

_PER_PROBLEM = 8
"""Responses to a problem that are fixed, at most, half of them right where there are as many."""
_VECTORS = 6
"""Vectors of all trained weights that the sweep holds for a target."""
_FEWEST = 3
"""Responses of each kind that a comparison needs."""


def find_targets(
    trained: TrainedWeights,
    ends: tuple[torch.Tensor, torch.Tensor],
    rollouts: Rollouts,
    rows: np.ndarray,
    *,
    problems: Rollouts | None,
    sae: TemporalSAE | None,
    first_token: int | None,
    special: list[int],
    temperature: float,
    config: AttributionConfig,
    notes: list[str],
) -> Targets:
    """Find what to attribute.

    Args:
        trained: the model.
        ends: (P,) its first weights, and its last.
        rollouts: with behaviours, where the log has texts (`tsae.rollouts.behaviours.with_behaviours`).
        rows: of the rollouts, in the order of the training.
        problems: responses to other problems, over which targets are measured.
        sae: gives features.
        first_token: token id.
        special: token ids that count in no feature.
        temperature: of the sampling.
        config: which targets, and over how many trajectories.
        notes: says what was chosen, and what is missing.

    Raises:
        TsaeError: where there is nothing to attribute.
    """
    whose = rollouts if problems is None else problems
    fixed = _fixed(whose, rows if problems is None else np.arange(len(problems)), config)
    source = "that the run trained on" if problems is None else "that were given"
    notes.append(f"Targets are measured on {len(fixed)} responses to {fixed.n_problems} problems {source}.")
    parts: list[Targets] = []
    if first_token is not None:
        prompts = {fixed.frame.problem_id[row]: fixed.tokens(row)[0] for row in range(len(fixed))}
        parts.append(NextToken(list(prompts.values()), ["first token"] * len(prompts), first_token, what="P"))
    shows, lacks = _kinds(fixed, config, notes)
    most = max(1, int(config.memory_gb * 1e9 / (_VECTORS * 4 * len(trained))))
    if len(shows) > most:
        notes.append(f"{most} of {len(shows)} outcomes and behaviours are attributed: more do not fit --memory-gb.")
        shows, lacks = ({name: side[name] for name in list(shows)[:most]} for side in (shows, lacks))
    if shows:
        parts.append(LogLikelihood(fixed, shows, lacks, batch_tokens=config.batch_tokens, temperature=temperature))
    if sae is not None and "features" in config.targets:
        chosen = list(config.features) or _moved_most(trained, ends, sae, fixed, special, config)
        if len(chosen) > (left := max(most - len(shows), 0 if shows else 1)):
            notes.append(f"{left} of {len(chosen)} features are attributed: more do not fit --memory-gb.")
        if chosen := chosen[:left]:
            parts.append(FeatureMeans(sae, chosen, fixed, special, batch_tokens=config.batch_tokens))
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
    return Together(*parts)


def _fixed(rollouts: Rollouts, rows: np.ndarray, config: AttributionConfig) -> Rollouts:
    """Some responses to each of some problems: of every band as many, first problems with right and wrong ones."""
    rng, frame = np.random.default_rng(config.seed), rollouts.frame
    bands, problem = band_of(rollouts)[rows], frame.problem_id.to_numpy()[rows]
    right, wrong = ((frame.outcome == what).to_numpy()[rows] for what in ("success", "failure"))
    names = list(dict.fromkeys(bands.tolist()))
    quota, chosen = -(-config.n_fixed // len(names)), []
    for band in names:
        mine = list(dict.fromkeys(problem[bands == band].tolist()))
        groups = [np.flatnonzero((problem == name) & (bands == band)) for name in mine]
        groups.sort(key=lambda some: not (right[some].any() and wrong[some].any()))
        n = 0
        for some in groups:
            if n >= quota:
                break
            kinds = [some[right[some]], some[~right[some]]]
            taken = np.concatenate([rng.permutation(kind)[: _PER_PROBLEM // 2] for kind in kinds])[: quota - n]
            chosen.append(rows[taken])
            n += len(taken)
    return rollouts.select(np.sort(np.concatenate(chosen)))


def _column(rollouts: Rollouts, name: str) -> np.ndarray:
    """(n,) 1 for a sample that shows it, 0 for one that does not, else NaN."""
    if name != "outcome":
        found: np.ndarray = rollouts.frame[name].to_numpy(dtype=float)
        return found
    outcome = rollouts.frame.outcome
    return np.where(outcome == "unknown", np.nan, (outcome == "success").astype(float))


def _kinds(
    fixed: Rollouts, config: AttributionConfig, notes: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Comparisons of responses by the target's name: (n,) those that show it, and those that do not."""
    wanted = ["outcome"] if "outcome" in config.targets else []
    if "behaviours" in config.targets:
        wanted += [name for name in behaviours_named(fixed) if name in fixed.frame.columns]
    shows: dict[str, np.ndarray] = {}
    lacks: dict[str, np.ndarray] = {}
    problem, bands = fixed.frame.problem_id.to_numpy(), band_of(fixed)
    every = np.ones(len(fixed), dtype=bool)
    for name in wanted:
        values = _column(fixed, name)
        known = np.isfinite(values)
        if not np.isin(values[known], (0, 1)).all():
            continue  # A degree, such as a length, does not divide responses into two kinds.
        label = "right − wrong" if name == "outcome" else f"log-likelihood, {name.replace('_', ' ')}"
        of_bands = {f"{label}, {band}": bands == band for band in dict.fromkeys(bands) if band is not None}
        for title, mask in ({label: every} | (of_bands if name == "outcome" else {})).items():
            one, other = mask & (values == 1), mask & (values == 0)
            both = np.intersect1d(problem[one], problem[other])
            one, other = (side & np.isin(problem, both) for side in (one, other))
            if min(one.sum(), other.sum()) >= _FEWEST:
                shows[title], lacks[title] = one, other
            elif name == "outcome":
                band = title.removeprefix(label).removeprefix(", ")
                notes.append(
                    f"Too few {band + ' ' * bool(band)}problems have both right and wrong responses: no target of "
                    f"{'accuracy on them' if band else 'outcomes'}."
                )
    return shows, lacks


def _moved_most(
    trained: TrainedWeights,
    ends: tuple[torch.Tensor, torch.Tensor],
    sae: TemporalSAE,
    fixed: Rollouts,
    special: list[int],
    config: AttributionConfig,
) -> list[int]:
    """Features by the change of their means, in standard deviations over trajectories of the base."""
    every = FeatureMeans(sae, range(sae.config.d_sae), fixed, special, batch_tokens=config.batch_tokens)
    trained.put(ends[0])
    before = every.each(trained, fixed, soft=False)
    trained.put(ends[1])
    moved, deviation = every.each(trained, fixed, soft=False).mean(0) - before.mean(0), before.std(0)
    size = np.where((before > 0).mean(0) >= 0.05, np.abs(moved) / np.where(deviation > 0, deviation, 1.0), 0.0)
    chosen = [int(feature) for feature in np.argsort(-size, kind="stable")[: config.n_features] if size[feature] > 0]
    if not chosen:
        raise TsaeError(
            f"no feature of the SAE at {sae.site} fires on the fixed trajectories, or none moved",
            where="attribute",
            fix="Give the SAE of this model, or features by number.",
        )
    return chosen
