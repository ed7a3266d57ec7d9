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

from typing import NamedTuple

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
