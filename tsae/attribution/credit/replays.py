"""Trainings that are really repeated on a part of the log: the oracle for what is simulated.

A replay takes forward and backward passes at its own weights, with the trainer's loss and optimiser. It trains on the
kept responses of the log. The loss weighs and clips them by ratios to the probabilities that they had when they were
sampled: by the checkpoint before their step, or the line between two checkpoints. Leaving a sample out takes its
summand away and changes no other.

`validate` replays random halves of the problems, and compares what simulation predicted for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.attribution.credit.banzhaf import random_halves
from tsae.attribution.credit.simulations import kept_changes, simulate_kept, subsets_name
from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights, log_probabilities
from tsae.attribution.targets import Targets
from tsae.attribution.training.loss import BatchTokens, PolicyLoss
from tsae.attribution.training.optimiser import Optimiser, Simulation
from tsae.base.files import replacing
from tsae.base.progress import progress_bar
from tsae.diff.policy_gradient.derivatives import padded
from tsae.diff.policy_gradient.realised import spearman
from tsae.rollouts.table import Rollouts

Logged = dict[int, torch.Tensor]
"""(n,) log-probabilities in nats of a row's sampled tokens under the policy that sampled them."""


@dataclass(frozen=True)
class Logs:
    """What a run trained on, and how."""

    rollouts: Rollouts
    """With advantages."""
    batches: Mapping[int, np.ndarray]
    """Rows of the rollouts by the number of the step that trained on them; the first is 1."""
    loss: PolicyLoss
    optimiser: Optimiser
    batch_tokens: int = 4096
    """Tokens of a forward pass, with padding."""


@dataclass(frozen=True)
class Agreement:
    """How well simulation predicted replays."""

    rank_correlation: np.ndarray
    """(n_targets,) Spearman's, over the subsets; NaN where one side does not vary."""
    error: np.ndarray
    """(n_targets,) median |simulated − replayed| change, in units of the target."""


@torch.no_grad()
def logged_probabilities(path: TrainingPath, logs: Logs) -> Logged:
    """Compute the log-probabilities of every response, with the weights at the start of its step."""
    found: Logged = {}
    for step in range(path.steps[0] + 1, path.last + 1):
        path.put(step - 1)
        for some, ids, mask, response in _padded(logs, np.asarray(logs.batches[step]), path.trained):
            every = log_probabilities(path.trained.model, ids, mask, logs.loss.temperature)
            for row, log, sampled in zip(some.tolist(), every, response[:, 1:], strict=True):
                found[row] = log[sampled].cpu()
    return found


def replay(path: TrainingPath, logs: Logs, kept: np.ndarray, logged: Logged) -> torch.Tensor:
    """Train again on some of the samples.

    Args:
        path: of the run; the training begins at its first weights.
        logs: of the run.
        kept: (n_trajectories,) bool.
        logged: what `logged_probabilities` gave.

    Returns:
        (P,) final weights. With all samples, those of the run.
    """
    simulation = Simulation(logs.optimiser, path.weights(path.steps[0])[None].clone())
    for step in range(path.steps[0] + 1, path.last + 1):
        path.trained.put(simulation.weights[0].to(path.trained.device))
        simulation.step(_gradient(path.trained, logs, np.asarray(logs.batches[step]), kept, logged)[None])
    return simulation.weights[0]


def validate(
    store: GradientStore,
    path: TrainingPath,
    logs: Logs,
    targets: Targets,
    problem: np.ndarray,
    n: int,
    to: Path,
    mark: Any,
    *,
    seed: int = 0,
    progress: bool = True,
) -> Agreement:
    """Replay trainings on random halves of the problems, and simulate the same.

    Args:
        store: the samples' gradients.
        path: of the run.
        logs: of the run.
        targets: what is compared.
        problem: (n_trajectories,) the problem of every row of the rollouts.
        n: halves.
        to: folder for what was replayed and simulated; an interrupted call goes on from it.
        mark: tells runs and targets apart; goes into JSON.
        seed: of the halves. They are others than those from which effects of problems are regressed.
        progress: show bars.
    """
    names, place = np.unique(problem, return_inverse=True)
    kept = random_halves(len(names), n, seed + 1)[:, place]
    simulated = simulate_kept(
        store, path, logs.optimiser, targets, list(kept), to, mark, again="replayed", progress=progress
    )
    replayed = _replayed(path, logs, targets, kept, to, mark, progress)
    correlation = np.array([
        spearman(a[None], b[None])[0] if np.ptp(a) > 0 and np.ptp(b) > 0 else np.nan
        for a, b in zip(simulated.T, replayed.T, strict=True)
    ])  # fmt: skip
    return Agreement(correlation, np.median(np.abs(simulated - replayed), axis=0))


def _replayed(
    path: TrainingPath, logs: Logs, targets: Targets, kept: np.ndarray, to: Path, mark: Any, progress: bool
) -> np.ndarray:
    """(K, n_targets) changes of the targets in the replayed trainings. Replays that are on disk are read from there."""
    path.put(path.steps[0])
    before, logged, found = targets.values(path.trained), None, []
    for mask in progress_bar("replayed trainings", "training", over=list(kept), shown=progress):
        file = to / f"{subsets_name(mark, mask[None], 'really replayed')}.npz"
        if file.is_file():
            found.append(kept_changes(file, (len(targets.names),)))
            continue
        logged = logged_probabilities(path, logs) if logged is None else logged
        path.trained.put(replay(path, logs, mask, logged).to(path.trained.device))
        found.append(targets.values(path.trained) - before)
        with replacing(file) as partial, partial.open("wb") as stream:
            np.savez(stream, changes=found[-1])
    return np.array(found)


def _gradient(trained: TrainedWeights, logs: Logs, rows: np.ndarray, kept: np.ndarray, logged: Logged) -> torch.Tensor:
    """(P,) of the loss of a step's kept samples, on the CPU."""
    advantage = logs.rollouts.frame.advantage.to_numpy(dtype=float)[rows]
    weights = dict(zip(rows.tolist(), logs.loss.weights(logs.rollouts.n_sampled[rows]), strict=True))
    advantages = dict(zip(rows.tolist(), advantage, strict=True))
    total = torch.zeros(len(trained), device=trained.device)
    for parameter in trained.parameters.values():
        parameter.requires_grad_(True)
    try:
        for some, ids, mask, response in _padded(logs, rows[kept[rows] & (advantage != 0)], trained):
            log = log_probabilities(trained.model, ids, mask, logs.loss.temperature)
            then = log.detach().clone()
            then[response[:, 1:]] = torch.cat([logged[row] for row in some.tolist()]).to(then)
            of_rows = [torch.tensor([[part[row]] for row in some.tolist()]).to(log) for part in (advantages, weights)]
            summands, _ = logs.loss.summands(BatchTokens(log, response[:, 1:], of_rows[0], then))
            leaves = list(trained.parameters.values())
            gradients = torch.autograd.grad((summands * of_rows[1]).sum(), leaves, allow_unused=True)
            parts = {n: g for n, g in zip(trained.parameters, gradients, strict=True) if g is not None}
            total += trained.join(parts).to(total)
    finally:
        for parameter in trained.parameters.values():
            parameter.requires_grad_(False)
    return total.cpu()


def _padded(logs: Logs, rows: np.ndarray, trained: TrainedWeights) -> Any:
    return padded(logs.rollouts, rows, logs.batch_tokens, str(trained.device)) if len(rows) else ()
