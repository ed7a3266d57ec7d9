"""Log, settings and the trainer's own history that do not belong together, and what is said of those that do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.refusals import refuses
from tsae.attribution.log_fit import check_settings
from tsae.attribution.loss import PolicyLoss
from tsae.attribution.order import batches_of
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_advantages
from tsae.rollouts.table import Rollouts

LENGTH = 4 * (2 + 0.375) / 4
"""Mean length of a step's responses: two tokens, and a third where they are right."""
HISTORY = {step: {"completions/mean_length": LENGTH, "rewards/acc/mean": 0.375} for step in (1, 2, 3)}


def the_log(n_steps: int = 3, kind: str = "grpo", **columns: Any) -> Rollouts:
    """Two problems a step, four samples each, with the trainer's advantages."""
    rng, records = np.random.default_rng(0), []
    for step in range(1, n_steps + 1):
        for problem in (f"p{step % 2}", "q"):
            rewards = np.array([1.0, 0, 0, 0]) if problem == "q" else rng.permutation([1.0, 1, 0, 0])
            advantages = group_advantages(rewards, np.zeros(4), kind)  # type: ignore[arg-type]
            for reward, advantage in zip(rewards, advantages, strict=True):
                records.append(
                    {
                        "problem_id": problem,
                        "policy": f"run-{step}",
                        "prompt_ids": [1, 2],
                        "response_ids": [3] * int(2 + reward),
                        "response": "a",
                        "reward": reward,
                        "reward/acc": reward,
                        "outcome": "success" if reward else "failure",
                        "advantage": advantage,
                        "finish_reason": "stop",
                        "step": step,
                        **columns,
                    }
                )
    return Rollouts.from_records(records)


def check(
    log: Rollouts, history: Any = None, *, mask: bool = False, processes: int | None = None, **facts: Any
) -> tuple[Rollouts, list[str]]:
    loss, batching = PolicyLoss(mask_truncated=mask), Batching(processes=processes)
    facts = {"num_generations": 4, **facts}
    settings = RunSettings(Optimiser(n_steps=3), loss, batching, source="args.json", facts=facts)
    notes: list[str] = []
    return check_settings(log, batches_of(log), settings, notes, history), notes


def test_a_log_that_fits() -> None:
    facts = {"scale_rewards": "group", "max_steps": 3, "max_completion_length": 3, "per_device_train_batch_size": 4}
    _, notes = check(the_log(), HISTORY, **facts)
    assert len(notes) == 1
    assert notes[0].startswith("Logged advantages follow from the rewards in 6 of 6 prompt groups: (reward − mean) /")
    _, notes = check(the_log(kind="dr_grpo"), scale_rewards=False)
    assert "reward − mean." in notes[0]
    # -1 is transformers' word for "not said".
    check(the_log(), max_steps=-1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"scale_rewards": "none"},
            "say scale_rewards=none, but the advantages of 6 prompt groups are (reward − mean)",
        ),
        ({"num_generations": 3}, "say num_generations=3, but most prompt groups of the log have 4 samples"),
        ({"max_steps": 2}, "say max_steps=2, but the log has step 3"),
        ({"max_completion_length": 2}, "say max_completion_length=2, but the log has a response of 3 tokens"),
        (
            {"per_device_train_batch_size": 16},
            "say per_device_train_batch_size=16 and 1 micro-batches a generation, but a generation of the log has 8",
        ),
    ],
)
def test_settings_of_another_run_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(TsaeError) as caught:
        check(the_log(), **changed)
    text = str(caught.value)
    assert said in text
    assert text.startswith("args.json: ")
    assert "Give the settings of the run that wrote this log" in text
    assert "\n" not in text


def test_a_step_that_is_in_the_log_twice_is_refused() -> None:
    every = np.arange(24)
    resumed, all_twice = (the_log().select(np.sort(np.r_[every, again])) for again in (np.arange(8, 16), every))
    refuses(r"step 2 has 16 samples, and a generation 8: .* in the log twice", check, resumed,
            per_device_train_batch_size=8)  # fmt: skip
    refuses("step 1 has 16 samples, and a generation 8", check, all_twice, per_device_train_batch_size=8, processes=1)
    check(all_twice, per_device_train_batch_size=8, processes=2)
    check(all_twice, per_device_train_batch_size=8)
    # Generations that lack rows are smaller.
    check(the_log().select(every[5:]), per_device_train_batch_size=4)


