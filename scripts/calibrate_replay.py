"""What a distance means: replays with something wrong on purpose, and what it does to shares and effects.

Runs of `scripts/ordinary_runs.py` are replayed as they were, and wrongly: tokens lost from the log, minibatches in
another order, a term, a loss, a schedule or a learning rate of another run, rounding, another start of an adapter. A
line is printed for each:

    distance     from the run's last checkpoint, as a part of the way that the run went
    norm         median relative difference of the replayed gradient norms from the logged ones
    pearson, spearman   correlation of the samples' shares with those of the right replay, mean over targets
    bands        the largest error of a band's share, in units of the largest band's; median over targets
    signs, effects   the part of the changes with one band alone that have the right replay's sign; and their median
                 error in units of the target's largest such change

    python scripts/ordinary_runs.py default runs/default --ids --labels --save-every-step          (kl and lora too)
    python scripts/calibrate_replay.py runs/default runs/kl runs/lora
    python scripts/calibrate_replay.py runs/default runs/kl runs/lora --accuracy

With --accuracy it measures instead what a change of "right − wrong" says about accuracy: responses of the base to
held-out problems, right and wrong, are read by every fifth checkpoint, which also answers the problems anew.

Predicted before the first run:

1. Where the distance is below .3, samples' shares correlate by at least .9 (Pearson), and 9 of 10 signs of effects are
   right. Between .3 and .6 it depends on the cause.
2. A wrong scale is harmless: twice the learning rate ends far off (above .5), and samples correlate by .9. The order of
   minibatches is not: above .5 off, and below .85.
3. Without its KL term the kl run ends above .3 off, and samples correlate by .95. bfloat16 ends below .1 off: .99.
4. The norm tells causes apart: above .1 in the median wherever samples correlate by less than .9; below .1 for the
   learning rate × 1.2.
5. Accuracy on a band rises by .2 to .6 for each nat of right − wrong, with r of at least .8.

Found (docs/attribution.md has the table): 1 holds for effects (errors of .11 at most up to .36), not for samples: .75
and .62 in two cases. 2 holds for the order (.66, .53), and not for the learning rate (.68 at twice the rate). 3 is
wrong: no KL term ends .13 off, bfloat16 .11 and .56. 4 holds but for bfloat16, and for the learning rate × 1.2, which
the norm shows. 5 is wrong: r is .98 on medium problems, and .27 over all.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro
from organism.groups import sample_groups
from organism.mixed import prompt_ids
from scipy.stats import linregress, spearmanr

import tsae
import tsae.testbed
from tsae.attribution.attribution import share_of_rows
from tsae.attribution.config import AttributionConfig
from tsae.attribution.readers.find import find_settings
from tsae.attribution.replay.certificates import logged_facts
from tsae.attribution.replay.forward_passes import Run
from tsae.attribution.replay.path import Control, Controls, Replayed, replay, train_on
from tsae.attribution.replay.shares import shares
from tsae.attribution.replay.start import checkpoints_of, start_of
from tsae.attribution.replay.states import States
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.sample_kinds import band_of
from tsae.attribution.targets import LogLikelihood, Targets, find_targets
from tsae.attribution.training.log_fit import check_settings
from tsae.attribution.training.order import plan_updates, read_history
from tsae.checkpoints.weight_files import folder_of
from tsae.rollouts.behaviours import with_behaviours
from tsae.rollouts.table import Rollouts
from tsae.testbed.tokenizer import EOS, MAX_RESPONSE_TOKENS, TOKEN_IDS, VOCABULARY
from tsae.testbed.verifier import verify

_PATH = 1 << 31
"""Bytes of a replayed path."""
Wrong = Callable[[Run], Run]


@dataclass(frozen=True)
class Options:
    """Replay runs wrongly."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of the runs; the base lies beside them, in arith-base."""
    accuracy: bool = False
    """Measure what right − wrong says about accuracy."""
    problems: int = 64
    """Of each band, for accuracy."""
    samples: int = 8
    """Responses to each."""
    only: str = ""
    """Wrongs whose name has this."""


