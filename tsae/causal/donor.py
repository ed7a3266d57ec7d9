"""A second checkpoint that reads along while the first one generates: what its features are on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.forward.hooks import rewritten

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Donor:
    """A model whose residual stream is put into another one.

    Args:
        model: of the architecture, tokens and device of the model that generates.
        site: where both are read.
    """

    def __init__(self, model: PreTrainedModel, site: str) -> None:
        self.model, self.site = model, site

    @contextmanager
    def beside(self, model: PreTrainedModel) -> Iterator[Callable[[], torch.Tensor]]:
        """While it is open, the donor reads the tokens of every forward pass before `model` does, unedited.

        Gives a function that returns the donor's (B, T, d_model) at the site for the pass in progress.
        """
        held: list[torch.Tensor] = []
        cache: Any = None

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            held[:] = [hidden.detach()]
            return hidden

        def read(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
            nonlocal cache
            ids = given["input_ids"]
            # With a cache, every pass after the prompt's has one token; without one, it starts again from the first.
            output = self.model(
                input_ids=ids,
                attention_mask=given["attention_mask"],
                position_ids=given.get("position_ids"),
                past_key_values=cache if ids.shape[1] == 1 else None,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values

        handle = model.register_forward_pre_hook(read, with_kwargs=True)
        try:
            with torch.no_grad(), rewritten(self.model, self.site, keep):
                yield lambda: held[0]
        finally:
            handle.remove()
