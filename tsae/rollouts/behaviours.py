"""Behaviours: what single responses do, and how that differs between policies and bands.

`with_behaviours` reads every response's text: loops, final answers, written-out operations, its format.
`behaviour_table` averages these and any other columns that the table names as behaviours; `format_table` measures how
concentrated formats are.

The rules for texts are for mathematical reasoning in English, in LaTeX or with calculator annotations
(``<<16-3=13>>13``). They do not judge: an operation counts whether or not its result is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from tsae.base.statistics import FEWEST, change_interval, jackknife_interval, mean_interval
from tsae.errors import TsaeError, refuse
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

RequiredSteps = Callable[[str, str], "int | None"]
"""(prompt, reference answer) -> operations that a solution needs, None where that is not known."""

_NUMBERS = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
_FEWEST_STEPS = 6
"""Steps that are taken together by thirds, at least."""
_COLUMNS = [
    "policy", "band", "behaviour", "mean", "low", "high", "n_problems", "n_trajectories", "change", "change_low",
    "change_high", "n_paired", "paired_reference", "paired_mean",
]  # fmt: skip
_FORMAT_COLUMNS = [
    "policy", "band", "n_problems", "n_trajectories", "n_formats", "top_format", "top_share", "entropy", "low", "high",
    "change", "change_low", "change_high", "n_paired",
]  # fmt: skip


def with_behaviours(
    rollouts: Rollouts, *, required_steps: RequiredSteps | None = None, reference: str | None = None
) -> Rollouts:
    """Add what the texts of the responses show, and name the columns as behaviours.

    - looping: a stretch of text comes three times or more in a row, over 40 characters or more;
    - repeated_4grams: 1 − distinct / all 4-grams of words, which also finds repetition with small changes;
    - repeated_answer: the same final answer is stated twice in the same way;
    - unanswered: no final answer is stated in any known way;
    - direct_answer: an answer with neither an operation nor a sentence that leads to it;
    - skipped_steps: share of the required operations that are not written out, if `required_steps`, or a column of
      that name (extra/required_steps of an import), says how many there are. A solution that is shorter than the
      counted one skips some, too;
    - relative_length: tokens of the response / median tokens of the other successful responses to the same problem;
    - format (text; see `format_table`).

    Existing columns are kept: what a table knows is better than what its texts show.

    Args:
        rollouts: with texts of responses.
        required_steps: how many operations a problem needs.
        reference: the policy whose successful responses set a problem's usual length; None takes all policies'.

    Raises:
        TsaeError: where a response has no text, the reference sampled nothing, or required steps are not numbers of 0
            or more.
    """
    frame, where = rollouts.frame, rollouts.origin
    missing = int(frame.response.isna().sum())
    refuse(
        where,
        (missing, f"{missing} responses have no text", "Import the log with its texts, or decode."),
        (
            reference is not None and reference not in rollouts.policies,
            f"no policy {reference!r}; there are {', '.join(rollouts.policies)}",
            None,
        ),
    )
    texts = frame.response.tolist()
    answers = [final_answers(text) for text in texts]
    formats = [response_format(text) for text in texts]
    measured: dict[str, Any] = {
        "looping": [loop_share(text) > 0 for text in texts],
        "repeated_4grams": [repeated_ngrams(text) for text in texts],
        "repeated_answer": [len(set(stated)) < len(stated) for stated in answers],
        "unanswered": [not stated for stated in answers],
        "direct_answer": [
            bool(stated) and name.startswith("none,") for stated, name in zip(answers, formats, strict=True)
        ],
        "skipped_steps": _skipped(frame, required_steps, where),
        "relative_length": _relative_length(frame, reference),
    }
    named = behaviours_named(rollouts)
    for name, values in measured.items():
        numbers = np.asarray(values, dtype=float)
        if name in frame.columns or np.isnan(numbers).all():
            continue
        rollouts = rollouts.with_column(name, numbers)
        named += [name] if name not in named else []
    if "format" not in frame.columns:
        rollouts = rollouts.with_column("format", formats)
    return Rollouts(rollouts.table, {**rollouts.info, "behaviours": named}, rollouts.origin)


def behaviour_table(rollouts: Rollouts, *, reference: str | None = None, confidence: float = 0.95) -> pd.DataFrame:
    """Means with intervals over problems (`tsae.base.statistics`), and their changes against a reference.

    Args:
        rollouts: ``info["behaviours"]`` names further numeric or boolean columns to average.
        reference: the policy that others are compared with; None compares none.
        confidence: of the intervals.

    Returns:
        tidy: policy, band ("all" and every band present), behaviour, mean, low, high, n_problems, n_trajectories, and
        change, change_low, change_high: the mean over the n_paired problems that both policies answered of the
        difference within the problem, with its interval, NaN for fewer than 8 problems; paired_reference and
        paired_mean: the means of both over these problems. NaN for the reference itself.
        Means are over problems of the mean over a problem's trajectories; missing values are left out. A single
        problem has no interval (NaN), nor have fewer than 8 that are all alike.
    """
    frame, measured = rollouts.frame, measures(rollouts)
    rows: list[dict[str, Any]] = []
    for band, picked in _by_band(rollouts):
        means = {policy: measured[rows_of].groupby(frame.problem_id).mean() for policy, rows_of in picked.items()}
        for policy, by_problem in means.items():
            for name in measured:
                values = by_problem[name].dropna()
                if values.empty:
                    continue
                low, high = mean_interval(values.to_numpy(), confidence)
                row = {"policy": policy, "band": band, "behaviour": name, "mean": values.mean(), "low": low}
                row |= {"high": high, "n_problems": len(values), "n_trajectories": int(picked[policy].sum())}
                if reference in means and policy != reference:
                    both = pd.DataFrame({"of": means[reference][name], "mean": values}).dropna()
                    row["n_paired"] = len(both)
                    if len(both):
                        paired = (both["mean"] - both["of"]).to_numpy()
                        row |= {"paired_reference": both["of"].mean(), "paired_mean": both["mean"].mean()}
                        row["change"] = paired.mean()
                        row["change_low"], row["change_high"] = change_interval(paired, confidence)
                rows.append(row)
    return _by_policy(rows, _COLUMNS, rollouts)


def by_thirds(rollouts: Rollouts) -> Rollouts:
    """The same with thirds of the run ("steps 1-5") in the place of policies, where that tells more.

    A log has other problems at every step. Where a policy answered fewer than 8 of them (median), its means say little;
    thirds of the steps, if each has 8 or more, say more. Rollouts without steps stay as they are.
    """
    frame = rollouts.frame
    known = "step" in frame and frame.step.notna().all()
    steps = np.unique(frame.step.to_numpy(dtype=int)) if known else np.empty(0, dtype=int)
    if len(steps) < _FEWEST_STEPS:
        return rollouts
    thirds = in_thirds(rollouts)
    problems = frame.problem_id.groupby(frame.policy).nunique().median()
    if problems >= FEWEST or thirds.frame.problem_id.groupby(thirds.frame.policy).nunique().min() < FEWEST:
        return rollouts
    return thirds


def in_thirds(rollouts: Rollouts) -> Rollouts:
    """The same with thirds of the run ("steps 1-5") in the place of policies, in their order. All rows have steps."""
    step = rollouts.frame.step.to_numpy(dtype=int)
    thirds = [third for third in np.array_split(np.unique(step), 3) if len(third)]
    place = np.searchsorted([third[-1] for third in thirds], step)
    names = [f"steps {third[0]}-{third[-1]}" for third in thirds]
    named = rollouts.with_column("policy", [names[i] for i in place])
    return named.select(np.argsort(place, kind="stable"))


def measures(rollouts: Rollouts) -> pd.DataFrame:
    """One row a trajectory: accuracy, response_length in tokens, truncated if any is, and the table's behaviours.

    Raises:
        TsaeError: where the table names a behaviour that it has no column of.
    """
    frame = rollouts.frame
    measures = pd.DataFrame(
        {
            "accuracy": (frame.outcome == "success").where(frame.outcome != "unknown").astype(float),
            "response_length": frame.response_length.astype(float),
        }
    )
    if (frame.finish_reason == "length").any():
        known = frame.finish_reason.isin(["stop", "length"])
        measures["truncated"] = (frame.finish_reason == "length").astype(float).where(known)
    for name in behaviours_named(rollouts):
        what = "" if name in frame.columns else f"names the behaviour {name!r} but has no such column"
        if not what:
            measures[name] = frame[name].astype(float)
            what = f"the behaviour {name!r} is infinite for some responses" if np.isinf(measures[name]).any() else ""
        if what:
            fix = "Give a column of finite numbers, empty where the value is not known."
            raise TsaeError(what, where=rollouts.origin, fix=fix)
    return measures


def behaviours_named(rollouts: Rollouts) -> list[str]:
    """The behaviours that a table names. A column need not be there.

    Raises:
        TsaeError: where they are not a list of names, or a column of one holds something else than numbers.
    """
    named, schema = rollouts.info.get("behaviours", []), rollouts.table.schema
    what = ""
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        what = f'names {named!r} as its behaviours (info["behaviours"]), expected a list of columns'
    for name in () if what else named:
        kind = schema.field(name).type if name in schema.names else pa.null()
        if not any(fits(kind) for fits in _NUMBERS):
            what = f"the behaviour {name!r} is a column of {kind}, expected numbers, or true and false"
    if what:
        raise TsaeError(what, where=rollouts.origin, fix='Name columns of numbers in info["behaviours"].')
    return list(named)


def format_table(rollouts: Rollouts, *, reference: str | None = None, confidence: float = 0.95) -> pd.DataFrame:
    """How concentrated the formats of responses are, by policy and band.

    Every problem counts the same: formats get shares within a problem first, then over problems.

    Args:
        rollouts: with a column format; otherwise it comes from the texts
            (`tsae.rollouts.behaviours.response_format`).
        reference: the policy that others are compared with, on the problems that both answered.
        confidence: of the intervals over problems.

    Raises:
        TsaeError: where a column format holds something else than texts.

    Returns:
        policy, band, n_problems, n_trajectories, n_formats, top_format and top_share, entropy of the formats in bits
        with low and high, and change, change_low, change_high of the entropy over the n_paired problems of both, the
        interval NaN for fewer than 8. The entropy of few responses is too low by about
        (formats − 1) / (2 ln 2 · responses) bits (Miller 1955); compare like numbers of responses.
    """
    frame = rollouts.frame
    format = frame["format"] if "format" in frame.columns else frame.response.fillna("").map(response_format)
    if not format.dropna().map(lambda value: isinstance(value, str)).all():
        kind = rollouts.table.schema.field("format").type
        raise TsaeError(f"the column format holds {kind}, expected texts", where=rollouts.origin, fix="Leave it out.")
    rows: list[dict[str, Any]] = []
    for band, by_policy in _by_band(rollouts):
        picked = {policy: rows_of & format.notna() for policy, rows_of in by_policy.items()}
        shares = {
            policy: pd.crosstab(frame.problem_id[rows_of], format[rows_of], normalize="index")
            for policy, rows_of in picked.items()
            if rows_of.any()
        }
        for policy, table in shares.items():
            pooled, of_problems = table.mean(), table.to_numpy()
            entropy = float(_entropies(of_problems.mean(0)))
            low, high = np.nan, np.nan
            if len(table) > 1:
                low, high = jackknife_interval(entropy, _without_each(of_problems), confidence)
            row = {"policy": policy, "band": band, "n_problems": len(table)}
            row |= {"n_trajectories": int(picked[policy].sum()), "n_formats": int((pooled > 0).sum())}
            row |= {"top_format": pooled.idxmax(), "top_share": pooled.max()}
            row |= {"entropy": entropy, "low": max(low, 0.0) if len(table) > 1 else low, "high": high}
            if reference in shares and policy != reference:
                row |= _entropy_change(shares[reference], table, confidence)
            rows.append(row)
    return _by_policy(rows, _FORMAT_COLUMNS, rollouts)


def _by_band(rollouts: Rollouts) -> Iterator[tuple[str, dict[str, pd.Series]]]:
    """("all" or a band that is present, (n,) bool of the trajectories of every policy in it)."""
    frame = rollouts.frame
    for band in ("all", *(band for band in BANDS if (frame.band == band).any())):
        inside = (frame.band == band) | (band == "all")
        yield band, {policy: inside & (frame.policy == policy) for policy in rollouts.policies}


def _by_policy(rows: list[dict[str, Any]], columns: list[str], rollouts: Rollouts) -> pd.DataFrame:
    """A table of rows, the policies in their order of appearance."""
    order = {policy: position for position, policy in enumerate(rollouts.policies)}
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("policy", key=lambda p: p.map(order), kind="stable", ignore_index=True)


def _entropies(shares: np.ndarray) -> np.ndarray:
    """(…,) entropy in bits of (…, n_formats) shares."""
    return np.maximum(-(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(-1), 0.0)


def _without_each(shares: np.ndarray) -> np.ndarray:
    """(n_problems,) entropy of the mean of (n_problems, n_formats) shares without each of the problems."""
    return _entropies((shares.sum(0) - shares) / (len(shares) - 1))


def _entropy_change(before: pd.DataFrame, after: pd.DataFrame, confidence: float) -> dict[str, float]:
    both = before.index.intersection(after.index)
    if len(both) < 2:
        return {"n_paired": len(both)}
    a, b = before.loc[both].to_numpy(), after.loc[both].to_numpy()
    found = {"change": float(_entropies(b.mean(0)) - _entropies(a.mean(0))), "n_paired": len(both)}
    if len(both) < FEWEST:
        return found
    low, high = jackknife_interval(found["change"], _without_each(b) - _without_each(a), confidence)
    return found | {"change_low": low, "change_high": high}


def _skipped(frame: pd.DataFrame, required_steps: RequiredSteps | None, where: str) -> np.ndarray:
    """(n,) share of the required operations that are not written out; NaN where their number is not known."""
    columns = [name for name in ("required_steps", "extra/required_steps") if name in frame.columns]
    if required_steps is not None:
        count = cache(required_steps)
        counts = [count(*pair) for pair in frame[["prompt", "answer"]].fillna("").itertuples(index=False)]
    elif not columns:
        return np.full(len(frame), np.nan)
    try:
        if required_steps is not None:
            known = pd.Series(counts, dtype=float)
        else:
            known = pd.to_numeric(frame[columns[0]], errors="coerce")
        required = known.to_numpy(dtype=float)
    except (TypeError, ValueError, OverflowError):
        required = np.array([-1.0])
    if ((required < 0) | np.isinf(required)).any():
        what = "required steps are not finite numbers of 0 or more"
        fix = "Give the number of operations that a solution needs, None where it is not known."
        raise TsaeError(what, where=where, fix=fix)
    written = np.array([operations(text) for text in frame.response])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(required > 0, np.clip(1 - written / required, 0, 1), np.nan)


def _relative_length(frame: pd.DataFrame, reference: str | None) -> np.ndarray:
    """(n,) tokens / median tokens of the other successful responses to the problem; NaN if there are none."""
    counts = ((frame.outcome == "success") & ((frame.policy == reference) if reference else True)).to_numpy()
    found = np.full(len(frame), np.nan)
    length = frame.response_length.to_numpy(dtype=float)
    for rows in frame.groupby("problem_id").indices.values():
        successes = rows[counts[rows]]
        for row in rows:
            others = length[successes[successes != row]]
            if len(others):
                found[row] = length[row] / np.median(others)
    return found


_MAX_TEXT = 40_000  # characters; only the end of longer texts counts, because loops are there
_MAX_PERIOD = 300
_REPEATS, _MIN_LOOP = 3, 40

# Models and strangers write these texts, so every pattern must take linear time.
_NUMBER = r"[-−]?[$€£]?\d[\d,]*(?:\.\d+)?"
_BRACED = r"[^{}]*+"
for _ in range(4):  # Braces inside of braces, as in \boxed{\frac{\sqrt{3}}{2}}.
    _BRACED = rf"(?:[^{{}}]++|\{{{_BRACED}\}})*+"
_ANSWERS = {
    "boxed": re.compile(rf"\\(?:boxed|fbox)\s*\{{({_BRACED})\}}"),
    "tag": re.compile(r"<answer>(.{0,500}?)</answer>", re.DOTALL | re.IGNORECASE),
    "hashes": re.compile(rf"####\s*(.+)$|#+\s*({_NUMBER})\s*\Z", re.MULTILINE),
    "label": re.compile(
        r"(?:^[^\w\n]{0,9}A|(?i:\b(?:final\s+)?(?:answer|ans)))\W{0,3}[:=][ \t*]*((?:\\?[$(\[]\s*)?[-−\w.\\].*)$",
        re.MULTILINE,
    ),
    "sentence": re.compile(
        r"(?:\b(?:the|my|our)\s+)?(?:\bfinal\s+)?\banswer\s+(?:is|would\s+be|should\s+be)(?:\s*+:)?\s++"
        r"(?=\S)([^\n]{1,500}?)(?=[.!]?[^\S\n]{0,20}$|[.!]\s)",
        re.I | re.M,
    ),
}
_CALCULATOR = re.compile(r"<<([^<>]*)>>")
_SENTENCE = re.compile(r"\n|(?<=[.;!?])\s+|;")
_TIMES = r"(?:\\times|\\cdot|\\div|\\ast|[*×÷·])"
_OPERATORS = (
    # These are operations wherever they stand.
    re.compile(rf"(?<=[\w)%}}.])\s*{_TIMES}\s*(?=[\w$€£(\\.-])"),
    re.compile(r"(?<=[\w)%}.])\s*\+\s*(?=[\d$€£(\\.-]|[a-zA-Z]\b)"),
    re.compile(r"(?<=\d)\s*x\s*(?=[$€£]?\.?\d)|(?<=[a-z)])\s+x\s+(?=[$€£(]?\.?\d)"),
    re.compile(r"\\d?frac\s*\{"),
)
_OPERATORS_OF_EQUATIONS = (
    # A dash or slash is an operation only in an equation: elsewhere it is a range, a date or a rate.
    re.compile(r"(?<=[\d)%}a-zA-Z])\s+[-−–]\s*(?=[\d$€£(\\.]|[a-zA-Z]\b)|(?<=[\d)%])[-−–](?=[\d$€£(.]|[a-zA-Z]\b)"),
    re.compile(r"(?<=[\d)%}a-zA-Z])\s*/\s*(?=[$€£(]?\.?\d)|(?<=[\d)])\s*/\s*(?=[a-zA-Z]\b)"),
    re.compile(r"(?<=[\d)])\((?=[\d.])"),
)
_EQUALS = re.compile(r"=|\bequals?\b|\\approx|≈", re.IGNORECASE)


class Answer(NamedTuple):
    """One statement of a final answer."""

    mark: str
    """boxed, tag, hashes, label (“Answer: 5”), sentence (“the answer is 5”) or bare (nothing but a number)."""
    value: str
    """The number, without currency and thousands commas; for other answers the text without spaces."""


def loop_share(text: str) -> float:
    """Share of the characters that only repeat what stands right before them, 0 to 1.

    A loop is a stretch with a letter or digit, from one digit to a paragraph of 300 characters, that comes at least
    three times in a row, over 40 characters or more.
    """
    text = text[-_MAX_TEXT:]
    n = len(text)
    if n < _MIN_LOOP:
        return 0.0
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    spoken = np.concatenate([[0], np.cumsum([c.isalnum() for c in text])])
    looping = np.zeros(n, dtype=bool)
    for period in range(1, min(_MAX_PERIOD, n // _REPEATS) + 1):
        same = np.concatenate([[False], codes[period:] == codes[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, ends = edges[::2] + period, edges[1::2] + period
        shortest = max((_REPEATS - 1) * period, _MIN_LOOP - period)
        for start, end in zip(starts[ends - starts >= shortest], ends[ends - starts >= shortest], strict=True):
            if spoken[start] > spoken[start - period]:
                looping[start:end] = True
    return float(looping.mean())


def repeated_ngrams(text: str, n: int = 4) -> float:
    """1 − distinct n-grams / n-grams of words (seq-rep-n; Welleck et al. 2020); NaN for fewer than 2n words."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    if len(words) < 2 * n:
        return float("nan")
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def final_answers(text: str) -> list[Answer]:
    """Statements of a final answer, in the order of the text."""
    found = []
    for mark, pattern in _ANSWERS.items():
        for match in pattern.finditer(text):
            stated = next(group for group in match.groups() if group is not None)
            if mark == "sentence" and re.search(r"boxed|\\fbox", stated):
                continue  # “the answer is \\boxed{5}” is one statement.
            found.append((match.start(), Answer(mark, _stated_value(stated))))
    if not found:
        last = text.strip().rpartition("\n")[2].strip(" .$*")
        if re.fullmatch(rf"\\?[($]*{_NUMBER}%?\\?[)$]*", last):
            found.append((0, Answer("bare", _stated_value(last))))
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


