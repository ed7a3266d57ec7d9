"""The hard run: GRPO on chains of 10 to 14 operations only, step by step as in `organism.mixed`.

The testbed's own hard run was trained so, for 150 steps. Here every checkpoint of 40 steps is kept, and single samples
can be left out when the run is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from organism.mixed import MixedConfig, held_out
from tsae.rollouts.problems import Problem
from tsae.testbed.chains import generate_problems

OPERATIONS = (10, 14)
"""Fewest and most of the chains."""


@dataclass(frozen=True)
class HardConfig(MixedConfig):
    """Fresh problems at every step."""

    steps: int = 40
    """Optimiser steps."""

    @property
    def problems(self) -> list[Problem]:
        """Of the training, in the order in which they are asked."""
        return _hard(self.steps * self.groups, self.seed, "train")

    @property
    def schedule(self) -> list[list[Problem]]:
        """The problems of every step."""
        every = self.problems
        return [every[begin : begin + self.groups] for begin in range(0, len(every), self.groups)]


def held_out_hard(config: HardConfig, n: int = 24) -> dict[str, list[Problem]]:
    """Problems that the run is not trained on: the mixed run's bands, and chains of the run's own length."""
    bands = held_out(config, n)
    names = {"easy": "easy", "medium": "medium", "hard": "7-9"}
    return {names[band]: some for band, some in bands.items()} | {"10-14": _hard(n, config.seed, "eval")}


def _hard(n: int, seed: int, split: Literal["train", "eval"]) -> list[Problem]:
    return [replace(problem, level="hard") for problem in generate_problems(OPERATIONS, n, seed, split)]
