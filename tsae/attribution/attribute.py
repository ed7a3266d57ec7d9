"""Which samples of a run moved what: from base, log and settings to an `Attribution`.

1. Log, checkpoints and settings must be those of one run. The log and the settings say which rows each step of the
   optimiser used (`tsae.attribution.order`).
2. The run is replayed: its own updates are taken again (`tsae.attribution.path`). Logged gradient norms and
   checkpoints say how well; above a distance no effect is computed.
3. Targets: what the caller names, or outcomes, behaviours and features that moved (`tsae.attribution.targets`).
4. Shares come from one sweep backwards through the replay (`tsae.attribution.shares`).
5. Effects: each band of problems is left out, and kept alone, in a real replay; other kinds of samples in a simulated
   one (`tsae.attribution.shares`).

Memory holds the model, some vectors of its weights for each target, and one batch of activations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import pandas as pd
import torch

from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.attribution.attribution import Attribution, fact_table, group_table, sample_table, target_table
from tsae.attribution.certificates import check_run, logged_facts, verdict, with_end_tokens
from tsae.attribution.config import AttributionConfig
from tsae.attribution.find_settings import find_settings
from tsae.attribution.forward_passes import OLD, REF, Run, logged
from tsae.attribution.log_fit import check_settings
from tsae.attribution.order import Plan, batches_of, counted, plan_updates, read_history
from tsae.attribution.path import Controls, Replayed, replay, train_on
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.sample_kinds import band_of, has_bands, label_of_bands, sample_kinds
from tsae.attribution.settings import RunSettings
from tsae.attribution.shares import Shares, TokenShares, fits, shares, simulate
from tsae.attribution.start import checkpoints_of, start_of
from tsae.attribution.states import States
from tsae.attribution.targets import FeatureMeans, Targets, find_targets
from tsae.base.files import as_path
from tsae.checkpoints.loading import Checkpoint, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import token_strings
from tsae.checkpoints.weight_files import folder_of
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import behaviour_table, behaviours_named, in_thirds, with_behaviours
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

_SHARES_ONLY = ("band and outcome", "band and outcome and third")
"""Kinds of which no training is simulated: they are many, and read as a table of shares."""


def attribute(
    series: CheckpointSeries,
    rollouts: Rollouts,
    to: str | Path,
    *,
    settings: RunSettings | str | Path | None = None,
    sae: TemporalSAE | str | Path | None = None,
    run: str | None = None,
    first_token: int | None = None,
    targets: Targets | None = None,
    problems: Rollouts | None = None,
    config: AttributionConfig | None = None,
    about: str = "",
    progress: bool = True,
) -> Attribution:
    """Attribute what a run changed to the samples that it was trained on.

    Args:
        series: the base, and the run's checkpoints; one at the end is enough.
        rollouts: the run's log, with steps and rewards or advantages.
        to: folder for the results. The replay keeps its states there, and removes them when it ends.
        settings: the run's, or the folder or file where the trainer left them; by default what lies beside the
            checkpoints.
        sae: gives features as targets; the SAE or its folder.
        run: its name, where the series has several.
        first_token: token id; the probability that a response begins with it becomes a target.
        targets: others, instead of all that are found here.
        problems: responses of the base to problems that the run did not train on, with outcomes: targets are measured
            there. By default on the log's own problems.
        config: how much is computed.
        about: a sentence on the run, which the report says first.
        progress: show bars.

    Returns:
        shares of samples, and effects of kinds of samples; also saved in the folder.

    Raises:
        TsaeError: where log, checkpoints and settings do not fit together.
    """
    config, to = config or AttributionConfig(), as_path(to)
    sae = None if sae is None else TemporalSAE.of(sae, device=config.device)
    given = settings if isinstance(settings, RunSettings) else find_settings(series, run, settings)
    mine = checkpoints_of(series, run)
    notes = list(given.notes)
    prepared, controls, facts, reference = _prepared(series, mine, rollouts, given, config, notes)
    trained = prepared.trained
    special = _special(series, prepared.rollouts, sae, trained, first_token)
    states = States(to / ".replay", len(prepared.plan.updates), len(trained), int(config.budget_gb * 1e9))
    try:
        path = replay(prepared, states, controls, facts, reference=reference, progress=progress)
        check_run(path.steps, given)
        if path.lost:
            notes.append(
                f"The log of texts has lost special tokens; where they make the responses most likely, {path.lost} of "
                "those that the trainer counted were put back."
            )
        judged, log = verdict(path.run, path.steps), path.run.rollouts
        rows = np.concatenate([np.concatenate(update.parts) for update in path.run.plan.updates])
        wanted = targets or find_targets(
            trained, (prepared.begin.weights, path.end), log, rows, problems=problems, sae=sae,
            first_token=first_token, special=special, temperature=given.loss.temperature, config=config, notes=notes,
        )  # fmt: skip
        reading = TokenShares(path.run, wanted, config, token_strings(series.base.load_tokenizer()))
        split = shares(path, wanted, points=config.points, seen=reading, progress=progress)
        effects = config.effects and not judged.gate
        groups = _groups(path, wanted, split, replace(config, effects=effects), notes, progress)
        trained.put(prepared.begin.weights)
        along = _along(trained, wanted, log.select(np.unique(rows)))
    finally:
        states.remove()
    found = Attribution(
        target_table(split, config.flag_remainder),
        sample_table(split),
        fact_table(split, log, list(reading.best)),
        groups,
        path.steps,
        reading.entropy_table(split),
        reading.token_table(),
        along,
        {
            "recipe": str(given),
            "config": vars(config),
            "series": series.name,
            "run": mine[-1].run,
            "checkpoints": [series.base.step, *(c.step for c in mine)],
            "inputs": {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint},
            "weights": {str(c.step): weights_fingerprint(c) for c in (series.base, *mine)},
            "sae": None if sae is None else sae.fingerprint,
            "path_error": judged.path_error,
            "replay": judged.record(path.run.plan.updates[-1].step),
            "gate": judged.gate,
            "trained_on": problems is None,
            "bands": label_of_bands(rollouts),
            "notes": notes,
            "about": about,
        },
        source=rollouts,
    )
    return found.save(to)


def _along(trained: TrainedWeights, targets: Targets, log: Rollouts) -> pd.DataFrame:
    """What the log's responses show by band and third of the run; see `Attribution.along`."""
    named = [name for name in behaviours_named(log) if name in log.frame.columns]
    for part in getattr(targets, "parts", ()):
        if isinstance(part, FeatureMeans):
            named += part.names
            for name, values in zip(part.names, part.each(trained, log, soft=False).T, strict=True):
                log = log.with_column(name, values)
    log = in_thirds(log.with_column("band", [band if band in BANDS else None for band in band_of(log)]))
    table = behaviour_table(
        Rollouts(log.table, {**log.info, "behaviours": named}, log.origin), reference=log.policies[0]
    )
    return table.rename(columns={"policy": "third", "behaviour": "measure"})


