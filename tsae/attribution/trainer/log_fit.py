"""Do log, checkpoints and settings belong to one run? And which of the log's rows are attributed.

What contradicts is refused; what is missing, or had to be assumed, becomes a note.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tsae.attribution.config import AttributionConfig
from tsae.attribution.trainer.recipe import Recipe
from tsae.base.files import reading
from tsae.base.untrusted import parse_json, parse_yaml
from tsae.errors import TsaeError
from tsae.rollouts.advantages import group_names
from tsae.rollouts.logs.checks.look_advantages import FORMULAS, recompute
from tsae.rollouts.table import Rollouts

_NUMBERS = (
    "num_generations", "max_completion_length", "max_steps", "train_batch_size", "ppo_mini_batch_size",
    "steps_per_generation", "gradient_accumulation_steps",
)  # fmt: skip
"""Settings that count something."""
Batches = dict[int, np.ndarray]
"""Rows of the rollouts by the number of the step that trained on them."""

_DIVIDED, _CENTRED, _BY_STEP = FORMULAS[:2], FORMULAS[2:3], FORMULAS[5:]
_SCALES = {"group": _DIVIDED, "true": _DIVIDED, "none": _CENTRED, "false": _CENTRED, "batch": _BY_STEP}
"""Formulas of the advantages by TRL's scale_rewards."""


def batches_between(
    rollouts: Rollouts, batches: Batches, ends: tuple[int, int], config: AttributionConfig, notes: list[str]
) -> Batches:
    """The rows of the steps between two checkpoints, given by the steps that were finished.

    Raises:
        TsaeError: where the log lacks a step.
    """
    first, last = ends[0] + 1, ends[1]
    missing = [step for step in range(first, last + 1) if step not in batches]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise TsaeError(
            f"lacks step {missing[0]}{others} of the steps {first} to {last} between the checkpoints; it has "
            f"{len(batches)} steps, {min(batches)} to {max(batches)}",
            where=rollouts.origin,
            fix="Give the log of every step (logging_steps=1 in TRL), or the stretch between two checkpoints that it "
            "covers (steps).",
        )
    beyond = [step for step in batches if not first <= step <= last]
    if beyond:
        notes.append(
            f"{len(beyond)} logged steps lie outside the checkpoints (steps {first} to {last}) and are left out."
        )
    found = {step: batches[step] for step in range(first, last + 1)}
    n = sum(map(len, found.values()))
    if n > config.max_samples:
        found = _drawn(rollouts, found, config.max_samples / n, config.seed)
        drawn = sum(map(len, found.values()))
        notes.append(
            f"Of {n:,} samples {drawn:,} were drawn, whole prompt groups at random within every step; each stands for "
            f"{n / drawn:.1f}. Sums over many samples hold; path_error says what it cost."
        )
    return found


def _drawn(rollouts: Rollouts, batches: Batches, share: float, seed: int) -> Batches:
    """A share of every step's prompt groups, at least one. The loss is a mean, so that nothing needs a weight."""
    rng, found = np.random.default_rng(seed), {}
    names = group_names(rollouts.frame)
    for step, rows in batches.items():
        _, group = np.unique(names[rows], return_inverse=True)
        n = group.max() + 1
        found[step] = rows[np.isin(group, rng.permutation(n)[: max(1, int(share * n))])]
    return found


def check_settings(rollouts: Rollouts, batches: Batches, recipe: Recipe, notes: list[str]) -> Rollouts:
    """Compare the log with the trainer's settings, and give it the advantages that the trainer used.

    Raises:
        TsaeError: where the settings are those of another run.
    """
    with reading(recipe.source, "Correct this file, or give the settings of the run that wrote the log."):
        settings = _whole_numbers(_settings(recipe))
    _check_one_step(settings, recipe)
    rows = np.concatenate(list(batches.values()))
    frame = rollouts.frame
    longest, limit = int(frame.response_length.to_numpy()[rows].max()), settings.get("max_completion_length")
    last, steps = max(batches), settings.get("max_steps")
    if limit and longest > int(limit):
        raise _contradiction(recipe, f"max_completion_length={limit}", f"the log has a response of {longest} tokens")
    if steps and int(steps) > 0 and last > int(steps):
        raise _contradiction(recipe, f"max_steps={steps}", f"the log has step {last}")
    _check_groups(rollouts, rows, settings, recipe, notes)
    rollouts = _with_advantages(rollouts, rows, settings, recipe, notes)
    return _cut_off(rollouts, rows, settings, notes)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What the file says beyond the recipe, in TRL's words; nothing where the recipe has no file."""
    file = Path(recipe.source)
    if not file.is_file():
        return {}
    text = file.read_text(encoding="utf-8")
    found: dict[str, Any] = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
    if "actor_rollout_ref" not in found:
        return found
    part, algorithm = found["actor_rollout_ref"], found.get("algorithm", {})
    actor, rollout = part.get("actor", {}), part.get("rollout", {})
    by_std = algorithm.get("norm_adv_by_std_in_grpo") if algorithm.get("adv_estimator") == "grpo" else None
    return {
        "num_generations": rollout.get("n"),
        "max_completion_length": rollout.get("response_length"),
        "scale_rewards": by_std,
        "max_steps": actor.get("optim", {}).get("total_training_steps"),
        "train_batch_size": found.get("data", {}).get("train_batch_size"),
        "ppo_mini_batch_size": actor.get("ppo_mini_batch_size"),
    }


