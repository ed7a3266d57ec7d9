"""Sampling of groups on one core: all responses of a training step in one loop with a key-value cache.

1. Prompts are padded on the left and read once; the cache is then repeated for the samples of each.
2. One token a row is drawn at temperature 1, from the whole vocabulary.
3. Rows that have ended leave the batch when a quarter of it has ended, so that long responses do not wait for short
   ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from tsae.testbed.tokenizer import EOS, PAD, TOKEN_IDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAVES_AT = 0.75
"""Rows that still go on, as a share of the batch, at which the others leave it."""


@torch.inference_mode()
def sample_groups(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], samples: int, generator: torch.Generator, max_tokens: int
) -> list[list[int]]:
    """Sample several responses to each prompt at temperature 1.

    Args:
        model: a testbed checkpoint in evaluation mode.
        prompts: token ids of each, with ``<bos>``.
        samples: responses to each prompt.
        generator: of the draws.
        max_tokens: tokens after which a response is cut off.

    Returns:
        token ids of len(prompts) · samples responses, those to one prompt beside each other; ``<eos>`` is the last
        token of a response that was not cut off.
    """
    if not prompts:
        return []
    width, eos = max(map(len, prompts)), TOKEN_IDS[EOS]
    ids = torch.tensor([[TOKEN_IDS[PAD]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache).logits[:, -1]
    cache.batch_repeat_interleave(samples)
    logits, mask = (each.repeat_interleave(samples, dim=0) for each in (logits, mask))
    found = torch.full((len(logits), max_tokens), eos)  # (n, max_tokens)
    row, going = torch.arange(len(logits)), torch.ones(len(logits), dtype=torch.bool)
    for number in range(max_tokens):
        token = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)[:, 0]
        found[row[going], number] = token[going]
        going &= token != eos
        if not going.any():
            break
        if going.sum() <= _LEAVES_AT * len(going):
            kept = going.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            row, token, mask, going = row[kept], token[kept], mask[kept], going[kept]
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], dim=1)
        step = {"input_ids": token[:, None], "attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        logits = model(**step, past_key_values=cache).logits[:, -1]
    return [response[: response.index(eos) + 1] if eos in response else response for response in found.tolist()]
