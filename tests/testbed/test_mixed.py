"""The mixed run: its problems, what it leaves, and how it samples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from organism.mixed import BANDS, MixedConfig, held_out, train

from support.refusals import refuses
from tsae import CheckpointSeries, Rollouts
from tsae.rollouts.importing import import_log
from tsae.testbed import parse_prompt, series
from tsae.testbed.tokenizer import BOS, TOKEN_IDS

TINY = MixedConfig(per_band=2, steps=2, groups=3, samples=4)
BASE = series().base


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(TINY, BASE, tmp_path_factory.mktemp("mixed") / "run", progress=False)


@pytest.fixture(scope="module")
def rollouts(run: Path) -> Rollouts:
    import_log(run, run.parent / "rollouts.parquet", progress=False)
    return Rollouts.read(run.parent / "rollouts.parquet")


def problems_of(config: MixedConfig) -> list[str]:
    return [problem.id for problem in config.problems]


def prompt_ids(prompt: str) -> list[int]:
    return [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in prompt)]


def test_every_problem_is_asked_equally_often_and_by_no_step_twice() -> None:
    config = MixedConfig()
    assert len(config.schedule) == 30
    assert all(len({problem.id for problem in step}) == 12 for step in config.schedule)
    asked = Counter(problem.id for step in config.schedule for problem in step)
    assert asked == dict.fromkeys(problems_of(config), 15)
    assert config.schedule != replace(config, seed=1).schedule


def test_problems_are_of_their_bands_and_none_is_held_out() -> None:
    config = MixedConfig()
    for band, (fewest, most) in BANDS.items():
        assert sum(problem.level == band for problem in config.problems) == 8
        assert len(held_out(config)[band]) == 24
        for problem in (*held_out(config)[band], *(p for p in config.problems if p.level == band)):
            assert problem.level == band
            assert fewest <= parse_prompt(problem.prompt).n_ops <= most
    assert not set(problems_of(config)) & {p.id for some in held_out(config).values() for p in some}


def test_a_run_is_read_as_any_users(run: Path, rollouts: Rollouts) -> None:
    checkpoints = CheckpointSeries.load(run)
    assert [c.id for c in checkpoints] == ["run-00000", "run-00001", "run-00002"]
    checkpoints["run-00002"].load_tokenizer()
    frame = rollouts.frame
    assert frame["step"].tolist() == [1] * 12 + [2] * 12
    assert frame.policy.tolist() == ["run-00000"] * 12 + ["run-00001"] * 12
    assert frame.round_trip.all()
    assert sorted(set(frame.level)) == sorted(BANDS)
    for step, asked in enumerate(TINY.schedule, 1):
        mine = frame[frame["step"] == step]
        assert mine.problem_id.tolist() == [problem.id for problem in asked for _ in range(4)]
        assert mine.answer.tolist() == [problem.answer for problem in asked for _ in range(4)]
    for row, prompt in enumerate(frame.prompt):
        assert rollouts.tokens(row)[0].tolist() == prompt_ids(prompt)
    again = rollouts.with_advantages().frame.advantage
    assert np.abs(again).max() > 0.8
    np.testing.assert_allclose(frame.advantage, again, rtol=0, atol=1e-12)


def test_settings_and_state_are_written(run: Path) -> None:
    settings = json.loads((run / "training_args.json").read_text())
    assert settings == TINY.training_args()
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in history] == [1, 2]
    assert all(0 < line["grad_norm"] < 1 for line in history)


def test_a_folder_that_exists_is_refused(run: Path) -> None:
    refuses("exists already", train, TINY, BASE, run)
