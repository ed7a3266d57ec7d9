"""How much variance a reconstruction can explain that moves less than the residual stream does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.optimize


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
