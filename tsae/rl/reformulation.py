"""Reformulations: a hard problem with a known answer becomes easier ones whose answers are known too.

The answer is given, one quantity is hidden, and the quantity is asked for. A `Reformulation` names its parent: when it
is solved, the parent may be tried (`tsae.rl.curriculum`). `reformulate_words` makes them from questions in English,
`tsae.testbed.backward` from the testbed's chains.

`reformulate_words` makes backward reformulations of word problems in English, such as GSM8K's.

Each number of the question is hidden in turn: an X takes its place, the known answer is stated, and X is asked for.

    A pen costs $3. How much do 4 pens cost?   (12)
    A pen costs $3. How much do X pens cost? The answer to this question is 12. What number does X stand for?   (4)

Only numbers in digits are hidden ("1,200", "2.5", "$3", "20%"). Words such as "two", "twice" and "half" stay. A number
is left out, with the reason, where

1. *part of something*: it belongs to a fraction, a ratio, a time, a date, a range, an ordinal, a mixed number or a code
   ("1/2", "3:30", "5-10", "2nd", "2 1/2", "B12", "24-hour"): alone it is not a quantity;
2. *year*: it is a whole number from 1900 to 2099 without a unit sign;
3. *label*: it names something ("Room 5", "page 12", "#3", "Grade 4"): nothing is computed from it;
4. *twice*: the question has its value again, in digits or in words, so that X is given away or unclear;
5. *trivial*: it equals the answer, which is stated;
6. *unused*: a solution with calculations is given (GSM8K's ``<<48/2=24>>``) and none of them uses the value: X cannot
   be found from the answer, or not by the solution's way;
7. *cancels*: with another value in its place, the solution's calculations give the same answer, or it is not clear
   where they use the value;
8. *not settled*: the question asks for something rounded, bounded or without a direction ("at least", "how many full",
   "maximum", "left over", "difference"): several values of X have the same answer;
9. *singular*: it is 1, which the singular after it gives away;
10. *has an X*: the question has an X of its own;
11. *too long*: it has more than 100 characters.

A question whose answer is not a number is left out. docs/measured.md lists what the rules cannot see.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tsae.base.files import as_path, reading, write_text
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem, json_lines, parse_line, read_problems


@dataclass(frozen=True)
class Reformulation:
    """A problem made of another one."""

    problem: Problem
    """The question. Its answer is the hidden quantity as the parent has it; its id is the parent's id, ``~``, and the
    place of the quantity."""
    parent: str
    """Id of the original problem."""
    kind: str
    """Such as "operand", "backward" (chains) or "number" (word problems)."""
    hidden: tuple[int, int]
    """(start, stop) of what is hidden, in characters of the parent's prompt."""
    accepted: tuple[str, ...]
    """All right answers; more than one where the known answer leaves several."""

    def as_record(self) -> dict[str, Any]:
        """One JSON object; `tsae.rollouts.problems.read_problems` reads it as a problem."""
        origin = {"parent": self.parent, "kind": self.kind, "hidden": list(self.hidden)}
        return {**asdict(self.problem), **origin, "accepted": list(self.accepted)}


def write_reformulations(reformulations: Iterable[Reformulation], path: str | Path) -> None:
    """Write JSON lines: a problem's fields and parent, kind, hidden, accepted."""
    lines = [json.dumps(item.as_record(), ensure_ascii=False) + "\n" for item in reformulations]
    write_text(path, "".join(lines))


HIDDEN = "X"

_NUMBER = re.compile(
    r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w)|(?<![\w.,])\d+(?:\.\d+)?(?!\w)|(?<![\w.,])\.\d+(?!\w)"
)
_GLUED = re.compile(r"[/:\-–—~]")
_LABEL = re.compile(
    r"(?:#|\b(?:room|page|chapter|grade|level|number|no\.|day|week|month|year|age|route|highway|interstate|apartment|"
    r"house|bus|line|stage|round|group|team|class|box|type|model|step|part|section|volume|floor|lane|gate|option|"
    r"question|problem|version|phase|season|episode|unit|store|shop|tank|bag|jar|tree|item|player|test|game)) ?$",
    re.IGNORECASE,
)
_UNSETTLED = re.compile(
    r"\b(?:at least|at most|how many (?:full|whole|complete|more full)|whole number|round(?:ed|ing)?|nearest|maximum|"
    r"minimum|most number|fewest|least number|left ?over|remainder|not enough|enough to|difference|unable to|"
    r"far apart)\b",
    re.IGNORECASE,
)
_IN_WORDS = """
    0 zero; 1/2 half; 1 one once; 2 two twice double doubled pair; 3 three thrice triple tripled; 4 four; 5 five; 6 six;
    7 seven; 8 eight; 9 nine; 10 ten; 11 eleven; 12 twelve dozen; 15 fifteen; 20 twenty; 30 thirty; 40 forty; 50 fifty;
    100 hundred; 1000 thousand
"""
_SPELLED = {word: Fraction(value) for value, *words in map(str.split, _IN_WORDS.split(";")) for word in words}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_EXACT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,2})?")
_LONGEST = 100  # characters of a number
_MOST_TERMS, _MOST_BITS = 200, 4096  # of a calculation, and of its values, which may grow from one to the next
_TERM = re.compile(r"\d+(?:\.\d+)?|\.\d+|[-+*/()]")


