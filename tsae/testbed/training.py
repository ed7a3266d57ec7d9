"""TRL's settings for GRPO of the testbed's models on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.testbed.measure import MAX_RESPONSE_TOKENS

if TYPE_CHECKING:
    from trl import GRPOConfig

_SETTINGS: dict[str, Any] = {
    "max_completion_length": MAX_RESPONSE_TOKENS,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    # Who trains keeps what is to be kept, and shows a bar.
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def grpo_on_cpu(folder: str | Path, *, prompts: int, samples: int, **options: Any) -> GRPOConfig:
    """Settings in which nothing is written but to `folder`, and nothing needs a GPU; all others are TRL's defaults.

    Args:
        folder: the trainer's output_dir.
        prompts: problems in a step.
        samples: responses to each.
        options: further arguments of GRPOConfig, which go before these settings.
    """
    from trl import GRPOConfig

    of_batch = {"per_device_train_batch_size": prompts * samples, "num_generations": samples}
    return GRPOConfig(output_dir=str(folder), **{**_SETTINGS, **of_batch, **options})
