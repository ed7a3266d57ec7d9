"""Segments of counted tokens, cut into windows, ordered and divided into batches; no activation is read.

A segment is a run of counted tokens of one trajectory, and a window is a piece of a segment. Both are rows of three
integers: number of the shard, first token there, number of tokens. The windows of an epoch are packed into one 8-byte
integer each: the place of the first token in the high bits, the number of tokens in the low ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tsae.activations.batches.mixture import Mixture
from tsae.activations.catalogue import Catalogue
from tsae.activations.shards.shard import Shard

_SOME = 1 << 16
"""Windows that are handled at a time, so that intermediate arrays stay small."""


def kept_problems(store: Catalogue, held_out: bool | None) -> np.ndarray:
    """(n_trajectories,) bool over the rollouts: every tenth problem, in order of appearance, is held out."""
    if held_out is None:
        return np.ones(len(store.rollouts), dtype=bool)
    ids = store.rollouts.table["problem_id"].to_pylist()
    order = {problem: i for i, problem in enumerate(dict.fromkeys(ids))}
    if len(order) < 10:
        # Too few problems to hold one out: both sides read everything.
        return np.ones(len(ids), dtype=bool)
    return np.array([order[problem] % 10 == 9 for problem in ids]) == held_out


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


def _pack(
    segments: np.ndarray, base: np.ndarray, window: int, offset: int, bits: int, part: int, part_bits: int
) -> np.ndarray:
    """(n_windows,) what `cut_windows` gives, packed, with the number of a part between place and length."""
    ends = ((segments[:, 2] + offset + window - 1) // window).cumsum(dtype=np.int64)
    found = np.empty(ends[-1] if len(ends) else 0, np.int64)
    edges = np.searchsorted(ends, np.arange(_SOME, len(found), _SOME))
    low = 0
    for some in np.split(segments, edges):
        windows = cut_windows(some, window, offset)
        begin = base[windows[:, 0]] + windows[:, 1]
        found[low : low + len(windows)] = (begin << part_bits | part) << bits | windows[:, 2]
        low += len(windows)
    return found


def epoch_order(
    segments: np.ndarray, base: np.ndarray, mixture: Mixture, window: int, bits: int, seed: int, epoch: int
) -> np.ndarray:
    """(n_windows,) packed, every window that an epoch reads, in its order."""
    passes = [(cell, *one) for cell in range(len(mixture.cells)) for one in mixture.passes(cell, epoch)]
    # Sorted by place and pass before the shuffle, as a single pass already is.
    part_bits = len(passes).bit_length() if len(passes) > 1 else 0
    parts = []
    for part, (cell, number, low, high) in enumerate(passes):
        offset = int(np.random.default_rng([seed, number]).integers(window))
        mine = segments[mixture.cell_of == cell]
        windows = _pack(mine, base, window, offset, bits, part, part_bits)
        if high - low < mixture.cells[cell].tokens:
            np.random.default_rng([seed, number, cell + 1]).shuffle(windows)
            # Those that begin at token low or later, and before token high.
            first, last = windows_before(windows, bits, np.array([low, high]) - 1).tolist()
            windows = windows[first + (low > 0) : last + 1].copy()
        parts.append(windows)
    windows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if part_bits:
        windows.sort()
        for low in range(0, len(windows), _SOME):
            some = windows[low : low + _SOME]
            some[:] = some >> (bits + part_bits) << bits | _lengths(some, bits)
    rng = np.random.default_rng([seed, epoch])
    rng.integers(window)  # the offset of the pass of this number
    rng.shuffle(windows)
    return windows


def length_bits(segments: np.ndarray, window: int) -> int:
    """Bits of the number of tokens of a packed window."""
    return int(min(window, segments[:, 2].max())).bit_length()


def windows_before(windows: np.ndarray, bits: int, tokens: np.ndarray) -> np.ndarray:
    """(n,) how many packed windows end at or before each of (n,) ascending numbers of tokens."""
    found, total = np.full(len(tokens), len(windows)), 0
    for low in range(0, len(windows), _SOME):
        ends = total + _lengths(windows[low : low + _SOME], bits).cumsum()
        here = slice(*np.searchsorted(tokens, [total, ends[-1]]).tolist())
        found[here] = low + np.searchsorted(ends, tokens[here], side="right")
        total = int(ends[-1])
    found[tokens < 0] = 0
    return found


def unpacked(windows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """((n,) places of first tokens, (n,) numbers of tokens) of packed windows."""
    return windows >> bits, _lengths(windows, bits)


def _lengths(windows: np.ndarray, bits: int) -> np.ndarray:
    return windows & ((1 << bits) - 1)


def divided(windows: np.ndarray, bits: int, numbers: range) -> Iterator[tuple[int, np.ndarray]]:
    """(number, packed windows) of every batch that has any.

    Batches are of equal size: a small last one might hold no pair, and BatchTopK and InfoNCE would treat it otherwise.
    """
    n_tokens = sum(int(_lengths(windows[low : low + _SOME], bits).sum()) for low in range(0, len(windows), _SOME))
    bounds = windows_before(windows, bits, np.arange(len(numbers) + 1) * n_tokens // len(numbers))
    for number, (low, high) in zip(numbers, pairwise(bounds.tolist()), strict=True):
        if low < high:
            yield number, windows[low:high]
