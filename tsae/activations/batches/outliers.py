"""Outliers: tokens far from the centre of the activations (attention sinks), which batches leave out.

Norms are distances from a centre, so that a constant in a dimension changes none of them. The centre is the median of
every dimension over a sample of tokens; sinks of any size do not move it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tsae.activations.catalogue import Catalogue
from tsae.activations.shards.shard import REPAIR, Shard, as_float32
from tsae.errors import TsaeError

if TYPE_CHECKING:
    import torch

_AT_ONCE = 8192  # rows that are read at once
_FEW = 0.1  # share of outliers without a warning
_ROUNDING = 1e-4  # of norms that are added, with room to spare


@dataclass(frozen=True)
class NormStats:
    """Norms of the counted tokens, ‖x − centre‖, estimated on a sample."""

    median: float
    """Median L2 norm."""
    mean: float
    """Mean L2 norm of the tokens below the outlier limit."""
    limit: float
    """Tokens with a larger norm are left out."""
    outlier_share: float
    """Share of the sample above the limit."""
    centre: tuple[float, ...]
    """d_model values: the median of every dimension; its mean where more than half of the sample are the same token."""

    def beyond(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…) bool: tokens above the limit."""
        return distances(x, self.centre) > self.limit

    def outliers(self, norm: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(n,) bool: tokens above the limit.

        ‖x‖ − ‖centre‖ ≤ ‖x − centre‖ ≤ ‖x‖ + ‖centre‖ decides on most tokens, so that few are read.

        Args:
            norm: (n,) ‖x‖.
            read: gives the activations (m, d_model) of m of the tokens, in float32.
        """
        import torch

        centre = float(np.linalg.norm(self.centre))
        room = _ROUNDING * (norm + centre)
        found = norm - centre - room > self.limit
        unknown = np.flatnonzero(~found & (norm + centre + room > self.limit))
        for low in range(0, len(unknown), _AT_ONCE):
            some = unknown[low : low + _AT_ONCE]
            found[some] = self.beyond(torch.from_numpy(read(some))).numpy()
        return found


def distances(x: torch.Tensor, centre: Sequence[float]) -> torch.Tensor:
    """(…, d_model) -> (…) L2 distance from a centre of d_model values; from 0 without one."""
    import torch

    x = x.float()
    return (x - torch.tensor(centre, dtype=x.dtype, device=x.device) if len(centre) else x).norm(dim=-1)


def warn_of_outliers(share: float, site: str) -> None:
    """Warn where more tokens are left out than a few sinks, such as those of a reader with another mean."""
    if share > _FEW:
        what = f"{share:.0%} of tokens at {site} are left out: they lie far from the others. Some readers or texts may"
        warnings.warn(f"{what} have another mean: take them apart, or raise max_norm.", stacklevel=3)


def norm_stats(x: np.ndarray, max_norm: float, store: Catalogue, site: str) -> NormStats:
    """Statistics of (n, d_model) finite float32 tokens; the limit is max_norm times the median norm.

    Raises:
        TsaeError: where nothing or always the same is within the limit, or norms are beyond float32.
    """
    import torch

    for middle in (np.median, np.mean):
        # As few digits as give the same float32, because the centre is written as JSON.
        centre = tuple(float(str(value)) for value in middle(x, axis=0).astype(np.float32))
        norm = distances(torch.from_numpy(x), centre).numpy()
        if median := float(np.median(norm)):
            break
    limit = max_norm * median if median else 0.0  # not infinity times 0
    inside = norm <= limit
    mean = float(norm[inside].mean()) if inside.any() else 0.0
    if not np.isfinite([median, mean]).all():
        what = f"activations at {site} are so large that their norms are beyond float32"
        raise TsaeError(what, where=store.path, fix="Check the checkpoints, and max_norm (--max-norm).")
    if not inside.any():
        what = f"no token at {site} is within {max_norm:g} times the median norm"
        raise TsaeError(what, where=store.path, fix="Raise max_norm (--max-norm).")
    if (x[inside] == x[inside][:1]).all():
        what = f"all of {inside.sum()} tokens have the same activations at {site}: there is nothing to learn"
        raise TsaeError(what, where=store.path, fix="Check the checkpoints and the site.")
    return NormStats(median, mean, limit, float(1 - inside.mean()), centre)


class OutlierMask:
    """Which tokens of some shards are outliers, in one bit a token."""

    def __init__(self, shards: Sequence[Shard], base: np.ndarray, site: str, norms: NormStats) -> None:
        found = np.zeros(base[-1], dtype=bool)
        for shard, low, high in zip(shards, base[:-1], base[1:], strict=True):
            found[low:high] = norms.outliers(shard.norms(site), partial(shard.read, site))
        self._bits = np.packbits(found, bitorder="little")

    def inside(self, place: np.ndarray) -> np.ndarray:
        """(n,) bool: tokens that are no outliers, given by their places."""
        return np.asarray(self._bits[place >> 3] >> (place & 7).astype(np.uint8) & 1 == 0)


def raise_where_not_finite(store: Catalogue, shards: Sequence[Shard], site: str, rows: np.ndarray) -> None:
    """Name the first token that is not finite among the trajectories of given row ids, if there is one.

    Raises:
        TsaeError: says where the token is.
    """
    for shard in shards:
        for place in np.flatnonzero(np.isin(shard.trajectory, rows)):
            low, high = shard.offsets[place : place + 2]
            bad = np.flatnonzero(~np.isfinite(as_float32(shard.raw(site)[low:high], shard.dtype)).all(axis=1))
            if len(bad):
                row = int(shard.trajectory[place])
                problem = store.rollouts.table["problem_id"][row].as_py()
                what = f"{site} is not finite in trajectory {row} (problem {problem}), token {bad[0]}"
                raise TsaeError(what, where=shard.path, fix=REPAIR)
