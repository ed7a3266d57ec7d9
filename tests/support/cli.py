"""The command line in tests: commands with their results, and functions that they name as module:function."""

from __future__ import annotations

from typing import Any

import tsae
from tsae.cli import COMMANDS, main
from tsae.commands.helptext import subcommands
from tsae.config import DemoConfig


def commands(known: dict[str, type] = COMMANDS, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], type]:
    """The classes of all commands and groups, by their words."""
    found = {}
    for name, kind in known.items():
        found |= {(*words, name): kind, **commands(subcommands(kind), (*words, name))}
    return found


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
