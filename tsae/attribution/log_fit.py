"""Do log and settings belong to one run? And what the trainer made of its rows.

What contradicts is refused; what is missing, or had to be assumed, becomes a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tsae.attribution.order import counted, last_step
from tsae.attribution.settings import RunSettings
from tsae.errors import TsaeError, refuse
from tsae.rollouts.logs.check_advantages import FORMULAS, recompute
from tsae.rollouts.rewards import group_advantages, group_names
from tsae.rollouts.table import Rollouts

_DIVIDED, _CENTRED, _BY_STEP = FORMULAS[:2], FORMULAS[2:3], FORMULAS[5:]
_SCALES = {"group": _DIVIDED, "true": _DIVIDED, "none": _CENTRED, "false": _CENTRED, "batch": _BY_STEP}
"""Formulas of the advantages by TRL's scale_rewards."""
_NAMES = {"grpo": FORMULAS[0], "dr_grpo": FORMULAS[2], "rloo": FORMULAS[3]}
_LONGER, _SHARE_LONGER = 1.05, 0.02
"""Tokens, or their share, by which lengths may differ: a text log lacks end tokens, and is tokenised anew."""
History = Mapping[int, Mapping[str, Any]]


def check_settings(
    rollouts: Rollouts,
    rows_by_step: Mapping[int, np.ndarray],
    settings: RunSettings,
    notes: list[str],
    history: History | None,
) -> Rollouts:
    """Compare the log with the trainer's settings, and give it the advantages that the trainer used.

    Args:
        rollouts: the log.
        rows_by_step: rows of every generation, by the first step that used it.
        settings: of the run.
        notes: gets a sentence for everything that was assumed or computed.
        history: what the trainer logged beside (`tsae.attribution.order.read_history`).

    Raises:
        TsaeError: where settings or history are those of another run, or a step is in the log twice.
    """
    rows, frame = np.concatenate(list(rows_by_step.values())), rollouts.frame
    longest, last = int(frame.response_length.to_numpy()[rows].max()), max(rows_by_step)
    limit, steps = counted(settings, "max_completion_length"), last_step(settings)
    _contradiction(
        settings,
        (limit and longest > limit, f"max_completion_length={limit}", f"the log has a response of {longest} tokens"),
        (steps and last > steps, f"max_steps={steps}", f"the log has step {last}"),
    )
    _check_groups(rollouts, rows_by_step, settings, notes)
    _check_history(rollouts, rows_by_step, settings, history or {})
    rollouts = _with_advantages(rollouts, rows, settings, notes)
    return _cut_off(rollouts, rows, settings, notes)


def _contradiction(settings: RunSettings, *rules: tuple[object, str, str]) -> None:
    """Refuse settings that the log contradicts: of each rule whether it does, what settings say, and what is there."""
    fix = "Give the settings of the run that wrote this log, or the log that these settings made."
    refuse(settings.source, *((broken, f"say {stated}, but {found}", fix) for broken, stated, found in rules))


def _check_groups(
    rollouts: Rollouts, rows_by_step: Mapping[int, np.ndarray], settings: RunSettings, notes: list[str]
) -> None:
    """Prompt groups have as many samples as the settings say, or a multiple where a step asked a problem twice; so have
    generations."""
    rows, wanted = np.concatenate(list(rows_by_step.values())), counted(settings, "num_generations")
    few = 0
    if wanted:
        size = np.unique(group_names(rollouts.frame)[rows], return_counts=True)[1]
        usual = int(np.bincount(size).argmax())
        what = f"most prompt groups of the log have {usual} samples"
        _contradiction(settings, (usual > wanted and usual % wanted, f"num_generations={wanted}", what))
        few = int((size < wanted).sum())
        if few:
            notes.append(
                f"{few:,} of {len(size):,} prompt groups have fewer than the {wanted} samples that were drawn: the log "
                "or its import left some out, and what they did is nobody's share."
            )
    a_part, n_parts = counted(settings, "per_device_train_batch_size"), settings.batching.parts
    sizes = {step: len(rows) for step, rows in rows_by_step.items()}
    at, usual = max(sizes, key=lambda step: sizes[step]), int(np.bincount([*sizes.values()]).argmax())
    largest, whole = sizes[at], (a_part or 0) * n_parts * (settings.batching.processes or 0)
    if a_part and largest > (whole or 2 * usual - 1):
        what = f"step {at} has {largest} samples, and a generation {whole or usual}: the step is in the log twice, as "
        what += "after a resume, or the settings are of another run"
        fix = "Keep the rows of the later attempt alone, or give the settings of this run."
        raise TsaeError(what, where=rollouts.origin, fix=fix)
    broken = a_part and not few and largest % (a_part * n_parts)
    stated = f"per_device_train_batch_size={a_part} and {n_parts} micro-batches a generation"
    _contradiction(settings, (broken, stated, f"a generation of the log has {largest} samples"))


