"""Does a response that the log calls right give the log's reference answer? A sample is checked again.

1. The sample is 8 stretches of 32 trajectories each, drawn from the whole log by hashes of their places. So it contains
   several responses to a problem and to its neighbours.
2. math-verify checks each; it is given the last number if it finds nothing else. Without math-verify, last numbers are
   compared. What cannot be read is not compared: a reference answer that is long, structured or no expression, and a
   response without an answer that the log calls right.
3. Verifiers differ on formats, units, and what counts as an answer. So single differences are counted and shown, and
   the log is contradicted only if its outcomes agree with the check hardly better than by chance. Two measures are 1
   if the check agrees as well as it can, and 0 if responses belong to other rows:
   - within problems: the right responses to a problem that the check confirms, minus their expected number if outcomes
     were dealt out at random (the mean of a hypergeometric distribution), divided by the same for the best dealing. A
     check that is stricter or laxer than the run's verifier still gets 1. Responses shifted by a row get about 0,
     whatever the pass rates are.
   - between problems: the share of right responses that fit their own answer, minus the share that fit another
     problem's, divided by 1 minus the latter. Whole groups that were moved get about 0.
   A measure contradicts the log if it is below one half by more than its sampling error: 2.33 standard errors, or for
   the second the upper end of Wilson's interval over problems. A check that agrees by more than half is contradicted in
   less than 1 % of logs. Equal responses to equal answers count once.
4. A third sign is a prompt that has several reference answers in one step (TRL issue 3492: prompts were logged beside
   other prompts' completions). One group in 20 may have it: data sets hold duplicates.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsae.base.statistics import wilson_interval
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.logs.entry import Findings, place_hash
from tsae.rollouts.rewards import equal, expressions, number_in

_WINDOW = 32
_TAIL, _LONGEST_ANSWER = 4000, 100
"""Characters of a response, counted from its end, that are searched for its answer; and of a reference answer."""
_HALF, _ERRORS, _CONFIDENCE = 0.5, 2.33, 0.98
DUPLICATES = 0.05
"""Share of the prompts that may have several answers, as a data set with duplicates has."""


class Sampled(NamedTuple):
    """A trajectory to check."""

    response: str
    """Its end."""
    answer: str
    right: bool
    """By the log."""
    problem: int
    """Label of problem and step."""
    where: str


class Reservoir:
    """Draws stretches of consecutive trajectories into the sample "answers"; every stretch is equally likely."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open: list[Sampled] = []

    def put(self, response: str, answer: str, right: bool, problem: int, where: str) -> None:
        """Take the next trajectory of the log."""
        self._open.append(Sampled(response[-_TAIL:], answer, right, problem, where))
        if len(self._open) == _WINDOW:
            self.close()

    def close(self) -> None:
        """End a stretch."""
        if self._open:
            self._findings.draw("answers", place_hash(self._open[0].where), self._open)
            self._open = []

    def sample(self) -> list[Sampled]:
        """The drawn trajectories, in the order of the log."""
        return [Sampled(*one) for _, window in self._findings.samples["answers"] for one in window]


@dataclass(frozen=True)
class Rechecked:
    """What checking a sample again found."""

    verifier: str
    compared: int
    differ: int
    not_compared: int
    first: str | None
    """Place of the first difference."""
    within: float | None
    """Agreement within problems, 0 by chance, 1 at best; None where no problem tells."""
    between: float | None
    """Agreement between problems."""
    contradicts: bool

    @property
    def telling(self) -> bool:
        """Whether all known measures are above one half."""
        known = [value for value in (self.within, self.between) if value is not None]
        return bool(known) and min(known) > _HALF

    @property
    def measure(self) -> str:
        """Both measures, for a sentence."""
        parts = (("within", self.within), ("between", self.between))
        return ", ".join(f"{value:.2f} {name} problems" for name, value in parts if value is not None)


def recheck(sample: list[Sampled]) -> Rechecked:
    """Check a sample's responses against their reference answers."""
    judge = _Judge()
    golds = [judge.gold(one.answer) for one in sample]
    givens = [judge.given(one.response) if gold else None for one, gold in zip(sample, golds, strict=True)]
    rows = [i for i, one in enumerate(sample) if golds[i] and (givens[i] or not one.right)]
    found = {i: bool(givens[i]) and judge.equal(golds[i], givens[i]) for i in rows}
    differ = [i for i in rows if found[i] != sample[i].right]
    # Equal responses to equal answers, of equal outcome, are one piece of evidence.
    distinct = list({(sample[i].response, sample[i].answer, sample[i].right): i for i in reversed(rows)}.values())[::-1]
    within, contradicts_within = _within(sample, distinct, found)
    right = [i for i in distinct if sample[i].right]
    others = {i: other for i in right if (other := _other_answer(sample, rows, i)) is not None}
    fit_others = {i: judge.equal(golds[other], givens[i]) for i, other in others.items()}
    between, contradicts_between = _between(sample, found, fit_others)
    return Rechecked(
        judge.name,
        len(rows),
        len(differ),
        len(sample) - len(rows),
        sample[differ[0]].where if differ else None,
        within,
        between,
        contradicts_within or contradicts_between,
    )


