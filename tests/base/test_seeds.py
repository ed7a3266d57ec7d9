from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tsae.attribution.config import AttributionConfig
from tsae.causal.config import InsertionConfig
from tsae.config import DemoConfig, RunConfig
from tsae.diff.config import DiffConfig, ExplainConfig
from tsae.errors import TsaeError
from tsae.rl.config import CreditConfig, CurriculumConfig
from tsae.rollouts.config import DifficultyConfig, SamplingConfig
from tsae.sae.config import TrainingConfig


@pytest.mark.parametrize(
    "config",
    [
        AttributionConfig,
        CreditConfig,
        CurriculumConfig,
        DemoConfig,
        DiffConfig,
        DifficultyConfig,
        ExplainConfig,
        InsertionConfig,
        lambda seed: RunConfig("log", seed=seed),
        SamplingConfig,
        TrainingConfig,
        lambda seed: TrainingConfig(data_seed=seed),
    ],
)
def test_a_seed_that_some_generator_would_not_take_is_refused(config: Callable[..., Any]) -> None:
    for seed in (0, 2**32 - 1):
        config(seed=seed)
    for seed in (-1, 2**32):
        with pytest.raises(TsaeError, match=f"seed={seed} must lie between 0 and"):
            config(seed=seed)
