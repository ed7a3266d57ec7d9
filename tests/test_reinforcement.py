"""Reinforcement: against a loop, its parts against their sum, its error rates, and predictions with known truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from builders import EOS, feature_table
from scipy.stats import spearmanr

from tsae import DiffConfig, FeatureTable, Rollouts, TsaeError, feature_diff, reinforcement
from tsae.diff.reinforcement import spearman

QUICK = DiffConfig(n_bootstrap=100, n_permutations=400)


def world(
    *,
    n_problems: int = 24,
    n_samples: int = 6,
    n_features: int = 12,
    effect: np.ndarray | float = 0.0,
    shift: np.ndarray | float = 0.0,
    seed: int = 0,
    bands: bool = True,
    **columns: Any,
) -> FeatureTable:
    """One-token responses of base and run: a problem's level, noise, `effect` on successes, `shift` on the run's.

    The first third of the problems is easy, and so on; the harder, the rarer are successes.
    """
    rng = np.random.default_rng(seed)
    level = rng.normal(4, 1, size=(n_problems, n_features))
    records, values = [], []
    for policy in ("base", "run"):
        for problem in range(n_problems):
            band = problem * 3 // n_problems
            for _ in range(n_samples):
                right = bool(rng.random() < (0.8, 0.5, 0.2)[band])
                records.append(
                    {
                        "problem_id": f"p{problem}",
                        "policy": policy,
                        "prompt_ids": [1],
                        "response_ids": [2, EOS],
                        "reward": float(right),
                        "outcome": "success" if right else "failure",
                        "band": ("easy", "medium", "hard")[band] if bands else None,
                        **columns,
                    }
                )
                values.append(level[problem] + effect * right + shift * (policy == "run"))
    values = np.maximum(values + 0.5 * rng.normal(size=(len(records), n_features)), 0)
    rollouts = Rollouts.from_records(records).with_advantages()
    codes = np.zeros((3 * len(records), n_features))
    codes[1::3] = values
    read = np.arange(len(records))
    return feature_table(rollouts, np.concatenate([codes, codes]), [("base", read), ("run", read)])


def test_reinforcement_is_the_covariance_within_groups() -> None:
    table = world(effect=np.linspace(-1, 1, 12))
    found = reinforcement(table, QUICK)
    frame = table.rollouts.frame
    values = table.codes.toarray()[1 : 3 * len(frame) : 3]
    by_problem = {}
    for problem, rows in frame[frame.policy == "base"].groupby("problem_id").groups.items():
        a, f = frame.advantage[rows].to_numpy(), values[rows]
        by_problem[problem] = [np.cov(a, f[:, j], bias=True)[0, 1] for j in range(12)]
    expected = np.mean(list(by_problem.values()), axis=0)
    total = found.table[found.table["by"] == "all"]
    np.testing.assert_allclose(total.reinforcement, expected, rtol=1e-5, atol=1e-9)
    for i, group in enumerate(found.groups.problem_id):
        np.testing.assert_allclose(found.per_group[[i]].toarray()[0], np.divide(by_problem[group], 24), atol=1e-7)
    hard = frame[(frame.policy == "base") & (frame.band == "hard")].problem_id.unique()
    part = found.table[(found.table["by"] == "band") & (found.table.part == "hard")]
    np.testing.assert_allclose(part.reinforcement, np.sum([by_problem[p] for p in hard], axis=0) / 24, atol=1e-7)


def test_parts_add_up_and_single_successes_are_named() -> None:
    found = reinforcement(world(effect=1.0), QUICK)
    table = found.table
    total = table[table["by"] == "all"].set_index("feature").reinforcement
    for by in ("band", "outcome", "group"):
        assert table[table["by"] == by].part.nunique() > 1
        np.testing.assert_allclose(table[table["by"] == by].groupby("feature").reinforcement.sum(), total, atol=1e-12)
    np.testing.assert_allclose(found.per_group.sum(0), total, atol=1e-9)
    groups = found.of_groups(3)
    assert groups.reinforcement.sum() == pytest.approx(total[3])
    assert groups.reinforcement.abs().is_monotonic_decreasing
    single = groups[groups.kind == "single success"]
    assert len(single) > 0
    assert (single.successes == 1).all()
    part = table[(table.part == "single success") & (table.feature == 3)].reinforcement
    assert single.reinforcement.sum() == pytest.approx(part.item())
    assert (found.top(3).q <= 0.05).all()
    assert (table.p > 0).all()
    assert np.isfinite(table.drop(columns=["by", "part"]).to_numpy(dtype=float)).all()
    # Groups without variance reinforce nothing.
    nothing = table[table.part.isin(["all successes", "all failures"])]
    assert (nothing.reinforcement == 0).all()
    assert (nothing.p == 1).all()


def test_groups_of_several_steps_are_not_mixed() -> None:
    """Advantages of two steps with different mean rewards: the covariance is taken within each."""
    table = world(n_samples=4)
    step = np.tile([1, 1, 2, 2], len(table.rollouts) // 4)
    rollouts = table.rollouts.with_column("step", step).with_advantages()
    found = reinforcement(with_rollouts(table, rollouts), QUICK)
    assert set(found.groups.step) == {1, 2}
    assert len(found.groups) == 48
    frame = rollouts.frame
    values = table.codes.toarray()[1 : 3 * len(frame) : 3, 0]
    expected = 0.0
    for _, rows in frame[frame.policy == "base"].groupby(["problem_id", "step"]).groups.items():
        expected += np.cov(frame.advantage[rows], values[rows], bias=True)[0, 1] / 2 / 24
    assert found.table.reinforcement[0] == pytest.approx(expected, rel=1e-5)


def test_nothing_is_found_where_advantage_and_features_are_independent() -> None:
    rejected = [
        (reinforcement(world(seed=seed), QUICK).table.query("part == 'all'").p <= 0.05).mean() for seed in range(40)
    ]
    # 480 tests, the twelve of a repetition independent.
    assert 0.02 <= np.mean(rejected) <= 0.08


def test_predictions_that_come_true_and_those_that_do_not() -> None:
    effect = np.linspace(-2, 2, 12)
    table = world(effect=effect, shift=effect)
    diff = feature_diff(table, QUICK, progress=False)
    found = reinforcement(table, QUICK).compare(diff)
    total = found[(found.predicted_on == "all") & (found.realised_on == "all") & (found.part == "total")].iloc[0]
    rows = diff.table(kind="shift", part="total", band="all", outcome="all")
    predicted = reinforcement(table, QUICK).table.query("part == 'all'").reinforcement
    assert total.rho == pytest.approx(spearmanr(predicted, rows.difference).statistic)
    assert total.rho > 0.95
    assert total.low <= total.rho <= total.high
    assert total.p < 0.05
    assert total.ceiling > 0.95
    assert total.rho_halves > 0.9
    assert total.matched  # trained on nothing that is a band: on all
    unrelated = world(effect=effect, shift=np.random.default_rng(3).permutation(effect))
    diff = feature_diff(unrelated, QUICK, progress=False)
    other = reinforcement(unrelated, QUICK).compare(diff)
    other = other[(other.predicted_on == "all") & (other.part == "policy")].iloc[0]
    assert abs(other.rho) < 0.7
    assert other.p > 0.05
    assert other.ceiling > 0.9
    # A ninth of the problems is too few to say anything, and no number is given.
    few = reinforcement(table, DiffConfig(n_bootstrap=100, n_permutations=100, min_problems=6))
    refused = few.compare(feature_diff(table, QUICK, progress=False)).query("predicted_on == 'hard'")
    assert refused.note.str.contains("8 and 24 problems, 12 features: too few").all()
    assert refused.rho.isna().all()
    with pytest.raises(TsaeError, match="is a diff of other rollouts"):
        few.compare(feature_diff(world(n_problems=12), QUICK, progress=False))


@pytest.mark.slow
def test_no_prediction_exceeds_chance_where_rewards_are_random() -> None:
    ps, few = [], DiffConfig(n_bootstrap=100, n_permutations=100)
    for seed in range(20):
        table = world(seed=seed, shift=np.linspace(-2, 2, 12), bands=False)
        found = reinforcement(table, few).compare(feature_diff(table, few, progress=False))
        ps.append(found[(found.predicted_on == "all") & (found.part == "total")].p.iloc[0])
    assert np.mean(np.array(ps) <= 0.2) <= 0.45  # binomial(20, .2) exceeds this 3 times in 1,000


def test_rank_correlations_agree_with_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, size=(6, 9)).astype(float), rng.normal(size=(6, 9))
    np.testing.assert_allclose(spearman(a, b), [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)])
    assert spearman(np.ones((1, 4)), b[:1, :4]) == [0]


def test_a_single_effect_among_many_features_is_found() -> None:
    """With 100 permutations no p-value of 120 features would pass: further ones are drawn."""
    effect = np.zeros(120)
    effect[7] = 3.0
    few = DiffConfig(n_bootstrap=100, n_permutations=100)
    found = reinforcement(world(n_features=120, effect=effect, bands=False), few).table.query("part == 'all'")
    assert found.p.min() == found.p[7] == 1 / 2401
    assert found.feature[found.q <= 0.05].tolist() == [7]


def with_rollouts(table: FeatureTable, rollouts: Rollouts) -> FeatureTable:
    return dataclasses.replace(table, rollouts=rollouts)


def test_what_is_not_reinforced_is_refused() -> None:
    table = world()

    def refused(match: str, **columns: Any) -> None:
        rollouts = table.rollouts
        for name, values in columns.items():
            rollouts = rollouts.with_column(name, values)
        with pytest.raises(TsaeError, match=match):
            reinforcement(with_rollouts(table, rollouts), QUICK)

    n = len(table.rollouts)
    for span in ("prompt", "last_prompt"):
        with pytest.raises(TsaeError, match=f"span='{span}' is the same for all rollouts of a problem"):
            reinforcement(table, DiffConfig(span=span))
    refused("144 of 144 trajectories have no advantage", advantage=[None] * n)
    refused("1 of 144 trajectories have no advantage", advantage=[None, *[0.5] * (n - 1)])
    refused("no group has rollouts that differ in advantage", advantage=[0.3] * n)
    refused("one problem only", problem_id=["p"] * n)
    with pytest.raises(TsaeError, match="base read no trajectory of 'other'"):
        reinforcement(table, QUICK, policy="other")
    with pytest.raises(TsaeError, match="no feature 12; there are 0 to 11"):
        reinforcement(table, QUICK).of_groups(12)
    without = reinforcement(world(bands=False), QUICK)
    assert "band" not in set(without.table["by"])
    unknown = world().rollouts.with_column("outcome", ["unknown"] * n)
    found = reinforcement(with_rollouts(table, unknown), QUICK)
    assert set(found.table.part) == {"all", "easy", "medium", "hard", "unknown", "unknown outcomes"}
    silent = dataclasses.replace(table, codes=table.codes * 0)
    assert reinforcement(silent, QUICK).table.empty
