"""The contexts from which a feature is labelled, and those on which the label is tested.

Problems are cut into two halves at random: labels are made from the one and tested on the other. A context is a window
of tokens of one row (reader, trajectory); its *marked* tokens are those with at least a fifth of its largest
activation. A trajectory gives one context of a kind at most.

- *detection*: windows with the feature, of all strengths, against windows anywhere without it.
- *fuzzing*: windows with the feature and its own marks, against windows with the feature whose marks stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from tsae.diff.config import ExplainConfig
from tsae.features.contexts import Peaks, peaks_of
from tsae.features.feature_table import FeatureTable

Test = Literal["detection", "fuzzing"]
OPEN, CLOSE = "⟦", "⟧"
"""Around marked tokens. In texts they become square brackets."""
_MARKED = 0.2
_ROWS = 400  # looked through for windows with the same tokens


@dataclass(frozen=True)
class Window:
    """Tokens around one token."""

    first: int
    """Index of its first token into the table's tokens."""
    texts: tuple[str, ...]
    values: np.ndarray
    """(n,) activation; 0 on tokens that do not count."""
    marks: np.ndarray
    """(n,) bool."""
    reader: str

    @property
    def tokens(self) -> np.ndarray:
        """(n,) indices into the table's tokens."""
        return np.arange(self.first, self.first + len(self.texts))

    @property
    def plain(self) -> str:
        return "".join(self.texts)

    @property
    def marked(self) -> str:
        """The text with runs of marked tokens in brackets."""
        pieces = []
        for i, text in enumerate(self.texts):
            opens = self.marks[i] and not (i and self.marks[i - 1])
            closes = self.marks[i] and not (i + 1 < len(self.marks) and self.marks[i + 1])
            pieces.append(f"{OPEN if opens else ''}{text}{CLOSE if closes else ''}")
        return "".join(pieces)


Task = tuple[Test, str, Sequence[Window]]
"""A test, the label, and the windows to judge."""


@dataclass(frozen=True)
class Case:
    """One feature with its contexts."""

    feature: int
    maximum: float
    """Its largest activation in the half that labels are made from."""
    active: tuple[Window, ...]
    inactive: tuple[Window, ...]
    """With its strongest tokens, but without it."""
    compared: tuple[tuple[Window, Window], ...]
    """The same text as the base and as the trained checkpoint read it."""
    tests: Mapping[Test, tuple[tuple[Window, bool], ...]]
    """Held-out windows. detection: and whether the feature is active there; fuzzing: and whether the marks are its
    own."""


