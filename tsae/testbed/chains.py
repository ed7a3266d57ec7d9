"""Arithmetic chains: what the model organism is asked, and what the right answer is.

A chain is a digit followed by pairs of operator and digit, evaluated from left to right (no precedence)
modulo 10: ``3+5*2-7?`` is ((3 + 5) * 2 - 7) mod 10 = 9. Every intermediate result is one digit, so that every
chain of n operations takes n steps of the same kind, whatever its length.

A checksum of the chain itself keeps training and evaluation chains apart: no seed makes training sample an evaluation
chain. Chains of one operation are the exception. There are only 300, both sides draw from all of them, and accuracy on
them says nothing about generalisation.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError, refuse
from tsae.rollouts.problems import Problem

Split = Literal["train", "eval"]

OPERATORS = "+-*"

LEVELS: dict[str, tuple[int, int]] = {"easy": (1, 1), "medium": (4, 6), "hard": (10, 14)}
"""Fewest and most operations of each named level."""

N_EASY_CHAINS = 300
"""Distinct chains of one operation: 10 digits x 3 operators x 10 digits."""

_EVAL_ONE_IN = 8
_CHAIN = re.compile(r"(?:<bos>)?(\d(?:[-+*]\d)+)\??")


@dataclass(frozen=True)
class Chain:
    """A parsed problem."""

    digits: tuple[int, ...]
    """The n + 1 digits, in order."""
    operators: tuple[str, ...]
    """The n operators, in order; each one of ``+ - *``."""

    @property
    def n_ops(self) -> int:
        """Operations, which is also the number of steps that a full scratchpad writes."""
        return len(self.operators)

    @property
    def results(self) -> tuple[int, ...]:
        """The right result of each of the n steps; the last one is the answer."""
        results: list[int] = []
        value = self.digits[0]
        for operator, digit in zip(self.operators, self.digits[1:], strict=True):
            value = apply_operator(value, operator, digit)
            results.append(value)
        return tuple(results)

    @property
    def answer(self) -> str:
        """The answer as the verifier compares it: one digit."""
        return str(self.results[-1])

    @property
    def prompt(self) -> str:
        """The text that the model reads, without the beginning-of-sequence token."""
        pairs = zip(self.operators, self.digits[1:], strict=True)
        return str(self.digits[0]) + "".join(f"{operator}{digit}" for operator, digit in pairs) + "?"


def apply_operator(left: int, operator: str, right: int) -> int:
    """``left operator right`` modulo 10.

    Raises:
        TsaeError: where the operator is none of ``+ - *``.
    """
    if operator == "+":
        return (left + right) % 10
    if operator == "-":
        return (left - right) % 10
    if operator == "*":
        return (left * right) % 10
    raise TsaeError(f"unknown operator {operator!r}; the testbed has + - *", where="operator")


def parse_prompt(prompt: str) -> Chain:
    """Read a prompt such as ``3+5*2-7?``; a leading ``<bos>`` and a missing ``?`` are accepted.

    Raises:
        TsaeError: where the text is not a chain of at least one operation.
    """
    match = _CHAIN.fullmatch(prompt.strip())
    if match is None:
        fix = "Expected digits and + - *, as in '3+5*2-7?'."
        raise TsaeError(f"not an arithmetic chain: {prompt!r}", where="prompt", fix=fix)
    text = match.group(1)
    return Chain(digits=tuple(int(digit) for digit in text[::2]), operators=tuple(text[1::2]))


def evaluate(prompt: str) -> str:
    """The right answer to a prompt, as one digit. Raises TsaeError where the prompt is not a chain."""
    return parse_prompt(prompt).answer


def in_split(chain: Chain, split: Split) -> bool:
    """Whether a chain may be used for this split. Chains of one operation belong to both (there are only
    300)."""
    if chain.n_ops == 1:
        return True
    held_out = zlib.crc32(chain.prompt.encode()) % _EVAL_ONE_IN == 0
    return held_out == (split == "eval")


def sample_chain(n_ops: int, rng: random.Random, split: Split) -> Chain:
    """One chain of exactly ``n_ops`` operations, digits and operators uniform, from one side of the split."""
    while True:
        chain = Chain(
            digits=tuple(rng.randrange(10) for _ in range(n_ops + 1)),
            operators=tuple(rng.choice(OPERATORS) for _ in range(n_ops)),
        )
        if in_split(chain, split):
            return chain


def generate_problems(level: str | tuple[int, int], n: int, seed: int, split: Split = "eval") -> list[Problem]:
    """``n`` distinct problems of one level; the same arguments give the same problems on every machine.

    Args:
        level: "easy" (1 operation), "medium" (4 to 6), "hard" (10 to 14), or a pair (fewest, most
            operations). The number of operations is uniform over the range.
        n: how many; at most 300 for "easy".
        seed: of the sampling, not of the split: training and evaluation problems of two or more operations
            are disjoint whatever their seeds.
        split: "eval" (an eighth of all chains) or "train".

    Returns:
        Problems whose id is ``chain:`` and the chain, so that a problem has the same id in every set.

    Raises:
        TsaeError: for an unknown level, an empty range, or more problems than there are.
    """
    fewest, most, name = _range_of(level)
    rng = random.Random(f"{name}/{split}/{seed}")
    chains: dict[str, Chain] = {}
    if most == 1:
        pool = [
            Chain((left, right), (operator,))
            for left, operator, right in itertools.product(range(10), OPERATORS, range(10))
        ]
        rng.shuffle(pool)
        chains = {chain.prompt: chain for chain in pool[:n]}
    else:
        for _ in range(1000 + 100 * n):
            if len(chains) >= n:
                break
            chain = sample_chain(rng.randint(fewest, most), rng, split)
            chains.setdefault(chain.prompt, chain)
    what = f"found only {len(chains)} distinct problems of level {name!r} ({split}), expected {n}"
    fix = f"Ask for at most {len(chains)}; there are {N_EASY_CHAINS} chains of one operation in all."
    refuse("n", (len(chains) < n, what, fix))
    return [
        Problem(id=f"chain:{prompt[:-1]}", prompt=prompt, answer=chain.answer, level=name)
        for prompt, chain in chains.items()
    ]


def _range_of(level: str | tuple[int, int]) -> tuple[int, int, str]:
    if isinstance(level, str):
        fix = f"Give one of {', '.join(LEVELS)}, or a pair (fewest, most operations)."
        refuse("level", (level not in LEVELS, f"unknown level {level!r}", fix))
        return (*LEVELS[level], level)
    fewest, most = level
    what = f"expected 1 <= fewest <= most operations, found {fewest} and {most}"
    refuse("level", (not 1 <= fewest <= most, what, "Correct the pair."))
    return fewest, most, f"{fewest}-{most} ops"
