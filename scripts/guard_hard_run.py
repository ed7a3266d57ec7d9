"""Can a guard keep the scratchpad? The testbed's hard run with a guard over direct answers, and two controls.

Training on chains of 10 to 14 operations teaches direct answers (`scripts/explain_hard_run.py`). Three trainings from
the same base, on the same problems, each sampling from its own policy:

- none      as it is;
- guard     `Guard` over the probability of a direct answer on 72 held-out problems (24 easy, 24 medium, 24 hard), whose
            bound is its value at the base + .02. Listed samples are left out;
- random    as many samples as the guard left out at that step, drawn from those with an advantage, are left out.

Two seeds, of problems and sampling. Every 10 steps: the probability of a direct answer, and accuracy at temperature 1,
on 64 other held-out problems of each band, 8 responses each (standard error of an accuracy: about .02).

    python scripts/guard_hard_run.py --to /data/guard       # goes on where it stopped, by condition and seed
    python scripts/guard_hard_run.py --stored               # print what data/guard_hard_run.json holds

Predicted before the runs (two steps of another seed had been tried), for both seeds, by step 40:

1. Without a guard direct answers on hard problems rise by at least .15, and accuracy on medium problems falls.
2. With the guard direct answers stay within base ± .1 in all three bands. It is late by a step or so, and its gradient
   is up to five steps old; so it passes its bound, by less than .05 on the problems that it watches.
3. With random samples left out, direct answers on hard problems rise by at least half of what they rise without.
4. The guard leaves out fewer than a tenth of the samples. Most are direct and right, or scratchpad and wrong.
5. Accuracy on medium problems ends at least .05 higher with the guard than without, and not more than .05 below the
   base. Accuracy on hard problems differs by less than .05 between the three: the guard teaches nothing new.

What came out: 1 to 4 hold for both seeds. Direct answers on hard problems go from .48 to .88 and from .47 to .77
without a guard, to .51 and .50 with it (8.6 and 3.6 % of the samples left out, most of them direct and right), to .85
and .72 with as many random samples left out. The watched value passes its bound by .002 at most. 5 fails. Accuracy on
medium problems ends at .14 and .40 with the guard, at .23 and .31 without (base .45 and .49), and on hard problems .06
lower than with random samples left out in seed 0. There the habit is held, but what scratchpads say decays: they are
right on 10 % of the medium problems at the end (base 70 %, without a guard 41 %). A guard guards what it watches, no
more.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import tyro
from organism.hard import HardConfig, held_out_hard
from organism.mixed import Sample, add_gradient, answered, direct_share, micro_batches, prompt_ids

import tsae
from tsae.attribution.guard import Guard, Recorder
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.targets import NextToken
from tsae.base.files import write_json
from tsae.rollouts.problems import Problem
from tsae.testbed.tokenizer import TOKEN_IDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STORED = Path(__file__).parent.parent / "data" / "guard_hard_run.json"
DIRECT = TOKEN_IDS["#"]
TARGET = "direct (held-out)"
KINDS = ("direct, right", "direct, wrong", "scratchpad, right", "scratchpad, wrong")
MEASURES = ("direct", "accuracy", "scratchpads")
Condition = Literal["none", "guard", "random"]


@dataclass(frozen=True)
class Options:
    """Guard the hard run."""

    to: Path = Path("runs/guard")
    """Folder of the results."""
    stored: bool = False
    """Only print the figures that the repository holds."""
    seeds: tuple[int, ...] = (0, 1)
    """Of problems and sampling."""
    room: float = 0.02
    """The guard's bound above the base."""
    every: int = 10
    """Steps between two measurements."""
    problems: int = 64
    """Held-out problems of a band on which is measured; the guard watches others."""
    responses: int = 8
    """To each, for accuracy."""
    config: HardConfig = field(default_factory=HardConfig)
    """The run."""


def main(options: Options) -> int:
    """Train what is missing, and print."""
    torch.set_num_threads(1)
    if options.stored:
        show(json.loads(STORED.read_text(encoding="utf-8")))
        return 0
    for seed in options.seeds:
        for condition in get_args(Condition):
            if not result_file(options, condition, seed).is_file():
                write_json(result_file(options, condition, seed), train(options, condition, seed))
    runs = [
        json.loads(result_file(options, condition, seed).read_text(encoding="utf-8"))
        for seed in options.seeds
        for condition in get_args(Condition)
    ]
    found = {"config": {k: v for k, v in asdict(options.config).items() if k != "seed"}, "runs": runs}
    write_json(options.to / STORED.name, found)
    show(found)
    return 0


def result_file(options: Options, condition: Condition, seed: int) -> Path:
    return options.to / f"{condition}-{seed}.json"


