"""Batches of tokens with their partners, shuffled over a whole store in bounded memory.

1. A trajectory's counted tokens are cut into windows of adjacent tokens (`tsae.activations.windows`), at an offset
   drawn for each epoch, so that every adjacent pair is seen in time. A window never crosses trajectories, and holds no
   padding, special token or token outside the span. Tokens with others between them, such as a tool's result, are not
   adjacent.
2. Windows are shuffled, not tokens. A batch is a set of windows, so that each token is encoded once although it is a
   partner of both of its neighbours.
3. The temporal loss compares a token with its partner: the token before it, as in Bhalla et al. (arXiv 2511.05541), or
   a random earlier token of the trajectory (the default of their code) or of the reasoning step. A partner outside the
   batch's windows is read beside them, and is neither reconstructed nor counted. So every counted token still comes
   once a pass, and early tokens, which are partners more often, do not gain weight.

Memory holds the index of windows (8 bytes a window, twice that while an epoch of several passes begins), 8 bytes a step
where partners are of the step, a bit a token for outliers, and the batches that are read ahead. Activations are read
through memory maps.

Outliers are tokens far from the centre of the activations (attention sinks); batches leave them out. Norms are
distances from the centre, so that a constant in a dimension changes none of them. The centre is the median of every
dimension over a sample of tokens; sinks of any size do not move it.

Copies are tokens of the same reader after the same text, for which a causal model computes the same activations.
Rollouts of one prompt share its tokens, for instance. Copies are found by text, because the last bits of activations
differ between batches of a capture. A text is known by a hash: every (position, token id) has a pseudo-random number,
and the text has their sum modulo 2⁶⁴. Two different texts have the same sum with probability 2⁻⁶⁴. Only the sum before
every 64th token is kept, in 8 bytes; the sums between are computed when a batch needs them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsae.activations.catalogue import Catalogue
from tsae.activations.config import Axis, Partner
from tsae.activations.shard import DTYPES, REPAIR, Shard, TokenSpan, as_torch
from tsae.activations.windows import (
    Mixture,
    Partners,
    Places,
    Rows,
    blocks,
    divided,
    epoch_order,
    find_segments,
    kept_problems,
    length_bits,
    token_places,
    unpacked,
    windows_before,
)
from tsae.base.memory import Reused
from tsae.errors import refuse

if TYPE_CHECKING:
    import torch

_AHEAD = 3
"""Batches that are read ahead."""

_THREADS = 2
"""Threads that copy them. The caller's thread decides what to copy: in threads, its many small steps would wait for
each other."""

_NONE = np.empty(0, dtype=np.int64)


class TokenBatch(NamedTuple):
    """Windows of adjacent tokens, and partners."""

    x: torch.Tensor
    """(n, d_model) in the stored precision, as others are; whoever computes with 16 bits widens them."""
    pairs: np.ndarray
    """(n_pairs, 2) rows of x: (partner, token); the partner comes earlier in the token's trajectory. Rows from n on are
    those of others."""
    trajectory: np.ndarray
    """(n,) row ids into the rollouts."""
    number: int = 0
    """Place in the epoch, from 0."""
    others: torch.Tensor | None = None
    """(m, d_model): tokens that are only partners; None where all partners are in x."""
    copies: np.ndarray = _NONE
    """(n + m,) of x and others, equal for tokens that are copies of one another: the same reader read the same text up
    to them. Empty where there are no partners."""


class _Plan(NamedTuple):
    """A batch before its activations are read."""

    number: int
    x: Rows
    others: Rows | None
    pairs: np.ndarray
    trajectory: np.ndarray
    copies: np.ndarray


class Windows:
    """Shuffled batches of tokens and their partners at one site.

    Args:
        store: activations; of a subset, its readers and trajectories are read.
        site: one of its sites.
        span: which tokens count; special tokens never do.
        window: tokens of a window, at least 2.
        held_out: None for all problems; else every tenth problem is held out, and this says which side is read.
        max_norm: tokens whose norm about the centre exceeds this multiple of the median are left out.
        partner: which token a token is paired with; None for no pairs.
        step_ends: ids of the tokens that end a reasoning step, for partner="step".
        balance: what is read in equal parts; see `tsae.activations.windows`.
        seed: of the shuffle.

    Raises:
        TsaeError: where no tokens or no pairs are left, no token ends a step, or a cell to be balanced is unknown.
    """

    def __init__(
        self,
        store: Catalogue,
        site: str,
        *,
        span: TokenSpan = "all",
        window: int = 8,
        held_out: bool | None = None,
        max_norm: float = 10.0,
        partner: Partner | None = "previous",
        step_ends: Sequence[int] = (),
        balance: Sequence[Axis] = (),
        seed: int = 0,
    ) -> None:
        what = f"window={window}, partner={partner!r}: a window holds 2 tokens or more, and steps need step_ends"
        fix = 'Give step_ends, such as checkpoint.tokens_with("\\n"), or let --tokenizer look them up.'
        refuse("TrainingConfig", (window < 2 or (partner == "step" and not step_ends), what, fix))
        self.store, self.site, self.window, self.partner, self.seed = store, site, window, partner, seed
        self.max_norm = max_norm
        self.pinned = False  # whether batches lie in memory that a GPU copies from by itself
        self.d_model = store.d_model(site)
        self.shards = list(store.shards())
        kept = kept_problems(store, held_out) & store.rows
        segments, begins, n_counted, n_undivided = [], [], 0, 0
        for i, shard in enumerate(self.shards):
            of_kept = np.repeat(kept[shard.trajectory], np.diff(shard.offsets))
            counted = shard.token_span(store.rollouts, span, store.special_ids) & of_kept
            segments.append(find_segments(i, shard, counted))
            if partner in ("earlier", "step"):
                prompts = store.rollouts.lengths("prompt_ids")[shard.trajectory] if partner == "step" else None
                parts = store.rollouts.token_parts(shard.trajectory) if partner == "step" else None
                begins.append(n_counted + blocks(shard, counted, prompts, step_ends, parts))
                n_counted += int(counted.sum())
                n_undivided += len(blocks(shard, counted, prompts, (), parts))
        # (n_segments, 3): shard, first token, number of tokens; a segment is a run of counted tokens of one trajectory.
        narrow = max(shard.n_tokens for shard in self.shards) < 2**31
        self.segments = np.concatenate(segments).astype(np.int32 if narrow else np.int64)
        self.n_tokens = int(self.segments[:, 2].sum())
        undivided = partner == "step" and sum(map(len, begins)) == n_undivided
        fix = "Give the ids of tokens that end steps in these texts; Checkpoint.tokens_with finds them."
        refuse(
            store.path,
            (self.n_tokens == 0, "no tokens are left to train on", "Choose another token span."),
            (undivided, f"step_ends={tuple(step_ends)} divide no trajectory into steps", fix),
        )
        self._places = Places(self.shards)
        first, length = self._places.first(self.segments), self.segments[:, 2]
        self._partners = Partners(first, length, np.concatenate(begins)) if begins else None
        longest = length.max() if self._partners is None else self._partners.longest
        unit, adjacent = "step" if partner == "step" else "trajectory", " adjacent" if partner == "previous" else ""
        what = f"no {unit} has two{adjacent} tokens that count, so that the temporal loss has no pairs"
        fix = "Choose another token span, or train with temporal_weight=0 (--temporal-weight 0)."
        refuse(store.path, (partner is not None and longest < 2, what, fix))
        self._bits = length_bits(self.segments, window)
        self.mixture = Mixture(store, self.shards, self._places, self.segments, balance)

    def at(self, site: str) -> Windows:
        """The same windows at another site, where other tokens may be outliers."""
        other = copy(self)
        other.site, other.d_model = site, self.store.d_model(site)
        for name in ("_maps", "_outliers", "_sample"):
            other.__dict__.pop(name, None)
        return other

    @cached_property
    def _maps(self) -> list[Any]:
        # Looking a dataset up in its file takes longer than reading a few windows of it.
        maps = [shard.raw(self.site) for shard in self.shards]
        return [np.asarray(found) if isinstance(found, np.ndarray) else found for found in maps]

    @property
    def norms(self) -> NormStats:
        """Of a sample of the tokens trained on; estimated when it is first asked for.

        Raises:
            TsaeError: as `norm_stats`, and where a value is not finite.
        """
        return self._sample[0]

    @property
    def first_tokens(self) -> np.ndarray:
        """(about 16,384, d_model) float32: a sample of the tokens trained on, without outliers."""
        return self._sample[1]

    @cached_property
    def _sample(self) -> tuple[NormStats, np.ndarray]:
        place = self._first(16_384)
        x = self._gather(self._rows_of(place), Reused(1)).float()
        self.refuse_not_finite(x, self._places.row[self._places.text(place)])
        norms = norm_stats(x.numpy(), self.max_norm, self.store, self.site)
        return norms, x[~norms.beyond(x)].numpy()

    def _first(self, n_tokens: int) -> np.ndarray:
        """(n,) places of the tokens of the first windows of epoch 0."""
        windows = self._beginning()
        first = int(windows_before(windows, self._bits, np.array([n_tokens]))[0])
        begin, length = unpacked(windows[: max(1, first)], self._bits)
        order = np.argsort(begin, kind="stable")
        return token_places(begin[order], length[order])

    def _beginning(self) -> np.ndarray:
        """(n,) packed, the first windows of epoch 0: more than a sample takes, where there are so many."""
        return self._order(0)

    def _inside(self, place: np.ndarray) -> np.ndarray:
        """(n,) bool: tokens that are not outliers."""
        return np.asarray(self._outliers[place >> 3] >> (place & 7).astype(np.uint8) & 1 == 0)

    @cached_property
    def _outliers(self) -> np.ndarray:
        """Which tokens are outliers, in one bit a token."""
        found = np.zeros(self._places.base[-1], dtype=bool)
        for shard, low in zip(self.shards, self._places.base, strict=False):
            read = partial(shard.read, self.site)
            found[low : low + shard.n_tokens] = self.norms.outliers(shard.norms(self.site), read)
        return np.packbits(found, bitorder="little")

    def refuse_not_finite(self, x: torch.Tensor, trajectory: np.ndarray) -> None:
        """Name a token that is not finite, if there is one.

        Captures are finite, so reading a batch does not check that. This is for a caller who meets such a value.

        Args:
            x: (n, d_model) tokens of a batch.
            trajectory: (n,) row ids into the rollouts.

        Raises:
            TsaeError: says where it is.
        """
        rows = trajectory[~x.isfinite().all(dim=1).numpy()]
        first = ", ".join(map(str, rows[:1]))
        refuse(self.store.path, (first, f"{self.site} is not finite in trajectory {first}", REPAIR))

    def epoch(
        self, number: int, batch_tokens: int, *, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> Iterator[TokenBatch]:
        """As many tokens as the store has, in an order that depends on the seed and the epoch only.

        Batches hold about batch_tokens tokens, as many as divide the epoch evenly.

        Args:
            number: of the epoch.
            batch_tokens: tokens of a batch, without others.
            start: number of the first batch; those before it are not read.
            share: (i, n) gives every n-th window of each batch from the i-th on. The shares of a batch make up the
                whole. A share without pairs is given too, so that n processes stay in step.
        """
        windows = self._order(number)
        if len(windows):
            n_batches = max(1, round(self.n_tokens / batch_tokens))
            yield from self._batches(windows, number, range(n_batches), start, share)

    def _batches(
        self, windows: np.ndarray, epoch: int, numbers: range, start: int, share: tuple[int, int]
    ) -> Iterator[TokenBatch]:
        """Packed windows in their order as batches of the given numbers, from the number `start` on."""
        plans = (
            self._plan(number, part, share, np.random.default_rng([self.seed, epoch, number, 1]))
            for number, part in divided(windows, self._bits, numbers)
            if number >= start
        )
        due = (
            plan for plan in plans if len(plan.pairs) or share[1] > 1 or (self.partner is None and len(plan.trajectory))
        )
        # For every batch that is read ahead, the last and the one before it: x and others.
        memory = Reused(2 * (_AHEAD + 2))
        with ThreadPoolExecutor(_THREADS) as threads:

            def gather(rows: Rows) -> torch.Tensor:
                x = self._gather(rows, memory)
                return x.pin_memory() if self.pinned else x

            def begin(plan: _Plan) -> tuple[_Plan, list[Future[torch.Tensor]]]:
                read = [plan.x] if plan.others is None else [plan.x, plan.others]
                return plan, [threads.submit(gather, rows) for rows in read]

            ahead = deque(map(begin, islice(due, _AHEAD)))
            while ahead:
                plan, reading = ahead.popleft()
                x, *others = [one.result() for one in reading]
                ahead.extend(map(begin, islice(due, 1)))
                some = others[0] if others else None
                yield TokenBatch(x, plan.pairs, plan.trajectory, plan.number, some, plan.copies)
                # So that the next batch can reuse its memory.
                del reading, x, others, some

    def _order(self, epoch: int) -> np.ndarray:
        """(n_windows,) packed, every window that an epoch reads, in its order."""
        return epoch_order(self.segments, self._places.base, self.mixture, self.window, self._bits, self.seed, epoch)

    def _plan(self, number: int, windows: np.ndarray, share: tuple[int, int], rng: np.random.Generator) -> _Plan:
        begin, length = unpacked(windows, self._bits)
        order = np.argsort(begin, kind="stable")
        begin, length, mine = begin[order], length[order], order % share[1] == share[0]
        text, place = self._places.text(begin), token_places(begin, length)
        # Drawn for the whole batch, so that a token has the same partner whatever the share.
        drawn = None if self._partners is None else self._partners.draw(place, rng)
        if share[1] > 1:
            of_mine = np.repeat(mine, length)
            begin, length, text, place = begin[mine], length[mine], text[mine], place[of_mine]
            drawn = None if drawn is None else drawn[of_mine]
        inside = self._inside(place)
        row = np.cumsum(inside) - 1
        x = self._rows_of(place[inside])
        trajectory = np.repeat(self._places.row[text], length)[inside]
        copies = _NONE if self.partner is None else self._copies_of(begin, length)[inside]
        if self._partners is None or drawn is None:
            follows = inside.copy()
            follows[1:] &= inside[:-1]
            follows[length.cumsum() - length] = False
            current = np.flatnonzero(follows) if self.partner is not None else _NONE
            return _Plan(number, x, None, np.stack([row[current - 1], row[current]], axis=1), trajectory, copies)
        # A token that drew an outlier has no partner this time: the others are as likely as before.
        current = np.flatnonzero((drawn >= 0) & inside)
        partner = self._partners.place(drawn[current])
        good = self._inside(partner)
        current, partner = current[good], partner[good]
        pairs = np.stack([len(trajectory) + np.arange(len(current)), row[current]], axis=1)
        copies = np.concatenate([copies, self._copies_of(partner, np.ones_like(partner))])
        return _Plan(number, x, self._rows_of(partner), pairs, trajectory, copies)

    @cached_property
    def _copies(self) -> Copies:
        return Copies(self.shards)

    def _copies_of(self, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """(sum of lengths,) `TokenBatch.copies` of runs of tokens in the order of their shards."""
        bounds = np.searchsorted(begin, self._places.base)
        found = [
            self._copies.of(number, some, length[bounds[number] : bounds[number + 1]])
            for number, some in self._places.by_shard(begin)
        ]
        return np.concatenate([_NONE, *found])

    def _gather(self, rows: Rows, memory: Reused) -> torch.Tensor:
        """(n, d_model) tokens in the stored precision."""
        dtype = self.store.manifest["dtype"]
        x, low = memory.empty(sum(len(some) for _, some in rows), self.d_model, DTYPES[dtype]), 0
        for number, some in rows:
            # Any other mode makes a copy first; the rows are known to be there.
            self._maps[number].take(some, axis=0, out=x[low : low + len(some)], mode="clip")
            low += len(some)
        return as_torch(x, dtype)

    def _rows_of(self, place: np.ndarray) -> Rows:
        """Where tokens are, given in the order of their shards."""
        return self._places.by_shard(place)


_AT_ONCE = 8192  # rows that are read at once
_FEW = 0.1  # share of outliers without a warning
_ROUNDING = 1e-4  # of norms that are added, with room to spare


@dataclass(frozen=True)
class NormStats:
    """Norms of the counted tokens, ‖x − centre‖, estimated on a sample."""

    median: float
    """Median L2 norm."""
    mean: float
    """Mean L2 norm of the tokens below the outlier limit."""
    limit: float
    """Tokens with a larger norm are left out."""
    outlier_share: float
    """Share of the sample above the limit."""
    centre: tuple[float, ...]
    """The median of every dimension (d_model,), or the mean where one token makes up more than half of the sample."""

    def beyond(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…) bool: tokens above the limit."""
        return distances(x, self.centre) > self.limit

    def outliers(self, norm: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(n,) bool: tokens above the limit.

        ‖x‖ − ‖centre‖ ≤ ‖x − centre‖ ≤ ‖x‖ + ‖centre‖ decides on most tokens, so that few are read.

        Args:
            norm: (n,) ‖x‖.
            read: gives the activations (m, d_model) of m of the tokens, in float32.
        """
        import torch

        centre = float(np.linalg.norm(self.centre))
        room = _ROUNDING * (norm + centre)
        found = norm - centre - room > self.limit
        unknown = np.flatnonzero(~found & (norm + centre + room > self.limit))
        for low in range(0, len(unknown), _AT_ONCE):
            some = unknown[low : low + _AT_ONCE]
            found[some] = self.beyond(torch.from_numpy(read(some))).numpy()
        return found


def distances(x: torch.Tensor, centre: Sequence[float]) -> torch.Tensor:
    """(…, d_model) -> (…) L2 distance from a centre of d_model values; from 0 without one."""
    import torch

    x = x.float()
    return (x - torch.tensor(centre, dtype=x.dtype, device=x.device) if len(centre) else x).norm(dim=-1)


def warn_of_outliers(share: float, site: str) -> None:
    """Warn where more tokens are left out than a few sinks, such as those of a reader with another mean."""
    if share > _FEW:
        what = f"{share:.0%} of tokens at {site} are left out: they lie far from the others. Some readers or texts may"
        warnings.warn(f"{what} have another mean: take them apart, or raise max_norm.", stacklevel=3)


def norm_stats(x: np.ndarray, max_norm: float, store: Catalogue, site: str) -> NormStats:
    """Statistics of (n, d_model) finite float32 tokens; the limit is max_norm times the median norm.

    Raises:
        TsaeError: where nothing or always the same is within the limit, or norms are beyond float32.
    """
    import torch

    for middle in (np.median, np.mean):
        # As few digits as give the same float32, because the centre is written as JSON.
        centre = tuple(float(str(value)) for value in middle(x, axis=0).astype(np.float32))
        norm = distances(torch.from_numpy(x), centre).numpy()
        if median := float(np.median(norm)):
            break
    limit = max_norm * median if median else 0.0  # not infinity times 0
    inside = norm <= limit
    mean = float(norm[inside].mean()) if inside.any() else 0.0
    wrong = {
        "activations are so large that their norms are beyond float32": not np.isfinite([median, mean]).all(),
        f"no token is within {max_norm:g} times the median norm": not inside.any(),
        "all tokens have the same activations: there is nothing to learn": (x[inside] == x[inside][:1]).all(),
    }
    fix = "Check the checkpoints, site and max_norm."
    refuse(store.path, *((found, f"at {site} {what}", fix) for what, found in wrong.items()))
    return NormStats(median, mean, limit, float(1 - inside.mean()), centre)


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
