"""The command line in tests: commands with their results, and functions that they name as module:function."""

from __future__ import annotations

from typing import Any

import tsae
from tsae.cli import main
from tsae.config import DemoConfig

COMMANDS = [
    ["run"],
    ["watch"],
    [],
    ["demo"],
    ["rollouts"],
    ["rollouts", "sample"],
    ["rollouts", "import"],
    ["rollouts", "bands"],
    ["rollouts", "difficulty"],
    ["rollouts", "behaviours"],
    ["drift"],
    ["capture"],
    ["store"],
    ["store", "show"],
    ["store", "check"],
    ["store", "statistics"],
    ["train"],
    ["evaluate"],
    ["push"],
    ["encode"],
    ["diff"],
    ["crosscoder"],
    ["attribute"],
    ["causal"],
    ["reinforcement"],
    ["influence"],
    ["explain"],
    ["claims"],
    ["report"],
    ["serve"],
    ["verify"],
]


SITE = "blocks.1.hook_resid_post"


def lucky(response: str, answer: str) -> bool:
    """A verifier that a random model passes now and then."""
    return len(response) % 2 == 0


def classes(prompt: str, response: Any) -> list[str]:
    return ["digit" if token.isdigit() else "other" for token in response]


def run(*args: object) -> None:
    main([str(a) for a in args])


def two_steps(prompt: str, answer: str) -> int:
    return 2


FAMILIES = {"numbers": ("digit",)}
"""Beside the annotator `classes`, for --families."""


def every_step(prompt: str, response: str) -> list[bool]:
    """A check of steps that finds every character right."""
    return [True for _ in response]


TINY = DemoConfig(
    problems=14,
    samples=4,
    band_samples=12,
    attribute=False,
    sae=tsae.SAEConfig(d_sae=64, k=4),
    training=tsae.TrainingConfig(tokens=40_000, batch_tokens=1024),
)
