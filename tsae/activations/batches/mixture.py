"""Mixture: how often an epoch reads each token, so that no checkpoint, run, band or outcome dominates.

A store may hold far more tokens of one reader than of another: the base reads what every run sampled, for instance.
Tokens are divided into cells, one for every combination of the chosen axes that has tokens. An epoch reads as many
tokens as the store has, n, and of each of C cells n / C.

A cell is an endless sequence of passes; each pass has all of its tokens in another order. Epoch e reads the tokens from
e · n / C to (e + 1) · n / C of that sequence. So a small cell is read several times an epoch, each time cut into other
windows, and a large one is spread over several epochs. Every token of a cell is read before any is read again, and the
loss needs no weights. Where cells are of equal size, an epoch is one pass through the whole store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsae.activations.batches.places import Places
from tsae.activations.catalogue import Catalogue
from tsae.activations.config import Axis
from tsae.activations.shards.shard import Shard
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS, OUTCOMES, problem_bands


@dataclass(frozen=True)
class Cell:
    """Tokens of the same reader, run, band or outcome, as far as these are balanced."""

    labels: dict[str, str]
    """Value of each balanced axis; empty where there is one cell."""
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
        places: of the shards' tokens.
        segments: (n_segments, 3) shard, first token and number of counted tokens, each within one trajectory.
        balance: the axes by which tokens are divided; none for one cell.

    Attributes:
        cell_of: (n_segments,) index of each segment's cell.
        cells: in the order of readers, runs, bands and outcomes.

    Raises:
        TsaeError: where the band or outcome of a trajectory is unknown that would have to be balanced.
    """

    def __init__(
        self, store: Catalogue, shards: Sequence[Shard], places: Places, segments: np.ndarray, balance: Sequence[Axis]
    ) -> None:
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
                row = places.row[places.text(places.first(segments))]
                codes.append(_codes(store, axis, names[axis], row))
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
        size = self.cells[cell].tokens
        low, high = (e * self._n_tokens // len(self.cells) for e in (epoch, epoch + 1))
        for number in range(low // size, -(-high // size)):
            start = number * size
            yield number, max(low - start, 0), min(high - start, size)


def _codes(store: Catalogue, axis: str, names: Sequence[str], rows: np.ndarray) -> np.ndarray:
    """(n,) index into `names` of the band or outcome of trajectories, given by their row ids."""
    known = {name: i for i, name in enumerate(names)}
    frame = store.rollouts.frame
    values = frame[axis]
    if axis == "band":  # A response without a band of its own still belongs to a problem with one.
        values = frame.problem_id.map(problem_bands(frame))
    codes = np.array([known.get(value, -1) for value in values.tolist()])[rows]
    unknown = rows[codes < 0]
    if len(unknown):
        fix = "Set bands with `tsae rollouts bands`" if axis == "band" else "Leave those trajectories out"
        raise TsaeError(
            f"the {axis} of {len(np.unique(unknown))} trajectories is unknown (first: row {unknown[0]}), so that the "
            f"data cannot be balanced by it",
            where=store.rollouts.origin,
            fix=f"{fix} and run the capture again, or balance by something else (--balance)",
        )
    return codes
