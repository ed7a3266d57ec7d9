"""Statements of a diff: features moved, differ by outcome or more in one band, or two runs moved them oppositely.

An activation is g(z), with mean 0 and variance 1 over base trajectories, plus a level and the planted effect, so that
effects are Δ by construction; g is the identity for even features and an exponential for odd ones. Of the variance of
z 35 % is the problem's, 17 % that of problem and side, the rest the trajectory's: sides of a problem differ by chance
more than its trajectories tell, and so effects vary between problems. 60 problems (60 a band for interactions), 8
trajectories of each, 40 features. Δ is measured with the deviation that is estimated from these base trajectories, as
in any report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from statements import Line
from statements.tables import EOS, feature_table
from tsae import DiffConfig, FeatureTable, Rollouts, feature_diff
from tsae.diff.comparisons import Comparison, Rows, comparisons
from tsae.diff.effects import Contrast, draw

N_PROBLEMS, N_SAMPLES, N_FEATURES = 60, 8, 40
SHARES = {"problem": 0.35, "side": 0.17, "trajectory": 0.48}
BANDS = ("easy", "medium", "hard")
SUCCESS = {"easy": 0.7, "medium": 0.5, "hard": 0.3}
LEVEL = 8.0  # so high that no activation is cut at 0


def activations(rng: np.random.Generator, problem: np.ndarray, side: np.ndarray, n_features: int) -> np.ndarray:
    """(n_rows, n_features) with mean 0 and variance 1: of problem, problem and side, and trajectory."""

    def part(name: str, group: np.ndarray) -> np.ndarray:
        return math.sqrt(SHARES[name]) * rng.normal(size=(int(group.max()) + 1, n_features))[group]

    n_sides = int(side.max()) + 1
    z = part("problem", problem) + part("side", problem * n_sides + side) + part("trajectory", np.arange(len(problem)))
    skew = 0.6
    exponential = np.exp(skew * z - skew**2 / 2) - 1
    return np.where(np.arange(n_features) % 2, exponential / math.sqrt(math.expm1(skew**2)), z)


@dataclass(frozen=True)
class World:
    """Trajectories of some policies on the same problems."""

    problem: np.ndarray
    policy: np.ndarray
    success: np.ndarray
    band: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator, n_policies: int, *, n_problems: int = N_PROBLEMS) -> World:
        policy, problem, _ = (x.ravel() for x in np.indices((n_policies, n_problems, N_SAMPLES)))
        band = np.array(BANDS)[problem * 3 // n_problems]
        rate = np.array([SUCCESS[name] for name in band])
        return cls(problem, policy, rng.random(len(problem)) < rate, band)

    def side(self) -> np.ndarray:
        """Policy and outcome: what of a problem shares more than the problem."""
        return 2 * self.policy + self.success

    def table(self, readings: list[tuple[np.ndarray, np.ndarray]], *, split: bool = True) -> FeatureTable:
        """One-token responses.

        Args:
            readings: of every reader its rows and (n_rows, n_features) activations there, the base first.
            split: whether outcomes and bands are known.
        """
        names = ["base", "up", "down"]
        records = [
            {
                "problem_id": f"p{p}", "policy": names[k], "prompt_ids": [0], "response_ids": [2, EOS],
                "outcome": ("success" if s else "failure") if split else "unknown", "band": b if split else None,
            }
            for p, k, s, b in zip(self.problem, self.policy, self.success, self.band, strict=True)
        ]  # fmt: skip
        codes = [np.kron(values, np.array([[0.0], [1.0], [0.0]])) for _, values in readings]
        readers = [(name, rows) for name, (rows, _) in zip(names, readings, strict=False)]
        return feature_table(Rollouts.from_records(records), np.concatenate(codes), readers, special=(EOS,))


def one(table: FeatureTable, config: DiffConfig, **keys: str) -> tuple[Rows, Comparison]:
    rows = Rows.of(table, config)
    wanted = {"outcome": "all", "band": "all", **keys}
    found = comparisons(table, rows, config)
    return rows, next(of for of in found if all(getattr(of, name) == value for name, value in wanted.items()))


def rates(contrast: Contrast, delta: np.ndarray, config: DiffConfig) -> tuple[float, float]:
    """False among what is found, and share found of what is above the minimum effect."""
    assert contrast.inference is not None, contrast.note
    found = np.zeros(len(delta), dtype=bool)
    found[contrast.feature] = contrast.inference.q <= config.q
    sign = np.zeros(len(delta))
    sign[contrast.feature] = np.sign(contrast.inference.delta)
    right = found & (np.abs(delta) > config.minimum_effect + 1e-9) & (sign == np.sign(delta))
    planted = np.abs(delta) > config.minimum_effect + 1e-9
    false = float((found & ~right).sum() / max(found.sum(), 1))
    return false, float(right[planted].mean()) if planted.any() else math.nan


def effects(sizes: dict[float, int]) -> np.ndarray:
    """(N_FEATURES,) Δ with alternating signs in pairs, so that both shapes of features have both; 0 for the rest."""
    delta = np.zeros(N_FEATURES)
    order, start = np.random.default_rng(0).permutation(N_FEATURES), 0
    for size, n in sizes.items():
        delta[order[start : start + n]] = size * np.where(np.arange(n) % 2, -1, 1)
        start += n
    return delta


def in_deviations(delta: np.ndarray, added: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(n_rows, n_features) what is added to base trajectories where effects of size Δ are planted, with the deviation
    that they make themselves.

    Args:
        delta: (n_features,).
        added: what effects of a given size, in the unit of activations, add to every row.
    """
    size = delta
    for _ in range(50):
        size = delta * np.sqrt(1 + added(size).var(0))
    return added(size)


