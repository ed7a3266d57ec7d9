"""The first value of the decoder bias, from a sample of tokens."""

from __future__ import annotations

from itertools import count

import numpy as np

from tsae.errors import TsaeError
from tsae.sae.config import InitialBias

_CHUNK = 4096  # tokens in float64 at once
_CLOSE = 1e-8  # a step, as a share of the mean distance, after which the next ones change nothing that matters
_MOST = 10_000  # steps


def initial_bias(x: np.ndarray, kind: InitialBias) -> np.ndarray:
    """(d_model,) float64: where the decoder bias starts.

    Args:
        x: (n, d_model) sample of tokens.
        kind: their geometric median (Bricken et al. 2023, https://transformer-circuits.pub/2023/monosemantic-features,
            and the T-SAE authors' code), which a few large tokens move less than they move the mean; the mean; or zero.
    """
    if kind == "zero":
        return np.zeros(x.shape[1])
    return geometric_median(x) if kind == "geometric_median" else x.mean(0, dtype=np.float64)


def geometric_median(x: np.ndarray) -> np.ndarray:
    """(d,) float64: the point with the least sum of distances to the rows of x (n, d).

    Weiszfeld's iteration from the mean, with the step of Vardi and Zhang (2000, doi:10.1073/pnas.97.4.1423) where it
    stands on a row, until a step is shorter than 1e-8 of the mean distance.

    Raises:
        TsaeError: where it does not converge.
    """
    median = x.mean(0, dtype=np.float64)
    for step in count():
        distance = _distances(x, median)
        scale = distance.mean()
        if scale == 0:
            return median
        apart = distance > 0
        weight = np.divide(1, distance, out=np.zeros_like(distance), where=apart)
        target = _weighted_sum(x, weight) / weight.sum()
        # The rows that it stands on hold it with force 1 each, against the pull of the others.
        held, pull = len(x) - apart.sum(), weight.sum() * np.linalg.norm(target - median)
        move = (target - median) * (0 if held >= pull else 1 - held / pull)
        median = median + move
        if np.linalg.norm(move) <= _CLOSE * scale:
            break
        if step == _MOST:
            raise TsaeError(
                f"the geometric median of {len(x)} tokens has not converged after {step} steps",
                where="TrainingConfig.initial_bias",
                fix="Start from the mean (--initial-bias mean).",
            )
    # A median that is one of the rows is approached, but not reached.
    nearest = x[_distances(x, median).argmin()].astype(np.float64)
    return min(median, nearest, key=lambda point: _distances(x, point).sum())


def _distances(x: np.ndarray, point: np.ndarray) -> np.ndarray:
    parts = [x[low : low + _CHUNK] - point for low in range(0, len(x), _CHUNK)]
    return np.concatenate([np.sqrt(np.einsum("nd,nd->n", part, part)) for part in parts])


def _weighted_sum(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1])
    for low in range(0, len(x), _CHUNK):
        total += weight[low : low + _CHUNK] @ x[low : low + _CHUNK].astype(np.float64)
    return total
