"""Selection and decoding of active codes, with sparse gradients.

Of n · d_sae pre-activations BatchTopK keeps k · n (0.4 % at k 32 of 8,192). Only encoding needs the dense product.
Decoding, both weight gradients and the temporal terms cost in proportion to the codes that are kept. The values equal
those of the dense formulas of `tsae.sae.training.loss`; tests compare them.

On a GPU the products with sparse codes are kernels of our own (`tsae.sae.training.kernels`), where Triton is installed;
torch's builds for GPUs bring it along on Linux.

Where a process holds a share of a batch (`tsae.base.distributed`), the codes are selected among those of all processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, NamedTuple

import numpy as np
import torch

from tsae.base.beside import to_cpu
from tsae.base.distributed import ALONE, Processes
from tsae.base.memory import Reused
from tsae.sae.config import Precision

# torch warns once per process that CSR tensors are in beta; here the warning does not interrupt a progress bar.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)

_SAMPLE_STRIDES = (31, 3)  # Prime, so that a strided sample of tokens and latents follows neither windows nor groups.
_MARGINS = (1.4, 2.2)
_ROOM = 3  # times the codes that are wanted, which a GPU has room for; a sample's bound lets twice as many through
_AT_ONCE = 1 << 22  # pre-activations computed at once on a CPU: what fits into its cache is not written to memory

_COPIED = 512  # latents whose weights are transposed at once

_WITH_KERNELS = ("cuda",) if find_spec("triton") else ()
"""Devices that run the kernels of `tsae.sae.training.kernels`."""

_BUFFERS = Reused(12)  # gradients and similarities of a step, which the next step's have the sizes of


class Codes(NamedTuple):
    """Sparse codes of a batch, sorted by token."""

    values: torch.Tensor
    """(nnz,) positive; carries the gradient."""
    token: torch.Tensor
    """(nnz,) int64, ascending."""
    latent: torch.Tensor
    """(nnz,) int64."""
    n_tokens: int
    n_first: int
    """How many of the codes are those of x, whose tokens are the first."""
    order: torch.Tensor
    """(nnz,) that sorts the codes by latent; empty where kernels do not run."""
    ends: torch.Tensor
    """(d_sae + 1,) where the codes of a latent then begin and end; empty where kernels do not run."""

    def columns(self, start: int, stop: int) -> Codes:
        """The codes of the latents start … stop − 1, renumbered from 0."""
        keep = ((self.latent >= start) & (self.latent < stop)).nonzero()[:, 0]
        values = self.values.index_select(0, keep)
        none = self.order[:0]  # the order was that of all
        token, latent = self.token[keep], self.latent[keep] - start
        return self._replace(values=values, token=token, latent=latent, order=none, ends=none)


def matmul(a: torch.Tensor, b: torch.Tensor, precision: Precision) -> torch.Tensor:
    """a @ b in float32; with bfloat16, factors are rounded to it, products and sums are not."""
    if precision == "float32":
        return a @ b
    return _RoundedProduct.apply(a, b)


def encode_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    centre: torch.Tensor,
    k: int,
    precision: Precision = "float32",
    processes: Processes = ALONE,
    others: torch.Tensor | None = None,
) -> Codes:
    """BatchTopK(ReLU((x − centre) W + b)) as sparse codes.

    Args:
        x: (n, d_model); gets no gradient.
        weight: (d_model, d_sae).
        bias: (d_sae,).
        centre: (d_model,).
        k: codes kept per token, on average over the tokens of all processes.
        precision: of the products with x.
        processes: that hold the batch.
        others: (m, d_model) further tokens, which have k codes a token of their own and are numbered after x.
    """
    parts = [x] if others is None else [x, others]
    of = (weight, bias, centre, k, precision, processes)
    if kernels_for(x) is not None:
        *found, n_first = _EncodeByKernels.apply(rounded(weight, precision), *of, *parts)
        values, token, latent, order, ends = found
        return Codes(values, token, latent, sum(map(len, parts)), n_first, order, ends)
    found = [_EncodeTopK.apply(part, *of) for part in parts]
    n_first, none = len(found[0][0]), x.new_empty(0, dtype=torch.long)
    values, token, latent = found[0]
    if others is not None:
        values, token, latent = map(torch.cat, zip(*found, strict=True))
        token[n_first:] += len(x)
    return Codes(values, token, latent, sum(map(len, parts)), n_first, none, none)


def rounded(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The weight in a precision. In bfloat16 its copy is kept with it, and made again once the weight has changed.

    `tsae.sae.training.trainer.update` writes both where kernels run.
    """
    if precision == "float32":
        return weight.detach()
    kept = rounded_copy(weight)
    if kept is None:
        kept = weight.detach().bfloat16()
        weight._rounded = (weight._version, kept)  # type: ignore[attr-defined]
    return kept


