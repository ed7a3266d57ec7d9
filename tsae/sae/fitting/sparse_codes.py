"""Selection and decoding of active codes, with sparse gradients.

Of n · d_sae pre-activations BatchTopK keeps k · n (0.4 % at k 32 of 8,192). Only encoding needs the dense product.
Decoding, both weight gradients and the temporal terms (`tsae.sae.fitting.temporal_term`) cost in proportion to the
codes that are kept. The values equal those of the dense formulas of `tsae.sae.fitting.loss`; tests compare them.

Where a process holds a share of a batch (`tsae.base.distributed`), the codes are selected in the whole batch.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from tsae.base.distributed import ALONE, Processes
from tsae.sae.config import Precision

# torch says once per process that CSR tensors are in beta; said here, it does not interrupt a progress bar later.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)

_SAMPLE_STRIDE = 61  # Prime, so that a strided sample of the pre-activations does not follow the latents.
_MARGIN = 1.1
_CHUNK = 16_384  # active codes whose decoder rows are gathered at once: bounds memory to chunk · d_model

# In bfloat16 a GPU's tensor cores multiply densely, zeros and all, sooner than the rows of active codes are gathered,
# up to about this many latents per active code. Reckoned from an H100's rates (600 Tflop/s, 3 TB/s), not measured.
_DENSE_UP_TO = 1024
_TENSOR_CORES = ("cuda",)


class Codes(NamedTuple):
    """Sparse codes of a batch, sorted by token."""

    values: torch.Tensor
    """(nnz,) positive; carries the gradient."""
    token: torch.Tensor
    """(nnz,) int64, ascending."""
    latent: torch.Tensor
    """(nnz,) int64."""
    n_tokens: int

    def columns(self, start: int, stop: int) -> Codes:
        """The codes of the latents start … stop − 1, renumbered from 0."""
        keep = ((self.latent >= start) & (self.latent < stop)).nonzero()[:, 0]
        values = self.values.index_select(0, keep)
        return Codes(values, self.token[keep], self.latent[keep] - start, self.n_tokens)

    def followed_by(self, other: Codes) -> Codes:
        """These and the codes of further tokens, which are numbered after these."""
        return Codes(
            torch.cat([self.values, other.values]),
            torch.cat([self.token, other.token + self.n_tokens]),
            torch.cat([self.latent, other.latent]),
            self.n_tokens + other.n_tokens,
        )


def matmul(a: torch.Tensor, b: torch.Tensor, precision: Precision) -> torch.Tensor:
    """a @ b in float32; with bfloat16, factors are rounded to it, products and sums are not."""
    if precision == "float32":
        return a @ b
    return _RoundedProduct.apply(a, b)


def encode_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    precision: Precision = "float32",
    processes: Processes = ALONE,
) -> Codes:
    """BatchTopK(ReLU(x W + b)) as sparse codes.

    Args:
        x: (n, d_model); gets no gradient.
        weight: (d_model, d_sae).
        bias: (d_sae,).
        k: codes kept per token, on average over the tokens of all processes.
        precision: of the products with x.
        processes: that hold the batch.
    """
    values, token, latent = _EncodeTopK.apply(x, weight, bias, k, precision, processes)
    return Codes(values, token, latent, len(x))


def decode(codes: Codes, rows: torch.Tensor, precision: Precision = "float32") -> torch.Tensor:
    """(n, d_model): Σ over a token's codes of value · decoder row. rows: (n_latents, d_model)."""
    return _Decode.apply(codes.values, rows, codes.token, codes.latent, codes.n_tokens, precision)


def offsets(row: torch.Tensor, n_rows: int) -> torch.Tensor:
    """(n_rows + 1,) where each row's entries begin and end, from ascending rows."""
    # Not by bincount, which on a GPU waits for its largest entry.
    return torch.searchsorted(row, torch.arange(n_rows + 1, device=row.device))


