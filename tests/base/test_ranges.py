"""Every config of every room refuses numbers that nothing can be computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from math import inf, nan
from typing import Any, get_type_hints

import pytest

from support.refusals import refuses
from tsae.attribution.config import AttributionConfig
from tsae.causal.config import CausalConfig, InsertionConfig, InterventionConfig
from tsae.config import DemoConfig, RunConfig
from tsae.diff.config import DiffConfig
from tsae.rollouts.config import DifficultyConfig

ROOMS = ("", "activations.", "attribution.", "causal.", "diff.", "rl.", "rollouts.", "sae.")
CONFIGS = [
    kind
    for module in (import_module(f"tsae.{room}config") for room in ROOMS)
    for kind in vars(module).values()
    if is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__
]
NEEDED = {"path": "log", "url": "http://localhost/v1"}
CONFIDENCES = (0.0, -0.5, 1.0, 0.9999999999999999)
"""Beyond what can be; intervals of one that rounds to 1 would be NaN."""


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_no_number_no_seed_and_no_confidence_is_refused(config: Callable[..., Any]) -> None:
    needed = {f.name: NEEDED[f.name] for f in fields(config) if f.default is f.default_factory is MISSING}  # type: ignore[arg-type]
    for name, kind in get_type_hints(config).items():
        wrong: list[Any] = []
        if kind in (float, float | None):
            wrong = [nan] if name == "max_norm" else [nan, inf]  # no token need be beyond the norm limit
        elif "float" in str(kind) and "tuple" in str(kind):
            wrong = [(nan, 1.0), (inf, 1.0)]
        elif name.endswith("seed"):
            wrong = [-1, 2**32]
            assert [getattr(config(**needed, **{name: seed}), name) for seed in (0, 2**32 - 1)] == [0, 2**32 - 1]
        if name == "max_norm":  # no token need be beyond it
            config(**needed, max_norm=inf)
        if name == "confidence":
            wrong += CONFIDENCES
            config(**needed, confidence=0.999999)
        for value in wrong:
            refuses(rf"\b{name}.*(is not finite|must be)", config, **{**needed, name: value})


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
