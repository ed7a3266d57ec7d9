"""Sites in a Hugging Face model, and hooks that read or rewrite the residual stream there.

A site is named as TransformerLens names it, whatever the backend:

- ``blocks.{L}.hook_resid_pre``: what enters block L;
- ``blocks.{L}.hook_resid_post``: what leaves block L, before any final norm.

Hooks read what the Hugging Face module computes: nothing is folded, centred or normalised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.placement import input_device
from tsae.checkpoints.predictions import Predictions, body_output, predictions
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SITE = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")


@dataclass(frozen=True)
class Site:
    """A place in the residual stream."""

    layer: int
    """Block index, from 0."""
    point: str
    """"pre" or "post"."""

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.hook_resid_{self.point}"

    @classmethod
    def parse(cls, name: str) -> Site:
        """Read a TransformerLens name.

        Raises:
            TsaeError: for any other name.
        """
        match = _SITE.fullmatch(name)
        if match is None:
            raise TsaeError(
                f"unknown site {name!r}",
                where="sites",
                fix="Use blocks.{L}.hook_resid_post or blocks.{L}.hook_resid_pre, such as blocks.14.hook_resid_post.",
            )
        return cls(layer=int(match[1]), point=match[2])


def decoder_blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The list of decoder blocks: the one ModuleList as long as the configuration's number of layers."""
    depth = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    if not lists:
        raise TsaeError(
            f"found no list of {depth} decoder blocks in {type(model).__name__}",
            where=model.config._name_or_path,
            fix="Use a decoder-only Hugging Face causal LM.",
        )
    return lists[0]


def check_sites(sites: Sequence[str], n_layers: int, where: str) -> list[Site]:
    """Parse site names and check that the model has these blocks."""
    parsed = [Site.parse(name) for name in sites]
    if not parsed:
        raise TsaeError("no sites given", where="sites", fix="Give at least one, such as blocks.1.hook_resid_post.")
    for site in parsed:
        if site.layer >= n_layers:
            raise TsaeError(
                f"{site.name} does not exist: the model has blocks 0 to {n_layers - 1}",
                where=where,
                fix="Choose a block that the model has.",
            )
    return parsed


class _PastLastSite(Exception):
    """Raised inside a forward pass once everything wanted has been read, to skip the layers above."""


class HuggingFaceReader:
    """Reads residual streams with forward hooks on the model's own modules."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[str]) -> None:
        self.model = model
        self.device = input_device(model)
        self.blocks = decoder_blocks(model)
        self.sites = check_sites(sites, len(self.blocks), str(model.config._name_or_path))

    @torch.no_grad()
    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, stop_early: bool = True
    ) -> dict[str, torch.Tensor]:
        """Run the model on a padded batch.

        Args:
            input_ids: (B, T) token ids on any device, padded on either side.
            attention_mask: (B, T) 1 for real tokens. Positions count real tokens, so that the side of the padding
                does not change what is read at them.
            stop_early: skip the layers above the last site.

        Returns:
            for every site (B, T, d_model) in the model's precision; entries at padding mean nothing.
        """
        input_ids, attention_mask = input_ids.to(self.device), attention_mask.to(self.device)
        found: dict[str, torch.Tensor] = {}

        def keep(site: Site, value: Any) -> None:
            hidden = value[0] if isinstance(value, tuple) else value
            found[site.name] = hidden.detach().clone()
            if stop_early and len(found) == len({s.name for s in self.sites}):
                raise _PastLastSite

        handles = []
        for site in self.sites:
            block = self.blocks[site.layer]
            if site.point == "post":
                handles.append(block.register_forward_hook(lambda _m, _i, out, site=site: keep(site, out)))
            else:
                handles.append(
                    block.register_forward_pre_hook(
                        lambda _m, args, kwargs, site=site: keep(site, args[0] if args else kwargs["hidden_states"]),
                        with_kwargs=True,
                    )
                )
        try:
            self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions(attention_mask),
                use_cache=False,
                logits_to_keep=1,
            )
        except _PastLastSite:
            pass
        finally:
            for handle in handles:
                handle.remove()
        unread = {site.name for site in self.sites} - found.keys()
        if unread:
            raise TsaeError(f"the hooks never fired at {', '.join(sorted(unread))}", where=type(self.model).__name__)
        return found

    def read_and_predict(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], Predictions]:
        """As `read`, through all layers, and what the model predicted of the same batch."""
        with body_output(self.model) as outputs:
            found = self.read(input_ids, attention_mask, stop_early=False)
        return found, predictions(self.model, outputs[-1], input_ids, attention_mask)


@contextmanager
def rewritten(model: PreTrainedModel, site: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within it the residual stream (B, T, d_model) at a site is what `change` makes of it.

    Raises:
        TsaeError: where the site does not exist.
    """
    blocks = decoder_blocks(model)
    (place,) = check_sites([site], len(blocks), str(model.config._name_or_path))

    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    block = blocks[place.layer]
    if place.point == "post":
        handle = block.register_forward_hook(after)
    else:
        handle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def during_generation(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], prompt: torch.Tensor, *, generated: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change for `rewritten` around one call of generate, with or without a cache of keys and values.

    Args:
        change: (hidden (B, T, d_model), where (B, T) bool) -> hidden.
        prompt: (B, width) bool, the positions of the padded prompts that are changed.
        generated: whether those of generated tokens are.
    """
    seen = 0

    def at(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        n = hidden.shape[1]
        # With a cache every pass after the prompt's brings one token; without one, everything from the start again.
        if n != (seen + 1 if seen else prompt.shape[1]) and not (seen and n == 1):
            raise RuntimeError(f"a pass over {n} tokens after {seen} is neither the prompt's nor the next token's")
        start = seen if seen and n == 1 else 0
        seen = start + n
        where = torch.full((len(hidden), seen), generated, device=hidden.device)
        where[:, : prompt.shape[1]] = prompt.to(hidden.device)
        return change(hidden, where[:, start:])

    return at


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) position of each real token among the real tokens of its row; 0 at padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