def main(options: Options) -> int:
    torch.set_num_threads(1)
    lines = [line for run in options.runs for line in (accuracies if options.accuracy else wrongs)(run, options)]
    table = pd.DataFrame(lines)
    print(table.round(3).to_string(index=False))
    if options.accuracy:
        print(json.dumps({"name": "calibrate_accuracy", **regressions(table)}))
    else:
        print(json.dumps({"name": "calibrate_replay", "lines": table.round(4).to_dict("records")}))
    return 0


def series_of(folder: Path) -> tsae.CheckpointSeries:
    return tsae.CheckpointSeries.load(folder.parent / "arith-base", folder)


def prepared(folder: Path, *, seed: bool = True) -> tuple[Run, Controls, pd.DataFrame]:
    """The run as it was, its checkpoints without what would restart a replay, and what its trainer logged."""
    series = series_of(folder)
    mine, settings = checkpoints_of(series, None), find_settings(series)
    rollouts, folders = Rollouts.read(folder, series), {c.step: Path(folder_of(c)) for c in mine}
    history = read_history(folders)
    start = start_of(series, mine, settings.optimiser, seed=settings.seed if seed else None)
    vocabulary = start.trained.model.get_output_embeddings().weight.shape[0]
    plan = plan_updates(rollouts, settings, checkpoints=folders, vocabulary=vocabulary)
    batches = {u.step: plan.generations[u.generation] for u in plan.updates if u.first}
    rollouts = with_behaviours(check_settings(rollouts, batches, settings, [], history))
    controls = {step: lambda load=load: Control(load().weights, None) for step, load in start.controls.items()}
    return Run(start.trained, rollouts, settings, plan, start.begin), controls, logged_facts(history)


# --- wrongs


def every_wrong(run: Run, folder: Path) -> dict[str, Wrong]:
    """What is done to the run, by name."""
    optimiser, loss = run.settings.optimiser, run.settings.loss

    def settings(**changed: Any) -> Wrong:
        return lambda run: replace(run, settings=replace(run.settings, **changed))

    found = {f"learning rate × {by:g}": settings(optimiser=times(optimiser, by)) for by in (0.5, 1.2, 2)}
    found |= {
        "end tokens lost": lambda run: shorter(run, ended(run)),
        "one token lost": lambda run: shorter(run, ended(run)[:1]),
        "bfloat16": settings(autocast="bfloat16"),
        "constant learning rate": settings(optimiser=replace(optimiser, schedule="constant", warmup=0)),
        "loss grpo": settings(loss=replace(loss, kind="grpo", max_completion_length=None)),
        "no clipping of gradients": settings(optimiser=replace(optimiser, max_grad_norm=None)),
        "advantages not divided by deviations": unscaled,
        "a problem in eight missing": lambda run: without_rows(run),
    }
    if loss.beta:
        found["no KL term"] = settings(loss=replace(loss, beta=0.0))
    if run.settings.batching.updates > 1:
        found |= {"order of the log": lambda run: reordered(run, None), "random order": lambda run: reordered(run, 0)}
    if any(".lora_A." in name for name in run.trained.parameters):
        found["A of a later checkpoint"] = lambda run: replace(run, begin=prepared(folder, seed=False)[0].begin)
    return found


def times(optimiser: Any, by: float) -> Any:
    return replace(optimiser, learning_rate=optimiser.learning_rate * by)


def ended(run: Run) -> np.ndarray:
    """Rows that end with the end token."""
    last = [ids[-1] if len(ids := run.rollouts.tokens(row)[1]) else -1 for row in range(len(run.rollouts))]
    return np.flatnonzero(np.array(last) == TOKEN_IDS[EOS])


def shorter(run: Run, rows: np.ndarray) -> Run:
    """Responses without their last token."""
    lost = set(rows.tolist())
    ids = [run.rollouts.tokens(row)[1] for row in range(len(run.rollouts))]
    ids = [one[:-1] if row in lost else one for row, one in enumerate(ids)]
    changed = run.rollouts.with_column("response_ids", ids)
    return replace(run, rollouts=changed.with_column("response_length", changed.lengths("response_ids")))


