"""Which samples of a run moved what: from checkpoints and log to an `Attribution`.

1. Log, checkpoints and settings must be those of one run (`tsae.attribution.trainer.log_fit`).
2. Targets: what the caller names, or outcomes, behaviours and the features that moved most (`tsae.attribution.wanted`).
3. The gradient of every sample, along the path, goes to disk; shares come from one sweep backwards through the run.
4. Runs are simulated on subsets of the samples: without each kind and with it alone, without single samples, and on
   random halves of the problems, on which their effects are regressed.
5. If asked, trainings are really replayed on other halves (`tsae.attribution.credit.replays`).

Memory holds the checkpoints, some vectors of the weights for each target, and the gradients of one step.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from tsae.activations.reader.assignment import check_context, check_tokenizer
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.attribution.credit.banzhaf import PER_UNIT, Banzhaf, banzhaf, random_halves
from tsae.attribution.credit.replays import Logs, validate
from tsae.attribution.credit.shares import Shares, shares
from tsae.attribution.credit.simulations import simulate_kept
from tsae.attribution.credit.token_shares import Directions
from tsae.attribution.gradients.gradient_store import GradientStore, batches_of, build_gradients
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.sample_kinds import has_bands, sample_kinds
from tsae.attribution.tables import (
    covariances,
    fact_table,
    group_table,
    problem_table,
    sample_table,
    segment_table,
    strongest,
    target_table,
)
from tsae.attribution.targets import Targets
from tsae.attribution.trainer.log_fit import Batches, batches_between, check_settings
from tsae.attribution.trainer.recipe import Recipe, read_recipe
from tsae.attribution.training.optimiser import LaterOptimiser, Optimiser
from tsae.attribution.wanted import Wanted, find_targets
from tsae.base.files import as_path, read_object, write_json
from tsae.checkpoints.loading import weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import with_behaviours
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

_FAR = 0.05
"""Distance of the simulated optimiser from the checkpoints at which settings or log are doubted."""


def attribute(
    series: CheckpointSeries,
    rollouts: Rollouts,
    to: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    sae: TemporalSAE | str | Path | None = None,
    run: str | None = None,
    first_token: int | None = None,
    targets: Targets | None = None,
    config: AttributionConfig | None = None,
    progress: bool = True,
) -> Attribution:
    """Attribute what a run changed to the samples that it was trained on.

    Args:
        series: the base, and the run's checkpoints; the more the better.
        rollouts: the run's log, with steps and rewards or advantages.
        to: folder for the samples' gradients, the simulated runs and the results; an interrupted call goes on from it.
        recipe: the run's optimiser and loss, or the folder or file with the trainer's settings; by default what lies
            beside the checkpoints.
        sae: gives features as targets; the SAE or its folder.
        run: its name, where the series has several.
        first_token: token id; the probability that a response begins with it becomes a target.
        targets: others, instead of all that are found here.
        config: how much is computed.
        progress: show bars.

    Returns:
        shares of samples, and effects of kinds of samples and of problems; also saved in the folder.

    Raises:
        TsaeError: where log, checkpoints and settings do not fit together.
    """
    config, to = config or AttributionConfig(), as_path(to)
    sae = None if sae is None else TemporalSAE.of(sae, device=config.device)
    recipe = recipe if isinstance(recipe, Recipe) else find_recipe(series, run, recipe)
    notes: list[str] = []
    stretch = _stretch(series, rollouts, recipe, run, config, notes)
    checked = _with_behaviours(check_settings(rollouts, stretch.logged, recipe, notes), config, notes)
    wanted = Wanted(targets, None) if targets is not None else None
    _check_token(first_token, stretch.path)
    special = _special(series, checked, sae, stretch.path)
    wanted = wanted or find_targets(
        stretch.path,
        checked,
        stretch.batches[1],
        sae=sae,
        first_token=first_token,
        special=special,
        temperature=recipe.loss.temperature,
        config=config,
        notes=notes,
    )
    inputs, weights = _inputs(stretch, checked), _weights(series, stretch)
    _begin(to, inputs)
    budget = int(config.budget_gb * 1e9)
    store = build_gradients(
        stretch.path, checked, stretch.batches, recipe.loss, to / "gradients", budget=budget,
        batch_tokens=config.batch_tokens, progress=progress,
    )  # fmt: skip
    ends = [_values(stretch.path, wanted.targets, step) for step in (0, stretch.path.last)]
    mark = {
        "inputs": inputs,
        "optimiser": repr(stretch.optimiser),
        "targets": wanted.targets.names,
        "values": [end.tolist() for end in ends],
    }
    directions = _directions(to, mark, config)
    split = _shares(store, stretch, wanted.targets, directions, budget, config, notes, progress)
    used = np.zeros(len(checked), dtype=bool)
    used[split.rows] = True
    if not has_bands(checked):
        notes.append("The log has no bands; `tsae rollouts bands` sets them.")
    kinds = sample_kinds(checked, config.groups, used)
    singles = strongest(split, config.singles)
    problem = checked.frame.problem_id.to_numpy()
    names = np.unique(problem[used])
    halves = _halves(len(names), config, notes)
    of_problem = halves[:, np.searchsorted(names, problem).clip(max=len(names) - 1)] & used
    alone = [mask for _, mask in kinds.values()]
    without_one = [used & (np.arange(len(used)) != row) for row in singles]
    whole, *changes = simulate_kept(
        store,
        stretch.path,
        stretch.optimiser,
        wanted.targets,
        [used, *(used & ~mask for mask in alone), *alone, *without_one, *of_problem],
        to / "simulated",
        mark,
        again=config.again,
        progress=progress,
    )
    of_kinds, of_singles, of_halves = np.split(
        np.reshape(changes, (-1, len(whole))), [2 * len(kinds), 2 * len(kinds) + len(singles)]
    )
    regressed = banzhaf(halves, of_halves, seed=config.seed) if len(halves) else None
    agreement = None
    if config.validate and len(names) > 1:
        logs = Logs(checked, stretch.batches, recipe.loss, stretch.optimiser, config.batch_tokens)
        agreement = validate(
            store, stretch.path, logs, wanted.targets, problem, config.validate, to / "simulated", mark,
            seed=config.seed, progress=progress,
        )  # fmt: skip
    found = Attribution(
        target_table(split, ends[0], whole, _r2(regressed, split), agreement, config.flag_remainder),
        sample_table(
            split,
            _covariances(split, stretch, checked, wanted),
            {row: whole - change for row, change in zip(singles, of_singles, strict=True)},
            stretch.begin,
        ),
        fact_table(split, checked, stretch.begin),
        group_table(kinds, of_kinds, whole, split),
        problem_table(names, problem, regressed, split),
        segment_table(split, stretch.begin, config.flag_remainder),
        {
            "recipe": str(replace(recipe, source=Path(recipe.source).name)),  # results do not say where the run lies
            "config": vars(config),
            "series": series.name,
            "run": stretch.run,
            "checkpoints": [step + stretch.begin for step in stretch.path.steps],
            "inputs": inputs,
            "weights": weights,
            "sae": None if sae is None else sae.fingerprint,
            "directions": directions.name,
            "path_error": float(split.segments.path_error.max()),
            "notes": notes + _warnings(split),
        },
        source=checked,
    )
    return found.save(to)


def find_recipe(series: CheckpointSeries, run: str | None = None, where: str | Path | None = None) -> Recipe:
    """The settings: what the caller names, or those beside a checkpoint of the run.

    Raises:
        TsaeError: where there are none, or what they name cannot be simulated.
    """
    if where is not None:
        return read_recipe(where)
    mine = [c for c in series if not c.is_base and run in (None, c.run)]
    folders = list(dict.fromkeys(folder for c in mine for folder in (Path(c.path).parent, Path(c.path))))
    for folder in folders:
        try:
            return read_recipe(folder)
        except TsaeError as error:
            if "holds no settings" not in str(error):
                raise
    raise TsaeError(
        "the trainer's settings do not lie beside the checkpoints (training_args.json or .yaml, .hydra/config.yaml)",
        where=str(folders[0]) if folders else series.name,
        fix="Give the file (recipe=…, --settings), or a tsae.Recipe with optimiser and loss.",
    )


@dataclass(frozen=True)
class _Stretch:
    """What is attributed of a run; steps are counted from its first checkpoint."""

    run: str | None
    begin: int
    """Steps before."""
    path: TrainingPath
    optimiser: Optimiser
    batches: Batches
    logged: Batches
    """The same, by the steps of the log."""


def _stretch(
    series: CheckpointSeries,
    rollouts: Rollouts,
    recipe: Recipe,
    run: str | None,
    config: AttributionConfig,
    notes: list[str],
) -> _Stretch:
    whole = TrainingPath.of(series, run, device=config.device)
    begin, last = config.steps or (whole.steps[0], whole.last)
    path = whole.between(begin, last)
    notes += path.notes
    logged = batches_between(rollouts, batches_of(rollouts), (begin, last), config, notes)
    optimiser = recipe.optimiser
    if begin:
        optimiser = LaterOptimiser(**vars(optimiser), done=begin)
        notes.append(
            f"The state of the optimiser after step {begin} is not known: it starts from zero there, which the first "
            "steps of this stretch feel (see path_error)."
        )
    batches = {step - begin: rows for step, rows in logged.items()}
    runs = [c.run for c in series if not c.is_base]
    return _Stretch(run or runs[0], begin, path, optimiser, batches, logged)


def _with_behaviours(rollouts: Rollouts, config: AttributionConfig, notes: list[str]) -> Rollouts:
    if "behaviours" not in config.targets and "behaviour" not in config.groups:
        return rollouts
    if rollouts.frame.response.isna().any():
        notes.append("Some responses have no text: behaviours are not read from them.")
        return rollouts
    return with_behaviours(rollouts)


def _check_token(token: int | None, path: TrainingPath) -> None:
    size = len(path.trained.model.get_input_embeddings().weight)
    if token is not None and not (isinstance(token, SupportsIndex) and 0 <= token < size):
        raise TsaeError(f"{token!r} is no token id of this model; there are 0 to {size - 1}", where="first_token")


def _special(series: CheckpointSeries, rollouts: Rollouts, sae: TemporalSAE | None, path: TrainingPath) -> list[int]:
    """Token ids that count in no feature; checks that log and SAE belong to the model."""
    vocabulary, width = path.trained.model.get_input_embeddings().weight.shape
    check_context(rollouts, getattr(path.trained.model.config, "max_position_embeddings", None), vocabulary)
    if sae is None and rollouts.info.get("tokenizer") is None:
        return []
    tokenizer = check_tokenizer(series.base, rollouts)
    if sae is None:
        return []
    if sae.d_model != width:
        what = f"the SAE reads {sae.d_model} numbers a token, the model has {width}"
        raise TsaeError(what, where=sae.site, fix="Give an SAE of this model.")
    return list(tokenizer.all_special_ids)


def _inputs(stretch: _Stretch, rollouts: Rollouts) -> dict[str, Any]:
    """Fingerprints of what the samples' gradients are made from."""
    rows = np.concatenate(list(stretch.batches.values())).astype(np.int64)
    return {
        "rollouts": rollouts.fingerprint,
        "labels": rollouts.labels_fingerprint,
        "rows": hashlib.sha256(rows.tobytes()).hexdigest()[:16],
        "steps": [stretch.begin, stretch.begin + stretch.path.last],
        "checkpoints": {str(step + stretch.begin): stretch.path.fingerprint(step) for step in stretch.path.steps},
    }


