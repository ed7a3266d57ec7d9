"""Small models and trainings of TRL."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from organism.pretraining import ModelConfig, llama_config

import tsae
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
