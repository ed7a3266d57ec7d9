from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import pytest
from pydantic.dataclasses import is_pydantic_dataclass

from support.refusals import refuses
from tsae.attribution.config import AttributionConfig
from tsae.causal.config import CausalConfig, InsertionConfig, InterventionConfig
from tsae.config import DemoConfig, RunConfig
from tsae.diff.config import DiffConfig, ExplainConfig, InfluenceConfig
from tsae.rl.config import CreditConfig, CurriculumConfig, ShapingConfig
from tsae.rollouts.config import DifficultyConfig, EndpointConfig, SamplingConfig
from tsae.sae.config import SAEConfig, TrainingConfig


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
        refuses(f"seed={seed} must", config, seed=seed)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (SAEConfig, "temporal_weight"),
        (SAEConfig, "group_weights"),
        (TrainingConfig, "learning_rate"),
        (SamplingConfig, "temperature"),
        (InfluenceConfig, "temperature"),
        (ShapingConfig, "bound"),
        (CreditConfig, "ridge"),
        (CurriculumConfig, "prior"),
        (AttributionConfig, "budget_gb"),
        (InterventionConfig, "amount"),
        (DiffConfig, "min_fve"),
        (EndpointConfig, "timeout"),
    ],
)
def test_what_is_no_number_is_refused(config: Callable[..., Any], name: str) -> None:
    needed = {"SAEConfig": {"d_sae": 8, "k": 2}, "EndpointConfig": {"url": "http://localhost/v1"}}
    for value in (float("nan"), float("inf")):
        given = {name: (value, 1.0) if name in ("group_weights", "prior") else value}
        refuses("is not finite", config, **needed.get(config.__name__, {}), **given)


@pytest.mark.parametrize("config", [DiffConfig, DifficultyConfig, InterventionConfig, InsertionConfig])
def test_confidences_that_round_to_1_are_refused(config: Callable[..., Any]) -> None:
    """Their intervals would be NaN."""
    for value in (0.0, -0.5, 1.0, 0.9999999999999999):
        refuses(r"confidence=.* must", config, confidence=value)
    config(confidence=0.999999)


def test_an_intervention_knows_its_modes_and_places() -> None:
    for odd in ({"mode": "abalte"}, {"tokens": "responses"}, {"backend": "hf"}):
        refuses(r"is none of|must be one of", InterventionConfig, **odd)


def test_no_token_need_be_beyond_the_norm_limit() -> None:
    assert TrainingConfig(max_norm=float("inf")).max_norm > 1e30
    refuses("max_norm=nan must be greater than 0", lambda: TrainingConfig(max_norm=float("nan")))


def test_every_config_looks_at_its_numbers() -> None:
    """A new config must do it too."""
    forgotten = []
    for room in ("", "activations.", "attribution.", "causal.", "diff.", "rl.", "rollouts.", "sae."):
        module = import_module(f"tsae.{room}config")
        for name, kind in vars(module).items():
            if not is_dataclass(kind) or getattr(kind, "__module__", "") != module.__name__:
                continue
            if any(re.search("float|seed", f"{f.name} {f.type}") for f in fields(kind)) and not is_pydantic_dataclass(
                kind
            ):
                forgotten.append(name)
    assert forgotten == []


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (AttributionConfig, "tokens_of"),
        (DemoConfig, "problems"),
        (CausalConfig, "n_random"),
        (DiffConfig, "noise_draws"),
        (DifficultyConfig, "n_draws"),
        (InsertionConfig, "n_bootstrap"),
        (InterventionConfig, "n_random"),
        (lambda **given: RunConfig("log", **given), "sample"),
    ],
)
def test_what_would_never_end_is_refused(config: Callable[..., Any], name: str) -> None:
    refuses(f"{name}=999.*(is more than|must be at most)", config, **{name: 999_999_999_999})
