"""Reinforcement: against a loop, its parts against their sum, its error rates, and predictions with known truth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from scipy.stats import t as student
from statements.reinforced import world

import tsae
from support.builders import feature_table, make_rollouts
from support.refusals import refuses
from tsae import DiffConfig, FeatureTable, Rollouts, TsaeError, feature_diff, reinforcement
from tsae.diff.comparisons import Rows
from tsae.diff.reinforcement import (
    Samples,
    _full_length,
    graded_groups,
    relative_probabilities,
    response_logprobs,
    spearman,
)
from tsae.report.terminal import reinforcement_text

QUICK = DiffConfig(n_bootstrap=100, n_permutations=400)


@pytest.mark.parametrize(
    ("outcomes", "advantages", "graded"),
    [
        ("sff", (2.0, -1.0, -1.0), 0),
        ("sff", (2.0, -0.5, -1.5), 1),  # failures differ
        ("ssf", (1.5, 0.5, -2.0), 1),  # successes differ
        ("sfu", (2.0, -1.0, -1.0), 1),  # a third kind: neither formula holds
    ],
)
def test_groups_in_which_advantages_say_more_than_outcomes(
    outcomes: str, advantages: tuple[float, ...], graded: int
) -> None:
    kind = {"s": "success", "f": "failure", "u": "unknown"}
    rows = [("a", kind[o], a) for o, a in zip(outcomes, advantages, strict=True)]
    rows += [("b", "success", 1.0), ("b", "failure", -1.0)]
    frame = pd.DataFrame(rows, columns=["problem_id", "outcome", "advantage"]).assign(policy="base")
    assert graded_groups(Samples.of(frame, None, "here")) == graded


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
    per_group = found.per_group["natural"]
    for i, group in enumerate(found.groups.problem_id):
        np.testing.assert_allclose(per_group[[i]].toarray()[0], np.divide(by_problem[group], 24), atol=1e-7)
    hard = frame[(frame.policy == "base") & (frame.band == "hard")].problem_id.unique()
    part = found.table[(found.table["by"] == "band") & (found.table.part == "hard")]
    np.testing.assert_allclose(part.reinforcement, np.sum([by_problem[p] for p in hard], axis=0) / 24, atol=1e-7)
    # In the feature's standard deviations over what the base read of its own.
    deviation = values[(frame.policy == "base").to_numpy()].std(0, ddof=1)
    for name in ("", "_low", "_high"):
        raw = total[name[1:] or "reinforcement"]
        np.testing.assert_allclose(total[f"delta{name}"], raw / deviation, rtol=1e-5, atol=1e-9)
    assert set(total.scale) == {"base"}


def test_deviations_are_those_of_the_diff() -> None:
    """Of features that the base lacks too, which the run's rollouts alone reinforce."""
    whole = world(effect=np.linspace(-1, 1, 12))
    codes = whole.codes.toarray().reshape(2, len(whole.rollouts.frame), 3, 12)
    codes[:, (whole.rollouts.frame.policy == "base").to_numpy(), :, :4] = 0
    readers = [(reader, whole.trajectory[whole.rows(reader=reader)]) for reader in ("base", "run")]
    table = feature_table(whole.rollouts, codes.reshape(-1, 12), readers)
    found = reinforcement(table, QUICK, policy="run").table
    total = found[found["by"] == "all"].set_index("feature")
    assert total.scale.tolist() == ["floored"] * 4 + ["base"] * 8
    scale = Rows.of(table, QUICK).scales["run"]
    assert scale.kind.tolist() == total.scale.tolist()
    np.testing.assert_allclose(total.reinforcement / total.delta, scale.deviation, rtol=1e-6)


def test_parts_add_up_and_single_successes_are_named() -> None:
    found = reinforcement(world(effect=1.0), QUICK)
    table = found.table
    total = table[table["by"] == "all"].set_index("feature").reinforcement
    for by in ("band", "group"):
        assert table[table["by"] == by].part.nunique() > 1
        np.testing.assert_allclose(table[table["by"] == by].groupby("feature").reinforcement.sum(), total, atol=1e-12)
    np.testing.assert_allclose(found.per_group["natural"].sum(0), total, atol=1e-9)
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
    assert np.isfinite(table.drop(columns=["gradient", "by", "part", "scale"]).to_numpy(dtype=float)).all()
    # Groups without variance reinforce nothing.
    nothing = table[table.part.isin(["all successes", "all failures"])]
    assert (nothing.reinforcement == 0).all()
    assert (nothing.p == 1).all()


