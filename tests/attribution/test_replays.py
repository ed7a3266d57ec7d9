"""Replayed trainings: they repeat the run, and leave out what a retraining by the testbed's own script leaves out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from organism.mixed import MixedConfig, retrain, train
from scipy.stats import spearmanr

import tsae
from tsae.attribution.config import AttributionConfig
from tsae.attribution.credit import replays
from tsae.attribution.credit.banzhaf import random_halves
from tsae.attribution.credit.replays import Logs, logged_probabilities, replay
from tsae.attribution.gradients.gradient_store import batches_of
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.training.loss import BatchTokens, PolicyLoss
from tsae.attribution.trainer.recipe import read_recipe
from tsae.errors import TsaeError
from tsae.report.printed.attribution import attribution_text
from tsae.rollouts.importing import import_log
from tsae.rollouts.table import Rollouts
from tsae.testbed.tokenizer import TOKEN_IDS

CONFIG = MixedConfig(per_band=2, steps=4, groups=6, samples=4, learning_rate=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replays") / "run"
    train(CONFIG, tsae.testbed.series().base, folder, progress=False)
    import_log(folder, folder / "rollouts.parquet", progress=False)
    return folder


@pytest.fixture(scope="module")
def parts(run: Path) -> tuple[TrainingPath, Logs, replays.Logged]:
    log, recipe = Rollouts.read(run / "rollouts.parquet"), read_recipe(run)
    path = TrainingPath.of(tsae.CheckpointSeries.load(run))
    logs = Logs(log, batches_of(log), recipe.loss, recipe.optimiser, batch_tokens=512)
    return path, logs, logged_probabilities(path, logs)


def far(found: torch.Tensor, expected: torch.Tensor, start: torch.Tensor) -> float:
    """Distance as a share of the way from the start."""
    return float((found - expected).norm() / (expected - start).norm())


def test_replaying_everything_repeats_the_run(parts: tuple[TrainingPath, Logs, replays.Logged]) -> None:
    path, logs, logged = parts
    found = replay(path, logs, np.ones(len(logs.rollouts), dtype=bool), logged)
    assert far(found, path.knots[4], path.knots[0]) < 1e-3


def test_a_half_is_the_retraining_of_the_testbed(parts: tuple[TrainingPath, Logs, replays.Logged], run: Path) -> None:
    """An implementation of its own: torch's Adam, the clipped loss written out, other batches."""
    path, logs, logged = parts
    log, start = logs.rollouts, path.knots[0]
    problem = log.frame.problem_id.to_numpy()
    include = sorted(set(problem))[::2]
    found = replay(path, logs, np.isin(problem, include), logged)
    expected = retrain(CONFIG, tsae.CheckpointSeries.load(run).base, log, include, "replayed")
    assert far(found, expected, start) < 1e-3
    assert far(found, path.knots[4], start) > 0.3  # another training than the run
    loose = Logs(
        log, logs.batches, PolicyLoss("dr_grpo", logs.loss.max_completion_length, epsilon=None), logs.optimiser
    )
    assert far(replay(path, loose, np.isin(problem, include), logged), expected, start) > 1e-2  # clipping acts


@pytest.mark.parametrize("advantage", [-0.7, 1.3])
@pytest.mark.parametrize("high", [None, 0.28])
def test_summands_have_the_pull_as_their_derivative(advantage: float, high: float | None) -> None:
    loss, log_ratio = PolicyLoss(epsilon=0.2, epsilon_high=high), torch.linspace(-1, 1, 41, requires_grad=True)
    zero = torch.zeros(1, 41)
    batch = BatchTokens(log_ratio[None], zero == 0, torch.tensor([advantage]), zero)
    (-loss.summands(batch)[0]).sum().backward()
    assert log_ratio.grad is not None
    expected = advantage * loss.pull(log_ratio.detach(), torch.tensor(advantage > 0))
    torch.testing.assert_close(log_ratio.grad, expected)


@pytest.mark.slow
def test_attribution_is_validated_on_halves(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[TrainingPath, Logs, replays.Logged]
) -> None:
    series, log = tsae.CheckpointSeries.load(run), Rollouts.read(run / "rollouts.parquet")
    config = AttributionConfig(targets=("outcome",), n_fixed=24, subsets=0, singles=0, groups=(), validate=4)

    def attribute() -> tsae.Attribution:
        return tsae.attribute(series, log, tmp_path, first_token=TOKEN_IDS["#"], config=config, progress=False)

    found = attribute()
    assert "4 trainings were really replayed" in attribution_text(found)
    # By hand: the same halves, replayed and measured here.
    path, logs, logged = parts
    problem = np.unique(log.frame.problem_id, return_inverse=True)[1]
    changes = []
    fixed = found.facts[found.facts.step == 1].drop_duplicates("problem_id").trajectory
    prompts = [log.tokens(row)[0] for row in fixed]

    def chance(weights: torch.Tensor) -> float:
        path.trained.put(weights)
        model, total = path.trained.model, 0.0
        for prompt in prompts:
            logits = model(input_ids=torch.tensor(prompt.astype(np.int64))[None], use_cache=False).logits[0, -1]
            total += float(torch.softmax(logits.detach().double(), -1)[TOKEN_IDS["#"]])
        return total / len(prompts)

    for half in random_halves(problem.max() + 1, 4, 1):
        changes.append(chance(replay(path, logs, half[problem], logged)) - chance(path.knots[0]))
    kept = [np.load(file)["changes"] for file in (tmp_path / "simulated").glob("*.npz")]
    simulated = next(values[:, 0] for values in kept if values.shape[0] == 4 and values.ndim == 2)
    row = found.targets.set_index("target").loc["P (first token)"]
    assert row.validated == pytest.approx(spearmanr(simulated, changes).statistic)
    assert row.validated_error == pytest.approx(np.median(np.abs(simulated - changes)), abs=1e-4)
    assert row.validated_error < 0.5 * np.ptp(changes)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("replayed again")

    monkeypatch.setattr(replays, "replay", refuse)
    again = attribute()
    np.testing.assert_array_equal(again.targets.validated, found.targets.validated)


def test_two_replays_cannot_be_ranked() -> None:
    with pytest.raises(TsaeError, match="expected 0, or 3 and more"):
        AttributionConfig(validate=2)