def _whole_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with those that are numbers of something as such.

    Raises:
        ValueError: where one is none.
    """
    found = dict(settings)
    for name in _NUMBERS:
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | str) or int(value) != float(value):
            raise ValueError(f"{name} is {value!r}, expected a whole number")
        found[name] = int(value)
    return found


def _contradiction(recipe: Recipe, said: str, found: str) -> TsaeError:
    return TsaeError(
        f"say {said}, but {found}",
        where=recipe.source,
        fix="Give the settings of the run that wrote this log, or the log that these settings made.",
    )


def _check_one_step(settings: dict[str, Any], recipe: Recipe) -> None:
    """A batch that was sampled together is used for one step of the optimiser."""
    pairs = (("steps_per_generation", "gradient_accumulation_steps"), ("train_batch_size", "ppo_mini_batch_size"))
    for larger, smaller in pairs:
        a, b = settings.get(larger), settings.get(smaller)
        if a and b and int(a) > int(b):
            raise TsaeError(
                f"{larger}={a} and {smaller}={b}: {int(a) / int(b):g} optimiser steps for each batch of samples, "
                "and the log does not say which samples each was made of",
                where=recipe.source,
                fix="Attribute a run that takes one step of the optimiser a batch.",
            )


def _check_groups(
    rollouts: Rollouts, rows: np.ndarray, settings: dict[str, Any], recipe: Recipe, notes: list[str]
) -> None:
    """Prompt groups have as many samples as the settings say, or a multiple where a step asked a problem twice."""
    wanted = int(settings.get("num_generations") or 0)
    if not wanted:
        return
    size = np.unique(group_names(rollouts.frame)[rows], return_counts=True)[1]
    usual = int(np.bincount(size).argmax())
    if usual > wanted and usual % wanted:
        raise _contradiction(recipe, f"num_generations={wanted}", f"most prompt groups of the log have {usual} samples")
    few = int((size < wanted).sum())
    if few:
        notes.append(
            f"{few:,} of {len(size):,} prompt groups have fewer than the {wanted} samples that were drawn: the log or "
            "its import left some out, and what they did is nobody's share."
        )


def _with_advantages(
    rollouts: Rollouts, rows: np.ndarray, settings: dict[str, Any], recipe: Recipe, notes: list[str]
) -> Rollouts:
    frame = rollouts.frame
    logged, reward = (frame[name].to_numpy(dtype=float) for name in ("advantage", "reward"))
    scale = settings.get("scale_rewards")
    formulas = None if scale is None else _SCALES.get(str(scale).lower())
    if not np.isfinite(logged[rows]).any():
        if not np.isfinite(reward[rows]).all():
            raise TsaeError(
                f"has no advantages, and no rewards for {int((~np.isfinite(reward[rows])).sum()):,} of {len(rows):,} "
                "samples to compute them from",
                where=rollouts.origin,
                fix="Import the log with its rewards (--rewards).",
            )
        centred = formulas == _CENTRED
        what = _CENTRED[0] if centred else _DIVIDED[0]
        notes.append(f"The log has no advantages; they are computed from its rewards: {what} of the prompt group.")
        return rollouts.with_advantages("dr_grpo" if centred else "grpo")
    step = np.unique(frame["step"].to_numpy()[rows], return_inverse=True)[1]
    group = np.unique(group_names(frame)[rows], return_inverse=True)[1]
    again = recompute(reward[rows], logged[rows], group, step)
    varied = again.follow - again.constant
    if varied and formulas:
        agree = max(again.formulas.get(name, 0) for name in formulas)
        other = max(again.formulas, key=lambda name: again.formulas[name], default=None)
        if other is not None and agree < 0.5 * varied and again.formulas[other] > 0.9 * varied:
            raise _contradiction(
                recipe, f"scale_rewards={scale}", f"the advantages of {again.formulas[other]} prompt groups are {other}"
            )
    if varied:
        notes.append(
            f"Logged advantages follow from the rewards in {again.follow:,} of "
            f"{again.follow + again.contradict:,} prompt groups: {next(iter(again.formulas), 'in parts of a group')}."
        )
    if again.contradict:
        notes.append(
            f"In {again.contradict:,} prompt groups no known formula gives the logged advantages from the logged "
            "rewards; the advantages count as they were logged."
        )
    return rollouts


def _cut_off(rollouts: Rollouts, rows: np.ndarray, settings: dict[str, Any], notes: list[str]) -> Rollouts:
    """Samples that reached the limit of length."""
    cut = np.zeros(len(rollouts), dtype=bool)
    cut[rows] = (rollouts.frame.finish_reason == "length").to_numpy()[rows]
    if not cut.any():
        return rollouts
    if settings.get("mask_truncated_completions"):
        notes.append(
            f"{cut.sum():,} samples were cut off; the trainer left them out of the loss, and so they are here."
        )
        advantage = rollouts.frame.advantage.to_numpy(dtype=float)
        return rollouts.with_column("advantage", np.where(cut, 0.0, advantage))
    notes.append(f"{cut.sum():,} samples were cut off at the limit of length; they count like the others.")
    return rollouts
