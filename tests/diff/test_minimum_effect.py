"""The test that an effect is larger than a least one: against Student's t, against enumeration, and its error rates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import t as student

from tsae.diff.comparisons import group_difference
from tsae.diff.config import DiffConfig
from tsae.diff.inference import (
    Inference,
    infer,
    interaction,
    moved_p,
    outcomes,
    paired,
    paired_inference,
    q_values,
)
from tsae.diff.permutations import Count, band_permutations, label_permutations, sign_flips
from tsae.features.sparse_matrices import PickedColumns

DRAWS = DiffConfig(n_bootstrap=200, n_permutations=1000, confidence=0.95, seed=0, minimum_effect=0.1)


def share(count: Count, draws: int, n_features: int) -> np.ndarray:
    """(n_features,) of a test's draws, the share that is as extreme as what was observed."""
    return count(draws, np.arange(n_features))[0] / draws


def beyond(statistics: np.ndarray, observed: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Share of (draws, n) statistics that are as far off as an observed effect where the null is that it is `least`: as
    far above least, or as far below −least."""
    above = statistics >= observed - least - 1e-9
    below = statistics <= -(observed + least) + 1e-9
    return (above | below).mean(0)


# --- p-values against other ways to compute them


@pytest.mark.parametrize("least", [0.02, 0.1, 0.3])
def test_sign_flips_at_the_boundary_are_students_test_there(least: float) -> None:
    """400 normal features, 60 problems: one tail beyond the boundary, and the small one below the opposite boundary."""
    rng, n = np.random.default_rng(0), 60
    x = rng.normal(rng.uniform(-0.5, 0.5, size=400), 1, size=(n, 400))
    mean, error = np.abs(x.mean(0)), x.std(0, ddof=1) / np.sqrt(n)
    t_p = student.sf((mean - least) / error, n - 1) + student.sf((mean + least) / error, n - 1)
    draws = 20_000
    p = share(sign_flips(x, 0, np.full(400, least)), draws, 400)
    np.testing.assert_allclose(p, t_p, atol=4.5 * np.sqrt(0.25 / draws))
    # Where p is small, relative to itself: the draws' own error and no more than a tenth of it beside.
    small = (t_p > 0.002) & (t_p < 0.1)
    assert small.sum() > 50
    assert (np.abs(p - t_p)[small] < 0.1 * t_p[small] + 4 * np.sqrt(t_p[small] / draws)).all()


@pytest.mark.parametrize("n", [5, 7, 9])
@pytest.mark.parametrize("bounded", [False, True])
def test_sign_flips_approach_full_enumeration(n: int, bounded: bool) -> None:
    rng = np.random.default_rng(n)
    x = rng.normal(0.6, 1, size=(n, 12)) * np.where(np.arange(12) % 2, -1, 1)
    x[:, 0] = 1.0
    x[:, 1] = rng.integers(-2, 3, size=n)  # with ties
    least = bounded * rng.uniform(0, 0.4, size=12)
    sign = np.where(x.mean(0) < 0, -1, 1)
    flips = np.array(list(itertools.product((1, -1), repeat=n)))
    exact = beyond(flips @ (x * sign - least) / n, np.abs(x.mean(0)), least)
    assert exact[0] == (1 if bounded else 2) / 2**n  # no arrangement but its own, on one side or on both
    draws = 40_000
    found = share(sign_flips(x, 0, least if bounded else None), draws, 12)
    assert np.abs(found - exact).max() < 4.5 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize("bounded", [False, True])
def test_labels_approach_full_enumeration(bounded: bool) -> None:
    """Successes are moved by the least effect, and then labels are permuted within problems."""
    rng = np.random.default_rng(1)
    success = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1], dtype=bool)
    problem = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    values = rng.exponential(size=(11, 12)) + success[:, None] * np.linspace(-1.5, 1.5, 12)
    least = bounded * rng.uniform(0, 0.3, size=12)

    def statistic(of: np.ndarray, labels: np.ndarray) -> np.ndarray:
        each = [of[(problem == i) & labels].mean(0) - of[(problem == i) & ~labels].mean(0) for i in range(3)]
        return np.mean(each, axis=0)

    observed = statistic(values, success)
    moved = values * np.sign(observed) - least * success[:, None]
    arrangements = []
    groups = [np.flatnonzero(problem == i) for i in range(3)]
    for chosen in itertools.product(*(itertools.combinations(g, int(success[g].sum())) for g in groups)):
        labels = np.zeros(11, dtype=bool)
        labels[list(itertools.chain(*chosen))] = True
        arrangements.append(statistic(moved, labels))
    assert len(arrangements) == 4 * 3 * 6
    exact = beyond(np.array(arrangements), np.abs(observed), least)
    shuffled, draws = rng.permutation(11), 40_000
    picked, offset = PickedColumns.of(sp.csr_array(values[shuffled])), least if bounded else None
    count = label_permutations(picked, success[shuffled], problem[shuffled], 0, offset)
    assert np.abs(share(count, draws, 12) - exact).max() < 4.5 * np.sqrt(0.25 / draws)


def test_bands_at_the_boundary_approach_full_enumeration() -> None:
    """Five problems of one band and four of another; t of the moved band, as far off as what was observed."""
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(5, 12)) + np.linspace(-2, 2, 12), rng.normal(size=(4, 12))
    least = rng.uniform(0, 0.4, size=12)
    sign = np.sign(a.mean(0) - b.mean(0))
    both = np.concatenate([a * sign - least, b * sign])

    def parts(chosen: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        inside = np.isin(np.arange(9), chosen)
        x, y = both[inside], both[~inside]
        return x.mean(0) - y.mean(0), np.sqrt(x.var(0, ddof=1) / 5 + y.var(0, ddof=1) / 4)

    difference, error = parts((0, 1, 2, 3, 4))
    t = np.array([x / e for x, e in map(parts, itertools.combinations(range(9), 5))])
    exact = ((t >= difference / error - 1e-9) | (t <= -(difference + 2 * least) / error + 1e-9)).mean(0)
    assert len(t) == 126
    draws = 40_000
    found = share(band_permutations(a, b, 0, least), draws, 12)
    assert np.abs(found - exact).max() < 4.5 * np.sqrt(0.25 / draws)


# --- what an inference says


def inferences(least: float, seed: int = 0) -> dict[str, Inference]:
    """Paired, outcome and interaction inference on 60 features whose effects go from −.6 to .6 deviations."""
    rng, n, draws = np.random.default_rng(seed), 40, replace(DRAWS, minimum_effect=least, seed=seed)
    effect, scale = np.linspace(-0.6, 0.6, 60), rng.uniform(0.5, 3, size=60)
    problem, success = np.repeat(np.arange(n), 6), np.tile(np.arange(6) < 2, n)
    noise = rng.normal(size=(6 * n, 60))
    values = sp.csr_array(scale * (noise + effect * success[:, None]))
    sides = np.flatnonzero(success), np.flatnonzero(~success)
    differences = group_difference(values, *sides, problem, np.arange(n))
    pairs, *bands = (scale * rng.normal(mean, sd, size=(n, 60)) for mean, sd in ((effect, 1), (effect, 1), (0, 0.5)))
    return {
        "paired": paired_inference(pairs, scale, draws),
        "outcome": infer(outcomes(differences, scale, PickedColumns.of(values), success, problem, draws.seed), draws),
        "interaction": infer(interaction(*bands, scale, draws.seed), draws),
    }


def test_without_a_least_effect_both_tests_are_one() -> None:
    for name, found in inferences(0.0).items():
        np.testing.assert_array_equal(found.p, found.p_differs, err_msg=name)
        np.testing.assert_array_equal(found.q, found.q_differs, err_msg=name)
        # And it is the second test of every other inference.
        np.testing.assert_array_equal(inferences(0.1)[name].p_differs, found.p, err_msg=name)


@pytest.mark.parametrize("kind", ["paired", "outcome", "interaction"])
def test_what_moved_lies_beyond_the_least_effect_with_its_whole_interval(kind: str) -> None:
    found = inferences(0.1)[kind]
    reaches = (found.delta_low <= 0.1) & (found.delta_high >= -0.1)
    assert reaches.sum() > 10
    # p agrees with the interval, which holds 95 %.
    assert found.p[reaches].min() >= 0.04
    np.testing.assert_array_equal(found.p[np.abs(found.delta) <= 0.1], 1)
    assert (found.p >= found.p_differs).all()
    larger = inferences(0.3)[kind]
    assert (larger.p >= found.p).all()
    np.testing.assert_array_equal(larger.p_differs, found.p_differs)


def test_sizes_do_not_depend_on_the_unit() -> None:
    x = np.random.default_rng(0).normal(0.3, 1, size=(30, 50))
    unit = 2.0 ** np.random.default_rng(1).integers(-8, 8, size=50)
    one, other = paired_inference(x, np.ones(50), DRAWS), paired_inference(x * unit, unit, DRAWS)
    for name in ("delta", "delta_low", "delta_high", "p", "q", "p_differs", "error"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(one.delta, x.mean(0))
    np.testing.assert_allclose(one.error, x.std(0, ddof=1) / np.sqrt(30), rtol=1e-5)


def test_a_null_counts_what_the_whole_inference_counts() -> None:
    """Nulls draw the test of the size alone, and the bootstrap of features beyond the minimum effect alone."""
    x = np.random.default_rng(0).normal(0.3, 1, size=(40, 300))
    whole = paired_inference(x, np.ones(300), DRAWS)
    p = moved_p(paired(x, np.ones(300), DRAWS.seed), DRAWS)
    np.testing.assert_array_equal(p[np.abs(whole.delta) <= DRAWS.minimum_effect], 1)
    np.testing.assert_array_equal(np.maximum(p, whole.p_differs), whole.p)
    np.testing.assert_array_equal(q_values(p) <= 0.05, whole.q <= 0.05)
