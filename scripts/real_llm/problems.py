"""Arithmetic word problems of graded difficulty with known steps.

    Tom has 7 apples. He buys 5. He eats 3. How many now?

A level is the number of steps and the size of the numbers. A response either gives the answer at once, ``Answer: 9``,
or writes the steps first, ``7+5=12, 12-3=9. Answer: 9``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import pairwise

from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem

SIZES = {"small": (2, 9), "large": (11, 29)}
"""Least and greatest number that is added or taken away."""
LEVELS = tuple((n, size) for size, most in (("small", 4), ("large", 3)) for n in range(1, most + 1))
"""(steps, size): more steps of large numbers would make responses long."""

_PEOPLE = (("Tom", "He"), ("Sam", "He"), ("Ben", "He"), ("Ann", "She"), ("Mia", "She"), ("Eva", "She"))
_THINGS = ("apples", "pens", "coins", "books", "cards", "eggs", "cups", "balls")
_MORE = ("buys", "gets", "finds", "wins")
_LESS = ("loses", "sells", "gives away", "breaks")
_STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


@dataclass(frozen=True)
class WordProblem:
    """A problem and its steps."""

    problem: Problem
    steps: tuple[tuple[int, int, int], ...]
    """(before, change, after) of every step; a negative change takes away."""

    def solution(self, *, direct: bool) -> str:
        """The right response in one of the two styles."""
        answer = f"Answer: {self.problem.answer}"
        written = ", ".join(f"{before}{change:+d}={after}" for before, change, after in self.steps)
        return answer if direct else f"{written}. {answer}"


def generate(n_steps: int, size: str, rng: random.Random) -> WordProblem:
    """A problem of `n_steps` steps with numbers of a size; no number on the way is below 1.

    Raises:
        TsaeError: for a number of steps or a size that there is not.
    """
    if (n_steps, size) not in LEVELS:
        raise TsaeError(f"no level of {n_steps} steps with {size!r} numbers", where="generate")
    low, high = SIZES[size]
    (name, pronoun), thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
    value = rng.randint(low, high)
    text, steps = f"{name} has {value} {thing}.", []
    for _ in range(n_steps):
        change = rng.randint(low, high)
        if rng.random() < 0.5 and change < value:
            change = -change
        text += f" {pronoun} {rng.choice(_LESS if change < 0 else _MORE)} {abs(change)}."
        steps.append((value, change, value + change))
        value += change
    prompt = f"{text} How many now?\n"
    return WordProblem(Problem("", prompt, str(value), f"{n_steps} steps, {size}"), tuple(steps))


def problem_set(per_level: int, seed: int, *, without: frozenset[str] = frozenset()) -> list[WordProblem]:
    """Different problems, `per_level` of every level, none of whose texts is in `without`."""
    rng, seen, found = random.Random(seed), set(without), []
    for n_steps, size in LEVELS:
        made = 0
        while made < per_level:
            one = generate(n_steps, size, rng)
            if one.problem.prompt in seen:
                continue
            seen.add(one.problem.prompt)
            made += 1
            found.append(replace(one, problem=replace(one.problem, id=f"{size}-{n_steps}-{made}")))
    return found


def written_steps(text: str) -> list[tuple[int, int, int]]:
    """(before, change, after) of the steps that a response writes, right or wrong."""
    return [(int(a), int(sign + b), int(c)) for a, sign, b, c in _STEP.findall(text)]


def follows(steps: list[tuple[int, int, int]]) -> list[bool]:
    """Of every step after the first, whether it goes on from the result before it and is computed right.

    This is local coherence: it does not ask whether the steps are those of the problem.
    """
    return [later[0] == earlier[2] and later[0] + later[1] == later[2] for earlier, later in pairwise(steps)]
