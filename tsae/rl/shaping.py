"""From token scores to the advantages of a policy-gradient step.

A_i is the group's advantage of trajectory i. z_it are the scores of its n_i tokens times 1 − the reference's
probability of the token (`Credit.token_credit`). c_it is what the threshold θ leaves of them:
c = sign(z) max(|z| − θ, 0). Most tokens have small scores. Their differences mean little, but there are many of them,
and on problems beyond the reference's reach they are biased.

1. *Token weights*, of mean 1 over a trajectory: credit moves within it and neither grows nor shrinks.

       u_it = exp(clip(s_i κ c_it, −ln B, ln B)),   w_it = n_i u_it / Σ_t u_it,   s_i = sign A_i

   Better tokens of a success get the credit, worse tokens of a failure the blame; 1/B² <= w <= B².

2. *Plausibility* of a success: p_i = Π_t (1 − clip(−c_it / τ, 0, 1)). It is 1 without doubtful tokens and 0 if one
   token scores −τ. Successes earn A_i p_i. Failures of the group are scaled by Σ A p / Σ A over its successes, so that
   its advantages still add up to 0. Scaling successes alone would push every trajectory down.

3. *Dense* reward: λ c_it is added. It needs no success in the group. Unlike the weights, it can change what is optimal.

    A'_it = w_it · A'_i + λ c_it,     A'_i = A_i, or with plausibility as under 2

Groups that agree have A_i = 0, which leaves the dense term alone.
"""

from __future__ import annotations

import math

import torch

from tsae.errors import TsaeError
from tsae.rl.config import ShapingConfig


def thresholded(scores: torch.Tensor, config: ShapingConfig) -> torch.Tensor:
    """Bring scores closer to 0 by the threshold."""
    return scores.sign() * (scores.abs() - config.threshold).clamp_min(0)


def token_weights(
    scores: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ShapingConfig
) -> torch.Tensor:
    """(B, T) weights of mean 1 over every row's tokens; 0 outside the mask, and 1 where the advantage is 0.

    Args:
        scores: (B, T).
        advantages: (B,).
        mask: (B, T), 1 for response tokens.
        config: strength and bound.
    """
    limit = math.log(config.bound)
    exponent = (config.strength * scores * advantages.sign().unsqueeze(1)).clamp(-limit, limit)
    # The row's largest weight is 1 at first: a sum of large ones would not be finite.
    largest = exponent.masked_fill(mask == 0, -limit).amax(1, keepdim=True)
    raw = (exponent - largest).exp().masked_fill(mask == 0, 0) * mask
    return raw * (mask.sum(1) / raw.sum(1).clamp_min(1)).unsqueeze(1)


def plausibility(scores: torch.Tensor, mask: torch.Tensor, config: ShapingConfig) -> torch.Tensor:
    """(B,) between 0 and 1: whether every token looks like a token of a success.

    Args:
        scores: (B, T).
        mask: (B, T), 1 for response tokens.
        config: tolerance.
    """
    doubt = (-scores / config.tolerance).clamp(0, 1) * mask
    return (1 - doubt).prod(1)


def rebalanced(advantages: torch.Tensor, factor: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Multiply advantages of successes by a factor; scale those of failures so that every group still adds up to 0.

    Args:
        advantages: (B,), adding up to 0 in each group.
        factor: (B,) between 0 and 1; only read where the advantage is positive.
        group: (B,) number of each row's group.

    Returns:
        (B,)
    """
    gained = advantages.clamp_min(0)
    total = torch.zeros(int(group.max()) + 1, dtype=gained.dtype, device=gained.device)
    share = total.index_add(0, group, gained * factor) / total.index_add(0, group, gained).clamp_min(1e-12)
    return torch.where(advantages > 0, gained * factor, advantages * share[group])


def shape_advantages(
    scores: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, group: torch.Tensor, config: ShapingConfig
) -> torch.Tensor:
    """(B, T) advantages A' of the equation at the top; the arguments are as above.

    Raises:
        TsaeError: where one is not finite, as a score or an advantage was not.
    """
    mask = mask.to(scores)
    scores = thresholded(scores, config)
    if config.plausibility:
        advantages = rebalanced(advantages, plausibility(scores, mask, config), group)
    weights = token_weights(scores, advantages, mask, config)
    shaped = weights * advantages.unsqueeze(1) + config.dense * scores * mask
    if not shaped.isfinite().all():
        raise TsaeError(
            f"{int((~shaped.isfinite()).sum())} advantages are not finite once they are shaped by scores",
            where="shape_advantages",
            fix="Give finite scores and advantages, or smaller numbers in ShapingConfig.",
        )
    return shaped
