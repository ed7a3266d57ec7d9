"""The temporal terms of the loss on active codes, with sparse gradients: InfoNCE, and distances for the weighted L1.

With several processes (`tsae.base.distributed`) each holds a share of the batch's pairs. The gradient of its codes is
that of the whole batch's loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tsae.base.distributed import ALONE, Processes
from tsae.sae.fitting.sparse_codes import Codes, csr, offsets, transposed


def info_nce(
    codes: Codes,
    n_latents: int,
    pairs: torch.Tensor,
    temperature: float,
    similarity: str = "cosine",
    trajectory: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
    processes: Processes = ALONE,
) -> torch.Tensor:
    """Symmetric InfoNCE of adjacent tokens' codes; see `tsae.sae.fitting.loss`.

    Of several processes, each gives its pairs' terms of the mean over all pairs, and the gradient of that mean.

    Args:
        codes: of the high-level latents.
        n_latents: their number.
        pairs: (N, 2) tokens (partner, t).
        temperature: divides the similarities.
        similarity: "cosine", or "inner" for raw inner products.
        trajectory: of at least all tokens t, where a pair's negatives are the pairs of other trajectories only.
        copies: of all tokens, equal where one is a copy of the other: pairs that share a token are not contrasted.
        processes: that hold the batch.
    """
    groups = [] if trajectory is None else [trajectory[pairs[:, 1]]]
    if copies is not None:
        groups += copies[pairs].unbind(1)
    if similarity == "cosine":
        square = torch.zeros(codes.n_tokens, dtype=codes.values.dtype, device=codes.values.device)
        norm = square.index_add(0, codes.token, codes.values.square()).sqrt()
        # Not norm[codes.token], whose gradient several threads add up in any order: resumed runs give equal bits.
        codes = codes._replace(values=codes.values / norm.index_select(0, codes.token).clamp_min(1e-12))
    together = torch.stack(groups, dim=1) if groups else None
    return _InfoNCE.apply(*codes, n_latents, pairs, temperature, together, processes)


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
    ends = offsets(codes.token, codes.n_tokens)
    first, n_active = ends[:-1], ends.diff()
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


class _Partners(NamedTuple):
    """Codes to be compared, and the pairs in which they are."""

    values: torch.Tensor
    token: torch.Tensor
    latent: torch.Tensor
    n_tokens: int
    pairs: torch.Tensor
    groups: torch.Tensor | None
    """(N, n_kinds) pairs whose groups of any kind are equal are not contrasted."""

    def gathered(self, processes: Processes) -> tuple[_Partners, int]:
        """The codes and pairs of all processes, and the number of this process's first pair among them."""
        if processes.size == 1:
            return self, 0
        n_tokens = processes.counts(self.n_tokens)
        first = sum(n_tokens[: processes.rank])
        values = torch.cat(processes.gather(self.values))
        places = torch.cat(processes.gather(torch.stack([self.token + first, self.latent], dim=1)))
        token, latent = places.T.contiguous()
        pairs = processes.gather(self.pairs + first)
        groups = None if self.groups is None else torch.cat(processes.gather(self.groups))
        every = _Partners(values, token, latent, sum(n_tokens), torch.cat(pairs), groups)
        return every, sum(len(part) for part in pairs[: processes.rank])


def _logits(current: _Partners, previous: _Partners, n_latents: int, temperature: float, diagonal: int) -> torch.Tensor:
    """(N current, N previous): similarities / temperature of the pairs' current tokens with the previous ones.

    Those of a group are −∞, but for the diagonal.
    """
    dense = torch.zeros(n_latents, previous.n_tokens, dtype=previous.values.dtype, device=previous.values.device)
    dense[previous.latent, previous.token] = previous.values
    codes = csr(current.token, current.latent, current.values, (current.n_tokens, n_latents))
    # Of every token; rows that are no current token are left out.
    logits = (codes @ dense[:, previous.pairs[:, 0]])[current.pairs[:, 1]] / temperature
    if current.groups is not None and previous.groups is not None:
        kinds = zip(current.groups.unbind(1), previous.groups.unbind(1), strict=True)
        alike = torch.zeros_like(logits, dtype=torch.bool)
        for mine, others in kinds:
            alike |= mine[:, None] == others[None, :]
        alike.diagonal(diagonal).fill_(False)
        logits.masked_fill_(alike, -torch.inf)
    return logits


def _pull(
    logits: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor, diagonal: int, scale: float
) -> torch.Tensor:
    """∂loss/∂similarities: (softmax over rows + softmax over columns) / 2, less 1 on the diagonal, all / scale."""
    weight = (logits - by_row[:, None]).exp_() + logits.sub_(by_column[None, :]).exp_()
    weight.mul_(0.5 / scale).diagonal(diagonal).sub_(1 / scale)
    return weight


class _InfoNCE(torch.autograd.Function):
    """Rows are current tokens, columns previous ones; on the diagonal are the pairs.

    Of n processes each computes the rows and the columns of its own pairs, 2 / n of the whole. Besides these, the
    gradient of its own codes needs only the others' log-sums, two numbers a pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        token: torch.Tensor,
        latent: torch.Tensor,
        n_tokens: int,
        n_latents: int,
        pairs: torch.Tensor,
        temperature: float,
        groups: torch.Tensor | None,
        processes: Processes,
    ) -> torch.Tensor:
        own = _Partners(values, token, latent, n_tokens, pairs, groups)
        every, first = own.gathered(processes)
        n = len(every.pairs)
        rows = columns = _logits(own, every, n_latents, temperature, first)  # (N own, N)
        if processes.size > 1:
            columns = _logits(every, own, n_latents, temperature, -first)  # (N, N own)
        by_row, by_column = rows.logsumexp(1), columns.logsumexp(0)  # of the own pairs
        loss = (by_row + by_column).sum() / n / 2 - rows.diagonal(first).sum() / n
        if processes.size > 1:
            every_row, every_column = torch.cat(processes.gather(torch.stack([by_row, by_column], dim=1))).unbind(1)
            columns = _pull(columns, every_row, by_column, -first, n * temperature)
            rows = _pull(rows, by_row, every_column, first, n * temperature)
        else:
            rows = columns = _pull(rows, by_row, by_column, 0, n * temperature)
        ctx.save_for_backward(token, latent, pairs, every.values, every.token, every.latent, every.pairs, rows, columns)
        ctx.shapes = (n_tokens, n_latents), (every.n_tokens, n_latents)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, *tuple[None, ...]]:
        token, latent, pairs, values, every_token, every_latent, every_pairs, rows, columns = ctx.saved_tensors
        (n_tokens, n_latents), shape = ctx.shapes
        by_latent = transposed(every_token, every_latent, values, shape)  # (n_latents, tokens of all)
        total = torch.zeros(n_latents, n_tokens, dtype=values.dtype, device=values.device)
        for mine, others, matrix in ((1, 0, rows.T), (0, 1, columns)):
            # Added, not assigned: a token may be a partner more than once.
            spread = torch.zeros(shape[0], len(pairs), dtype=values.dtype, device=values.device)
            spread.index_add_(0, every_pairs[:, others], matrix)
            total.index_add_(1, pairs[:, mine], by_latent @ spread)
        return gradients[0] * total[latent, token], *[None] * 8
