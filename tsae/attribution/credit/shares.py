"""Who did it: the realised change of a target, split over the samples of the run so that the parts add up.

    F(θ_T) − F(θ_0) = Σ_t ∇F_tᵀ u_t + remainder          ∇F_t: mean of the gradients before and after step t (trapezoid)

A step u_t is a sum over the gradients of all samples up to it (`tsae.attribution.training.optimiser`). Put together by
sample, the share of a sample i of step s is

    ⟨w_s, g_si⟩        w_s = −c_s Σ_{t ≥ s} lr_t k_{t−s,t} ∘ ∇F_t

w_s follows from w_{s+1}, backwards through the run. What weight decay did is a part of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.targets import Targets
from tsae.attribution.training.optimiser import Optimiser, Simulation
from tsae.base.progress import progress_bar
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Shares:
    """Shares of samples in the changes of targets."""

    targets: list[str]
    rows: np.ndarray
    """(n,) of the rollouts."""
    steps: np.ndarray
    """(n,) the step that trained on each."""
    shares: np.ndarray
    """(n, n_targets) in units of the targets."""
    norms: np.ndarray
    """(n,) of the samples' gradients."""
    plain: dict[str, np.ndarray]
    """(n, n_targets) inner products without the optimiser, by name: `path` with the target's gradient at the step,
    times the learning rate (TracIn; Pruthi et al. 2020), `base` with the target's gradient before the run."""
    decay: np.ndarray
    """(n_targets,) the part of weight decay."""
    segments: pd.DataFrame
    """One row a target and segment between checkpoints: target, first (steps finished before), last, realised,
    predicted, remainder (realised − predicted), and path_error: the distance of the simulated from the realised move of
    the weights, as a share of the latter."""

    @property
    def realised(self) -> np.ndarray:
        """(n_targets,) change over the whole path."""
        return self._sums("realised")

    @property
    def remainder(self) -> np.ndarray:
        """(n_targets,) what the shares and weight decay leave unexplained."""
        return self._sums("remainder")

    def _sums(self, column: str) -> np.ndarray:
        # pandas' own sum leaves NaN out.
        total = self.segments.groupby("target", sort=False)[column].agg(lambda values: values.to_numpy().sum())
        found: np.ndarray = total[self.targets].to_numpy()
        return found


def shares(
    store: GradientStore,
    path: TrainingPath,
    optimiser: Optimiser,
    targets: Targets,
    *,
    keep: Callable[[int, torch.Tensor], None] | None = None,
    progress: bool = True,
) -> Shares:
    """Split the changes of targets over the samples of the run.

    Args:
        store: the samples' gradients; its steps are those of the path, from the first.
        path: of the run; targets are differentiated at its checkpoints, and in between interpolated.
        optimiser: the run's.
        targets: what is split.
        keep: is given every step and its w_s of every target, (n_targets, P), the last step first. A share of anything
            whose gradient is known, such as a token, is the inner product with it.
        progress: show bars.

    Raises:
        TsaeError: where two targets have one name, or shares are not finite.
    """
    if len(set(targets.names)) < len(targets.names):
        twice = next(name for name in targets.names if targets.names.count(name) > 1)
        raise TsaeError(f"two targets are named {twice!r}", where="shares", fix="Give each a name of its own.")
    run = _forward(store, path, optimiser, progress)
    n, first_knot = len(targets.names), path.steps[0]
    ahead, base = torch.zeros(n, len(path.trained)), _at(path, targets, first_knot)[1]
    decay, found, norms, rows, steps = np.zeros(n), [], [], [], []
    segments: list[dict[str, object]] = []
    with progress_bar("shares", "step", path.last - first_knot, shown=progress) as bar:
        value, slope = _at(path, targets, path.last)
        for low, high in zip(path.steps[-2::-1], path.steps[:0:-1], strict=True):
            value_low, slope_low = _at(path, targets, low)
            predicted, moved = np.zeros(n), torch.zeros(len(path.trained))
            for step in range(high, low, -1):
                # The mean of the gradients before and after the step, both on the line between the checkpoints.
                middle = torch.lerp(slope_low, slope, (step - 0.5 - low) / (high - low))
                update, shrunk = run.updates[step], run.shrunk(step)
                predicted += (middle @ (update + shrunk)).numpy()
                decay += (middle @ shrunk).numpy()
                moved += update + shrunk
                ahead = ahead * run.carried + middle * run.scales[step]
                numbers, gradients = store.step(step)
                ahead_of_step = ahead * run.clips[step]
                if keep is not None:
                    keep(step, ahead_of_step)
                against = torch.cat([ahead_of_step, middle * optimiser.rate(step), base])
                found.append((gradients @ against.T).numpy())
                norms.append(gradients.norm(dim=1).numpy())
                decay -= (ahead @ run.pulled(step)).numpy()
                rows.append(numbers)
                steps.append(np.full(len(numbers), step))
                bar.update()
            realised = value - value_low
            went = path.knots[high] - path.knots[low]
            error = float((moved - went).norm() / went.norm().clamp_min(1e-30))
            for j, name in enumerate(targets.names):
                segments.append(
                    {
                        "target": name,
                        "first": low,
                        "last": high,
                        "realised": realised[j],
                        "predicted": predicted[j],
                        "remainder": realised[j] - predicted[j],
                        "path_error": error,
                    }
                )
            value, slope = value_low, slope_low
    share, path_products, base_products = np.split(np.concatenate(found[::-1]), 3, axis=1)
    if not (np.isfinite(share).all() and np.isfinite(decay).all()):
        raise TsaeError(
            "shares of samples are not finite",
            where="shares",
            fix="Look at the settings of the training, and at its log for advantages that are not finite.",
        )
    return Shares(
        targets.names,
        np.concatenate(rows[::-1]),
        np.concatenate(steps[::-1]),
        share,
        np.concatenate(norms[::-1]),
        {"path": path_products, "base": base_products},
        decay,
        pd.DataFrame(segments[::-1]),
    )


