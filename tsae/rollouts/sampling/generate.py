"""Responses generated here, with Hugging Face generate: batched and seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.loading import ModelLoader
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.problems import Problem
from tsae.rollouts.sampling.batches import Response

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Around = Callable[[Any, Any, Any], AbstractContextManager[None]]
"""(model, prompt ids (B, T), attention mask (B, T)) -> a context in which that batch is generated."""


class Generator:
    """A checkpoint that answers.

    Args:
        checkpoint: the policy.
        tokenizer: its tokenizer.
        config: how it samples.
        loader: keeps the base of adapters loaded from one call to the next.
        model: the checkpoint's, if it is loaded already.
        around: (model, prompt ids (B, T), attention mask (B, T)), both padded on the left -> a context in which that
            batch is generated.

    Raises:
        TsaeError: where the model has no end-of-sequence token.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
        config: SamplingConfig,
        *,
        loader: ModelLoader | None = None,
        model: PreTrainedModel | None = None,
        around: Around | None = None,
    ) -> None:
        self.config, self.where, self.around = config, checkpoint.path, around
        self.model: Any = model if model is not None else (loader or ModelLoader(device=config.device)).load(checkpoint)
        self.ends = end_tokens(self.model, tokenizer, checkpoint.path)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.ends[0]

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Response]:
        """One response to each prompt of a batch, given as token ids.

        Raises:
            TsaeError: where the model's probabilities are not finite.
        """
        try:
            rows = self._generate(prompts, seed)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            what = "its next-token probabilities are not finite"
            raise TsaeError(what, where=self.where, fix="Check that checkpoint's weights.") from error
        found = []
        for row in rows:
            end = next((position + 1 for position, token in enumerate(row) if token in self.ends), len(row))
            found.append(Response(tuple(row[:end]), "stop" if row[end - 1] in self.ends else "length"))
        return found

    def _generate(self, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        """New token ids, padded to equal length."""
        import torch

        device, width = self.config.device, max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts]).to(device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(device)
        with (
            _as_it_is(self.model),
            torch.random.fork_rng(devices=[device] if device != "cpu" else []),
            torch.no_grad(),
            nullcontext() if self.around is None else self.around(self.model, ids, mask),
        ):
            torch.manual_seed(seed)
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=self.config.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.config.max_new_tokens,
                pad_token_id=self.pad,
                eos_token_id=self.ends,
            )
        found: list[list[int]] = output[:, width:].tolist()
        return found


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """While it is open, ignore top_p, top_k or a repetition penalty of a checkpoint: we sample from the policy itself.

    Its configuration is put back: whoever uses the loaded model next reads there what ends a response.
    """
    own, model.generation_config = model.generation_config, type(model.generation_config)()
    try:
        yield
    finally:
        model.generation_config = own


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Ids of the tokens that end a response.

    Raises:
        TsaeError: where there are none.
    """
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        what = "the model has no end-of-sequence token, so that no response would ever end"
        raise TsaeError(what, where=where, fix="Set eos_token in its tokenizer_config.json.")
    return list(np.atleast_1d(found).tolist())


def check_lengths(context: int | None, prompts: list[list[int]], problems: Sequence[Problem], new: int) -> None:
    """Refuse prompts that leave no room for `new` tokens in the model's context."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if context is not None and len(prompts[longest]) + new > context:
        raise TsaeError(
            f"problem {problems[longest].id} has {len(prompts[longest])} prompt tokens, which with "
            f"max_new_tokens={new} exceeds the model's context of {context}",
            where="sample",
            fix="Lower max_new_tokens, or leave that problem out.",
        )
