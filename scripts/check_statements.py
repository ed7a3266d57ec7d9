"""Planted truth: how often a report says what is not so, and how often it sees what is there.

    python scripts/check_statements.py
    python scripts/check_statements.py --only moved opposed --draws 1000

A statement is something a report says of features: that they moved, differ by outcome, differ more in one band, are
kept under a control, or that two runs moved them in opposite directions. Each is drawn many times from tables whose
truth is known, where nothing is there, at the very boundary of what counts, and where something is. Its false rate is
the mean over draws of false statements / statements (0 where none is made), which is what q promises; what it finds is
the mean share of what is planted.

The world: an activation is g(z), with mean 0 and variance 1 over base trajectories, plus a level and the planted
effect, so that effects are Δ by construction; g is the identity for even features and an exponential for odd ones. Of
the variance of z 35 % is the problem's, 17 % that of problem and side, the rest the trajectory's: sides of a problem
differ by chance more than its trajectories tell, and so effects vary between problems. 60 problems (60 a band for
interactions), 8 trajectories of each, 40 features. Δ is measured with the deviation that is estimated from these base
trajectories, as in any report. Of controls, “found” is the share of their verdicts that are right.

Ends with one line of JSON: ratio = the worst false rate / what was promised for it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import tyro

import tsae
from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES, confound_table
from tsae.diff.contrasts import Comparison, Contrast, Rows, comparisons, draw

N_PROBLEMS, N_SAMPLES, N_FEATURES = 60, 8, 40
SHARES = {"problem": 0.35, "side": 0.17, "trajectory": 0.48}
BANDS = ("easy", "medium", "hard")
SUCCESS = {"easy": 0.7, "medium": 0.5, "hard": 0.3}
LEVEL = 8.0  # so high that no activation is cut at 0
EOS = 1


@dataclass(frozen=True)
class CheckStatements:
    """Rates of false statements, and power."""

    draws: int = 200
    """Tables drawn for every line."""
    only: tuple[str, ...] = ()
    """Statements to check; all by default."""
    config: tsae.DiffConfig = field(
        default_factory=lambda: tsae.DiffConfig(n_bootstrap=200, n_permutations=1000, threads=1)
    )
    """Of the diffs."""


Draw = Callable[[int, tsae.DiffConfig], tuple[float, float]]
"""(seed, config) -> (false statements / statements, share found of what is planted or NaN where nothing is)."""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    statement: str
    where: str
    """What is planted, or that nothing is."""
    draw: Draw
    promised: float = 0.05
    """False rate that is promised."""


# --- worlds


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

    def table(self, readings: list[tuple[np.ndarray, np.ndarray]], *, split: bool = True) -> tsae.FeatureTable:
        """One-token responses.

        Args:
            readings: of every reader its rows and (n_rows, n_features) activations there, the base first.
            split: whether outcomes and bands are known.
        """
        names = ["base", "up", "down"]
        records = [
            {
                "problem_id": f"p{p}",
                "policy": names[k],
                "prompt_ids": [0],
                "response_ids": [2, EOS],
                "outcome": ("success" if s else "failure") if split else "unknown",
                "band": b if split else None,
            }
            for p, k, s, b in zip(self.problem, self.policy, self.success, self.band, strict=True)
        ]
        tokens = [np.kron(values, np.array([[0.0], [1.0], [0.0]])) for _, values in readings]
        lengths = [np.full(len(rows), 3) for rows, _ in readings]
        ids = np.tile([0, 2, EOS], sum(map(len, lengths)))
        return as_table(records, tokens, lengths, ids, [rows for rows, _ in readings])


def as_table(
    records: list[dict[str, Any]],
    codes: list[np.ndarray],
    lengths: list[np.ndarray],
    ids: np.ndarray,
    rows: list[np.ndarray],
) -> tsae.FeatureTable:
    """A table from dense codes of every reader's tokens."""
    readers = [
        {"id": id, "run": None if id == "base" else id, "step": i, "trained_on": None, "n_tokens": 1, "fve": 0.9}
        for i, id in enumerate(["base", "up", "down"][: len(rows)])
    ]
    return tsae.FeatureTable(
        codes=sp.csr_array(np.concatenate(codes).astype(np.float32)),
        token_ids=ids.astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]),
        reader=np.repeat(np.arange(len(rows), dtype=np.int32), list(map(len, rows))),
        trajectory=np.concatenate(rows),
        rollouts=tsae.Rollouts.from_records(records),
        info={"sae": {"d_high": 1, "site": "x"}, "readers": readers, "special_ids": [EOS]},
    )


