"""The temporal terms of the loss on active codes, with sparse gradients: InfoNCE, and distances for the weighted L1.

With several processes (`tsae.base.distributed`) each holds a share of the batch's pairs. The gradient of its codes is
that of the whole batch's loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tsae.base.distributed import ALONE, Processes
from tsae.sae.fitting.sparse_codes import Codes, csr, entries_of, product, sampled, transposed


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
        # The root of 0, of a token without codes, has no gradient.
        norm = square.index_add(0, codes.token, codes.values.square()).clamp_min(1e-24).sqrt()
        # Not norm[codes.token], whose gradient several threads add up in any order: resumed runs give equal bits.
        codes = codes._replace(values=codes.values / norm.index_select(0, codes.token))
    together = torch.stack(groups, dim=1) if groups else None
    return _InfoNCE.apply(*codes, n_latents, pairs, temperature, similarity == "cosine", together, processes)


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
    # Every active code of every pair's token t …
    mine, pair = entries_of(codes.token, codes.n_tokens, pairs[:, 1])
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


class _Rows(NamedTuple):
    """The codes of the tokens on one side of the pairs: a row a pair."""

    entry: torch.Tensor
    """(n,) indices of codes. A code appears once for every pair that its token is in."""
    pair: torch.Tensor
    """(n,) ascending."""
    latent: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, partners: _Partners, side: int) -> _Rows:
        """Of the partners (side 0) or the tokens t (side 1)."""
        entry, pair = entries_of(partners.token, partners.n_tokens, partners.pairs[:, side])
        return cls(entry, pair, partners.latent[entry], partners.values[entry])

    def dense(self, n_latents: int, n_pairs: int) -> torch.Tensor:
        """(n_latents, n_pairs)"""
        found = torch.zeros(n_latents, n_pairs, dtype=self.values.dtype, device=self.values.device)
        found[self.latent, self.pair] = self.values
        return found


def _logits(current: _Partners, previous: _Partners, n_latents: int, temperature: float, diagonal: int) -> torch.Tensor:
    """(N current, N previous): similarities / temperature of the pairs' current tokens with the previous ones.

    Those of a group are −∞, but for the diagonal.
    """
    mine, theirs = _Rows.of(current, 1), _Rows.of(previous, 0).dense(n_latents, len(previous.pairs))
    codes = csr(mine.pair, mine.latent, mine.values / temperature, (len(current.pairs), n_latents))
    logits = product(codes, theirs)
    if current.groups is not None and previous.groups is not None:
        kinds = zip(current.groups.unbind(1), previous.groups.unbind(1), strict=True)
        alike = torch.zeros_like(logits, dtype=torch.bool)
        for ours, others in kinds:
            alike |= ours[:, None] == others[None, :]
        alike.diagonal(diagonal).fill_(False)
        logits.masked_fill_(alike, -torch.inf)
    return logits


_LEAST_TEMPERATURE = 0.03
"""Above it no exp((cos − 1) / τ) comes near the least number of float32, 1e-38."""


def _log_sums(logits: torch.Tensor, shift: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of rows and of columns.

    With a shift that is at least the largest logit and nowhere far from any, logits become exp(logits − shift): one
    exponential then serves both sums and their gradient.
    """
    if shift is None:
        return logits.logsumexp(1), logits.logsumexp(0)
    logits.sub_(shift).exp_()
    return logits.sum(1).log_().add_(shift), logits.sum(0).log_().add_(shift)


def _pull(
    logits: torch.Tensor,
    shift: float | None,
    by_row: torch.Tensor,
    by_column: torch.Tensor,
    diagonal: int,
    scale: float,
) -> torch.Tensor:
    """∂loss/∂similarities: (softmax over rows + softmax over columns) / 2, less 1 on the diagonal, all / scale.

    Args:
        logits, shift: as `_log_sums` left them.
        by_row, by_column: log-sums.
        diagonal: on which the pairs lie.
        scale: pairs · temperature.
    """
    if shift is None:
        weight = (logits - by_row[:, None]).exp_() + logits.sub_(by_column[None, :]).exp_()
        weight.mul_(0.5 / scale)
    else:
        rows, columns = ((shift - sums).exp_().mul_(0.5 / scale) for sums in (by_row, by_column))
        weight = logits.mul_(rows[:, None] + columns[None, :])
    weight.diagonal(diagonal).sub_(1 / scale)
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
        cosine: bool,
        groups: torch.Tensor | None,
        processes: Processes,
    ) -> torch.Tensor:
        own = _Partners(values, token, latent, n_tokens, pairs, groups)
        every, first = own.gathered(processes)
        n = len(every.pairs)
        rows = columns = _logits(own, every, n_latents, temperature, first)  # (N own, N)
        if processes.size > 1:
            columns = _logits(every, own, n_latents, temperature, -first)  # (N, N own)
        positive = rows.diagonal(first).sum()
        # Codes are never negative, so every cosine lies between 0 and 1. Inner products may be of any size.
        shift = 1 / temperature if cosine and temperature >= _LEAST_TEMPERATURE else None
        by_row, by_column = _log_sums(rows, shift)  # of the own pairs
        if processes.size > 1:
            _, by_column = _log_sums(columns, shift)
        loss = (by_row + by_column).sum() / n / 2 - positive / n
        if processes.size > 1:
            every_row, every_column = torch.cat(processes.gather(torch.stack([by_row, by_column], dim=1))).unbind(1)
            columns = _pull(columns, shift, every_row, by_column, -first, n * temperature)
            rows = _pull(rows, shift, by_row, every_column, first, n * temperature)
        else:
            rows = columns = _pull(rows, shift, by_row, by_column, 0, n * temperature)
        ctx.save_for_backward(*own[:3], own.pairs, *every[:3], every.pairs, rows, columns)
        ctx.sizes = n_tokens, every.n_tokens, n_latents
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, *tuple[None, ...]]:
        values, token, latent, pairs, every_values, every_token, every_latent, every_pairs, rows, columns = (
            ctx.saved_tensors
        )
        n_tokens, n_every, n_latents = ctx.sizes
        own = _Partners(values, token, latent, n_tokens, pairs, None)
        every = _Partners(every_values, every_token, every_latent, n_every, every_pairs, None)
        total = torch.zeros_like(own.values)
        mine = _Rows.of(own, 1)
        others = _Rows.of(every, 0).dense(n_latents, len(every.pairs))
        # Added, not assigned: a token may be a partner more than once.
        total.index_add_(0, mine.entry, sampled(mine.pair, mine.latent, rows, others))
        mine, theirs = _Rows.of(own, 0), _Rows.of(every, 1)
        shape = (len(every.pairs), n_latents)
        codes = transposed(theirs.pair, theirs.latent, theirs.values, shape)
        pulled = product(codes, columns)  # (n_latents, N own)
        total.index_add_(0, mine.entry, pulled[mine.latent, mine.pair])
        return gradients[0] * total, *[None] * 9
