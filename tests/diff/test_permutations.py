"""Draws as each feature needs them: valid p-values, discoveries that resolution does not hide, exact arrangements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import hypergeom, spearmanr

from support.builders import feature_table, make_rollouts
from tsae.diff.config import DiffConfig, FalseDiscoveries
from tsae.diff.feature_diff import feature_diff
from tsae.diff.inference import infer, interaction, most_draws, paired_inference, q_values, sequential_p
from tsae.diff.permutations import Count, band_permutations, label_permutations, weight_permutations
from tsae.features.sparse_matrices import PickedColumns, grouped_sums

DRAWS = DiffConfig(n_bootstrap=100, n_permutations=1000, confidence=0.95, seed=0, minimum_effect=0.0)


def counted(chance: np.ndarray, rng: np.random.Generator, made: np.ndarray | None = None) -> Count:
    """Draws that are as extreme with a given chance for every feature: its exact p."""

    def count(draws: int, features: np.ndarray) -> np.ndarray:
        if made is not None:
            made[features] += draws
        return rng.binomial(draws, chance[features])[None]

    return count


@pytest.mark.slow(ci=True)
def test_p_stays_valid_however_many_draws_it_had() -> None:
    """Under the null the exact p is uniform; nothing may be found below u more often than u."""
    rng, n = np.random.default_rng(0), 400_000
    made = np.zeros(n, dtype=int)
    chance = rng.random(n)
    p = sequential_p(counted(chance, rng, made), 1, n, 1000, 0.05, "bh")
    for u in (1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.101, 0.2, 0.3, 0.5, 0.9):
        assert (p <= u).mean() <= u + 4 * np.sqrt(u / n), u
    # And it is known to a tenth, in fewer draws where that is enough.
    clear = chance > 0.02
    assert np.std(p[clear] / chance[clear]) < 0.12
    assert np.median(made) == 250
    assert made[chance < 1e-4].min() >= 1000


@pytest.mark.parametrize("method", ["bh", pytest.param("by", marks=pytest.mark.slow)])
@pytest.mark.parametrize("planted", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 40, 1000))])
def test_false_discoveries_where_draws_depend_on_what_was_found(method: FalseDiscoveries, planted: int) -> None:
    rng, n = np.random.default_rng(planted), 5000
    false, found = [], []
    for _ in range(200):
        chance = rng.random(n)
        chance[:planted] = 10 ** rng.uniform(-9, -3, planted)
        discovered = q_values(sequential_p(counted(chance, rng), 1, n, 1000, 0.05, method), method) <= 0.05
        false.append(discovered[planted:].sum() / max(discovered.sum(), 1))
        exact = q_values(chance, method) <= 0.05
        found.append((discovered[:planted].sum(), exact[:planted].sum()))
    assert np.mean(false) <= 0.05 + 2.5 * np.std(false) / np.sqrt(len(false))
    if planted:
        here, there = np.sum(found, axis=0)
        assert here > 0.9 * there  # of what exact p-values would find


def test_a_single_effect_among_many_features_is_found() -> None:
    """2,000 features: a thousand draws alone give no p-value that passes, however large the effect."""
    rng = np.random.default_rng(0)
    differences = rng.normal(size=(60, 2000))
    differences[:, 7] += 2
    found = paired_inference(differences, np.ones(2000), DRAWS)
    assert most_draws(2000, 1000, 0.05, "bh") == 40_000
    assert found.p.min() == found.p[7] == 1 / 40_001
    assert np.flatnonzero(found.q <= 0.05).tolist() == [7]
    np.testing.assert_array_equal(paired_inference(differences, np.ones(2000), DRAWS).p, found.p)
    # Features are drawn together, but none changes what another gets.
    alone = paired_inference(differences[:, :8], np.ones(8), DRAWS)
    settled = found.p[:7] > 0.101
    np.testing.assert_array_equal(alone.p[:7][settled], found.p[:7][settled])


@pytest.mark.parametrize("written_out", [10_000, 3, 0])
def test_labels_are_drawn_uniformly_within_problems(monkeypatch: pytest.MonkeyPatch, written_out: int) -> None:
    """Two problems of five and three rows, in any order: every arrangement equally often.

    Arrangements of both, of the smaller or of neither are written out.
    """
    monkeypatch.setattr("tsae.diff.permutations._ARRANGEMENTS", written_out)
    problem, success = np.array([1, 0, 0, 1, 0, 0, 1, 0]), np.array([1, 1, 0, 0, 1, 0, 0, 0], dtype=bool)
    arrangements = [
        labels
        for labels in map(np.array, itertools.product((False, True), repeat=8))
        if labels[problem == 0].sum() == 2 and labels[problem == 1].sum() == 1
    ]
    assert len(arrangements) == 10 * 3
    # A feature an arrangement, whose difference is largest under that arrangement alone.
    values = np.array(arrangements).T.astype(float)
    draws = 30_000
    monkeypatch.setattr("tsae.diff.permutations._DENSE_BYTES", 1)  # feature by feature
    observed = sp.csr_array(values[:, [i for i, a in enumerate(arrangements) if (a == success).all()]])
    count = label_permutations(PickedColumns.of(observed), success, problem, 0)(draws, np.arange(1))[0, 0]
    assert count / draws == pytest.approx(1 / 30, abs=4 * np.sqrt(1 / 30 / draws))
    other = label_permutations(PickedColumns.of(sp.csr_array(values)), success, problem, 0)(2000, np.arange(30))[0]
    exact = []
    for feature in range(30):
        statistics = [statistic(values[:, feature], labels, problem) for labels in arrangements]
        exact.append((np.abs(statistics) >= abs(statistic(values[:, feature], success, problem)) - 1e-9).mean())
    assert np.abs(other / 2000 - exact).max() < 4.5 * np.sqrt(0.25 / 2000)


@pytest.mark.parametrize("written_out", [10_000, 30, 0])
@pytest.mark.parametrize("least", [None, 0.05])
def test_few_features_have_the_draws_that_many_have(
    least: float | None, written_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an arrangement adds is looked up for a few, where arrangements are written out."""
    monkeypatch.setattr("tsae.diff.permutations._ARRANGEMENTS", written_out)
    rng = np.random.default_rng(0)
    problem = rng.permutation(np.repeat(np.arange(30), rng.integers(2, 9, 30)))
    success = rng.random(len(problem)) < 0.4
    first, last = np.unique(problem, return_index=True)[1], len(problem) - 1 - np.unique(problem[::-1], True)[1]
    success[first], success[last] = True, False
    values = PickedColumns.of(sp.csr_array(rng.exponential(size=(len(problem), 40)) + 0.3 * success[:, None]))
    offset = None if least is None else np.full(40, least)
    some = np.array([3, 17, 39])
    monkeypatch.setattr("tsae.diff.permutations._FEW", 8)
    many = label_permutations(values, success, problem, 0, offset)(700, np.arange(40))[0]
    few = label_permutations(values, success, problem, 0, offset)(700, some)[0]
    np.testing.assert_array_equal(few, many[some])
    assert 0 < many[some].min() < many[some].max() < 700