@dataclass(frozen=True)
class LeftOut:
    """A number that was not hidden."""

    problem_id: str
    text: str
    """The number as it stands in the question."""
    reason: str
    """One of the rules' names."""


def read_word_problems(path: str | Path) -> tuple[list[Problem], dict[str, str]]:
    """Problems and worked solutions of a file.

    Args:
        path: JSON lines of id, prompt and answer, which have no solutions; or, as in GSM8K, of question and answer, the
            answer being a solution whose last line is ``#### 72``.

    Raises:
        TsaeError: for any other file.
    """
    path = as_path(path)
    with reading(path, "Give JSON lines of problems."):
        lines = list(json_lines(path)) if path.is_file() else []
    if not any(b'"question"' in line for _, line in lines[:1]):
        return read_problems(path), {}
    problems, solutions = [], {}
    for number, line in lines:
        try:
            record = parse_line(line)
            solution, marker, answer = record["answer"].rpartition("####")
            if not marker:
                raise ValueError("no #### before the final answer")
            if not isinstance(record["question"], str):
                raise TypeError(f"the question is a {type(record['question']).__name__}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fix = 'Expected {"question": …, "answer": "… #### 72"}.'
            raise TsaeError(f"no question with a solution ({error})", where=f"{path}:{number}", fix=fix) from error
        problem = Problem(f"{path.stem}-{number}", record["question"], answer.strip().replace(",", ""))
        problems.append(problem)
        solutions[problem.id] = solution
    return problems, solutions


def reformulate_words(
    problems: Iterable[Problem], solutions: Mapping[str, str] | None
) -> tuple[list[Reformulation], list[LeftOut]]:
    """Hide every number of every question in turn.

    Args:
        problems: questions with numerical answers.
        solutions: by problem id, the worked solution with its calculations between << and >>; without one the rules
            *unused* and *cancels* are not applied.

    Returns:
        the reformulations, and the numbers that were left out, with reasons.
    """
    made: list[Reformulation] = []
    left_out: list[LeftOut] = []
    for problem in problems:
        answer = parse_number(problem.answer)
        if answer is None:
            left_out.append(LeftOut(problem.id, problem.answer, "no numerical answer"))
            continue
        solution = (solutions or {}).get(problem.id)
        steps = None if solution is None else calculations(solution)
        counts = _values(problem.prompt)
        unsettled = _UNSETTLED.search(problem.prompt) is not None
        for match in _NUMBER.finditer(problem.prompt):
            value = parse_number(match.group())
            if value is None:
                reason: str | None = "too long"
            else:
                reason = _fault(problem.prompt, match, value, counts, answer, steps, unsettled)
            if reason is not None:
                left_out.append(LeftOut(problem.id, match.group(), reason))
            else:
                made.append(_pose(problem, match))
    return made, left_out


def parse_number(text: str) -> Fraction | None:
    """The value of a number in digits, with commas, $, % or a sign; None for anything else, and what is too long."""
    cleaned = text.strip().replace(",", "").removeprefix("$").removesuffix("%").removesuffix(".")
    if len(cleaned) > _LONGEST or not _EXACT.fullmatch(cleaned):
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None


def calculations(solution: str) -> list[tuple[list[str], Fraction]]:
    """The calculations of a worked solution: terms of each, numbers and operators, and its result.

    A calculation that cannot be read is left out.
    """
    found = []
    for expression, result in _CALCULATION.findall(solution):
        cleaned = expression.replace(",", "").replace("$", "").replace("%", "/100").replace(" ", "")
        value = parse_number(result)
        terms = _TERM.findall(cleaned)
        if value is None or len(terms) > _MOST_TERMS:
            continue
        if "".join(terms) == cleaned and evaluate_terms(terms) is not None:
            found.append((terms, value))
    return found


def evaluate_terms(terms: list[str]) -> Fraction | None:
    """The exact value of an expression of numbers, + - * / and brackets; None for anything else."""
    # Python refuses leading zeros.
    text = " ".join((term.lstrip("0") or "0") if term[0].isdigit() else term for term in terms)

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, sign, right):
                found = _OPERATIONS[type(sign)](value(left), value(right))
                if max(abs(found.numerator), found.denominator).bit_length() > _MOST_BITS:
                    raise ValueError("too large")
                return found
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
        return Fraction(ast.get_source_segment(text, node) or "")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _fault(
    question: str,
    match: re.Match[str],
    value: Fraction,
    counts: Counter[Fraction],
    answer: Fraction,
    steps: list[tuple[list[str], Fraction]] | None,
    unsettled: bool,
) -> str | None:
    """The first rule that leaves this number out."""
    if re.search(rf"\b{HIDDEN}\b", question):
        return "has an X"
    before, after = question[: match.start()], question[match.end() :]
    if _GLUED.match(after) or _GLUED.search(before[-1:]) or re.match(r" \d+/\d", after) or re.search(r"\d $", before):
        return "part of something"
    sign = before.endswith("$") or after.startswith("%")
    if value.denominator == 1 and 1900 <= value <= 2099 and "," not in match.group() and not sign:
        return "year"
    if _LABEL.search(before) and not sign:
        return "label"
    if counts[value] > 1:
        return "twice"
    if value == answer:
        return "trivial"
    if unsettled:
        return "not settled"
    if value == 1:
        return "singular"
    if steps is None:
        return None
    return _replay(steps, value, answer, percent=after.startswith("%"))