def rounded_copy(weight: torch.Tensor) -> torch.Tensor | None:
    """What `rounded` keeps of the weight as it is now, if anything."""
    version, kept = getattr(weight, "_rounded", (None, None))
    return kept if version == weight._version else None


def reconstruct(
    x: torch.Tensor,
    codes: Codes,
    rows: torch.Tensor,
    bias: torch.Tensor,
    groups: Sequence[tuple[int, int]],
    weights: Sequence[float],
    n_values: int,
    precision: Precision = "float32",
    *,
    keep: bool = True,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]:
    """Squared errors of x − bias − Σ value · row, after each group of latents with those before it.

    Args:
        x: (n, d_model); gets no gradient.
        codes: of all latents; those of x count.
        rows: (n_latents, d_model).
        bias: (d_model,).
        groups: (first latent, latent after the last) of each, one after another and together all.
        weights: of each group's error.
        n_values: that squares are a mean over; of several processes, those of all.
        precision: in which kernels read the rows.
        keep: whether the residual is wanted.

    Returns:
        the weighted sum of the errors; each group's error; and the last residual (n, d_model), which has no gradient.
        Where kernels run, the errors of groups have none, either.
    """
    # Ascending: within a token, codes are sorted by latent.
    starts = _constant(tuple(start for start, _ in groups[1:]), x.device)
    place = codes.token * len(groups) + torch.bucketize(codes.latent, starts, right=True)
    if kernels_for(x) is not None:
        found: tuple[torch.Tensor, ...] = _Reconstruct.apply(
            codes.values, rows, bias, x, place, codes, rounded(rows, precision), tuple(weights), n_values, keep
        )
        return found[0], found[1].unbind(0), found[2]
    residual, errors, own = x - bias, [], slice(0, codes.n_first)
    for of_group in _Decode.apply(codes.values[own], rows, place[own], codes.latent[own], (len(x), len(groups))):
        residual = residual - of_group
        errors.append(residual.pow(2).sum() / n_values)
    total = torch.stack([weight * error for weight, error in zip(weights, errors, strict=True)]).sum()
    return total, errors, residual.detach()


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """On the device since the first step: to bring numbers to a GPU is to wait for it."""
    return torch.tensor(values, device=device)


def kernels_for(tensor: torch.Tensor) -> Any:
    """The kernels for the tensor's device; None where torch's own sparse products take their place."""
    return _kernels(tensor.device) if tensor.device.type in _WITH_KERNELS else None


@cache
def _kernels(device: torch.device) -> Any:
    """Not imported at the top, as they need Triton. Triton needs a C compiler, which many containers lack."""
    try:
        kernels = import_module("tsae.sae.training.kernels")
        kernels.above(torch.ones(1, 32, device=device), torch.zeros(32, device=device))
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton cannot compile here, so that training steps are slower: {why}", stacklevel=2)
        return None
    return kernels


def offsets(row: torch.Tensor, n_rows: int) -> torch.Tensor:
    """(n_rows + 1,) where each row's entries begin and end, from ascending rows."""
    # Not by bincount, which on a GPU waits for its largest entry.
    return torch.searchsorted(row, torch.arange(n_rows + 1, device=row.device))