def test_weights_are_permuted_within_groups_as_all_arrangements_are() -> None:
    """Two groups of three and four rows, mixed up, and one whose weights are 0, against all 3! · 4! arrangements."""
    rng = np.random.default_rng(0)
    group, values = np.array([3, 1, 3, 1, 3, 1, 3, 9, 9]), rng.normal(size=(9, 20))
    weights = rng.normal(size=9) * (group != 9)
    drawn = []
    for first in itertools.permutations(np.flatnonzero(group == 1)):
        for second in itertools.permutations(np.flatnonzero(group == 3)):
            order = np.arange(9)
            order[group == 1], order[group == 3] = first, second
            drawn.append(np.abs(weights[order] @ values))
    exact = (np.array(drawn) >= np.abs(weights @ values) - 1e-9).mean(0)
    count = weight_permutations(values, weights, group, 0)
    np.testing.assert_allclose(count(20_000, np.arange(20))[0] / 20_000, exact, atol=4 * np.sqrt(0.25 / 20_000))
    (of_some,) = weight_permutations(values, weights, group, 0)(20_000, np.array([4, 11]))
    np.testing.assert_array_equal(
        of_some, weight_permutations(values, weights, group, 0)(20_000, np.arange(20))[0, [4, 11]]
    )
    assert weight_permutations(values, 0 * weights, group, 0)(100, np.arange(20)).tolist() == [[100] * 20]


