"""Segments, windows and batches as arithmetic: which tokens, in what pieces; nothing is read.

A segment is a run of counted tokens of one trajectory, a window a piece of one. Both are rows of three integers: number
of the shard, first token there, number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tsae.activations.source import Source
from tsae.activations.store import Shard


def kept_problems(store: Source, held_out: bool | None) -> np.ndarray:
    """(n_trajectories,) bool over the rollouts: every tenth problem, in order of appearance, is held out."""
    if held_out is None:
        return np.ones(len(store.rollouts), dtype=bool)
    ids = store.rollouts.table["problem_id"].to_pylist()
    order = {problem: i for i, problem in enumerate(dict.fromkeys(ids))}
    side = np.array([order[problem] % 10 == 9 for problem in ids])
    if len(order) < 10:
        # Too few problems to hold one out: both sides read everything.
        return np.ones(len(ids), dtype=bool)
    return side == held_out


def find_segments(number: int, shard: Shard, counted: np.ndarray) -> np.ndarray:
    """(n_segments, 3): the runs of counted tokens of a shard, none across trajectories."""
    first = np.zeros(shard.n_tokens + 1, dtype=bool)
    first[shard.offsets] = True
    begins = counted & (first[:-1] | ~np.concatenate([[False], counted[:-1]]))
    ends = counted & (first[1:] | ~np.concatenate([counted[1:], [False]]))
    start, stop = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    return np.stack([np.full(len(start), number), start, stop - start], axis=1).astype(np.int64)


def cut_windows(segments: np.ndarray, window: int, offset: int) -> np.ndarray:
    """(n_windows, 3): segments cut into windows, the first of each of `window − offset` tokens."""
    shard, start, length = segments.T
    n = (length + offset + window - 1) // window
    which = np.repeat(np.arange(len(n)), n)
    low = (np.arange(len(which)) - (n.cumsum() - n)[which]) * window - offset
    windows = np.empty((len(which), 3), segments.dtype)
    windows[:, 0], windows[:, 1] = shard[which], start[which]
    windows[:, 2] = np.minimum(low + window, length[which])
    np.maximum(low, 0, out=low)
    windows[:, 1] += low
    windows[:, 2] -= low
    return windows


def divided(windows: np.ndarray, numbers: range) -> Iterator[tuple[int, np.ndarray]]:
    """(number, windows) of every batch that has any.

    Batches are of equal size rather than a small last one, which might hold no pair and which BatchTopK and InfoNCE
    would treat differently.
    """
    ends = windows[:, 2].cumsum()
    n_batches = len(numbers)
    bounds = np.searchsorted(ends, np.arange(n_batches + 1) * ends[-1] // n_batches, side="right")
    for number, (low, high) in zip(numbers, pairwise(bounds.tolist()), strict=True):
        if low < high:
            yield number, windows[low:high]


def places(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Places of the tokens of windows, one after another, from the places of their first tokens."""
    place = np.repeat(begin - length.cumsum() + length, length)
    place += np.arange(len(place))
    return place
