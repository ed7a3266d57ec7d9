"""The parts of the loss that touch only active codes: selection, decoding and the temporal terms with sparse gradients.

Of n · d_sae pre-activations k · n survive BatchTopK (0.4 % at k 32 of 8,192). Only encoding needs the dense product;
decoding, both weight gradients and the temporal terms cost in proportion to the survivors. The values equal
those of the dense formulas of `tsae.sae.loss`; tests compare them.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

# torch says once per process that CSR tensors are in beta; said here, it does not interrupt a progress bar later.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)

_SAMPLE_STRIDE = 61  # Prime, so that a strided sample of the pre-activations does not follow the latents.
_MARGIN = 1.1
_CHUNK = 16_384  # active codes whose decoder rows are gathered at once: bounds memory to chunk · d_model


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
        return Codes(self.values[keep], self.token[keep], self.latent[keep] - start, self.n_tokens)

    def followed_by(self, other: Codes) -> Codes:
        """These and the codes of further tokens, which are numbered after these."""
        return Codes(
            torch.cat([self.values, other.values]),
            torch.cat([self.token, other.token + self.n_tokens]),
            torch.cat([self.latent, other.latent]),
            self.n_tokens + other.n_tokens,
        )


def encode_topk(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int) -> Codes:
    """BatchTopK(ReLU(x W + b)) as sparse codes.

    Args:
        x: (n, d_model); gets no gradient.
        weight: (d_model, d_sae).
        bias: (d_sae,).
        k: codes kept per token, on average.
    """
    values, token, latent = _EncodeTopK.apply(x, weight, bias, k)
    return Codes(values, token, latent, len(x))


def decode(codes: Codes, rows: torch.Tensor) -> torch.Tensor:
    """(n, d_model): Σ over a token's codes of value · decoder row. rows: (n_latents, d_model)."""
    return _Decode.apply(codes.values, rows, codes.token, codes.latent, codes.n_tokens)


