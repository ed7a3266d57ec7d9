"""A dictionary divided among processes: each holds every n-th latent, with its gradient and Adam's moments.

Every process reads the whole batch, and computes its own latents' pre-activations. What the loss needs of all latents
is sent, and is small beside them:

1. BatchTopK: the candidates for the k · n_tokens largest pre-activations of all processes (as where processes divide a
   batch, `tsae.sae.fitting.sparse_codes`).
2. Reconstructions: each process decodes its own codes, and the sums are added up, n_tokens · d_model values a group.
3. The temporal term: the active codes of the high-level latents.
4. AuxK: for every token, each process's d_model / 2 strongest dead latents.

Then every process knows the loss and its derivative by what was added up, so that the gradients of its own latents need
no further word. The decoder bias is held by all: the parts of its gradient are added up, and so are the squares of the
gradient's norm. Normalising decoder rows is each process's own work.

Latent i is held by process i modulo n, so that each has its share of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tsae.base.distributed import Processes
from tsae.sae.config import SAEConfig
from tsae.sae.fitting.sparse_codes import Codes
from tsae.sae.model import TemporalSAE

_AT_ONCE = 1024
"""Latents that are drawn or sent at once."""

AXES = {"W_enc": 1, "b_enc": 0, "W_dec": 0}
"""By parameter, the axis of the latents; b_dec has none."""


class DictionaryShard(TemporalSAE):
    """The latents that one process holds. Its config is that of the whole.

    Args:
        d_model: width of the residual stream.
        config: of the whole SAE.
        among: the processes that hold it.
        site: where its activations come from.
    """

    def __init__(self, d_model: int, config: SAEConfig, among: Processes, *, site: str = "") -> None:
        with torch.device("meta"):
            super().__init__(d_model, config, site=site)
        self.among, n = among, len(range(among.rank, config.d_sae, among.size))
        self.W_enc = torch.nn.Parameter(torch.zeros(d_model, n))
        self.b_enc = torch.nn.Parameter(torch.zeros(n))
        self.W_dec = torch.nn.Parameter(torch.zeros(n, d_model))
        self.b_dec = torch.nn.Parameter(torch.zeros(d_model))
        self.threshold = torch.zeros(())

    @torch.no_grad()
    def initialize(self, bias: torch.Tensor, generator: torch.Generator) -> None:
        """As a whole SAE, of which a part is drawn at a time."""
        d_sae, place = self.config.d_sae, 0
        for low in range(0, d_sae, _AT_ONCE):
            rows = torch.randn(min(_AT_ONCE, d_sae - low), self.d_model, generator=generator)
            rows = rows[(self.among.rank - low) % self.among.size :: self.among.size]
            self.W_dec[place : place + len(rows)] = rows / rows.norm(dim=1, keepdim=True)
            place += len(rows)
        self.W_enc.copy_(self.W_dec.T)
        self.b_enc.zero_()
        self.b_dec.copy_(bias)

    @torch.no_grad()
    def take(self, whole: TemporalSAE) -> DictionaryShard:
        """Copy this process's latents from a whole SAE."""
        for name, mine in self.named_parameters():
            axis = AXES.get(name)
            theirs = whole.get_parameter(name)
            mine.copy_(theirs if axis is None else theirs.index_select(axis, _held(len(whole.b_enc), self.among)))
        return self

    @torch.no_grad()
    def whole(self) -> TemporalSAE:
        """The whole SAE, on the CPU of every process; no optimizer's state is sent."""
        found = TemporalSAE(self.d_model, self.config, site=self.site, training=self.training_info)
        for name, mine in self.named_parameters():
            target, axis = found.get_parameter(name), AXES.get(name)
            if axis is None:
                target.copy_(mine)
                continue
            by_latent, place = mine.movedim(axis, 0), target.movedim(axis, 0)
            longest = -(-self.config.d_sae // self.among.size)
            for low in range(0, longest, _AT_ONCE):
                for rank, part in enumerate(self.among.gather(by_latent[low : low + _AT_ONCE].contiguous())):
                    first = rank + low * self.among.size
                    place[first : first + len(part) * self.among.size : self.among.size] = part.cpu()
        found.threshold.copy_(self.threshold)
        return found


def held_before(latent: int, among: Processes) -> int:
    """How many of the latents before this one the process holds."""
    return len(range(among.rank, latent, among.size))


def added(part: torch.Tensor, among: Processes) -> torch.Tensor:
    """Sum over processes that all go on with the same sum, so that its gradient is that of every part."""
    if among.size == 1:
        return part
    found: torch.Tensor = _Added.apply(part, among)
    return found


def shared(parameter: torch.Tensor, among: Processes) -> torch.Tensor:
    """A parameter that all processes hold and use alike: each takes an n-th of its gradient, so that they add up."""
    if among.size == 1:
        return parameter
    found: torch.Tensor = _Shared.apply(parameter, among.size)
    return found


def together(codes: Codes, among: Processes) -> Codes:
    """All processes' codes of the same tokens, sorted by token and latent; latents are numbered as in the whole."""
    if among.size == 1:
        return codes
    values, token, latent = _Together.apply(codes.values, codes.token, codes.latent, among)
    return Codes(values, token, latent, codes.n_tokens)


@torch.no_grad()
def strongest(values: torch.Tensor, k: int, among: Processes) -> torch.Tensor:
    """(n,) of every token, the k-th largest of all processes' values; −∞ where there are fewer.

    Args:
        values: (n, m) this process's largest.
        k: how many are wanted.
        among: the processes, each with its own m.
    """
    # By token last: processes' parts are sent by rows, and may differ in their number.
    every = torch.cat(among.gather(values.T.contiguous())).T
    if every.shape[1] < k:
        return values.new_full((len(values),), -torch.inf)
    return every.topk(k, dim=1, sorted=False).values.amin(dim=1)


@torch.no_grad()
def clip(sae: TemporalSAE, among: Processes, most: float = 1.0) -> None:
    """Scale the gradient down until its norm, over all processes, is at most this."""
    if among.size == 1:
        torch.nn.utils.clip_grad_norm_(sae.parameters(), most)
        return
    gradients = {name: parameter.grad for name, parameter in sae.named_parameters() if parameter.grad is not None}
    own = torch.stack([gradient.pow(2).sum() for name, gradient in gradients.items() if name in AXES])
    square = among.sum(own.sum()) + gradients["b_dec"].pow(2).sum()
    scale = (most / (square.sqrt() + 1e-6)).clamp_max(1.0)  # as torch does
    for gradient in gradients.values():
        gradient.mul_(scale)


def load_latents(files: Sequence[Path], among: Processes) -> dict[str, torch.Tensor]:
    """This process's part of a training's state that any number of processes have written.

    Args:
        files: of all of them, in the order of ranks.
        among: the processes that go on.
    """
    found = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        for name in opened[0].keys():  # noqa: SIM118, which is no dict's
            axis = _axis(name)
            if axis is None:
                found[name] = opened[0].get_tensor(name)
                continue
            d_sae = sum(file.get_slice(name).get_shape()[axis] for file in opened)
            mine, n = _held(d_sae, among), len(opened)
            parts = []
            for rank, file in enumerate(opened):  # one whole part in memory at a time
                parts.append(file.get_tensor(name).index_select(axis, mine[mine % n == rank] // n))
            order = torch.cat([(mine % n == rank).nonzero()[:, 0] for rank in range(n)]).argsort()
            found[name] = torch.cat(parts, dim=axis).index_select(axis, order)
    return found


def _axis(name: str) -> int | None:
    """Of the latents, in a tensor of `Trainer.state`."""
    if name == "idle_tokens":
        return 0
    kind, _, rest = name.partition(".")
    parameter, _, which = rest.partition(".")
    return None if kind not in ("sae", "adam") or which == "step" else AXES.get(parameter)


def _held(d_sae: int, among: Processes) -> torch.Tensor:
    return torch.arange(among.rank, d_sae, among.size)


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, among: Processes) -> torch.Tensor:
        return among.sum(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] / ctx.size, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, token: torch.Tensor, latent: torch.Tensor, among: Processes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = among.gather(torch.stack([token, latent * among.size + among.rank], dim=1))
        tokens, latents = torch.cat(parts).unbind(1)
        order = (tokens * (latents.max() + 1 if len(latents) else 1) + latents).argsort()
        ctx.save_for_backward(order)
        first = sum(map(len, parts[: among.rank]))
        ctx.mine = slice(first, first + len(values))
        tokens, latents = tokens[order], latents[order]
        ctx.mark_non_differentiable(tokens, latents)
        return torch.cat(among.gather(values))[order], tokens, latents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        found = torch.empty_like(gradients[0])
        found[order] = gradients[0]
        return found[ctx.mine], None, None, None
