"""Batches of adjacent tokens, shuffled over a whole store with bounded memory.

Every trajectory's counted tokens are cut into windows of adjacent tokens, at an offset drawn anew each epoch so that
every adjacent pair is seen in time. Windows, not tokens, are shuffled; a batch is a set of windows, so that each token
is encoded once although it is a partner of both of its neighbours. Windows never cross trajectories and never hold
padding, special tokens, or tokens outside the span.

Only the index of windows is held in memory (24 bytes a window); activations are read through memory maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tsae.activations.store import ActivationStore, Shard, TokenSpan, as_float32
from tsae.errors import TsaeError


class TokenBatch(NamedTuple):
    """Windows of adjacent tokens."""

    x: np.ndarray
    """(n, d_model) float32."""
    pairs: np.ndarray
    """(n_pairs, 2) rows of x: (token t − 1, token t), adjacent in a trajectory."""
    trajectory: np.ndarray
    """(n,) row ids into the rollouts."""
    number: int = 0
    """Place in the epoch, from 0."""


@dataclass(frozen=True)
class NormStats:
    """Norms of the counted tokens, estimated on a sample."""

    median: float
    """Median L2 norm."""
    mean: float
    """Mean L2 norm of the tokens below the outlier limit."""
    limit: float
    """Tokens with a larger norm (attention sinks) are left out."""
    outlier_share: float
    """Share of the sample above the limit."""


class Windows:
    """Shuffled batches of adjacent tokens at one site.

    Args:
        store: activations.
        site: one of its sites.
        span: which tokens count; special tokens never do.
        window: tokens of a window, at least 2.
        held_out: None for all problems; else every tenth problem is held out, and this says which side is read.
        max_norm: tokens whose norm exceeds this multiple of the median are left out.
        seed: of the shuffle.

    Raises:
        TsaeError: where no tokens or no adjacent tokens are left.
    """

    def __init__(
        self,
        store: ActivationStore,
        site: str,
        *,
        span: TokenSpan = "all",
        window: int = 8,
        held_out: bool | None = None,
        max_norm: float = 10.0,
        seed: int = 0,
    ) -> None:
        if window < 2:
            raise TsaeError(f"window={window} holds no pair of adjacent tokens", where="window", fix="Use at least 2.")
        self.store, self.site, self.window, self.seed, self.max_norm = store, site, window, seed, max_norm
        self.d_model = store.d_model(site)
        self.shards = list(store.shards())
        # Looking a dataset up in its file takes longer than reading a few windows of it.
        self._maps = [shard.raw(site) for shard in self.shards]
        keep = _problems(store, held_out)
        # (n_segments, 3): shard, first token, number of tokens; a segment is a run of counted tokens of one trajectory.
        self.segments = np.concatenate([_segments(i, s, store, span, keep) for i, s in enumerate(self.shards)])
        lengths = self.segments[:, 2]
        self.n_tokens = int(lengths.sum())
        if self.n_tokens == 0:
            raise TsaeError("no tokens are left to train on", where=store.path, fix="Choose another token span.")
        if lengths.max() < 2:
            raise TsaeError(
                "no trajectory has two adjacent tokens, so that the temporal loss has no pairs",
                where=store.path,
                fix="Choose another token span, or train with temporal_weight=0.",
            )
        self.norms = self._norms(max_norm)

    def at(self, site: str) -> Windows:
        """The same windows, without looking for them again, at another site, where other tokens may be outliers."""
        other = copy(self)
        other.site, other.d_model = site, self.store.d_model(site)
        other._maps = [shard.raw(site) for shard in self.shards]
        other.norms = other._norms(self.max_norm)
        return other

    def _norms(self, max_norm: float, sample: int = 65_536) -> NormStats:
        rng = np.random.default_rng(self.seed)
        per_token = np.repeat(
            self.segments[:, 1] - np.cumsum(self.segments[:, 2]) + self.segments[:, 2], self.segments[:, 2]
        )
        shard, position = (
            np.repeat(self.segments[:, 0], self.segments[:, 2]),
            per_token + np.arange(self.n_tokens),
        )
        picked = np.sort(rng.choice(self.n_tokens, min(sample, self.n_tokens), replace=False))
        norm = self._norm(self._gather(shard[picked], position[picked]), shard[picked], position[picked])
        median = float(np.median(norm))
        inside = norm[norm <= max_norm * median]
        return NormStats(median, float(inside.mean()), max_norm * median, float((norm > max_norm * median).mean()))

    def _norm(self, x: np.ndarray, shard: np.ndarray, position: np.ndarray) -> np.ndarray:
        """(n,) L2 norms of tokens; refuses the first that is not finite."""
        norm = np.linalg.norm(x, axis=1)
        if not np.isfinite(norm).all():
            bad = int(np.flatnonzero(~np.isfinite(norm))[0])
            found, token = self.shards[shard[bad]], int(position[bad])
            place = int(np.searchsorted(found.offsets, token, side="right")) - 1
            row = int(found.trajectory[place])
            problem = self.store.rollouts.table["problem_id"][row].as_py()
            raise TsaeError(
                f"{self.site} is not finite in trajectory {row} (problem {problem}), "
                f"token {token - int(found.offsets[place])}",
                where=found.path,
                fix="Delete the store and capture again; if it stays, the model overflows: capture in another dtype.",
            )
        return norm

    def epoch(
        self, number: int, batch_tokens: int, *, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> Iterator[TokenBatch]:
        """One pass over all tokens, in an order that depends on the seed and the epoch only.

        Batches hold about batch_tokens tokens, as many as divide the pass evenly.

        Args:
            number: of the epoch.
            batch_tokens: tokens of a batch.
            start: number of the first batch; those before it are not read.
            share: (i, n) gives every n-th window of each batch from the i-th on. Shares of a batch make up the whole;
                one that has no pairs is given nevertheless, so that n processes stay in step.
        """
        rng = np.random.default_rng([self.seed, number])
        windows = self._cut(int(rng.integers(self.window)))
        rng.shuffle(windows)
        ends = windows[:, 2].cumsum()
        # Batches of equal size rather than a small last one, which might hold no pair and which BatchTopK and InfoNCE
        # would treat differently.
        n_batches = max(1, round(self.n_tokens / batch_tokens))
        bounds = np.searchsorted(ends, np.arange(n_batches + 1) * self.n_tokens // n_batches, side="right")
        for i, (low, high) in enumerate(pairwise(bounds)):
            if low == high or i < start:
                continue
            batch = self._batch(windows[low:high][share[0] :: share[1]])
            if len(batch.pairs) or share[1] > 1:
                yield batch._replace(number=i)

    def _cut(self, offset: int) -> np.ndarray:
        """(n_windows, 3): every segment cut into windows, the first of `window − offset` tokens."""
        shard, start, length = self.segments.T
        n = (length + offset + self.window - 1) // self.window
        which = np.repeat(np.arange(len(n)), n)
        step = np.arange(len(which)) - np.repeat(n.cumsum() - n, n)
        low = np.maximum(step * self.window - offset, 0)
        high = np.minimum((step + 1) * self.window - offset, length[which])
        windows = np.stack([shard[which], start[which] + low, high - low], axis=1)
        return windows[windows[:, 2] > 0]

    def _batch(self, windows: np.ndarray) -> TokenBatch:
        windows = windows[np.lexsort((windows[:, 1], windows[:, 0]))]
        shard, start, length = windows.T
        row = np.empty_like(start)
        for number in np.unique(shard):
            mine, found = shard == number, self.shards[number]
            row[mine] = found.trajectory[np.searchsorted(found.offsets, start[mine], side="right") - 1]
        which = np.repeat(np.arange(len(windows)), length)
        within = np.arange(len(which)) - np.repeat(length.cumsum() - length, length)
        x = self._gather(shard[which], start[which] + within)
        trajectory = row[which]
        follows = within > 0
        outlier = self._norm(x, shard[which], start[which] + within) > self.norms.limit
        if outlier.any():
            place = np.cumsum(~outlier) - 1
            follows[1:] &= ~outlier[1:] & ~outlier[:-1]
            current = np.flatnonzero(follows)
            pairs = np.stack([place[current - 1], place[current]], axis=1)
            return TokenBatch(x[~outlier], pairs, trajectory[~outlier])
        current = np.flatnonzero(follows)
        return TokenBatch(x, np.stack([current - 1, current], axis=1), trajectory)

    def _gather(self, shard: np.ndarray, position: np.ndarray) -> np.ndarray:
        """(n, d_model) float32 of tokens sorted by shard."""
        x = np.empty((len(shard), self.d_model), np.float32)
        bounds = np.flatnonzero(np.diff(shard, prepend=-1, append=-1))
        for low, high in pairwise(bounds.tolist()):
            x[low:high] = as_float32(self._maps[shard[low]][position[low:high]], self.shards[shard[low]].dtype)
        return x


def _problems(store: ActivationStore, held_out: bool | None) -> np.ndarray:
    """(n_trajectories,) bool over the rollouts: every tenth problem, in order of appearance, is held out."""
    ids = store.rollouts.table["problem_id"].to_pylist()
    if held_out is None:
        return np.ones(len(ids), dtype=bool)
    order = {problem: i for i, problem in enumerate(dict.fromkeys(ids))}
    side = np.array([order[problem] % 10 == 9 for problem in ids])
    if len(order) < 10:
        # Too few problems to hold one out: both sides read everything.
        return np.ones(len(ids), dtype=bool)
    return side == held_out


def _segments(number: int, shard: Shard, store: ActivationStore, span: TokenSpan, keep: np.ndarray) -> np.ndarray:
    lengths = np.diff(shard.offsets)
    counted = shard.token_span(store.rollouts, span, store.special_ids) & np.repeat(keep[shard.trajectory], lengths)
    first = np.zeros(shard.n_tokens + 1, dtype=bool)
    first[shard.offsets] = True
    begins = counted & (first[:-1] | ~np.concatenate([[False], counted[:-1]]))
    ends = counted & (first[1:] | ~np.concatenate([counted[1:], [False]]))
    start, stop = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    return np.stack([np.full(len(start), number), start, stop - start], axis=1).astype(np.int64)
