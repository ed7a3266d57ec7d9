"""What of a store an epoch reads, so that no checkpoint, run, band or outcome dominates.

A store may hold far more tokens of one reader than of another: the base reads what every run sampled, long responses
have more tokens than short ones. Tokens are divided into cells, one for every combination of the chosen axes that has
tokens, and every cell gives an epoch the same number of them. An epoch is as long as the store, n tokens, whichever
way it is divided: of C cells each gives n / C.

A cell is an endless sequence of passes; a pass is all of its tokens in an order of its own. Epoch e reads the tokens
from e · n / C to (e + 1) · n / C of that sequence. So a small cell is read several times an epoch, each time cut into
other windows, and a large one is spread over several epochs; every token of a cell is read before any is read again,
nothing is left out for good, and weights need not enter the loss. Where cells are of equal size, an epoch is one pass
through the whole store, as if it were not divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsae.activations.config import Axis
from tsae.activations.source import Source
from tsae.activations.store import Shard
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS, OUTCOMES, problem_bands


@dataclass(frozen=True)
class Cell:
    """Tokens that are alike in all axes."""

    labels: dict[str, str]
    """By axis; empty where there is one cell."""
    tokens: int
    """Counted tokens, outliers among them."""
    weight: float
    """How often an epoch reads each of them, on average over epochs."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.labels, "tokens": self.tokens, "weight": self.weight}


class Mixture:
    """The cells of a store.

    Args:
        store: activations.
        shards: of the store.
        segments: (n_segments, 3) shard, first token and number of counted tokens, each within one trajectory.
        balance: the axes by which tokens are divided; none for one cell.

    Attributes:
        cell_of: (n_segments,) index of each segment's cell.
        cells: in the order of readers, runs, bands and outcomes.

    Raises:
        TsaeError: where the band or outcome of a trajectory is unknown that would have to be balanced.
    """

    def __init__(self, store: Source, shards: Sequence[Shard], segments: np.ndarray, balance: Sequence[Axis]) -> None:
        shard_of, length = segments[:, 0], segments[:, 2]
        reader = np.array([store.readers.index(shard.reader) for shard in shards])[shard_of]
        runs = [store.reader_info(id)["run"] or id for id in store.readers]
        names: dict[Axis, Sequence[str]] = {
            "reader": store.readers,
            "run": list(dict.fromkeys(runs)),
            "band": BANDS,
            "outcome": OUTCOMES[:-1],
        }
        codes = []
        for axis in balance:
            if axis == "reader":
                codes.append(reader)
            elif axis == "run":
                codes.append(np.array([names["run"].index(run) for run in runs])[reader])
            else:
                row = rows_of(shards, segments)
                codes.append(_column(store, axis, names[axis])[row])
                _check_known(store, axis, row[codes[-1] < 0])
        self._n_tokens = int(length.sum())
        if codes:
            kinds, cell_of = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)
            self.cell_of = cell_of.reshape(-1)
        else:
            kinds, self.cell_of = np.zeros((1, 0), dtype=int), np.zeros(len(segments), dtype=int)
        tokens = np.bincount(self.cell_of, weights=length, minlength=len(kinds)).astype(int).tolist()
        self.cells = tuple(
            Cell(
                {axis: names[axis][code] for axis, code in zip(balance, kind, strict=True)},
                size,
                self._n_tokens / len(kinds) / size,
            )
            for kind, size in zip(kinds.tolist(), tokens, strict=True)
        )

    def passes(self, cell: int, epoch: int) -> Iterator[tuple[int, int, int]]:
        """(number of a pass, first token, token after the last) of every pass that an epoch reads from, in order."""
        size, low = self.cells[cell].tokens, epoch * self._n_tokens // len(self.cells)
        high = (epoch + 1) * self._n_tokens // len(self.cells)
        for number in range(low // size, -(-high // size)):
            start = number * size
            yield number, max(low - start, 0), min(high - start, size)


def rows_of(shards: Sequence[Shard], segments: np.ndarray) -> np.ndarray:
    """(n_segments,) row ids of the trajectories that segments or windows are of."""
    rows = np.empty(len(segments), dtype=np.int64)
    for number in np.unique(segments[:, 0]).tolist():
        mine, shard = segments[:, 0] == number, shards[number]
        rows[mine] = shard.trajectory[np.searchsorted(shard.offsets, segments[mine, 1], side="right") - 1]
    return rows


def _column(store: Source, axis: str, names: Sequence[str]) -> np.ndarray:
    """(n_trajectories,) index of each value; −1 for one that is unknown."""
    known = {name: i for i, name in enumerate(names)}
    values = store.rollouts.frame[axis]
    if axis == "band":  # A response that is left out of its problem's band, to compare bands, is still of that problem.
        frame = store.rollouts.frame
        values = frame.problem_id.map(problem_bands(frame))
    return np.array([known.get(value, -1) for value in values.tolist()])


def _check_known(store: Source, axis: str, unknown: np.ndarray) -> None:
    if len(unknown):
        fix = "Set bands with `tsae rollouts bands`" if axis == "band" else "Leave those trajectories out"
        raise TsaeError(
            f"the {axis} of {len(np.unique(unknown))} trajectories is unknown (first: row {unknown[0]}), so that the "
            f"data cannot be balanced by it",
            where=store.rollouts.origin,
            fix=f"{fix} and run the capture again, or balance by something else (--balance)",
        )