def one(table: tsae.FeatureTable, config: tsae.DiffConfig, **keys: str) -> tuple[Rows, Comparison]:
    rows = Rows.of(table, config)
    wanted = {"outcome": "all", "band": "all", **keys}
    found = comparisons(table, rows, config)
    return rows, next(of for of in found if all(getattr(of, name) == value for name, value in wanted.items()))


def rates(contrast: Contrast, delta: np.ndarray, config: tsae.DiffConfig) -> tuple[float, float]:
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


# --- statements


def moved(sizes: dict[float, int], seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
    """The total shift of a run."""
    rng, delta = np.random.default_rng([seed, 1]), effects(sizes)
    world = World.of(rng, 2)
    values = LEVEL + activations(rng, world.problem, world.policy, N_FEATURES) + delta * (world.policy == 1)[:, None]
    run = np.flatnonzero(world.policy == 1)
    rows, of = one(
        world.table([(np.arange(len(values)), values), (run, values[run])]), config, kind="shift", part="total"
    )
    return rates(draw(rows, of, config), delta, config)


def moved_by_noise(size: float, seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
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


def by_outcome(sizes: dict[float, int], seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
    """Success − failure within problem, at base."""
    rng, delta = np.random.default_rng([seed, 3]), effects(sizes)
    world = World.of(rng, 1)
    values = LEVEL + activations(rng, world.problem, world.side(), N_FEATURES)
    values += in_deviations(delta, lambda size: size * world.success[:, None])
    table = world.table([(np.arange(len(values)), values)])
    return rates(draw(*one(table, config, kind="outcome"), config), delta, config)


def interacts(sizes: dict[float, int], seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
    """The outcome effect in hard problems − in medium ones; every feature has one in both."""
    rng, delta = np.random.default_rng([seed, 4]), effects(sizes)
    world = World.of(rng, 1, n_problems=3 * N_PROBLEMS)
    values = LEVEL + activations(rng, world.problem, world.side(), N_FEATURES)
    success, hard = world.success[:, None], (world.success & (world.band == "hard"))[:, None]
    values += in_deviations(delta, lambda size: 0.3 * success + size * hard)
    table = world.table([(np.arange(len(values)), values)])
    return rates(draw(*one(table, config, kind="interaction", band="hard-medium"), config), delta, config)


def opposed(up: np.ndarray, down: np.ndarray, seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
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
    diff = tsae.feature_diff(table, config, progress=False)
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


LENGTH, POSITION, TOKEN, REAL = (np.arange(i, N_FEATURES, 4) for i in range(4))
EXPLAINED = dict(zip(CONTROLS, (LENGTH, POSITION, TOKEN), strict=True))


def kept(verdict: str, control: str, seed: int, config: tsae.DiffConfig) -> tuple[float, float]:
    """What a control says of an outcome effect that it explains (false: survives), or of one that has nothing to do
    with it (false: does not survive), among the features that differ by outcome.

    Successes are longer and have one token more often. A quarter of the features follow a trajectory's length, a
    quarter the place of a token, a quarter the token, and a quarter differ by outcome.
    """
    rng = np.random.default_rng([seed, 6])
    world = World.of(rng, 1)
    right = world.success
    length = np.exp(rng.normal(np.where(right, 2.5, 2.1), 0.4)).astype(int).clip(3, 40)
    row = np.repeat(np.arange(len(right)), length)
    place = np.arange(len(row)) - np.repeat(length.cumsum() - length, length)
    token = np.where(rng.random(len(row)) < np.where(right, 0.4, 0.25)[row], 2, rng.integers(3, 9, len(row)))
    noise = activations(rng, world.problem, world.side(), N_FEATURES)[row] + 0.7 * rng.normal(
        size=(len(row), N_FEATURES)
    )
    noise[:, LENGTH] += 0.1 * length[row, None]
    noise[:, POSITION] += 0.2 * place[:, None]
    noise[:, TOKEN] += 4.0 * (token == 2)[:, None]
    noise[:, REAL] += 0.7 * right[row, None]
    # The prompt is one token of 0, and so is <eos>, which does not count.
    ends = length.cumsum()
    codes = np.insert(LEVEL + noise, np.sort(np.concatenate([ends - length, ends])), 0.0, axis=0)
    ids = np.insert(token, ends, EOS)
    starts = np.concatenate([[0], (ends + np.arange(1, len(ends) + 1))[:-1]])
    ids = np.insert(ids, starts, 0)
    records = [
        {
            "problem_id": f"p{p}",
            "policy": "base",
            "prompt_ids": [0],
            "response_ids": [*tokens.tolist(), EOS],
            "outcome": "success" if s else "failure",
        }
        for p, s, tokens in zip(world.problem, right, np.split(token, ends[:-1]), strict=True)
    ]
    table = as_table(records, [codes], [length + 2], ids, [np.arange(len(right))])
    rows, of = one(table, config, kind="outcome")
    contrast = draw(rows, of, config)
    assert contrast.inference is not None
    found = contrast.feature[contrast.inference.q <= config.q]
    controls = confound_table(table, rows, [contrast], config)
    said = controls[(controls.control == control) & controls.feature.isin(found)].set_index("feature").verdict
    of_verdict = EXPLAINED[control] if verdict == SURVIVES else REAL
    told = said[said.index.isin(of_verdict) & said.isin([SURVIVES, FAILS])]
    if not len(told):
        return 0.0, math.nan
    false = float((told == verdict).mean())
    return false, 1 - false


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
    *(Line("survives", f"{control} explains all", partial(kept, SURVIVES, control)) for control in CONTROLS),
    *(Line("does not survive", f"{control} explains nothing", partial(kept, FAILS, control)) for control in CONTROLS),
]
"""Whoever adds a statement to the report adds its lines here."""


def main() -> None:
    options = tyro.cli(CheckStatements, description=__doc__)
    rows: list[dict[str, Any]] = []
    print("| statement | planted | false | promised | found |\n|---|---|---|---|---|")
    for line in LINES:
        if options.only and line.statement not in options.only:
            continue
        start = time.process_time()
        drawn = np.array([line.draw(seed, options.config) for seed in range(options.draws)])
        false, error = float(drawn[:, 0].mean()), float(drawn[:, 0].std() / math.sqrt(len(drawn)))
        seen = drawn[~np.isnan(drawn[:, 1]), 1]
        found = float(seen.mean()) if len(seen) else None
        rows.append(
            {
                "statement": line.statement,
                "planted": line.where,
                "false": round(false, 4),
                "error": round(error, 4),
                "promised": line.promised,
                "found": None if found is None else round(found, 3),
                "seconds": round(time.process_time() - start, 1),
            }
        )
        told = "" if found is None else f"{found:.2f}"
        print(
            f"| {line.statement} | {line.where} | {false:.3f} ± {error:.3f} | {line.promised:g} | {told} |", flush=True
        )
    ratio = max(row["false"] / row["promised"] for row in rows)
    print(json.dumps({"name": "check_statements", "ratio": round(ratio, 2), "draws": options.draws, "rows": rows}))


if __name__ == "__main__":
    main()