def test_what_successes_carry_is_arithmetic_where_rewards_say_right_or_wrong() -> None:
    """Successes carry (n − k)/n of every feature's covariance, whatever the feature: no finding, so it is not shown."""
    table = world(effect=np.linspace(-1, 1, 12))
    found = reinforcement(table, QUICK)
    assert "outcome" not in set(found.table["by"])
    assert "(n − k)/n of every feature's covariance" in found.notes[0]
    assert found.notes[0] in reinforcement_text(found)
    samples, values = found.samples, table.row_means()[found.picked].toarray()
    right = (samples.frame.outcome == "success").to_numpy()
    products = samples.weight[:, None] * samples.moved(values, "natural")
    for group in np.unique(samples.group):
        rows = samples.group == group
        share = products[rows & right].sum(0)
        np.testing.assert_allclose(share, (~right[rows]).mean() * products[rows].sum(0), atol=1e-7)
    # With shaped rewards it depends on the feature, and is shown.
    reward = table.rollouts.frame.reward + np.random.default_rng(1).uniform(0, 0.5, len(table.rollouts))
    shaped = reinforcement(with_rollouts(table, table.rollouts.with_column("reward", reward).with_advantages()), QUICK)
    part = shaped.table[shaped.table["by"] == "outcome"].groupby("feature").reinforcement.sum()
    total = shaped.table[shaped.table["by"] == "all"].set_index("feature").reinforcement
    np.testing.assert_allclose(part, total, atol=1e-12)
    products = shaped.samples.weight[:, None] * shaped.samples.moved(values, "natural")
    of_successes = shaped.table[shaped.table.part == "success"].set_index("feature").reinforcement
    np.testing.assert_allclose(of_successes, products[right].sum(0)[of_successes.index], atol=1e-6)
    assert not any("outcome" in note for note in shaped.notes)
    # Where that is so in one group alone, it is said.
    one = reward.where(table.rollouts.frame.problem_id == "p5", table.rollouts.frame.reward)
    mixed = with_rollouts(table, table.rollouts.with_column("reward", one).with_advantages())
    assert reinforcement(mixed, QUICK).notes[0].startswith("In 1 of ")


# --- natural and vanilla gradients


def free_policy(theta: np.ndarray) -> np.ndarray:
    return np.exp(theta - theta.max()) / np.exp(theta - theta.max()).sum()


def test_both_gradients_against_steps_of_a_policy_that_is_free_in_every_response() -> None:
    """Ten responses with probabilities of their own: the realised change of a feature's mean after a small step."""
    rng = np.random.default_rng(0)
    theta, advantage, feature = rng.normal(0, 1.5, 10), rng.normal(size=10), rng.normal(size=10)
    pi = free_policy(theta)
    steps = {"natural": advantage - pi @ advantage, "vanilla": pi * (advantage - pi @ advantage)}
    drawn = rng.choice(10, 400_000, p=pi)  # rollouts
    group = np.zeros(len(drawn), dtype=int)
    for gradient, step in steps.items():
        change = (free_policy(theta + 1e-5 * step) - pi) @ feature / 1e-5
        weight = relative_probabilities(np.log(pi)[drawn], group) if gradient == "vanilla" else np.ones(len(drawn))
        a, f = advantage[drawn] - advantage[drawn].mean(), feature[drawn] - feature[drawn].mean()
        scale = (pi**2).sum() if gradient == "vanilla" else 1.0  # the mean of π that weights are relative to
        assert (weight * a * f).mean() * scale == pytest.approx(change, rel=0.02)
    # They can have opposite signs: one probable response against fifty improbable ones.
    pi = np.array([0.5, *[0.01] * 50])
    a, f = np.array([-0.5, *[1.5] * 25, *[-0.5] * 25]), np.array([0.5, *[0.5] * 25, *[-1.5] * 25])
    assert pi @ a == pytest.approx(0)
    assert pi @ f == pytest.approx(0)
    assert pi @ (a * f) > 0.2
    assert pi**2 @ (a * f) < -0.05