def _replay(steps: list[tuple[list[str], Fraction]], value: Fraction, answer: Fraction, *, percent: bool) -> str | None:
    """Whether the solution uses the value, in one place, and its answer follows it.

    The value must stand in the calculations exactly once before any of them results in it. The calculations are then
    carried out with 7/5 of the value in its place, and every later term that equals an earlier result with the new one.
    """
    shares = {value, value / 100} if percent else {value}
    places = [
        (number, place)
        for number, (terms, _) in enumerate(steps)
        for place, term in enumerate(terms)
        if parse_number(term) in shares
    ]
    if not places:
        return "unused"
    if len(places) > 1 or not steps or steps[-1][1] != answer:
        return "cancels"
    renamed: dict[Fraction, Fraction] = {}
    last = answer
    for number, (terms, result) in enumerate(steps):
        new_terms: list[str] = []
        for place, term in enumerate(terms):
            old = parse_number(term)
            if (number, place) == places[0]:
                assert old is not None
                new_terms += ["(", *_as_terms(old * Fraction(7, 5)), ")"]
            elif old is not None and old in renamed:
                new_terms += ["(", *_as_terms(renamed[old]), ")"]
            else:
                new_terms.append(term)
        new = evaluate_terms(new_terms)
        if new is None:
            return "cancels"
        if new != evaluate_terms(terms):
            renamed[result] = new
        last = new
    return "cancels" if last == evaluate_terms(steps[-1][0]) else None


def _as_terms(value: Fraction) -> list[str]:
    sign = ["-"] if value < 0 else []
    return [*sign, str(abs(value.numerator)), "/", str(value.denominator)]


def _values(question: str) -> Counter[Fraction]:
    """How often each value stands in a question, in digits or in words."""
    counts: Counter[Fraction] = Counter()
    for match in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+", question):
        value = parse_number(match.group())
        if value is not None:
            counts[value] += 1
    counts.update(_SPELLED[word] for word in re.findall(r"[a-z]+", question.lower()) if word in _SPELLED)
    return counts


def _pose(problem: Problem, match: re.Match[str]) -> Reformulation:
    start, stop = match.span()
    question = f"{problem.prompt[:start]}{HIDDEN}{problem.prompt[stop:]}".rstrip()
    ending = "" if question.endswith((".", "?", "!")) else "."
    posed = Problem(
        id=f"{problem.id}~n{start}",
        prompt=f"{question}{ending} The answer to this question is {problem.answer}. "
        f"What number does {HIDDEN} stand for?",
        answer=match.group().replace(",", ""),
        level=problem.level,
    )
    return Reformulation(posed, problem.id, "number", (start, stop), (posed.answer,))
