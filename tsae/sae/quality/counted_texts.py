"""The trajectories of a store, whole, with the places of their counted tokens."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from tsae.activations.batches import Windows
from tsae.errors import TsaeError

T = TypeVar("T")


class Text(NamedTuple):
    """The counted tokens of one trajectory as one reader read it."""

    shard: int
    """Index into the windows' shards."""
    place: int
    """Index of the trajectory in the shard."""
    row: int
    """Row id in the rollouts."""
    tokens: np.ndarray
    """Positions in the shard, ascending."""

    @property
    def has_steps(self) -> bool:
        """Whether two counted tokens follow one another."""
        return bool((np.diff(self.tokens) == 1).any())


def counted_texts(windows: Windows) -> list[Text]:
    """Every trajectory that has counted tokens, in the order of the store."""
    texts: list[Text] = []
    shard_of, start, length = windows.segments.T
    place = np.empty_like(start)
    for number, shard in enumerate(windows.shards):
        mine = shard_of == number
        place[mine] = np.searchsorted(shard.offsets, start[mine], side="right") - 1
    edges = np.flatnonzero(np.diff(shard_of, prepend=-1) | np.diff(place, prepend=-1))
    for low, high in zip(edges, [*edges[1:], len(start)], strict=True):
        tokens = np.concatenate([np.arange(start[i], start[i] + length[i]) for i in range(low, high)])
        shard = windows.shards[shard_of[low]]
        texts.append(Text(int(shard_of[low]), int(place[low]), int(shard.trajectory[place[low]]), tokens))
    return texts


def spread(items: list[T], most: int) -> list[T]:
    """At most this many, evenly spread over the list.

    Raises:
        TsaeError: where none are asked for.
    """
    if most < 1:
        raise TsaeError(f"{most} trajectories are none", where="evaluate", fix="Ask for at least one.")
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).astype(int)]