def _prepared(
    series: CheckpointSeries,
    mine: list[Checkpoint],
    rollouts: Rollouts,
    settings: RunSettings,
    config: AttributionConfig,
    notes: list[str],
) -> tuple[Run, Controls, pd.DataFrame, torch.Tensor | None]:
    """What is replayed, of the whole run or of the stretch that is asked for; the checkpoints that control it, what the
    trainer logged, and the reference where it is not the first model."""
    after, last = config.steps or (series.base.step, mine[-1].step)
    folders = {c.step: Path(folder_of(c)) for c in mine}
    history = read_history(folders)
    facts = logged_facts(history)
    limit = counted(settings, "max_completion_length")
    tokenizer = series.base.load_tokenizer()
    rollouts = with_end_tokens(rollouts, batches_of(rollouts), facts, tokenizer.eos_token_id, limit, notes)
    start = start_of(series, mine, settings.optimiser, after=after, seed=settings.seed, device=config.device)
    notes += start.notes
    vocabulary = start.trained.model.get_output_embeddings().weight.shape[0]
    steps = (after + 1, last) if config.steps or after else None
    plan = plan_updates(rollouts, settings, checkpoints=folders, vocabulary=vocabulary, steps=steps)
    sampled = np.concatenate(plan.generations)
    if plan.updates[0].step != after + 1:
        what = f"begins at step {plan.updates[0].step}, and the replay after step {after}"
        fix = "Give the log of every step, or begin after a checkpoint that has optimizer.pt (--steps)."
        raise TsaeError(what, where=rollouts.origin, fix=fix)
    if (end := plan.updates[-1].step) < last:
        notes.append(f"The log ends at step {end}: it does not reach the run's last checkpoint, of step {last}.")
    notes += plan.notes
    of_generations = {u.step: plan.generations[u.generation] for u in plan.updates if u.first}
    rollouts = check_settings(rollouts, of_generations, settings, notes, history)
    if np.isfinite(rollouts.frame.advantage.to_numpy(dtype=float)[sampled]).any():
        settings = replace(settings, reward_kl=None)
    rollouts = _with_behaviours(rollouts, config, notes)
    _check_begin(rollouts, settings, plan)
    special = tuple(tokenizer.all_special_ids)
    run = Run(start.trained, rollouts, settings, plan, start.begin, config.batch_tokens, special)
    reference = None
    later = series.base.step > 0 or (settings.loss.sync_ref is not None and after > 0)
    if settings.needs_ref and later and logged(rollouts, REF, sampled) is None:
        what = f"the model that the KL term is against is not known after step {after}"
        fix = "Replay from the training's first model (--base, without --steps), or give a log with ref_logprobs"
        raise TsaeError(what, where=series.name, fix=f"{fix} (tsae.rl.TsaeCallback).")
    if settings.needs_ref and after != series.base.step:
        reference = start_of(series, mine, settings.optimiser, seed=settings.seed, device=config.device).begin.weights
        start.trained.put(start.begin.weights)
    return run, start.controls, facts, reference


