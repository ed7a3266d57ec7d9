"""What looking on costs a training: the run log in TRL, and the recorder in the testbed's mixed run.

The log: GRPOTrainer trains the testbed's model on 64 responses a step, with a reference. What the callback computes and
writes is timed where it does so, against the whole training.

The recorder: a step samples 192 responses, takes gradients and makes one step of Adam. Two trainings from the same base
and seed run step by step in turn in one process, one with the recorder and one without. Processor time is counted, so
that other work on the machine matters little. The recorder changes no weight, so both do the same work. The ratio of a
step with / a step without is measured with sampling inside the step, as in a real loop, and without sampling.

    python scripts/bench_attribution_online.py                 # one thread, one target
    python scripts/bench_attribution_online.py --targets 20

Ends with one line of JSON. `log_share` is the callback's part of the training's processor time. `ratio` is the median
over steps of the pairs' ratios; gradients of the targets, which are taken every `refresh` steps, are spread over all
steps in `ratio_mean`, which is what a run takes longer.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from organism.mixed import MixedConfig, add_gradient, answered, held_out, micro_batches, prompt_ids

import tsae
from tsae.attribution.guard import Recorder
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.targets import NextToken
from tsae.rl.callback import TsaeCallback
from tsae.rl.run_log import RunLog
from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers
from tsae.testbed.tokenizer import TOKEN_IDS


@dataclass(frozen=True)
class Bench:
    """Size of the run."""

    steps: int = 20
    """Timed steps of each, after one that is not."""
    targets: int = 1
    """Direct answers on so many parts of the held-out problems."""
    refresh: int = 5
    """Steps between two gradients of the targets."""
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of what the recorder holds of a step's samples."""


@dataclass
class Loop:
    """A training that is run step by step."""

    config: MixedConfig
    recorded: bool
    bench: Bench
    sampling: list[float] = field(default_factory=list)
    """Processor seconds of each step."""
    rest: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = tsae.testbed.series().base.load_model(dtype="float32").requires_grad_(True)
        self.parameters = list(self.model.parameters())
        self.optimiser = torch.optim.Adam(self.parameters, lr=self.config.learning_rate)
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.recorder = None
        if self.recorded:
            trained = TrainedWeights(self.model)
            self.recorder = Recorder(
                trained,
                self.optimiser,
                the_targets(self.config, self.bench.targets),
                refresh=self.bench.refresh,
                dtype=getattr(torch, self.bench.dtype),
            )

    def step(self, number: int) -> None:
        began = time.process_time()
        samples = answered(self.config, self.model, self.config.schedule[number - 1], self.generator)
        between = time.process_time()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for some, ids in micro_batches(samples):
            if self.recorder is None:
                add_gradient(self.config, self.model, some, ids)
                continue
            facts: list[dict[str, Any]] = [
                {"problem_id": s.problem, "reward": s.reward, "advantage": s.advantage} for s in some
            ]
            with self.recorder.samples(facts):
                add_gradient(self.config, self.model, some, ids)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimiser.step()
        self.sampling.append(between - began)
        self.rest.append(time.process_time() - between)


def the_targets(config: MixedConfig, n: int) -> NextToken:
    problems = [problem for some in held_out(config).values() for problem in some]
    groups = [f"part {i % n + 1}" for i in range(len(problems))]
    prompts = [np.array(prompt_ids(problem)) for problem in problems]
    return NextToken(prompts, groups, TOKEN_IDS["#"], what="direct")


class Timed:
    """Processor seconds in some methods."""

    seconds = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return timed


def log_share(bench: Bench) -> dict[str, float]:
    """The callback's share of TRL's processor time; seconds of a step; bytes on disk for a response."""
    from trl import GRPOTrainer

    problems = [p for level in ("easy", "medium", "hard") for p in tsae.testbed.generate_problems(level, 8, 0, "train")]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = GRPOTrainer(
            model=str(tsae.testbed.series().base.path),
            reward_funcs=right_answers,
            train_dataset=data_set(problems),
            args=grpo_on_cpu(
                folder, prompts=4, samples=8, max_steps=bench.steps, beta=0.04, gradient_accumulation_steps=2,
                steps_per_generation=4, learning_rate=1e-5,
            ),
        )  # fmt: skip
        callback, timed = TsaeCallback(trainer), Timed()
        for owner, names in (
            (callback, ("_read", "on_train_begin", "on_pre_optimizer_step")),
            (RunLog, ("add", "update")),
        ):
            for name in names:
                setattr(owner, name, timed(getattr(owner, name)))
        began = time.process_time()
        trainer.train()
        whole = time.process_time() - began
        size = sum(file.stat().st_size for file in Path(folder, "tsae", "generations").iterdir())
        n = 128 * callback.log.generation
    share = timed.seconds / whole
    print(f"run log: {100 * share:.2f} % of a step of {whole / bench.steps:.2f} s; {size / n:.0f} bytes a response")
    return {"log_share": share, "log_step_seconds": whole / bench.steps, "log_bytes": size / n}


def main(bench: Bench) -> None:
    torch.set_num_threads(bench.threads)
    log = log_share(bench)
    config = MixedConfig(steps=bench.steps + 1)
    loops = [Loop(config, recorded, bench) for recorded in (False, True)]
    for number in range(1, bench.steps + 2):
        for loop in loops if number % 2 else loops[::-1]:
            loop.step(number)
    apart = max(
        float((a - b).detach().abs().max()) for a, b in zip(loops[0].parameters, loops[1].parameters, strict=True)
    )
    assert apart == 0, apart
    sampling, rest = (np.array([getattr(loop, part)[1:] for loop in loops]) for part in ("sampling", "rest"))
    # The same work: what differs in sampling is noise, so both get the mean.
    whole = sampling.mean(0) + rest
    ratio, alone = whole[1] / whole[0], rest[1] / rest[0]
    low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
    print(f"step without {np.median(whole[0]):.2f} s ({np.median(sampling):.2f} s of it sampling)")
    print(f"with the recorder {middle:.3f} times as long (quartiles {low:.3f} to {high:.3f}, {len(ratio)} steps)")
    print(
        json.dumps(
            {
                "name": "attribution_online",
                "ratio": round(float(middle), 3),
                "ratio_mean": round(float(whole[1].sum() / whole[0].sum()), 3),
                "ratio_without_sampling": round(float(np.median(alone)), 3),
                "ratio_mean_without_sampling": round(float(rest[1].sum() / rest[0].sum()), 3),
                "step_seconds": round(float(np.median(whole[0])), 3),
                "sampling_seconds": round(float(np.median(sampling)), 3),
                **{name: round(value, 4) for name, value in log.items()},
                **asdict(bench),
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
