"""Labels without a model: rules on single tokens and positions, chosen by how well they tell where a feature is active.

A rule is a test of a token: it is one of a feature's few strongest tokens, or follows one; it is a number, punctuation,
a line break; it lies in the prompt, or early or late in the response. The rule with the best F1 on the tokens of some
trajectories wins. A rule says nothing about meaning. It is judged as a model's label is, by applying it to held-out
contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tsae.diff.explaining.label_contexts import Case, Contexts, Task, Window

SOURCE = "rules of tokens and positions"
_ROWS = 400  # rows whose tokens rules are chosen on
_SIZES = (1, 3, 8)
_NONE = -1  # no token's id


@dataclass(frozen=True)
class Rule:
    """A label that can be computed."""

    label: str
    holds: Callable[[np.ndarray], np.ndarray]
    """Indices into the table's tokens -> bool of each."""


class Describer:
    """Labels features by rules.

    Args:
        contexts: the table, its tokens' texts, and which rows labels are made from.
    """

    name = SOURCE

    def __init__(self, contexts: Contexts) -> None:
        self.contexts, features = contexts, contexts.features
        rows = np.random.default_rng(contexts.config.seed).permutation(contexts.learning_rows)[:_ROWS]
        parts = [np.arange(*features.row_offsets[row : row + 2]) for row in np.sort(rows)]
        tokens = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
        self.tokens = tokens[contexts.counted[tokens]]
        self.before = np.roll(features.token_ids, 1)
        """(n_tokens,) the id before each token of the table; -1 for the first of a row."""
        starts = features.row_offsets[:-1]
        self.before[starts[starts < len(self.before)]] = _NONE
        self.alike = Counter(contexts.strings.values())
        """How many ids have the same text."""
        self.prompts = features.rollouts.lengths("prompt_ids")[features.trajectory]
        self.common = self._common_rules()
        self.rules: dict[str, Rule] = {}

    def labels(self, cases: Sequence[Case]) -> list[str | None]:
        """The label of each; None for features that are not active here."""
        found = [self._best(case.feature) for case in cases]
        self.rules |= {rule.label: rule for rule in found if rule is not None}
        return [None if rule is None else rule.label for rule in found]

    def judge(self, tasks: Sequence[Task]) -> list[list[bool | None]]:
        """See `Labeller`: whether the rule holds for a token of a window; in fuzzing, for most of the marked ones."""
        found: list[list[bool | None]] = []
        for test, label, windows in tasks:
            held = [self._holding(label, window) for window in windows]
            marked = [mine if test == "detection" else mine[w.marks] for mine, w in zip(held, windows, strict=True)]
            found.append([bool(mine.any() if test == "detection" else mine.mean() > 0.5) for mine in marked])
        return found

    def _holding(self, label: str, window: Window) -> np.ndarray:
        return self.rules[label].holds(window.tokens) & self.contexts.counted[window.tokens]

    def _best(self, feature: int) -> Rule | None:
        tokens, values = self.contexts.features.column(feature)
        weight = np.zeros(len(self.tokens))
        place = np.searchsorted(self.tokens, tokens)
        inside = (place < len(self.tokens)) & (self.tokens[np.minimum(place, len(self.tokens) - 1)] == tokens)
        weight[place[inside]] = values[inside]
        if not weight.any():
            return None
        active = weight > 0
        best, score = None, -1.0
        for rule in (*self._token_rules(weight), *self.common):
            held = rule.holds(self.tokens)
            f1 = 2 * (held & active).sum() / max(held.sum() + active.sum(), 1)
            if f1 > score + 0.01:  # simple rules come first
                best, score = rule, f1
        return best

    def _token_rules(self, weight: np.ndarray) -> list[Rule]:
        features = self.contexts.features
        rules = []
        for name, of in (("the token", features.token_ids), ("tokens after", self.before)):
            mine = of[self.tokens]
            total = np.bincount(mine[mine != _NONE], weight[mine != _NONE])
            order = np.argsort(-total, kind="stable")
            order = order[total[order] > 0]
            for size in _SIZES if len(order) else ():
                ids = order[:size]
                texts = ", ".join(map(self._text, ids.tolist()))
                said = "the tokens" if name == "the token" and len(ids) > 1 else name
                rules.append(Rule(f"{said} {texts}", _ids_rule(of, ids)))
        return rules

    def _text(self, token: int) -> str:
        """A token as labels name it: no two have the same name."""
        strings = self.contexts.strings
        text = strings.get(str(token), f"#{token}")
        return repr(text) if self.alike[text] == (str(token) in strings) else f"{text!r} #{token}"

    def _common_rules(self) -> list[Rule]:
        features, strings = self.contexts.features, self.contexts.strings

        def of_kind(label: str, test: Callable[[str], bool]) -> Rule:
            known = np.array([int(i) for i, text in strings.items() if test(text)], dtype=np.int64)
            return Rule(label, _ids_rule(features.token_ids, known))

        def share(tokens: np.ndarray) -> np.ndarray:
            """How far into its response a token is, 0 to 1; below 0 in the prompt."""
            rows = features.rows_of(tokens)
            start = features.row_offsets[rows] + self.prompts[rows]
            return (tokens - start) / np.maximum(features.row_offsets[rows + 1] - 1 - start, 1)

        return [
            of_kind("numbers", lambda text: text.strip().isdigit()),
            of_kind("line breaks", lambda text: "\n" in text),
            of_kind("punctuation", lambda text: bool(text.strip()) and not any(c.isalnum() for c in text)),
            of_kind("words with a capital letter", lambda text: text.strip()[:1].isupper()),
            Rule("tokens of the prompt", lambda tokens: share(tokens) < 0),
            Rule("tokens of the response", lambda tokens: share(tokens) >= 0),
            Rule("the first tenth of the response", lambda tokens: (share(tokens) >= 0) & (share(tokens) <= 0.1)),
            Rule("the first half of the response", lambda tokens: (share(tokens) >= 0) & (share(tokens) <= 0.5)),
            Rule("the second half of the response", lambda tokens: share(tokens) > 0.5),
            Rule("the last tenth of the response", lambda tokens: share(tokens) >= 0.9),
        ]


def _ids_rule(of: np.ndarray, ids: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A rule: the id is one of these. `of` (n_tokens,) has the ids of the tokens, or of the tokens before them."""
    return lambda tokens: np.isin(of[tokens], ids)
