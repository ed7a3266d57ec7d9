"""Gradients of single samples of a head that TRL's trainers never call as a module.

TRL computes log-probabilities from the head's weight itself, in tiles, without the logits (`add_fused_lm_head`). No
module is called, so no hook sees it. Here TRL's own function is noted when it is called, with what came back to its
results. Each sample's gradient is then what the same function gives for that sample alone. Where the head is tied to
the embedding, both parts add up in one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tsae.attribution.online.batch_gradients import BatchGradients

_FUNCTION = "_ChunkedLogProbFunction"
"""In trl.trainer.utils; releases without it call the head as a module."""


@dataclass(frozen=True)
class _Call:
    """A call of the function on N tokens."""

    inputs: tuple[Any, ...]
    back: dict[int, torch.Tensor] = field(default_factory=dict)
    """(N,) gradients that came back, by place among the results."""


@contextmanager
def fused_head(batch: BatchGradients, lengths: Sequence[int]) -> Iterator[None]:
    """Around `batch.micro_batch`: adds what the head's weights have of the gradients.

    Args:
        batch: of the step.
        lengths: (B,) tokens of the responses, which are the tokens that are scored.
    """
    from trl.trainer import utils

    real: Any = getattr(utils, _FUNCTION, None)
    if real is None:
        yield
        return
    names = {id(parameter): name for name, parameter in batch.trained.parameters.items()}
    calls: list[_Call] = []

    class Noted:
        @staticmethod
        def apply(*inputs: Any) -> Any:
            found = real.apply(*inputs)
            if torch.is_grad_enabled() and any(id(weight) in names for weight in inputs[1:3]):
                call = _Call(inputs)
                for place, one in enumerate(found):
                    if one is not None and one.requires_grad:
                        one.register_hook(partial(_note, call, place))
                calls.append(call)
            return found

    setattr(utils, _FUNCTION, Noted)
    try:
        yield
    finally:
        setattr(utils, _FUNCTION, real)
    for call in calls:
        for place in (1, 2):  # Weight and bias.
            name = names.get(id(call.inputs[place]))
            if name is not None:
                batch.add(name, _of_samples(real, call, place, lengths))


def _note(call: _Call, place: int, back: torch.Tensor | None) -> None:
    # Nothing comes back to what the loss does not use, such as an entropy that is only logged.
    if back is not None:
        call.back[place] = back.detach()


def _of_samples(real: Any, call: _Call, place: int, lengths: Sequence[int]) -> torch.Tensor:
    """(B, …) gradients of the input at this place."""
    hidden, weight, bias, targets, *options = call.inputs
    # All tokens of padded samples, or on GPUs only those that are scored.
    n = len(lengths)
    rows = list(lengths) if len(hidden) == sum(lengths) else [len(hidden) // n] * n
    found, begin = [], 0
    for size in rows:
        part = slice(begin, begin + size)
        begin += size
        leaves: list[Any] = [each if each is None else each.detach().requires_grad_() for each in (weight, bias)]
        with torch.enable_grad():
            given = real.apply(hidden[part].detach(), *leaves, targets[part], *options)
        which = list(call.back)
        back = [call.back[i][part] for i in which]
        found.append(torch.autograd.grad([given[i] for i in which], leaves[place - 1], back)[0])
    return torch.stack(found)
