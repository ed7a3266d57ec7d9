"""What would have been without it: the run's optimiser simulated on the gradients of the other samples.

Without a sample, Adam divides by another √v̂, so that shares mispredict what is missing: half of the gradients make
nearly the same steps. The simulation takes the optimiser's steps exactly, on gradients along the run's own path. It
moves the weights, and the target is evaluated there. It leaves out that the gradients themselves would have been others
on the other path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tsae.attribution.gradient_store import GradientStore
from tsae.attribution.optimiser import Optimiser, Simulation
from tsae.attribution.path import TrainingPath
from tsae.attribution.targets import Targets
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
        at_once: numbers in the weights of subsets that are simulated together; the optimiser's state takes twice more.
        progress: show bars.
    """
    if kept.ndim != 2:
        raise TsaeError(f"kept has {kept.ndim} dimensions, expected (K, n_trajectories)", where="simulate")
    kept = np.concatenate([np.ones((1, kept.shape[1])), kept.astype(float)])
    start = path.weights(path.steps[0])
    path.put(path.steps[0])
    before = targets.values(path.trained)
    each, ends = max(1, at_once // len(path.trained)), []
    with progress_bar("effects", "subset", len(kept), shown=progress) as bar:
        for low in range(0, len(kept), each):
            some = torch.as_tensor(kept[low : low + each], dtype=torch.float32)
            simulation = Simulation(optimiser, start.repeat(len(some), 1))
            for step in range(path.steps[0] + 1, path.last + 1):
                rows, gradients = store.step(step)
                simulation.step(-(some[:, rows] @ gradients))
            for weights in simulation.weights:
                path.trained.put(weights.to(path.trained.device))
                ends.append(targets.values(path.trained) - before)
                bar.update()
    return Effects(targets.names, kept[1:], np.array(ends[1:]), ends[0])
