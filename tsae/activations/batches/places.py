"""Places: every token of all shards together has a number, its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsae.activations.shards.shard import Shard

Rows = list[tuple[int, np.ndarray]]
"""(number of a shard, positions in it) of tokens, shard after shard."""


class Places:
    """The places of the tokens of some shards.

    Attributes:
        base: (n_shards + 1,) place of the first token of each shard, and the number of all tokens.
        texts: (n_texts + 1,) place of the first token of each text, a (reader, trajectory), and the number of all.
        row: (n_texts,) row id of each text in the rollouts.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.base = np.cumsum([0, *(shard.n_tokens for shard in shards)])
        begins = [low + shard.offsets[:-1] for low, shard in zip(self.base, shards, strict=False)]
        self.texts = np.concatenate([*begins, self.base[-1:]])
        self.row = np.concatenate([shard.trajectory for shard in shards])

    def first(self, windows: np.ndarray) -> np.ndarray:
        """(n,) place of the first token of windows or segments (n, 3)."""
        return np.asarray(self.base[windows[:, 0]] + windows[:, 1])

    def text(self, place: np.ndarray) -> np.ndarray:
        """(n,) index of the text of tokens."""
        return np.searchsorted(self.texts, place, side="right") - 1

    def by_shard(self, place: np.ndarray) -> Rows:
        """Where tokens are, given in the order of their shards."""
        bounds = np.searchsorted(place, self.base)
        return [
            (number, place[bounds[number] : bounds[number + 1]] - self.base[number])
            for number in np.flatnonzero(np.diff(bounds)).tolist()
        ]


def token_places(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """(sum of lengths,) places of the tokens of windows, one window after another, from the places of their begins."""
    place = np.repeat(begin - length.cumsum() + length, length)
    place += np.arange(len(place))
    return place
