"""The T-SAE's loss (Bhalla et al., arXiv 2511.05541), on tokens x about their centre, scaled to mean norm √d_model:

    L = w · ‖x − x̂_high‖² / d_model + ‖x − x̂‖² / d_model + α · InfoNCE + β · AuxK      (means over tokens)

Dividing by d_model is the paper's sum over dimensions for tokens of mean norm 1: both reconstruction terms then run
from 1 (nothing explained) to 0 at any width, so that α means the same for every model. (With sums at norm √d_model,
α = 1 left InfoNCE at chance on the testbed, d_model 96: a temporal term in name only.)

- x̂_high decodes the high-level codes alone, x̂ all codes (two-group Matryoshka). With more groups there is one term for
  every group with those before it, with one group only the last; `SAEConfig.weights` weigh the terms (w is 1 in the
  paper, ½ here). The authors' code takes the mean of the weighted terms over its two groups: its α of .1 is .2 here.
- InfoNCE, over the batch's N pairs of adjacent tokens, with s_ij = cos(h_i(t), h_j(t − 1)) / τ on high-level codes h
  (or their inner product / τ, as in the authors' code):

      ½ · mean_i [ −log softmax_j(s_ij)[i] ]  +  ½ · mean_j [ −log softmax_i(s_ij)[j] ]

  where j and i run over the pair itself and the pairs of other trajectories (by default; see `SAEConfig.negatives`).
  A pair whose token or partner is a copy of this pair's is left out too: rollouts of one prompt share its tokens, and
  a copy of the positive would be pushed away while the positive is drawn near.

- With `temporal="l1"` a similarity-weighted L1 takes InfoNCE's place, as in the authors' code without its contrastive
  flag: over the same pairs (s, t) of tokens, with w as above (there .2),

      w · mean [ cos(x(t), x(s)) · Σ_j |h_j(t) − h_j(s)| ] / √d_model

  The cosine is of the activations about their centre and has no gradient; where it is negative, the term drives codes
  apart. Dividing by √d_model makes it, like the errors, what it is for tokens of mean norm 1. Unlike InfoNCE it is
  least where the high-level codes are 0.
- A partner t − 1 (or s: `TrainingConfig.partner`) that is not itself one of the n tokens is only a partner: it is
  encoded with k codes of its own, on average, and enters no other term. The authors' code does so with all partners.
- AuxK (Gao et al., arXiv 2406.04093): the share of the residual x − x̂ left unexplained by the d_model / 2 strongest
  dead latents.

Codes are selected once, over all latents of the batch (BatchTopK, Bussmann et al., arXiv 2412.06410); everything after
selection is computed on the selected codes alone (`tsae.sae.training.sparse_codes`), with sparse gradients.

On several processes (`tsae.base.distributed`) each holds a share of the batch's tokens, and all of the above is of the
whole batch: codes are selected among all processes' pre-activations, a pair is contrasted with all pairs, means and the
residual's variance are over all tokens. A share may have no pairs, or no tokens. The gradient of a process's codes is
that of the whole batch's loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tsae.base.beside import to_device
from tsae.base.distributed import ALONE, Processes
from tsae.errors import TsaeError
from tsae.sae.config import Precision
from tsae.sae.model import TemporalSAE
from tsae.sae.training import sparse_codes
from tsae.sae.training.sparse_codes import Codes, csr, entries_of, offsets, product, sampled, transposed


class LossTerms(NamedTuple):
    """Terms of the loss, unweighted, and what the trainer tracks. Scalars unless noted.

    Of processes that divide a batch, the terms are this one's parts, which add up to those of the batch; so do the
    gradients.
    """

    total: torch.Tensor
    reconstruction_high: torch.Tensor
    """Mean over tokens of ‖x − x̂_high‖² / d_model."""
    reconstruction: torch.Tensor
    """Mean over tokens of ‖x − x̂‖² / d_model."""
    temporal: torch.Tensor
    """InfoNCE in nats, of which log N is chance; or the L1 term without w."""
    aux: torch.Tensor
    fired: torch.Tensor
    """(d_sae,) bool: latents active somewhere in the batch."""
    n_tokens: int
    """Tokens of the batch."""


def temporal_loss(
    sae: TemporalSAE,
    x: torch.Tensor,
    pairs: torch.Tensor,
    dead: torch.Tensor | None = None,
    trajectory: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
    *,
    temporal_share: float = 1.0,
    precision: Precision = "float32",
    processes: Processes = ALONE,
) -> LossTerms:
    """The loss of one batch.

    Args:
        sae: in the units of x.
        x: (n, d_model) tokens.
        pairs: (N, 2) rows of x: (partner, token t). Rows from n on are those of others. They, trajectory
            and copies may be on the CPU while x is on a GPU.
        dead: (d_sae,) bool, latents for AuxK; none by default.
        trajectory: (n,) ids, equal for tokens of one trajectory; where not given, no two pairs count as of one.
        others: (m, d_model) tokens that are only partners.
        copies: (n + m,) equal for tokens that are copies of one another (`TokenBatch.copies`); by default none are.
        temporal_share: of the temporal weight that counts (`TrainingConfig.temporal_rise_share`).
        precision: of the large matrix products (`TrainingConfig.precision`).
        processes: that hold the batch; x and pairs are this one's share.

    Raises:
        TsaeError: where the temporal term has a weight but the batch has no pairs, or none of another trajectory.
    """
    config, n_tokens = sae.config, sum(processes.counts(len(x)))
    encoder, bounds = (sae.W_enc, sae.b_enc, sae.b_dec, config.k, precision, processes), config.group_bounds
    temporal, weight = x.new_zeros(()), temporal_share * config.temporal_weight
    n_pairs = sum(processes.counts(len(pairs)))
    if config.temporal_weight > 0 and n_pairs < 2:
        raise TsaeError(
            f"the batch has {n_pairs} pairs of tokens: the temporal term would be silently zero",
            where="temporal_loss",
            fix="Give batches of adjacent tokens, or set temporal_weight=0.",
        )
    if config.negatives == "batch":
        trajectory = None
    contrastive = config.temporal_weight > 0 and config.temporal != "l1"
    if contrastive and trajectory is not None and _are_one(trajectory, processes):
        raise TsaeError(
            "all pairs of the batch are of one trajectory, so that no pair has negatives",
            where="temporal_loss",
            fix='Read more tokens a batch (batch_tokens), or set negatives="batch".',
        )
    # A GPU is waited for here, and where codes are selected, but not in between.
    dead = dead.nonzero()[:, 0] if config.aux_weight > 0 and dead is not None else None
    any_dead = dead is not None and len(dead) > 0
    pairs = to_device(pairs, x.device)
    trajectory, copies = (None if each is None else to_device(each, x.device) for each in (trajectory, copies))
    codes = sparse_codes.encode_topk(x, *encoder, others=others if config.temporal_weight > 0 else None)
    if config.temporal_weight > 0 and config.temporal == "l1":
        tokens = x if others is None else torch.cat([x, others])
        temporal = _weighted_l1(sae, tokens, codes.columns(*bounds[0]), pairs) / n_pairs
        weight *= config.weights[0]
    elif config.temporal_weight > 0:
        temporal = info_nce(
            codes, config.d_high, pairs, config.temperature, config.similarity, trajectory, copies, processes
        )
    total, errors, residual = sparse_codes.reconstruct(
        x, codes, sae.W_dec, sae.b_dec, bounds, config.weights, n_tokens * sae.d_model, precision, keep=any_dead
    )
    if config.temporal_weight > 0:
        total = total + weight * temporal

    aux = x.new_zeros(())
    if dead is not None and any_dead:
        error = _aux_error(sae, x, residual, dead, precision) / (n_tokens * sae.d_model)
        # Relative to what there is to explain, so that the weight does not fade as the reconstruction improves.
        aux = error / variance(residual, n_tokens, processes).clamp_min(1e-12)
        total = total + config.aux_weight * aux
    fired = torch.zeros(len(sae.b_enc), dtype=torch.bool, device=x.device).index_fill_(
        0, codes.latent[: codes.n_first], True
    )
    return LossTerms(total, errors[0], errors[-1], temporal, aux, processes.any(fired), n_tokens)


def variance(x: torch.Tensor, n_tokens: int, processes: Processes) -> torch.Tensor:
    """Mean over tokens and dimensions of the batch of (x − mean over tokens)²; x: (n, d_model), without gradient."""
    mean = processes.sum(x.sum(0)) / n_tokens
    return processes.sum((x - mean).pow(2).sum()) / (n_tokens * x.shape[1])


def _are_one(trajectory: torch.Tensor, processes: Processes) -> bool:
    """Whether all ids are the same."""
    ends = trajectory.new_full((2,), torch.iinfo(trajectory.dtype).max)
    if len(trajectory):
        ends = torch.stack([trajectory.min(), -trajectory.max()])
    lowest, highest = processes.least(ends.to(processes.device)).tolist()
    return bool(lowest == -highest)


def _weighted_l1(sae: TemporalSAE, x: torch.Tensor, high: sparse_codes.Codes, pairs: torch.Tensor) -> torch.Tensor:
    """Sum over pairs."""
    alike = torch.cosine_similarity(x[pairs[:, 1]], x[pairs[:, 0]], dim=1)
    return (alike * l1_distances(high, sae.config.d_high, pairs)).sum() / sae.d_model**0.5


def _aux_error(
    sae: TemporalSAE, x: torch.Tensor, residual: torch.Tensor, dead: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Sum over tokens of ‖residual − its reconstruction by the strongest dead latents‖²."""
    # Not W_enc[:, dead], whose gradient a GPU sorts indices for.
    weight, rows = sae.W_enc.index_select(1, dead), sae.W_dec.index_select(0, dead)
    bias = sae.b_enc.index_select(0, dead) - sae.b_dec @ weight
    pre = sparse_codes.matmul(x, weight, precision) + bias
    values, indices = pre.relu().topk(min(len(dead), max(1, sae.d_model // 2)), dim=1, sorted=False)
    codes = torch.zeros_like(pre).scatter(1, indices, values)
    return (residual - sparse_codes.matmul(codes, rows, precision)).pow(2).sum()


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
    """Symmetric InfoNCE of adjacent tokens' codes; see `tsae.sae.training.loss`.

    Of several processes, each gives its pairs' terms of the mean over all pairs, and the gradient of that mean.

    Args:
        codes: of all latents.
        n_latents: of which so many count, the first ones.
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
    if sparse_codes.kernels_for(codes.values) is None:
        codes = codes.columns(0, n_latents)
        if similarity == "cosine":
            square = torch.zeros(codes.n_tokens, dtype=codes.values.dtype, device=codes.values.device)
            # The root of 0, of a token without codes, has no gradient.
            norm = square.index_add(0, codes.token, codes.values.square()).clamp_min(1e-24).sqrt()
            # Not norm[codes.token], whose gradient several threads add up in any order: resumed runs give equal bits.
            codes = codes._replace(values=codes.values / norm.index_select(0, codes.token))
    together = torch.stack(groups, dim=1) if groups else None
    return _InfoNCE.apply(
        codes.values, codes, n_latents, pairs, temperature, similarity == "cosine", together, processes
    )


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


@dataclass(frozen=True)
class _Partners:
    """Codes to be compared, and the pairs in which they are."""

    values: torch.Tensor
    token: torch.Tensor
    latent: torch.Tensor
    n_tokens: int
    n_latents: int
    pairs: torch.Tensor
    groups: torch.Tensor | None
    """(N, n_kinds) pairs whose groups of any kind are equal are not contrasted."""
    order: torch.Tensor | None = None
    """(nnz,) that sorts the codes by latent, and where the codes of a latent then begin and end; found where needed."""
    ends: torch.Tensor | None = None

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
        every = _Partners(values, token, latent, sum(n_tokens), self.n_latents, torch.cat(pairs), groups)
        return every, sum(len(part) for part in pairs[: processes.rank])

    @cached_property
    def rows(self) -> tuple[_Rows, _Rows]:
        """Of the partners, and of the tokens t."""
        return _Rows.of(self, 0), _Rows.of(self, 1)

    @cached_property
    def for_kernels(self) -> Any:
        """A `tsae.sae.training.kernels.Contrasted`."""
        order, ends = self.order, self.ends
        if order is None or ends is None:
            order = self.latent.argsort(stable=True)
            ends = offsets(self.latent[order], self.n_latents)
        make = sparse_codes.kernels_for(self.values).Contrasted.of
        return make(self.values, self.token, self.n_tokens, order, ends, self.n_latents, self.pairs)

    def similarities(self, others: _Partners, temperature: float) -> torch.Tensor:
        """(N, N of others) inner products of these tokens t with the others' partners / temperature."""
        n_own, n = len(self.pairs), len(others.pairs)
        if (kernels := sparse_codes.kernels_for(self.values)) is not None:
            found: torch.Tensor = kernels.similarities(self.for_kernels, others.for_kernels, 1 / temperature)
            return found
        current, values = self.rows[1], self.rows[1].values / temperature
        sparse = csr(current.pair, current.latent, values, (n_own, self.n_latents))
        return product(sparse, others.rows[0].dense(self.n_latents, n))

    def pulled(self, side: int, others: _Partners, pull: _Pull, total: torch.Tensor) -> None:
        """Add to the total (nnz,) the gradient by the codes of these tokens on a side, from the others' on the other.

        Added, not assigned: a token may be in more than one pair.
        """
        if (kernels := sparse_codes.kernels_for(total)) is not None:
            kernels.pulled(*pull, self.for_kernels, others.for_kernels, side, total)
            return
        own, theirs = self.rows[side], others.rows[1 - side]
        if side:
            found = sampled(own.pair, own.latent, pull.matrix, theirs.dense(self.n_latents, len(others.pairs)))
        else:
            codes = transposed(theirs.pair, theirs.latent, theirs.values, (len(others.pairs), self.n_latents))
            found = product(codes, pull.matrix.T)[own.latent, own.pair]  # of (n_latents, N)
        total.index_add_(0, own.entry, found)


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


def _mask(logits: torch.Tensor, current: torch.Tensor | None, previous: torch.Tensor | None, diagonal: int) -> None:
    """Set logits (N current, N previous) of a group to −∞, but for the diagonal."""
    if current is None or previous is None:
        return
    alike = torch.zeros_like(logits, dtype=torch.bool)
    for ours, others in zip(current.unbind(1), previous.unbind(1), strict=True):
        alike |= ours[:, None] == others[None, :]
    alike.diagonal(diagonal).fill_(False)
    logits.masked_fill_(alike, -torch.inf)


_LEAST_TEMPERATURE = 0.03
"""Above it no exp((cos − 1) / τ) comes near the least number of float32, 1e-38."""


def _log_sums(
    logits: torch.Tensor, groups: torch.Tensor | None, others: torch.Tensor | None, diagonal: int, shift: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of rows and of columns, without what groups leave out.

    With a shift that is at least the largest logit and nowhere far from any, logits become exp(logits − shift): one
    exponential then serves both sums and their gradient.
    """
    if shift is not None and (kernels := sparse_codes.kernels_for(logits)) is not None:
        none = torch.empty(0, 0, dtype=torch.long, device=logits.device)
        of = (none, none) if groups is None or others is None else (groups, others)
        rows, columns = kernels.exponentials(logits, *of, diagonal, shift)
        return rows.log_().add_(shift), columns.log_().add_(shift)
    _mask(logits, groups, others, diagonal)
    if shift is None:
        return logits.logsumexp(1), logits.logsumexp(0)
    logits.sub_(shift).exp_()
    return logits.sum(1).log_().add_(shift), logits.sum(0).log_().add_(shift)


class _Pull(NamedTuple):
    """∂loss/∂similarities, (softmax over rows + softmax over columns) / 2 less 1 on the diagonal, all / scale.

    As `matrix` · (of_row + of_column), less a number on the diagonal; where kernels do not run, as the matrix alone.
    """

    matrix: torch.Tensor
    of_row: torch.Tensor
    of_column: torch.Tensor
    diagonal: int
    less: float

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        shift: float | None,
        by_row: torch.Tensor,
        by_column: torch.Tensor,
        diagonal: int,
        scale: float,
    ) -> _Pull:
        """From what `_log_sums` made of the logits, and its sums. The scale is N · temperature."""
        one, zero, less = logits.new_ones(len(logits)), logits.new_zeros(logits.shape[1]), 1 / scale
        if shift is None:
            weight = (logits - by_row[:, None]).exp_() + logits.sub_(by_column[None, :]).exp_()
            weight.mul_(0.5 / scale)
        else:
            rows, columns = ((shift - sums).exp_().mul_(0.5 / scale) for sums in (by_row, by_column))
            if sparse_codes.kernels_for(logits) is not None:
                return cls(logits, rows, columns, diagonal, less)
            weight = logits.mul_(rows[:, None] + columns[None, :])
        weight.diagonal(diagonal).sub_(less)
        return cls(weight, one, zero, diagonal, 0.0)

    def across(self) -> _Pull:
        """The transpose."""
        return _Pull(self.matrix.T, self.of_column, self.of_row, -self.diagonal, self.less)


class _InfoNCE(torch.autograd.Function):
    """Rows are current tokens, columns previous ones; on the diagonal are the pairs.

    Of n processes each computes the rows and the columns of its own pairs, 2 / n of the whole. Besides these, the
    gradient of its own codes needs only the others' log-sums, two numbers a pair.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        codes: Codes,
        n_latents: int,
        pairs: torch.Tensor,
        temperature: float,
        cosine: bool,
        groups: torch.Tensor | None,
        processes: Processes,
    ) -> torch.Tensor:
        ctx.of_unit = None
        if cosine and (kernels := sparse_codes.kernels_for(values)) is not None:
            ends = offsets(codes.token, codes.n_tokens)
            values, norm = kernels.unit(values, codes.latent, ends, n_latents)
            ctx.of_unit = (values, norm, ends)
        of = (codes.token, codes.latent, codes.n_tokens, n_latents, pairs, groups)
        own = _Partners(values, *of, *((codes.order, codes.ends) if len(codes.ends) else ()))
        every, first = own.gathered(processes)
        n = len(every.pairs)
        rows = columns = own.similarities(every, temperature)
        positive = rows.diagonal(first).sum()
        # Codes are never negative, so every cosine lies between 0 and 1. Inner products may be of any size.
        shift = 1 / temperature if cosine and temperature >= _LEAST_TEMPERATURE else None
        by_row, by_column = _log_sums(rows, groups, every.groups, first, shift)  # of the own pairs
        if processes.size > 1:
            columns = every.similarities(own, temperature)
            _, by_column = _log_sums(columns, every.groups, groups, -first, shift)
        loss = (by_row + by_column).sum() / n / 2 - positive / n
        if processes.size > 1:
            every_row, every_column = torch.cat(processes.gather(torch.stack([by_row, by_column], dim=1))).unbind(1)
            by_columns = _Pull.of(columns, shift, every_row, by_column, -first, n * temperature)
            by_rows = _Pull.of(rows, shift, by_row, every_column, first, n * temperature)
        else:
            by_rows = by_columns = _Pull.of(rows, shift, by_row, by_column, 0, n * temperature)
        ctx.partners, ctx.pulls = (own, every), (by_rows, by_columns)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, *tuple[None, ...]]:
        (own, every), (by_rows, by_columns) = ctx.partners, ctx.pulls
        total = torch.zeros_like(own.values)
        own.pulled(1, every, by_rows, total)
        own.pulled(0, every, by_columns.across(), total)
        if ctx.of_unit is not None:
            total = sparse_codes.kernels_for(total).across_unit(total, *ctx.of_unit)
        return gradients[0] * total, *[None] * 7
