"""The activations that a live training holds: portions of bounded size in all, of which the newest stay.

A portion is what one forward pass computes. Whenever it is computed, it has the same bits. So a training does not
depend on what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tsae.activations.shards.shard import DTYPES, as_float32

_AT_ONCE = 8192  # rows that are widened to float32 at once


class Ring:
    """Portions in memory.

    Args:
        n_rows: tokens that it holds at most.
        d_model: width.
        dtype: stored precision.

    Attributes:
        values: (n_rows, d_model) in the stored precision.
        norms: (n_rows,) float32 L2 norms.
    """

    def __init__(self, n_rows: int, d_model: int, dtype: str) -> None:
        self.dtype = dtype
        self.values = np.empty((n_rows, d_model), DTYPES[dtype])
        self.norms = np.zeros(n_rows, np.float32)
        # By portion; the one used longest ago comes first.
        self._rows: dict[int, np.ndarray] = {}

    def rows(self, portions: Iterable[int]) -> list[np.ndarray]:
        """The rows of each portion, all of which are held."""
        return [self._rows[portion] for portion in portions]

    def missing(self, sizes: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Make room for portions; those that have to be put, each with its rows.

        Args:
            sizes: tokens of every portion that is needed; together at most n_rows.
        """
        found = {portion: self._rows.pop(portion) for portion in sizes if portion in self._rows}
        wanted = [portion for portion in sizes if portion not in found]
        free = len(self.norms) - sum(map(len, (*self._rows.values(), *found.values())))
        while free < sum(sizes[portion] for portion in wanted):
            free += len(self._rows.pop(next(iter(self._rows))))
        self._rows |= found
        taken = np.zeros(len(self.norms), dtype=bool)
        for rows in self._rows.values():
            taken[rows] = True
        ends = np.cumsum([sizes[portion] for portion in wanted])
        return dict(zip(wanted, np.split(np.flatnonzero(~taken), ends)[:-1] if wanted else (), strict=True))

    def put(self, portion: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Write (n, d_model) values in the stored precision to the rows that `missing` gave."""
        self.values[rows] = values
        for low in range(0, len(rows), _AT_ONCE):
            wide = as_float32(values[low : low + _AT_ONCE], self.dtype)
            self.norms[rows[low : low + _AT_ONCE]] = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        self._rows[portion] = rows

    def use(self, portions: Iterable[int]) -> None:
        """Note that these portions, all of which are held, are used in this order."""
        for portion in portions:
            self._rows[portion] = self._rows.pop(portion)