def _check_history(
    rollouts: Rollouts, rows_by_step: Mapping[int, np.ndarray], settings: RunSettings, history: History
) -> None:
    """The trainer logged mean lengths and rewards of the same samples."""
    frame = rollouts.frame
    columns = {f"rewards/{name.partition('/')[2]}/mean": name for name in frame.columns if name.startswith("reward/")}
    columns |= {"completions/mean_length": "response_length"}
    for name, column in columns.items():
        values = frame[column].to_numpy(dtype=float, na_value=np.nan)
        pairs = np.array(
            [
                (np.nanmean(values[rows]), value)
                for step, rows in rows_by_step.items()
                if isinstance(value := history.get(step, {}).get(name), int | float) and np.isfinite(values[rows]).any()
            ]
        ).reshape(-1, 2)
        if not len(pairs):
            continue
        of_log, of_trainer = pairs.T
        lengths = column == "response_length"
        allowed = (
            np.maximum(_LONGER, _SHARE_LONGER * of_trainer) if lengths else 1e-3 * np.maximum(1, np.abs(of_trainer))
        )
        off = np.abs(of_log - of_trainer) > allowed
        if off.mean() > 0.5:
            first = int(off.argmax())
            raise TsaeError(
                f"the trainer logged other {'lengths' if lengths else 'rewards'} in {off.sum()} of {len(off)} steps: "
                f"{name} was {of_trainer[first]:.4g} where the log has {of_log[first]:.4g}",
                where=rollouts.origin,
                fix="Give the log of this run" + ("." if lengths else ", with its rewards as the trainer had them."),
            )


def _with_advantages(rollouts: Rollouts, rows: np.ndarray, settings: RunSettings, notes: list[str]) -> Rollouts:
    frame = rollouts.frame
    logged, reward = (frame[name].to_numpy(dtype=float) for name in ("advantage", "reward"))
    scale = settings.facts.get("scale_rewards")
    formulas = None if scale is None else _SCALES.get(str(scale).lower())
    if not np.isfinite(logged[rows]).any():
        kind = _advantage_kind(settings)
        if kind not in _NAMES:
            what = f"has no advantages, and the trainer computed them in a way that is not followed here (as {kind})"
            raise TsaeError(what, where=rollouts.origin, fix="Import a log that has them.")
        if not np.isfinite(reward[rows]).all():
            what = (
                f"has no advantages, and no rewards for {int((~np.isfinite(reward[rows])).sum()):,} of {len(rows):,} "
                "samples to compute them from"
            )
            raise TsaeError(what, where=rollouts.origin, fix="Import the log with its rewards (--rewards).")
        penalty = " and the divergence from the reference" if settings.reward_kl else ""
        notes.append(
            f"The log has no advantages; they are computed from its rewards{penalty}: {_NAMES[kind]} of the group."
        )
        if settings.reward_kl:
            return rollouts  # The replay computes them, generation by generation.
        computed = advantages_of(settings, reward[rows], group_names(frame)[rows])
        return rollouts.with_column("advantage", np.bincount(rows, computed, len(rollouts)))
    step = np.unique(frame["step"].to_numpy()[rows], return_inverse=True)[1]
    group = np.unique(group_names(frame)[rows], return_inverse=True)[1]
    again = recompute(reward[rows], logged[rows], group, step)
    varied = again.follow - again.constant
    if varied and formulas:
        agree = max(again.formulas.get(name, 0) for name in formulas)
        other = max(again.formulas, key=lambda name: again.formulas[name], default=None)
        if other is not None and agree < 0.5 * varied and again.formulas[other] > 0.9 * varied:
            what = f"the advantages of {again.formulas[other]} prompt groups are {other}"
            if other in _BY_STEP and formulas == _CENTRED:
                if any(weight != 1 for weight in settings.facts.get("reward_weights") or ()):
                    return rollouts
                what += ", or the rewards were rescaled after the training"
            _contradiction(settings, (True, f"scale_rewards={scale}", what))
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


def advantages_of(settings: RunSettings, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(n,) advantages as the trainer makes them from finite rewards, (n,), and labels of prompt groups, (n,)."""
    epsilon = float(settings.facts.get("advantage_epsilon") or 1e-4)
    return group_advantages(rewards, groups, _advantage_kind(settings), epsilon=epsilon)


def _advantage_kind(settings: RunSettings) -> Any:
    scale = settings.facts.get("scale_rewards")
    centred = scale is not None and _SCALES.get(str(scale).lower()) == _CENTRED
    return settings.facts.get("advantages") or ("dr_grpo" if centred else "grpo")


def _cut_off(rollouts: Rollouts, rows: np.ndarray, settings: RunSettings, notes: list[str]) -> Rollouts:
    """Samples that reached the limit of length."""
    cut = np.zeros(len(rollouts), dtype=bool)
    cut[rows] = (rollouts.frame.finish_reason == "length").to_numpy()[rows]
    if not cut.any():
        return rollouts
    if settings.loss.mask_truncated:
        notes.append(
            f"Samples that were cut off: {cut.sum():,}. The trainer left them out of the loss, and so they are here."
        )
        advantage = rollouts.frame.advantage.to_numpy(dtype=float)
        return rollouts.with_column("advantage", np.where(cut, 0.0, advantage))
    notes.append(f"Samples that were cut off at the limit of length: {cut.sum():,}. They count like the others.")
    return rollouts
