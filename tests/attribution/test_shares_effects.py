"""Shares and effects: on a policy of two parameters, and on trainings of a small model that are really run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from support.builders import make_rollouts
from support.damage import flip
from tsae.attribution.credit.effects import _pulled, simulate
from tsae.attribution.credit.shares import shares
from tsae.attribution.gradients.gradient_store import StepGradients, batches_of, build_gradients
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights, log_probabilities
from tsae.attribution.targets import NextToken
from tsae.attribution.training.optimiser import Optimiser, Simulation
from tsae.attribution.training.loss import PolicyLoss
from tsae.base.seal import SEAL
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

ADAM = Optimiser("adam", 1e-3, "constant", max_grad_norm=None)


# --- two parameters: a softmax policy over three actions, whose gradients are written down


class TwoParameters(torch.nn.Module):
    """Logits (a, b, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.2, -0.1]))


class Chance:
    """The target: the probability of the first action."""

    names: ClassVar = ["first action"]

    def values(self, trained: Any) -> np.ndarray:
        return np.array([float(chances(trained.vector())[0])])

    def gradients(self, trained: Any) -> torch.Tensor:
        p = chances(trained.vector())
        return (p[0] * torch.tensor([1 - p[0], -p[1]]))[None]


def chances(w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.cat([w, torch.zeros(1)]), 0)


def score(w: torch.Tensor, action: int) -> torch.Tensor:
    """∇ log π of an action."""
    return torch.eye(3)[action][:2] - chances(w)[:2]


def trained_for(optimiser: Optimiser, n_steps: int) -> tuple[Any, Any]:
    """A run of two actions a step, with its gradients in memory, and its path with every step."""
    trained = TrainedWeights(TwoParameters())  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    simulation = Simulation(optimiser, trained.vector()[None])
    knots, steps = {0: simulation.weights[0].clone()}, {}
    for step in range(1, n_steps + 1):
        acts = random.integers(0, 3, 2)
        advantages = np.where(acts == 0, 1.0, -0.4) + random.normal(size=2) / 4
        gradients = torch.stack(
            [float(a) * score(knots[step - 1], int(y)) for a, y in zip(advantages, acts, strict=True)]
        )
        simulation.step(-gradients.sum(0)[None])
        knots[step] = simulation.weights[0].clone()
        steps[step] = (np.array([2 * step - 2, 2 * step - 1]), gradients)
    return SimpleNamespace(step=steps.__getitem__, steps=list(steps)), TrainingPath(trained, knots)


@pytest.mark.parametrize(
    "optimiser",
    [
        ADAM,
        Optimiser("adamw", 1e-3, "linear", n_steps=60, weight_decay=0.3),
        Optimiser("adam", 1e-3, "cosine", n_steps=60, weight_decay=0.3, max_grad_norm=0.5),
        Optimiser("sgd", 3e-3, "constant", momentum=0.8, weight_decay=0.2, max_grad_norm=0.5),
    ],
    ids=lambda o: o.name,
)
def test_shares_add_up_to_what_happened(optimiser: Optimiser) -> None:
    store, path = trained_for(optimiser, 60)
    found = shares(store, path, optimiser, Chance(), progress=False)
    realised = chances(path.knots[60])[0] - chances(path.knots[0])[0]
    assert abs(float(realised)) > 0.002
    assert found.realised[0] == pytest.approx(float(realised), abs=1e-7)
    assert found.shares.sum() + found.decay[0] == pytest.approx(float(realised), rel=1e-3)
    assert abs(found.remainder[0]) < 1e-3 * abs(float(realised))
    assert found.segments.path_error.max() < 1e-3
    assert found.rows.tolist() == list(range(120))
    assert (optimiser.weight_decay > 0) == (found.decay[0] != 0)


