"""Replayed runs: against trainings in plain torch, with what certifies them, restarts and stretches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import tsae
from support.builders import save_model
from support.grpo_loop import CASES, GrpoLoop, apart, make_log, replay_of, run_of
from support.refusals import refuses
from tsae.attribution.certificates import logged_facts, verdict
from tsae.attribution.forward_passes import Run
from tsae.attribution.loss import PolicyLoss, RewardKL
from tsae.attribution.order import plan_updates
from tsae.attribution.path import replay, steps_back, train_on
from tsae.attribution.settings import RunSettings
from tsae.attribution.shares import fits, simulate
from tsae.attribution.start import Start, checkpoints_of, start_of
from tsae.attribution.states import State, States
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

EXACT = 1e-5
"""Part of the way."""
KL = CASES["KL"][1]
MORE: dict[str, RunSettings] = {
    "moving reference": replace(KL, loss=replace(KL.loss, sync_ref=(0.5, 3))),
    "bfloat16": replace(CASES["as TRL does"][1], autocast="bfloat16"),
}


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GrpoLoop, Path]:
    """Twelve steps of three generations, with checkpoints after each generation."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return GrpoLoop(llama, make_log(KL, 3), KL).run(to=folder, save=(4, 8, 12)), folder


def start(llama: Path, folder: Path, **given: int | None) -> Start:
    series = tsae.CheckpointSeries.load(llama, folder)
    return start_of(series, checkpoints_of(series, None), KL.optimiser, **given)


def without_optimiser(folder: Path, to: Path) -> Path:
    """The same checkpoints."""
    for checkpoint in folder.iterdir():
        (to / checkpoint.name).mkdir(parents=True)
        for file in checkpoint.iterdir():
            if file.name != "optimizer.pt":
                (to / checkpoint.name / file.name).symlink_to(file)
    return to


def run_from(begun: Start, log: Rollouts, after: int) -> Run:
    plan = plan_updates(log, KL, checkpoints={}, vocabulary=None, steps=(after + 1, 12))
    return Run(begun.trained, log, KL, plan, begun.begin)


@pytest.mark.parametrize("case", [*(case for case in CASES if case != "LoRA"), *MORE])
def test_a_replay_ends_where_the_training_did(
    case: str, trained: Callable[..., GrpoLoop], llama: Path, tmp_path: Path
) -> None:
    """Losses, clipping, weight decay and its groups, schedules, several updates and iterations, accumulation, KL."""
    settings = MORE.get(case)
    loop = trained(case, 3) if settings is None else GrpoLoop(llama, make_log(settings, 3), settings).run()
    facts = logged_facts({step: {"grad_norm": norm} for step, norm in enumerate(loop.norms, 1)})
    path = replay_of(run_of(loop, batch_tokens=4096 if loop.as_trl else 60), tmp_path, facts=facts)
    assert apart(path.end, loop) < EXACT
    np.testing.assert_allclose(path.steps.grad_norm, path.steps.logged_grad_norm, rtol=1e-5)
    assert path.steps.clipped.any()
    judged = verdict(path.run, path.steps)
    assert (judged.to, judged.departs, judged.gate, judged.path_error) == (len(loop.norms), None, "", None)
    assert judged.within is not None
    assert judged.within < 1e-5


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("penalty", [RewardKL(20.0), RewardKL(900.0, "k2"), RewardKL(20.0, clamp=10.0, to_go=True)])
def test_a_kl_penalty_in_the_rewards_makes_the_advantages(penalty: RewardKL, llama: Path, tmp_path: Path) -> None:
    """Of a log without advantages: the penalty is that of the weights which sampled, in shares and effects as well."""
    facts = {"advantage_epsilon": 1e-6}
    settings = replace(KL, loss=PolicyLoss("grpo"), reward_kl=penalty, facts=facts)
    plain = make_log(settings, 3)
    loop = GrpoLoop(llama, plain, settings).run()
    log = plain.with_column("advantage", [None] * len(plain))
    path = replay_of(run_of(loop, log=log), tmp_path)
    assert apart(path.end, loop) < EXACT
    mean = [float(loop.advantage[row].mean()) for row in range(len(log))]
    np.testing.assert_allclose(path.run.rollouts.frame.advantage, mean, atol=1e-4)
    assert np.abs(np.array(mean) - plain.frame.advantage).max() > 0.05
    assert apart(train_on(path, np.ones(len(log), dtype=bool), progress=False), loop) < EXACT
    unpenalised = GrpoLoop(llama, plain, replace(settings, reward_kl=None)).run()
    assert apart(path.end, unpenalised) > 1e-2


