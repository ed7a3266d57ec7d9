"""Hooks that read or rewrite the residual stream of a Hugging Face model, and what it predicts there.

Sites have their TransformerLens names, whatever the backend:

- ``blocks.{L}.hook_resid_pre``: what enters block L;
- ``blocks.{L}.hook_resid_post``: what leaves block L, before any final norm.

Hooks read what the Hugging Face module computes: nothing is folded, centred or normalised.

Predictions are the entropy of a model's next-token distribution, and the log-probability of the token that came. The
body of a causal LM gives hidden states, and its head makes logits of them. The logits of a batch are the largest
tensors of all (with a vocabulary of 150,000, 10 GB for 16,384 tokens), so the head runs on a few positions at a time,
and only where a next token exists. The model's own code runs at temperature 1, with its scaling or soft caps of
logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tsae.checkpoints.sites import Site, check_sites
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder blocks: the first ModuleList as long as the configuration's number of layers."""
    depth = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    if not lists:
        what = f"found no list of {depth} decoder blocks in {type(model).__name__}"
        raise TsaeError(what, where=model.config._name_or_path, fix="Use a decoder-only Hugging Face causal LM.")
    return lists[0]


class PastLastSite(Exception):
    """Raised inside a forward pass once all sites have been read, to skip the layers above."""


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
            attention_mask: (B, T) 1 for real tokens. The model gets padding on the right, where no token reads it.
            stop_early: skip the layers above the last site.

        Returns:
            for every site (B, T, d_model) in the model's precision; entries at padding mean nothing.
        """
        input_ids, attention_mask, back = _right_padded(input_ids, attention_mask)
        input_ids, attention_mask = input_ids.to(self.device), attention_mask.to(self.device)
        found: dict[str, torch.Tensor] = {}

        def keep(name: str, hidden: torch.Tensor) -> None:
            found[name] = hidden.detach().clone()
            if stop_early and len(found) == len({site.name for site in self.sites}):
                raise PastLastSite

        handles = [attach(self.blocks, site, partial(keep, site.name)) for site in self.sites]
        with hooked(*handles), suppress(PastLastSite):
            run_body(self.model, input_ids, attention_mask)
        if unread := {site.name for site in self.sites} - found.keys():
            raise TsaeError(f"the hooks never fired at {', '.join(sorted(unread))}", where=type(self.model).__name__)
        return {name: back(hidden) for name, hidden in found.items()}

    def read_and_predict(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], Predictions]:
        """As `read`, but through all layers, and with what the model predicts of the batch."""
        input_ids, attention_mask, back = _right_padded(input_ids, attention_mask)
        with body_output(self.model) as outputs:
            found = self.read(input_ids, attention_mask, stop_early=False)
        predicted = predictions(self.model, outputs[-1], input_ids, attention_mask)
        return {name: back(hidden) for name, hidden in found.items()}, Predictions(*map(back, predicted))


def run_body(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
    """Run a model on a padded batch (B, T) for its hooks: the head gives the logits of one position."""
    options = {"attention_mask": attention_mask, "position_ids": positions(attention_mask)}
    model(input_ids=input_ids, **options, use_cache=False, logits_to_keep=1)


@contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    """Take hooks off again when the block ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attach(blocks: torch.nn.ModuleList, site: Site, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Have every forward pass give the residual stream (B, T, d_model) at a site to `change`, and replace it.

    Where `change` returns None, the stream stays as it is. The result has `remove`.
    """

    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        new = change(output[0] if isinstance(output, tuple) else output)
        return (new, *output[1:]) if isinstance(output, tuple) and new is not None else new

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new = change(args[0] if args else kwargs["hidden_states"])
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    block = blocks[site.layer]
    if site.point == "post":
        return block.register_forward_hook(after)
    return block.register_forward_pre_hook(before, with_kwargs=True)


@contextmanager
def rewritten(model: PreTrainedModel, site: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While it is open, replace the residual stream (B, T, d_model) at a site by `change` of it.

    Raises:
        TsaeError: where the site does not exist.
    """
    blocks = decoder_blocks(model)
    (place,) = check_sites([site], len(blocks), str(model.config._name_or_path))
    with hooked(attach(blocks, place, change)):
        yield


def during_generation(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], prompt: torch.Tensor, *, generated: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a change for `rewritten` around one call of generate, with or without a cache of keys and values.

    Args:
        change: (hidden (B, T, d_model), where (B, T) bool) -> hidden.
        prompt: (B, width) bool, which positions of the padded prompts change.
        generated: whether the positions of generated tokens change.
    """
    seen = 0

    def at(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        n = hidden.shape[1]
        # With a cache, every pass after the prompt's has one token; without one, it starts again from the first.
        if n != (seen + 1 if seen else prompt.shape[1]) and not (seen and n == 1):
            raise RuntimeError(f"a pass over {n} tokens after {seen} is neither the prompt's nor the next token's")
        start = seen if seen and n == 1 else 0
        seen = start + n
        where = torch.full((len(hidden), seen), generated, device=hidden.device)
        where[:, : prompt.shape[1]] = prompt.to(hidden.device)
        return change(hidden, where[:, start:])

    return at


def _right_padded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Ids and mask (B, T) with all padding on the right, and what moves values (B, T, …) of them back.

    Recurrent models read what stands before a text, and some count positions from there.
    """
    order = attention_mask.bool().int().argsort(dim=1, descending=True, stable=True)
    if bool((order.diff(dim=1) > 0).all()):
        return input_ids, attention_mask, lambda values: values
    place, row = order.argsort(dim=1), torch.arange(len(order), device=order.device)[:, None]
    ids = input_ids.gather(1, order.to(input_ids.device))
    return ids, attention_mask.gather(1, order), lambda v: v[row.to(v.device), place.to(v.device)]


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) position of each real token among the real tokens of its row; 0 at padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