def _check_begin(rollouts: Rollouts, settings: RunSettings, plan: Plan) -> None:
    """A stretch begins where a generation does, or the log has what its ratios are against."""
    first, loss = plan.updates[0], settings.loss
    wanted = [OLD] * (loss.needs_old or settings.reward_kl is not None) + [REF] * settings.needs_ref
    rows = plan.generations[first.generation]
    if not first.first and any(logged(rollouts, name, rows) is None for name in wanted):
        begins = [update.step - 1 for update in plan.updates if update.first]
        what = f"begins after step {first.step - 1}, in the middle of a generation with unknown log-probabilities"
        fix = f"Begin after step {begins[0]}, or log the training with tsae.rl.TsaeCallback." if begins else ""
        raise TsaeError(what, where="steps", fix=fix)


def _with_behaviours(rollouts: Rollouts, config: AttributionConfig, notes: list[str]) -> Rollouts:
    if "behaviours" not in config.targets and "behaviour" not in config.groups:
        return rollouts
    if rollouts.frame.response.isna().any():
        notes.append("Some responses have no text: behaviours are not read from them.")
        return rollouts
    return with_behaviours(rollouts)


def _special(
    series: CheckpointSeries, rollouts: Rollouts, sae: TemporalSAE | None, trained: TrainedWeights, token: int | None
) -> list[int]:
    """Token ids that count in no feature; checks that log, SAE and first token belong to the model."""
    vocabulary, width = trained.model.get_input_embeddings().weight.shape
    if token is not None and not (isinstance(token, SupportsIndex) and 0 <= token < vocabulary):
        raise TsaeError(f"{token!r} is not a token id of this model (0 to {vocabulary - 1})", where="first_token")
    check_context(rollouts, getattr(trained.model.config, "max_position_embeddings", None), vocabulary)
    if sae is None and rollouts.info.get("tokenizer") is None:
        return []
    tokenizer = check_tokenizer(series.base, rollouts)
    if sae is None:
        return []
    if sae.d_model != width:
        what = f"the SAE reads {sae.d_model} numbers a token, the model has {width}"
        raise TsaeError(what, where=sae.site, fix="Give an SAE of this model.")
    return list(tokenizer.all_special_ids)


def _groups(
    path: Replayed, targets: Targets, split: Shares, config: AttributionConfig, notes: list[str], progress: bool
) -> pd.DataFrame:
    """What kinds of samples did, and what would have been without them."""
    run = path.run
    used = np.zeros(len(run.rollouts), dtype=bool)
    used[split.rows] = True
    if not has_bands(run.rollouts):
        notes.append("The log has no bands; `tsae rollouts bands` sets them.")
    kinds = sample_kinds(run.rollouts, config.groups, used)
    found: dict[tuple[str, str], tuple[np.ndarray, str]] = {}
    whole = {"replayed": split.realised}

    def change(weights: torch.Tensor) -> np.ndarray:
        run.trained.put(weights)
        return targets.values(run.trained) - split.before

    if config.effects:
        bands = [name for name, (kind, _) in kinds.items() if kind == "band"]
        if bands and path.restarts:
            whole["replayed"] = change(train_on(path, used, progress=progress))
        for name in bands:
            mask = kinds[name][1]
            for what, kept in (("without", used & ~mask), ("alone", mask)):
                found[what, name] = (change(train_on(path, kept, progress=progress)), "replayed")
        others = [name for name, (kind, _) in kinds.items() if kind != "band" and kind not in _SHARES_ONLY]
        masks = [(what, n) for n in others for what in ("without", "alone")]
        at_once = next((n for n in range(len(masks), 0, -1) if fits(run, n + 1, int(config.memory_gb * 1e9))), 0)
        if masks and at_once < 2:
            notes.append(
                "Trainings without other kinds than bands are not simulated: their states do not fit the memory "
                f"({config.memory_gb:g} GB, --memory-gb)."
            )
        for low in range(0, len(masks), at_once) if at_once >= 2 else ():
            some = masks[low : low + at_once]
            kept = [used & ~kinds[n][1] if what == "without" else kinds[n][1] for what, n in some]
            ends = simulate(path, np.array([used, *kept]), again=config.again, progress=progress)
            whole["simulated"] = change(ends[0])
            found |= {key: (change(end), "simulated") for key, end in zip(some, ends[1:], strict=True)}
    return group_table(kinds, found, whole, split)