def _at(path: TrainingPath, targets: Targets, after: int) -> tuple[np.ndarray, torch.Tensor]:
    """Values and gradients of the targets at a checkpoint."""
    path.put(after)
    return targets.values(path.trained), targets.gradients(path.trained).float().cpu()


@dataclass(frozen=True)
class _Run:
    """The run's optimiser, step by step."""

    optimiser: Optimiser
    path: TrainingPath
    carried: float
    """Share of the momentum that goes on to the next step."""
    updates: dict[int, torch.Tensor]
    """(P,) moves of the weights, without decoupled decay."""
    scales: dict[int, torch.Tensor]
    """(P,) what multiplies ∇F_t: lr_t k_{0,t}."""
    clips: dict[int, float]

    def shrunk(self, step: int) -> torch.Tensor:
        """(P,) what decoupled weight decay did in a step."""
        o = self.optimiser
        if not o.weight_decay or o.name != "adamw":
            return torch.zeros(len(self.path.trained))
        return -o.rate(step) * o.weight_decay * self.path.weights(step - 1)

    def pulled(self, step: int) -> torch.Tensor:
        """(P,) what weight decay added to a step's gradient."""
        o = self.optimiser
        if not o.weight_decay or o.name == "adamw":
            return torch.zeros(len(self.path.trained))
        return o.weight_decay * self.path.weights(step - 1)


def _forward(store: GradientStore, path: TrainingPath, optimiser: Optimiser, progress: bool) -> _Run:
    """Simulate the run on its own gradients, and keep what its steps were made of."""
    simulation = Simulation(optimiser, path.weights(path.steps[0])[None].clone())
    run = _Run(optimiser, path, optimiser.betas[0] if simulation.second is not None else optimiser.momentum, {}, {}, {})
    for step in progress_bar("optimiser", "step", over=range(path.steps[0] + 1, path.last + 1), shown=progress):
        # The gradient of −loss is in the store: the samples' sum, with the sign of the loss.
        gradient = -store.step(step)[1].sum(0)
        run.clips[step] = float(optimiser.clip(gradient.norm()))
        before = simulation.weights.clone()
        simulation.step(gradient[None])
        run.updates[step] = (simulation.weights - before)[0] - _decayed(optimiser, step, before[0])
        rate = optimiser.rate(step)
        if simulation.second is None:
            run.scales[step] = torch.full_like(gradient, rate)
        else:
            beta = optimiser.betas[0]
            run.scales[step] = rate * (1 - beta) / ((1 - beta**simulation.step_number) * simulation.scale()[0])
    return run


def _decayed(optimiser: Optimiser, step: int, weights: torch.Tensor) -> torch.Tensor:
    if not optimiser.weight_decay or optimiser.name != "adamw":
        return torch.zeros_like(weights)
    return -optimiser.rate(step) * optimiser.weight_decay * weights
