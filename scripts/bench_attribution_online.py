"""What recording attribution while training costs, as a share of a step of the testbed's mixed run.

A step samples 192 responses, takes gradients and makes one step of Adam. Two trainings from the same base and seed run
step by step in turn in one process, one with the recorder and one without. Processor time is counted, so that other
work on the machine matters little. The recorder changes no weight, so both do the same work. The ratio of a step with /
a step without is measured with sampling inside the step, as in a real loop, and without sampling.

    python scripts/bench_attribution_online.py                 # one thread, one target
    python scripts/bench_attribution_online.py --targets 20

Ends with one line of JSON. `ratio` is the median over steps of the pairs' ratios; gradients of the targets, which are
taken every `refresh` steps, are spread over all steps in `ratio_mean`, which is what a run takes longer.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import tyro
from organism.mixed import MixedConfig, add_gradient, answered, held_out, micro_batches, prompt_ids

import tsae
from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.attribution.online.recorder import Recorder
from tsae.attribution.targets import NextToken
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


def main(bench: Bench) -> None:
    torch.set_num_threads(bench.threads)
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
                **asdict(bench),
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