def _weights(series: CheckpointSeries, stretch: _Stretch) -> dict[str, str]:
    """Fingerprints of the checkpoints' files by step. They have what the trained weights lack: an adapter's base, and
    the configuration."""
    steps = {step + stretch.begin for step in stretch.path.steps}
    mine = [c for c in series if c.step in steps and (c.is_base or c.run == stretch.run)]
    return {str(c.step): weights_fingerprint(c) for c in mine}


def _begin(to: Path, inputs: dict[str, Any]) -> None:
    """Refuse a folder that holds what was computed from other inputs."""
    known = to / "inputs.json"
    if known.is_file():
        before = read_object(known, f"Remove {to}, or give another folder.")
        other = [name for name, value in inputs.items() if before.get(name) != value]
        if other:
            raise TsaeError(
                f"holds an attribution of other {' and '.join(other)}", where=to, fix="Give another folder."
            )
    write_json(known, inputs)


def _directions(to: Path, mark: dict[str, Any], config: AttributionConfig) -> Path:
    """The folder for the directions of these targets. An earlier attribution keeps its own until this one is whole."""
    whose = hashlib.sha256(json.dumps([mark, config.every]).encode()).hexdigest()[:16]
    return to / f"directions-{whose}"


def _shares(
    store: GradientStore,
    stretch: _Stretch,
    targets: Targets,
    directions: Path,
    budget: int,
    config: AttributionConfig,
    notes: list[str],
    progress: bool,
) -> Shares:
    path = stretch.path
    steps = [step for i, step in enumerate(path.steps) if i % config.every == 0 or step == path.last]
    knots = TrainingPath(path.trained, {step: path.knots[step] for step in steps})
    fits = len(targets.names) * len(path.trained) * 2 * path.last <= budget
    if not fits:
        notes.append("The directions of the targets do not fit the budget of the disk: no shares of tokens.")
    if len(steps) <= path.last:
        notes.append(
            f"Between the {len(steps)} checkpoints that are used for {path.last} steps, weights are interpolated."
        )
    keep = Directions(directions).keep if fits else None
    return shares(store, knots, stretch.optimiser, targets, keep=keep, progress=progress)


