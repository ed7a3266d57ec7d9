"""The T-SAE's loss (Bhalla et al., arXiv 2511.05541), on tokens x scaled to mean norm √d_model:

    L = ‖x − x̂_high‖² / d_model + ‖x − x̂‖² / d_model + α · InfoNCE + β · AuxK          (means over tokens)

Dividing by d_model is the paper's sum over dimensions for tokens of mean norm 1: both reconstruction terms then run
from 1 (nothing explained) to 0 at any width, so that α means the same for every model. (With sums at norm √d_model,
α = 1 left InfoNCE at chance on the testbed, d_model 96: a temporal term in name only.)

- x̂_high decodes the high-level codes alone, x̂ all codes (two-group Matryoshka).
- InfoNCE, over the batch's N pairs of adjacent tokens, with s_ij = cos(h_i(t), h_j(t − 1)) / τ on high-level codes h:

      ½ · mean_i [ −log softmax_j(s_ij)[i] ]  +  ½ · mean_j [ −log softmax_i(s_ij)[j] ]

- AuxK (Gao et al., arXiv 2406.04093): the share of the residual x − x̂ left unexplained by the d_model / 2 strongest
  dead latents.

Codes are selected once, over all latents of the batch (BatchTopK, Bussmann et al., arXiv 2412.06410).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE


class LossTerms(NamedTuple):
    """Terms of the loss, unweighted, and what the trainer tracks. Scalars unless said."""

    total: torch.Tensor
    reconstruction_high: torch.Tensor
    """Mean over tokens of ‖x − x̂_high‖² / d_model."""
    reconstruction: torch.Tensor
    """Mean over tokens of ‖x − x̂‖² / d_model."""
    temporal: torch.Tensor
    """InfoNCE in nats; log N is chance."""
    aux: torch.Tensor
    fired: torch.Tensor
    """(d_sae,) bool: latents active somewhere in the batch."""
    smallest: torch.Tensor
    """Smallest active code of the batch, from which the inference threshold is averaged."""


def batch_topk(pre: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k · n largest entries of (n, d_sae) non-negative pre-activations; the others become 0."""
    n = k * pre.shape[0]
    values, indices = pre.flatten().topk(n, sorted=False)
    return torch.zeros_like(pre).flatten().scatter(0, indices, values).view_as(pre)


def info_nce(current: torch.Tensor, previous: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Symmetric InfoNCE with cosine similarities; (N, d) codes of tokens t and t − 1, row by row."""
    logits = F.normalize(current, dim=1) @ F.normalize(previous, dim=1).T / temperature  # (N, N)
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def temporal_loss(
    sae: TemporalSAE, x: torch.Tensor, pairs: torch.Tensor, dead: torch.Tensor | None = None
) -> LossTerms:
    """The loss of one batch.

    Args:
        sae: in the units of x.
        x: (n, d_model) tokens.
        pairs: (N, 2) rows of x: (token t − 1, token t).
        dead: (d_sae,) bool, latents for AuxK; none by default.

    Raises:
        TsaeError: where the temporal term has a weight but the batch has no pairs.
    """
    config = sae.config
    pre = sae.preactivations(x)
    codes = batch_topk(pre, config.k)
    high = codes[:, : config.d_high]
    x_high = high @ sae.W_dec[: config.d_high]
    x_hat = x_high + codes[:, config.d_high :] @ sae.W_dec[config.d_high :] + sae.b_dec
    reconstruction_high = (x - x_high - sae.b_dec).pow(2).mean()
    residual = x - x_hat
    reconstruction = residual.pow(2).mean()
    total = reconstruction_high + reconstruction

    temporal = x.new_zeros(())
    if config.temporal_weight > 0:
        if len(pairs) < 2:
            raise TsaeError(
                f"the batch has {len(pairs)} pairs of adjacent tokens: the temporal term would be silently zero",
                where="temporal_loss",
                fix="Give batches of adjacent tokens, or set temporal_weight=0.",
            )
        temporal = info_nce(high[pairs[:, 1]], high[pairs[:, 0]], config.temperature)
        total = total + config.temporal_weight * temporal

    aux = x.new_zeros(())
    if config.aux_weight > 0 and dead is not None and bool(dead.any()):
        aux = _aux_loss(sae, pre, residual.detach(), dead)
        total = total + config.aux_weight * aux
    active = codes > 0
    smallest = torch.where(active, codes, torch.inf).min().detach()
    return LossTerms(total, reconstruction_high, reconstruction, temporal, aux, active.any(0), smallest)


def _aux_loss(sae: TemporalSAE, pre: torch.Tensor, residual: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
    latents = dead.nonzero()[:, 0]
    k = min(len(latents), max(1, sae.d_model // 2))
    values, indices = pre[:, latents].topk(k, dim=1, sorted=False)
    codes = torch.zeros(len(pre), len(latents), device=pre.device).scatter(1, indices, values)
    error = (residual - codes @ sae.W_dec[latents]).pow(2).mean()
    # Relative to what there is to explain, so that the weight does not fade as the reconstruction improves.
    return error / (residual - residual.mean(0)).pow(2).mean().clamp_min(1e-12)