def test_vanilla_weights_rollouts_by_their_probability() -> None:
    table = world(effect=np.linspace(-1, 1, 12))
    frame = table.rollouts.frame
    # So long that every probability underflows.
    logprob = np.random.default_rng(4).normal(-2000, 1.5, len(frame))
    found = reinforcement(with_rollouts(table, table.rollouts.with_column("logprob", logprob)), QUICK)
    assert list(found.per_group) == ["natural", "vanilla"]
    values, expected, effective = table.codes.toarray()[1 : 3 * len(frame) : 3], np.zeros(12), {}
    for problem, rows in frame[frame.policy == "base"].groupby("problem_id").groups.items():
        a, f = frame.advantage[rows].to_numpy(), values[rows]
        pi = np.exp(logprob[rows] - logprob[rows].max())
        w = pi / pi.mean()
        expected += (w * (a - a.mean())) @ (f - f.mean(0)) / len(rows) / 24
        effective[problem] = pi.sum() ** 2 / (pi**2).sum()
    whole = found.table[found.table["by"] == "all"].set_index("gradient")
    np.testing.assert_allclose(whole.loc["vanilla"].reinforcement, expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.per_group["vanilla"].sum(0), expected, atol=1e-7)
    np.testing.assert_allclose(found.groups.effective, found.groups.problem_id.map(effective))
    pd.testing.assert_frame_equal(
        found.table[found.table.gradient == "natural"], reinforcement(table, QUICK).table, check_like=True
    )
    text = reinforcement_text(found)
    assert "natural gradient, Cov(A, f)" in text
    assert "vanilla gradient, Cov(πA, f)" in text
    vanilla = found.top(3, gradient="vanilla")
    assert found.of_groups(int(vanilla.feature[0]), gradient="vanilla").reinforcement.sum() == pytest.approx(
        vanilla.reinforcement[0], rel=1e-4
    )
    # Equally probable: the same.
    equal = reinforcement(with_rollouts(table, table.rollouts.with_column("logprob", [-3.0] * len(frame))), QUICK).table
    both = [equal[equal.gradient == g].drop(columns="gradient").reset_index(drop=True) for g in ("natural", "vanilla")]
    pd.testing.assert_frame_equal(*both)
    with pytest.raises(TsaeError, match="144 log-probabilities are above 0"):
        reinforcement(with_rollouts(table, table.rollouts.with_column("logprob", [1.0] * len(frame))), QUICK)
    # One is missing: natural alone, and why.
    some = [None, *[-3.0] * (len(frame) - 1)]
    partly = reinforcement(with_rollouts(table, table.rollouts.with_column("logprob", some)), QUICK)
    assert list(partly.per_group) == ["natural"]
    assert "needs every response's log-probability" in partly.notes[-1]
    refuses("has no vanilla gradient; there is natural", partly.top, gradient="vanilla")


