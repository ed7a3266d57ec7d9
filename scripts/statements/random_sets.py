"""Edits that do more than those of random features: a chosen set of features, and random sets of its kind."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.random import Generator

from statements import Line
from tsae.causal.config import InterventionConfig
from tsae.causal.controls import beyond_random, overlap
from tsae.diff.config import DiffConfig

N_SETS, N_PROBLEMS = InterventionConfig().n_random, 60
REPEATS = 50
"""Edits of a draw, each with random sets of its own."""
PROMISED = 0.06
"""With the default's random sets; see `tsae.causal.controls`."""

KINDS = {"none": 0.0, "normal": 0.2, "heavy": 0.1 * math.sqrt(3), "one in ten": 0.15}
"""Kind -> standard deviation of the effects of sets."""
_TOLD = {
    "none": "sets have no effect",
    "normal": "sets' effects are normal",
    "heavy": "sets' effects have heavy tails (t, 3 df)",
    "one in ten": "one set in ten has an effect",
}


def exchangeable(rng: Generator, n_sets: int, n_problems: int = N_PROBLEMS, kind: str = "normal") -> np.ndarray:
    """(n_sets + 1, n_problems) effects of sets of one kind: a set's own effect, a problem's, and both together."""
    size = n_sets + 1
    effect = {
        "normal": lambda: rng.normal(0, KINDS[kind], size),
        "none": lambda: np.zeros(size),
        "heavy": lambda: rng.standard_t(3, size) * 0.1,
        "one in ten": lambda: 0.5 * (rng.random(size) < 0.1),
    }[kind]()
    noise = rng.normal(0, 0.5, (size, n_problems)) * (1 + np.abs(effect))[:, None]
    return effect[:, None] + rng.normal(0, 0.4, n_problems) + noise


def spread(kind: str) -> float:
    """Standard deviation of the means of random sets."""
    return math.sqrt(KINDS[kind] ** 2 + 0.5**2 / N_PROBLEMS)


def sharing(rng: Generator, n_sets: int = 10) -> tuple[np.ndarray, float]:
    """(n_sets + 1, N_PROBLEMS) effects, and the sets' overlap: 6 of 20 features, the chosen ones apart; effects of
    features add up."""
    effect = rng.normal(size=26) / np.sqrt(6)
    sets = [rng.choice(20, 6, replace=False).tolist() for _ in range(n_sets)]
    means = np.array([effect[20:].sum(), *(effect[s].sum() for s in sets)])
    return means[:, None] + rng.normal(0, 0.5, (n_sets + 1, N_PROBLEMS)), overlap(sets)


def said(drawn: np.ndarray, added: float = 0.0, shared: float = 0.0, confidence: float = 0.95) -> int:
    """1 or −1 where the first set, with what is added to it, is said to do more than the others, or less."""
    found = beyond_random(drawn[0] + added, drawn[1:], confidence, shared)
    return 1 if found.low > 0 else -1 if found.high < 0 else 0


def alike(kind: str, seed: int, config: DiffConfig) -> tuple[float, float]:
    """The chosen set is one more of the random ones."""
    rng = np.random.default_rng([seed, 9])
    found = [said(exchangeable(rng, N_SETS, kind=kind), confidence=config.confidence) for _ in range(REPEATS)]
    return float(np.mean(np.array(found) != 0)), math.nan


def alike_and_sharing(seed: int, config: DiffConfig) -> tuple[float, float]:
    """The same where random sets have features in common."""
    rng = np.random.default_rng([seed, 10])
    drawn = [sharing(rng) for _ in range(REPEATS)]
    found = [said(effects, shared=shared, confidence=config.confidence) for effects, shared in drawn]
    return float(np.mean(np.array(found) != 0)), math.nan


def larger(kind: str, size: float, seed: int, config: DiffConfig) -> tuple[float, float]:
    """The chosen set does `size` standard deviations of random sets more."""
    rng, added = np.random.default_rng([seed, 11]), size * spread(kind)
    found = np.array(
        [said(exchangeable(rng, N_SETS, kind=kind), added, confidence=config.confidence) for _ in range(REPEATS)]
    )
    return float((found < 0).mean()), float((found > 0).mean())


LINES = [
    *(
        Line("beyond random", f"nothing, {N_SETS} sets: {_TOLD[kind]}", partial(alike, kind), PROMISED)
        for kind in KINDS
    ),
    Line("beyond random", "nothing, 10 sets: share 2 of 6 features", alike_and_sharing, PROMISED),
    *(
        Line("beyond random", f"{size} SD more, {N_SETS} sets: {_TOLD[kind]}", partial(larger, kind, size), PROMISED)
        for size in (3, 4)
        for kind in KINDS
    ),
]
