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

Codes are selected once, over all latents of the batch (BatchTopK, Bussmann et al., arXiv 2412.06410); what follows
selection is computed on the selected codes alone (`tsae.sae.fitting.sparse_codes`, `tsae.sae.fitting.temporal_term`).

On several processes (`tsae.base.distributed`) each holds a share of the batch's tokens, and all of the above is of the
whole batch: codes are selected among all processes' pre-activations, a pair is contrasted with all pairs, means and the
residual's variance are over all tokens. A share may have no pairs, or no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tsae.base.distributed import ALONE, Processes
from tsae.errors import TsaeError
from tsae.sae.config import Precision
from tsae.sae.fitting import sparse_codes, temporal_term
from tsae.sae.model import TemporalSAE


class LossTerms(NamedTuple):
    """Terms of the loss, unweighted, and what the trainer tracks. Scalars unless said.

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
        pairs: (N, 2) rows of x: (partner, token t). Rows from n on are those of others.
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
    codes = sparse_codes.encode_topk(x, *encoder)
    residual, errors = x - sae.b_dec, []
    for of_group in sparse_codes.decode(codes, sae.W_dec, bounds, config.k, precision):
        residual = residual - of_group
        errors.append(residual.pow(2).sum() / (n_tokens * sae.d_model))
    total = torch.stack([weight * error for weight, error in zip(config.weights, errors, strict=True)]).sum()

    temporal = x.new_zeros(())
    if config.temporal_weight > 0:
        n_pairs = sum(processes.counts(len(pairs)))
        if n_pairs < 2:
            raise TsaeError(
                f"the batch has {n_pairs} pairs of tokens: the temporal term would be silently zero",
                where="temporal_loss",
                fix="Give batches of adjacent tokens, or set temporal_weight=0.",
            )
        tokens, high = x, codes.columns(*bounds[0])
        if others is not None:
            apart = sparse_codes.encode_topk(others, *encoder)
            high, tokens = high.followed_by(apart.columns(*bounds[0])), torch.cat([x, others])
        if config.temporal == "l1":
            temporal = _weighted_l1(sae, tokens, high, pairs) / n_pairs
            total = total + temporal_share * config.temporal_weight * config.weights[0] * temporal
        else:
            if config.negatives == "batch":
                trajectory = None
            elif trajectory is not None and _are_one(trajectory, processes):
                raise TsaeError(
                    "all pairs of the batch are of one trajectory, so that no pair has negatives",
                    where="temporal_loss",
                    fix='Read more tokens a batch (batch_tokens), or set negatives="batch".',
                )
            temporal = temporal_term.info_nce(
                high, config.d_high, pairs, config.temperature, config.similarity, trajectory, copies, processes
            )
            total = total + temporal_share * config.temporal_weight * temporal

    aux = x.new_zeros(())
    dead = dead.nonzero()[:, 0] if config.aux_weight > 0 and dead is not None else None
    if dead is not None and len(dead):
        residual = residual.detach()
        error = _aux_error(sae, x, residual, dead, precision) / (n_tokens * sae.d_model)
        # Relative to what there is to explain, so that the weight does not fade as the reconstruction improves.
        aux = error / variance(residual, n_tokens, processes).clamp_min(1e-12)
        total = total + config.aux_weight * aux
    fired = torch.zeros(len(sae.b_enc), dtype=torch.bool, device=x.device).index_fill_(0, codes.latent, True)
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
    lowest, highest = processes.least(ends).tolist()
    return bool(lowest == -highest)


def _weighted_l1(sae: TemporalSAE, x: torch.Tensor, high: sparse_codes.Codes, pairs: torch.Tensor) -> torch.Tensor:
    """Sum over pairs."""
    alike = torch.cosine_similarity(x[pairs[:, 1]], x[pairs[:, 0]], dim=1)
    return (alike * temporal_term.l1_distances(high, sae.config.d_high, pairs)).sum() / sae.d_model**0.5


def _aux_error(
    sae: TemporalSAE, x: torch.Tensor, residual: torch.Tensor, dead: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Sum over tokens of ‖residual − its reconstruction by the strongest dead latents‖²."""
    weight = sae.W_enc[:, dead]
    bias = sae.b_enc[dead] - sae.b_dec @ weight
    pre = sparse_codes.matmul(x, weight, precision) + bias
    values, indices = pre.relu().topk(min(len(dead), max(1, sae.d_model // 2)), dim=1, sorted=False)
    codes = torch.zeros_like(pre).scatter(1, indices, values)
    return (residual - sparse_codes.matmul(codes, sae.W_dec[dead], precision)).pow(2).sum()
