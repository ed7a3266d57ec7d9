"""Checkpoints as files: edited, as adapters, in a cache of Hugging Face, with chat templates in use."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


def loads_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every model that is loaded."""
    from transformers import AutoModelForCausalLM

    plain, loads = AutoModelForCausalLM.from_pretrained, list[str]()
    counted = lambda *a, **k: (loads.append(str(k)), plain(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    return loads


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


TURNS = "{{% for m in messages %}}{before}{{{{ m['role'] }}}}{between}{{{{ m['content'] }}}}{after}{{% endfor %}}"
CHATML = TURNS.format(before="<|im_start|>", between="\n", after="<|im_end|>\n")
ASK = "{% if add_generation_prompt %}"
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
# The template, its special tokens, further added ones, and the text that it ends in before the response.
TEMPLATES: dict[str, tuple[str, list[str], list[str], str]] = {
    "chatml": (CHATML + ASK + "<|im_start|>assistant\n{% endif %}", ["<|im_start|>", "<|im_end|>"], [], "\n"),
    "llama3": (
        "<|begin_of_text|>"
        + TURNS.format(before="<|start_header_id|>", between="<|end_header_id|>\n\n", after="<|eot_id|>")
        + ASK
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [],
        "\n",
    ),
    "gemma": (
        "<bos>"
        + TURNS.format(before="<start_of_turn>", between="\n", after="<end_of_turn>\n")
        + ASK
        + "<start_of_turn>model\n{% endif %}",
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        [],
        "\n",
    ),
    "qwen3": (
        CHATML + ASK + "<|im_start|>assistant\n" + THINKING + "{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>"],
        "\n",
    ),
    "qwen3-always-thinking": (
        CHATML + ASK + "<|im_start|>assistant\n<think>\n{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>"],
        "\n",
    ),
    "smollm2": (SMOLLM2 + ASK + "<|im_start|>assistant\n{% endif %}", ["<|im_start|>", "<|im_end|>"], [], "\n"),
    # These end in a special token.
    "mistral": (
        "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% else %}"
        "{{ m['content'] }}</s>{% endif %}{% endfor %}",
        ["<s>", "</s>", "[INST]", "[/INST]"],
        [],
        "[/INST]",
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜>{% for m in messages %}<｜User｜>{{ m['content'] }}{% endfor %}" + ASK
        + "<｜Assistant｜>{% endif %}",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        [],
        "<｜Assistant｜>",
    ),
    "phi4": (
        TURNS.format(before="<|im_start|>", between="<|im_sep|>", after="<|im_end|>") + ASK
        + "<|im_start|>assistant<|im_sep|>{% endif %}",
        ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
        [],
        "<|im_sep|>",
    ),
}  # fmt: skip


def make_tokenizer(name: str) -> Any:
    """A token for every byte, with a template and its tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, special, added, _ = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1], pad_token=special[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": special[:-1]})
    tokenizer.chat_template = template
    return tokenizer
