"""`explain`: label the features that moved most, and test each label on contexts that it was not made from.

1. Contexts are drawn from two halves of the problems (`label_contexts`).
2. A labeller names each feature from the one half: a model behind a server (`asking`), or without one rules of tokens
   and positions (`descriptors`).
3. The same labeller judges held-out contexts by the label alone: *detection*, is the feature in this text? and
   *fuzzing*, do these marks show it? (Paulo et al. 2024, arXiv 2410.13928; here both of fuzzing's sides contain the
   feature.) The score is balanced accuracy: .5 says nothing.
4. The control judges the same contexts by the label of another feature that passes its own test. A judge that says yes
   to everything, or labels that fit everything, score as well there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from tsae.base.files import as_path
from tsae.diff.config import ExplainConfig
from tsae.diff.explaining.asking import Asked, Plan
from tsae.diff.explaining.descriptors import Describer
from tsae.diff.explaining.explanations import Explanations
from tsae.diff.explaining.label_contexts import Case, Contexts, Task
from tsae.diff.feature_diff import FeatureDiff
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
        raise TsaeError(
            "contexts need the features that the diff was computed from",
            where="explain",
            fix="Give them: FeatureDiff.load(folder, features=FeatureTable.load(folder))",
        )
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
    for feature in chosen:
        if feature not in diff.features.index:
            there = f"there are 0 to {len(diff.features) - 1}"
            raise TsaeError(f"no feature {feature}; {there}", where="ExplainConfig.choose")
    known = set() if diff.source is None else set(diff.source.readers)
    return {int(f): against.get(f) if against.get(f) in known else None for f in chosen}
