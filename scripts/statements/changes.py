"""Behaviours that rose or fell: paired changes of two policies that answer every problem eight times."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
from numpy.random import Generator

from statements import Line
from tsae.base.statistics import change_interval
from tsae.diff.config import DiffConfig
from tsae.report.story.facts import direction

SAMPLES = 8
REPEATS = 50
"""Behaviours of a draw, each on problems of its own."""
PROMISED = 0.06
"""See `tsae.base.statistics.FEWEST`."""


def binary(rng: Generator, p: np.ndarray, effect: np.ndarray | float = 0.0) -> np.ndarray:
    """(n,) differences of the shares of eight responses each."""
    after = rng.binomial(SAMPLES, np.clip(p + effect, 0, 1))
    return (after - rng.binomial(SAMPLES, p)) / SAMPLES


def long_tailed(rng: Generator, n: int) -> np.ndarray:
    """(n,) differences of mean lengths."""
    level = rng.lognormal(0, 0.5, (n, 1))
    a, b = (level * rng.lognormal(0, 0.8, (n, SAMPLES)) for _ in range(2))
    return np.asarray((a - b).mean(1))


WORLDS = {
    "binary, problems differ": lambda rng, n: binary(rng, rng.beta(0.7, 0.7, n)),
    "binary, 2 % of responses": lambda rng, n: binary(rng, np.full(n, 0.02)),
    "binary, in few problems": lambda rng, n: binary(rng, rng.beta(0.05, 2, n)),
    "normal": lambda rng, n: rng.normal(size=n),
    "long-tailed lengths": long_tailed,
    "rises .4 in 20 %, falls .1 in others": lambda rng, n: binary(
        rng, np.full(n, 0.5), np.where(rng.random(n) < 0.2, 0.4, -0.1)
    ),
    "rises .45 in 10 %, falls .05 in others": lambda rng, n: binary(
        rng, np.full(n, 0.5), np.where(rng.random(n) < 0.1, 0.45, -0.05)
    ),
}
"""(rng, n) -> (n,) differences within problems whose true mean is 0: policies answer alike, or what rises in few
problems falls a little in all others."""


def said(differences: np.ndarray, config: DiffConfig) -> int:
    """1 where the report says "rose", −1 where it says "fell"."""
    low, high = change_interval(differences, config.confidence)
    return direction(pd.Series({"change_low": low, "change_high": high}))


def unchanged(world: str, n_problems: int, seed: int, config: DiffConfig) -> tuple[float, float]:
    """What did not change, on average over problems."""
    rng = np.random.default_rng([seed, 7])
    found = np.array([said(WORLDS[world](rng, n_problems), config) for _ in range(REPEATS)])
    return float((found != 0).mean()), math.nan


def rises(size: float, n_problems: int, seed: int, config: DiffConfig) -> tuple[float, float]:
    """A behaviour of 20 to 60 % of a problem's responses that becomes more frequent by `size` everywhere."""
    rng = np.random.default_rng([seed, 8])
    found = np.array([said(binary(rng, rng.uniform(0.2, 0.6, n_problems), size), config) for _ in range(REPEATS)])
    return float((found < 0).mean()), float((found > 0).mean())


LINES = [
    *(
        Line("rose, fell", f"no mean change, {n} problems: {world}", partial(unchanged, world, n), PROMISED)
        for world in WORLDS
        for n in (8, 16, 60)
    ),
    *(
        Line("rose, fell", f"binary, rises {size} in all of {n} problems", partial(rises, size, n), PROMISED)
        for size, n in ((0.1, 60), (0.1, 16), (0.3, 8))
    ),
]
