"""A GRPO run on easy, medium and hard problems at once, in plain torch. Attribution is validated on it.

1. A step asks `groups` problems. They are drawn without replacement from a pool that is shuffled anew when it is empty.
2. Each is answered `samples` times at temperature 1. A = (r − mean) / (std + 1e-4) within the group, as in TRL.
3. One step of Adam on   −1 / (groups · samples · L) Σ_i Σ_t ρ_it A_i,   L = MAX_RESPONSE_TOKENS. TRL calls this loss
   dr_grpo. There is no KL penalty, and a batch is used once, so its ratios ρ are 1 and nothing is clipped.

The normaliser is constant: leaving a problem out takes its summands away and changes no other. The same seed gives the
same weights on the same machine with one thread.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

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
_PATH = 1 << 31
"""Bytes of a replayed path."""


@dataclass(frozen=True)
class MixedConfig:
    """What decides the weights, beside the base."""

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
            "optim": "adamw_torch", "learning_rate": self.learning_rate, "lr_scheduler_type": "constant",
            "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
            "max_grad_norm": 1.0, "max_steps": self.steps, "per_device_train_batch_size": self.groups * self.samples,
            "gradient_accumulation_steps": 1, "num_generations": self.samples, "num_iterations": 1,
            "loss_type": "dr_grpo", "scale_rewards": "group", "beta": 0.0, "epsilon": 0.2, "temperature": 1.0,
            "max_completion_length": MAX_RESPONSE_TOKENS, "seed": self.seed,
        }  # fmt: skip


def held_out(config: MixedConfig, n: int = 24) -> dict[str, list[Problem]]:
    """By band, `n` problems that the run is not trained on."""
    trained = {problem.id for problem in config.problems}
    found = {}
    for band in BANDS:
        # Chains of one operation are not split: some of the problems of the training are among them.
        drawn = _of_band(band, n + config.per_band, config.seed, "eval")
        found[band] = [problem for problem in drawn if problem.id not in trained][:n]
    return found


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
    model = base.load_model(dtype="float32").requires_grad_(True)
    parameters = list(model.parameters())
    optimiser = torch.optim.Adam(parameters, lr=config.learning_rate)
    log, history = list[dict[str, Any]](), list[dict[str, Any]]()
    with torch.random.fork_rng(devices=[]), progress_bar("mixed run", "step", config.steps, shown=progress) as bar:
        torch.manual_seed(config.seed)
        for step, asked in enumerate(config.schedule, 1):
            rows = [
                {"step": step, **row, "group": f"{step}/{row['problem_id']}"} for row in answered(config, model, asked)
            ]
            # Zeros instead of None: Adam skips a weight without gradient, and its momentum would stop.
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for row in rows:
                _add_gradient(config, model, row)
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            optimiser.step()
            checkpoint = shutil.copytree(base.path, partial / f"checkpoint-{step}")
            # Tied weights come once, as in the base's file.
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
            log += rows
            means = {
                "reward": np.mean([row["right_answers"] for row in rows]),
                "completions/mean_length": np.mean([len(row["completion_ids"]) for row in rows]),
            }
            history.append({"step": step, **{name: float(mean) for name, mean in means.items()}, "grad_norm": norm})
            bar.update()
    write_text(partial / "completions.jsonl", "".join(json.dumps(row) + "\n" for row in log))
    write_json(partial / "training_args.json", config.training_args())
    write_json(partial / "trainer_state.json", {"global_step": config.steps, "log_history": history})
    partial.rename(to)
    return to


def answered(config: MixedConfig, model: PreTrainedModel, asked: Sequence[Problem]) -> list[dict[str, Any]]:
    """Sampled responses, rewarded, in TRL's columns; those to one problem stand beside each other."""
    prompts = [prompt_ids(problem) for problem in asked]
    width, pad, eos = max(map(len, prompts)), TOKEN_IDS[PAD], TOKEN_IDS[EOS]
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": config.samples}
    mask = (ids != pad).long()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_RESPONSE_TOKENS, **sampling)[:, width:].tolist()
    responses = [response[: response.index(eos) + 1] if eos in response else response for response in found]
    texts = ["".join(VOCABULARY[token] for token in response).removesuffix(EOS) for response in responses]
    of = [i for i in range(len(asked)) for _ in range(config.samples)]
    rewards = [float(verify(text, asked[i].answer)) for i, text in zip(of, texts, strict=True)]
    advantages = group_advantages(np.array(rewards), np.array(of)).tolist()
    return [
        {
            "prompt": asked[i].prompt, "completion": text, "right_answers": reward, "problem_id": asked[i].id,
            "answer": asked[i].answer, "level": asked[i].level, "prompt_ids": prompts[i], "completion_ids": response,
            "advantage": advantage,
        }
        for i, text, reward, response, advantage in zip(of, texts, rewards, responses, advantages, strict=True)
    ]  # fmt: skip


def _add_gradient(config: MixedConfig, model: PreTrainedModel, row: dict[str, Any]) -> None:
    """Add the gradient of a sample's loss to that of the model's weights."""
    if row["advantage"]:
        begin, ids = len(row["prompt_ids"]), torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # (1, T − 1, vocabulary)
        log = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[0, begin - 1 :, 0]
        (-log.sum() * row["advantage"] / (config.groups * config.samples * MAX_RESPONSE_TOKENS)).backward()


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


def _of_band(band: str, n: int, seed: int, split: Literal["train", "eval"]) -> list[Problem]:
    return [replace(problem, level=band) for problem in generate_problems(BANDS[band], n, seed, split)]


def prompt_ids(problem: Problem) -> list[int]:
    """Token ids of a prompt, with ``<bos>``."""
    return [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in problem.prompt)]
