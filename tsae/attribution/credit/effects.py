"""What would have been without it: the run's optimiser simulated on the gradients of the other samples.

Without a sample, Adam divides by another √v̂, so that shares mispredict what is missing: half of the gradients make
nearly the same steps. The simulation takes the optimiser's steps exactly, on gradients along the run's own path. It
moves the weights, and the target is evaluated there.

On the other path the samples are not the policy's own. A run that samples anew would have other ones: importance
weights ρ make the logged samples stand for these. A run that replays the log has the trainer's loss weigh and clip them
(`tsae.attribution.training.loss`). A sample's log-ratio is taken to be linear in the weights,
⟨∇log π_i(θ_t), θ' − θ_t⟩, with the gradients that are there already, and is divided among its tokens in proportion to
their squared gradients in the logits. What is left out: that ∇log π itself, and the advantages, would have been others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, reduce

from tsae.attribution.gradients.gradient_store import GradientStore, StepGradients
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.targets import Targets
from tsae.attribution.training.loss import Again, PolicyLoss
from tsae.attribution.training.optimiser import Optimiser, Simulation
from tsae.base.progress import progress_bar
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Effects:
    """Changes of targets if only some samples had been there."""

    targets: list[str]
    kept: np.ndarray
    """(K, n_trajectories) the subsets: which trajectories of the rollouts were kept."""
    changes: np.ndarray
    """(K, n_targets) from the first checkpoint to the simulated end."""
    whole: np.ndarray
    """(n_targets,) the same, simulated with all samples."""

    @property
    def effects(self) -> np.ndarray:
        """(K, n_targets) what leaving the others out changes: subset − whole."""
        found: np.ndarray = self.changes - self.whole
        return found


def simulate(
    store: GradientStore,
    path: TrainingPath,
    optimiser: Optimiser,
    targets: Targets,
    kept: np.ndarray,
    *,
    again: Again = "on-policy",
    at_once: int = 2**28,
    progress: bool = True,
) -> Effects:
    """Simulate the run on subsets of its samples, and evaluate targets where it ends.

    Args:
        store: the samples' gradients.
        path: of the run.
        optimiser: the run's.
        targets: what is evaluated.
        kept: (K, n_trajectories) bool, or weights of the trajectories of the rollouts.
        again: whether the imagined run samples its responses anew, or replays those of the log.
        at_once: numbers in the weights of subsets that are simulated together; the optimiser's state takes twice more.
        progress: show bars.
    """
    if kept.ndim != 2:
        raise TsaeError(f"kept has {kept.ndim} dimensions, expected (K, n_trajectories)", where="simulate")
    kept = np.concatenate([np.ones((1, kept.shape[1])), kept.astype(float)])
    start, loss = path.weights(path.steps[0]), store.loss
    path.put(path.steps[0])
    before = targets.values(path.trained)
    each, ends = max(1, at_once // len(path.trained)), []
    with progress_bar("effects", "subset", len(kept), shown=progress) as bar:
        for low in range(0, len(kept), each):
            some = torch.as_tensor(kept[low : low + each], dtype=torch.float32)
            simulation = Simulation(optimiser, start.repeat(len(some), 1))
            for step in range(path.steps[0] + 1, path.last + 1):
                those = store.whole_step(step)
                weight = some[:, those.rows]
                if again == "on-policy" or loss.epsilon is not None:
                    weight = weight * _pulled(loss, those, simulation.weights - path.weights(step - 1), again)
                simulation.step(-(weight @ those.gradients))
            for weights in simulation.weights:
                path.trained.put(weights.to(path.trained.device))
                ends.append(targets.values(path.trained) - before)
                bar.update()
    return Effects(targets.names, kept[1:], np.array(ends[1:]), ends[0])


def _pulled(loss: PolicyLoss, those: StepGradients, away: torch.Tensor, again: Again) -> torch.Tensor:
    """(K, n) factors of the samples' gradients at weights that are `away`, (K, P), from the run's."""
    used = those.pulls != 0
    log_ratios = (away @ those.gradients.T) / torch.where(used, those.pulls, 1.0)
    positive = rearrange(those.pulls > 0, "n -> n 1")
    factors = torch.ones_like(log_ratios)
    for found, of_samples in zip(factors, log_ratios, strict=True):
        pulls = loss.pull(rearrange(of_samples, "n -> n 1") * those.spread, positive, again)
        found[used] = reduce(pulls * those.spread, "n t -> n", "sum")[used]
    return factors
