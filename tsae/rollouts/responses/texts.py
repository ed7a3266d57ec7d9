"""Response texts: find loops, final answers, written-out operations, and the format of a response.

The rules are for mathematical reasoning in English, in LaTeX or with calculator annotations (``<<16-3=13>>13``). They
do not judge: an operation counts whether or not its result is right.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

_MAX_TEXT = 40_000  # characters; only the end of longer texts counts, because loops are there
_MAX_PERIOD = 300
_REPEATS, _MIN_LOOP = 3, 40

# Models and strangers write these texts, so every pattern must take linear time.
_NUMBER = r"-?[$€£]?\d[\d,]*(?:\.\d+)?"
_ANSWERS = {
    "boxed": re.compile(r"\\f?boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}"),
    "tag": re.compile(r"<answer>(.{0,500}?)</answer>", re.DOTALL | re.IGNORECASE),
    "hashes": re.compile(rf"####\s*(.+)$|#+\s*({_NUMBER})\s*\Z", re.MULTILINE),
    "label": re.compile(
        r"(?:^[^\w\n]{0,9}A|(?i:\b(?:final\s+)?(?:answer|ans)))\W{0,3}[:=][ \t*]*((?:\\?[$(\[]\s*)?[-\w.\\].*)$",
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
            if mark == "sentence" and "boxed" in stated:
                continue  # “the answer is \\boxed{5}” is one statement.
            found.append((match.start(), Answer(mark, _value(stated))))
    if not found:
        last = text.strip().rpartition("\n")[2].strip(" .$*")
        if re.fullmatch(rf"\\?[($]*{_NUMBER}%?\\?[)$]*", last):
            found.append((0, Answer("bare", _value(last))))
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


def _value(stated: str) -> str:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", stated)
    if len(numbers) != 1 or "\\" in stated:
        return re.sub(r"\s+", "", stated).strip(".$*")
    number = numbers[0].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number
