"""`explain`: label the features that moved most, and test each label on contexts that it was not made from.

1. Contexts are drawn from two halves of the problems (`label_contexts`).
2. A labeller names each feature from the one half: a model behind a server (`llm_labeller`), or without one rules of
   tokens and positions (`Describer`).
3. The same labeller judges held-out contexts by the label alone: *detection*, is the feature in this text? and
   *fuzzing*, do these marks show it? (Paulo et al. 2024, arXiv 2410.13928; here both of fuzzing's sides contain the
   feature.) The score is balanced accuracy: .5 says nothing.
4. The control judges the same contexts by the label of another feature that passes its own test. A judge that says yes
   to everything, or labels that fit everything, score as well there.

A rule is a test of a token: it is one of a feature's few strongest tokens, or follows one; it is a number, punctuation,
a line break; it lies in the prompt, or early or late in the response. The rule with the best F1 on the tokens of some
trajectories wins. A rule says nothing about meaning. It is judged as a model's label is, by applying it to held-out
contexts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import need_features
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.base.untrusted import visible
from tsae.diff.config import ExplainConfig
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.label_contexts import Case, Contexts, Task
from tsae.diff.llm_labeller import Asked, Plan
from tsae.errors import TsaeError
from tsae.rollouts.config import EndpointConfig

FEWEST = 4
"""Contexts of either kind, with a verdict, below which a label has no score."""


class Labeller(Protocol):
    """Names features, and judges texts by a name."""

    name: str

    def labels(self, cases: Sequence[Case]) -> list[str | None]:
        """A label of each feature; None where it has none."""
        ...

    def judge(self, tasks: Sequence[Task]) -> list[list[bool | None]]:
        """For each task, whether each window contains what the label describes (detection), or is marked where it is
        (fuzzing)."""
        ...


def explain(
    diff: FeatureDiff,
    config: ExplainConfig | None = None,
    *,
    server: EndpointConfig | None = None,
    to: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: bool = True,
) -> Explanations:
    """Label features and score the labels.

    Args:
        diff: with its features as `source`.
        config: defaults of `ExplainConfig`.
        server: with chat completions as the OpenAI API has them; without one, labels are rules.
        to: folder to save in. The server's answers are kept there at once, so that the same call goes on after a kill.
        say: called with the estimate of the cost before the server is asked for anything.
        progress: show bars.

    Raises:
        TsaeError: where the diff has no source or no such feature, the cost is beyond the budget, or the server fails
            or gives no label at all.
    """
    config = config or ExplainConfig()
    if diff.source is None:
        what = "contexts need the features that the diff was computed from"
        fix = "Give them: FeatureDiff.load(folder, features=FeatureTable.load(folder))"
        raise TsaeError(what, where="explain", fix=fix)
    moved = _moved(diff, config)
    contexts = Contexts(diff.source, config, diff.info.get("token_strings", {}))
    cases = [contexts.case(feature, against) for feature, against in moved.items()]
    labeller: Labeller
    if server is None:
        labeller = Describer(contexts)
    else:
        labeller = asked = Asked(server, config, None if to is None else as_path(to), progress=progress)
        plan = Plan(asked)
        scored(cases, plan, config)
        say(plan.told())
    table = scored(cases, labeller, config)
    found = Explanations(
        table,
        {
            "labeller": labeller.name,
            "by_model": server is not None,
            "config": asdict(config),
            "sae": diff.info["sae"].get("weights"),
            "rollouts": diff.info.get("rollouts"),
        },
    )
    if to is not None:
        found.save(to)
    return found


def scored(cases: Sequence[Case], labeller: Labeller, config: ExplainConfig) -> pd.DataFrame:
    """`Explanations.table`."""
    active = [case for case in cases if case.active]
    names = dict(zip([case.feature for case in active], labeller.labels(active), strict=True))
    given = [case for case in active if names[case.feature]]
    rows: dict[int, dict[str, Any]] = {case.feature: _row(case, names.get(case.feature)) for case in cases}
    _judged(rows, given, [names[case.feature] for case in given], labeller)
    for row in rows.values():
        row["score"] = (row["detection"] + row["fuzzing"]) / 2
    _judged(rows, given, _controls([rows[case.feature] for case in given], config), labeller, "control_")
    for row in rows.values():
        verdicts = row.pop("verdicts")
        row["answered"] = float(np.mean(verdicts)) if verdicts else math.nan
        row["control"] = (row["control_detection"] + row["control_fuzzing"]) / 2
        row["note"] = row["note"] or _verdict(row, config)
        row["shown"] = not row["note"]
    return pd.DataFrame(list(rows.values()), columns=_COLUMNS).astype({"shown": bool})


def _judged(
    rows: dict[int, dict[str, Any]],
    given: Sequence[Case],
    labels: Sequence[str | None],
    labeller: Labeller,
    prefix: str = "",
) -> None:
    """Write into the rows how well a label of each case does in both tests."""
    tests = [
        (case, test, label, items)
        for case, label in zip(given, labels, strict=True)
        if label
        for test, items in case.tests.items()
    ]
    tasks: list[Task] = [(test, label, [window for window, _ in items]) for _, test, label, items in tests]
    for (case, test, _, items), verdicts in zip(tests, labeller.judge(tasks), strict=True):
        row = rows[case.feature]
        row[f"{prefix}{test}"] = balanced_accuracy([truth for _, truth in items], verdicts)
        if not prefix:
            row["verdicts"] += [verdict is not None for verdict in verdicts]


_COLUMNS = [
    "feature", "label", "detection", "fuzzing", "score", "control_detection", "control_fuzzing", "control",
    "n_detection", "n_fuzzing", "answered", "shown", "note",
]  # fmt: skip


def balanced_accuracy(truth: Sequence[bool], verdicts: Sequence[bool | None]) -> float:
    """Mean of the shares of right verdicts on true and on false; NaN where either has fewer than 4 verdicts."""
    sides = [
        [
            verdict == side
            for right, verdict in zip(truth, verdicts, strict=True)
            if right is side and verdict is not None
        ]
        for side in (True, False)
    ]
    if min(len(side) for side in sides) < FEWEST:
        return math.nan
    return float(np.mean([np.mean(side) for side in sides]))


def _row(case: Case, label: str | None) -> dict[str, Any]:
    tests = case.tests
    nothing = dict.fromkeys(("detection", "fuzzing", "control_detection", "control_fuzzing"), math.nan)
    few = any(
        min(sum(truth is side for _, truth in items) for side in (True, False)) < FEWEST for items in tests.values()
    )
    note = ""
    if not case.active:
        note = "it is active in no context"
    elif not label:
        note = "no label: the answer has not the form that was asked for"
    elif few:
        note = "too few held-out contexts to test a label"
    counts = {f"n_{test}": len(items) for test, items in tests.items()}
    return {"feature": case.feature, "label": label or "", **nothing, **counts, "note": note, "verdicts": []}


def _verdict(row: dict[str, Any], config: ExplainConfig) -> str:
    """Why a label that could be tested is not shown."""
    if math.isnan(row["score"]):
        return "too few answers to test the label"
    if row["score"] < config.min_score:
        return f"its label scores {row['score']:.2f}, less than {config.min_score:g}"
    if row["control"] >= row["score"]:
        return f"another feature's label scores no less ({row['control']:.2f})"
    return ""


def _controls(rows: Sequence[dict[str, Any]], config: ExplainConfig) -> list[str | None]:
    """For each label another one that has another text, drawn at random from those that pass their own test.

    A label that fails may say anything, such as what the judge shall answer. It decides nothing on other features; only
    where no label passes are all drawn from.
    """
    rng = np.random.default_rng(config.seed)
    passing = [row["label"] for row in rows if row["score"] >= config.min_score]
    found: list[str | None] = []
    for row in rows:
        others = [label for label in passing or [row["label"] for row in rows] if label != row["label"]]
        found.append(others[int(rng.integers(len(others)))] if others else None)
    return found


def _moved(diff: FeatureDiff, config: ExplainConfig) -> dict[int, str | None]:
    """The features to label, and of each the trained checkpoint that moved it most."""
    shifts = [diff.main_shift(checkpoint) for checkpoint in diff.checkpoints]
    table = pd.concat(shifts, ignore_index=True) if shifts else diff.table(kind="outcome")
    table = table.assign(size=table.delta.abs()).sort_values(["moved", "size"], ascending=False, kind="stable")
    first = table.drop_duplicates("feature")
    against = dict(zip(first.feature.tolist(), first.checkpoint.tolist(), strict=True)) if shifts else {}
    chosen = config.choose or first.feature.tolist()[: config.n]
    need_features(chosen, len(diff.features), "ExplainConfig.choose")
    known = set() if diff.source is None else set(diff.source.readers)
    return {int(f): against.get(f) if against.get(f) in known else None for f in chosen}


FILE = "explanations.json"


@dataclass(frozen=True)
class Explanations(Tables):
    """What a labeller says that features respond to, and how far that holds on contexts it has not seen."""

    table: pd.DataFrame
    """One row a feature:

    feature              index
    label                one line; empty where the labeller gave none
    detection, fuzzing   balanced accuracy on held-out contexts (`tsae.diff.label_contexts`); NaN where there
                         are too few of them, or too few answers
    score                mean of both
    control_detection, control_fuzzing, control   the same with the label of another feature
    n_detection, n_fuzzing  contexts
    answered             share of contexts with a verdict
    shown                whether the label is shown: its score is at least the config's min_score, and above its control
                         where there is one
    note                 why it is not
    """
    info: dict[str, Any] = field(default_factory=dict)
    """labeller (the model's name, or that it is rules), by_model, config, sae and rollouts (fingerprints), tokens that
    the server was asked for."""

    @property
    def labels(self) -> dict[int, str]:
        """Labels that are shown, by feature."""
        kept = self.table[self.table.shown]
        return dict(zip(kept.feature.tolist(), kept.label.tolist(), strict=True))

    def __repr__(self) -> str:
        means = self.table[["score", "control"]].mean()
        return (
            f"Explanations({len(self.labels)} of {len(self.table)} features labelled by "
            f"{visible(str(self.info['labeller']))}; mean "
            f"score {means.score:.2f}, with other features' labels {means.control:.2f})"
        )

    def mark(self, diff: FeatureDiff) -> FeatureDiff:
        """The diff with the labels: `features` has the columns label (empty where none is shown) and label_score.

        Raises:
            TsaeError: where the diff is of another SAE, or nothing says of which one the labels are.
        """
        if self.info["sae"] is None:
            what = "the labels do not say of which SAE they are, as its features do not"
            raise TsaeError(what, where="Explanations.mark", fix="Make the features, the diff and the labels again.")
        there = self.table.feature.isin(diff.features.index)
        if diff.info["sae"].get("weights") != self.info["sae"] or not there.all():
            what = "the diff is of another SAE than the labels"
            raise TsaeError(what, where="Explanations.mark", fix="Use the diff that `tsae explain` read.")
        known = self.table.set_index("feature")
        labels = known.label.where(known.shown, "").reindex(diff.features.index, fill_value="")
        features = diff.features.assign(label=labels, label_score=known.score.reindex(diff.features.index))
        told = {"labeller": self.info["labeller"], "control": float(known.control.mean())}
        return replace(diff, features=features, info={**diff.info, "explanations": told})

    def save(self, folder: str | Path) -> Path:
        """Write explanations.parquet, and explanations.json last."""
        files = table_files({"explanations": self.table})
        return write_artefact(folder, EXPLANATIONS, self.info, files, inputs={"sae": self.info.get("sae")}, gives={})

    @classmethod
    def load(cls, folder: str | Path) -> Explanations:
        """Read a folder that `save` wrote.

        Raises:
            TsaeError: where a file is missing or damaged.
        """
        info, tables = read_tables(as_path(folder), EXPLANATIONS, ["explanations"])
        return cls(tables["explanations"], info)


def labelled(diff: FeatureDiff, folder: Path) -> FeatureDiff:
    """The diff with the labels in a folder, if there are any of its SAE."""
    if not (folder / FILE).is_file():
        return diff
    found = Explanations.load(folder)
    return found.mark(diff) if found.info["sae"] in (None, diff.info["sae"].get("weights")) else diff


EXPLANATIONS = Kind("explanations", 1, FILE, "Make it with `tsae explain`.", Explanations.load)


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
            rule, counted = self.rules[label], self.contexts.counted
            held = [rule.holds(window.tokens) & counted[window.tokens] for window in windows]
            marked = [mine if test == "detection" else mine[w.marks] for mine, w in zip(held, windows, strict=True)]
            found.append([bool(mine.any() if test == "detection" else mine.mean() > 0.5) for mine in marked])
        return found

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
