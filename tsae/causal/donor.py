"""A second checkpoint that reads along while the first one generates: what its features are on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.hooks import PastLastSite, rewritten

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
        from transformers import DynamicCache

        held: list[torch.Tensor] = []
        cache: Any = None

        early = False

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            held[:] = [hidden.detach()]
            if early:
                raise PastLastSite
            return hidden

        def read(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
            nonlocal cache, early
            theirs = given.get("past_key_values")
            # A cache that we can make lets the donor skip the layers above the site; any other is what a pass gives.
            early = theirs is None or type(theirs) is DynamicCache
            # With a cache, every pass after the prompt's has one token; without one, it starts again from the first.
            if cache is None or given["input_ids"].shape[1] > 1:
                cache = (
                    DynamicCache(config=self.model.config.get_text_config()) if early and theirs is not None else None
                )
            with suppress(PastLastSite):
                output = self.model(
                    input_ids=given["input_ids"],
                    attention_mask=given.get("attention_mask"),
                    position_ids=given.get("position_ids"),
                    past_key_values=cache,
                    use_cache=theirs is not None,
                    logits_to_keep=1,
                )
                cache = output.past_key_values

        handle = model.register_forward_pre_hook(read, with_kwargs=True)
        try:
            with torch.no_grad(), rewritten(self.model, self.site, keep):
                yield lambda: held[0]
        finally:
            handle.remove()
