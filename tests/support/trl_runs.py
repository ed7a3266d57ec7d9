"""Small models and trainings of TRL."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import torch
from organism.pretraining import ModelConfig, llama_config

import tsae
from tsae.testbed.grpo import right_answers
from tsae.testbed.tokenizer import make_tokenizer

MEDIUM = tsae.testbed.generate_problems("medium", 12, 0, "train")


def tiny_llama(seed: int = 0) -> Any:
    """One layer over the testbed's tokens."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(ModelConfig(n_layers=1, d_model=32, n_heads=2, d_mlp=64)))


def save_tiny(folder: Path, seed: int = 0, template: str | None = None) -> Path:
    """Its folder, with the testbed's tokenizer and, where it is given, a chat template."""
    tiny_llama(seed).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def by_length(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within groups."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(len(text) % 3 == 0) for text in texts]


def train(trainer: Any, resume: str | None = None) -> None:
    """Train without what TRL prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)


def with_kl(to: Path, steps: int, **settings: Any) -> Any:
    """TRL's trainer on problems of all levels, with a KL penalty, two iterations and two steps an iteration.

    It logs ids of the sampled tokens, answers and levels.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def right(completions: list[str], answer: list[str], level: list[str], **others: Any) -> list[float]:
        logged = {"completion_ids": [list(map(int, ids)) for ids in others["completion_ids"]]}
        for name, values in {**logged, "answer": answer, "level": level}.items():
            others["log_extra"](name, values)
        return right_answers(completions, answer)

    problems = [p for level in tsae.testbed.LEVELS for p in tsae.testbed.generate_problems(level, 3, 6, "train")]
    random.Random(5).shuffle(problems)
    usual = {
        "output_dir": str(to), "report_to": "none", "log_completions": True, "num_completions_to_print": 0,
        "logging_steps": 1, "learning_rate": 3e-4, "seed": 5, "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "beta": 0.04, "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2,
        "max_steps": steps, "save_steps": 4,
    }  # fmt: skip
    return GRPOTrainer(
        model=str(tsae.testbed.series_path() / "base"), args=GRPOConfig(**usual | settings), reward_funcs=right,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer, "level": p.level} for p in problems]),
    )  # fmt: skip
