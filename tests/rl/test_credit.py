"""Credit: tables learned from planted truth, scores against their formula, advantages worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from statements.credit import planted_credit, says

from support.planted import IDLE, N_FEATURES, small_credit, world
from support.refusals import refuses
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rl import credit_fitting
from tsae.rl.config import CreditConfig, ShapingConfig
from tsae.rl.credit import Credit, plausibility, rebalanced, shape_advantages, token_weights
from tsae.rl.credit_fitting import ResponseTokens, _split, fit_credit
from tsae.rl.exporting import write_credit
from tsae.rl.verl import credit_advantage


def dense_scores(credit: Credit, codes: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The formulas of tsae.rl.credit, token by token: codes (T + 1, d_sae), ids (T,)."""
    pairs = dict(zip(credit.pair_keys.tolist(), credit.pair_values.tolist(), strict=True))
    v = credit.feature.numpy()
    found = []
    for place, token in enumerate(ids):
        before = codes[place] @ v + credit.constant
        after = codes[place + 1] @ v + credit.constant
        if credit.config.estimator == "value":
            raw = after - before
        elif credit.config.estimator == "effects":
            raw = after
        else:
            b = float(credit.token[token]) if token < len(credit.token) else 0.0
            raw = b - before
            raw += sum(codes[place, j] * pairs.get(token * credit.d_sae + j, 0.0) for j in range(credit.d_sae))
        found.append(raw / credit.scale)
    return np.array(found)


@pytest.mark.parametrize("estimator", ["action", "value"])
def test_scores_are_those_of_the_formula(estimator: Any) -> None:
    credit = fit_credit(world(), CreditConfig(estimator=estimator))
    assert credit.significant
    rng = np.random.default_rng(1)
    codes = rng.random((3, 5, N_FEATURES)) * (rng.random((3, 5, N_FEATURES)) < 0.5)
    ids = rng.integers(0, 20, (3, 4))  # some were never seen
    scores = credit.scores(torch.from_numpy(codes).float(), torch.from_numpy(ids))
    for row in range(3):
        np.testing.assert_allclose(scores[row].numpy(), dense_scores(credit, codes[row], ids[row]), atol=1e-5)


def test_tokens_that_were_not_due_are_found_from_rewards_alone() -> None:
    table = world()
    credit = fit_credit(table, CreditConfig())
    assert credit.info["difference"] > 0
    assert credit.info["p"] < 0.01
    state = torch.zeros(4, 2, N_FEATURES)
    state[torch.arange(4), 0, torch.arange(4)] = 1.5
    due = credit.scores(state, torch.arange(4)[:, None]).squeeze(1)
    wrong = credit.scores(state, (torch.arange(4)[:, None] + 1) % 4).squeeze(1)
    assert (wrong < -1.5).all()
    assert (due > wrong + 1.5).all()
    # What is idle is worth little: its entries are the smallest.
    assert credit.feature[IDLE].abs() < credit.feature[:4].abs().max() + 0.1


def test_the_regression_is_ridge() -> None:
    from scipy.sparse import csr_array

    from tsae.rl.credit_fitting import _ridge

    rng = np.random.default_rng(0)
    design, target = rng.normal(size=(200, 5)) * [1, 10, 0.1, 1, 1], rng.normal(size=200)
    size = np.sqrt((design**2).mean(0))
    scaled = design / size
    expected = np.linalg.solve(scaled.T @ scaled + 7 * np.eye(5), scaled.T @ target) / size
    found, constant = _ridge(csr_array(design), target, 7.0, constant=False)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert constant == 0


def test_rewards_tied_to_nothing_give_uniform_weights_and_say_so() -> None:
    credit = fit_credit(world(tie=0.0), CreditConfig())
    assert not credit.significant
    assert "do not tell success from failure" in repr(credit)
    scores = credit.scores(torch.rand(2, 4, N_FEATURES), torch.zeros(2, 3, dtype=torch.long))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert (scores == 0).all()
    shaped = shape_advantages(
        scores, torch.tensor([1.0, -1.0]), mask, torch.zeros(2, dtype=torch.long), ShapingConfig()
    )
    assert shaped.tolist() == [[1, 1, 1], [-1, -1, 0]]