def statistic(values: np.ndarray, labels: np.ndarray, problem: np.ndarray) -> float:
    parts = [values[(problem == i) & labels].mean() - values[(problem == i) & ~labels].mean() for i in (0, 1)]
    return float(np.mean(parts))


def test_interactions_with_equal_arrangements_against_enumeration() -> None:
    """Five of ten problems have the effect, none of fifteen others: t depends on how many of the five are drawn."""
    a, b = np.zeros((10, 1)), np.zeros((15, 1))
    a[:5] = 0.3
    k = np.arange(6)
    mean_a, mean_b = k / 10, (5 - k) / 15
    variance = (mean_a - mean_a**2) / 9 + (mean_b - mean_b**2) / 14
    t = np.abs(mean_a - mean_b) / np.sqrt(variance)
    exact = hypergeom.pmf(k, 25, 5, 10)[t >= t[5] - 1e-9].sum()
    p = infer(interaction(a, b, np.ones(1), DRAWS.seed), replace(DRAWS, n_permutations=40_000)).p[0]
    assert p == pytest.approx(exact, rel=0.4)


def test_a_feature_without_any_effect_in_two_bands_has_a_p_of_one() -> None:
    """Every draw repeats the observed 0; counted once for either side, p would be 2."""
    a, b = np.zeros((10, 3)), np.zeros((16, 3))
    a[:, 1] = np.arange(10)
    p = sequential_p(band_permutations(a, b, 0), 1, 3, 1000, 0.05, "bh")
    assert p[[0, 2]].tolist() == [1, 1]
    assert p[1] < 0.05


def test_grouped_sums_are_those_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    dense = rng.random((50, 7)) * (rng.random((50, 7)) < 0.4)
    rows, group, weight = rng.integers(0, 50, 200), rng.integers(0, 30, 200) * 2, rng.normal(size=200)
    expected = np.zeros((61, 7))
    np.add.at(expected, group, weight[:, None] * dense[rows])
    for at_once, groups in ((1_000_000, 64), (1, 64), (20, 3)):
        monkeypatch.setattr("tsae.features.sparse_matrices._VALUES", at_once)
        monkeypatch.setattr("tsae.features.sparse_matrices._GROUPS", groups)
        values = sp.csr_array(dense)
        np.testing.assert_allclose(grouped_sums(values, rows, group, weight, 61), expected, atol=1e-12)
    assert not grouped_sums(sp.csr_array(dense), rows[:0], group[:0], weight[:0], 3).any()


def test_length_correlations_of_sparse_features_agree_with_scipy() -> None:
    """Most trajectories have a feature at exactly 0; some have it at the same value, and one feature is the length."""
    rollouts = make_rollouts(n_problems=12, n_samples=4)
    rng = np.random.default_rng(0)
    n = int(sum(rollouts.lengths(f"{part}_ids").sum() for part in ("prompt", "response")))
    codes = rng.integers(0, 3, (n, 7)) * (rng.random((n, 7)) < 0.05)
    lengths = rollouts.lengths("response_ids")
    codes[:, 6] = np.repeat(lengths, rollouts.lengths("prompt_ids") + lengths)
    table = feature_table(rollouts, codes, [("base", np.arange(48))])
    dense = table.row_means().toarray()
    assert 0.3 < (dense == 0).mean() < 0.9
    found = feature_diff(table, DRAWS, progress=False).features.length_correlation
    np.testing.assert_allclose(found, [spearmanr(column, lengths).statistic for column in dense.T], atol=1e-12)
    assert found[6] == pytest.approx(1)
