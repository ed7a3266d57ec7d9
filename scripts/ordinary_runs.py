"""GRPO runs of TRL as people have them: the testbed's base, trained on mixed problems, each in under a minute on a CPU.

Every folder holds what TRL leaves with `log_completions=True` and `logging_steps=1`: tables of completions, checkpoints
and `training_args.bin`. The base lies beside, in `arith-base`. Cases:

- default   chat, two rewards, one step a generation
- kl        a KL penalty, two iterations, two steps an iteration
- lora      LoRA without dropout, dr_grpo
- cosine    two rewards, weight decay, cosine with warm-up, clipping that acts, bfloat16 autocast
- kept      chat, only the last two checkpoints are kept; stopped once and resumed
- entropy   GSPO's ratios, a loss over the tokens of highest entropy, truncated completions masked
- tenth     only every tenth step is logged, TRL's default

    python scripts/ordinary_runs.py kl runs/kl --seed 3
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import tsae.testbed

Case = Literal["default", "kl", "lora", "cosine", "kept", "entropy", "tenth"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
SETTINGS: dict[Case, dict[str, Any]] = {
    "default": {},
    "kl": {
        "beta": 0.04, "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 32, "max_steps": 16, "save_steps": 4,
    },
    "lora": {"loss_type": "dr_grpo", "scale_rewards": False, "learning_rate": 1e-3, "save_steps": 3},
    "cosine": {
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1, "bf16": True,
    },
    "kept": {"save_total_limit": 2, "save_steps": 3},
    "entropy": {
        "top_entropy_quantile": 0.2, "mask_truncated_completions": True, "importance_sampling_level": "sequence",
        "max_completion_length": 40,
    },
    "tenth": {"logging_steps": 10, "max_steps": 20},
}  # fmt: skip
CHAT, TWO_REWARDS = ("default", "kept"), ("default", "cosine", "kept")


@dataclass(frozen=True)
class Options:
    """Train one case."""

    case: tyro.conf.Positional[Case]
    out: tyro.conf.Positional[Path]
    """Folder of the run."""
    seed: int = 0
    """Of the problems and of the training."""
    steps: int | None = None
    """Optimiser steps; by default those of the case (15, 16 or 20)."""
    ids: bool = False
    """Log the ids of the sampled tokens."""
    labels: bool = False
    """Log answers and levels of the problems."""
    plain: bool = False
    """Ask the problems as texts where the case asks them as chats."""
    learning_rate: float | None = None
    """By default that of the case."""
    save_every_step: bool = False
    per_level: int = 16
    """Problems of each level."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(options, stop=10 if options.case == "kept" else None)
    trainer.train()
    if options.case == "kept":
        make_trainer(options).train(resume_from_checkpoint=True)
    if options.case == "default":
        trainer.save_model()


def make_trainer(options: Options, stop: int | None = None, **settings: Any) -> GRPOTrainer:
    """A trainer of one case, which stops after the step `stop`; `settings` replace those of the case."""
    case, seed = options.case, options.seed
    problems = [
        problem
        for level in tsae.testbed.LEVELS
        for problem in tsae.testbed.generate_problems(level, options.per_level, seed=1 + seed, split="train")
    ]
    random.Random(seed).shuffle(problems)
    chat = case in CHAT and not options.plain
    rows = [
        {
            "prompt": [{"role": "user", "content": problem.prompt}] if chat else problem.prompt,
            "answer": problem.answer, "level": problem.level,
        }
        for problem in problems
    ]  # fmt: skip
    usual: dict[str, Any] = {
        "output_dir": str(options.out), "report_to": "none", "log_completions": True, "num_completions_to_print": 0,
        "logging_steps": 1, "max_completion_length": 90, "per_device_train_batch_size": 64, "num_generations": 8,
        "max_steps": 15, "save_steps": 5, "learning_rate": 3e-4, "seed": seed,
        "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    given = {"max_steps": options.steps, "learning_rate": options.learning_rate}
    given = {name: value for name, value in given.items() if value}
    every = {"save_steps": 1} if options.save_every_step else {}
    peft = None
    if case == "lora":
        from peft import LoraConfig

        peft = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0)
    return GRPOTrainer(
        model=str(base(options.out.absolute().parent / "arith-base")),
        args=GRPOConfig(**usual | SETTINGS[case] | given | every | settings),
        reward_funcs=rewards(options),
        train_dataset=Dataset.from_list(rows),
        peft_config=peft,
        callbacks=[Stop(stop)] if stop else [],
    )


def base(folder: Path) -> Path:
    """The testbed's base with a chat template, made where it is not there."""
    if not folder.is_dir():
        shipped = tsae.testbed.series_path() / "base"
        tokenizer = AutoTokenizer.from_pretrained(shipped)
        tokenizer.chat_template = TEMPLATE
        AutoModelForCausalLM.from_pretrained(shipped).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def rewards(options: Options) -> list[Callable[..., list[float]]]:
    def accuracy_reward(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
        if options.ids:
            others["log_extra"]("completion_ids", [list(map(int, ids)) for ids in others["completion_ids"]])
        if options.labels:
            others["log_extra"]("answer", answer)
            others["log_extra"]("level", others["level"])
        given = [re.search(r"#(\d)\Z", text(completion)) for completion in completions]
        return [float(found is not None and found[1] == right) for found, right in zip(given, answer, strict=True)]

    def format_reward(completions: list[Any], **others: Any) -> list[float]:
        return [0.2 if re.search(r"#\d\Z", text(completion)) else 0.0 for completion in completions]

    return [accuracy_reward, format_reward] if options.case in TWO_REWARDS else [accuracy_reward]


def text(completion: Any) -> str:
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


class Stop(TrainerCallback):
    """Ends a training after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == self.step


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