def test_shuffled_features_keep_their_entries_and_lose_their_meaning() -> None:
    credit = fit_credit(world(), CreditConfig())
    control = credit.shuffled(3)
    assert not torch.equal(control.feature, credit.feature)
    torch.testing.assert_close(control.feature.sort().values, credit.feature.sort().values)
    torch.testing.assert_close(control.pair_values.sort().values, credit.pair_values.sort().values)
    assert (control.pair_keys.diff() > 0).all()
    # A feature's entries move together: its weight and its pairs go to the same place.
    moved = {float(value): index for index, value in enumerate(control.feature)}
    to = [moved[float(value)] for value in credit.feature]
    pairs = dict(zip(control.pair_keys.tolist(), control.pair_values.tolist(), strict=True))
    for key, value in zip(credit.pair_keys.tolist(), credit.pair_values.tolist(), strict=True):
        assert pairs[key // N_FEATURES * N_FEATURES + to[key % N_FEATURES]] == value


def test_problems_beyond_the_reference_do_not_count() -> None:
    table = world()
    rates = table.rollouts.frame.groupby("problem_id").reward.mean()
    info = fit_credit(table, CreditConfig(pass_rates=(0.4, 0.9))).info
    assert info["n_learned"] + info["n_held_out"] == int(rates.between(0.4, 0.9).sum())
    with pytest.raises(TsaeError, match=r"0 problems have successes and failures and a pass rate of 0\.98 to 0"):
        fit_credit(table, CreditConfig(pass_rates=(0.98, 0.99)))


def test_outcomes_that_nobody_checked_are_refused() -> None:
    refuses("320 of 320 rollouts", lambda: fit_credit(world(outcome="unknown")))


@pytest.mark.parametrize("estimator", ["action", "value", "effects"])
def test_a_reward_for_the_format_makes_no_success(estimator: Any) -> None:
    """The rollouts' reward is a sum of two: 1 for a well-formed wrong answer, 2 for a right one."""
    table, config = world(), CreditConfig(estimator=estimator)
    reward = table.rollouts.table["reward"].to_numpy()
    formatted = replace(table, rollouts=table.rollouts.with_column("reward", reward + 1.0))
    plain, summed = fit_credit(table, config), fit_credit(formatted, config)
    assert summed.info == plain.info
    assert torch.equal(summed.feature, plain.feature)


def swapped(table: Any, problems: set[str]) -> Any:
    """The table with success and failure exchanged in some problems."""
    frame = table.rollouts.frame
    other = {"success": "failure", "failure": "success"}
    outcome = [other[o] if p in problems else o for o, p in zip(frame.outcome, frame.problem_id, strict=True)]
    return replace(table, rollouts=table.rollouts.with_column("outcome", outcome))


@pytest.mark.parametrize("estimator", ["action", "value", "effects"])
def test_what_is_held_out_is_learned_from_by_nothing(estimator: Any) -> None:
    """Success and failure exchanged in the held-out problems: the same tables, the opposite verdict."""
    effect, config = 0.4 if estimator == "action" else 0.8, CreditConfig(estimator=estimator, pass_rates=(0.0, 1.0))
    table = planted_credit(0, effect, estimator, n_problems=30)
    credit = fit_credit(table, config)
    assert credit.significant
    frame = ResponseTokens.of(table, np.arange(240)).frame
    learning, testing = _split(frame, config, "base")
    held_out = set(frame.problem_id[testing])
    assert not held_out & set(frame.problem_id[learning])
    assert credit.info["n_learned"] == frame.problem_id[learning].nunique()
    assert credit.info["n_held_out"] == len(held_out)
    assert f"learned on {credit.info['n_learned']} problems" in repr(credit)
    assert f"on {len(held_out)} others" in repr(credit)
    assert credit.info["low"] > 0

    opposite = fit_credit(swapped(table, held_out), config)
    for name in ("feature", "pair_keys", "pair_values", "token"):
        assert torch.equal(getattr(opposite, name), getattr(credit, name))
    assert opposite.info["difference"] == pytest.approx(-credit.info["difference"])
    assert not opposite.significant


def test_effects_are_chosen_and_shrunk_on_the_problems_learned_from() -> None:
    table, config = planted_credit(0, 0.5, "effects"), CreditConfig(estimator="effects")
    credit = fit_credit(table, config)
    assert credit.info["n_features"] == int((credit.feature != 0).sum()) > 0
    tokens = ResponseTokens.of(table, np.arange(table.n_rows))
    learning, _ = _split(tokens.frame, config, "base")
    # By hand: the mean difference over problems and its standard error, over the trajectories' spread.
    means = table.row_means().toarray()
    differences = np.array(
        [
            means[(of := tokens.frame.code == code) & tokens.frame.success].mean(0)
            - means[of & ~tokens.frame.success].mean(0)
            for code in tokens.frame.code[learning].unique()
        ]
    )
    deviation = means.std(0, ddof=1)
    size = differences.mean(0) / deviation
    error = differences.std(0, ddof=1) / np.sqrt(len(differences)) / deviation
    spread = (size**2 - error**2).mean()
    expected = size * spread / (spread + error**2) / tokens.codes[tokens.of_rows(learning)].toarray().std(0)
    chosen = credit.feature.numpy() != 0
    assert chosen[:10].sum() > 5
    np.testing.assert_allclose(credit.feature.numpy()[chosen], expected[chosen], rtol=1e-3)
    none = fit_credit(planted_credit(1, 0.0, "effects"), config)
    assert not none.significant
    assert f"no outcome effect at q <= 0.05 in {none.info['n_learned']} problems: all weights are 1" in repr(none)


def test_credit_finds_what_is_planted_and_nothing_else() -> None:
    assert sum(says(seed, 0.4, "action") for seed in range(5)) == 5
    # At most 5 % of false statements are promised: more than three of 20 have a chance of .016.
    assert sum(says(seed, 0.0, "action", n_problems=24) for seed in range(20)) <= 3


def test_token_weights_by_hand() -> None:
    scores = torch.tensor([[0.0, np.log(2.0), 9.0, 5.0], [0.0, np.log(2.0), 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    config = ShapingConfig(strength=1.0, bound=8.0)
    weights = token_weights(scores.float(), torch.tensor([1.0, -2.0, 0.0]), mask, config)
    # Success: 1, 2 and e^9, bounded at 8, of sum 11. Failure: 1 and a half, of sum 1.5.
    expected = [[3 / 11, 6 / 11, 24 / 11, 0], [2 * 1 / 1.5, 2 * 0.5 / 1.5, 0, 0], [1, 1, 1, 1]]
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_settings_give_finite_weights_of_mean_1(sign: float) -> None:
    largest: Any = dict.fromkeys(("strength", "bound", "dense"), 1e6)
    config = ShapingConfig(**largest, plausibility=True, tolerance=1e-6)
    mask, group = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]), torch.zeros(2, dtype=torch.long)
    scores = torch.tensor([[3.0, -3.0, 0.0, 9.0], [1.0, 1.0, 1.0, 1.0]]) * 1e6
    advantages = torch.tensor([sign, -sign])
    assert shape_advantages(scores, advantages, mask, group, config).isfinite().all()
    weights = token_weights(scores.half(), advantages.half(), mask.half(), ShapingConfig(strength=1.0, bound=1e6))
    assert weights.sum(1).tolist() == pytest.approx([3, 0], abs=1e-2)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_shaped(wrong: float) -> None:
    given = (torch.ones(1, 2), torch.tensor([1]))
    with pytest.raises(TsaeError, match="2 advantages are not finite"):
        shape_advantages(given[0], torch.tensor([wrong]), given[0], torch.tensor([0]), ShapingConfig())
    with pytest.raises(TsaeError, match="are not finite"):
        shape_advantages(given[0] * wrong, given[1], given[0], torch.tensor([0]), ShapingConfig(dense=1.0))


def test_plausibility_by_hand() -> None:
    scores = torch.tensor([[1.0, 0.5, 3.0], [-1.0, -0.5, -9.0], [-3.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 1]])
    factor = plausibility(scores, mask, ShapingConfig(tolerance=2.0))
    torch.testing.assert_close(factor, torch.tensor([1.0, 0.5 * 0.75, 0.0]))


def test_plausibility_leaves_groups_balanced() -> None:
    # A group with a doubtful and a sound success, one whose only success is implausible, and one without any.
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    factor = torch.tensor([0.5, 1.0, 0.3, 0.3, 0.0, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2])
    group = torch.arange(12) // 4
    found = rebalanced(advantages, factor, group)
    assert found.tolist() == [0.5, 1.0, -0.75, -0.75, 0, 0, 0, 0, 0, 0, 0, 0]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rebalanced(advantages[order], factor[order], group[order]), found[order])


def test_the_threshold_and_the_dense_term_by_hand() -> None:
    scores, mask = torch.tensor([[1.0, -3.0, 4.0]]), torch.tensor([[1, 1, 0]])
    config = ShapingConfig(threshold=2.0, strength=0.0, dense=0.5)
    shaped = shape_advantages(scores, torch.tensor([2.0]), mask, torch.tensor([0]), config)
    assert shaped.tolist() == [[2.0, 2.0 + 0.5 * -1.0, 0.0]]


def test_a_saved_credit_is_the_same(tmp_path: Path) -> None:
    credit = fit_credit(world(), CreditConfig())
    loaded = Credit.load(credit.save(tmp_path / "credit"))
    assert loaded.info == credit.info
    assert loaded.config == credit.config
    for name in ("feature", "pair_keys", "pair_values", "token"):
        assert torch.equal(getattr(loaded, name), getattr(credit, name))
    refuses("holds no complete credit", Credit.load, tmp_path)


def test_credit_without_a_common_pair_is_that_of_the_tokens() -> None:
    credit = replace(small_credit(), pair_keys=torch.empty(0, dtype=torch.int64), pair_values=torch.empty(0))
    scores = credit.scores(torch.ones(1, 2, 4), torch.tensor([[1]]))
    assert scores.tolist() == [[1.0 - 4.0]]


def test_features_of_no_sae_give_no_credit() -> None:
    table = world(n_problems=2)
    table.info["sae"] = {}
    refuses("its features are of no SAE", fit_credit, table)


def test_credit_is_written_as_its_functions_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = world()
    table.save(tmp_path / "features")
    main(["credit", "fit", "--features", str(tmp_path / "features"), "--to", str(tmp_path / "credit")])
    assert "Credit(action" in capsys.readouterr().out
    credit, config = Credit.load(tmp_path / "credit"), ShapingConfig(plausibility=True, strength=1.5)
    logprob = np.log(np.random.default_rng(0).random(len(table.token_ids))).astype(np.float32)
    written = write_credit(credit, tmp_path / "features", tmp_path / "w.parquet", config, logprob=logprob)
    rows = pq.read_table(written).to_pandas().set_index("trajectory")
    frame = table.rollouts.frame
    assert sorted(rows.index) == list(range(len(frame)))

    for problem in ("p3", "p30"):  # a group at once
        members = np.flatnonzero(frame.problem_id == problem)
        codes = torch.stack([torch.from_numpy(table.codes[8 * i : 8 * i + 8].toarray()) for i in members]).float()
        ids = torch.stack([torch.from_numpy(table.token_ids[8 * i + 1 : 8 * i + 8]) for i in members]).long()
        chance = torch.stack([torch.from_numpy(logprob[8 * i + 1 : 8 * i + 8]) for i in members]).exp()
        advantages = torch.tensor(frame.advantage[members].to_numpy()).float()
        scores, mask, group = credit.scores(codes, ids), torch.ones(ids.shape), torch.zeros(len(ids), dtype=torch.long)
        scores = scores * (1 - chance)
        expected = shape_advantages(scores, advantages, mask, group, config)
        for place, row in enumerate(members):
            np.testing.assert_allclose(rows.token_scores[row], scores[place], atol=1e-5)
            np.testing.assert_allclose(rows.token_advantages[row], expected[place], atol=1e-5)
            assert np.mean(rows.token_weights[row]) == pytest.approx(1, abs=1e-5)
    monkeypatch.setattr("tsae.rl.exporting._DENSE", 3 * table.n_features)  # three tokens at once
    again = write_credit(credit, table, tmp_path / "again.parquet", config, logprob=logprob)
    for name in ("token_scores", "token_advantages"):
        for one, other in zip(pq.read_table(written)[name].to_pylist(), pq.read_table(again)[name].to_pylist(),
                              strict=True):  # fmt: skip
            np.testing.assert_allclose(one, other, atol=1e-6)
    for wrong, said in (
        (np.full_like(logprob, np.nan), "tokens of responses have no log-probability, or one above 0"),
        (np.where(np.arange(len(logprob)) == 5, np.nan, logprob), "1 tokens of responses have no log-probability"),
        (-logprob, "or one above 0"),
        (np.full_like(logprob, np.inf), "or one above 0"),
        (np.r_[logprob, logprob], "expected one number for each of"),
        (logprob[:-1], "expected one number for each of"),
        ([], "expected one number for each of"),
    ):
        refuses(said, write_credit, credit, table, tmp_path / "x.parquet", logprob=wrong)
        assert not (tmp_path / "x.parquet").exists()
    table.info["sae"]["weights"] = "other"
    with pytest.raises(TsaeError, match="the credit was learned on features of the SAE abc, these are of other"):
        write_credit(credit, table, tmp_path / "x.parquet", logprob=logprob)


def test_advantages_add_up_to_nothing_within_a_step(tmp_path: Path) -> None:
    table = world(tie=0.5)
    step = np.arange(320) % 8 // 4 * 10 + 10
    table = replace(table, rollouts=table.rollouts.with_column("step", step).with_advantages())
    config = ShapingConfig(plausibility=True, strength=0.0, threshold=0.0)
    logprob = np.full(len(table.token_ids), -1.0, np.float32)
    rows = pq.read_table(write_credit(fit_credit(world()), table, tmp_path / "w", config, logprob=logprob)).to_pandas()
    rows["shaped"] = [np.mean(values) for values in rows.token_advantages]
    assert (rows.shaped - rows.advantage).abs().max() > 0.1
    assert rows.groupby([rows.problem_id, step[rows.trajectory]]).shaped.sum().abs().max() < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CreditConfig(pass_rates=(0.9, 0.1)), "pass_rates=\\(0.9, 0.1\\) is not a range"),
        (lambda: ShapingConfig(tolerance=1e-60), "tolerance=1e-60"),
        (lambda: ShapingConfig(strength=1e39), "strength=.*1000000"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    refuses(message, make)


def test_scores_take_no_more_memory_for_a_wider_sae(monkeypatch: pytest.MonkeyPatch) -> None:
    table = world()
    tokens = ResponseTokens.of(table, np.arange(40))
    credit = fit_credit(table)
    whole = tokens.raw_scores(credit)
    sizes, real = list[int](), Credit.scores
    monkeypatch.setattr(credit_fitting, "_DENSE", 30 * N_FEATURES, raising=False)
    monkeypatch.setattr(Credit, "scores", lambda self, *args: sizes.append(args[0].numel()) or real(self, *args))
    assert np.allclose(tokens.raw_scores(credit), whole, atol=1e-6)
    assert max(sizes) <= 2 * 30 * N_FEATURES


# --- the estimator for verl, by itself: its arguments are those that verl passes


def test_outcomes_are_normalised_in_groups_and_dense_rewards_added() -> None:
    rewards = torch.tensor([[0.1, 1.0, 0.0], [0.0, -0.2, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])
    index = np.array(["x", "x", "y", "y"], dtype=object)
    advantages, returns = credit_advantage(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    # Outcomes of x are 1 and 0, of y 0 and 1: mean .5, standard deviation sqrt(.5).
    a = 0.5 / (0.5**0.5 + 1e-4)
    expected = torch.tensor([[a + 0.1, a, 0], [-a, -a - 0.2, -a], [-a + 0.5, -a, 0], [a, a, a]])
    torch.testing.assert_close(advantages, expected)
    assert returns is advantages
    plain, _ = credit_advantage(rewards, mask, index, config={"norm_adv_by_std_in_grpo": False})
    torch.testing.assert_close(plain[3], torch.tensor([0.5, 0.5, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_finds_the_last_token_of_long_responses(dtype: torch.dtype) -> None:
    rewards, mask = torch.zeros(4, 4094, dtype=dtype), torch.ones(4, 4094, dtype=dtype)
    rewards[:2, -1] = 1
    found, _ = credit_advantage(rewards, mask, np.zeros(4))
    expected, _ = credit_advantage(rewards.float(), mask.float(), np.zeros(4))
    torch.testing.assert_close(found, expected)
    assert found[0, 0] > 0.8


def test_a_response_without_tokens_is_not_of_its_group() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [5.0, float("nan")]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    found, _ = credit_advantage(rewards, mask, np.array(["x"] * 3))
    alone, _ = credit_advantage(rewards[:2], mask[:2], np.array(["x"] * 2))
    torch.testing.assert_close(found, torch.cat([alone, torch.zeros(1, 2)]))
    assert not credit_advantage(rewards, torch.zeros(3, 2), np.array(["x"] * 3))[0].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(value: float) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, value]])
    with pytest.raises(TsaeError, match="1 rewards of response tokens are not finite"):
        credit_advantage(rewards, torch.ones(2, 2), np.array(["x", "x"]))