def test_a_history_of_another_run_is_refused() -> None:
    longer = {step: {**entry, "completions/mean_length": 9.0} for step, entry in HISTORY.items()}
    with pytest.raises(TsaeError) as caught:
        check(the_log(), longer)
    assert str(caught.value) == (
        "rollouts: the trainer logged other lengths in 3 of 3 steps: completions/mean_length was 9 where the log has "
        "2.375. Give the log of this run."
    )
    with pytest.raises(
        TsaeError, match=r"other rewards in 3 of 3 steps: rewards/acc/mean was 0\.375 where the log has 0\.75"
    ):
        check(the_log().with_column("reward/acc", 2 * the_log().frame["reward/acc"].to_numpy()), HISTORY)
    # A text without end tokens is a token shorter; steps that sampled nothing log none.
    check(the_log(), {1: {"completions/mean_length": LENGTH + 1}, 2: {"completions/mean_length": None}, 7: {}})


def test_rewards_that_were_rescaled_after_the_training_are_refused() -> None:
    log = the_log(kind="dr_grpo")
    rescaled = log.with_column("reward", 10 * log.frame.reward.to_numpy() - 5)
    with pytest.raises(
        TsaeError, match=r"step, or the rewards were rescaled after the training\. Give the settings of"
    ):
        check(rescaled, scale_rewards="none")
    # Divided by their deviation, advantages are the same; and a weight of the trainer's rescales them, too.
    check(the_log().with_column("reward", rescaled.frame.reward), scale_rewards="group")
    check(rescaled, scale_rewards="none", reward_weights=[0.1])


def test_advantages_that_follow_no_formula_count_as_logged() -> None:
    log = the_log()
    advantage = log.frame.advantage.to_numpy() * np.where(np.arange(len(log)) % 8 == 1, -3, 1)
    shaped, notes = check(log.with_column("advantage", advantage))
    assert any("no known formula gives the logged advantages" in note for note in notes)
    np.testing.assert_array_equal(shaped.frame.advantage, advantage)


def test_missing_advantages_are_computed_as_the_settings_say() -> None:
    nothing = [None] * 24
    for scale, kind in (("none", "dr_grpo"), ("group", "grpo")):
        found, notes = check(the_log().with_column("advantage", nothing), scale_rewards=scale)
        assert notes[-1].startswith("The log has no advantages; they are computed from its rewards")
        np.testing.assert_allclose(found.frame.advantage, the_log(kind=kind).frame.advantage)
    found, notes = check(the_log().with_column("advantage", nothing), advantages="rloo")
    np.testing.assert_allclose(found.frame.advantage, 4 / 3 * the_log(kind="dr_grpo").frame.advantage)
    assert "reward − mean of the others of the group" in notes[-1]
    refuses("not followed here", lambda: check(the_log().with_column("advantage", nothing), advantages="gae"))
    bare = the_log().with_column("advantage", nothing).with_column("reward", nothing)
    refuses("has no advantages, and no rewards for 24 of 24 samples", check, bare)


def test_samples_that_were_cut_off() -> None:
    log = the_log().with_column("finish_reason", ["length"] * 2 + ["stop"] * 22)
    same, notes = check(log)
    assert "Samples that were cut off at the limit of length: 2. They count like the others." in notes
    assert (same.frame.advantage[:2] != 0).any()
    without, notes = check(log, mask=True)
    assert any("The trainer left them out of the loss" in note for note in notes)
    assert (without.frame.advantage[:2] == 0).all()
    np.testing.assert_array_equal(without.frame.advantage[2:], log.frame.advantage[2:])


def test_samples_that_are_missing_are_counted() -> None:
    _, notes = check(the_log().select(np.arange(24) != 5), per_device_train_batch_size=4)
    assert any(note.startswith("1 of 6 prompt groups have fewer than the 4 samples") for note in notes)