def test_a_share_is_what_its_gradient_did() -> None:
    """SGD without momentum: −lr ∇F·g at each step, by hand."""
    sgd = Optimiser("sgd", 1e-2, "constant", max_grad_norm=None)
    store, path = trained_for(sgd, 20)
    found = shares(store, path, sgd, Chance(), progress=False)
    by_hand = []
    for step in range(1, 21):
        slopes = []
        for after in (step - 1, step):
            path.put(after)
            slopes.append(Chance().gradients(path.trained)[0])
        by_hand += [float(0.01 * (slopes[0] + slopes[1]) / 2 @ g) for g in store.step(step)[1]]
    np.testing.assert_allclose(found.shares[:, 0], by_hand, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.plain["path"], found.shares, rtol=1e-5, atol=1e-9)  # nothing comes between
    path.put(0)
    slope = Chance().gradients(path.trained)[0]
    at_base = [float(slope @ g) for step in range(1, 21) for g in store.step(step)[1]]
    np.testing.assert_allclose(found.plain["base"][:, 0], at_base, rtol=1e-5, atol=1e-9)


def test_a_checkpoint_that_the_steps_do_not_lead_to_is_seen() -> None:
    store, path = trained_for(ADAM, 60)
    wrong = Optimiser("adam", 2e-3, "constant", max_grad_norm=None)
    found = shares(store, path, wrong, Chance(), progress=False)
    assert found.segments.path_error.min() > 0.5


def test_where_gradients_do_not_depend_on_weights_the_simulation_is_the_training() -> None:
    """A loss that is linear in the weights: every subset's training, by torch's own Adam."""
    random = torch.Generator().manual_seed(1)
    gradients = torch.randn(30, 4, 2, generator=random)
    trained = TrainedWeights(TwoParameters())  # type: ignore[arg-type]
    nothing = torch.ones(4)
    store = SimpleNamespace(
        loss=PolicyLoss(epsilon=None),
        whole_step=lambda t: StepGradients(np.arange(4 * t - 4, 4 * t), gradients[t - 1], nothing, nothing[:, None]),
    )
    start = trained.vector()

    def really(kept: np.ndarray) -> torch.Tensor:
        weights = torch.nn.Parameter(start.clone())
        adam = torch.optim.Adam([weights], lr=1e-3)
        for t in range(30):
            weights.grad = -(torch.as_tensor(kept[4 * t : 4 * t + 4], dtype=torch.float32) @ gradients[t])
            adam.step()
        return weights.detach()

    path = TrainingPath(trained, {0: start, 30: really(np.ones(120))})
    kept = np.random.default_rng(0).random((5, 120)) < 0.5
    found = simulate(store, path, ADAM, Chance(), kept, again="replayed", at_once=6, progress=False)  # type: ignore[arg-type]
    expected = [float(chances(really(row))[0] - chances(start)[0]) for row in kept]
    np.testing.assert_allclose(found.changes[:, 0], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.whole[0], float(chances(really(np.ones(120)))[0] - chances(start)[0]), atol=1e-7)


# --- a small Llama, trained on a log


@pytest.fixture(scope="module")
def log(fingerprint: str) -> Rollouts:
    """Six steps of two problems with three responses each."""
    table = make_rollouts(n_problems=12, tokenizer=fingerprint).with_advantages()
    table = table.with_column("step", np.arange(len(table)) // 6 + 1)
    assert (table.frame.advantage != 0).any()
    return table


LOSS = PolicyLoss("dr_grpo", max_completion_length=16)
QUICK = Optimiser("adam", 1e-3, "constant", max_grad_norm=0.05)


def train(
    folder: Path, log: Rollouts, kept: np.ndarray | None = None, then: dict[int, torch.Tensor] | None = None
) -> tuple[TrainedWeights, dict[int, torch.Tensor]]:
    """A training in plain torch on the log: no code of the attribution but the weights' order.

    With `then`, the log-probabilities of the policies that sampled, it weighs and clips ratios; if empty, it is filled.
    """
    model = Checkpoint(id="base", path=str(folder)).load_model()
    trained = TrainedWeights(model)
    parameters = list(trained.parameters.values())
    adam = torch.optim.Adam(parameters, lr=QUICK.learning_rate)
    knots = {0: trained.vector()}
    for step, rows in batches_of(log).items():
        model.requires_grad_(True)
        adam.zero_grad()
        for row in rows:
            prompt, response = log.tokens(int(row))
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
            chance = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
            picked = chance[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(prompt) - 1 :]
            advantage = log.frame.advantage[row] / (16 * len(rows))
            part = advantage * picked.sum()
            if then is not None:
                ratio = (picked - then.setdefault(int(row), picked.detach())).exp()
                part = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            if kept is None or kept[row]:
                (-part).backward()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, QUICK.max_grad_norm)
        adam.step()
        model.requires_grad_(False)
        knots[step] = trained.vector()
    return trained, knots


