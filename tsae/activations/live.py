"""Activations straight from the models: training and encoding without a store.

A store of 100 M tokens of a 7B model takes most of a terabyte. Here the readers compute activations while training
runs, into a buffer of `LiveConfig.buffer_tokens` tokens:

1. The windows of an epoch are those of `tsae.activations.batches`. Their trajectories are shuffled and cut into blocks
   of about equal size that fit into the buffer. A trajectory is never divided between blocks.
2. For every block the readers read its trajectories, and the counted tokens go into the buffer.
3. The windows of the block are shuffled and cut into batches. Then the next block replaces it in the buffer.

So a batch mixes the trajectories of one buffer, where a store mixes all; every counted token still comes once a pass.
Which tokens an epoch reads, and in which order, is known without a model. So a resumed training skips finished blocks:
it computes only the first, on which norms are estimated, and the one in which it stopped. A block that does not fit
into memory begins again with half the tokens in a forward pass. A warning says so, and training.json keeps it
(`short_of_memory`): the same training gives the same bits where memory runs out at the same sizes again.

Encoding reads every trajectory once, in the order of the shards that a capture would write.

Cost: forward passes through the layers up to the site, again in every epoch and in every process; training waits while
a block is filled. The buffer takes buffer_tokens · d_model values of the stored precision, token ids take 4 bytes for
every token of every reader, and the index takes 12 bytes a window.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.activations.batches.places import Rows
from tsae.activations.batches.segments import cut_windows
from tsae.activations.batches.windows import TokenBatch, Windows
from tsae.activations.config import LiveConfig
from tsae.activations.reader.assignment import Piece, cut
from tsae.activations.reader.forward_passes import OutOfMemory, read_batches, stored_texts
from tsae.activations.reader.opening import open_base, open_reader
from tsae.activations.shards.manifest import FORMAT, VERSION
from tsae.activations.shards.shard import Shard, as_stored
from tsae.activations.source import Source
from tsae.base.torchrun import world_size
from tsae.checkpoints.forward.hooks import HuggingFaceReader
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
        self.manifest = {
            "format": FORMAT,
            "version": VERSION,
            **base.facts,
            # Where the models run and how many are held changes no batch.
            "config": {k: v for k, v in asdict(self.config).items() if k not in ("device", "models")},
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

    def windows(self, site: str, **options: Any) -> Windows:
        return LiveWindows(self, site, **options)

    def read(self, reader: str, texts: Sequence[np.ndarray], rows: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a text, (n_tokens, d_model) in the precision of the buffer) of every text.

        At least eight batches are read: fewer would mix texts of all lengths, and most of the work would be padding.
        Where a batch does not fit into memory, reading begins again with half the tokens, and texts come again.

        Args:
            reader: who reads.
            texts: token ids of whole trajectories.
            rows: (n,) their ids in the rollouts, for messages.

        Raises:
            TsaeError: where activations are not finite, or wider than the base's; and where memory is short, for one
                trajectory alone or in one of several processes.
        """
        budget = max(1, min(self.config.batch_tokens, sum(map(len, texts)) // 8))
        piece, where = Piece(reader, "", rows), self.series[reader].path
        while True:
            try:
                for batch in read_batches(self._opened(reader), texts, budget):
                    yield from stored_texts(batch, self.site, piece, self.rollouts, self.manifest, where)
                return
            except OutOfMemory as error:
                n = len(error.texts)
                if n == 1:
                    raise TsaeError(
                        f"trajectory {rows[int(error.texts[0])]} does not fit into memory by itself while reader "
                        f"{reader} reads",
                        where=where,
                        fix="Leave it out, hold fewer models (--live.models), or use a device with more memory.",
                    ) from error
                # Other batches give other last bits. Every process starts from weights that it computes from the first
                # buffer, and these must be the same in all.
                if world_size() > 1:
                    raise TsaeError(
                        f"{n} trajectories do not fit into memory together while reader {reader} reads, and several "
                        "processes have to read alike",
                        where=where,
                        fix=f"Lower batch_tokens={self.config.batch_tokens} (--live.batch-tokens), or hold fewer "
                        "models (--live.models).",
                    ) from error
            budget = max(1, budget // 2)
            self.was_short(reader, budget)
            warnings.warn(
                f"reader {reader} was short of memory and goes on with {budget} tokens in a forward pass; the same "
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
        self._readers[reader] = found or open_reader(self.series[reader], [self.site], self.config)
        return self._readers[reader]


class LiveWindows(Windows):
    """`Windows` whose activations are computed block by block; see the module."""

    store: LiveSource

    def __init__(self, store: LiveSource, site: str, **options: Any) -> None:
        self._filled: tuple[int, int] | None = None  # epoch and number of the block in the buffer
        store.short_of_memory = {}  # may be an earlier training's
        super().__init__(store, site, **options)

    def epoch(
        self, number: int, batch_tokens: int, *, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> Iterator[TokenBatch]:
        """As `Windows.epoch`; a block is not computed if all of its batches come before `start`.

        Raises:
            TsaeError: where the buffer does not hold two batches.
        """
        if self.store.config.buffer_tokens < 2 * batch_tokens:
            raise TsaeError(
                f"buffer_tokens={self.store.config.buffer_tokens} must hold at least two batches of "
                f"batch_tokens={batch_tokens}, better a hundred",
                where="LiveConfig",
                fix="Raise buffer_tokens.",
            )
        first = 0
        for block, windows in enumerate(self._blocks(number)):
            n_batches = max(1, round(int(windows[:, 2].sum()) / batch_tokens))
            numbers = range(first, first + n_batches)
            first += n_batches
            if numbers.stop > start:
                self._fill(number, block, windows)
                yield from self._batches(self._packed(windows), number, numbers, start, share)

    def _beginning(self) -> np.ndarray:
        windows = self._blocks(0)[0]
        self._fill(0, 0, windows)
        return self._packed(windows)

    def _text_of(self, windows: np.ndarray) -> np.ndarray:
        """(n,) index of the text of windows or segments (n, 3)."""
        return self._places.text(self._places.first(windows))

    def _packed(self, windows: np.ndarray) -> np.ndarray:
        return self._places.first(windows) << self._bits | windows[:, 2]

    def _blocks(self, epoch: int) -> list[np.ndarray]:
        """The windows of an epoch by block, in their order: (n, 3) shard, first token and number of tokens."""
        parts: list[np.ndarray] = []
        items: list[np.ndarray] = []
        n_texts, text_of_segment = len(self._places.row), self._text_of(self.segments)
        size = np.bincount(text_of_segment, weights=self.segments[:, 2], minlength=n_texts).astype(np.int64)
        for cell, info in enumerate(self.mixture.cells):
            mine = np.flatnonzero(self.mixture.cell_of == cell)
            for number, low, high in self.mixture.passes(cell, epoch):
                if high - low < info.tokens:
                    # Divided between epochs by whole trajectories, so that few are read for part of their tokens.
                    rank = np.random.default_rng([self.seed, number, cell + 1]).permutation(n_texts)
                    mine = mine[np.argsort(rank[text_of_segment[mine]], kind="stable")]
                offset = int(np.random.default_rng([self.seed, number]).integers(self.window))
                windows = cut_windows(self.segments[mine], self.window, offset)
                begins = windows[:, 2].cumsum() - windows[:, 2]
                parts.append(windows[(begins >= low) & (begins < high)])
                # A trajectory that two passes of an epoch read counts as two, which may fall into different blocks.
                items.append(self._text_of(parts[-1]) + n_texts * len(items))
        windows = np.concatenate(parts)
        present, item = np.unique(np.concatenate(items), return_inverse=True)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(present))
        block = np.empty(len(present), dtype=np.int64)
        block[order] = _equal_blocks(size[present % n_texts][order], self.store.config.buffer_tokens)
        by_block = np.argsort(block[item], kind="stable")
        edges = np.flatnonzero(np.diff(block[item][by_block])) + 1
        blocks = [windows[mine] for mine in np.split(by_block, edges)]
        for number, mixed in enumerate(blocks):
            np.random.default_rng([self.seed, epoch, number, 2]).shuffle(mixed)
        return blocks

    def _fill(self, epoch: int, block: int, windows: np.ndarray) -> None:
        """Compute the counted tokens of the windows' trajectories into the buffer."""
        if self._filled == (epoch, block):
            return
        self._filled, self._buffer = None, torch.empty(0)  # frees the old one first
        texts = np.unique(self._text_of(windows))
        text_of_segment = self._text_of(self.segments)
        held = np.flatnonzero(np.isin(text_of_segment, texts))
        text_of_held = text_of_segment[held]
        shard, start, length = self.segments[held].T
        # Where each held segment begins among all tokens, and in the buffer.
        self._held, self._row = self._places.base[shard] + start, length.cumsum() - length
        self._buffer = torch.empty(
            (int(length.sum()), self.d_model), dtype=getattr(torch, self.store.manifest["dtype"])
        )
        in_shard = np.searchsorted(self._places.base, self._places.texts[texts], side="right") - 1
        reader_of = np.array([shard.reader for shard in self.shards])[in_shard]
        for reader in self.store.readers:
            mine = texts[reader_of == reader]
            ids = [self._token_ids(*each) for each in zip(mine, in_shard[reader_of == reader], strict=True)]
            for t, values in self.store.read(reader, ids, self._places.row[mine]) if ids else ():
                low, high = np.searchsorted(text_of_held, [mine[t], mine[t] + 1])
                for segment in range(low, high):
                    skipped = int(self._held[segment] - self._places.texts[mine[t]])
                    row, n = int(self._row[segment]), int(length[segment])
                    self._buffer[row : row + n] = values[skipped : skipped + n]
        self._held_norms = torch.cat(
            [torch.linalg.vector_norm(x.float(), dim=1) for x in self._buffer.split(8192)]
        ).numpy()
        self._filled = (epoch, block)

    def _token_ids(self, text: int, shard: int) -> np.ndarray:
        return self.shards[shard].token_ids[slice(*(self._places.texts[text : text + 2] - self._places.base[shard]))]

    @property
    def _maps(self) -> list[np.ndarray]:
        """The buffer in place of shards."""
        return [as_stored(self._buffer)]

    def _rows_of(self, place: np.ndarray) -> Rows:
        segment = np.searchsorted(self._held, place, side="right") - 1
        return [(0, self._row[segment] + place - self._held[segment])]

    def _norm(self, place: np.ndarray) -> np.ndarray:
        return np.asarray(self._held_norms[self._rows_of(place)[0][1]])

    def _inside(self, place: np.ndarray) -> np.ndarray:
        return np.asarray(self._norm(place) <= self.norms.limit)


def _equal_blocks(size: np.ndarray, most: int) -> np.ndarray:
    """(n,) number of the block of every item, ascending: few blocks of about equal size, none above `most` tokens.

    Args:
        size: (n,) tokens of the items, in the order in which they fill blocks.
        most: tokens of a block.
    """
    if size.max() > most:
        raise TsaeError(
            f"a trajectory of {size.max()} counted tokens does not fit into buffer_tokens={most}",
            where="LiveConfig",
            fix="Raise buffer_tokens, or leave such trajectories out.",
        )
    ends = size.cumsum()
    n = -(-int(ends[-1]) // most)
    while True:
        block = (ends - 1) * n // ends[-1]
        if np.bincount(block, weights=size).max() <= most:
            return np.unique(block, return_inverse=True)[1]
        n += 1 + n // 20
