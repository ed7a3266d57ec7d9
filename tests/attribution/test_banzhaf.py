"""Effects of units from random halves of them."""

from __future__ import annotations

import itertools

import numpy as np

from tsae.attribution.credit.banzhaf import banzhaf, random_halves


def test_planted_effects_are_found_again() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(12, 2))
    kept = random_halves(12, 100, seed=0)
    found = banzhaf(kept, kept @ truth)
    np.testing.assert_allclose(found.effects, truth, atol=1e-8)
    np.testing.assert_allclose(found.r2, 1)
    noisy = banzhaf(kept, kept @ truth + rng.normal(size=(100, 2)))
    assert ((noisy.low <= truth) & (truth <= noisy.high)).mean() > 0.85
    assert (noisy.r2 > 0.5).all()
    nothing = banzhaf(kept, rng.normal(size=(100, 2)))
    assert (nothing.r2 < 0.2).all()
    assert np.isnan(banzhaf(kept, np.zeros((100, 1))).r2).all()


def test_all_subsets_give_banzhaf_values() -> None:
    """By their definition: the mean of what a unit adds to every subset of the others."""
    rng, n = np.random.default_rng(1), 4
    subsets = np.array(list(itertools.product([False, True], repeat=n)))
    values = rng.normal(size=(len(subsets), 1))
    by_name = {tuple(subset): value[0] for subset, value in zip(subsets.tolist(), values, strict=True)}
    expected = []
    for i in range(n):
        without = [s for s in by_name if not s[i]]
        expected.append(np.mean([by_name[(*s[:i], True, *s[i + 1 :])] - by_name[s] for s in without]))
    np.testing.assert_allclose(banzhaf(subsets, values, draws=2).effects[:, 0], expected, atol=1e-10)


def test_halves_are_halves_on_the_average() -> None:
    kept = random_halves(40, 500, seed=3)
    assert kept.shape == (500, 40)
    assert abs(kept.mean() - 0.5) < 0.01
    assert kept.sum(1).std() > 2  # sizes vary, or the mean effect could not be told from the intercept
    assert (kept == random_halves(40, 500, seed=3)).all()