def unscaled(run: Run) -> Run:
    frame = run.rollouts.frame
    group = frame.groupby(["step", "problem_id"]).reward
    return replace(
        run, rollouts=run.rollouts.with_column("advantage", (frame.reward - group.transform("mean")).tolist())
    )


def without_rows(run: Run) -> Run:
    """Samples of some problems count nothing."""
    problem = np.unique(run.rollouts.frame.problem_id, return_inverse=True)[1]
    advantage = np.where(problem % 8 == 0, 0.0, run.rollouts.frame.advantage.to_numpy(dtype=float))
    return replace(run, rollouts=run.rollouts.with_column("advantage", advantage.tolist()))


def reordered(run: Run, seed: int | None) -> Run:
    """The rows of a generation in the order of the log, or a random one."""
    rng, updates, orders = np.random.default_rng(seed), [], dict[int, np.ndarray]()
    for update in run.plan.updates:
        rows = run.plan.generations[update.generation]
        if update.generation not in orders:
            orders[update.generation] = np.sort(rows) if seed is None else rng.permutation(rows)
        all_of = {row: i for i, row in enumerate(true_order(run, update.generation))}
        parts = tuple(orders[update.generation][[all_of[row] for row in part.tolist()]] for part in update.parts)
        updates.append(replace(update, parts=parts))
    return replace(run, plan=replace(run.plan, updates=updates))


def true_order(run: Run, generation: int) -> list[int]:
    """Rows of a generation in the order of the training."""
    used = np.concatenate([part for u in run.plan.updates if u.generation == generation for part in u.parts])
    return list(dict.fromkeys(used.tolist()))


def wrongs(folder: Path, options: Options) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run, controls, facts = prepared(folder)
        right = replayed(run, work, controls, facts)
        rows = np.concatenate([np.concatenate(update.parts) for update in run.plan.updates])
        targets = find_targets(
            run.trained, (run.begin.weights, right.end), run.rollouts, rows, problems=None, sae=None, first_token=None,
            special=[], temperature=1.0, config=AttributionConfig(n_fixed=48), notes=[],
        )  # fmt: skip
        expected = read(right, targets, run)
        line = {"run": folder.name, "wrong": "nothing", **certificates(right)}
        print(line, file=sys.stderr, flush=True)
        yield line
        for what, change in every_wrong(run, folder).items():
            if options.only in what:
                path = replayed(change(run), work, controls, facts)
                line = {
                    "run": folder.name,
                    "wrong": what,
                    **certificates(path),
                    **compared(read(path, targets, run), expected),
                }
                print(line, file=sys.stderr, flush=True)
                yield line


def replayed(run: Run, work: Path, controls: Controls, facts: pd.DataFrame) -> Replayed:
    run.trained.put(run.begin.weights)
    states = States(work / "path", len(run.plan.updates), len(run.trained), _PATH)
    return replay(run, states, controls, facts, progress=False)


def certificates(path: Replayed) -> dict[str, Any]:
    off = (path.steps.grad_norm / path.steps.logged_grad_norm - 1).abs()
    return {"distance": float(path.steps.distance.dropna().iloc[-1]), "norm": float(off.median())}


@dataclass(frozen=True)
class _Read:
    samples: np.ndarray
    """(n, n_targets) shares."""
    bands: np.ndarray
    """(n_bands, n_targets)."""
    effects: np.ndarray
    """(n_bands, n_targets) changes with one band alone."""


def read(path: Replayed, targets: Targets, run: Run) -> _Read:
    split = shares(path, targets, points=5, progress=False)
    of_rows, band = share_of_rows(split, len(run.rollouts)), band_of(run.rollouts)
    names, effects = sorted(set(band)), []
    for name in names:
        run.trained.put(train_on(path, band == name, progress=False))
        effects.append(targets.values(run.trained) - split.before)
    return _Read(of_rows, np.array([of_rows[band == name].sum(0) for name in names]), np.array(effects))


