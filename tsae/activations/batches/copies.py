"""Which tokens are copies of one another: the same reader read the same text up to them.

A causal model computes the same activations for copies. Rollouts of one prompt share its tokens, for instance. Copies
are found by text, because the last bits of activations differ between batches of a capture.

A text is known by a hash: every (position, token id) has a pseudo-random number, and the text has their sum modulo 2⁶⁴.
Two different texts have the same sum with probability 2⁻⁶⁴. Only the sum before every 64th token is kept, in 8 bytes;
the sums between are computed when a batch needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsae.activations.batches.places import token_places
from tsae.activations.shards.shard import Shard

_EVERY = 64


class Copies:
    """Computes numbers that are equal for copies.

    Args:
        shards: whole trajectories.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        readers = {reader: i for i, reader in enumerate(dict.fromkeys(shard.reader for shard in shards))}
        self._reader = [_mixed(np.array([readers[shard.reader]])) for shard in shards]
        self._sums = [_sums(shard) for shard in shards]

    def of(self, number: int, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """(sum of lengths,) int64: equal for tokens that are copies of one another.

        Args:
            number: of a shard.
            begin: (n,) first tokens of runs of tokens there, none across trajectories.
            length: (n,) number of tokens of each.
        """
        shard, sums = self._shards[number], self._sums[number]
        first = shard.offsets[np.searchsorted(shard.offsets, begin, side="right") - 1]  # of the trajectory
        low = np.maximum(begin // _EVERY * _EVERY, first)
        start = np.where(low > first, sums[low // _EVERY], np.uint64(0))
        read = begin + length - low  # tokens that are read for a run, those before it included
        place = token_places(low, read)
        total = _running(place - np.repeat(first, read), shard.token_ids[place])
        ends = np.cumsum(read)
        before = total[ends - read]
        found = (
            total[token_places(ends - length, length) + 1] + np.repeat(start - before, length) + self._reader[number]
        )
        return found.view(np.int64)


def _sums(shard: Shard) -> np.ndarray:
    """(n,) uint64 for every 64th token of the shard: the sum over the tokens before it in its trajectory."""
    lengths = np.diff(shard.offsets)
    place = np.arange(shard.n_tokens) - np.repeat(shard.offsets[:-1], lengths)
    total = _running(place, shard.token_ids)
    at = np.arange(0, shard.n_tokens, _EVERY)
    first = shard.offsets[np.searchsorted(shard.offsets, at, side="right") - 1]
    return np.asarray(total[at] - total[first])


def _running(place: np.ndarray, token_id: np.ndarray) -> np.ndarray:
    """(n + 1,) uint64 sums over the tokens before each of (n,) tokens, and over all."""
    total = np.zeros(len(place) + 1, np.uint64)
    np.cumsum(_mixed(place << 32 | token_id), out=total[1:])
    return total


def _mixed(number: np.ndarray) -> np.ndarray:
    """(n,) uint64 pseudo-random numbers: splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195)."""
    z = number.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ z >> np.uint64(31))