def test_steps_between_kept_states_are_taken_again(saved: tuple[GrpoLoop, Path], tmp_path: Path) -> None:
    whole = replay_of(run_of(saved[0]), tmp_path / "whole")
    size = len(whole.run.trained)
    path = replay_of(run_of(saved[0]), tmp_path / "some", budget=8 * size * 12 - 1)
    assert (whole.states.every, path.states.every) == (1, 5)
    assert torch.equal(path.end, whole.end)
    get, expected = steps_back(path), steps_back(whole)
    for step in range(12, 0, -1):
        (one, rows, known), (other, of_whole, also) = get(step), expected(step)
        assert torch.equal(one.before, other.before)
        assert torch.equal(one.scale, other.scale)
        assert rows.weight == of_whole.weight
        assert known.old.keys() == also.old.keys()
        assert sum(file.stat().st_size for file in (tmp_path / "some").iterdir()) < path.states.bytes + 4096
    refuses(r"the path of 12 steps .* takes .* GB\. Raise --budget-gb", States, tmp_path / "no", 12, size, 8 * size * 3)


def test_log_probabilities_of_the_log_count(saved: tuple[GrpoLoop, Path], tmp_path: Path) -> None:
    """Those of the reference make it unnecessary; others than the run's make another training."""
    loop = saved[0]
    columns = {"ref_logprobs": loop.ref, "old_logprobs": loop.old}
    log = loop.log
    for name, of in columns.items():
        log = log.with_column(name, [of[row].tolist() for row in range(len(log))])
    path = replay_of(run_of(loop, log=log), tmp_path, reference=torch.zeros_like(loop.weights[0]))
    assert apart(path.end, loop) < EXACT
    other = log.with_column("ref_logprobs", [(of - 1).tolist() for of in map(loop.ref.__getitem__, range(len(log)))])
    assert apart(replay_of(run_of(loop, log=other), tmp_path).end, loop) > 1e-2
    short = log.with_column("old_logprobs", [[0.0]] * len(log))
    with pytest.raises(TsaeError, match=r"old_logprobs of row 0 has 1 numbers, and the response \d+ tokens"):
        replay_of(run_of(loop, log=short), tmp_path)


def test_checkpoints_measure_the_way_and_restart_it(saved: tuple[GrpoLoop, Path], llama: Path, tmp_path: Path) -> None:
    """A log that is wrong in its first generation: from step 4 on the training goes on as it did."""
    loop, folder = saved
    begun = start(llama, folder)
    right = replay_of(run_from(begun, loop.log, 0), tmp_path / "path", controls=begun.controls)
    known = right.steps.distance[[3, 7, 11]]
    assert (known < EXACT).all()
    assert right.steps.distance.notna().sum() == 3
    assert right.restarts == []
    log = loop.log.with_column("advantage", loop.log.frame.advantage * np.where(loop.log.frame.generation == 0, -1, 1))
    path = replay_of(run_from(begun, log, 0), tmp_path / "path", controls=begun.controls)
    assert path.restarts == [4]
    assert path.steps.distance[3] > 0.5
    assert apart(path.end, loop) < EXACT
    alone = start(llama, without_optimiser(folder, tmp_path / "alone"))
    path = replay_of(run_from(alone, log, 0), tmp_path / "path", controls=alone.controls)
    assert path.restarts == []
    assert path.steps.distance[11] > 0.1
    judged = verdict(path.run, path.steps)
    assert judged.path_error == path.steps.distance.max()
    assert judged.gate.startswith("The replay ends ")
    assert "% of the way from the checkpoint of step 4: settings or log are not quite those of this run" in judged.gate


