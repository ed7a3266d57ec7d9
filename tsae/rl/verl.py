"""An advantage estimator for verl's registry: GRPO on the outcome, plus a dense reward for every token.

verl gives an estimator token_level_rewards (B, T), response_mask (B, T), the groups' uids as index, and its config. It
gives neither token ids nor columns of the user. So scores must come as rewards: a reward manager, which sees token ids,
puts the outcome on a response's last token and λ c (`tsae.rl.credit`, 3) on all tokens before it. Token weights need
an entry of the batch that verl passes to no estimator. If you can change the trainer, use `tsae.rl.credit` in its
compute_advantage.

    import tsae.rl.verl                      # registers it, where verl is installed
    algorithm.adv_estimator=tsae_credit      # in verl's configuration

Tested alone, against `tsae.rollouts.rewards`; it was never run with verl.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_advantages

NAME = "tsae_credit"


def credit_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both (B, T): the group's advantage of the outcome on every token, plus the dense rewards.

    Both are in float32, or in float64 where the rewards are.

    Args:
        token_level_rewards: (B, T), the outcome on the last response token, dense rewards before it.
        response_mask: (B, T), 1 for response tokens. A response without any is not of its group.
        index: (B,) group of every response.
        config: verl's algorithm config; norm_adv_by_std_in_grpo decides whether advantages are divided by the standard
            deviation of the group's outcomes (GRPO) or not (Dr. GRPO).

    Raises:
        TsaeError: where a reward of a response token is not finite.
    """
    # Half precision has no exact 4095, and numpy knows no bfloat16.
    rewards = token_level_rewards.to(torch.promote_types(token_level_rewards.dtype, torch.float32))
    written = response_mask > 0
    rewards = rewards.where(written, 0)
    if not rewards.isfinite().all():
        what = f"{int((~rewards.isfinite()).sum())} rewards of response tokens are not finite"
        fix = "Give every response a number: advantages of a group need all its rewards."
        raise TsaeError(what, where="token_level_rewards", fix=fix)
    mask = response_mask.to(rewards)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (places * written).argmax(1)
    is_last = (places == last.unsqueeze(1)).to(rewards)
    outcome = (rewards * is_last).sum(1)
    some = written.any(1).cpu().numpy()
    of_groups = np.zeros(len(some))
    scaled = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    if some.any():
        kind: Literal["grpo", "dr_grpo"] = "grpo" if scaled else "dr_grpo"
        of_groups[some] = group_advantages(outcome.cpu().numpy()[some], np.asarray(index)[some], kind)
    advantages = torch.from_numpy(of_groups).to(outcome)
    found = (advantages.unsqueeze(1) + rewards * (1 - is_last)) * mask
    return found, found


def _register() -> None:
    try:
        from verl.trainer.ppo.core_algos import register_adv_est
    except ImportError:
        return
    register_adv_est(NAME)(credit_advantage)


_register()
