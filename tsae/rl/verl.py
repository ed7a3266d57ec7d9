"""An advantage estimator for verl's registry: GRPO on the outcome, plus a dense reward for every token.

verl gives an estimator token_level_rewards (B, T), response_mask (B, T), the groups' uids as index, and its config. It
gives neither token ids nor columns of the user. So scores must come as rewards: a reward manager, which sees token ids,
puts the outcome on a response's last token and λ c (`tsae.rl.shaping`, 3) on all tokens before it. Token weights need
an entry of the batch that verl passes to no estimator. If you can change the trainer, use `tsae.rl.shaping` in its
compute_advantage.

    import tsae.rl.verl                      # registers it, where verl is installed
    algorithm.adv_estimator=tsae_credit      # in verl's configuration

Tested alone, against `tsae.rollouts.advantages`; it was never run with verl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tsae.rollouts.advantages import group_advantages

NAME = "tsae_credit"


def credit_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both (B, T): the group's advantage of the outcome on every token, plus the dense rewards.

    Args:
        token_level_rewards: (B, T), the outcome on the last response token, dense rewards before it.
        response_mask: (B, T), 1 for response tokens.
        index: (B,) group of every response.
        config: verl's algorithm config; norm_adv_by_std_in_grpo decides whether advantages are divided by the standard
            deviation of the group's outcomes (GRPO) or not (Dr. GRPO).
    """
    mask = response_mask.to(token_level_rewards)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (places * mask).argmax(1)
    is_last = (places == last.unsqueeze(1)).to(mask)
    outcome = (token_level_rewards * is_last).sum(1)
    scaled = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    of_groups = group_advantages(outcome.cpu().numpy(), np.asarray(index), "grpo" if scaled else "dr_grpo")
    advantages = torch.from_numpy(of_groups).to(outcome)
    found = (advantages.unsqueeze(1) + token_level_rewards * (1 - is_last)) * mask
    return found, found


def _register() -> None:
    try:
        from verl.trainer.ppo.core_algos import register_adv_est
    except ImportError:
        return
    register_adv_est(NAME)(credit_advantage)


_register()
