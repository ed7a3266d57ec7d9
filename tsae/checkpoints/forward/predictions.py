"""Predictions: the entropy of a model's next-token distribution, and the log-probability of the token that came.

The body of a Hugging Face causal LM gives hidden states, and its head makes logits of them. The logits of a batch are
the largest tensors of all (with a vocabulary of 150,000, 10 GB for 16,384 tokens), so the head runs on a few positions
at a time, and only where a next token exists. The model's own code runs, with its scaling or soft caps of logits, at
temperature 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_LOGITS = 1 << 25
"""Logits computed at once: 128 MiB in float32, of which a few copies live at a time."""


class Predictions(NamedTuple):
    """For every token of a batch given those before it, in nats; NaN at the first token of a text and at padding."""

    entropy: torch.Tensor
    """(B, T) float32: of the distribution that predicts token t."""
    logprob: torch.Tensor
    """(B, T) float32: of token t itself."""


class PredictingReader:
    """A reader whose `read` also gives the predictions, by their names beside the sites.

    Args:
        reader: has `read_and_predict`.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """For every site (B, T, d_model), and for every prediction (B, T)."""
        values, predicted = self.reader.read_and_predict(input_ids, attention_mask)
        return {**values, **predicted._asdict()}


@contextmanager
def body_output(model: PreTrainedModel) -> Iterator[list[Any]]:
    """While it is open, append to the list what the body gives the head in every forward pass."""
    kept: list[Any] = []
    handle = _body(model).register_forward_hook(lambda _m, _i, output: kept.append(output))
    try:
        yield kept
    finally:
        handle.remove()


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    output: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    chunk_logits: int = _CHUNK_LOGITS,
) -> Predictions:
    """Entropy and log-probability of every token that has one before it.

    Args:
        model: a causal LM.
        output: of its body for the batch; see `body_output`.
        input_ids: (B, T) token ids on any device, padded on either side.
        attention_mask: (B, T) 1 for real tokens.
        chunk_logits: logits to hold at once, one position at least.
    """
    device = output.last_hidden_state.device
    input_ids, real = input_ids.to(device), attention_mask.bool().to(device)
    row, position = (real[:, :-1] & real[:, 1:]).nonzero(as_tuple=True)
    hidden, target = output.last_hidden_state[row, position], input_ids[row, position + 1]
    entropy = torch.full(input_ids.shape, torch.nan, device=device)
    logprob = torch.full_like(entropy, torch.nan)
    n = max(1, chunk_logits // model.config.get_text_config().vocab_size)
    for low in range(0, len(hidden), n):
        log_p = _logits(model, output, hidden[low : low + n]).float().log_softmax(-1)
        at = (row[low : low + n], position[low : low + n] + 1)
        logprob[at] = log_p.gather(-1, target[low : low + n, None])[:, 0]
        # Not p · log p, which is NaN where a model gives a token no chance at all.
        entropy[at] = torch.special.entr(log_p.exp_()).sum(-1)
    return Predictions(entropy, logprob)


def _logits(model: PreTrainedModel, output: Any, hidden: torch.Tensor) -> torch.Tensor:
    """(n, vocabulary) logits of hidden states (n, d_model), by a forward pass whose body returns these."""
    given = copy.copy(output)
    given["last_hidden_state"] = hidden[None]
    body = _body(model)
    before = vars(body).get("forward")
    body.forward = lambda *_args, **_kwargs: given
    try:
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        del body.forward
        if before is not None:
            body.forward = before


def _body(model: PreTrainedModel) -> torch.nn.Module:
    # Llama 4's text model has its body under another name than its class says.
    return model.model if model.base_model is model else model.base_model
