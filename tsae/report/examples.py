"""Examples: problems that base and runs answered, side by side; and the trajectories that the cards of features show.

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
import pandas as pd
import scipy.sparse as sp

from tsae.diff.feature_diff import FeatureDiff
from tsae.features.contexts import peaks_of
from tsae.features.feature_table import FeatureTable, masked_blocks
from tsae.report.story import facts
from tsae.report.story.statements import surviving, survivors
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
    texts, rank = _renumbered([ids for segments in kept.values() for _, ids in segments], strings)
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
        "strings": texts,
        "readers": [visible(reader) for reader in source.readers],
        "trajectories": listed,
    }


def _renumbered(tokens: Sequence[np.ndarray], strings: dict[str, str]) -> tuple[list[str], dict[int, int]]:
    """Texts of all tokens, frequent ones first, and the place of every id among them."""
    ids, counts = np.unique(np.concatenate([*tokens, np.zeros(0, dtype=np.int32)]), return_counts=True)
    frequent = [int(id) for id in ids[np.argsort(-counts, kind="stable")]]
    # Without strings tokens are ids, which need a space between them.
    texts = [visible(strings[str(id)]) if str(id) in strings else f"#{id} " for id in frequent]
    return texts, {id: place for place, id in enumerate(frequent)}


_RUNS, _PROBLEMS, _FEATURES, _LONGEST = 4, 12, 6, 500
"""Runs and problems to choose from, features of a run that colour its tokens, tokens of a response."""


def side_by_side(diff: FeatureDiff) -> dict[str, Any] | None:
    """Problems that base and runs answered, ready for JSON; None where no run has one in common with the base.

    strings are texts of tokens. runs are [name, features with +1 (raised) or −1, whether these survive all controls].
    features are their [maximum, what they respond to] by number. problems are [name, band, prompt, answers by policy],
    an answer is [right ones, number, responses]: a success and a failure, as far as there are any, each [outcome,
    number of tokens, first tokens, activations as a flat list of token, feature, level].
    """
    source, runs = diff.source, [run for run in diff.final_checkpoints if diff.main_part(run)][:_RUNS]
    if source is None or not runs:
        return None
    table = _answers(source, [diff.base, *runs])
    runs = [run for run in runs if {diff.base, run} <= set(table.column)]
    sides = {run: colouring(diff, run) for run in runs}
    features = list(dict.fromkeys(feature for _, signs in sides.values() for feature in signs))
    chosen = _problems(diff, table, runs)
    table = table[table.problem_id.isin(chosen)]
    shown = table.drop_duplicates(["problem_id", "column", "outcome"]).row
    if not chosen:
        return None
    starts = source.row_offsets[shown] + source.rollouts.lengths("prompt_ids")[source.trajectory[shown]]
    of = {row: slice(int(a), int(b)) for row, a, b in zip(shown, starts, source.row_offsets[shown + 1], strict=True)}
    codes = {row: sp.coo_array(source.codes[at.start : at.stop][:, features]) for row, at in of.items()}
    top = np.max([one.max(axis=0).toarray() for one in codes.values() if one.shape[0]], axis=0, initial=1e-30)
    tokens = {row: source.token_ids[at.start : at.stop][:_LONGEST] for row, at in of.items()}
    texts, rank = _renumbered(list(tokens.values()), diff.info.get("token_strings", {}))

    def response(row: int, outcome: str) -> list[Any]:
        one, kept = codes[row], codes[row].row < _LONGEST
        place, which = one.row[kept], one.col[kept]
        level = np.maximum(np.rint(LEVELS * one.data[kept] / top[which]), 1).astype(int)
        marks = np.stack([place, np.array(features, dtype=int)[which], level], axis=1)
        ids = [rank[int(id)] for id in tokens[row]]
        return [outcome, one.shape[0], ids, marks[np.lexsort((which, place))].ravel().tolist()]

    problems = []
    for problem in chosen:
        mine = table[table.problem_id == problem]
        cells = {}
        for name, answers in mine.groupby("column", sort=False):
            first = answers.drop_duplicates("outcome").sort_values("outcome", ascending=False)
            first = first[first.outcome != "unknown"] if len(first) > 1 else first
            responses = [response(int(r.row), r.outcome) for r in facts.records(first)]
            cells[str(name)] = [int((answers.outcome == "success").sum()), len(answers), responses]
        prompt = shortened(visible(str(mine.prompt.iloc[0])), 2000)
        problems.append([shortened(visible(str(problem)), 60), str(mine.band.iloc[0] or ""), prompt, cells])
    return {
        "strings": texts,
        "base": diff.base,
        "runs": [[run, list(signs.items()), left] for run, (left, signs) in sides.items()],
        "features": {
            f: [float(f"{most:.4g}"), visible(str(diff.features.responds_to[f]))]
            for f, most in zip(features, top, strict=True)
        },
        "problems": problems,
    }


def colouring(diff: FeatureDiff, run: str) -> tuple[bool, dict[int, int]]:
    """Whether features survive all controls, and the clearest that do, or else that moved: +1 raised, −1 lowered."""
    moved = facts.main_shift(diff, run)
    moved = moved[moved.q <= diff.q]
    left = surviving(moved) if survivors(moved) else moved.head(0)
    table = facts.strongest(left if len(left) else moved, diff.q, _FEATURES)
    return len(left) > 0, {int(row.feature): 1 if row.delta > 0 else -1 for row in facts.records(table)}


def _answers(source: FeatureTable, names: list[str]) -> pd.DataFrame:
    """The responses of every reader, which is in `column`; where it wrote none, all that it read."""
    facts_of = source.rollouts.table.select(["problem_id", "policy", "outcome", "band", "prompt"]).to_pandas()
    read = facts_of.iloc[source.trajectory].assign(
        row=np.arange(source.n_rows), reader=np.array(source.readers, dtype=object)[source.reader]
    )
    parts = []
    for name in names:
        mine = read[read.reader == name]
        own = mine[mine.policy == name]
        parts.append((own if len(own) else mine).assign(column=name))
    return pd.concat(parts, ignore_index=True)


def _problems(diff: FeatureDiff, table: pd.DataFrame, runs: list[str]) -> list[str]:
    """For every run, from each band in turn, the problems that it solves more or less often than the base."""
    right = table.assign(right=table.outcome.map({"success": 1.0, "failure": 0.0}))
    rates = right.groupby(["problem_id", "column"], sort=False).right.mean().unstack("column")
    n = right.groupby(["problem_id", "column"], sort=False).size().unstack("column").reindex(rates.index)
    bands = right.drop_duplicates("problem_id").set_index("problem_id").band.reindex(rates.index)
    names, queues = list(rates.index), []
    for run in runs:
        both = n[[diff.base, run]].notna().all(axis=1).to_numpy()
        order = np.argsort(-(rates[run] - rates[diff.base]).abs().fillna(0).to_numpy(), kind="stable")
        first = facts.trained_on(diff, run)
        split = sorted({str(band) for band in bands}, key=lambda band: (band != first, band))
        of_band = [[int(i) for i in order if both[i] and str(bands.iloc[i]) == band] for band in split]
        queues.append(facts.in_turn(of_band, _PROBLEMS))
    return [names[i] for i in facts.in_turn(queues, _PROBLEMS)]