def _halves(n: int, config: AttributionConfig, notes: list[str]) -> np.ndarray:
    """(subsets, n) random halves of the problems; none where they are too few to tell problems apart."""
    if config.subsets and config.subsets < PER_UNIT * n:
        notes.append(
            f"{config.subsets} random halves are too few for the effects of {n} problems, which need {PER_UNIT * n}; "
            "they are left out (subsets)."
        )
    if config.subsets < PER_UNIT * n or n < 2:
        return np.zeros((0, n), dtype=bool)
    return random_halves(n, config.subsets, config.seed)


def _values(path: TrainingPath, targets: Targets, step: int) -> np.ndarray:
    path.put(step)
    return targets.values(path.trained)


def _r2(regressed: Banzhaf | None, split: Shares) -> np.ndarray:
    return np.full(len(split.targets), np.nan) if regressed is None else regressed.r2


def _covariances(split: Shares, stretch: _Stretch, rollouts: Rollouts, wanted: Wanted) -> np.ndarray:
    if wanted.on_samples is None:
        return np.full(split.shares.shape, np.nan)
    stretch.path.put(0)
    shown = wanted.on_samples(stretch.path.trained, rollouts.select(split.rows))
    return covariances(shown, rollouts, split.rows)


def _warnings(split: Shares) -> list[str]:
    error = float(split.segments.path_error.max())
    if error < _FAR:
        return []
    return [
        f"The simulated optimiser misses the checkpoints by up to {error:.0%} of the distance between them: settings "
        "or log are not quite those of this run, or samples are missing."
    ]
