"""Outliers: tokens whose norm is far above the median (attention sinks), which batches leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tsae.activations.catalogue import Catalogue
from tsae.activations.shards.shard import REPAIR, Shard, as_float32
from tsae.errors import TsaeError


@dataclass(frozen=True)
class NormStats:
    """Norms of the counted tokens, estimated on a sample."""

    median: float
    """Median L2 norm."""
    mean: float
    """Mean L2 norm of the tokens below the outlier limit."""
    limit: float
    """Tokens with a larger norm are left out."""
    outlier_share: float
    """Share of the sample above the limit."""


def norm_stats(norm: np.ndarray, max_norm: float, store: Catalogue, site: str) -> NormStats:
    """Statistics of (n,) L2 norms; the limit is max_norm times the median.

    Raises:
        TsaeError: where nothing but zeros is within the limit, or norms are beyond float32.
    """
    median = float(np.median(norm))
    inside = norm[norm <= max_norm * median]
    mean = float(inside.mean()) if len(inside) else 0.0
    if np.isinf([median, mean]).any():
        what = f"activations at {site} are so large that their norms are beyond float32"
        raise TsaeError(what, where=store.path, fix="Check the checkpoints, and max_norm (--max-norm).")
    if not mean > 0:
        found = f"no token is within {max_norm:g} times the median norm" if median else "most activations are 0"
        raise TsaeError(f"{found} at {site}", where=store.path, fix="Check max_norm and the site.")
    return NormStats(median, mean, max_norm * median, float((norm > max_norm * median).mean()))


class OutlierMask:
    """Which tokens of some shards are outliers, in one bit a token."""

    def __init__(self, shards: Sequence[Shard], base: np.ndarray, site: str, limit: float) -> None:
        found = np.zeros(base[-1], dtype=bool)
        for shard, low, high in zip(shards, base[:-1], base[1:], strict=True):
            np.greater(shard.norms(site), limit, out=found[low:high])
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
                raise TsaeError(
                    f"{site} is not finite in trajectory {row} (problem {problem}), token {bad[0]}",
                    where=shard.path,
                    fix=REPAIR,
                )