def answer_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) characters of every statement of a final answer with a mark, in no order; they may overlap."""
    return [match.span() for pattern in _ANSWERS.values() for match in pattern.finditer(text)]


def operations(text: str) -> int:
    """Number of arithmetical operations that are written out: two in ``16 - 3 - 4 = 9``.

    In a sentence with calculator annotations (``16-3-4 = <<16-3-4=9>>9``) only the annotations count.
    """
    n = 0
    for mark in ("boxed", "tag"):  # ½ is written as a division there.
        text = _ANSWERS[mark].sub(" ", text)
    for sentence in _SENTENCE.split(text):
        for part in _CALCULATOR.findall(sentence) or [sentence]:
            n += sum(len(pattern.findall(part)) for pattern in _OPERATORS)
            if _EQUALS.search(part):
                n += sum(len(pattern.findall(part)) for pattern in _OPERATORS_OF_EQUATIONS)
    return n


def response_format(text: str) -> str:
    """The format of a response: its reasoning (code, LaTeX, steps, equations, prose, none) and its mark of the answer.

    Examples are “equations, label” and “none, boxed”.
    """
    answers = final_answers(text)
    return f"{_reasoning(text)}, {answers[-1].mark if answers else 'no answer'}"


def _reasoning(text: str) -> str:
    if re.search(r"```|^[ \t]{0,40}(?:def |print\(|import |for \w+ in )", text, re.MULTILINE):
        return "code"
    without = text
    for pattern in _ANSWERS.values():
        without = pattern.sub(" ", without)
    if len(re.findall(r"(?im)^[^\w\n]{0,9}(?:step\s*)?\d+\s*[.):]\s", without)) >= 2:
        return "steps"
    if re.search(r"\\\[|\\\(|\$\$|\\(?:d?frac|times|cdot|begin|text)\b", without):
        return "LaTeX"
    if operations(without):
        return "equations"
    return "prose" if len(re.findall(r"[^\W\d_]{2,}", without)) >= 4 else "none"


def _stated_value(stated: str) -> str:
    numbers = re.findall(r"(?:(?<!\w)-)?\d[\d,]*(?:\.\d+)?", stated.replace("−", "-"))
    if len(numbers) != 1 or "\\" in stated:
        return re.sub(r"\s+", "", stated).strip(".$*")
    number = numbers[0].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number
