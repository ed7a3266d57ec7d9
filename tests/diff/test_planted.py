"""Planted truth: false discoveries, coverage and power where within-problem correlation is realistic."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import mannwhitneyu
from scipy.stats import t as student

from support.planted import CONTRASTS, contrasts_of, planted, token_level_q
from tsae.base.statistics import bootstrap_interval
from tsae.diff.comparisons import group_difference, within_problem_auroc
from tsae.diff.config import DiffConfig
from tsae.diff.inference import (
    detectable_delta,
    infer,
    interaction,
    outcomes,
    paired_inference,
    power,
    power_text,
)
from tsae.features.sparse_matrices import PickedColumns

QUICK = {"n_bootstrap": 400, "n_permutations": 1000, "bands": ("medium", "hard")}
DRAWS = DiffConfig(n_bootstrap=200, n_permutations=1000, confidence=0.95, seed=0, minimum_effect=0.0)


def measure(repeats: int, n_problems: int) -> dict[str, dict[str, float]]:
    """Mean false-discovery proportion with its Monte-Carlo error, coverage and power of every contrast.

    Of what differs at all (false, found), and of what moved (moved_false, moved_found).
    """
    rates: dict[str, list[tuple[float, ...]]] = {name: [] for name in CONTRASTS}
    for seed in range(repeats):
        world = planted(n_problems=n_problems, seed=seed)
        for name, contrast in contrasts_of(world, DiffConfig(seed=seed, **QUICK)).items():
            inference, truth = contrast.inference, world.truth[name][contrast.feature]
            if inference is None:  # by chance too few problems with both outcomes
                assert "are needed" in contrast.note
                continue
            assert inference.p.min() >= 1 / (QUICK["n_permutations"] + 1)
            differs = proportions(inference.q_differs, truth != 0)
            large = np.abs(truth * inference.delta / inference.difference) > 0.1
            moved = proportions(inference.q, large)
            covered = ((inference.low <= truth) & (truth <= inference.high)).mean()
            rates[name].append((*differs, *moved, covered))
            if name != "interaction":
                rates[name][-1] += proportions(token_level_q(world, name), world.truth[name] != 0)[:1]
    names = ("false", "found", "moved_false", "moved_found", "covered", "token_level_false")
    return {
        name: {
            **dict(zip(names, np.mean(found, axis=0), strict=False)),
            "error": float(np.std([f[0] for f in found]) / math.sqrt(len(found))),
            "moved_error": float(np.std([f[2] for f in found]) / math.sqrt(len(found))),
        }
        for name, found in rates.items()
    }


def proportions(q: np.ndarray, planted: np.ndarray) -> tuple[float, float]:
    """(false discoveries / discoveries, share of planted effects that are found)."""
    found = q <= 0.05
    return float((found & ~planted).sum() / max(found.sum(), 1)), float(found[planted].sum() / max(planted.sum(), 1))


@pytest.mark.parametrize(
    ("repeats", "n_problems"), [(20, 60), *(pytest.param(200, n, marks=pytest.mark.slow) for n in (24, 60, 180))]
)
def test_planted_effects_are_found_and_little_else(repeats: int, n_problems: int) -> None:
    rates = measure(repeats, n_problems)
    for name, rate in rates.items():
        assert rate["false"] <= 0.05 + 2.5 * rate["error"], (name, rate)
        assert rate["moved_false"] <= 0.05 + 2.5 * rate["moved_error"], (name, rate)
        assert 0.93 <= rate["covered"] <= 0.97, (name, rate)
    if n_problems >= 60:
        assert rates["shift"]["found"] > 0.8
        assert rates["outcome"]["found"] > 0.2
        assert rates["shift"]["moved_found"] > 0.5
    # The same check, which a test over tokens fails.
    for name in ("shift", "outcome"):
        assert rates[name]["token_level_false"] > 0.15, rates[name]


# --- the parts


def test_benjamini_yekutieli_finds_less() -> None:
    world = planted(n_problems=45, effect=0.45)
    config = {**QUICK, "n_permutations": 4000}  # enough for both
    plain, strict = (contrasts_of(world, DiffConfig(fdr=fdr, **config))["shift"] for fdr in ("bh", "by"))
    assert plain.inference is not None
    assert strict.inference is not None
    np.testing.assert_array_equal(plain.inference.p, strict.inference.p)
    np.testing.assert_array_equal(plain.inference.p_differs, strict.inference.p_differs)
    harmonic = sum(1 / k for k in range(1, 41))
    np.testing.assert_allclose(strict.inference.q, np.minimum(plain.inference.q * harmonic, 1))
    np.testing.assert_allclose(strict.inference.q_differs, np.minimum(plain.inference.q_differs * harmonic, 1))
    assert strict.detectable_delta > plain.detectable_delta


def test_effects_that_average_to_nothing_are_no_discovery() -> None:
    """Success raises a feature in one half of the problems and lowers it in the other: permuted labels alone reject."""
    rng = np.random.default_rng(0)
    size, n_problems, p = 16, 30, []
    problem = np.repeat(np.arange(n_problems), size)
    success = np.tile(np.arange(size) < 4, n_problems)
    for _ in range(20):
        effect = rng.normal(size=(n_problems, 30))[problem]
        values = sp.csr_array(rng.normal(size=effect.shape) + success[:, None] * effect)
        sides = np.flatnonzero(success), np.flatnonzero(~success)
        differences = group_difference(values, *sides, problem, np.arange(n_problems))
        p.append(
            infer(outcomes(differences, np.ones(30), PickedColumns.of(values), success, problem, DRAWS.seed), DRAWS).p
        )
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("n_problems", [5, 8, 20, 60])
@pytest.mark.parametrize("shape", ["normal", "heavy tails", "mostly nothing"])
def test_intervals_cover_with_few_problems(n_problems: int, shape: str) -> None:
    """2,000 features; percentile intervals cover 84 % with five problems. Where half the problems differ by nothing,
    intervals are wide rather than narrow."""
    rng = np.random.default_rng(n_problems)
    size = (n_problems, 2000)
    differences = {
        "normal": lambda: rng.normal(1, 2, size),
        "heavy tails": lambda: 1 + rng.standard_t(4, size),
        "mostly nothing": lambda: rng.normal(0, 2, size) * (rng.random(size) < 0.5),
    }[shape]()
    differences = differences[:, (differences != 0).sum(0) >= 5]
    low, high = bootstrap_interval(differences, 1000, 0.95, 0)
    truth = 0.0 if shape == "mostly nothing" else 1.0
    assert np.isfinite(high - low).all()
    covered = ((low <= truth) & (truth <= high)).mean()
    assert covered >= 0.93
    if n_problems >= 20:
        assert covered <= (0.985 if shape == "mostly nothing" else 0.975)


def test_intervals_approach_students_with_many_normal_problems() -> None:
    differences = np.random.default_rng(0).normal(1, 2, size=(300, 50))
    low, high = bootstrap_interval(differences, 2000, 0.9, 0)
    half = student.isf(0.05, 299) * differences.std(0, ddof=1) / np.sqrt(300)
    np.testing.assert_allclose((high - low) / 2, half, rtol=0.08)
    np.testing.assert_allclose((high + low) / 2, differences.mean(0))


def test_auroc_against_mann_whitney_in_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, size=(60, 7)).astype(float)  # with ties and zeros
    problem, side = rng.integers(0, 6, size=60), rng.random(60) < 0.4
    a, b, problems = np.flatnonzero(side), np.flatnonzero(~side), np.array([1, 2, 4, 5])
    expected = np.mean(
        [
            mannwhitneyu(values[a[problem[a] == i]], values[b[problem[b] == i]]).statistic
            / ((problem[a] == i).sum() * (problem[b] == i).sum())
            for i in problems
        ],
        axis=0,
    )
    for limit in (64_000_000, 1):
        monkeypatch.setattr("tsae.diff.comparisons._AUROC_BYTES", limit)
        found = within_problem_auroc(sp.csc_array(values), np.arange(values.shape[1]), a, b, problem, problems)
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)
        for side, share in zip((a, b), found[1:], strict=True):
            active = [(values[side[problem[side] == i]] > 0).mean(0) for i in problems]
            np.testing.assert_allclose(share, np.mean(active, axis=0), rtol=1e-6)


def test_auroc_counts_as_many_wins_as_there_are() -> None:
    """More than a byte holds."""
    values = np.concatenate([np.ones(3), np.zeros(300)])[:, None]
    found = within_problem_auroc(
        sp.csc_array(values), np.array([0]), np.arange(3), np.arange(3, 303), np.zeros(303, dtype=int), np.array([0])
    )
    assert [part.tolist() for part in found] == [[1.0], [1.0], [0.0]]


def test_interactions_keep_their_level_where_bands_vary_differently() -> None:
    """Ten problems with large differences against forty with small ones: permuted means alone reject too often."""
    rng = np.random.default_rng(0)
    p, covered = [], []
    for _ in range(20):
        few, many = 3 * rng.normal(size=(10, 50)), rng.normal(size=(40, 50))
        found = infer(interaction(few, many, np.ones(50), DRAWS.seed), DRAWS)
        p.append(found.p)
        covered.append((found.low <= 0) & (found.high >= 0))
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.025)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)
    same = np.full((6, 1), 2.0)
    nothing = infer(interaction(same, same, np.ones(1), DRAWS.seed), DRAWS)
    assert nothing.p.tolist() == [1]
    assert nothing.difference.tolist() == nothing.low.tolist() == nothing.high.tolist() == nothing.delta.tolist() == [0]
    apart = infer(interaction(np.full((9, 1), 2.0), np.zeros((9, 1)), np.ones(1), DRAWS.seed), DRAWS)
    assert 1 / 1001 <= apart.p[0] < 0.01


# --- power


def test_power_is_what_a_t_test_has() -> None:
    rng = np.random.default_rng(0)
    for n, d, level in ((12, 0.9, 0.05), (60, 0.4, 0.01)):
        x = rng.normal(d, 1, size=(n, 40_000))
        t = x.mean(0) / x.std(0, ddof=1) * np.sqrt(n)
        assert power(d, (n,), level) == pytest.approx((t > student.isf(level / 2, n - 1)).mean(), abs=0.01)
    # Cohen's table: two groups of 64 find d = .5 eight times in ten at .05; so does one of 34 pairs.
    assert power(0.5, (64, 64), 0.05) == pytest.approx(0.80, abs=0.01)
    assert power(0.5, (34,), 0.05) == pytest.approx(0.81, abs=0.01)


@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_the_detectable_effect_is_found_eight_times_in_ten(least: float) -> None:
    """Ten of forty features carry the effect that an earlier diff with ten discoveries called detectable."""
    n, scale, rng = 60, 2.0, np.random.default_rng(0)
    delta = detectable_delta(
        (n,), 1.3 / math.sqrt(n) / scale, minimum_effect=least, q=0.05, n_tested=40, n_discoveries=10
    )
    level, found = 0.05 * 10 / 40, []
    for seed in range(20):
        draws = replace(DRAWS, seed=seed, minimum_effect=least)
        p = paired_inference(rng.normal(delta * scale, 1.3, size=(n, 40)), np.full(40, scale), draws).p
        found.append((p <= level).mean())
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)


def test_more_problems_and_more_discoveries_find_smaller_effects() -> None:
    def least(n_problems: tuple[int, ...], n_discoveries: int = 0, **more: float) -> float:
        """Where a feature varies between problems by one standard deviation over trajectories."""
        error = math.sqrt(sum(1 / n for n in n_problems))
        settings = {"minimum_effect": 0.1, "q": 0.05, "n_tested": 100, **more}
        return detectable_delta(n_problems, error, n_discoveries=n_discoveries, **settings)

    few, many = least((20,)), least((180,))
    assert 0.1 < many < few < math.inf
    assert least((180,), 50) < many
    assert least((180, 20)) > least((180, 180))
    assert least((180,), minimum_effect=0.0) < many < least((180,), minimum_effect=0.3)
    # Five problems have 32 sign patterns.
    assert math.isinf(least((5,)))
    # At this rate even a feature at the boundary is found more often than that.
    assert least((400,), 100, q=0.9) == 0.1
    assert power_text(180, 0.251) == "with these 180 problems Δ = 0.25 is found 8 times in 10"
    assert "no p-value is small enough" in power_text(5, math.inf)
    # Nothing is known of features that are the same on both sides of every problem.
    nothing = detectable_delta((20,), 0.0, minimum_effect=0.1, q=0.05, n_tested=9, n_discoveries=0)
    assert math.isnan(nothing)
    assert "is not known" in power_text(20, nothing)
