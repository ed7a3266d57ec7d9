"""Batches of tokens with their partners, shuffled over a whole store with bounded memory.

Every trajectory's counted tokens are cut into windows of adjacent tokens, at an offset drawn anew each epoch so that
every adjacent pair is seen in time. Windows, not tokens, are shuffled; a batch is a set of windows, so that each token
is encoded once although it is a partner of both of its neighbours. Windows never cross trajectories and never hold
padding, special tokens, or tokens outside the span; tokens with others between them, such as a tool's result that the
policy did not sample, are not adjacent.

A token's partner, with which the temporal loss compares it, is the token before it, as in Bhalla et al.
(arXiv 2511.05541): both are in one window. Or it is a random earlier token of the trajectory (the default of its
authors' code) or of the reasoning step (`tsae.activations.partners`). Such a partner is read beside the windows, and
is only a partner: the tokens of the windows alone are reconstructed and counted. So every counted token still comes
once a pass, whatever its partners are, and early tokens, which are partners more often, do not gain weight.

How much of the store an epoch reads is said in `tsae.activations.mixture`. Only the index of windows is held in memory,
8 bytes a window, or twice that while an epoch of several passes begins; 8 bytes a step where partners are of the step;
a bit a token that says whether it is an outlier; and the batches that are read ahead (`_AHEAD`). Activations are read
through memory maps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch

from tsae.activations.config import Axis, Partner
from tsae.activations.copies import Copies
from tsae.activations.mixture import Mixture
from tsae.activations.partners import Partners, blocks
from tsae.activations.segments import (
    divided,
    epoch_order,
    find_segments,
    kept_problems,
    length_bits,
    places,
    unpacked,
    windows_before,
)
from tsae.activations.source import Source
from tsae.activations.store import DTYPES, REPAIR, TokenSpan, as_float32, as_torch
from tsae.base.memory import Reused
from tsae.errors import TsaeError

_AHEAD = 3
"""Batches that are read ahead."""

_THREADS = 2
"""Threads that copy them. What to copy is found out by whoever asks for batches: threads that did that as well would
wait for each other at each of its many small steps."""


class TokenBatch(NamedTuple):
    """Windows of adjacent tokens, and partners."""

    x: torch.Tensor
    """(n, d_model) in the stored precision, as are others: 16 bits are widened where they are computed with."""
    pairs: np.ndarray
    """(n_pairs, 2) rows of x: (partner, token); the partner comes earlier in the token's trajectory. Rows from n on are
    those of others."""
    trajectory: np.ndarray
    """(n,) row ids into the rollouts."""
    number: int = 0
    """Place in the epoch, from 0."""
    others: torch.Tensor | None = None
    """(m, d_model): tokens that are only partners; None where all partners are in x."""
    copies: np.ndarray = np.empty(0, dtype=np.int64)
    """(n + m,) of x and others, equal for tokens that are copies of one another: the same reader read the same text up
    to them (`tsae.activations.copies`). Empty where there are no partners."""


class _Plan(NamedTuple):
    """A batch before its activations are read."""

    number: int
    x: Rows
    others: Rows | None
    pairs: np.ndarray
    trajectory: np.ndarray
    copies: np.ndarray


Rows = list[tuple[int, np.ndarray]]
"""(number of a shard, positions in it) of tokens, shard after shard."""


@dataclass(frozen=True)
class NormStats:
    """Norms of the counted tokens, estimated on a sample."""

    median: float
    """Median L2 norm."""
    mean: float
    """Mean L2 norm of the tokens below the outlier limit."""
    limit: float
    """Tokens with a larger norm (attention sinks) are left out."""
    outlier_share: float
    """Share of the sample above the limit."""


class Windows:
    """Shuffled batches of tokens and their partners at one site.

    Args:
        store: activations; of a subset, its readers and trajectories are read.
        site: one of its sites.
        span: which tokens count; special tokens never do.
        window: tokens of a window, at least 2.
        held_out: None for all problems; else every tenth problem is held out, and this says which side is read.
        max_norm: tokens whose norm exceeds this multiple of the median are left out.
        partner: which token a token is paired with; None for no pairs.
        step_ends: ids of the tokens that end a reasoning step, for partner="step".
        balance: what is read in equal parts; see `tsae.activations.mixture`.
        seed: of the shuffle.

    Raises:
        TsaeError: where no tokens or no pairs are left, no token ends a step, or a cell to be balanced is unknown.
    """

    def __init__(
        self,
        store: Source,
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
        if window < 2:
            raise TsaeError(f"window={window} holds no pair of adjacent tokens", where="window", fix="Use at least 2.")
        if partner == "step" and not step_ends:
            raise TsaeError(
                'partner="step" needs the ids of the tokens that end a step',
                where="TrainingConfig.step_ends",
                fix='Give them, such as checkpoint.tokens_with("\\n"), or let --tokenizer look them up.',
            )
        self.store, self.site, self.window, self.partner, self.seed = store, site, window, partner, seed
        self.max_norm = max_norm
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
        if self.n_tokens == 0:
            raise TsaeError("no tokens are left to train on", where=store.path, fix="Choose another token span.")
        if partner == "step" and sum(map(len, begins)) == n_undivided:
            raise TsaeError(
                f"step_ends={tuple(step_ends)} divide no trajectory into steps",
                where=store.path,
                fix="Give the ids of tokens that end steps in these texts; Checkpoint.tokens_with finds them.",
            )
        self._partners = (
            Partners(self._begin(self.segments), self.segments[:, 2], np.concatenate(begins)) if begins else None
        )
        longest = self.segments[:, 2].max() if self._partners is None else self._partners.longest
        if partner is not None and longest < 2:
            lacking = "step has two" if partner == "step" else "trajectory has two"
            lacking += " adjacent" if partner == "previous" else ""
            raise TsaeError(
                f"no {lacking} tokens that count, so that the temporal loss has no pairs",
                where=store.path,
                fix="Choose another token span, or train with temporal_weight=0 (--temporal-weight 0).",
            )
        self._bits = length_bits(self.segments, window)
        self.mixture = Mixture(store, self.shards, self.segments, balance)
        self.norms = self._norms(max_norm)

    def at(self, site: str) -> Windows:
        """The same windows, without looking for them again, at another site, where other tokens may be outliers."""
        other = copy(self)
        other.site, other.d_model = site, self.store.d_model(site)
        for name in ("_maps", "_outliers", "first_tokens"):
            other.__dict__.pop(name, None)
        other.norms = other._norms(self.max_norm)
        return other

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        # Looking a dataset up in its file takes longer than reading a few windows of it.
        return [np.asarray(shard.raw(self.site)) for shard in self.shards]

    @cached_property
    def _base(self) -> np.ndarray:
        """(n_shards + 1,) tokens of all shards before each."""
        return np.cumsum([0, *(shard.n_tokens for shard in self.shards)])

    @cached_property
    def _texts(self) -> np.ndarray:
        """(n_texts,) place of the first token of every (reader, trajectory) in all shards together."""
        return np.concatenate([low + shard.offsets[:-1] for low, shard in zip(self._base, self.shards, strict=False)])

    def _text_of(self, windows: np.ndarray) -> np.ndarray:
        """(n,) index into `_texts` of windows or segments (n, 3)."""
        return self._text_at(self._begin(windows))

    def _text_at(self, place: np.ndarray) -> np.ndarray:
        """(n,) index into `_texts` of tokens."""
        return np.searchsorted(self._texts, place, side="right") - 1

    def _begin(self, windows: np.ndarray) -> np.ndarray:
        """(n,) place of the first token of windows or segments (n, 3) in all shards together."""
        return self._base[windows[:, 0]] + windows[:, 1]

    @cached_property
    def _rows(self) -> np.ndarray:
        """(n_texts,) row id of each in the rollouts."""
        return np.concatenate([shard.trajectory for shard in self.shards])

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """(about 16,384, d_model) float32: a sample of the tokens trained on, without outliers."""
        place = self._first(16_384)
        place = place[self._inside(place)]
        x = self._gather(self._rows_of(place), Reused(1))
        self.refuse_not_finite(x, self._rows[np.searchsorted(self._texts, place, side="right") - 1])
        return x.float().numpy()

    def _first(self, n_tokens: int) -> np.ndarray:
        """(n,) places of the tokens of the first windows of epoch 0."""
        windows = self._beginning()
        first = int(windows_before(windows, self._bits, np.array([n_tokens]))[0])
        begin, length = unpacked(windows[: max(1, first)], self._bits)
        order = np.argsort(begin, kind="stable")
        return places(begin[order], length[order])

    def _beginning(self) -> np.ndarray:
        """(n,) first windows of epoch 0, packed, more of them than make a sample where there are so many."""
        return self._order(0)

    def _norms(self, max_norm: float, sample: int = 65_536) -> NormStats:
        norm = self._norm(self._first(sample))
        median = float(np.median(norm))
        inside = norm[norm <= max_norm * median]
        if not inside.sum() > 0:
            found = f"no token is within {max_norm:g} times the median norm" if median else "most activations are 0"
            raise TsaeError(f"{found} at {self.site}", where=self.store.path, fix="Check max_norm and the site.")
        return NormStats(median, float(inside.mean()), max_norm * median, float((norm > max_norm * median).mean()))

    def _norm(self, place: np.ndarray) -> np.ndarray:
        """(n,) L2 norms of tokens whose shards ascend."""
        return np.concatenate([self.shards[number].norms(self.site)[some] for number, some in self._rows_of(place)])

    def _inside(self, place: np.ndarray) -> np.ndarray:
        """(n,) bool: tokens that are no outliers."""
        return self._outliers[place >> 3] >> (place & 7).astype(np.uint8) & 1 == 0

    @cached_property
    def _outliers(self) -> np.ndarray:
        """A bit for each token of all shards."""
        found = np.zeros(self._base[-1], dtype=bool)
        for shard, low, high in zip(self.shards, self._base[:-1], self._base[1:], strict=True):
            np.greater(shard.norms(self.site), self.norms.limit, out=found[low:high])
        return np.packbits(found, bitorder="little")

    def refuse_not_finite(self, x: torch.Tensor, trajectory: np.ndarray) -> None:
        """Name a token that is not finite; nothing where all are.

        Captures are finite, and reading batches does not look again: this is for who finds that something was changed.

        Args:
            x: (n, d_model) tokens of a batch.
            trajectory: (n,) row ids into the rollouts.

        Raises:
            TsaeError: says where it is.
        """
        rows = trajectory[~torch.isfinite(x).all(dim=1).numpy()]
        for shard in self.shards if len(rows) else ():
            for place in np.flatnonzero(np.isin(shard.trajectory, rows)):
                low, high = shard.offsets[place : place + 2]
                bad = np.flatnonzero(~np.isfinite(as_float32(shard.raw(self.site)[low:high], shard.dtype)).all(axis=1))
                if len(bad):
                    row = int(shard.trajectory[place])
                    problem = self.store.rollouts.table["problem_id"][row].as_py()
                    raise TsaeError(
                        f"{self.site} is not finite in trajectory {row} (problem {problem}), token {bad[0]}",
                        where=shard.path,
                        fix=REPAIR,
                    )

    def epoch(
        self, number: int, batch_tokens: int, *, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> Iterator[TokenBatch]:
        """As many tokens as the store has, in an order that depends on the seed and the epoch only.

        Batches hold about batch_tokens tokens, as many as divide the epoch evenly.

        Args:
            number: of the epoch.
            batch_tokens: tokens of a batch, without others.
            start: number of the first batch; those before it are not read.
            share: (i, n) gives every n-th window of each batch from the i-th on. Shares of a batch make up the whole;
                one that has no pairs is given nevertheless, so that n processes stay in step.
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

            def begin(plan: _Plan) -> tuple[_Plan, list[Future[torch.Tensor]]]:
                read = [plan.x] if plan.others is None else [plan.x, plan.others]
                return plan, [threads.submit(self._gather, rows, memory) for rows in read]

            ahead = deque(map(begin, islice(due, _AHEAD)))
            while ahead:
                plan, reading = ahead.popleft()
                x, *others = [one.result() for one in reading]
                ahead.extend(map(begin, islice(due, 1)))
                some = others[0] if others else None
                yield TokenBatch(x, plan.pairs, plan.trajectory, plan.number, some, plan.copies)
                # So that its memory is free for another.
                del reading, x, others, some

    def _order(self, epoch: int) -> np.ndarray:
        """(n_windows,) packed, every window that an epoch reads, in its order."""
        return epoch_order(self.segments, self._base, self.mixture, self.window, self._bits, self.seed, epoch)

    def _plan(self, number: int, windows: np.ndarray, share: tuple[int, int], rng: np.random.Generator) -> _Plan:
        begin, length = unpacked(windows, self._bits)
        order = np.argsort(begin, kind="stable")
        begin, length, mine = begin[order], length[order], order % share[1] == share[0]
        text = self._text_at(begin)
        place = places(begin, length)
        # Drawn for the whole batch, so that a token has the same partner whatever the share.
        drawn = None if self._partners is None else self._partners.draw(place, rng)
        if share[1] > 1:
            of_mine = np.repeat(mine, length)
            begin, length, text, place = begin[mine], length[mine], text[mine], place[of_mine]
            drawn = None if drawn is None else drawn[of_mine]
        inside = self._inside(place)
        row = np.cumsum(inside) - 1
        x = self._rows_of(place[inside])
        trajectory = np.repeat(self._rows[text], length)[inside]
        copies = np.empty(0, dtype=np.int64) if self.partner is None else self._copies_of(begin, length)[inside]
        if self._partners is None or drawn is None:
            follows = inside.copy()
            follows[1:] &= inside[:-1]
            follows[length.cumsum() - length] = False
            current = np.flatnonzero(follows) if self.partner is not None else np.empty(0, dtype=np.int64)
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
        """(sum of lengths,) `TokenBatch.copies` of runs of tokens whose shards ascend."""
        bounds = np.searchsorted(begin, self._base)
        found = [
            self._copies.of(number, begin[low:high] - self._base[number], length[low:high])
            for number, (low, high) in enumerate(pairwise(bounds.tolist()))
            if low < high
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def _gather(self, rows: Rows, memory: Reused) -> torch.Tensor:
        """(n, d_model) tokens in the stored precision."""
        dtype = self.store.manifest["dtype"]
        x, low = memory.empty(sum(len(some) for _, some in rows), self.d_model, DTYPES[dtype]), 0
        for number, some in rows:
            # Any other mode makes a copy first; the rows are known to be there.
            np.take(self._maps[number], some, axis=0, out=x[low : low + len(some)], mode="clip")
            low += len(some)
        return as_torch(x, dtype)

    def _rows_of(self, place: np.ndarray) -> Rows:
        """Where tokens are whose shards ascend."""
        bounds = np.searchsorted(place, self._base)
        return [
            (number, place[bounds[number] : bounds[number + 1]] - self._base[number])
            for number in np.flatnonzero(np.diff(bounds)).tolist()
        ]