def _within(sample: list[Sampled], rows: list[int], found: dict[int, bool]) -> tuple[float | None, bool]:
    gain = best = variance = 0.0
    for members in _by_problem(sample, rows):
        n = len(members)
        right, fit = sum(sample[i].right for i in members), sum(found[i] for i in members)
        if 0 < right < n and 0 < fit < n:
            chance = right * fit / n
            gain += sum(sample[i].right and found[i] for i in members) - chance
            best += min(right, fit) - chance
            variance += right * fit * (n - right) * (n - fit) / (n**2 * (n - 1))
    if not best:
        return None, False
    return gain / best, (gain + _ERRORS * sqrt(variance)) / best < _HALF


def _between(sample: list[Sampled], found: dict[int, bool], fit_others: dict[int, bool]) -> tuple[float | None, bool]:
    problems = _by_problem(sample, fit_others)
    if not problems:
        return None, False
    own, other = (
        float(np.mean([np.mean([fits[i] for i in members]) for members in problems])) for fits in (found, fit_others)
    )
    if other >= 1:
        return None, False
    _, high = wilson_interval(own * len(problems), len(problems), _CONFIDENCE)
    return (own - other) / (1 - other), (float(high) - other) / (1 - other) < _HALF


def _by_problem(sample: list[Sampled], rows: Iterable[int]) -> list[list[int]]:
    problems: dict[int, list[int]] = defaultdict(list)
    for i in rows:
        problems[sample[i].problem].append(i)
    return list(problems.values())


def _other_answer(sample: list[Sampled], rows: list[int], i: int) -> int | None:
    """A row of the sample with another answer, the next one in the log."""
    after = [*(j for j in rows if j > i), *(j for j in rows if j < i)]
    return next((j for j in after if sample[j].answer != sample[i].answer), None)


def several_answers(asked: np.ndarray, answers: np.ndarray, steps: np.ndarray) -> tuple[int, int, int | None]:
    """Prompts that occur twice or more in a step, those of them with several answers, and a row of the first of these.

    Steps with a single prompt are left out: its rows may be different tasks that start alike.

    Args:
        asked: (n,) labels of prompt and step.
        answers: (n,) labels of reference answers; 0 if there is none.
        steps: (n,) labels of steps.
    """
    rows = pd.DataFrame({"asked": asked, "answer": answers, "step": steps})[answers != 0]
    rows["prompts"] = rows.groupby("step").asked.transform("nunique")
    told = rows[rows.prompts > 1].groupby("asked").answer.agg(["size", "nunique"]).query("size > 1")
    wrong = told.index[told["nunique"] > 1]
    where = rows.index[rows.asked.isin(wrong)]
    return len(told), len(wrong), int(where[0]) if len(where) else None


class _Judge:
    """math-verify, or the last number if that is not installed."""

    def __init__(self) -> None:
        try:
            expressions("1")
            self.name = "math-verify"
        except TsaeError:
            self.name = "the last number (math-verify is not installed)"
        if threading.current_thread() is not threading.main_thread():
            # Without its time limits a single expression may take for ever.
            self.name = "the last number (math-verify has its time limits in the main thread alone)"
        self._golds: dict[str, Any] = {}

    def gold(self, answer: str) -> Any:
        """A reference answer that can be read; else something false."""
        if answer not in self._golds:
            self._golds[answer] = self._read_gold(answer.rsplit("####")[-1].strip())
        return self._golds[answer]

    def _read_gold(self, answer: str) -> Any:
        # A box marks the answer of a whole solution; tests of a program have none.
        if len(answer) > _LONGEST_ANSWER and "\\boxed" not in answer:
            return None
        with suppress(ValueError):
            if isinstance(parse_json(answer), (dict, list)):
                return None
        return (self.given(answer) or expressions(f"${answer}$")) if self.name == "math-verify" else self.given(answer)

    def given(self, text: str) -> Any:
        """Find the answer in a text: a list of expressions or of one number; empty if there is no answer."""
        if self.name == "math-verify" and (found := expressions(text)):
            return found
        number = number_in(text)
        if number is None or self.name != "math-verify":
            return [] if number is None else [number]
        written = f"{number:f}"
        return expressions(written.rstrip("0").rstrip(".") if "." in written else written)

    def equal(self, gold: Any, given: Any) -> bool:
        return equal(gold, given) if self.name == "math-verify" else gold == given
