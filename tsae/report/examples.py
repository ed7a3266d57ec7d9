"""Examples for the cards of features: which trajectories each card shows, and their tokens, once for all cards.

A card shows, of the rows (reader, trajectory) of the feature table,

1. *pairs*: a success and a failure of the same problem, by the same policy and as the same reader read them, for the
   problems where the feature is strongest;
2. *quantiles*: rows ordered by their strongest token: the strongest, then from the top tenth, the upper and the lower
   half of those where the feature is active at all; at most one a problem.

Of every row a window around the strongest token is kept. Codes are read a feature, or a part of the rows, at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from tsae.features.contexts import peaks_of
from tsae.features.feature_table import FeatureTable, masked_blocks
from tsae.report.text import shortened, visible

BEFORE, AFTER = 256, 128
"""Tokens kept before and after the strongest one."""
MAX_TOKENS = 3_000_000
"""Tokens and activations kept for all cards together; features that come last go without examples."""
CHUNK = 64
"""Features in a part that the page unpacks together."""
BINS = (("90–100 %", 0.9, 1.0), ("50–90 %", 0.5, 0.9), ("0–50 %", 0.0, 0.5))
LEVELS = 99
"""Steps in which activations are kept, relative to the feature's maximum."""
_STRONGEST, _PER_BIN, _PAIRS = 3, 2, 2
_HISTOGRAM = 24


@dataclass(frozen=True)
class Contexts:
    """Ready for JSON."""

    chunks: list[dict[str, list[Any]]]
    """Per feature [maximum, [group, …]]; a group is [name, [example, …]], an example [trajectory, reader, strongest
    token, first and last + 1 kept token, strongest activation, gaps between active tokens, their levels]."""
    where: dict[int, int]
    """Chunk of every feature that has examples."""
    trajectories: dict[str, Any]
    """strings, problems; per trajectory [problem, policy, outcome, prompt tokens, tokens, [[start, ids], …]]."""
    left_out: int = 0
    """Active features without room."""


class _Chosen(NamedTuple):
    """A row to show for a feature."""

    row: int
    token: int
    """Index into the table's tokens around which the window lies."""
    value: float


class _Card(NamedTuple):
    feature: int
    maximum: float
    groups: list[tuple[str, list[_Chosen]]]


