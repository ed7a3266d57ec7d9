"""A whole diff against one written plainly: a feature at a time, with loops over problems and dense draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from bench_diff import _IDS, Bench, make_table

from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import feature_diff
from tsae.features.feature_table import FeatureTable

KEYS = ["kind", "checkpoint", "outcome", "feature"]


@pytest.mark.slow(ci=True)
def test_a_diff_is_that_of_the_plain_way() -> None:
    config = DiffConfig(n_bootstrap=100, n_permutations=1000)
    table = make_table(Bench(trajectories=192, tokens=30, k=4, d_sae=64))
    diff = feature_diff(table, config, progress=False)
    contrasts, controls = plain_diff(table, config)
    for found, plain, on, columns in (
        (diff.shifts, contrasts, KEYS, ("difference", "low", "high", "delta", "delta_low", "auroc")),
        (diff.confounds, controls, [*KEYS, "control"], ("difference", "low", "high")),
    ):
        both = found.merge(plain, on=on, suffixes=("", "_plain"))
        assert len(both) == len(found) > 0
        for column in columns:
            np.testing.assert_allclose(both[column], both[f"{column}_plain"], rtol=1e-4, atol=1e-6)
    both = diff.shifts.merge(contrasts, on=KEYS, suffixes=("", "_plain"))
    for p in ("p", "p_differs"):  # by other draws
        x, y = both[p].to_numpy(), both[f"{p}_plain"].to_numpy()
        assert (np.abs(x - y) / np.sqrt(x**2 / 100 + y * (1 - y) / config.n_permutations + 1e-8)).max() < 5.5


@dataclass(frozen=True)
class Sides:
    """Rows of the two sides by problem, and draws that all features share."""

    keys: dict[str, str]
    a: list[np.ndarray]
    b: list[np.ndarray]
    weights: np.ndarray
    signs: np.ndarray
    labels: np.ndarray | None
    """(draws, n_rows) weights of permuted labels, for outcomes."""


def plain_sides(table: FeatureTable, config: DiffConfig) -> list[Sides]:
    frame, rng = table.rollouts.frame, np.random.default_rng(1)
    problem = pd.factorize(frame.problem_id)[0]
    run, right = (frame.policy == "run").to_numpy(), (frame.outcome == "success").to_numpy()
    wanted = [
        ({"kind": "shift", "checkpoint": "run", "outcome": name}, run & mask, ~run & mask)
        for name, mask in (("all", run | ~run), ("success", right), ("failure", ~right))
    ]
    for name, mask in (("base", ~run), ("run", run)):
        wanted.append(({"kind": "outcome", "checkpoint": name, "outcome": "all"}, mask & right, mask & ~right))
    found = []
    for keys, on_a, on_b in wanted:
        both = np.intersect1d(problem[on_a], problem[on_b])
        a, b = ([np.flatnonzero(side & (problem == j)) for j in both] for side in (on_a, on_b))
        n = len(both)
        drawn = np.random.default_rng([config.seed, 3]).multinomial(n, np.full(n, 1 / n), size=config.n_bootstrap)
        signs = rng.integers(0, 2, size=(config.n_permutations, n)) * 2.0 - 1
        labels = None
        if keys["kind"] == "outcome":
            labels = np.zeros((config.n_permutations, len(problem)))
            for x, y in zip(a, b, strict=True):
                rows = rng.permuted(np.tile(np.concatenate([x, y]), (config.n_permutations, 1)), axis=1)
                np.put_along_axis(labels, rows[:, : len(x)], 1 / (len(x) * n), 1)
                np.put_along_axis(labels, rows[:, len(x) :], -1 / (len(y) * n), 1)
        found.append(Sides(keys, a, b, drawn / n, signs, labels))
    return found


def plain_diff(table: FeatureTable, config: DiffConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(contrasts, controls) of every feature."""
    contrasts, controls, frame = [], [], table.rollouts.frame
    every = plain_sides(table, config)
    counted, row = table.span_mask("response"), table.row_of_token
    token = np.flatnonzero(counted)
    by_row = np.split(token, np.flatnonzero(np.diff(row[token])) + 1)
    place = np.concatenate([np.arange(len(tokens)) for tokens in by_row])
    octave = np.full(len(row), -1)
    octave[token] = np.floor(2 * np.log2(place + 1))
    length = np.array([np.floor(2 * np.log2(len(tokens))) for tokens in by_row])

    def on_rows(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row[r] for r in rows])

    cells = {}
    for number, sides in enumerate(every):
        if sides.keys["outcome"] == "all":
            of_rows = [(x, y, length[x], length[y]) for x, y in zip(sides.a, sides.b, strict=True)]
            tokens = [(on_rows(x), on_rows(y)) for x, y in zip(sides.a, sides.b, strict=True)]
            of_tokens = [(x, y, octave[x], octave[y]) for x, y in tokens]
            cells[number] = (plain_cells(of_rows), plain_cells(of_tokens), plain_halves(tokens, config))
    for feature in range(table.n_features):
        column = table.codes[:, [feature]].toarray()[:, 0]
        means = np.array([column[tokens].mean(dtype=float) for tokens in by_row])
        for number, sides in enumerate(every):
            pairs = list(zip(sides.a, sides.b, strict=True))
            each = np.array([means[x].mean() - means[y].mean() for x, y in pairs])
            signs = [np.sign(means[x][:, None] - means[y]).mean() for x, y in pairs]
            scale = plain_scale(means, frame, sides.keys["checkpoint"], config)
            if scale == 0:
                continue
            found = plain_interval(each, sides.weights, config)
            found |= {f"delta{end}": found[of] / scale for end, of in (("", "difference"), ("_low", "low"))}
            p_differs = plain_p(sides, each, means, 0.0, found["error"], found["t"])
            p = max(p_differs, plain_p(sides, each, means, config.minimum_effect * scale, found["error"], found["t"]))
            numbers = {"p": p, "p_differs": p_differs, "auroc": 0.5 + np.mean(signs) / 2}
            contrasts.append({**sides.keys, "feature": feature, **found, **numbers})
            if number not in cells:
                continue
            by_length, by_position, halves = cells[number]
            residual = column.astype(float)
            for seen, mine in halves:
                count = np.bincount(table.token_ids[seen], minlength=_IDS)
                mean = np.bincount(table.token_ids[seen], column[seen], _IDS) / np.maximum(count, 1)
                mean[count == 0] = column[seen].mean()
                residual[mine] -= mean[table.token_ids[mine]]
            left = np.array([residual[tokens].mean() for tokens in by_row])
            controlled = {
                "length": plain_matched(means, by_length),
                "position": plain_matched(column, by_position),
                "token": np.array([left[x].mean() - left[y].mean() for x, y in pairs]),
            }
            for control, values in controlled.items():
                n = len(values)
                drawn = np.random.default_rng([config.seed, 3]).multinomial(n, np.full(n, 1 / n), config.n_bootstrap)
                found = plain_interval(values, drawn / n, config)
                ends = {name: found[name] for name in ("difference", "low", "high")}
                controls.append({**sides.keys, "feature": feature, "control": control, **ends})
    return pd.DataFrame(contrasts), pd.DataFrame(controls)


