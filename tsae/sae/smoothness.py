"""How smoothly features change from token to token, relative to how far the residual stream moves.

For feature f and the steps t − 1 → t of a trajectory, with Δf and Δx the changes over a step:

- *largest* (the T-SAE paper's, arXiv 2511.05541): max_t |Δf_t| / ‖Δx_t‖₂.
- *mean*: the mean over all steps of the same ratio.
- *robust*: Σ_{t ∈ T} |Δf_t| / Σ_{t ∈ T} ‖Δx_t‖₂, over T, the steps at which f is active on either side.

Each is a Lipschitz-like ratio in the same units, lower is smoother, and is averaged over the features active in a
trajectory, then over trajectories.

Why the robust one. The largest ratio is set by one step of a trajectory: one pair of nearly equal tokens (‖Δx‖ near 0)
decides it, and the expected maximum grows with the number of steps, so that longer responses look rougher. The mean has
neither fault's full weight but another: steps at which a feature is silent on both sides count as perfectly smooth, so
that the sparser of two equally abrupt features looks smoother. The ratio of sums is the mean ratio over the steps that
concern the feature, each weighted by its ‖Δx‖: a step weighs as much as the stream moves in it, length does not enter,
nor does silence. It never exceeds the largest ratio, and equals it where all steps are alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Smoothness(NamedTuple):
    """One entry a feature, (d_sae,); NaN for features that are not active, or that no counted step concerns."""

    largest: torch.Tensor
    mean: torch.Tensor
    robust: torch.Tensor


def smoothness(x: torch.Tensor, codes: torch.Tensor, inside: torch.Tensor, adjacent: torch.Tensor) -> Smoothness:
    """Of one trajectory.

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
    robust = change.sum(0) / (size @ concerned)
    nan = float("nan")
    return Smoothness(
        largest=ratio.amax(0).masked_fill(silent, nan),
        mean=ratio.mean(0).masked_fill(silent, nan),
        robust=robust.masked_fill(silent, nan),
    )