def targets(log: Rollouts) -> NextToken:
    prompts = [log.tokens(row)[0] for row in range(0, len(log), 3)]
    return NextToken(prompts, ["one", "two"] * (len(prompts) // 2), token=int(log.tokens(0)[1][0]), what="begins")


def test_shares_of_a_real_training_add_up(llama: Path, log: Rollouts, tmp_path: Path) -> None:
    trained, knots = train(llama, log)
    path = TrainingPath(trained, knots)
    store = build_gradients(path, log, batches_of(log), LOSS, tmp_path / "g", progress=False)
    found = shares(store, path, QUICK, targets(log), progress=False)
    assert found.segments.path_error.max() < 1e-3  # the recipe is that of the training
    assert (np.abs(found.realised) > 1e-3).all()
    assert (np.abs(found.remainder) < 0.02 * np.abs(found.realised)).all()
    np.testing.assert_allclose(found.shares.sum(0), found.realised, rtol=0.02)
    ends = TrainingPath(trained, {0: knots[0], 3: knots[3], 6: knots[6]})
    sparse = build_gradients(ends, log, batches_of(log), LOSS, tmp_path / "s", progress=False)
    again = shares(sparse, ends, QUICK, targets(log), progress=False)
    assert len(again.segments) == 4
    assert np.corrcoef(again.shares[:, 0], found.shares[:, 0])[0, 1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [pytest.param(None, marks=pytest.mark.slow), 0.2])
def test_effects_are_near_to_trainings_on_the_rest(
    llama: Path, log: Rollouts, tmp_path: Path, epsilon: float | None
) -> None:
    then: dict[int, torch.Tensor] | None = None if epsilon is None else {}
    trained, knots = train(llama, log, then=then)
    path = TrainingPath(trained, knots)
    problem = log.frame.problem_id.to_numpy()
    random = np.random.default_rng(0)
    kept = np.array([np.isin(problem, random.permutation(np.unique(problem))[:6]) for _ in range(8)])
    really = []
    path.put(0)
    before = targets(log).values(trained)
    for row in kept:
        model, _ = train(llama, log, row, then)
        really.append(targets(log).values(model) - before)

    def simulated(epsilon: float | None) -> np.ndarray:
        loss, to = PolicyLoss("dr_grpo", 16, epsilon=epsilon), tmp_path / str(epsilon)
        store = build_gradients(path, log, batches_of(log), loss, to, dtype="bfloat16", progress=False)
        return simulate(store, path, QUICK, targets(log), kept, again="replayed", progress=False).changes

    found = simulated(epsilon)
    correlations = [np.corrcoef(found[:, j], np.array(really)[:, j])[0, 1] for j in range(2)]
    if epsilon is None:
        assert min(correlations) > 0.9
        assert np.abs(found - really).mean() < 0.1 * np.abs(really).max()
    else:
        # These steps are so large that most tokens are clipped after one. Even so it is better to simulate ratios.
        assert min(correlations) > 0.7
        assert np.abs(found - really).mean() < np.abs(simulated(None) - really).mean()


def test_log_ratios_follow_the_weights(llama: Path, log: Rollouts, tmp_path: Path) -> None:
    """Away from the path by little, the factors are those of the true ratios, sample by sample."""
    trained, knots = train(llama, log)
    path, loss = TrainingPath(trained, knots), PolicyLoss("dr_grpo", 16)
    store = build_gradients(path, log, batches_of(log), loss, tmp_path / "g", progress=False)
    those = store.whole_step(3)
    away = torch.randn(2, len(trained), generator=torch.Generator().manual_seed(0)) * 2e-3
    found = _pulled(loss, those, away, "replayed")

    def logs(weights: torch.Tensor, row: int) -> torch.Tensor:
        trained.put(weights)
        prompt, response = log.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        return log_probabilities(trained.model, ids, torch.ones_like(ids))[0, len(prompt) - 1 :].detach()

    moved = []
    for k, one in enumerate(away):
        for i, row in enumerate(those.rows):
            if those.pulls[i] == 0:
                assert found[k, i] == 1
                continue
            change = logs(path.weights(2) + one, int(row)) - logs(path.weights(2), int(row))
            # Far from clipping, Σ_t spread_t (1 + share_t of the log-ratio).
            expected = 1 + float(change.sum()) * float((those.spread[i] ** 2).sum())
            moved.append(abs(expected - 1))
            assert float(found[k, i]) == pytest.approx(expected, abs=5e-4 + 0.1 * abs(expected - 1))
    assert max(moved) > 0.02
    np.testing.assert_allclose(those.spread.sum(1)[those.pulls != 0], 1, rtol=1e-5)


@pytest.mark.parametrize("advantage", [-0.7, 1.3])
@pytest.mark.parametrize("high", [None, 0.28])
def test_the_pull_of_a_token_is_the_derivative_of_the_clipped_loss(advantage: float, high: float | None) -> None:
    log_ratio = torch.linspace(-1, 1, 41, requires_grad=True)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(0.8, 1.2 if high is None else 1.28)
    torch.minimum(ratio * advantage, clipped * advantage).sum().backward()
    found = PolicyLoss(epsilon=0.2, epsilon_high=high).pull(log_ratio.detach(), torch.tensor(advantage > 0))
    assert log_ratio.grad is not None
    np.testing.assert_allclose(found * advantage, log_ratio.grad, rtol=1e-6)
    assert (found == 0).any()
    assert (found != 0).any()


def test_new_responses_are_stood_for_by_truncated_ratios() -> None:
    ratios = torch.tensor([0.01, 0.5, 1.0, 1.9, 3.0, 40.0])
    found = PolicyLoss().pull(ratios.log(), torch.tensor(True), "on-policy")
    torch.testing.assert_close(found, torch.tensor([0.01, 0.5, 1.0, 1.9, 3.0, 3.0]))


def test_gradients_are_kept_and_taken_up_again(llama: Path, log: Rollouts, tmp_path: Path) -> None:
    trained, knots = train(llama, log)
    path = TrainingPath(trained, knots)
    store = build_gradients(path, log, batches_of(log), LOSS, tmp_path / "g", progress=False)
    (store.folder / "step-000004.safetensors").unlink()
    stamps = {file: file.stat().st_mtime_ns for file in store.folder.glob("*.safetensors")}
    before = {n: store.step(n)[1] for n in (1, 6)}
    again = build_gradients(path, log, batches_of(log), LOSS, tmp_path / "g", progress=False)
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())
    assert torch.equal(again.step(6)[1], before[6])
    assert again.step(4)[1].abs().max() > 0
    file = store.folder / "step-000004.safetensors"
    flip(file, -3)
    with pytest.raises(TsaeError, match=r"step-000004\.safetensors is damaged: its bytes have changed"):
        again.step(4)
    flip(file, -3)
    again.step(4)
    (store.folder / SEAL).rename(tmp_path / SEAL)
    with pytest.raises(TsaeError, match=r"its checksums\.json is missing"):
        again.step(4)
    with pytest.raises(TsaeError, match="another run or loss"):
        build_gradients(path, log, batches_of(log), PolicyLoss("grpo"), tmp_path / "g", progress=False)
    with pytest.raises(TsaeError, match=r"take .* GB"):
        build_gradients(path, log, batches_of(log), LOSS, tmp_path / "h", budget=1000, progress=False)
