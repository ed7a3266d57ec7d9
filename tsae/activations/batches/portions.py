"""Portions: what one forward pass of live models reads, and the order in which a training's epochs read them.

The last bits of an activation depend on the forward pass. So the passes are planned once for a training: a portion is
some texts of one reader and one cell of the mixture, of similar length. An epoch shuffles portions, not texts, and
begins with those that the epoch before read last. These may still be held (`tsae.activations.ring`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tsae.activations.batches.mixture import Mixture
from tsae.activations.batches.places import Places
from tsae.activations.batches.segments import cut_windows
from tsae.activations.reader.forward_passes import plan_batches


class Portions:
    """The portions of a training.

    Args:
        places: of all tokens.
        segments: (n_segments, 3) shard, first token and number of counted tokens.
        reader: (n_segments,) number of the reader.
        mixture: of the segments.
        budget: from the tokens that a reader reads of a cell, those of a forward pass, with padding.
        most: tokens that are held at most.
        window: tokens of a window.
        seed: of the order.

    Attributes:
        texts: of every portion, the indices of its texts.
        segments_of: of every portion, the indices of its segments.
        reader: (n_portions,)
        size: (n_portions,) counted tokens.
        budgets: of every portion, tokens of its forward pass, with padding.
        of_text: (n_texts,) portion of a text; -1 for a text without counted tokens.
    """

    def __init__(
        self,
        places: Places,
        segments: np.ndarray,
        reader: np.ndarray,
        mixture: Mixture,
        budget: Callable[[int], int],
        most: int,
        window: int,
        seed: int,
    ) -> None:
        self._places, self._segments, self._mixture = places, segments, mixture
        self._most, self._window, self._seed = most, window, seed
        self._known: tuple[int, np.ndarray | None] = (0, None)  # an epoch and what it finds
        text_of_segment = self._text_of(segments)
        present, first = np.unique(text_of_segment, return_index=True)
        lengths = np.diff(places.texts)[present]
        kinds = np.stack([reader, mixture.cell_of], axis=1)[first]
        self.texts: list[np.ndarray] = []
        self.budgets: list[int] = []
        readers, cells = [], []
        for kind in np.unique(kinds, axis=0):
            mine = np.flatnonzero((kinds == kind).all(axis=1))
            of_pass = budget(int(lengths[mine].sum()))
            for batch in plan_batches(lengths[mine], of_pass):
                self.texts.append(present[mine[np.sort(batch)]])
                self.budgets.append(of_pass)
                readers.append(int(kind[0]))
                cells.append(int(kind[1]))
        self.reader, self._cell = np.array(readers), np.array(cells)
        self.of_text = np.full(len(places.row), -1)
        self.of_text[np.concatenate(self.texts)] = np.repeat(np.arange(len(readers)), list(map(len, self.texts)))
        self._of_segment = self.of_text[text_of_segment]
        self.size = np.bincount(self._of_segment, weights=segments[:, 2]).astype(np.int64)
        by_portion = np.argsort(self._of_segment, kind="stable")
        bounds = np.searchsorted(self._of_segment[by_portion], np.arange(1, len(readers)))
        self.segments_of = np.split(by_portion, bounds)

    def of(self, windows: np.ndarray) -> np.ndarray:
        """(n,) portion of windows or segments (n, 3)."""
        return np.asarray(self.of_text[self._text_of(windows)])

    def blocks(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(portions, windows) of every block of an epoch, in order.

        Portions are in the order in which they are used. Windows are rows of three, in no order: shard, first token and
        number of tokens.
        """
        parts: list[np.ndarray] = []
        items: list[np.ndarray] = []
        n = len(self.size)
        for part, (cell, number, low, high) in enumerate(self._passes(epoch)):
            mine = np.flatnonzero(self._mixture.cell_of == cell)
            if high - low < self._mixture.cells[cell].tokens:
                # Divided between epochs by whole portions, so that few are read for part of their tokens.
                mine = mine[np.argsort(self._rank(cell, number)[self._of_segment[mine]], kind="stable")]
            offset = int(np.random.default_rng([self._seed, number]).integers(self._window))
            windows = cut_windows(self._segments[mine], self._window, offset)
            begins = windows[:, 2].cumsum() - windows[:, 2]
            parts.append(windows[(begins >= low) & (begins < high)])
            items.append(part * n + self.of(parts[-1]))
        order = self._order(epoch)
        block_of = equal_blocks(self.size[order % n], self._most)
        place = np.zeros(len(parts) * n, dtype=np.int64)
        place[order] = np.arange(len(order))
        windows, at = np.concatenate(parts), place[np.concatenate(items)]
        by_block = np.argsort(block_of[at], kind="stable")
        edges = np.flatnonzero(np.diff(block_of[at][by_block])) + 1
        return [(_once(order[np.unique(at[mine])] % n), windows[mine]) for mine in np.split(by_block, edges)]

    def _text_of(self, windows: np.ndarray) -> np.ndarray:
        return self._places.text(self._places.first(windows))

    def _passes(self, epoch: int) -> list[tuple[int, int, int, int]]:
        """(cell, number, first token, token after the last) of every pass that an epoch reads from."""
        mixture = self._mixture
        return [(cell, *one) for cell in range(len(mixture.cells)) for one in mixture.passes(cell, epoch)]

    def _rank(self, cell: int, number: int) -> np.ndarray:
        """(n_portions,) in which order a pass that is divided between epochs reads them."""
        return np.random.default_rng([self._seed, number, cell + 1]).permutation(len(self.size))

    def _order(self, epoch: int) -> np.ndarray:
        """(n,) items of an epoch in their order. An item is a portion in a pass: number of the pass · all + portion."""
        size, items = self.size, []
        for part, (cell, number, low, high) in enumerate(self._passes(epoch)):
            mine = np.flatnonzero(self._cell == cell)
            if high - low < self._mixture.cells[cell].tokens:
                mine = mine[np.argsort(self._rank(cell, number)[mine])]
                ends = size[mine].cumsum()
                mine = np.sort(mine[(ends > low) & (ends - size[mine] < high)])
            # A portion that two passes of an epoch read counts as two, which may fall into different blocks.
            items.append(part * len(size) + mine)
        every = np.random.default_rng([self._seed, epoch]).permutation(np.concatenate(items))
        held = self._found_by(epoch)
        if held is None:
            return every
        first = held[every % len(size)]
        return np.concatenate([every[first], every[~first]])

    def _found_by(self, epoch: int) -> np.ndarray | None:
        """(n_portions,) bool: what the epochs before leave behind, where all else makes room for it.

        Reckoned, not looked up, so that the order is a function of the epoch.
        """
        at, held = self._known if self._known[0] <= epoch else (0, None)
        while at < epoch:
            self._known = at, held
            last = _once(self._order(at)[::-1] % len(self.size))
            at, held = at + 1, np.zeros(len(self.size), dtype=bool)
            held[last[self.size[last].cumsum() <= self._most]] = True
        self._known = at, held
        return held


def _once(numbers: np.ndarray) -> np.ndarray:
    """The numbers where they appear first, in their order."""
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


def equal_blocks(size: np.ndarray, most: int) -> np.ndarray:
    """(n,) number of the block of every item, ascending: few blocks of about equal size, none above `most` tokens.

    Args:
        size: (n,) tokens of the items, in the order in which they fill blocks; none above `most`.
        most: tokens of a block.
    """
    ends = size.cumsum()
    n = -(-int(ends[-1]) // most)
    while True:
        block = (ends - 1) * n // ends[-1]
        if np.bincount(block, weights=size).max() <= most:
            return np.unique(block, return_inverse=True)[1]
        n += 1 + n // 20