def csr(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A CSR matrix from entries sorted by row."""
    return torch.sparse_csr_tensor(offsets(row, shape[0]), column, values, size=shape, check_invariants=False)


def empty(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """(rows, width) of arbitrary values. On a CPU it is memory that was used before: fresh memory costs time."""
    if like.device.type == "cpu" and like.dtype == torch.float32 and rows * width:
        return torch.from_numpy(_BUFFERS.empty(rows, width, np.float32))
    return torch.empty(rows, width, dtype=like.dtype, device=like.device)


def product(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """CSR @ dense."""
    return torch.mm(sparse, dense, out=empty(sparse.shape[0], dense.shape[1], dense))


def transposed(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The transpose, as CSR, of the matrix with the given entries."""
    order = _order(column, shape[1])
    return csr(column[order], row[order], values[order], (shape[1], shape[0]))


def entries_of(token: torch.Tensor, n_tokens: int, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries, place in `wanted` of each) of the codes of some tokens, one token after another.

    Args:
        token: (nnz,) of every code, ascending.
        n_tokens: in all.
        wanted: (n,) tokens.
    """
    ends = offsets(token, n_tokens)
    n_each = ends.diff()[wanted]
    place = torch.repeat_interleave(torch.arange(len(wanted), device=token.device), n_each)
    within = torch.arange(len(place), device=token.device) - (n_each.cumsum(0) - n_each)[place]
    return ends[wanted][place] + within, place


def sampled(row: torch.Tensor, column: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(nnz,) the entries (row, column) of a @ b.T, from ascending rows; nothing else of the product is computed."""
    pattern = csr(row, column, torch.zeros(len(row), dtype=a.dtype, device=a.device), (len(a), len(b)))
    return torch.sparse.sampled_addmm(pattern, a, b.T, beta=0.0).values()


def _above(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Flat indices of the entries above a bound: one, or one for every column."""
    if values.device.type == "cpu":  # numpy takes 40 % of torch's time
        return torch.from_numpy(np.flatnonzero(values.numpy() > bound.numpy()))
    if (kernels := kernels_for(values)) is not None:
        found: torch.Tensor = kernels.above(values, bound.expand(values.shape[1]).contiguous())[0]
        return found
    return (values > bound).view(-1).nonzero()[:, 0]


def _nth_largest(values: torch.Tensor, n: int) -> torch.Tensor:
    """Of n ≥ 1."""
    if values.device.type == "cpu":  # numpy takes an eighth of torch's time
        return torch.from_numpy(np.partition(values.numpy(), -n))[-n]
    return values.topk(n, sorted=False).values.min()  # kthvalue would keep one multiprocessor busy, and no other


def _order(column: torch.Tensor, n: int) -> torch.Tensor:
    """Indices that sort columns below n, equal ones in their order."""
    if column.device.type == "cpu" and n <= 1 << 16:  # numpy sorts 16 bits by radix, ten times as fast
        return torch.from_numpy(column.numpy().astype(np.uint16).argsort(kind="stable"))
    return column.int().argsort(stable=True)  # half the bytes, half the time


class _Preactivations:
    """ReLU((x − centre) W + b), computed in parts of the tokens, as often as they are read."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, centre: torch.Tensor, precision: Precision
    ) -> None:
        self.x, self.weight, self.bias, self.precision = x, weight, bias, precision
        if precision == "bfloat16":
            self.x, self.weight = (x - centre).bfloat16(), weight.bfloat16()
        else:
            self.bias = bias - centre @ weight
        at_once = max(64, _AT_ONCE // weight.shape[1]) if x.device.type == "cpu" else len(x)
        self.parts = [slice(low, low + at_once) for low in range(0, len(x), max(1, at_once))]
        self._held: torch.Tensor | None = None

    def of(self, tokens: slice) -> torch.Tensor:
        """(n, d_sae), overwritten by the next call; in bfloat16 without the bias."""
        x = self.x[tokens]
        if self.precision == "bfloat16":
            return _multiplied(x, self.weight)
        if self._held is None or len(self._held) < len(x):
            self._held = torch.empty(len(x), self.weight.shape[1], dtype=x.dtype, device=x.device)
        return torch.addmm(self.bias, x, self.weight, out=self._held[: len(x)])

    @cached_property
    def sample(self) -> torch.Tensor:
        """Of some tokens, at some latents."""
        found = self.of(slice(None, None, max(1, min(_SAMPLE_STRIDES[0], len(self.x) // 64))))
        if self.precision == "bfloat16":
            found += self.bias
        return found.view(-1)[:: _SAMPLE_STRIDES[1]].contiguous()

    def bound(self, n: int, margin: float) -> torch.Tensor:
        """About margin · n entries lie above it; (), or ∞ where there are no tokens."""
        share = n * len(self.sample) / max(1, len(self.x) * len(self.bias))
        wanted = min(len(self.sample), int(margin * share) + 64)
        return _nth_largest(self.sample, wanted) if wanted else self.bias.new_tensor(torch.inf)

    def above(self, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ascending flat indices, values) of the entries above a bound that is not negative."""
        indices, values = [], []
        rounded, width, least = self.precision == "bfloat16", self.weight.shape[1], self.least(bound)
        for part in self.parts:
            products = self.of(part)
            found = _above(products, least)
            large = products.view(-1)[found]
            if rounded:
                large += self.bias[found % width]
                if bool((large <= bound).any()):
                    kept = (large > bound).nonzero()[:, 0]
                    found, large = found[kept], large[kept]
            values.append(large)
            indices.append(found + part.start * width)
        if not indices:
            return torch.zeros(0, dtype=torch.long, device=self.x.device), self.x.new_zeros(0)
        return torch.cat(indices), torch.cat(values)

    def least(self, bound: torch.Tensor) -> torch.Tensor:
        """What is above the bound is above this in `of`: one number, or one a latent.

        In bfloat16 the bias is not part of the product. Rounded down, a latent's own bound leaves none out.
        """
        if self.precision == "float32":
            return bound
        return torch.nextafter(bound - self.bias, _constant((-torch.inf,), bound.device))


def _largest(pre: _Preactivations, n: int, processes: Processes) -> tuple[torch.Tensor, torch.Tensor]:
    """(ascending flat indices, values) of the n largest positive entries; fewer if there are fewer.

    Some tokens bound the n-th largest from below, so that only the entries above the bound are kept. Of several
    processes, the largest of all their entries are found, as many as their n add up to.
    """
    of_all = sum(processes.counts(n))
    for margin in (*_MARGINS, None):
        # Above the lowest bound of all processes lie at least as many as each has above its own.
        bound = processes.least(pre.bias.new_zeros(()) if margin is None else pre.bound(n, margin).clamp_min(0))
        found, values = pre.above(bound)
        n_found = sum(processes.counts(len(found)))
        if n_found >= of_all:
            break
    if n_found <= of_all:
        return found, values
    parts = processes.gather(values)
    every = torch.cat(parts)
    limit = _nth_largest(every, of_all)
    # Of equal values at the limit, as many as are still wanted are kept, from the first process on.
    left = of_all - (every > limit).sum() - sum((part == limit).sum() for part in parts[: processes.rank])
    tied = values == limit
    kept = ((values > limit) | (tied & (tied.cumsum(0) <= left))).nonzero()[:, 0]
    return found[kept], values[kept]


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float32 of the factors rounded to bfloat16."""
    a, b = a.bfloat16(), b.bfloat16()
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    # torch has no such product on a CPU. The same numbers: products of two bfloat16 numbers are exact in float32.
    return a.float() @ b.float()


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _multiplied(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        by_a = _multiplied(gradients[0], b.T) if ctx.needs_input_grad[0] else None
        return by_a, _multiplied(a.T, gradients[0]) if ctx.needs_input_grad[1] else None


class _EncodeTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        centre: torch.Tensor,
        k: int,
        precision: Precision,
        processes: Processes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        d_sae = weight.shape[1]
        index, values = _largest(_Preactivations(x, weight, bias, centre, precision), k * len(x), processes)
        token = index // d_sae
        latent = index - token * d_sae
        ctx.save_for_backward(x, weight, centre, token, latent)
        ctx.mark_non_differentiable(token, latent)
        return values, token, latent

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, centre, token, latent = ctx.saved_tensors
        gradient, shape = gradients[0], (len(x), weight.shape[1])
        # Survivors are positive, so that ReLU passes their gradient; the others get none.
        by_bias = torch.zeros(shape[1], dtype=x.dtype, device=x.device).index_add_(0, latent, gradient)
        of_latents = product(transposed(token, latent, gradient, shape), x - centre)
        by_weight = empty(x.shape[1], shape[1], x)
        for low in range(0, shape[1], _COPIED):  # as autograd would, but in parts that the cache holds
            by_weight[:, low : low + _COPIED] = of_latents[low : low + _COPIED].T
        return None, by_weight, by_bias, -(weight @ by_bias), None, None, None


class _EncodeByKernels(torch.autograd.Function):
    """`encode_topk` of several parts by kernels, with one gradient for all."""

    @staticmethod
    def forward(
        ctx: Any,
        read: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        centre: torch.Tensor,
        k: int,
        precision: Precision,
        processes: Processes,
        *parts: torch.Tensor,
    ) -> tuple[Any, ...]:
        d_sae = weight.shape[1]
        every = [_Preactivations(part, read, bias, centre, precision) for part in parts]

        def ordered(values: torch.Tensor, token: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
            order = _order(latent, d_sae)
            return values, token, latent, order, offsets(latent[order], d_sae)

        sure, n_first = None, k * len(parts[0])
        if processes.size == 1:
            *found, sure = _as_many_as_wanted(every, k)
            codes = ordered(*found)  # before the CPU waits
        if sure is None or not sure():
            index, values = zip(*(_largest(pre, k * len(pre.x), processes) for pre in every), strict=True)
            n_first, firsts = len(index[0]), range(0, 2 * len(parts[0]), max(1, len(parts[0])))
            token = torch.cat([each // d_sae + first for each, first in zip(index, firsts, strict=False)])
            codes = ordered(torch.cat(values), token, torch.cat([each % d_sae for each in index]))
        _, token, latent, order, ends = codes
        source = torch.cat([pre.x for pre in every]) if len(every) > 1 else every[0].x
        ctx.save_for_backward(source if precision == "bfloat16" else source - centre, weight, token, order, ends)
        ctx.mark_non_differentiable(token, latent, order, ends)
        return *codes, n_first

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, token, order, ends = ctx.saved_tensors
        kernels = kernels_for(source)
        by_weight, by_bias = kernels.by_latent(gradients[0][order], token[order], ends, source, across=True)
        return None, by_weight, by_bias, -(weight @ by_bias), *[None] * (len(ctx.needs_input_grad) - 4)


def _as_many_as_wanted(every: Sequence[_Preactivations], k: int) -> tuple[Any, ...]:
    """Values, tokens and latents as `_largest` finds them in every part, and a call that says whether they are.

    The CPU does not wait. The call says no where a part has fewer positive entries than wanted, or where the bound of
    its sample let too many or too few through.
    """
    kernels, n_all = kernels_for(every[0].x), k * sum(len(pre.x) for pre in every)
    values, token, latent = every[0].bias.new_zeros(n_all), *(every[0].bias.new_zeros(2, n_all, dtype=torch.long))
    sure, first = [], 0
    for pre in every:
        if not (n := k * len(pre.x)):
            continue
        own = slice(k * first, k * first + n)
        bound = pre.bound(n, _MARGINS[0]).clamp_min(0)
        products, rounded = pre.of(slice(0, len(pre.x))), pre.precision == "bfloat16"
        most = min(products.numel(), _ROOM * n)
        least = pre.least(bound).expand(products.shape[1]).contiguous()
        found, large, n_found = kernels.above(products, least, pre.bias if rounded else None, most)
        limit = large.topk(n, sorted=False).values.min()
        kernels.largest(
            large, found, limit.clamp_min(0), (values[own], token[own], latent[own]), products.shape[1], first
        )
        sure.append((n_found <= most) & (limit > bound))
        first += len(pre.x)
    seen = to_cpu(torch.cat(sure).all())
    return values, token, latent, lambda: bool(seen())


class _Decode(torch.autograd.Function):
    """Of every group (n, d_model): one product, in which a token's codes in each group are a row of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        rows: torch.Tensor,
        place: torch.Tensor,
        latent: torch.Tensor,
        shape: tuple[int, int],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(values, rows, place, latent)
        n = shape[0] * shape[1]
        return product(csr(place, latent, values, (n, len(rows))), rows).unflatten(0, shape).unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, rows, place, latent = ctx.saved_tensors
        gradient = torch.stack(gradients, dim=1).flatten(0, 1)
        by_row = product(transposed(place, latent, values, (len(gradient), len(rows))), gradient)
        return sampled(place, latent, gradient, rows), by_row, None, None, None


class _Reconstruct(torch.autograd.Function):
    """`reconstruct` by kernels, the gradient with it: the rows that give a token's residual are read again at once."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor,
        x: torch.Tensor,
        place: torch.Tensor,
        codes: Codes,
        read: torch.Tensor,
        weights: tuple[float, ...],
        n_values: int,
        keep: bool,
    ) -> tuple[torch.Tensor, ...]:
        weight = _constant(weights, x.device) / n_values
        ends = offsets(place, len(x) * len(weights))
        errors, by_value, gradient, residual = kernels_for(x).reconstruct(
            x, bias, read, values, codes.latent, ends, weight, keep, codes.n_tokens
        )
        ctx.save_for_backward(values, place, by_value, gradient, codes.order, codes.ends)
        ctx.n_groups = len(weights)
        total = errors.sum(0)
        errors = total / n_values
        ctx.mark_non_differentiable(errors, residual)
        return total @ weight, errors, residual

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, place, by_value, gradient, order, ends = ctx.saved_tensors
        scale = gradients[0]
        by_row, _ = kernels_for(values).by_latent((values * scale)[order], place[order], ends, gradient)
        by_bias = gradient[:: ctx.n_groups].sum(0, dtype=torch.float32) * scale  # the first group's holds all
        return by_value * scale, by_row, by_bias, *[None] * 7
