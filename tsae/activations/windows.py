"""Windows of adjacent tokens: how they are cut, balanced and ordered for training. No activation is read here.

- Place: every token of all shards together has a number (`Places`).
- Segment: a run of counted tokens of one trajectory. A window is a piece of a segment. Both are rows of three integers:
  number of the shard, first token there, number of tokens. The windows of an epoch are packed into one 8-byte integer
  each: the place of the first token in the high bits, the number of tokens in the low ones.
- Partner: the token that the temporal loss compares a token with (`Partners`): any earlier token of the trajectory, or
  of the reasoning step. Counted tokens are numbered through the store: a token's rank. Each trajectory, or step, is a
  block of consecutive ranks. The earlier tokens of a token's block are the ranks from the block's first to its own.
- Mixture: how often an epoch reads each token, so that no checkpoint, run, band or outcome dominates.

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
from itertools import pairwise
from typing import Any

import numpy as np

from tsae.activations.catalogue import Catalogue
from tsae.activations.config import Axis
from tsae.activations.shard import Shard
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS, OUTCOMES, problem_bands
from tsae.rollouts.token_parts import OTHER

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
    passes = mixture.passes(epoch)
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


class Partners:
    """Draws a partner for every token; tokens are given by their places (`tsae.activations.windows`).

    Args:
        begins: (n_segments,) places at which runs of counted tokens begin; ascending.
        lengths: (n_segments,) tokens of each run.
        blocks: (n_blocks,) ranks at which blocks begin; ascending, the first is 0.
    """

    def __init__(self, begins: np.ndarray, lengths: np.ndarray, blocks: np.ndarray) -> None:
        self._begins, self._blocks = begins, blocks
        ends = lengths.cumsum()
        self._before = ends - lengths  # (n_segments,) rank of a segment's first token
        self.longest = int(np.diff(blocks, append=ends[-1]).max())
        """Tokens of the longest block."""

    def draw(self, place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) rank of a partner, each earlier token of the block being equally likely; −1 for the first of a block.

        Args:
            place: (n,) of counted tokens.
            rng: gives one number a token.
        """
        segment = np.searchsorted(self._begins, place, side="right") - 1
        rank = self._before[segment] + place - self._begins[segment]
        first = self._blocks[np.searchsorted(self._blocks, rank, side="right") - 1]
        drawn = first + (rng.random(len(rank)) * (rank - first)).astype(np.int64)
        return np.where(rank > first, drawn, -1)

    def place(self, rank: np.ndarray) -> np.ndarray:
        """(n,) places of the tokens of given ranks."""
        segment = np.searchsorted(self._before, rank, side="right") - 1
        return np.asarray(self._begins[segment] + rank - self._before[segment])


def blocks(
    shard: Shard,
    counted: np.ndarray,
    prompt_lengths: np.ndarray | None,
    step_ends: Sequence[int],
    parts: np.ndarray | None = None,
) -> np.ndarray:
    """(n_blocks,) places among the shard's counted tokens at which trajectories, or steps, begin.

    Args:
        shard: whole trajectories.
        counted: (n_tokens,) bool.
        prompt_lengths: (n_trajectories,) tokens of each prompt, for steps; None for trajectories.
        step_ends: ids of the tokens that end a step, counted or not. A step also ends with the prompt, the trajectory,
            and where tokens begin that the policy did not sample.
        parts: (n_tokens,) the part of each (`tsae.rollouts.token_parts`); None where the policy sampled all
            responses.
    """
    begins = np.zeros(shard.n_tokens, dtype=bool)
    begins[shard.offsets[:-1]] = True
    if prompt_lengths is not None:
        begins[1:] |= np.isin(shard.token_ids[:-1], list(step_ends))
        begins[shard.offsets[:-1] + prompt_lengths] = True
        if parts is not None:
            begins[1:] |= (parts[1:] == OTHER) != (parts[:-1] == OTHER)
    number = np.cumsum(begins)[counted]
    return np.flatnonzero(np.diff(number, prepend=0))


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

    def passes(self, epoch: int) -> list[tuple[int, int, int, int]]:
        """(cell, number, first token, token after the last) of every pass that an epoch reads from, in order."""
        low, high = (e * self._n_tokens // len(self.cells) for e in (epoch, epoch + 1))
        return [
            (cell, number, max(low - number * size, 0), min(high - number * size, size))
            for cell, size in enumerate(one.tokens for one in self.cells)
            for number in range(low // size, -(-high // size))
        ]


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
        what = (
            f"the {axis} of {len(np.unique(unknown))} trajectories is unknown (first: row {unknown[0]}), so that the "
        )
        fix = "Set bands with `tsae rollouts bands`" if axis == "band" else "Leave those trajectories out"
        fix += " and run the capture again, or balance by something else (--balance)."
        raise TsaeError(f"{what}the data cannot be balanced by it", where=store.rollouts.origin, fix=fix)
    return codes