_CHUNK_LOGITS = 1 << 25
"""Logits computed at once: 128 MiB in float32, of which a few copies live at a time."""


class Predictions(NamedTuple):
    """Values of every token, given the tokens before it, in nats; NaN at the first token of a text and at padding."""

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
    with hooked(_body(model).register_forward_hook(lambda _m, _i, output: kept.append(output))):
        yield kept


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


def spread(model: PreTrainedModel) -> None:
    """Spread a model from the CPU's memory evenly over all GPUs; what does not fit there stays on the CPU.

    Decoder blocks stay whole. Every block runs on the GPU that holds it; blocks on the CPU move to a GPU while they
    run. Without GPUs the model stays where it is.

    Raises:
        TsaeError: where it does not fit into the memory of all devices together.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = sorted(getattr(model, "_no_split_modules", None) or ())
    memory = get_balanced_memory(model, dtype=model.dtype, no_split_module_classes=whole)
    places = infer_auto_device_map(model, max_memory=memory, dtype=model.dtype, no_split_module_classes=whole)
    if "disk" in places.values():
        what = "does not fit into the memory of all devices together"
        fix = "Use a smaller precision (--model-dtype bfloat16) or a machine with more memory."
        raise TsaeError(what, where=model.config._name_or_path, fix=fix)
    # Hooks even on one device, so that inputs move the same way everywhere.
    dispatch_model(model, device_map=places, force_hooks=True)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embedding's, or the one where accelerate's hook runs it."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    while hook is not None:
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
        hook = next(iter(getattr(hook, "hooks", ())), None)
    return next(embedding.parameters()).device


def site_names(site: str, model: PreTrainedModel | None = None) -> dict[str, str]:
    """The names of a site, by tool.

    - transformer_lens: as here, such as blocks.14.hook_resid_post; sae_lens uses it too;
    - circuit_tracer: the hook within a block, hook_resid_post, for ``feature_input_hook``; the block is its layer;
    - nnsight: the expression within a trace, ``model.model.layers[14].output``, where blocks return a tensor;
    - delphi: the hook point below the base model whose output it is, layers.14; sparsify uses it too;
    - llama.cpp: the tensor of a control vector, direction.14.

    A tool that has no name for the site is left out: delphi and llama.cpp do not know what enters the first block, and
    llama.cpp cannot steer what leaves it.

    Args:
        site: TransformerLens name.
        model: whose blocks stand elsewhere than in ``model.layers``.

    Raises:
        TsaeError: for any other name.
    """
    place, blocks, below = Site.parse(site), "model.layers", "layers"
    if model is not None:
        found = decoder_blocks(model)
        blocks = next(name for name, module in model.named_modules() if module is found)
        below = blocks.removeprefix(f"{model.base_model_prefix}.")
    after = place.point == "post"
    output_of = place.layer if after else place.layer - 1
    names = {
        "transformer_lens": site,
        "circuit_tracer": site.split(".", 2)[2],
        "nnsight": f"model.{blocks}[{place.layer}].{'output' if after else 'input'}",
    }
    if output_of >= 0:
        names["delphi"] = f"{below}.{output_of}"
    if output_of >= 1:
        names["llama.cpp"] = f"direction.{output_of}"
    return names
