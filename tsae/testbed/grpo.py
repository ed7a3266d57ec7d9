"""GRPO of the testbed's models with TRL on a CPU: settings, data set and reward."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.base.files import as_path
from tsae.rollouts.problems import Problem
from tsae.testbed.annotate import verify
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import GRPOConfig

_SETTINGS: dict[str, Any] = {
    "max_completion_length": MAX_RESPONSE_TOKENS,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    # The caller saves what it needs, and shows a bar.
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def grpo_on_cpu(folder: str | Path, *, prompts: int, samples: int, **options: Any) -> GRPOConfig:
    """Settings that write only to `folder` and need no GPU; all others are TRL's defaults.

    Args:
        folder: the trainer's output_dir.
        prompts: problems in a step.
        samples: responses to each.
        options: further arguments of GRPOConfig, which override these settings.
    """
    from trl import GRPOConfig

    of_batch = {"per_device_train_batch_size": prompts * samples, "num_generations": samples}
    return GRPOConfig(output_dir=str(as_path(folder)), **{**_SETTINGS, **of_batch, **options})


def data_set(problems: Iterable[Problem]) -> Dataset:
    """A row a problem: prompt, answer, problem_id."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": p.prompt, "answer": p.answer, "problem_id": p.id} for p in problems])


def right_answers(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL's reward function: 1 for a right final answer, 0 otherwise."""
    return [float(verify(text, right)) for text, right in zip(completions, answer, strict=True)]