def plain_interval(each: np.ndarray, weights: np.ndarray, config: DiffConfig) -> dict[str, Any]:
    n, mean = len(each), each.mean()
    centred = each - mean
    spread = (centred**2).mean()
    shift = weights @ centred
    variance = np.maximum(weights @ centred**2 - shift**2, spread / n) / (n - 1)
    t = np.abs(shift) / np.sqrt(np.maximum(variance, np.finfo(np.float32).tiny))
    half = np.quantile(t, config.confidence) * np.sqrt(spread / (n - 1))
    return {"difference": mean, "low": mean - half, "high": mean + half, "error": np.sqrt(spread / (n - 1)), "t": t}


def plain_scale(means: np.ndarray, frame: pd.DataFrame, checkpoint: str, config: DiffConfig) -> float:
    """Standard deviation over base trajectories; pooled with the checkpoint's where the base hardly has the feature; at
    least half of that over both."""
    base, other = (means[(frame.policy == policy).to_numpy()] for policy in ("base", checkpoint))
    active = frame.problem_id[(frame.policy == "base").to_numpy() & (means > 0)].nunique()
    variance = base.var(ddof=1)
    if active < config.min_problems:
        sides = (base, other)
        variance = sum(x.var(ddof=1) * (len(x) - 1) for x in sides) / sum(len(x) - 1 for x in sides)
    both = (base.var(ddof=1) + other.var(ddof=1)) / 2 + (other.mean() - base.mean()) ** 2 / 4
    return float(np.sqrt(max(variance, both / 4)))


def plain_p(sides: Sides, each: np.ndarray, means: np.ndarray, least: float, error: float, t: np.ndarray) -> float:
    """p of the null that the mean of `each` is at most least, or the bootstrap's where the interval reaches it."""
    size, sign = abs(each.mean()), -1.0 if each.mean() < 0 else 1.0
    if size <= least:
        return 1.0
    right = np.zeros(len(means))
    right[np.concatenate(sides.a)] = 1
    drawn = [sides.signs @ (each * sign - least) / len(each)]
    if sides.labels is not None:
        drawn.append(sides.labels @ (means * sign - least * right))
    beyond = [(x >= (size - least) * (1 - 1e-9)) | (x <= -(size + least) * (1 - 1e-9)) for x in drawn]
    p = max(float(1 + x.sum()) / (1 + len(x)) for x in beyond)
    bootstrap = (1 + (t * error >= size - least).sum()) / (1 + len(t))
    return max(p, bootstrap) if np.quantile(t, 0.95) * error >= size - least else p


def plain_cells(pairs: Sequence[tuple[np.ndarray, ...]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of every problem its cells with both sides."""
    return [
        [(x[s == cell], y[t == cell]) for cell in np.intersect1d(s, t)]
        for x, y, s, t in pairs
        if len(np.intersect1d(s, t))
    ]


def plain_matched(values: np.ndarray, problems: list[list[tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
    return np.array(
        [
            np.average([values[x].mean(dtype=float) - values[y].mean(dtype=float) for x, y in cells],
                       weights=[min(len(x), len(y)) for x, y in cells])
            for cells in problems
        ]
    )  # fmt: skip


def plain_halves(
    tokens: list[tuple[np.ndarray, np.ndarray]], config: DiffConfig
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of both halves of the problems: tokens of the other half, and its own."""
    half = np.random.default_rng([config.seed, 6]).permutation(len(tokens)) % 2
    of = [
        np.concatenate([np.concatenate(pair) for pair, h in zip(tokens, half, strict=True) if h == i]) for i in (0, 1)
    ]
    return [(of[1], of[0]), (of[0], of[1])]
