"""The estimator for verl, by itself: its arguments are those that verl passes."""

from __future__ import annotations

import numpy as np
import torch

from tsae.rl.verl import credit_advantage


def test_outcomes_are_normalised_in_groups_and_dense_rewards_added() -> None:
    rewards = torch.tensor([[0.1, 1.0, 0.0], [0.0, -0.2, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])
    index = np.array(["x", "x", "y", "y"], dtype=object)
    advantages, returns = credit_advantage(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    # Outcomes of x are 1 and 0, of y 0 and 1: mean .5, standard deviation sqrt(.5).
    a = 0.5 / (0.5**0.5 + 1e-4)
    expected = torch.tensor([[a + 0.1, a, 0], [-a, -a - 0.2, -a], [-a + 0.5, -a, 0], [a, a, a]])
    torch.testing.assert_close(advantages, expected)
    assert returns is advantages
    plain, _ = credit_advantage(rewards, mask, index, config={"norm_adv_by_std_in_grpo": False})
    torch.testing.assert_close(plain[3], torch.tensor([0.5, 0.5, 0.5]))
