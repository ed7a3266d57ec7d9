"""The base model of the testbed: a three-layer Llama, trained on `organism.corpus` by next-token prediction.

1. Draw a batch of texts ``<bos> prompt response <eos>``, cut in three by length, so that long chains do not pad others.
2. Cross-entropy on the response tokens only, averaged over the batch's: the digits of a prompt are random.
3. AdamW, linear warm-up and cosine decay to a tenth.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from organism.corpus import CorpusConfig, Document, sample_document
from tsae.testbed.tokenizer import BOS, EOS, MAX_TOKENS, PAD, TOKEN_IDS, VOCABULARY

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100
"""Label of positions without loss, as in torch's cross-entropy."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model; the defaults make 334,368 parameters."""

    n_layers: int = 3
    """Transformer blocks."""
    d_model: int = 96
    """Width of the residual stream."""
    n_heads: int = 4
    """Attention heads, each of d_model / n_heads dimensions."""
    d_mlp: int = 256
    """Hidden width of the gated MLP."""


@dataclass(frozen=True)
class BaseConfig:
    """How the base model is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model's shape."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The training text."""
    steps: int = 900
    """Optimiser steps."""
    batch: int = 256
    """Texts per step."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    warmup: int = 50
    """Steps of linear warm-up."""


def llama_config(shape: ModelConfig, max_positions: int = MAX_TOKENS) -> LlamaConfig:
    """The Hugging Face configuration: tied embeddings, 20 tokens, by default 128 positions."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.d_model,
        intermediate_size=shape.d_mlp,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
    )


def pad_batch(documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of a batch, padded on the right: two int64 tensors (n_documents, longest)."""
    import torch

    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for document in documents:
        prompt = [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in document.prompt)]
        response = [*(TOKEN_IDS[character] for character in document.response), TOKEN_IDS[EOS]]
        rows.append(prompt + response)
        labels.append([IGNORED] * len(prompt) + response)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [TOKEN_IDS[PAD]] * (longest - len(row)) for row in rows])
    targets = torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels])
    return ids, targets  # (n_documents, longest) each


def train_base(config: BaseConfig, seed: int, on_step: Callable[[int, float], None] | None = None) -> LlamaForCausalLM:
    """Train the base model on the CPU; the same seed and thread count give the same weights on the same machine.

    Args:
        config: shape, text and schedule.
        seed: of the weights and of the text.
        on_step: called after every step with (steps done, loss in nats per response token).

    Returns:
        The model in evaluation mode, float32.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = LlamaForCausalLM(llama_config(config.model)).float().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, config.warmup, config.steps))
    for step in range(1, config.steps + 1):
        texts = [sample_document(config.corpus, rng) for _ in range(config.batch)]
        texts.sort(key=lambda text: len(text.prompt) + len(text.response))
        # Three cuts by length: half of the batch is a direct answer, and long chains are few.
        cuts = [0, config.batch // 2, config.batch - config.batch // 8, config.batch]
        parts = [pad_batch(texts[start:stop]) for start, stop in itertools.pairwise(cuts) if stop > start]
        n_targets = sum(int((targets != IGNORED).sum()) for _, targets in parts)
        total = 0.0
        for ids, targets in parts:
            # Padding is on the right and attention is causal: no response token sees it, so no mask is needed.
            logits = model(input_ids=ids, use_cache=False).logits  # (n, length, vocabulary)
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / n_targets).backward()
            total += float(loss.detach()) / n_targets
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if on_step is not None:
            on_step(step, total)
    return model.eval()


def _rate(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))