class Contexts:
    """Draws contexts of features from a table.

    Args:
        features: the table.
        config: how many, and how long.
        strings: text of token ids, by id as text.
    """

    def __init__(self, features: FeatureTable, config: ExplainConfig, strings: Mapping[str, str]) -> None:
        self.features, self.config, self.strings = features, config, strings
        self.counted = features.span_mask("all")
        names = np.array(features.rollouts.table["problem_id"].to_pylist(), dtype=object)[features.trajectory]
        problem = np.unique(names.astype(str), return_inverse=True)[1]
        n = int(problem.max(initial=-1)) + 1
        half = np.random.default_rng(config.seed).permutation(n) % 2
        self.held_out = half[problem] == 1
        """(n_rows,) bool."""

    @cached_property
    def learning_rows(self) -> np.ndarray:
        return np.flatnonzero(~self.held_out)

    def case(self, feature: int, against: str | None = None) -> Case:
        """A feature's contexts.

        Args:
            feature: its index.
            against: the trained checkpoint whose reading is set beside the base's.
        """
        config, rng = self.config, np.random.default_rng([self.config.seed, feature])
        active_tokens = np.sort(self.features.column(feature)[0])
        peaks = peaks_of(self.features, self.counted, feature)
        mine, others = (Peaks(*(of[self.held_out[peaks.row] == side] for of in peaks)) for side in (False, True))
        top = float(mine.value.max(initial=0.0))
        order = np.argsort(-mine.value, kind="stable")
        strongest = self._strongest(mine, order, against)
        rest = self._one_each(mine, rng.permutation(order), config.random, {*strongest})
        learned = [self._window(feature, int(mine.token[i])) for i in (*strongest, *rest)]
        ids = np.unique([self.features.token_ids[mine.token[i]] for i in strongest]) if strongest else np.zeros(0, int)
        hard = self._inactive(active_tokens, self.learning_rows, config.contrasting, rng, ids)
        # Of all strengths, alternately for one test and the other.
        chosen = self._one_each(others, np.argsort(-others.value, kind="stable"), None)
        spaced = np.linspace(0, len(chosen) - 1, min(len(chosen), 2 * config.held_out)).round().astype(int)
        windows = [self._window(feature, int(others.token[chosen[i]])) for i in spaced]
        right = [(window, True) for window in windows[::2]]
        wrong = [(w, False) for w in (self._elsewhere(window, rng) for window in windows[1::2]) if w is not None]
        silent = self._inactive(active_tokens, np.flatnonzero(self.held_out), len(right), rng)
        return Case(
            feature,
            top,
            active=tuple(learned),
            inactive=tuple(self._window(feature, token) for token in hard),
            compared=self._compared(feature, mine, against),
            tests={
                "detection": _mixed([*right, *((self._window(feature, token), False) for token in silent)], rng),
                "fuzzing": _mixed([*right, *wrong], rng),
            },
        )

    def _strongest(self, peaks: Peaks, order: np.ndarray, against: str | None) -> list[int]:
        """Places in the peaks: the strongest, from both readers where two are named."""
        n, readers = self.config.strongest, self.features.readers
        if against is None or against == readers[0]:
            return self._one_each(peaks, order, n)
        reader = self.features.reader[peaks.row[order]]
        found: list[int] = []
        for name in (against, readers[0]):
            found += self._one_each(peaks, order[reader == readers.index(name)], n // 2, {*found})
        return found or self._one_each(peaks, order, n)

    def _one_each(self, peaks: Peaks, order: np.ndarray, n: int | None, taken: set[int] | None = None) -> list[int]:
        """The first n places of an order, one a trajectory."""
        seen = {int(self.features.trajectory[peaks.row[i]]) for i in taken or ()}
        found: list[int] = []
        for i in order.tolist():
            trajectory = int(self.features.trajectory[peaks.row[i]])
            if n is not None and len(found) == n:
                break
            if trajectory not in seen:
                seen.add(trajectory)
                found.append(i)
        return found

    def _span(self, token: int) -> tuple[int, int]:
        row = int(self.features.rows_of(np.array([token]))[0])
        ends = self.features.row_offsets[row : row + 2]
        return max(int(ends[0]), token - self.config.before), min(int(ends[1]), token + self.config.after + 1)

    def _window(self, feature: int, token: int) -> Window:
        start, stop = self._span(token)
        values = self.features.codes[start:stop][:, [feature]].toarray()[:, 0] * self.counted[start:stop]
        ids = self.features.token_ids[start:stop].tolist()
        texts = (self.strings.get(str(i), f"#{i} ").replace(OPEN, "[").replace(CLOSE, "]") for i in ids)
        reader = self.features.readers[self.features.reader[self.features.rows_of(np.array([start]))[0]]]
        marks = (values > 0) & (values >= _MARKED * values.max(initial=0))
        return Window(start, tuple(texts), values, marks, reader)

    def _elsewhere(self, window: Window, rng: np.random.Generator) -> Window | None:
        """As many marks on tokens without the feature; None where there are too few."""
        free = np.flatnonzero((window.values == 0) & self.counted[window.tokens])
        n = int(window.marks.sum())
        if not 0 < n <= len(free):
            return None
        marks = np.zeros(len(window.marks), dtype=bool)
        marks[rng.choice(free, n, replace=False)] = True
        return replace(window, marks=marks)

    def _inactive(
        self, active: np.ndarray, rows: np.ndarray, n: int, rng: np.random.Generator, ids: np.ndarray | None = None
    ) -> list[int]:
        """Up to n tokens, one a trajectory, around which the feature is nowhere active; only tokens of these ids."""
        rows = rng.permutation(rows)[: _ROWS if ids is not None else 40 * n]
        found: list[int] = []
        seen: set[int] = set()
        for row in rows.tolist():
            trajectory = int(self.features.trajectory[row])
            if len(found) == n:
                break
            first, stop = self.features.row_offsets[row : row + 2].tolist()
            tokens = first + np.flatnonzero(self.counted[first:stop])
            if ids is not None:
                tokens = tokens[np.isin(self.features.token_ids[tokens], ids)]
            if trajectory in seen:
                continue
            for token in rng.permutation(tokens)[:8].tolist():
                low, high = np.searchsorted(active, self._span(token))
                if low == high:
                    seen.add(trajectory)
                    found.append(token)
                    break
        return found

    def _compared(self, feature: int, peaks: Peaks, against: str | None) -> tuple[tuple[Window, Window], ...]:
        """Windows of the same text by both readers, where their largest activations differ most."""
        features, readers = self.features, self.features.readers
        if against is None or against == readers[0]:
            return ()
        row_of = {
            (int(features.reader[row]), int(features.trajectory[row])): int(row) for row in self.learning_rows.tolist()
        }
        sides = 0, readers.index(against)
        best: dict[int, dict[int, tuple[float, int]]] = {}
        for row, token, value in zip(*peaks, strict=True):
            best.setdefault(int(features.trajectory[row]), {})[int(features.reader[row])] = float(value), int(token)
        gaps = []
        for trajectory, by_reader in best.items():
            if all((side, trajectory) in row_of for side in sides):
                values = [by_reader.get(side, (0.0, -1)) for side in sides]
                gap = abs(values[0][0] - values[1][0])
                if gap > 0:
                    side = int(values[1][0] > values[0][0])
                    place = values[side][1] - int(features.row_offsets[row_of[sides[side], trajectory]])
                    gaps.append((-gap, trajectory, place))
        pairs = []
        for _, trajectory, place in sorted(gaps)[: self.config.compared]:
            base, trained = (
                self._window(feature, int(features.row_offsets[row_of[side, trajectory]]) + place) for side in sides
            )
            pairs.append((base, trained))
        return tuple(pairs)


def _mixed(items: list[tuple[Window, bool]], rng: np.random.Generator) -> tuple[tuple[Window, bool], ...]:
    return tuple(items[i] for i in rng.permutation(len(items)).tolist())