def moved(sizes: dict[float, int], seed: int, config: DiffConfig) -> tuple[float, float]:
    """The total shift of a run."""
    rng, delta = np.random.default_rng([seed, 1]), effects(sizes)
    world = World.of(rng, 2)
    values = LEVEL + activations(rng, world.problem, world.policy, N_FEATURES) + delta * (world.policy == 1)[:, None]
    run = np.flatnonzero(world.policy == 1)
    rows, of = one(
        world.table([(np.arange(len(values)), values), (run, values[run])]), config, kind="shift", part="total"
    )
    return rates(draw(rows, of, config), delta, config)


def moved_by_noise(size: float, seed: int, config: DiffConfig) -> tuple[float, float]:
    """The shift on the same trajectories of a reader whose weights noise changed: a little, everywhere."""
    rng = np.random.default_rng([seed, 2])
    world = World.of(rng, 1)
    values = LEVEL + activations(rng, world.problem, world.policy, N_FEATURES)
    of_problem = rng.normal(size=(N_PROBLEMS, N_FEATURES))[world.problem]
    sign = rng.choice([-1, 1], size=N_FEATURES)
    read = values + size * (sign + 0.3 * of_problem + 0.3 * rng.normal(size=values.shape))
    rows = np.arange(len(values))
    table = world.table([(rows, values), (rows, read)])
    drawn = draw(*one(table, config, kind="shift", part="same_trajectories"), config)
    return rates(drawn, np.zeros(N_FEATURES), config)


def by_outcome(sizes: dict[float, int], seed: int, config: DiffConfig) -> tuple[float, float]:
    """Success − failure within problem, at base."""
    rng, delta = np.random.default_rng([seed, 3]), effects(sizes)
    world = World.of(rng, 1)
    values = LEVEL + activations(rng, world.problem, world.side(), N_FEATURES)
    values += in_deviations(delta, lambda size: size * world.success[:, None])
    table = world.table([(np.arange(len(values)), values)])
    return rates(draw(*one(table, config, kind="outcome"), config), delta, config)


def interacts(sizes: dict[float, int], seed: int, config: DiffConfig) -> tuple[float, float]:
    """The outcome effect in hard problems − in medium ones; every feature has one in both."""
    rng, delta = np.random.default_rng([seed, 4]), effects(sizes)
    world = World.of(rng, 1, n_problems=3 * N_PROBLEMS)
    values = LEVEL + activations(rng, world.problem, world.side(), N_FEATURES)
    success, hard = world.success[:, None], (world.success & (world.band == "hard"))[:, None]
    values += in_deviations(delta, lambda size: 0.3 * success + size * hard)
    table = world.table([(np.arange(len(values)), values)])
    return rates(draw(*one(table, config, kind="interaction", band="hard-medium"), config), delta, config)


def opposed(up: np.ndarray, down: np.ndarray, seed: int, config: DiffConfig) -> tuple[float, float]:
    """Two runs that read the base's trajectories: features that one raised and the other lowered."""
    rng = np.random.default_rng([seed, 5])
    world = World.of(rng, 1)
    values = LEVEL + activations(rng, world.problem, world.policy, N_FEATURES)

    def read(delta: np.ndarray) -> np.ndarray:
        """What a run makes of a trajectory differs from problem to problem, and from trajectory to trajectory."""
        own = 0.3 * rng.normal(size=(N_PROBLEMS, N_FEATURES))[world.problem]
        return values + delta + own + 0.5 * rng.normal(size=values.shape)

    rows = np.arange(len(values))
    table = world.table([(rows, values), (rows, read(up)), (rows, read(down))], split=False)
    diff = feature_diff(table, config, progress=False)
    least = config.minimum_effect + 1e-9
    false = said = right = planted = 0
    for one_run, other in (("up", "down"), ("down", "up")):
        first, second = (up, down) if one_run == "up" else (down, up)
        true = (first > least) & (second < -least)
        found = diff.opposed(one_run, other).index.to_numpy()
        said += len(found)
        false += int((~true[found]).sum())
        right, planted = right + int(true[found].sum()), planted + int(true.sum())
    return false / max(said, 1), right / planted if planted else math.nan


LARGE = 0.5
NOTHING: dict[float, int] = {}
BOUNDARY = {0.1: N_FEATURES}
MIXED = {0.1: 20, LARGE: 10}
_UP = np.r_[np.full(10, LARGE), np.zeros(30)]
_DOWN = np.r_[np.full(10, -0.1), np.full(30, LARGE)]

LINES = [
    *(
        Line(name, where, partial(drawn, sizes))
        for name, drawn in (("moved", moved), ("differs by outcome", by_outcome), ("interaction", interacts))
        for where, sizes in (
            ("nothing", NOTHING),
            ("all at Δ = ±0.1", BOUNDARY),
            (f"10 at ±{LARGE}, 20 at ±0.1, 10 at 0", MIXED),
        )
    ),
    *(
        Line("moved", f"weights with noise, all at Δ = ±{size}", partial(moved_by_noise, size))
        for size in (0.003, 0.03)
    ),
    Line("opposed", "nothing", partial(opposed, np.zeros(N_FEATURES), np.zeros(N_FEATURES))),
    Line("opposed", "both runs raise all", partial(opposed, np.full(N_FEATURES, LARGE), np.full(N_FEATURES, LARGE))),
    Line("opposed", f"10 at +{LARGE} and −0.1, 30 raised by the second run", partial(opposed, _UP, _DOWN)),
    Line("opposed", f"10 at +{LARGE} and −{LARGE}, 30 at 0", partial(opposed, _UP, -_UP)),
]