def contexts(
    source: FeatureTable, order: Sequence[int], strings: dict[str, str], *, max_tokens: int = MAX_TOKENS
) -> Contexts:
    """Choose and collect the examples.

    Args:
        source: the table.
        order: features, those that must not go without examples first.
        strings: text of token ids, by id as text; ids stand where it is missing.
        max_tokens: see `MAX_TOKENS`.
    """
    chooser = ExamplesOnDemand(source, strings)
    cards: list[_Card] = []
    left_out, budget = 0, max_tokens
    for feature in order:
        if (card := chooser.card(int(feature), full=budget < 0)) is None:
            continue
        # A guess: windows overlap, and few tokens of a window are active.
        windows = (_window(source, one) for _, group in card.groups for one in group)
        budget -= sum(1 + (stop - start) // 4 for start, stop in windows)
        if budget < 0:
            left_out += 1
        else:
            cards.append(card)
    return _collected(source, cards, strings, left_out)


class ExamplesOnDemand:
    """The examples of one feature after another.

    Args:
        source: the table.
        strings: text of token ids, by id as text.
    """

    def __init__(self, source: FeatureTable, strings: dict[str, str]) -> None:
        self.source, self._strings, self._counted = source, strings, source.span_mask("all")
        self.prompts = source.rollouts.lengths("prompt_ids")[source.trajectory]
        facts = source.rollouts.table.select(["problem_id", "policy", "outcome"]).to_pandas().astype(str)
        facts = facts.iloc[source.trajectory].assign(reader=source.reader)
        self.problem = facts.problem_id.factorize()[0]
        self.group = facts.groupby(["problem_id", "policy", "reader"]).ngroup().to_numpy()
        self.success, failure = ((facts.outcome == outcome).to_numpy() for outcome in ("success", "failure"))
        self.first = {
            side: {int(self.group[row]): int(row) for row in np.flatnonzero(mask)[::-1]}
            for side, mask in ((True, self.success), (False, failure))
        }
        both = list(self.first[True].keys() & self.first[False].keys())
        self.mixed = np.isin(self.group, both) & (self.success | failure)

    def of(self, feature: int) -> list[Any]:
        """[trajectories, examples by feature], as in `Contexts`; empty where it is never active."""
        card = self.card(feature) if feature < self.source.n_features else None
        if card is None:
            return []
        found = _collected(self.source, [card], self._strings, 0)
        return [found.trajectories, found.chunks[0]]

    def card(self, feature: int, *, full: bool = False) -> _Card | None:
        """The rows to show for a feature: none where the page is full; None where it is never active."""
        row, token, value = peaks_of(self.source, self._counted, feature)
        if not len(row):
            return None
        if full:
            return _Card(feature, 0.0, [])
        order = np.lexsort((row, -value))
        row, token, value = row[order], token[order], value[order]
        seen: set[int] = set()

        def chosen_at(i: int) -> _Chosen:
            return _Chosen(int(row[i]), int(token[i]), float(value[i]))

        def pick(candidates: np.ndarray, n: int) -> list[_Chosen]:
            chosen: list[_Chosen] = []
            for i in candidates.tolist():
                problem = int(self.problem[row[i]])
                if len(chosen) < n and problem not in seen:
                    seen.add(problem)
                    chosen.append(chosen_at(i))
            return chosen

        groups = [
            ("pairs", self._pairs(row, chosen_at)),
            ("strongest", pick(np.arange(min(len(row), 200)), _STRONGEST)),
        ]
        for name, low, high in BINS:
            # From the middle of the bin outwards, so that a bin is shown by what is typical of it.
            start, stop = round((1 - high) * len(row)), round((1 - low) * len(row))
            inside = np.arange(start, stop)
            inside = inside[np.argsort(np.abs(inside - (start + stop - 1) / 2), kind="stable")][:50]
            groups.append((name, pick(inside, _PER_BIN)))
        return _Card(feature, float(value[0]), [(name, found) for name, found in groups if found])

    def _pairs(self, row: np.ndarray, chosen_at: Callable[[int], _Chosen]) -> list[_Chosen]:
        """Success, failure, success, failure …, strongest problem first; rows come strongest first."""
        at = np.flatnonzero(self.mixed[row])
        chosen: list[_Chosen] = []
        problems: set[int] = set()
        for i in at[:100].tolist():
            problem, group = int(self.problem[row[i]]), int(self.group[row[i]])
            if problem in problems:
                continue
            problems.add(problem)
            mine = at[self.group[row[at]] == group]
            for side in (True, False):
                found = mine[self.success[row[mine]] == side]
                if len(found):
                    chosen.append(chosen_at(int(found[0])))
                else:
                    silent = self.first[side][group]
                    first, end = (int(place) for place in self.source.row_offsets[silent : silent + 2])
                    chosen.append(_Chosen(silent, min(first + int(self.prompts[silent]), end - 1), 0.0))
            if len(problems) == _PAIRS:
                break
        return chosen


def histograms(source: FeatureTable, span: Any) -> tuple[np.ndarray, np.ndarray]:
    """(n_features, 24) numbers of active tokens of a span in equal steps from 0 to the (n_features,) maximum."""
    counted = source.span_mask(span)
    top = np.zeros(source.n_features, dtype=np.float32)
    for mine in _counted_codes(source, counted):
        np.maximum.at(top, mine.indices, mine.data)
    counts = np.zeros(source.n_features * _HISTOGRAM, dtype=np.int64)
    for mine in _counted_codes(source, counted):
        step = np.minimum((mine.data / np.maximum(top[mine.indices], 1e-30) * _HISTOGRAM).astype(int), _HISTOGRAM - 1)
        key = mine.indices.astype(np.int64) * _HISTOGRAM + step
        counts += np.bincount(key[mine.data > 0], minlength=len(counts))
    return counts.reshape(source.n_features, _HISTOGRAM), top


def _counted_codes(source: FeatureTable, counted: np.ndarray) -> Iterator[sp.csr_array]:
    for codes, mine in masked_blocks(source, counted):
        yield codes[np.flatnonzero(mine)]


def _window(source: FeatureTable, one: _Chosen) -> tuple[int, int]:
    """First and last + 1 kept token, within the row."""
    first, last = int(source.row_offsets[one.row]), int(source.row_offsets[one.row + 1])
    return max(first, one.token - BEFORE) - first, min(last, one.token + AFTER) - first


def _collected(source: FeatureTable, cards: list[_Card], strings: dict[str, str], left_out: int) -> Contexts:
    by_row: dict[int, list[tuple[_Card, _Chosen]]] = {}
    for card in cards:
        for _, group in card.groups:
            for one in group:
                by_row.setdefault(one.row, []).append((card, one))
    written: dict[int, list[Any]] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for row, wanted in by_row.items():
        first = int(source.row_offsets[row])
        # Sorted: conversion goes through the rows in their order.
        columns = sp.csc_array(source.codes[first : int(source.row_offsets[row + 1])])
        trajectory = int(source.trajectory[row])
        for card, one in wanted:
            start, stop = _window(source, one)
            spans.setdefault(trajectory, []).append((start, stop))
            mine = slice(int(columns.indptr[card.feature]), int(columns.indptr[card.feature + 1]))
            at, values = columns.indices[mine], columns.data[mine]
            inside = (at >= start) & (at < stop) & (values > 0)
            at, values = at[inside], values[inside]
            level = np.maximum(np.rint(values / card.maximum * LEVELS), 1).astype(int)
            gaps = at.copy()
            gaps[1:] -= at[:-1]
            gaps[:1] -= start
            written[id(one)] = [
                trajectory, int(source.reader[row]), one.token - first, start, stop, float(f"{one.value:.4g}"),
                gaps.tolist(), level.tolist(),
            ]  # fmt: skip
    chunks: list[dict[str, list[Any]]] = []
    where: dict[int, int] = {}
    for begin in range(0, len(cards), CHUNK):
        part = cards[begin : begin + CHUNK]
        where |= {card.feature: len(chunks) for card in part}
        chunks.append(
            {
                str(card.feature): [
                    float(f"{card.maximum:.4g}"),
                    [[name, [written[id(one)] for one in group]] for name, group in card.groups],
                ]
                for card in part
            }
        )
    return Contexts(chunks, where, _trajectories(source, spans, strings), left_out)


def _trajectories(
    source: FeatureTable, spans: dict[int, list[tuple[int, int]]], strings: dict[str, str]
) -> dict[str, Any]:
    """Tokens of the kept windows, overlapping ones put together; ids are renumbered, frequent ones first."""
    row_of = dict(zip(source.trajectory[::-1].tolist(), range(source.n_rows - 1, -1, -1), strict=True))
    prompts = source.rollouts.lengths("prompt_ids")
    kept: dict[int, list[tuple[int, np.ndarray]]] = {}
    for trajectory, windows in spans.items():
        first = int(source.row_offsets[row_of[trajectory]])
        merged: list[list[int]] = []
        for start, stop in sorted(windows):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        kept[trajectory] = [(start, source.token_ids[first + start : first + stop]) for start, stop in merged]
    everything = [ids for segments in kept.values() for _, ids in segments]
    ids, counts = np.unique(np.concatenate(everything or [np.zeros(0, dtype=np.int32)]), return_counts=True)
    frequent = ids[np.argsort(-counts, kind="stable")]
    rank = {int(id): i for i, id in enumerate(frequent)}
    names = ("problem_id", "policy", "outcome")
    records = source.rollouts.table.select(names).take(np.array(sorted(kept), dtype=np.int64)).to_pylist()
    listed = {}
    for trajectory, record in zip(sorted(kept), records, strict=True):
        row = row_of[trajectory]
        listed[str(trajectory)] = [
            *(shortened(visible(str(record[name])), 80) for name in names),
            int(prompts[trajectory]),
            int(source.row_offsets[row + 1] - source.row_offsets[row]),
            [[start, [rank[int(i)] for i in ids]] for start, ids in kept[trajectory]],
        ]
    return {
        # Without strings tokens are ids, which need a space between them.
        "strings": [visible(strings[str(int(id))]) if str(int(id)) in strings else f"#{int(id)} " for id in frequent],
        "readers": [visible(reader) for reader in source.readers],
        "trajectories": listed,
    }
