"""Batches of tokens with their partners, shuffled over a whole store with bounded memory.

Every trajectory's counted tokens are cut into windows of adjacent tokens, at an offset drawn anew each epoch so that
every adjacent pair is seen in time. Windows, not tokens, are shuffled; a batch is a set of windows, so that each token
is encoded once although it is a partner of both of its neighbours. Windows never cross trajectories and never hold
padding, special tokens, or tokens outside the span.

A token's partner, with which the temporal loss compares it, is the token before it, as in Bhalla et al.
(arXiv 2511.05541): both are in one window. Or it is a random earlier token of the trajectory (the default of its
authors' code) or of the reasoning step (`tsae.activations.partners`). Such a partner is read beside the windows, and
is only a partner: the tokens of the windows alone are reconstructed and counted. So every counted token still comes
once a pass, whatever its partners are, and early tokens, which are partners more often, do not gain weight.

How much of the store an epoch reads is said in `tsae.activations.mixture`. Only the index of windows is held in memory,
12 bytes a window and several times that while an epoch begins, 8 bytes a step where partners are of the step, and the
batches that threads read ahead (`_AHEAD`); activations are read through memory maps.
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
from tsae.activations.memory import Reused
from tsae.activations.mixture import Mixture
from tsae.activations.partners import Partners, blocks
from tsae.activations.source import Source
from tsae.activations.store import Shard, TokenSpan, take_rows
from tsae.errors import TsaeError

_AHEAD = 3
"""Batches that are read ahead, each by a thread."""


class TokenBatch(NamedTuple):
    """Windows of adjacent tokens, and partners."""

    x: np.ndarray
    """(n, d_model) float32."""
    pairs: np.ndarray
    """(n_pairs, 2) rows of x: (partner, token); the partner comes earlier in the token's trajectory. Rows from n on are
    those of others."""
    trajectory: np.ndarray
    """(n,) row ids into the rollouts."""
    number: int = 0
    """Place in the epoch, from 0."""
    others: np.ndarray | None = None
    """(m, d_model) float32: tokens that are only partners; None where all partners are in x."""


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
        kept = _problems(store, held_out) & store.rows
        segments, begins, n_counted, n_undivided = [], [], 0, 0
        for i, shard in enumerate(self.shards):
            of_kept = np.repeat(kept[shard.trajectory], np.diff(shard.offsets))
            counted = shard.token_span(store.rollouts, span, store.special_ids) & of_kept
            segments.append(_segments(i, shard, counted))
            if partner in ("earlier", "step"):
                prompts = store.rollouts.lengths("prompt_ids")[shard.trajectory] if partner == "step" else None
                begins.append(n_counted + blocks(shard, counted, prompts, step_ends))
                n_counted += int(counted.sum())
                n_undivided += len(blocks(shard, counted, prompts, ()))
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
        self._partners = Partners(self.segments, np.concatenate(begins), self.shards) if begins else None
        longest = self.segments[:, 2].max() if self._partners is None else self._partners.longest
        if partner is not None and longest < 2:
            lacking = "step has two" if partner == "step" else "trajectory has two"
            lacking += " adjacent" if partner == "previous" else ""
            raise TsaeError(
                f"no {lacking} tokens that count, so that the temporal loss has no pairs",
                where=store.path,
                fix="Choose another token span, or train with temporal_weight=0 (--temporal-weight 0).",
            )
        self.mixture = Mixture(store, self.shards, self.segments, balance)
        self.norms = self._norms(max_norm)

    def at(self, site: str) -> Windows:
        """The same windows, without looking for them again, at another site, where other tokens may be outliers."""
        other = copy(self)
        other.site, other.d_model = site, self.store.d_model(site)
        other.__dict__.pop("_maps", None)
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
        place = self._base[windows[:, 0]] + windows[:, 1]
        return np.searchsorted(self._texts, place, side="right") - 1

    @cached_property
    def _rows(self) -> np.ndarray:
        """(n_texts,) row id of each in the rollouts."""
        return np.concatenate([shard.trajectory for shard in self.shards])

    def sample(self, n_tokens: int) -> np.ndarray:
        """(about n_tokens, d_model) float32 of the tokens trained on, without outliers: those of the first windows."""
        x, norm = self._first(n_tokens)
        return x[norm <= self.norms.limit]

    def _first(self, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(n, d_model) tokens of the first windows of epoch 0, and their norms."""
        windows = self._beginning()
        windows = windows[: max(1, np.searchsorted(windows[:, 2].cumsum(), n_tokens, side="right"))]
        _, shard, position = _tokens(windows[np.lexsort((windows[:, 1], windows[:, 0]))])
        x = self._gather(shard, position, Reused(1))
        return x, self._norm(x, shard, position)

    def _beginning(self) -> np.ndarray:
        """(n, 3) first windows of epoch 0, more of them than make a sample where there are so many."""
        return self._order(0)

    def _norms(self, max_norm: float, sample: int = 65_536) -> NormStats:
        _, norm = self._first(sample)
        median = float(np.median(norm))
        inside = norm[norm <= max_norm * median]
        if not inside.sum() > 0:
            found = f"no token is within {max_norm:g} times the median norm" if median else "most activations are 0"
            raise TsaeError(f"{found} at {self.site}", where=self.store.path, fix="Check max_norm and the site.")
        return NormStats(median, float(inside.mean()), max_norm * median, float((norm > max_norm * median).mean()))

    def _norm(self, x: np.ndarray, shard: np.ndarray, position: np.ndarray) -> np.ndarray:
        """(n,) L2 norms of tokens; refuses the first that is not finite."""
        norm = torch.linalg.vector_norm(torch.from_numpy(x), dim=1).numpy()
        if not np.isfinite(norm).all():
            bad = int(np.flatnonzero(~np.isfinite(norm))[0])
            found, token = self.shards[shard[bad]], int(position[bad])
            place = int(np.searchsorted(found.offsets, token, side="right")) - 1
            row = int(found.trajectory[place])
            problem = self.store.rollouts.table["problem_id"][row].as_py()
            raise TsaeError(
                f"{self.site} is not finite in trajectory {row} (problem {problem}), "
                f"token {token - int(found.offsets[place])}",
                where=found.path,
                fix="Delete the store and capture again; if it stays, the model overflows: capture in another dtype.",
            )
        return norm

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
        """Windows in their order as batches of the given numbers, from the number `start` on."""
        due = ((number, part) for number, part in self._divided(windows, numbers) if number >= start)
        # For every batch that is read ahead, the last and the one before it: x, what is left of it, and others.
        memory = Reused(3 * (_AHEAD + 2))
        with ThreadPoolExecutor(_AHEAD) as threads:

            def begin(number: int, part: np.ndarray) -> tuple[int, Future[TokenBatch]]:
                rng = np.random.default_rng([self.seed, epoch, number, 1])
                return number, threads.submit(self._batch, part, share, rng, memory)

            ahead = deque(begin(*one) for one in islice(due, _AHEAD))
            while ahead:
                number, found = ahead.popleft()
                batch = found.result()
                ahead.extend(begin(*one) for one in islice(due, 1))
                if len(batch.pairs) or share[1] > 1 or (self.partner is None and len(batch.x)):
                    yield batch._replace(number=number)
                # So that its memory is free for another.
                del found, batch

    def _divided(self, windows: np.ndarray, numbers: range) -> Iterator[tuple[int, np.ndarray]]:
        """(number, windows) of every batch that has any.

        Batches are of equal size rather than a small last one, which might hold no pair and which BatchTopK and InfoNCE
        would treat differently.
        """
        ends = windows[:, 2].cumsum()
        n_batches = len(numbers)
        bounds = np.searchsorted(ends, np.arange(n_batches + 1) * ends[-1] // n_batches, side="right")
        for number, (low, high) in zip(numbers, pairwise(bounds.tolist()), strict=True):
            if low < high:
                yield number, windows[low:high]

    def _order(self, epoch: int) -> np.ndarray:
        """(n_windows, 3) shard, first token and number of tokens of every window that an epoch reads, in its order."""
        parts = []
        for cell, info in enumerate(self.mixture.cells):
            mine = self.segments[self.mixture.cell_of == cell]
            for number, low, high in self.mixture.passes(cell, epoch):
                windows = self._cut(mine, int(np.random.default_rng([self.seed, number]).integers(self.window)))
                if high - low < info.tokens:
                    order = np.random.default_rng([self.seed, number, cell + 1]).permutation(len(windows))
                    begins = windows[order, 2].cumsum() - windows[order, 2]
                    windows = windows[order[(begins >= low) & (begins < high)]]
                parts.append(windows)
        windows = np.concatenate(parts)
        if len(parts) > 1:
            windows = windows[np.lexsort((windows[:, 1], windows[:, 0]))]
        rng = np.random.default_rng([self.seed, epoch])
        rng.integers(self.window)  # the offset of the pass of this number
        # As rng.shuffle(windows) orders them, which is many times slower.
        return windows[rng.permutation(len(windows))]

    def _cut(self, segments: np.ndarray, offset: int) -> np.ndarray:
        """(n_windows, 3): segments cut into windows, the first of each of `window − offset` tokens."""
        shard, start, length = segments.T
        n = (length + offset + self.window - 1) // self.window
        which = np.repeat(np.arange(len(n)), n)
        low = (np.arange(len(which)) - (n.cumsum() - n)[which]) * self.window - offset
        windows = np.empty((len(which), 3), segments.dtype)
        windows[:, 0], windows[:, 1] = shard[which], start[which]
        windows[:, 2] = np.minimum(low + self.window, length[which])
        np.maximum(low, 0, out=low)
        windows[:, 1] += low
        windows[:, 2] -= low
        return windows

    def _batch(
        self, windows: np.ndarray, share: tuple[int, int], rng: np.random.Generator, memory: Reused
    ) -> TokenBatch:
        order = np.lexsort((windows[:, 1], windows[:, 0]))
        windows, mine = windows[order], order % share[1] == share[0]
        drawn = None
        if self._partners is not None:
            # Drawn for the whole batch, so that a token has the same partner whatever the share.
            which, shard, position = _tokens(windows)
            drawn = self._partners.draw(shard, position, rng)[mine[which]]
        windows = windows[mine]
        which, shard, position = _tokens(windows)
        x = self._gather(shard, position, memory)
        inside = self._norm(x, shard, position) <= self.norms.limit
        row = np.cumsum(inside) - 1
        trajectory = self._rows[self._text_of(windows)][which[inside]]
        x = _only(inside, x, memory)
        if self._partners is None or drawn is None:
            follows = np.zeros(len(which), dtype=bool)
            follows[1:] = (which[1:] == which[:-1]) & inside[1:] & inside[:-1]
            current = np.flatnonzero(follows) if self.partner is not None else np.empty(0, dtype=np.int64)
            return TokenBatch(x, np.stack([row[current - 1], row[current]], axis=1), trajectory)
        # A token that drew an outlier has no partner this time: the others are as likely as before.
        current = np.flatnonzero((drawn >= 0) & inside)
        shard, position = self._partners.place(drawn[current])
        others = self._gather(shard, position, memory)
        good = self._norm(others, shard, position) <= self.norms.limit
        current, others = current[good], _only(good, others, memory)
        pairs = np.stack([len(x) + np.arange(len(current)), row[current]], axis=1)
        return TokenBatch(x, pairs, trajectory, others=others)

    def _gather(self, shard: np.ndarray, position: np.ndarray, memory: Reused) -> np.ndarray:
        """(n, d_model) float32 of tokens sorted by shard."""
        x = memory.empty(len(shard), self.d_model, np.float32)
        bounds = np.flatnonzero(np.diff(shard, prepend=-1, append=-1))
        for low, high in pairwise(bounds.tolist()):
            number = shard[low]
            take_rows(self._maps[number], position[low:high], self.shards[number].dtype, x[low:high])
        return x


def _only(wanted: np.ndarray, x: np.ndarray, memory: Reused) -> np.ndarray:
    """The rows of x where wanted."""
    rows = np.flatnonzero(wanted)
    if len(rows) == len(x):
        return x
    return np.take(x, rows, axis=0, out=memory.empty(len(rows), x.shape[1], x.dtype), mode="clip")


def _problems(store: Source, held_out: bool | None) -> np.ndarray:
    """(n_trajectories,) bool over the rollouts: every tenth problem, in order of appearance, is held out."""
    ids = store.rollouts.table["problem_id"].to_pylist()
    if held_out is None:
        return np.ones(len(ids), dtype=bool)
    order = {problem: i for i, problem in enumerate(dict.fromkeys(ids))}
    side = np.array([order[problem] % 10 == 9 for problem in ids])
    if len(order) < 10:
        # Too few problems to hold one out: both sides read everything.
        return np.ones(len(ids), dtype=bool)
    return side == held_out


def _segments(number: int, shard: Shard, counted: np.ndarray) -> np.ndarray:
    first = np.zeros(shard.n_tokens + 1, dtype=bool)
    first[shard.offsets] = True
    begins = counted & (first[:-1] | ~np.concatenate([[False], counted[:-1]]))
    ends = counted & (first[1:] | ~np.concatenate([counted[1:], [False]]))
    start, stop = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    return np.stack([np.full(len(start), number), start, stop - start], axis=1).astype(np.int64)


def _tokens(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index of the window, shard, position in the shard) of every token of windows after one another."""
    shard, start, length = windows.T
    which = np.repeat(np.arange(len(windows)), length)
    return which, shard[which], np.arange(len(which)) + (start - length.cumsum() + length)[which]