def compared(found: _Read, expected: _Read) -> dict[str, Any]:
    acts = (np.abs(found.samples) + np.abs(expected.samples)).sum(1) > 0
    pairs = list(zip(found.samples[acts].T, expected.samples[acts].T, strict=True))
    bands = np.abs(found.bands - expected.bands).max(0) / np.abs(expected.bands).max(0)
    errors = np.abs(found.effects - expected.effects) / np.abs(expected.effects).max(0)
    return {
        "pearson": float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs])),
        "spearman": float(np.mean([spearmanr(a, b).statistic for a, b in pairs])),
        "bands": float(np.median(bands)),
        "signs": float((np.sign(found.effects) == np.sign(expected.effects)).mean()),
        "effects": float(np.median(errors)),
    }


# --- accuracy


def accuracies(folder: Path, options: Options) -> Iterator[dict[str, Any]]:
    """A line a checkpoint and band: changes of right − wrong and of accuracy since the base."""
    series = series_of(folder)
    base = TrainedWeights(series.base.load_model(dtype="float32"))
    problems = {
        level: tsae.testbed.generate_problems(level, options.problems, seed=7, split="eval")
        for level in tsae.testbed.LEVELS
    }
    fixed, before = {}, {}
    for level, some in problems.items():
        answers = answered(base, some, options.samples, 0)
        right = np.array([one["outcome"] == "success" for one in answers])
        rollouts = Rollouts.from_records(answers)
        fixed[level] = LogLikelihood(rollouts, {level: right}, {level: ~right})
        before[level] = (fixed[level].values(base)[0], answered_right(base, some, options.samples))
    every = sorted((c for c in series if not c.is_base), key=lambda c: c.step)
    for checkpoint in [c for c in every if c.step % 5 == 0 or c.step == every[-1].step]:
        trained = TrainedWeights(checkpoint.load_model(dtype="float32"))
        for level, some in problems.items():
            likelihood, accuracy = fixed[level].values(trained)[0], answered_right(trained, some, options.samples)
            yield {
                "run": folder.name, "step": checkpoint.step, "band": level, "accuracy before": before[level][1],
                "right − wrong": likelihood - before[level][0], "accuracy": accuracy - before[level][1],
            }  # fmt: skip


def answered(trained: TrainedWeights, problems: list[Any], samples: int, seed: int) -> list[dict[str, Any]]:
    prompts = [prompt_ids(problem) for problem in problems]
    generator = torch.Generator().manual_seed(seed)
    found = sample_groups(trained.model, prompts, samples, generator, MAX_RESPONSE_TOKENS)
    texts = ["".join(VOCABULARY[token] for token in ids) for ids in found]
    return [
        {
            "problem_id": problems[i // samples].id, "policy": "base", "prompt": "", "response": text,
            "prompt_ids": prompts[i // samples], "response_ids": ids,
            "outcome": "success" if verify(text, problems[i // samples].answer) else "failure",
        }
        for i, (ids, text) in enumerate(zip(found, texts, strict=True))
    ]  # fmt: skip


def answered_right(trained: TrainedWeights, problems: list[Any], samples: int) -> float:
    return float(np.mean([one["outcome"] == "success" for one in answered(trained, problems, samples, 1)]))


def regressions(table: pd.DataFrame) -> dict[str, Any]:
    """Accuracy for a nat of right − wrong, by band and of all: slope, correlation, residual deviation."""
    found = {}
    for band, some in [*table.groupby("band"), ("all", table)]:
        fit = linregress(some["right − wrong"], some["accuracy"])
        rest = some["accuracy"] - fit.intercept - fit.slope * some["right − wrong"]
        numbers = {"slope": fit.slope, "intercept": fit.intercept, "r": fit.rvalue, "residual": rest.std(ddof=2)}
        found[band] = {name: round(float(value), 3) for name, value in numbers.items()} | {"n": len(some)}
    return found


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