def test_a_stretch_begins_with_the_optimisers_state(saved: tuple[GrpoLoop, Path], llama: Path, tmp_path: Path) -> None:
    loop, folder = saved
    begun = start(llama, folder, after=4)
    assert (begun.begin.step, begun.begin.taken, sorted(begun.controls)) == (4, 4, [8, 12])
    path = replay_of(run_from(begun, loop.log, 4), tmp_path, reference=loop.weights[0])
    assert apart(path.end, loop) < EXACT
    states = States(tmp_path, 8, path.end.numel(), 10**9)
    states.every = 3  # not a divisor of where it begins
    some = replay(run_from(begun, loop.log, 4), states, {}, logged_facts({}), reference=loop.weights[0], progress=False)
    assert steps_back(some)(6)[0].before.equal(steps_back(path)(6)[0].before)
    cold = replace(begun, begin=State(begun.begin.weights, *(torch.zeros_like(begun.begin.weights),) * 2, 4))
    assert apart(replay_of(run_from(cold, loop.log, 4), tmp_path, reference=loop.weights[0]).end, loop) > 0.05
    refuses("no checkpoint after step 5; there are 0, 4, 8, 12", start, llama, folder, after=5)
    bare = without_optimiser(folder, tmp_path / "bare")
    refuses(r"is a later step \(4\), and no optimizer\.pt beside it says", start, llama, bare, after=4)
    # The base itself is a later step of the run.
    series = tsae.CheckpointSeries.load(llama, bare)
    late = tsae.CheckpointSeries(tuple(replace(c, run=None) if c.step == 4 else c for c in series if c.step))
    with pytest.raises(TsaeError, match=r"is a later step \(4\), .* Begin with the model that the training started"):
        start_of(late, checkpoints_of(late, None), KL.optimiser)


def test_a_replay_that_departs_is_judged(saved: tuple[GrpoLoop, Path]) -> None:
    run = run_of(saved[0])
    n = np.arange(1, 13)
    steps = pd.DataFrame({"step": n, "n": 8, "mean_length": 7.0, "logged_mean_length": 7.0, "distance": np.nan})

    def judged(run: Run = run, **columns: object) -> object:
        return verdict(run, steps.assign(**{"grad_norm": 1.0, "logged_grad_norm": 1.0, **columns}))

    off = np.where(n >= 5, 1.3, 1.01)
    found = judged(grad_norm=off)
    assert (found.to, found.departs, found.path_error) == (4, 5, None)
    assert found.within == pytest.approx(0.01)
    assert found.gate.startswith("The replay departs from the run at step 5, and no checkpoint says how far: ")
    assert judged(grad_norm=off, step=900 + n).gate.startswith("The replay departs from the run at step 905, and no")
    # Without checkpoints and logged norms nothing certifies the replay.
    nothing = judged(logged_grad_norm=np.full(12, np.nan))
    assert (nothing.path_error, nothing.within, nothing.departs) == (None, None, None)
    assert nothing.gate.startswith("Nothing says whether the replay is the run: ")
    assert judged(logged_grad_norm=np.full(12, np.nan), distance=np.where(n == 12, 0.02, np.nan)).gate == ""
    # A single step that is off is none; far from the end there is an answer.
    assert judged(grad_norm=np.where(n == 5, 1.3, 1.0)).departs is None
    assert judged(grad_norm=np.where(n >= 11, 1.3, 1.0)).gate == ""
    lengths = np.where(n == 3, 7.25, 7.0)
    assert (
        "the trainer counted 2 tokens more at step 3 than the log"
        in judged(grad_norm=off, logged_mean_length=lengths).cause
    )
    for changed, said in (({"dropout": True}, "dropped activations"), ({"autocast": "bfloat16"}, "rounds differently")):
        assert said in judged(replace(run, settings=replace(KL, **changed)), grad_norm=off).cause
    assert judged(distance=np.where(n == 12, 0.02, np.nan), grad_norm=off).gate == ""


# --- trainings without some samples, against trainings in plain torch that leave them out


def far(found: torch.Tensor, expected: torch.Tensor, loop: GrpoLoop) -> float:
    """As a part of the way of the other training."""
    return float((found - expected).norm() / (expected - loop.weights[0]).norm())


def halves(n: int) -> np.ndarray:
    """(2, n) problems at random, and the others."""
    random = np.repeat(np.random.default_rng(0).permutation(np.arange(n // 4) % 2), 4) == 0
    return np.array([random, ~random])


@pytest.mark.slow(ci=True)
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


@pytest.mark.slow(ci=True)
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