def test_checkpoints_read_the_probabilities_of_what_they_sampled(llama: Path, fingerprint: str) -> None:
    checkpoint = tsae.Checkpoint("base", str(llama))
    rollouts = make_rollouts(n_problems=4, tokenizer=fingerprint)
    model = checkpoint.load_model()
    rows, expected = np.array([7, 2, 9]), []
    for row in rows:
        prompt, response = rollouts.tokens(int(row))
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            log = torch.log_softmax(model(ids).logits[0].double(), -1)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        expected.append(log[at, ids[0, len(prompt) :]].sum().item())
    found = response_logprobs(rollouts, rows, tsae.CheckpointSeries((checkpoint,)), batch_tokens=30)
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    other = tsae.CheckpointSeries((tsae.Checkpoint("other", str(llama)),))
    assert response_logprobs(rollouts, rows, other) is None
    # A log that lacks them gives the same as a log that has them.
    rollouts, every = rollouts.with_advantages(), np.arange(len(rollouts))
    n_tokens = int((rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")).sum())
    table = feature_table(rollouts, np.random.default_rng(0).random((n_tokens, 3)), [("base", every)])
    read = reinforcement(table, QUICK, series=tsae.CheckpointSeries((checkpoint,)))
    logged = rollouts.with_column("logprob", response_logprobs(rollouts, every, tsae.CheckpointSeries((checkpoint,))))
    pd.testing.assert_frame_equal(read.table, reinforcement(with_rollouts(table, logged), QUICK).table)
    assert set(read.per_group) == {"natural", "vanilla"}


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


@pytest.mark.slow(ci=True)  # measures an error rate
def test_nothing_is_found_where_advantage_and_features_are_independent() -> None:
    """Probabilities go with the features: it is advantages that are permuted, not probabilities."""
    rejected = []
    for seed in range(40):
        table = world(seed=seed)
        logprob = table.codes.toarray()[1 : 3 * len(table.rollouts) : 3].sum(1) - 100
        found = reinforcement(with_rollouts(table, table.rollouts.with_column("logprob", logprob)), QUICK).table
        whole = found[found.part == "all"].groupby("gradient").p
        rejected.append(whole.agg(lambda p: (p <= 0.05).mean())[["natural", "vanilla"]])
    # 480 tests each, the twelve of a repetition independent.
    natural, vanilla = np.mean(rejected, axis=0)
    assert 0.02 <= natural <= 0.08
    assert vanilla <= 0.08


@pytest.mark.slow(ci=True)
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
    other = reinforcement(unrelated, QUICK).compare(feature_diff(unrelated, QUICK, progress=False))
    other = other[(other.predicted_on == "all") & (other.part == "policy")].iloc[0]
    assert abs(other.rho) < 0.7
    assert other.p > 0.05
    # Permuted advantages order independent features at random, so p is that of Spearman's t with 12 features. The
    # standard error of 100 draws is 0.05 at most.
    t = other.rho * np.sqrt(10 / (1 - other.rho**2))
    assert other.p == pytest.approx(2 * student.sf(abs(t), 10), abs=0.15)
    assert other.ceiling > 0.9
    # A ninth of the problems is too few to say anything, and no number is given.
    few = reinforcement(table, DiffConfig(n_bootstrap=100, n_permutations=100, min_problems=6))
    refused = few.compare(diff).query("predicted_on == 'hard'")
    assert refused.note.str.contains("8 and 24 problems, 12 features: too few").all()
    assert refused.rho.isna().all()
    # Eight are as many as twice the least number of problems, and three features make ranks.
    enough = reinforcement(table, dataclasses.replace(QUICK, min_problems=4))
    assert (enough.compare(diff).query("predicted_on == 'hard'").note == "").all()
    for n, note in ((3, ""), (2, "24 and 24 problems, 2 features: too few")):
        some = dataclasses.replace(enough, table=enough.table[enough.table.feature < n])
        assert set(some.compare(diff).query("predicted_on == 'all'").note) == {note}
    with pytest.raises(TsaeError, match="is a diff of other rollouts"):
        few.compare(feature_diff(world(n_problems=12), QUICK, progress=False))


@pytest.mark.slow(ci=True)
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
    # Spearman and Brown: two halves that correlate at .5 make a whole of .67.
    assert [_full_length(r) for r in (0.5, 0.0, -0.2, -1.0)] == [pytest.approx(2 / 3), 0, 0, 0]


def with_rollouts(table: FeatureTable, rollouts: Rollouts) -> FeatureTable:
    return dataclasses.replace(table, rollouts=rollouts)


def test_what_is_not_reinforced_is_refused() -> None:
    table = world()

    def refused(match: str, **columns: Any) -> None:
        rollouts = table.rollouts
        for name, values in columns.items():
            rollouts = rollouts.with_column(name, values)
        refuses(match, lambda: reinforcement(with_rollouts(table, rollouts), QUICK))

    n = len(table.rollouts)
    refused("144 of 144 trajectories have no advantage", advantage=[None] * n)
    refused("1 of 144 trajectories have no advantage", advantage=[None, *[0.5] * (n - 1)])
    refused("no group has rollouts that differ in advantage", advantage=[0.3] * n)
    refused("one problem only", problem_id=["p"] * n)
    for ask, said in (
        (lambda: reinforcement(table, DiffConfig(span="prompt")), "span='prompt' is the same for all rollouts"),
        (lambda: reinforcement(table, DiffConfig(span="last_prompt")), "span='last_prompt' is the same for all"),
        (lambda: reinforcement(table, QUICK, policy="other"), "base read no trajectory of 'other'"),
        (lambda: reinforcement(table, QUICK).of_groups(12), "no feature 12; there are 0 to 11"),
    ):
        refuses(said, ask)
    without = reinforcement(world(bands=False), QUICK)
    assert "band" not in set(without.table["by"])
    unknown = world().rollouts.with_column("outcome", ["unknown"] * n)
    found = reinforcement(with_rollouts(table, unknown), QUICK)
    # With outcomes unknown, right and wrong rewards are graded among the unknown.
    assert set(found.table.part) == {"all", "easy", "medium", "hard", "unknown", "unknown outcomes"}
    silent = dataclasses.replace(table, codes=table.codes * 0)
    assert reinforcement(silent, QUICK).table.empty
