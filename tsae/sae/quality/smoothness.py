"""Smoothness: how much features change from token to token, relative to how far the residual stream moves.

For feature f and the steps t − 1 → t of a trajectory, with Δf and Δx the changes over a step:

- *largest* (the T-SAE paper's, arXiv 2511.05541): max_t |Δf_t| / ‖Δx_t‖₂.
- *mean*: the mean over all steps of the same ratio.
- *robust*: Σ_{t ∈ T} |Δf_t| / Σ_{t ∈ T} ‖Δx_t‖₂, over T, the steps at which f is active on either side.

Each is a Lipschitz-like ratio in the same units, lower is smoother, and is averaged over the features active in a
trajectory, then over trajectories.

Why the robust measure. One step of a trajectory sets the largest ratio: a pair of nearly equal tokens (‖Δx‖ near 0)
decides it. The expected maximum also grows with the number of steps, so that longer responses look rougher. The mean
suffers less from both, but counts steps at which a feature is silent on both sides as perfectly smooth: of two equally
abrupt features the sparser one looks smoother. The ratio of sums is the mean ratio over the steps that concern the
feature, each weighted by its ‖Δx‖. Neither length nor silence changes it. It never exceeds the largest ratio, and
equals it where all steps are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.optimize
import torch
from einops import reduce


class Smoothness(NamedTuple):
    """(d_sae,) one entry for each feature; NaN where it is not active, or active at no counted step."""

    largest: torch.Tensor
    mean: torch.Tensor
    robust: torch.Tensor


def smoothness(x: torch.Tensor, codes: torch.Tensor, inside: torch.Tensor, adjacent: torch.Tensor) -> Smoothness:
    """Smoothness of every feature in one trajectory.

    Args:
        x: (T, d_model) tokens.
        codes: (T, d_sae).
        inside: (T,) bool, tokens that count.
        adjacent: (T - 1,) bool, steps between two tokens that count and follow one another.
    """
    size = (x[1:] - x[:-1]).norm(dim=1)[adjacent].clamp_min(1e-12)  # (n_steps,)
    change = (codes[1:] - codes[:-1]).abs()[adjacent]  # (n_steps, d_sae)
    active = codes > 0
    concerned = (active[1:] | active[:-1])[adjacent].to(change.dtype)
    ratio = change / size[:, None]
    silent = ~active[inside].any(0)
    # 0 / 0, a feature active only on tokens without a counted neighbour, is NaN as it should be.
    robust = reduce(change, "step feature -> feature", "sum") / (size @ concerned)
    nan = float("nan")
    return Smoothness(
        largest=reduce(ratio, "step feature -> feature", "max").masked_fill(silent, nan),
        mean=reduce(ratio, "step feature -> feature", "mean").masked_fill(silent, nan),
        robust=robust.masked_fill(silent, nan),
    )


class SlowVariance:
    """The variance that a reconstruction can explain if it moves less than the residual stream does.

    Of a reconstruction y of trajectories x, its roughness r is the root of Σ_t ‖Δy_t‖² / Σ_t ‖Δx_t‖². Two answers:

    - `bound`: no y of roughness r explains more. The best is known: y = (I + λ DᵀD)⁻¹ x along every run of adjacent
      tokens, D the differences (Whittaker 1923), which damps the cosine of frequency k of a run of T tokens to
      1 / (1 + 4 λ sin²(π k / 2T)). It sees the tokens to come, and is not made of features.
    - `linear`: what the best linear function of the token alone explains, y = W x with W = C (C + λ E)⁻¹, C the
      covariance of x and E that of its steps (as in slow feature analysis, Wiskott & Sejnowski 2002). An encoder sees
      no more than the token, but is not linear, so that this is a landmark, no bound.
    """

    def __init__(self, d_model: int) -> None:
        self.n = 0
        self.energy: list[np.ndarray] = []
        self.rate: list[np.ndarray] = []
        self.total = np.zeros(d_model)
        self.square, self.steps = np.zeros((d_model, d_model)), np.zeros((d_model, d_model))

    def add(self, run: np.ndarray) -> None:
        """A run of adjacent tokens, (T, d_model)."""
        run = run.astype(np.float64)
        self.n += len(run)
        self.total += run.sum(0)
        self.square += run.T @ run
        step = np.diff(run, axis=0)
        self.steps += step.T @ step
        self.energy.append(np.square(scipy.fft.dct(run, axis=0, norm="ortho")).sum(1))
        self.rate.append(4 * np.sin(np.pi * np.arange(len(run)) / (2 * len(run))) ** 2)

    def bound(self, roughness: float) -> float:
        """The largest FVE of any reconstruction of this roughness or less."""
        energy, rate = np.concatenate(self.energy), np.concatenate(self.rate)
        variance = np.trace(self.square) - self.total @ self.total / self.n

        def explained(damping: float) -> tuple[float, float]:
            kept = 1 / (1 + damping * rate)
            moved = (rate * kept**2 * energy).sum() / (rate * energy).sum()
            return moved, 1 - ((1 - kept) ** 2 * energy).sum() / variance

        return _at(explained, roughness)

    def linear(self, roughness: float) -> float:
        """The FVE of the best linear function of a token that has this roughness."""
        covariance = self.square - np.outer(self.total, self.total) / self.n
        covariance.flat[:: len(covariance) + 1] += 1e-9 * np.trace(covariance) / len(covariance)
        # Directions in which tokens have covariance 1, and steps the covariance `rate`.
        rate, axes = scipy.linalg.eigh(self.steps, covariance)
        size = np.square(covariance @ axes).sum(0)
        moves = rate * size

        def explained(damping: float) -> tuple[float, float]:
            kept = 1 / (1 + damping * rate)
            return (moves * kept**2).sum() / moves.sum(), 1 - (size * (1 - kept) ** 2).sum() / size.sum()

        return _at(explained, roughness)


def _at(explained: Callable[[float], tuple[float, float]], roughness: float) -> float:
    """The FVE at the damping that leaves this roughness; `explained` gives (roughness², FVE), which both fall."""
    if explained(0.0)[0] <= roughness**2:
        return explained(0.0)[1]
    found = scipy.optimize.brentq(lambda log: explained(np.exp(log))[0] - roughness**2, -40, 40, xtol=1e-6)
    return explained(np.exp(found))[1]
