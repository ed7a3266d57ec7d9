"""Checkpoints as files: edited, as adapters, in a cache of Hugging Face."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from support.builders import BOS, save_perturbed

IDS = torch.tensor([[BOS, 3, 10, 5, 13, 1, 2]])
"""A text."""


def save_adapter(base: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A LoRA adapter of random weights, written by peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
        if options.get("bias", "none") != "none":
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.add_(torch.randn(parameter.shape))
        model.save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def reweigh(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the weights of a file, or the names of its tensors."""
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def save_resized(source: Path, folder: Path, rows: int, *, seed: int = 1) -> Path:
    """A copy that moved a little, with another number of embeddings."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_perturbed(source, folder, seed=seed))
    with torch.random.fork_rng():
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    return folder


def rewrite(checkpoint: Path) -> None:
    """Other weights in the same file. A model that is loaded on the CPU has its own mapped from there."""
    file = checkpoint / "model.safetensors"
    weights = {name: value + 0.05 for name, value in load_file(file).items()}
    with file.open("r+b") as stream:
        stream.write(save(weights, metadata={"format": "pt"}))


def cached(cache: Path, repository: str, revisions: dict[str, dict[str, Path]]) -> None:
    """Lay models out as huggingface_hub caches them: {revision: {subfolder: model}}."""
    root = cache / f"models--{repository.replace('/', '--')}"
    for number, (revision, models) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        for subfolder, model in models.items():
            shutil.copytree(model, root / "snapshots" / commit / subfolder, dirs_exist_ok=True)
