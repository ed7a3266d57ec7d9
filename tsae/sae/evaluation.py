"""How good a T-SAE is, on problems that its training held out.

- FVE: 1 − Σ‖x − x̂‖² / Σ‖x − x̄‖², sums over tokens; from all codes, and from the high-level codes alone.
- cosine: mean over tokens of cos(x, x̂).
- L0: mean number of active latents per token, at the inference threshold.
- alive: share of latents that are active on at least one token.
- smoothness (the paper's, lower is smoother): per active feature and trajectory, the largest |Δf| / ‖Δx‖₂ between
  adjacent tokens, averaged over the features active in the trajectory, then over trajectories. Reviewers call the
  maximum fragile, so the same with the mean over adjacent tokens in place of the largest stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tsae.activations.store import ActivationStore, TokenSpan
from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE


@dataclass(frozen=True)
class Evaluation:
    """Measures of one SAE over one set of tokens."""

    n_tokens: int
    n_trajectories: int
    fve: float
    """Fraction of variance explained by all codes."""
    fve_high: float
    """Fraction of variance explained by the high-level codes alone."""
    cosine: float
    l0: float
    alive: float
    smoothness_high: float
    """Of the high-level features; the paper's measure."""
    smoothness_all: float
    """Of all features; the paper's measure."""
    smoothness_high_mean: float
    """Of the high-level features, with the mean over adjacent tokens in place of the largest."""


def check_fits(sae: TemporalSAE, store: ActivationStore) -> None:
    """That the SAE was made for the store's activations.

    Raises:
        TsaeError: where the site or d_model differ.
    """
    if sae.site not in store.sites:
        raise TsaeError(
            f"the SAE was trained at {sae.site}, the store has {', '.join(store.sites)}",
            where=store.path,
            fix="Capture that site, or train an SAE on this store.",
        )
    if store.d_model(sae.site) != sae.d_model:
        raise TsaeError(
            f"{sae.site} has d_model {store.d_model(sae.site)}, the SAE expects {sae.d_model}",
            where=store.path,
            fix="Use an SAE trained on this model, or train one on this store.",
        )


@torch.no_grad()
def evaluate(
    sae: TemporalSAE | str | Path,
    store: ActivationStore | str | Path,
    *,
    reader: str | None = None,
    span: TokenSpan = "all",
    held_out: bool | None = True,
    max_norm: float = 10.0,
    max_trajectories: int = 2000,
) -> Evaluation:
    """Measure an SAE on a store.

    Args:
        sae: or its folder.
        store: or its folder.
        reader: one reader's activations; all readers' by default.
        span: which tokens count; special tokens never do.
        held_out: True for the problems that training left out, False for the others, None for all.
        max_norm: tokens beyond this multiple of the median norm are left out, as in training.
        max_trajectories: where there are more, this many are measured, evenly spread over readers and shards.
    """
    from tsae.activations.windows import Windows

    sae = sae if isinstance(sae, TemporalSAE) else TemporalSAE.load(sae)
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    check_fits(sae, store)
    windows = Windows(store, sae.site, span=span, held_out=held_out, max_norm=max_norm)
    segments = windows.segments
    if reader is not None:
        store.reader_info(reader)
        chosen = [i for i, shard in enumerate(windows.shards) if shard.reader == reader]
        segments = segments[np.isin(segments[:, 0], chosen)]
    segments = segments[segments[:, 2] >= 2]
    if len(segments) > max_trajectories:
        segments = segments[np.linspace(0, len(segments) - 1, max_trajectories).astype(int)]
    if not len(segments):
        raise TsaeError(
            "no trajectories to measure on", where=store.path, fix="Measure on all problems (held_out=None)."
        )

    d_high, device = sae.config.d_high, sae.W_dec.device
    n = 0
    error = error_high = cosine = l0 = 0.0
    total, square = torch.zeros(sae.d_model, dtype=torch.float64), 0.0
    fired = torch.zeros(sae.config.d_sae, dtype=torch.bool, device=device)
    smooth: list[tuple[float, float, float]] = []
    for shard, start, length in segments:
        x = torch.from_numpy(windows.shards[shard].read(sae.site, slice(start, start + length))).to(device)
        inside = x.norm(dim=1) <= windows.norms.limit
        adjacent = inside[1:] & inside[:-1]
        if not bool(adjacent.any()):
            continue
        smooth.append(_smoothness(x, sae.encode(x), inside, adjacent, d_high))
        x = x[inside]
        codes = sae.encode(x)
        x_hat = sae.decode(codes)
        x_high = codes[:, :d_high] @ sae.W_dec[:d_high] + sae.b_dec
        n += len(x)
        error += (x - x_hat).pow(2).sum().item()
        error_high += (x - x_high).pow(2).sum().item()
        cosine += torch.cosine_similarity(x, x_hat, dim=1).sum().item()
        l0 += (codes > 0).sum().item()
        total += x.sum(0).double().cpu()
        square += x.double().pow(2).sum().item()
        fired |= (codes > 0).any(0)
    if not smooth:
        raise TsaeError("all tokens are beyond the outlier limit", where=store.path, fix="Raise max_norm.")
    variance = square - total.pow(2).sum().item() / n
    high, everything, high_mean = (_mean(column) for column in np.array(smooth).T)
    return Evaluation(
        n_tokens=n,
        n_trajectories=len(smooth),
        fve=1 - error / variance,
        fve_high=1 - error_high / variance,
        cosine=cosine / n,
        l0=l0 / n,
        alive=fired.float().mean().item(),
        smoothness_high=high,
        smoothness_all=everything,
        smoothness_high_mean=high_mean,
    )


def _mean(values: np.ndarray) -> float:
    """Over trajectories in which something is active; NaN where there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _smoothness(
    x: torch.Tensor, codes: torch.Tensor, inside: torch.Tensor, adjacent: torch.Tensor, d_high: int
) -> tuple[float, float, float]:
    """(largest over high-level, largest over all, mean over high-level) of one trajectory; NaN where none is active.

    Args:
        x: (T, d_model) tokens, outliers included.
        codes: (T, d_sae).
        inside: (T,) bool, tokens that count.
        adjacent: (T - 1,) bool, steps between two tokens that count.
    """
    step = (x[1:] - x[:-1]).norm(dim=1, keepdim=True).clamp_min(1e-12)
    ratio = ((codes[1:] - codes[:-1]).abs() / step)[adjacent]  # (n_steps, d_sae)
    active = (codes[inside] > 0).any(0)
    largest, mean = ratio.amax(0), ratio.mean(0)
    high = active[:d_high]
    return (
        largest[:d_high][high].mean().item(),
        largest[active].mean().item(),
        mean[:d_high][high].mean().item(),
    )
