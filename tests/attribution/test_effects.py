"""Trainings without some samples: against trainings in plain torch that leave them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.builders import save_model
from support.grpo_loop import CASES, GrpoLoop, apart, make_log, replay_of, run_of
from tsae.attribution.replay.path import train_on
from tsae.attribution.replay.simulation import fits, simulate
from tsae.attribution.training.loss import PolicyLoss


def far(found: torch.Tensor, expected: torch.Tensor, loop: GrpoLoop) -> float:
    """As a part of the way of the other training."""
    return float((found - expected).norm() / (expected - loop.weights[0]).norm())


def halves(n: int) -> np.ndarray:
    """(2, n) problems at random, and the others."""
    random = np.repeat(np.random.default_rng(0).permutation(np.arange(n // 4) % 2), 4) == 0
    return np.array([random, ~random])


@pytest.mark.parametrize("case", ["as TRL does", "KL", "sequence", "Adam"])
def test_a_part_is_the_training_on_that_part(case: str, trained: Callable[..., GrpoLoop], tmp_path: Path) -> None:
    """Other samples' summands are taken away, and ratios are to the run's own log-probabilities."""
    loop = trained(case, 3)
    path = replay_of(run_of(loop, batch_tokens=200), tmp_path / "path")
    n = len(loop.log)
    assert apart(train_on(path, np.ones(n, dtype=bool), progress=False), loop) < 1e-5
    known, without = dict(loop.old), GrpoLoop(loop.base, loop.log, loop.settings)
    kept = halves(n)[0]
    expected = without.run(kept, known).weights[-1]
    assert far(train_on(path, kept, progress=False), expected, loop) < 1e-4
    assert far(path.end, expected, loop) > 0.1


@pytest.mark.parametrize("case", ["as TRL does", "KL"])
def test_simulated_trainings_are_near_to_real_ones(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    settings = replace(settings, optimiser=replace(settings.optimiser, learning_rate=2e-4))
    loop = GrpoLoop(save_model(tmp_path / "model", name), make_log(settings, 2), settings).run()
    path, n = replay_of(run_of(loop), tmp_path / "path"), len(loop.log)
    kept = np.concatenate([np.ones((1, n), dtype=bool), halves(n)])
    found = simulate(path, kept, again="replayed", progress=False)
    assert apart(found[0], loop) < 1e-5
    for mask, end in zip(kept[1:], found[1:], strict=True):
        really = train_on(path, mask, progress=False)
        assert far(end, really, loop) < 0.15
        assert far(path.end, really, loop) > 0.3
    # Sampled anew, where little is clipped, is nearly the same.
    anew = simulate(path, kept[:2], progress=False)
    assert apart(anew[0], loop) < 1e-5
    assert far(anew[1], found[1], loop) < 0.1
    assert fits(path.run, 3, 60 * len(loop.weights[0]))
    assert not fits(path.run, 4, 60 * len(loop.weights[0]))


def test_new_responses_are_stood_for_by_truncated_ratios() -> None:
    ratios = torch.tensor([0.01, 0.5, 1.0, 1.9, 3.0, 40.0])
    found = PolicyLoss().pull(ratios.log(), torch.tensor(True), "on-policy")
    torch.testing.assert_close(found, torch.tensor([0.01, 0.5, 1.0, 1.9, 3.0, 3.0]))
