"""A GRPO run on easy, medium and hard problems at once, in plain torch. Attribution is validated on it.

1. A step asks `groups` problems. They are drawn without replacement from a pool that is shuffled anew when it is empty.
2. Each is answered `samples` times at temperature 1. A = (r − mean) / (std + 1e-4) within the group, as in TRL.
3. One step of Adam on   −1 / (groups · samples · L) Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1 − ε, 1 + ε) A_i),
   L = max_response_tokens, ρ_it = π(y_it) / π_sampled(y_it). TRL calls this loss dr_grpo. There is no KL penalty.
   The run uses a batch once, so its ratios are 1.

The normaliser is constant: leaving a problem out takes its summands away and changes no other.

Weights are one float32 vector in the order of `model.named_parameters()`. The same seed gives the same weights on the
same machine with one thread.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.utils import parameters_to_vector

from organism.groups import sample_groups
from tsae.attribution.certificates import logged_facts
from tsae.attribution.find_settings import read_settings
from tsae.attribution.forward_passes import Run
from tsae.attribution.order import plan_updates
from tsae.attribution.path import Replayed, replay
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.states import State, States
from tsae.base.files import write_json, write_text
from tsae.base.progress import progress_bar
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import group_advantages
from tsae.rollouts.table import Rollouts
from tsae.testbed.annotate import verify
from tsae.testbed.chains import generate_problems
from tsae.testbed.tokenizer import BOS, EOS, MAX_RESPONSE_TOKENS, PAD, TOKEN_IDS, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BANDS: dict[str, tuple[int, int]] = {"easy": (1, 1), "medium": (4, 6), "hard": (7, 9)}
"""Fewest and most operations. Unlike the testbed's hard chains, these are solved often enough to teach something."""

LOG, SETTINGS, STATE = "completions.jsonl", "training_args.json", "trainer_state.json"
_TOKENS_AT_ONCE = 2048
"""Tokens of a forward pass in training, with padding."""
_PATH = 1 << 31
"""Bytes of a replayed path."""


@dataclass(frozen=True)
class MixedConfig:
    """Everything that decides the weights, beside the base."""

    seed: int = 0
    """Of the problems, their order and the sampling."""
    per_band: int = 8
    """Problems of each band."""
    steps: int = 30
    """Optimiser steps."""
    groups: int = 12
    """Problems asked in a step; a divisor of all problems, so that a step asks none twice."""
    samples: int = 16
    """Responses to each."""
    learning_rate: float = 1e-4
    """Of Adam, constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of Adam."""
    eps: float = 1e-8
    """Of Adam."""
    max_grad_norm: float = 1.0
    """Norm to which a batch's gradient is clipped; TRL's default."""
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    """Limit of sampling, and L of the loss."""
    epsilon: float = 0.2
    """At which the ratio is clipped; TRL's default."""

    def __post_init__(self) -> None:
        assert len(BANDS) * self.per_band % self.groups == 0, "a step would ask a problem twice"
        assert self.samples > 1, "one response has no advantage"

    @property
    def problems(self) -> list[Problem]:
        """Of the training, band by band; `level` is the band."""
        return [problem for band in BANDS for problem in _of_band(band, self.per_band, self.seed, "train")]

    @property
    def schedule(self) -> list[list[Problem]]:
        """The problems of every step."""
        rng, pool, steps = random.Random(self.seed), list[Problem](), []
        for _ in range(self.steps):
            pool = pool or rng.sample(self.problems, len(BANDS) * self.per_band)
            steps.append(pool[: self.groups])
            pool = pool[self.groups :]
        return steps

    def training_args(self) -> dict[str, Any]:
        """The same in the words of TRL's GRPOConfig."""
        return {
            "optim": "adamw_torch",
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "adam_epsilon": self.eps,
            "weight_decay": 0.0,
            "max_grad_norm": self.max_grad_norm,
            "max_steps": self.steps,
            "per_device_train_batch_size": self.groups * self.samples,
            "gradient_accumulation_steps": 1,
            "num_generations": self.samples,
            "num_iterations": 1,
            "loss_type": "dr_grpo",
            "scale_rewards": "group",
            "beta": 0.0,
            "epsilon": self.epsilon,
            "temperature": 1.0,
            "max_completion_length": self.max_response_tokens,
            "seed": self.seed,
        }


def held_out(config: MixedConfig, n: int = 24) -> dict[str, list[Problem]]:
    """By band, `n` problems that the run is not trained on."""
    trained = {problem.id for problem in config.problems}
    found = {}
    for band in BANDS:
        # Chains of one operation are not split: some of the problems of the training are among them.
        drawn = _of_band(band, n + config.per_band, config.seed, "eval")
        found[band] = [problem for problem in drawn if problem.id not in trained][:n]
    return found