def train(options: Options, condition: Condition, seed: int) -> dict[str, Any]:
    """One training: what was measured, and how many samples of each kind were left out at each step."""
    began = time.monotonic()
    config = replace(options.config, seed=seed)
    watched, measured = problems_of(config, 24, options.problems)
    model = tsae.testbed.series().base.load_model(dtype="float32").requires_grad_(True)
    parameters = list(model.parameters())
    optimiser = torch.optim.Adam(parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    prompts = [np.array(prompt_ids(problem)) for problem in watched]
    recorder = Recorder(
        TrainedWeights(model),
        optimiser,
        NextToken(prompts, ["held-out"] * len(prompts), DIRECT, what="direct"),
        n_steps=config.steps,
    )
    base = float(recorder.values[0][0])
    guard = Guard(recorder, TARGET, harmful="rises", bound=base + options.room)
    random_counts: list[int] = []
    if condition == "random":
        held = json.loads(result_file(options, "guard", seed).read_text(encoding="utf-8"))
        random_counts = [sum(kinds) for kinds in held["left_out"]]
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    lines, left_out, offered = [measure(options, config, model, measured, 0)], list[list[int]](), 0
    for number in range(1, config.steps + 1):
        samples = answered(config, model, config.schedule[number - 1], generator)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        used: list[Sample] = []
        for some, ids in micro_batches(samples):
            with recorder.samples([{"problem_id": s.problem, "advantage": s.advantage} for s in some]):
                add_gradient(config, model, some, ids)
            used += some
        places: Sequence[int] = []
        if condition == "guard":
            listed = guard()
            places = listed.place.tolist() if len(listed) else []
        elif condition == "random":
            places = rng.permutation(len(used))[: random_counts[number - 1]].tolist()
            weights = np.ones(len(used))
            weights[places] = 0
            recorder.down_weight(weights)
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimiser.step()
        offered += len(used)
        left_out.append(np.bincount([kind_of(used[place]) for place in places], minlength=len(KINDS)).tolist())
        if number % options.every == 0 or number == config.steps:
            lines.append(measure(options, config, model, measured, number))
            print(condition, seed, lines[-1], sum(map(sum, left_out)), flush=True)
    watched_values = {
        step: round(float(value[0]), 4) for step, value in recorder.values.items() if step % options.every == 0
    }
    return {
        "condition": condition,
        "seed": seed,
        "measured": lines,
        "watched": watched_values,
        "left_out": left_out,
        "with_advantage": offered,
        "seconds": round(time.monotonic() - began),
    }


def problems_of(config: HardConfig, watched: int, measured: int) -> tuple[list[Problem], dict[str, list[Problem]]]:
    """Held-out problems that the guard watches, and by band others on which is measured."""
    bands = {name: some for name, some in held_out_hard(config, watched + measured).items() if name != "7-9"}
    names = {"easy": "easy", "medium": "medium", "10-14": "hard"}
    return (
        [problem for some in bands.values() for problem in some[:watched]],
        {names[band]: some[watched:] for band, some in bands.items()},
    )


def measure(
    options: Options, config: HardConfig, model: PreTrainedModel, problems: dict[str, list[Problem]], step: int
) -> dict[str, Any]:
    """Probability of a direct answer, accuracy, and that of scratchpads alone, by band."""
    generator = torch.Generator().manual_seed(step)
    config = replace(config, samples=options.responses)
    line: dict[str, Any] = {"step": step, "direct": {}, "accuracy": {}, "scratchpads": {}}
    for band, some in problems.items():
        samples = answered(config, model, some, generator)
        scratchpads = [s.reward for s in samples if s.response[0] != DIRECT]
        line["direct"][band] = round(direct_share(model, some), 4)
        line["accuracy"][band] = round(float(np.mean([s.reward for s in samples])), 4)
        line["scratchpads"][band] = round(float(np.mean(scratchpads)), 4) if scratchpads else None
    return line


def kind_of(sample: Sample) -> int:
    """Place in KINDS."""
    return 2 * (sample.response[0] != DIRECT) + (sample.reward <= 0)


def show(found: dict[str, Any]) -> None:
    """Tables, and the same in one line of JSON."""
    summary = []
    for run in found["runs"]:
        left = np.array(run["left_out"]).sum(0)
        print(f"\n{run['condition']}, seed {run['seed']}: {left.sum()} of {run['with_advantage']} samples left out")
        if left.sum():
            print("  " + "; ".join(f"{name} {n}" for name, n in zip(KINDS, left, strict=True)))
        bands = list(run["measured"][0]["direct"])
        print(f"  {'step':>4s}", *(f"{what + ' ' + band:>18s}" for what in MEASURES for band in bands))
        for line in run["measured"]:
            values = [line[what][band] for what in MEASURES for band in bands]
            print(f"  {line['step']:4d}", *(f"{'-' if value is None else f'{value:.3f}':>18s}" for value in values))
        last = run["measured"][-1]
        summary.append(
            {k: run[k] for k in ("condition", "seed")}
            | {"left_out": int(left.sum())}
            | {what: last[what] for what in MEASURES}
        )
    print(json.dumps({"name": "guard_hard_run", "at_the_end": summary}))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