def csr(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A CSR matrix from entries sorted by row."""
    return torch.sparse_csr_tensor(offsets(row, shape[0]), column, values, size=shape, check_invariants=False)


def transposed(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The transpose, as CSR, of the matrix with the given entries."""
    order = column.argsort(stable=True)
    return csr(column[order], row[order], values[order], (shape[1], shape[0]))


def _largest(pre: torch.Tensor, n: int, processes: Processes) -> torch.Tensor:
    """Ascending flat indices of the n largest positive entries of a non-negative tensor (fewer if there are fewer).

    A strided sample bounds the n-th largest from below, so that only the entries above the bound are sorted. Of several
    processes, the largest of all their entries are found, as many as their n add up to.
    """
    flat = pre.view(-1)
    sample = flat[::_SAMPLE_STRIDE]
    wanted = min(len(sample), int(_MARGIN * n / _SAMPLE_STRIDE) + 64)
    bound = sample.topk(wanted, sorted=False).values.min() if len(sample) else pre.new_tensor(torch.inf)
    found = (flat > bound).nonzero()[:, 0]
    if len(found) < n:
        bound, found = torch.zeros_like(bound), flat.nonzero()[:, 0]
    if processes.size > 1:
        return _largest_of_all(flat, n, bound, processes)
    if len(found) > n:
        found = found[flat[found].topk(n, sorted=False).indices].sort().values
    return found


def _largest_of_all(flat: torch.Tensor, n: int, bound: torch.Tensor, processes: Processes) -> torch.Tensor:
    """This process's part of the largest. At least n of its entries, or all positive ones, lie above its bound."""
    # So above the lowest bound lie at least as many as are wanted in all.
    found = (flat > processes.least(bound)).nonzero()[:, 0]
    mine = flat[found]
    parts, n = processes.gather(mine), sum(processes.counts(n))
    values = torch.cat(parts)
    if len(values) <= n:
        return found
    limit = values.topk(n, sorted=False).values.min()
    # Of equal values at the limit, as many as are still wanted are kept, from the first process on.
    wanted = n - (values > limit).sum() - sum((part == limit).sum() for part in parts[: processes.rank])
    tied = mine == limit
    return found[(mine > limit) | (tied & (tied.cumsum(0) <= wanted))]


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


def _densely(n_active: int, shape: tuple[int, int], device: torch.device, precision: Precision) -> bool:
    """Whether products with codes of this shape are taken as dense ones."""
    fast = precision == "bfloat16" and device.type in _TENSOR_CORES
    return fast and shape[0] * shape[1] <= _DENSE_UP_TO * n_active


def _dense(token: torch.Tensor, latent: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """(n_tokens, n_latents) bfloat16."""
    codes = torch.zeros(shape, dtype=torch.bfloat16, device=values.device)
    codes[token, latent] = values.bfloat16()
    return codes


class _EncodeTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        k: int,
        precision: Precision,
        processes: Processes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if precision == "bfloat16":
            pre = _multiplied(x, weight).add_(bias).relu_()
        else:
            pre = torch.addmm(bias, x, weight).relu_()
        index = _largest(pre, k * len(x), processes)
        token = index // pre.shape[1]
        latent = index - token * pre.shape[1]
        ctx.save_for_backward(x, token, latent)
        ctx.d_sae, ctx.precision = pre.shape[1], precision
        ctx.mark_non_differentiable(token, latent)
        return pre.view(-1)[index], token, latent

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor, None, None, None]:
        x, token, latent = ctx.saved_tensors
        gradient, shape = gradients[0], (len(x), ctx.d_sae)
        # Survivors are positive, so that ReLU passes their gradient; the others get none.
        if _densely(len(token), shape, x.device, ctx.precision):
            weight = _multiplied(x.T, _dense(token, latent, gradient, shape))  # (d_model, d_sae)
        else:
            weight = (transposed(token, latent, gradient, shape) @ x).T
        bias = torch.zeros(ctx.d_sae, dtype=x.dtype, device=x.device).index_add_(0, latent, gradient)
        return None, weight, bias, None, None, None


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        rows: torch.Tensor,
        token: torch.Tensor,
        latent: torch.Tensor,
        n_tokens: int,
        precision: Precision,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, rows, token, latent)
        ctx.precision, shape = precision, (n_tokens, len(rows))
        if _densely(len(values), shape, rows.device, precision):
            return _multiplied(_dense(token, latent, values, shape), rows)
        return csr(token, latent, values, shape) @ rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        values, rows, token, latent = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        shape = (len(gradient), len(rows))
        if _densely(len(values), shape, rows.device, ctx.precision):
            by_value = _multiplied(gradient, rows.T)[token, latent]
            by_row = _multiplied(_dense(token, latent, values, shape).T, gradient)
            return by_value, by_row, None, None, None, None
        by_value = torch.empty_like(values)
        for low in range(0, len(values), _CHUNK):
            part = slice(low, low + _CHUNK)
            by_value[part] = torch.einsum("id,id->i", gradient[token[part]], rows[latent[part]])
        by_row = transposed(token, latent, values, shape) @ gradient
        return by_value, by_row, None, None, None, None