def info_nce(
    codes: Codes,
    n_latents: int,
    pairs: torch.Tensor,
    temperature: float,
    similarity: str = "cosine",
    trajectory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Symmetric InfoNCE of adjacent tokens' codes; see `tsae.sae.loss`.

    Args:
        codes: of the high-level latents.
        n_latents: their number.
        pairs: (N, 2) tokens (partner, t).
        temperature: divides the similarities.
        similarity: "cosine", or "inner" for raw inner products.
        trajectory: of at least all tokens t, where a pair's negatives are the pairs of other trajectories only.
    """
    shape, groups = (codes.n_tokens, n_latents), None if trajectory is None else trajectory[pairs[:, 1]]
    if similarity == "inner":
        return _InfoNCE.apply(codes.values, codes.token, codes.latent, shape, pairs, temperature, groups)
    square = torch.zeros(codes.n_tokens, dtype=codes.values.dtype, device=codes.values.device)
    norm = square.index_add(0, codes.token, codes.values.square()).sqrt()
    # Not norm[codes.token], whose gradient is added up by several threads in any order: resumed runs give equal bits.
    unit = codes.values / norm.index_select(0, codes.token).clamp_min(1e-12)
    return _InfoNCE.apply(unit, codes.token, codes.latent, shape, pairs, temperature, groups)


def l1_distances(codes: Codes, n_latents: int, pairs: torch.Tensor) -> torch.Tensor:
    """(N,) Σ over latents of |h(t) − h(s)| for every pair (s, t) of tokens.

    As codes are not negative, |a − b| = a + b − 2 min(a, b), and min is above 0 only where both tokens are active.

    Args:
        codes: sorted by token, and by latent within a token.
        n_latents: their number.
        pairs: (N, 2) tokens (s, t).
    """
    # index_select and index_add, not codes[…]: gradients are added up in one order, and resumed runs give equal bits.
    values = codes.values
    sums = torch.zeros(codes.n_tokens, dtype=values.dtype, device=values.device).index_add(0, codes.token, values)
    total = sums.index_select(0, pairs[:, 0]) + sums.index_select(0, pairs[:, 1])
    if len(values) == 0:
        return total
    n_active = torch.bincount(codes.token, minlength=codes.n_tokens)
    first = n_active.cumsum(0) - n_active
    # Every active code of every pair's token t …
    n_mine = n_active[pairs[:, 1]]
    pair = torch.repeat_interleave(torch.arange(len(pairs), device=values.device), n_mine)
    place = torch.arange(len(pair), device=values.device) - (n_mine.cumsum(0) - n_mine)[pair]
    mine = first[pairs[pair, 1]] + place
    # … and where token s has the same latent.
    key = codes.token * n_latents + codes.latent
    wanted = pairs[pair, 0] * n_latents + codes.latent[mine]
    theirs = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
    both = (key[theirs] == wanted).nonzero()[:, 0]
    smaller = torch.minimum(values.index_select(0, mine[both]), values.index_select(0, theirs[both]))
    return total - 2 * torch.zeros_like(total).index_add(0, pair[both], smaller)


def _csr(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A CSR matrix from entries sorted by row."""
    offsets = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    offsets[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    return torch.sparse_csr_tensor(offsets, column, values, size=shape, check_invariants=False)


def _transposed(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The transpose, as CSR, of the matrix with the given entries."""
    order = column.argsort(stable=True)
    return _csr(column[order], row[order], values[order], (shape[1], shape[0]))


def _largest(pre: torch.Tensor, n: int) -> torch.Tensor:
    """Ascending flat indices of the n largest positive entries of a non-negative tensor (fewer if there are fewer).

    A strided sample bounds the n-th largest from below, so that only the entries above the bound are sorted.
    """
    flat = pre.view(-1)
    sample = flat[::_SAMPLE_STRIDE]
    wanted = min(len(sample), int(_MARGIN * n / _SAMPLE_STRIDE) + 64)
    bound = sample.topk(wanted, sorted=False).values.min()
    found = (flat > bound).nonzero()[:, 0]
    if len(found) < n:
        found = flat.nonzero()[:, 0]
    if len(found) > n:
        found = found[flat[found].topk(n, sorted=False).indices].sort().values
    return found


class _EncodeTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pre = torch.addmm(bias, x, weight).relu_()
        index = _largest(pre, k * len(x))
        token = index // pre.shape[1]
        latent = index - token * pre.shape[1]
        ctx.save_for_backward(x, token, latent)
        ctx.d_sae = pre.shape[1]
        ctx.mark_non_differentiable(token, latent)
        return pre.view(-1)[index], token, latent

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor, None]:
        x, token, latent = ctx.saved_tensors
        gradient = gradients[0]
        # Survivors are positive, so that ReLU passes their gradient; the others get none.
        weight = _transposed(token, latent, gradient, (len(x), ctx.d_sae)) @ x  # (d_sae, d_model)
        bias = torch.zeros(ctx.d_sae, dtype=x.dtype, device=x.device).index_add_(0, latent, gradient)
        return None, weight.T, bias, None


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, rows: torch.Tensor, token: torch.Tensor, latent: torch.Tensor, n_tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(values, rows, token, latent)
        return _csr(token, latent, values, (n_tokens, len(rows))) @ rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        values, rows, token, latent = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        by_value = torch.empty_like(values)
        for low in range(0, len(values), _CHUNK):
            part = slice(low, low + _CHUNK)
            by_value[part] = torch.einsum("id,id->i", gradient[token[part]], rows[latent[part]])
        by_row = _transposed(token, latent, values, (len(gradient), len(rows))) @ gradient
        return by_value, by_row, None, None, None


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: torch.Tensor,
        token: torch.Tensor,
        latent: torch.Tensor,
        shape: tuple[int, int],
        pairs: torch.Tensor,
        temperature: float,
        groups: torch.Tensor | None,
    ) -> torch.Tensor:
        (n_tokens, n_latents), n = shape, len(pairs)
        dense = torch.zeros(n_latents, n_tokens, dtype=unit.dtype, device=unit.device)
        dense[latent, token] = unit
        previous = dense[:, pairs[:, 0]]  # (n_latents, N)
        current = _csr(token, latent, unit, (n_tokens, n_latents))
        # Similarities of every token with every previous token; rows that are no current token are left out.
        logits = (current @ previous)[pairs[:, 1]] / temperature  # (N, N)
        if groups is not None:
            logits.masked_fill_((groups[:, None] == groups[None, :]).fill_diagonal_(False), -torch.inf)
        by_row, by_column = logits.logsumexp(1), logits.logsumexp(0)
        loss = (by_row + by_column).mean() / 2 - logits.diagonal().mean()
        # ∂loss/∂logits = (softmax over rows + softmax over columns) / 2N − 1/N on the diagonal.
        weight = (logits - by_row[:, None]).exp_() + logits.sub_(by_column[None, :]).exp_()
        weight.mul_(0.5 / (n * temperature)).diagonal().sub_(1 / (n * temperature))
        ctx.save_for_backward(unit, token, latent, pairs, weight)
        ctx.shape = shape
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        unit, token, latent, pairs, weight = ctx.saved_tensors
        n_tokens, n_latents = ctx.shape
        by_latent = _transposed(token, latent, unit, ctx.shape)  # (n_latents, n_tokens)
        total = torch.zeros(n_latents, n_tokens, dtype=unit.dtype, device=unit.device)
        for mine, others, matrix in ((1, 0, weight.T), (0, 1, weight)):
            # Added, not assigned: a token may be a partner more than once.
            spread = torch.zeros(n_tokens, len(pairs), dtype=unit.dtype, device=unit.device)
            spread.index_add_(0, pairs[:, others], matrix)
            total.index_add_(1, pairs[:, mine], by_latent @ spread)
        return gradients[0] * total[latent, token], None, None, None, None, None, None
