"""Difficulty-adaptive sampling: estimates by hand, draws against their weights, and a band that moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta

from support.refusals import refuses
from tsae.rl.config import CurriculumConfig
from tsae.rl.curriculum import Curriculum, CurriculumSampler

PLAIN = {"explore": 0.0}


def answer(curriculum: Curriculum, problem: str, successes: int, n: int = 4) -> None:
    curriculum.update([problem] * n, [1.0] * successes + [0.0] * (n - successes))


def test_estimates_forget() -> None:
    curriculum = Curriculum(["a", "b"], 4, CurriculumConfig(forgetting=0.5, **PLAIN))
    answer(curriculum, "a", 3)
    answer(curriculum, "a", 0)
    # (1, 1), then (.5 + 3, .5 + 1), then (1.75 + 0, .75 + 4)
    assert curriculum.estimates().tolist() == pytest.approx([1.75 / 6.5, 0.5])
    history = curriculum.history()
    assert history.estimate.tolist() == pytest.approx([0.5, 3.5 / 5])
    assert history.mixed.tolist() == [True, False]


def test_success_begins_above_a_reward() -> None:
    curriculum = Curriculum(["a"], 4, CurriculumConfig(success_above=0.5))
    curriculum.update(["a"] * 4, [0.1, 0.5, 0.6, 1.0])
    assert curriculum.history().successes.tolist() == [2]


@pytest.mark.parametrize("guess", [0.0, 0.2])
def test_weights_are_what_rewards_can_teach(guess: float) -> None:
    config = CurriculumConfig(forgetting=1.0, guess=guess, **PLAIN)
    curriculum = Curriculum(["a", "b", "c"], 4, config)
    answer(curriculum, "a", 3)
    answer(curriculum, "b", 1)
    answer(curriculum, "b", 1)
    expected = [
        quad(lambda p, a=a, b=b: (p - guess) * (1 - p) * beta.pdf(p, a, b), 0, 1)[0]
        for a, b in ((4, 2), (3, 7), (1, 1))
    ]
    np.testing.assert_allclose(curriculum.weights(), np.array(expected) / sum(expected), rtol=1e-6)


def test_groups_that_agree_are_put_aside_and_come_back() -> None:
    curriculum = Curriculum(["a", "b"], 4, CurriculumConfig(**PLAIN))
    answer(curriculum, "a", 0)
    assert curriculum.weights().tolist() == [0.0, 1.0]  # for one batch
    answer(curriculum, "b", 2)
    assert curriculum.weights()[0] > 0
    answer(curriculum, "a", 0)  # the second agreement: for two
    answer(curriculum, "b", 2)
    assert curriculum.weights()[0] == 0
    answer(curriculum, "b", 2)
    assert 0 < curriculum.weights()[0] < curriculum.weights()[1]


def test_a_problem_waits_for_its_reformulations() -> None:
    parents = {"easier": "hard", "other": "hard", "stranger": "unknown"}
    curriculum = Curriculum(["hard", "easier", "other"], 4, CurriculumConfig(admit_above=0.7, **PLAIN), parents=parents)
    assert curriculum.admitted().tolist() == [False, True, True]
    assert curriculum.weights()[0] == 0
    answer(curriculum, "easier", 4)
    assert not curriculum.admitted()[0]
    answer(curriculum, "other", 3)
    assert curriculum.admitted().all()
    assert curriculum.weights()[0] > 0


def test_a_level_speaks_for_problems_not_yet_tried() -> None:
    ids = ["e1", "e2", "h1", "h2"]
    levels = {problem: problem[0] for problem in ids}
    config = CurriculumConfig(level_responses=6, forgetting=0.5, explore=0.0)
    curriculum = Curriculum(ids, 4, config, levels=levels)
    answer(curriculum, "e1", 4)
    answer(curriculum, "h1", 0)
    answer(curriculum, "h1", 1)
    # Of level e: (.5 + 4) of 5; of level h: ((.5 + 0) / 2 + 1) of ((1 + 4) / 2 + 4), both as 6 responses beside (1, 1).
    easy, hard = curriculum.estimates()[[1, 3]]
    assert easy == pytest.approx((1 + 6 * 4.5 / 5) / 8)
    assert hard == pytest.approx((1 + 6 * 1.25 / 6.5) / 8)
    alone = Curriculum(ids, 4, config)
    answer(alone, "e1", 4)
    assert alone.estimates()[1] == 0.5


def test_problems_that_are_only_guessed_are_left_for_later() -> None:
    ids = [f"{level}{i}" for level in "gr" for i in range(10)]
    levels = {problem: problem[0] for problem in ids}
    curriculum = Curriculum(ids, 8, CurriculumConfig(guess=0.25, explore=0.0), levels=levels)
    for i in range(10):  # a quarter right on g, half on r
        answer(curriculum, f"g{i}", 2, 8)
        answer(curriculum, f"r{i}", 4, 8)
    of_level = curriculum.weights().reshape(2, 10).sum(1)
    assert of_level[0] < 0.05
    without = Curriculum(ids, 8, CurriculumConfig(explore=0.0), levels=levels)
    for i in range(10):
        answer(without, f"g{i}", 2, 8)
        answer(without, f"r{i}", 4, 8)
    assert without.weights().reshape(2, 10).sum(1)[0] > 0.4


def test_the_band_follows_the_model() -> None:
    """A simulated model that learns: problem i is solved with the logistic probability of skill − i / 10."""
    rng = np.random.default_rng(0)
    ids = [f"p{i:02d}" for i in range(80)]
    levels = {problem: f"{i // 20}" for i, problem in enumerate(ids)}
    curriculum = Curriculum(ids, 8, CurriculumConfig(seed=1), levels=levels)
    sampler = CurriculumSampler(curriculum, {"problem_id": ids}, group_size=8, groups=8, batches=150)
    stream, drawn = iter(sampler), []
    for step in range(150):
        batch = [next(stream) for _ in range(64)]
        skill = 1 + 6 * step / 150
        right = rng.random(64) < 1 / (1 + np.exp(-(skill - np.array(batch) / 10) * 2))
        curriculum.update([ids[row] for row in batch], right.astype(float).tolist())
        drawn.append(np.mean(batch))
    history = curriculum.history()
    assert np.mean(drawn[20:40]) + 15 < np.mean(drawn[-20:])
    late = history[history.step >= 20]
    difficulty = np.arange(80) / 10
    uniform = np.mean(
        [
            (1 - (p := 1 / (1 + np.exp(-(1 + 6 * s / 150 - difficulty) * 2))) ** 8 - (1 - p) ** 8).mean()
            for s in range(20, 150)
        ]
    )
    assert late.mixed.mean() > uniform + 0.15  # against draws without regard to difficulty
    figure = curriculum.plot()
    assert [trace.name for trace in figure.data][-2:] == ["pass rate", "groups with both outcomes"]
    assert len(figure.data[0].x) == 150


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_level_is_one_of_its_own(missing: Any) -> None:
    levels = {"a": missing, "b": "hard", "c": "easy"}
    curriculum, other = (Curriculum(["a", "b", "c"], 4, levels=of) for of in (levels, {"b": "hard", "c": "easy"}))
    for one in (curriculum, other):
        answer(one, "c", 0)
    assert curriculum.estimates().tolist() == other.estimates().tolist()
    assert curriculum.estimates()[0] == 0.5
    assert other.history().level.tolist() == ["easy"]
    none = Curriculum(["a"], 4, levels={"a": missing})
    answer(none, "a", 4)
    assert none.estimates().tolist() == pytest.approx([4.8 / 5.6])


def test_rows_come_in_the_order_that_trl_needs() -> None:
    ids = ["a", "b", "c", "d", "e"]
    curriculum = Curriculum(["e", "d", "c", "b", "a"], 2, CurriculumConfig())
    sampler = CurriculumSampler(curriculum, {"problem_id": ids}, group_size=2, groups=3, repeats=2, batches=4)
    rows = list(sampler)
    assert len(rows) == len(sampler) == 4 * 3 * 2 * 2
    for start in range(0, len(rows), 12):
        batch = rows[start : start + 12]
        assert batch[:6] == batch[6:]
        assert batch[0:6:2] == batch[1:6:2]
        assert len(set(batch)) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curriculum([], 4), "no problems"),
        (lambda: Curriculum(["a", "a"], 4), "problem ids come twice"),
        (lambda: Curriculum(["a"], 4).update(["a"], [float("nan")]), "a reward is not finite"),
        (lambda: Curriculum(["a"], 4).update(["b"], [1.0]), "unknown problem 'b'"),
        (lambda: CurriculumConfig(level_responses=1e200), "level_responses="),
        (lambda: CurriculumConfig(prior=(1.0, 1e200)), "prior.1="),
        (lambda: Curriculum([1, 2], 4), "the problem id 1 is a int, expected a text"),  # type: ignore[list-item]
        (lambda: Curriculum(["a"], 4).update(["a", None], [1, 0]), "unknown problem None"),  # type: ignore[list-item]
        (lambda: Curriculum(["a"], 4, parents={"a": "a"}), "'a' is a reformulation of itself"),
        (lambda: Curriculum(["a", "b", "c"], 4, parents={"c": "a", "a": "b", "b": "a"}), "'a' is a reformulation of"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str) -> None:
    refuses(message, make)
