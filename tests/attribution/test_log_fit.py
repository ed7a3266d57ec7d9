"""Log, checkpoints and settings that do not fit together, and what is said of those that do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import tsae
from tsae.attribution.attribute import attribute
from tsae.attribution.config import AttributionConfig
from tsae.attribution.gradients.gradient_store import batches_of
from tsae.attribution.sample_kinds import has_bands, sample_kinds
from tsae.attribution.trainer.log_fit import batches_between, check_settings
from tsae.attribution.trainer.recipe import Recipe, read_recipe
from tsae.attribution.wanted import find_targets
from tsae.errors import TsaeError
from tsae.rollouts.advantages import group_advantages
from tsae.rollouts.table import Rollouts

ASKED = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "num_generations": 4, "max_steps": 3}


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
                        "outcome": "success" if reward else "failure",
                        "advantage": advantage,
                        "finish_reason": "stop",
                        "level": "easy" if problem == "q" else "hard",
                        "step": step,
                        **columns,
                    }
                )
    return Rollouts.from_records(records)


def settings(folder: Path, **changed: Any) -> Recipe:
    (folder / "training_args.json").write_text(json.dumps({**ASKED, **changed}))
    return read_recipe(folder)


def check(log: Rollouts, recipe: Recipe) -> tuple[Rollouts, list[str]]:
    notes: list[str] = []
    return check_settings(log, batches_of(log), recipe, notes), notes


def test_a_log_that_fits(tmp_path: Path) -> None:
    _, notes = check(the_log(), settings(tmp_path, scale_rewards="group"))
    assert len(notes) == 1
    assert notes[0].startswith("Logged advantages follow from the rewards in 6 of 6 prompt groups: (reward − mean) /")
    _, notes = check(the_log(kind="dr_grpo"), settings(tmp_path, scale_rewards=False))
    assert "reward − mean." in notes[0]


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
    ],
)
def test_settings_of_another_run_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TsaeError) as caught:
        check(the_log(), settings(tmp_path, **changed))
    text = str(caught.value)
    assert said in text
    assert str(tmp_path / "training_args.json") in text
    assert "Give the settings of the run that wrote this log" in text
    assert "\n" not in text


def test_verls_settings_are_compared_too(tmp_path: Path) -> None:
    actor = {"optim": {"lr": 1e-6, "total_training_steps": 9}}
    content = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 3}}, "algorithm": {"adv_estimator": "grpo"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(TsaeError, match="say num_generations=3"):
        check(the_log(), read_recipe(tmp_path / "config.yaml"))


def test_several_steps_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match="2 optimiser steps for each batch of samples"):
        check(the_log(), settings(tmp_path, steps_per_generation=8, gradient_accumulation_steps=4))
    actor = {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 256}
    content = {"actor_rollout_ref": {"actor": actor, "rollout": {}}, "data": {"train_batch_size": 1024}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(TsaeError, match="train_batch_size=1024 and ppo_mini_batch_size=256: 4 optimiser steps"):
        check(the_log(), read_recipe(tmp_path / "config.yaml"))


def test_advantages_that_follow_no_formula_count_as_logged(tmp_path: Path) -> None:
    log = the_log()
    advantage = log.frame.advantage.to_numpy() * np.where(np.arange(len(log)) % 8 == 1, -3, 1)
    shaped, notes = check(log.with_column("advantage", advantage), settings(tmp_path))
    assert any("no known formula gives the logged advantages" in note for note in notes)
    np.testing.assert_array_equal(shaped.frame.advantage, advantage)


def test_missing_advantages_are_computed_as_the_settings_say(tmp_path: Path) -> None:
    nothing = [None] * 24
    for scale, kind in (("none", "dr_grpo"), ("group", "grpo")):
        found, notes = check(the_log().with_column("advantage", nothing), settings(tmp_path, scale_rewards=scale))
        assert notes[-1].startswith("The log has no advantages; they are computed from its rewards")
        np.testing.assert_allclose(found.frame.advantage, the_log(kind=kind).frame.advantage)
    bare = the_log().with_column("advantage", nothing).with_column("reward", nothing)
    with pytest.raises(TsaeError, match="has no advantages, and no rewards for 24 of 24 samples"):
        check(bare, settings(tmp_path))


def test_samples_that_were_cut_off(tmp_path: Path) -> None:
    log = the_log().with_column("finish_reason", ["length"] * 2 + ["stop"] * 22)
    same, notes = check(log, settings(tmp_path))
    assert "2 samples were cut off at the limit of length; they count like the others." in notes
    assert (same.frame.advantage[:2] != 0).any()
    without, notes = check(log, settings(tmp_path, mask_truncated_completions=True))
    assert any("the trainer left them out of the loss" in note for note in notes)
    assert (without.frame.advantage[:2] == 0).all()
    np.testing.assert_array_equal(without.frame.advantage[2:], log.frame.advantage[2:])


def test_samples_that_are_missing_are_counted(tmp_path: Path) -> None:
    _, notes = check(the_log().select(np.arange(24) != 5), settings(tmp_path))
    assert any(note.startswith("1 of 6 prompt groups have fewer than the 4 samples") for note in notes)


def test_steps_of_log_and_checkpoints() -> None:
    log, notes, config = the_log(5), list[str](), AttributionConfig()
    found = batches_between(log, batches_of(log), (1, 4), config, notes)
    assert list(found) == [2, 3, 4]
    assert notes == ["2 logged steps lie outside the checkpoints (steps 2 to 4) and are left out."]
    with pytest.raises(
        TsaeError, match="lacks step 6 and 1 others of the steps 1 to 7 between the checkpoints; it has"
    ):
        batches_between(log, batches_of(log), (0, 7), config, notes)
    halves = log.with_column("step", (log.frame["step"] / 2).tolist())
    with pytest.raises(TsaeError, match=r"has the step 0\.5, expected whole numbers"):
        batches_of(halves)
    with pytest.raises(TsaeError, match="the log has no steps"):
        batches_of(Rollouts(log.table.drop(["step"])))


def test_a_log_without_later_checkpoints(series: Any, tmp_path: Path) -> None:
    alone = tsae.CheckpointSeries((series.base,))
    with pytest.raises(TsaeError, match=r"holds the base alone \(base\), expected later checkpoints of a run"):
        attribute(alone, the_log(), tmp_path, recipe=settings(tmp_path), progress=False)
    with pytest.raises(TsaeError, match="settings do not lie beside the checkpoints"):
        attribute(series, the_log(), tmp_path, progress=False)


def test_samples_without_token_ids() -> None:
    with pytest.raises(TsaeError, match="lacks the columns response_ids"):
        Rollouts.from_records([{"problem_id": "p", "policy": "b", "prompt_ids": [1], "outcome": "success"}])
    with pytest.raises(TsaeError, match="empty response_ids"):
        the_log(response_ids=[])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subsets": -1}, "subsets: is -1"),
        ({"steps": (3, 1)}, "is no stretch of a run"),
        ({"groups": ("bands",)}, "'bands' is none of band, outcome"),
        ({"targets": ("feature",)}, "'feature' is none of features"),
        ({"budget_gb": 0}, "must be positive"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TsaeError, match=said):
        AttributionConfig(**options)


def test_kinds_of_samples() -> None:
    log = the_log().with_column("direct", (np.arange(24) % 3 == 0).astype(float))
    log = log.with_column("reward/a", log.frame.reward.to_numpy()).with_column("reward/b", np.arange(24.0) % 4)
    log = Rollouts(log.table, {"behaviours": ["direct"]})
    used = np.ones(24, dtype=bool)
    used[20:] = False
    assert has_bands(log)
    wanted = AttributionConfig().groups
    found = sample_kinds(log, wanted, used)
    frame, success = log.frame, (log.frame.outcome == "success").to_numpy()
    q = (frame.problem_id == "q").to_numpy()
    expected = {
        "easy": q,
        "hard, success": ~q & success,
        "lone success": q & success,
        "second third of the run": (frame["step"] == 2).to_numpy(),
        "easy, failure, last third of the run": q & ~success & (frame["step"] == 3).to_numpy(),
        "direct": np.arange(24) % 3 == 0,
        "rewarded by b": np.arange(24) % 4 >= 2,
    }
    for name, mask in expected.items():
        if (mask & used).any():
            np.testing.assert_array_equal(found[name][1], mask & used, err_msg=name)
    assert "easy, failure, last third of the run" not in found  # the run did not train on them
    assert found["rewarded by a"][0] == "reward"
    plain = log.with_column("level", [None] * 24)
    assert not has_bands(plain)
    crossed = sample_kinds(plain, ["band and outcome and third"], used)
    np.testing.assert_array_equal(
        crossed["success, second third of the run"][1], success & (frame["step"] == 2).to_numpy() & used
    )


def test_nothing_to_attribute() -> None:
    log = the_log().with_column("outcome", ["unknown"] * 24)
    notes: list[str] = []
    with pytest.raises(TsaeError, match="nothing is there to attribute: Too few problems"):
        find_targets(
            None, log, np.arange(8), sae=None, first_token=None, special=[], temperature=1.0,  # type: ignore[arg-type]
            config=AttributionConfig(), notes=notes,
        )  # fmt: skip
    with pytest.raises(TsaeError, match="there is no SAE"):
        find_targets(
            None, log, np.arange(8), sae=None, first_token=3, special=[], temperature=1.0,  # type: ignore[arg-type]
            config=AttributionConfig(features=(2,)), notes=notes,
        )  # fmt: skip