@dataclass(frozen=True)
class Sample:
    """A response and its advantage."""

    problem: str
    """Id."""
    prompt: Sequence[int]
    """Token ids, with ``<bos>``."""
    response: Sequence[int]
    """Token ids, with ``<eos>`` unless it was cut off."""
    reward: float
    advantage: float


@dataclass(frozen=True)
class Step:
    """What a step did."""

    number: int
    """The first is 1."""
    samples: list[Sample]
    grad_norm: float
    """Of the batch's gradient, before it was clipped."""


Batch = Callable[[int, "PreTrainedModel"], list[Sample]]
"""Gives the samples of a step, by its number and the model with the weights before it."""


def train(config: MixedConfig, base: Checkpoint, to: str | Path, *, progress: bool = True) -> Path:
    """Run the training and write what a trainer leaves.

    The folder has checkpoint-0 (the base) to checkpoint-N, the log in TRL's columns (completions.jsonl), the settings
    (training_args.json) and a line a step (trainer_state.json).

    Args:
        config: of the run.
        base: the testbed's.
        to: folder to write, whole or not at all.
        progress: show a bar.

    Raises:
        TsaeError: where the folder exists.
    """
    to = Path(to)
    if to.exists():
        raise TsaeError("exists already", where=to, fix="Give another folder, or remove it.")
    partial = to.with_name(to.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base.path, partial / "checkpoint-0")
    by_id = {problem.id: problem for problem in config.problems}
    log, history = list[dict[str, Any]](), list[dict[str, Any]]()
    with progress_bar("mixed run", "step", config.steps, shown=progress) as bar:
        started = time.monotonic()

        def keep(model: PreTrainedModel, step: Step) -> None:
            _save_weights(model, base, partial / f"checkpoint-{step.number}")
            log.extend(_logged(sample, step.number, by_id[sample.problem]) for sample in step.samples)
            history.append(_summary(config, step, time.monotonic() - started))
            bar.update()

        _run(config, base, _sampled(config, config.seed), keep)
    write_text(partial / LOG, "".join(json.dumps(line) + "\n" for line in log))
    write_json(partial / SETTINGS, config.training_args())
    write_json(partial / STATE, {"global_step": config.steps, "log_history": history})
    partial.rename(to)
    return to


def replayed(base: Checkpoint, rollouts: Rollouts, settings: Path, to: Path) -> Replayed:
    """The run, replayed as a user's is: from its base, its log and the folder with its settings.

    Args:
        base: of the run.
        rollouts: of its log.
        settings: folder that has them.
        to: folder for the path; it needs no checkpoints.
    """
    # Eager attention: forward derivatives, which split shares by token, know no other.
    trained, found = TrainedWeights(base.load_model(dtype="float32", attention="eager")), read_settings(settings)
    plan = plan_updates(rollouts, found, checkpoints={}, vocabulary=None)
    run = Run(trained, rollouts, found, plan, State.at(trained.vector()))
    return replay(run, States(to, len(plan.updates), len(trained), _PATH), {}, logged_facts({}))


