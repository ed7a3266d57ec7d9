"""Activations straight from the models: training and encoding without a store.

A store of 100 M tokens of a 7B model takes most of a terabyte. Here the readers compute activations while training
runs, and memory holds a bounded number of tokens, `LiveConfig.buffer_tokens`.

1. The windows of an epoch are those of `tsae.activations.windows`. Their trajectories are divided into portions of
   similar length: what one forward pass reads, always the same. The last bits of an activation depend on the forward
   pass, so the passes are planned once for a training. Portions are shuffled and cut into blocks of about equal size,
   each of which can be held at once.
2. For every block the readers read the portions that are not held, and the counted tokens take the place of the
   portions used longest ago.
3. The windows of the block are shuffled and cut into batches. Then comes the next block.

So a batch mixes the trajectories of one block, where a store mixes all; every counted token still comes once a pass.
An epoch begins with what the epoch before held last: if everything fits, the models read every trajectory once, and if
a third fits, each later epoch saves a third.

Which tokens an epoch reads, and in which order, is known without a model, and a portion has the same bits whenever it
is computed. So a resumed training skips finished blocks: it computes the first, on which norms are estimated, and the
one in which it stopped. A portion that does not fit into memory is read with half the tokens in a forward pass. A
warning says so, and training.json keeps it (`short_of_memory`): the same training gives the same bits where memory runs
out at the same sizes again.

Encoding reads every trajectory once, in the order of the shards that a capture would write, and holds nothing.

Cost: forward passes through the layers up to the site for what is not held, in every process; training waits while a
block is filled. A held token takes d_model values of the stored precision, and 12 bytes of memory besides. Token ids
take 4 bytes for every token of every reader, and the index 12 bytes a window.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.activations.batches import TokenBatch, Windows
from tsae.activations.config import LiveConfig
from tsae.activations.forward_batches import OutOfMemory, naming_trajectories, plan_batches, read_batches, storing
from tsae.activations.manifest import KIND, VERSION
from tsae.activations.reading_plan import cut, open_base, open_reader
from tsae.activations.shard import DTYPES, Piece, Shard, as_float32, as_stored
from tsae.activations.store import Source
from tsae.activations.windows import Rows, cut_windows, token_places
from tsae.base.part import world_size
from tsae.base.usual_state import usual_state
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.checkpoints.loading import need_unchanged
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_SHARD_TOKENS = 500_000
"""Tokens of one of the shards in which token ids are given."""


class LiveSource(Source):
    """What a store of one site would hold, computed when training asks for it.

    Args:
        series: the readers.
        rollouts: what they read.
        site: TransformerLens name; by default the output of the middle block.
        config: defaults of `LiveConfig`.

    Raises:
        TsaeError: as `tsae.capture`, for an unknown site, tokenizers that do not fit, or trajectories longer than the
            context.
    """

    @usual_state()
    def __init__(
        self, series: CheckpointSeries, rollouts: Rollouts, site: str | None = None, *, config: LiveConfig | None = None
    ) -> None:
        self.series, self.config = series, config or LiveConfig()
        self.path = Path(rollouts.origin)
        self.rollouts = rollouts
        base = open_base(series, rollouts, [site] if site else [], self.config, self.config.device)
        (self.site,) = base.sites
        # By reader; the least recently used comes first.
        self._readers: dict[str, Any] = {}
        if self.config.backend == "huggingface":
            self._readers[series.base.id] = HuggingFaceReader(base.model, base.sites)
        lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
        self._pieces: dict[str, list[np.ndarray]] = {checkpoint.id: [] for checkpoint in series}
        for piece in cut(base.plan, lengths, _SHARD_TOKENS):
            self._pieces[piece.reader].append(piece.rows)
        # Where the models run, and how many are held, changes no batch.
        unimportant = {"device", "models"}
        self.manifest = {
            "kind": KIND,
            "version": VERSION,
            **base.facts,
            "config": {k: v for k, v in asdict(self.config).items() if k not in unimportant},
            "readers": [
                {**record, "shards": [{"n_tokens": int(lengths[rows].sum())} for rows in self._pieces[record["id"]]]}
                for record in base.readers
            ],
        }

    def shards(self, reader: str | None = None) -> Iterator[Shard]:
        """Shards with token ids alone, and no file."""
        columns = []
        for name in ("prompt_ids", "response_ids"):
            ends = self.rollouts.lengths(name).cumsum()
            values = self.rollouts.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            columns.append((values, np.concatenate([[0], ends])))
        for id in self.readers:
            for rows in self._pieces[id] if reader in (None, id) else ():
                texts = [np.concatenate([v[at[row] : at[row + 1]] for v, at in columns]) for row in rows.tolist()]
                yield Shard(
                    path=self.path,
                    reader=id,
                    dtype=self.manifest["dtype"],
                    token_ids=np.concatenate(texts),
                    offsets=np.concatenate([[0], np.cumsum([len(text) for text in texts])]),
                    trajectory=rows,
                )

    @usual_state()
    def windows(self, site: str, **options: Any) -> Windows:
        return LiveWindows(self, site, **options)

    def budget(self, n_tokens: int) -> int:
        """Tokens of one of the forward passes that read so many, with padding.

        There are at least eight: fewer would mix texts of all lengths, and most of the work would be padding.
        """
        return max(1, min(self.config.batch_tokens, n_tokens // 8))

    def read(
        self, reader: str, texts: Sequence[np.ndarray], rows: np.ndarray, budget: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a text, (n_tokens, d_model) in the precision of the buffer) of every text.

        Where a batch does not fit into memory, reading begins again with half the tokens, and texts come again.

        Args:
            reader: who reads.
            texts: token ids of whole trajectories.
            rows: (n,) their ids in the rollouts, for messages.
            budget: tokens of a forward pass; by default `self.budget` of all.

        Raises:
            TsaeError: where activations are not finite, or wider than the base's; where the checkpoint was rewritten
                since the source was made; and where memory is short, for one trajectory alone or in one of several
                processes.
        """
        budget = budget or self.budget(sum(map(len, texts)))
        piece, where = Piece(reader, "", rows), self.series[reader].path
        while True:
            try:
                for batch in read_batches(self._opened(reader), texts, budget):
                    with naming_trajectories(piece, self.rollouts):
                        found = list(storing(batch, self.site, self.manifest, where)())
                    for t, values, _ in found:
                        yield t, values
                need_unchanged(self.series[reader], self.reader_info(reader)["weights"], loaded=True)
                return
            except OutOfMemory as error:
                n = len(error.texts)
                # Other batches give other last bits. Every process starts from weights that it computes from the first
                # buffer, and these must be the same in all.
                if n == 1 or world_size() > 1:
                    what = f"{n} trajectories (first: {rows[int(error.texts[0])]}) do not fit into memory together"
                    what += f" while reader {reader} reads"
                    fix = (
                        "Hold fewer models (--live.models), use a device with more memory, or leave them out. Several "
                        f"processes have to read alike: lower batch_tokens={self.config.batch_tokens}."
                    )
                    raise TsaeError(what, where=where, fix=fix) from error
            budget = max(1, budget // 2)
            self.was_short(reader, budget)
            warnings.warn(
                f"reader {reader} was short of memory and continues with {budget} tokens in a forward pass; the same "
                "training gives the same bits only where memory is short again",
                RuntimeWarning,
                stacklevel=2,
            )

    def hold(self, reader: str) -> None:
        """Forget the models of all other readers."""
        self._readers = {id: model for id, model in self._readers.items() if id == reader}

    def _opened(self, reader: str) -> Any:
        found = self._readers.pop(reader, None)
        while found is None and len(self._readers) >= (self.config.models or len(self.series)):
            del self._readers[next(iter(self._readers))]
        if found is None:
            found = open_reader(self.series[reader], [self.site], self.config)
            need_unchanged(self.series[reader], self.reader_info(reader)["weights"])
        self._readers[reader] = found
        return self._readers[reader]


class LiveWindows(Windows):
    """`Windows` whose activations are computed block by block; see the module.

    Args:
        store: live.
        site: its site.
        options: of `Windows`.
    """

    store: LiveSource

    def __init__(self, store: LiveSource, site: str, **options: Any) -> None:
        self._most = store.config.buffer_tokens
        self._cache: ActivationCache | None = None
        self._filled: list[int] = []  # portions that the batches are of
        store.short_of_memory = {}  # may be an earlier training's
        super().__init__(store, site, **options)
        _ = self.norms  # of what is held first

    def epoch(
        self, number: int, batch_tokens: int, *, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> Iterator[TokenBatch]:
        """As `Windows.epoch`; a block is not computed if all of its batches come before `start`.

        Raises:
            TsaeError: where what is held at once is less than two batches.
        """
        if self._most < 2 * batch_tokens:
            raise TsaeError(
                f"buffer_tokens={self._most} must hold at least two batches of batch_tokens={batch_tokens}, better a "
                "hundred",
                where="LiveConfig",
                fix="Raise buffer_tokens.",
            )
        first = 0
        for block, (portions, windows) in enumerate(self._portions.blocks(number)):
            n_batches = max(1, round(int(windows[:, 2].sum()) / batch_tokens))
            numbers = range(first, first + n_batches)
            first += n_batches
            if numbers.stop > start:
                self._fill(portions)
                np.random.default_rng([self.seed, number, block, 2]).shuffle(windows)
                yield from self._batches(self._packed(windows), number, numbers, start, share)

    def _beginning(self) -> np.ndarray:
        portions, windows = self._portions.blocks(0)[0]
        self._fill(portions)
        np.random.default_rng([self.seed, 0, 0, 2]).shuffle(windows)
        return self._packed(windows)

    def _packed(self, windows: np.ndarray) -> np.ndarray:
        return self._places.first(windows) << self._bits | windows[:, 2]

    @cached_property
    def _portions(self) -> Portions:
        readers = np.array([self.store.readers.index(shard.reader) for shard in self.shards])
        return Portions(self, readers[self.segments[:, 0]], self._most)

    @usual_state()
    def _fill(self, portions: np.ndarray) -> None:
        """Hold these portions, so that batches can be made of them."""
        wanted = portions.tolist()
        if wanted == self._filled:
            return
        self._filled, every = [], self._portions
        if self._cache is None:
            held = min(self._most, self.n_tokens)
            self._cache = ActivationCache(held, self.d_model, self.store.manifest["dtype"])
        cache = self._cache
        missing = cache.missing({portion: int(every.size[portion]) for portion in wanted})
        # Reader after reader, where not all models are held.
        for portion in sorted(missing, key=lambda portion: int(every.reader[portion])):
            cache.put(portion, missing[portion], self._computed(portion))
        cache.use(wanted)
        segments = np.concatenate([every.segments_of[portion] for portion in wanted])
        length = self.segments[segments, 2].astype(np.int64)
        order = np.argsort(segments)
        begin = length.cumsum() - length
        # Where each held segment begins among all tokens, and in `_row`, which has the row of every held token.
        self._held = self._places.first(self.segments[segments[order]])
        self._row = np.concatenate(cache.rows(wanted))[token_places(begin[order], length[order])]
        self._begin = length[order].cumsum() - length[order]
        self._filled = wanted

    def _computed(self, portion: int) -> np.ndarray:
        """(n, d_model) the counted tokens of a portion, in the stored precision."""
        every = self._portions
        texts, reader = every.texts[portion], self.store.readers[every.reader[portion]]
        in_shard = np.searchsorted(self._places.base, self._places.texts[texts], side="right") - 1
        shard, start, length = self.segments[every.segments_of[portion]].T
        held, row = self._places.base[shard] + start, length.cumsum() - length
        text_of_held = self._places.text(held)
        found = torch.empty((int(length.sum()), self.d_model), dtype=getattr(torch, self.store.manifest["dtype"]))
        ids = [self._token_ids(*each) for each in zip(texts, in_shard, strict=True)]
        for t, values in self.store.read(reader, ids, self._places.row[texts], every.budgets[portion]):
            low, high = np.searchsorted(text_of_held, [texts[t], texts[t] + 1])
            for segment in range(low, high):
                skipped = int(held[segment] - self._places.texts[texts[t]])
                at, n = int(row[segment]), int(length[segment])
                found[at : at + n] = values[skipped : skipped + n]
        return as_stored(found)

    def _token_ids(self, text: int, shard: int) -> np.ndarray:
        return self.shards[shard].token_ids[slice(*(self._places.texts[text : text + 2] - self._places.base[shard]))]

    @property
    def _maps(self) -> list[np.ndarray]:
        """What is held in place of shards."""
        assert self._cache is not None
        return [self._cache.values]

    def _rows_of(self, place: np.ndarray) -> Rows:
        segment = np.searchsorted(self._held, place, side="right") - 1
        return [(0, self._row[self._begin[segment] + place - self._held[segment]])]

    def _inside(self, place: np.ndarray) -> np.ndarray:
        assert self._cache is not None
        norms, ((_, held),), values = self.norms, self._rows_of(place), self._cache.values
        return ~norms.outliers(
            self._cache.norms[held], lambda rows: as_float32(values[held[rows]], self.store.manifest["dtype"])
        )


class Portions:
    """The portions of a training.

    Args:
        windows: of the training.
        reader: (n_segments,) number of the reader.
        most: tokens that are held at most.

    Attributes:
        texts: of every portion, the indices of its texts.
        segments_of: of every portion, the indices of its segments.
        reader: (n_portions,)
        size: (n_portions,) counted tokens.
        budgets: of every portion, tokens of its forward pass, with padding.
        of_text: (n_texts,) portion of a text; -1 for a text without counted tokens.
    """

    def __init__(self, windows: LiveWindows, reader: np.ndarray, most: int) -> None:
        places, segments, mixture = windows._places, windows.segments, windows.mixture
        self._places, self._segments, self._mixture = places, segments, mixture
        self._most, self._window, self._seed = most, windows.window, windows.seed
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
            of_pass = windows.store.budget(min(int(lengths[mine].sum()), most))
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
        if self.size.max() > most:
            what = f"a trajectory of {self.size.max()} counted tokens does not fit into buffer_tokens={most}"
            raise TsaeError(what, where="LiveConfig", fix="Raise buffer_tokens, or leave such trajectories out.")
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
        for part, (cell, number, low, high) in enumerate(self._mixture.passes(epoch)):
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

    def _rank(self, cell: int, number: int) -> np.ndarray:
        """(n_portions,) in which order a pass that is divided between epochs reads them."""
        return np.random.default_rng([self._seed, number, cell + 1]).permutation(len(self.size))

    def _order(self, epoch: int) -> np.ndarray:
        """(n,) items of an epoch in their order. An item is a portion in a pass: number of the pass · all + portion."""
        size, items = self.size, []
        for part, (cell, number, low, high) in enumerate(self._mixture.passes(epoch)):
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


_AT_ONCE = 8192  # rows that are widened to float32 at once


class ActivationCache:
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
