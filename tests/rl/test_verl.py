"""The estimator for verl, by itself: its arguments are those that verl passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tsae.errors import TsaeError
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_finds_the_last_token_of_long_responses(dtype: torch.dtype) -> None:
    rewards, mask = torch.zeros(4, 4094, dtype=dtype), torch.ones(4, 4094, dtype=dtype)
    rewards[:2, -1] = 1
    found, _ = credit_advantage(rewards, mask, np.zeros(4))
    expected, _ = credit_advantage(rewards.float(), mask.float(), np.zeros(4))
    torch.testing.assert_close(found, expected)
    assert found[0, 0] > 0.8


def test_a_response_without_tokens_is_not_of_its_group() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [5.0, float("nan")]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    found, _ = credit_advantage(rewards, mask, np.array(["x"] * 3))
    alone, _ = credit_advantage(rewards[:2], mask[:2], np.array(["x"] * 2))
    torch.testing.assert_close(found, torch.cat([alone, torch.zeros(1, 2)]))
    assert not credit_advantage(rewards, torch.zeros(3, 2), np.array(["x"] * 3))[0].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(value: float) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, value]])
    with pytest.raises(TsaeError, match="1 rewards of response tokens are not finite"):
        credit_advantage(rewards, torch.ones(2, 2), np.array(["x", "x"]))