def _run(
    config: MixedConfig,
    base: Checkpoint,
    batch_of: Batch,
    after: Callable[[PreTrainedModel, Step], None] | None = None,
) -> torch.Tensor:
    """(P,) final weights of a training; `after` is called after every step."""
    model = base.load_model(dtype="float32").requires_grad_(True)
    parameters = list(model.parameters())
    optimiser = torch.optim.Adam(parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    for number in range(1, config.steps + 1):
        samples = batch_of(number, model)
        # Zeros instead of None: Adam skips a weight without gradient, and its momentum would stop.
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for some, ids in micro_batches(samples):
            add_gradient(config, model, some, ids)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimiser.step()
        if after is not None:
            after(model, Step(number, samples, float(norm)))
    return parameters_to_vector(parameters).detach().clone()


def micro_batches(samples: Sequence[Sample]) -> Iterator[tuple[list[Sample], torch.Tensor]]:
    """The samples that have a gradient, some at a time, with their padded token ids (n, T)."""
    for some, ids in _batches([i for i, sample in enumerate(samples) if sample.advantage], samples):
        yield [samples[i] for i in some], ids


def add_gradient(config: MixedConfig, model: PreTrainedModel, samples: Sequence[Sample], ids: torch.Tensor) -> None:
    """Add the gradient of a micro-batch's loss to that of the model's weights."""
    normaliser = config.groups * config.samples * config.max_response_tokens
    log = _log_probabilities(model, ids)
    weight = torch.zeros_like(log)
    for row, sample in enumerate(samples):
        begin, end = _places(sample)
        weight[row, begin - 1 : end - 1] = sample.advantage / normaliser
    ratio = (log - log.detach()).exp()
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
    (-torch.minimum(ratio * weight, clipped * weight).sum()).backward()


def _batches(used: list[int], samples: Sequence[Sample]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Some of the samples at a time, with their padded token ids. Equal lengths go together, which saves padding."""
    used = sorted(used, key=lambda i: _places(samples[i])[1])
    while used:
        # The longest come first.
        longest = _places(samples[used[-1]])[1]
        n = max(1, _TOKENS_AT_ONCE // longest)
        used, some = used[:-n], used[-n:]
        ids = torch.full((len(some), longest), TOKEN_IDS[PAD])
        for row, i in enumerate(some):
            ids[row, : _places(samples[i])[1]] = torch.tensor([*samples[i].prompt, *samples[i].response])
        yield some, ids


def _places(sample: Sample) -> tuple[int, int]:
    """Where its response begins and ends."""
    return len(sample.prompt), len(sample.prompt) + len(sample.response)


def _log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(n, T − 1) of every token after the first, in nats."""
    # Padding is on the right and attention is causal: no token that counts sees it, so no mask is needed.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # (n, T − 1, vocabulary)
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]


def _sampled(config: MixedConfig, seed: int) -> Batch:
    """New responses to the problems of every step."""
    schedule, generator = config.schedule, torch.Generator().manual_seed(seed)

    def batch(number: int, model: PreTrainedModel) -> list[Sample]:
        return answered(config, model, schedule[number - 1], generator)

    return batch


def answered(
    config: MixedConfig, model: PreTrainedModel, asked: Sequence[Problem], generator: torch.Generator
) -> list[Sample]:
    """Sample responses to problems and reward them; those to one problem stand beside each other."""
    prompts = [prompt_ids(problem) for problem in asked]
    responses = sample_groups(model, prompts, config.samples, generator, config.max_response_tokens)
    of = [i for i in range(len(asked)) for _ in range(config.samples)]
    rewards = [float(verify(_text(ids), asked[i].answer)) for i, ids in zip(of, responses, strict=True)]
    advantages = group_advantages(np.array(rewards), np.array(of)).tolist() if of else []
    return [
        Sample(asked[i].id, prompts[i], ids, reward, advantage)
        for i, ids, reward, advantage in zip(of, responses, rewards, advantages, strict=True)
    ]


def _of_band(band: str, n: int, seed: int, split: Literal["train", "eval"]) -> list[Problem]:
    return [replace(problem, level=band) for problem in generate_problems(BANDS[band], n, seed, split)]


def prompt_ids(problem: Problem) -> list[int]:
    """Token ids of a prompt, with ``<bos>``."""
    return [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in problem.prompt)]


def _text(ids: Iterable[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


def _logged(sample: Sample, step: int, problem: Problem) -> dict[str, Any]:
    """A line of the log, in TRL's columns and order."""
    return {
        "step": step,
        "prompt": problem.prompt,
        "completion": _text(sample.response).removesuffix(EOS),
        "right_answers": sample.reward,
        "problem_id": problem.id,
        "answer": problem.answer,
        "level": problem.level,
        "group": f"{step}/{problem.id}",
        "prompt_ids": list(sample.prompt),
        "completion_ids": list(sample.response),
        "advantage": sample.advantage,
    }


def _summary(config: MixedConfig, step: Step, seconds: float) -> dict[str, Any]:
    """A line of trainer_state.json."""
    direct = [VOCABULARY[sample.response[0]] == "#" for sample in step.samples]
    return {
        "step": step.number,
        "reward": float(np.mean([sample.reward for sample in step.samples])),
        "direct_share": float(np.mean(direct)),
        "completions/mean_length": float(np.mean([len(sample.response) for sample in step.samples])),
        "grad_norm": step.grad_norm,
        "clipped": step.grad_norm > config.max_grad_norm,
        "seconds": round(seconds, 2),
    }


def _save_weights(model: PreTrainedModel, base: Checkpoint, to: Path) -> None:
    """A checkpoint in the layout of the base, with its tokenizer."""
    shutil.copytree(base.path, to)
    # Tied weights come once, as in the base's file.
    save_file(
        {name: p.detach() for name, p in model.named_parameters()}, to / "model.safetensors", metadata={"format": "pt"}
    )
