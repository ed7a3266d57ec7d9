"""Backward reformulations of the testbed's chains, exact modulo 10.

Of the chain d₀ ∘₁ d₁ … ∘ₙ dₙ with the known answer a:

- *operand*: one digit is hidden, the answer stated, and the digit asked for. ``3+5*2-7?`` with its answer 9 becomes
  ``3+?*2-7=9?``, answer 5. The testbed's base never saw a ``?`` or ``=`` within a prompt: this is another task, which
  it must learn first.
- *backward*: all but the last m operations are hidden, the answer is stated, and the value before these m is asked for.
  The question is the chain that undoes them from the answer, for m = 1 ``9+7?``, answer 6. Each operation is reversed:
  + to −, − to +, times d to times the inverse of d modulo 10, which only 1, 3, 7 and 9 have. These are ordinary,
  shorter chains, as the base was trained on, and the answer is enough to make them.

A digit that the answer does not settle (2 · x = 4 has x = 2 and 7) is left out, or comes with all right answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tsae.errors import TsaeError, refuse
from tsae.rl.reformulation import Reformulation
from tsae.rollouts.problems import Problem
from tsae.testbed.chains import Chain, apply_operator, in_split, parse_prompt

Ambiguous = Literal["drop", "accept"]

_INVERSE = {1: 1, 3: 7, 7: 3, 9: 9}  # of multiplication modulo 10


def reformulate_operands(problem: Problem, *, ambiguous: Ambiguous = "drop") -> list[Reformulation]:
    """Hide every digit of a chain in turn.

    Args:
        problem: a chain with its right answer.
        ambiguous: leave out a digit that the answer does not settle, or keep it with all right answers.

    Raises:
        TsaeError: where the prompt is not a chain, or the answer is not the chain's.
    """
    chain = _checked(problem)
    found = []
    for place, accepted in enumerate(_solutions(chain)):
        if len(accepted) > 1 and ambiguous == "drop":
            continue
        start = 2 * place
        known = chain.prompt[:-1]
        posed = Problem(
            id=f"{problem.id}~d{place}",
            prompt=f"{known[:start]}?{known[start + 1 :]}={problem.answer}?",
            answer=str(chain.digits[place]),
            level=problem.level,
        )
        found.append(Reformulation(posed, problem.id, "operand", (start, start + 1), accepted))
    return found


def reformulate_backward(
    problem: Problem, *, n_ops: tuple[int, int] = (1, 9), split: Literal["train", "eval"] | None = "train"
) -> list[Reformulation]:
    """Undo the last m operations of a chain from its answer, for every m in the range that can be undone.

    Args:
        problem: a chain with its right answer.
        n_ops: fewest and most operations m to undo; at most all but one of the chain's.
        split: only chains of this side of the testbed's split, so that nothing trains on evaluation chains; None keeps
            all.

    Raises:
        TsaeError: where the prompt is not a chain, the answer is not the chain's, or the range is empty.
    """
    fewest, most = n_ops
    refuse("n_ops", (not 1 <= fewest <= most, f"n_ops={n_ops} is not a range", "Give (fewest, most), from 1."))
    chain = _checked(problem)
    found = []
    digits, operators = [int(problem.answer)], []
    for m in range(1, min(most, chain.n_ops - 1) + 1):
        operator, digit = chain.operators[-m], chain.digits[-m]
        if operator == "*" and digit not in _INVERSE:
            break  # what came before is not settled, nor anything earlier
        operators.append({"+": "-", "-": "+", "*": "*"}[operator])
        digits.append(_INVERSE[digit] if operator == "*" else digit)
        undone = Chain(tuple(digits), tuple(operators))
        if m < fewest or (split is not None and not in_split(undone, split)):
            continue
        hidden = (0, 2 * (chain.n_ops - m) + 1)
        posed = Problem(id=f"{problem.id}~b{m}", prompt=undone.prompt, answer=undone.answer, level=problem.level)
        found.append(Reformulation(posed, problem.id, "backward", hidden, (undone.answer,)))
    return found


def is_chain(problem: Problem) -> bool:
    """Whether a problem is one of the testbed's."""
    try:
        parse_prompt(problem.prompt)
    except TsaeError:
        return False
    return True


def _checked(problem: Problem) -> Chain:
    chain = parse_prompt(problem.prompt)
    what = f"the answer {problem.answer!r} is not that of {problem.prompt!r}, which is {chain.answer}"
    fix = "Correct the answer: a reformulation states it as known."
    refuse(problem.id, (chain.answer != problem.answer, what, fix))
    return chain


def _solutions(chain: Chain) -> list[tuple[str, ...]]:
    """For every digit of a chain, the digits that give the chain's answer in its place.

    What follows a digit is affine modulo 10, answer = slope · value + offset: one pass from the end serves all digits.
    """
    results = (chain.digits[0], *chain.results)
    found: list[tuple[str, ...]] = []
    slope, offset = 1, 0
    for place in range(chain.n_ops, -1, -1):
        operator, digit = ("", 0) if place == 0 else (chain.operators[place - 1], chain.digits[place])
        values = [x if place == 0 else apply_operator(results[place - 1], operator, x) for x in range(10)]
        right = [str(x) for x, value in enumerate(values) if (slope * value + offset) % 10 == results[-1]]
        found.append(tuple(right))
        if operator == "*":
            slope *= digit
        elif place > 0:
            offset += slope * (digit if operator == "+" else -digit)
    return found[::-1]


def reformulate_chains(
    problems: Iterable[Problem],
    *,
    kind: Literal["operand", "backward"] = "backward",
    ambiguous: Ambiguous = "drop",
    n_ops: tuple[int, int] = (1, 9),
    split: Literal["train", "eval"] | None = "train",
) -> list[Reformulation]:
    """`reformulate_operands` or `reformulate_backward` of every problem, without posing a chain twice."""
    found: dict[str, Reformulation] = {}
    for problem in problems:
        if kind == "operand":
            items = reformulate_operands(problem, ambiguous=ambiguous)
        else:
            items = reformulate_backward(problem, n_ops=n_ops, split=split)
        for item in items:
            found.setdefault(item.problem.prompt, item)
    return list(found.values())
