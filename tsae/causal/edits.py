"""Edits of the residual stream that move chosen features and leave all else, the SAE's error too, where it is.

    x ← x + Σ_i (f'_i − f_i) W_dec[i]      f' = 0, the mean, a clamped value, f + α · typical activation, or what
                                           another checkpoint's features are on the same tokens (transplant)

Adding the difference, and not decoding f', keeps the reconstruction error and all other features' contributions.

For a transplant, a second checkpoint reads along while the first one generates (`Donor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tsae.causal.config import Mode, Where
from tsae.checkpoints.hooks import PastLastSite, during_generation, rewritten
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Rewriting = Callable[[str, Callable[[torch.Tensor], torch.Tensor]], AbstractContextManager[None]]
"""(site, change): within the context the residual stream at the site is what `change` makes of it."""


@dataclass(frozen=True)
class FeatureEdit:
    """What happens to chosen features of every token."""

    sae: TemporalSAE
    features: tuple[int, ...]
    mode: Mode
    level: tuple[float, ...]
    """For every feature, in units of activation: what it is set to, or what is added when steering; unused by
    transplants."""
    sign: float = 1.0
    """−1 moves every feature by as much the other way; 0 encodes, and changes nothing."""
    direction: torch.Tensor | None = None
    """(d_model,) unit vector: every token moves along it instead, as far as the features' edit would move it, forward
    where that raises the features and backward where it lowers them; in a transplant always forward."""
    donor: Donor | None = None
    """Whose features are transplanted."""
    whole: bool = False
    """Transplant the whole residual stream, without the SAE."""

    def delta(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """(n, d_model) float32, and the donor's of the same tokens -> (n, d_model): what is added."""
        chosen = list(self.features)
        if other is not None and self.whole:
            return self.sign * (other - x)
        level = x.new_tensor(self.level) if other is None else self.sae.encode(other)[:, chosen]
        moved = level.expand(len(x), -1) if self.mode == "steer" else level - self.sae.encode(x)[:, chosen]
        moved = moved * self.sign
        by_features = moved @ self.sae.W_dec.detach()[chosen]
        if self.direction is None:
            return by_features
        way = 1.0 if self.mode == "transplant" else moved.sum(1, keepdim=True).sign()
        return way * by_features.norm(dim=1, keepdim=True) * self.direction.to(x)

    def change(self, hidden: torch.Tensor, where: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, d_model) edited at `where` (B, T), except tokens beyond the norm limit of the SAE's training.

        Args:
            hidden: the residual stream.
            where: which tokens.
            other: the donor's, of the same shape.
        """
        x, given = hidden.float(), None if other is None else other.float()
        if not self.whole:
            where = where & ~self.sae.outliers(x)
            where = where if given is None else where & ~self.sae.outliers(given)
        edited = hidden.clone()
        picked = x[where]
        edited[where] = (picked + self.delta(picked, None if given is None else given[where])).to(hidden.dtype)
        return edited

    def reversed(self) -> FeatureEdit:
        return replace(self, sign=-self.sign)

    def hook(
        self, rewriting: Callable[[PreTrainedModel], Rewriting], tokens: Where, special_ids: tuple[int, ...]
    ) -> Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], AbstractContextManager[None]]:
        """For `tsae.sample(hook=…)`: puts the edit in place for one batch.

        Args:
            rewriting: gives a model's way of rewriting its residual stream.
            tokens: see `InterventionConfig.tokens`.
            special_ids: prompt tokens that are never edited, but as the prompt's last, from which the first token of
                the response is drawn.
        """

        @contextmanager
        def around(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> Iterator[None]:
            where = mask.bool() & ~torch.isin(ids, ids.new_tensor(special_ids))
            where[:, -1] = mask[:, -1].bool()
            if tokens in ("predicting", "first"):
                where[:, :-1] = False  # Prompts are padded on the left.
            elif tokens == "response":
                where[:] = False
            with nullcontext() if self.donor is None else self.donor.beside(model) as read:

                def change(hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
                    return self.change(hidden, where, None if read is None else read())

                with rewriting(model)(self.sae.site, during_generation(change, where, generated=tokens != "first")):
                    yield

        return around


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
