"""A task whose scratchpad has to choose an order: sums and products with the ordinary precedence, modulo 10.

1. A problem such as ``3+5*8+2*4?`` has 3 to 5 operations. Somewhere a product follows a sum, so working from left to
   right is always a wrong plan.
2. A scratchpad has one step per operation. A step replaces two neighbours in what remains of the expression by a digit:
   ``5*8=0;2*4=8;3+0=3;3+8=1;#1``. A product may come at any time, a sum only when no product stands beside it. Every
   order that this allows is right.
3. In the base's training text, `PLANNED` of the scratchpads have such an order, drawn step by step. The others work
   from left to right. Every step slips with probability `SLIP_RATE`, and the rest carries the wrong digit on. There are
   no direct answers: the entropy at the start of a response is then that of the order alone.

*Planning* is the choice of the next operation: a step's first operand, operator and second operand. The sum of the
entropies of these three tokens is, in the mean over samples, the entropy of that choice. *Execution* is the result, one
token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from organism import pretraining
from organism.arms import Batch, answer, token_statistics
from organism.corpus import Document
from organism.pretraining import BaseConfig
from tsae.rollouts.problems import Problem
from tsae.testbed.chains import Chain, Split, apply_operator, in_split, parse_prompt
from tsae.testbed.tokenizer import split_tokens

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel

OPERATIONS = (3, 5)
"""Fewest and most of a problem."""
PLANNED = 0.7
"""Share of the training text's scratchpads with a right order."""
SLIP_RATE = 0.06
"""Probability that a step of the training text gets a wrong result, as in the other base."""
BASE = BaseConfig(steps=900, batch=128)

Role = Literal["planning", "execution", "other"]


@dataclass(frozen=True)
class TokenLabel:
    """What one response token is for."""

    role: Role
    """"other" are the signs between, the answer, the end, and all of a part that is no step."""
    correct: bool | None
    """Planning: whether the operation may come next. Execution: whether the digit follows from the step's own operands.
    None for other tokens."""
    step: int | None
    """Which step it belongs to, from 0; None for other tokens."""


def allowed(chain: Chain) -> list[int]:
    """Places of the operations that may come next: all products, and the sums with no product beside them."""
    around = ("+", *chain.operators, "+")
    return [
        place
        for place, operator in enumerate(chain.operators)
        if operator == "*" or "*" not in (around[place], around[place + 2])
    ]


def replaced(chain: Chain, place: int, result: int) -> Chain:
    """What remains when a result has taken the place of an operation."""
    digits, operators = chain.digits, chain.operators
    return Chain((*digits[:place], result, *digits[place + 2 :]), operators[:place] + operators[place + 1 :])


def result_at(chain: Chain, place: int) -> int:
    """Right result of one operation."""
    return apply_operator(chain.digits[place], chain.operators[place], chain.digits[place + 1])


def evaluate(chain: Chain) -> int:
    """The value under the ordinary precedence."""
    while chain.operators:
        place = allowed(chain)[0]
        chain = replaced(chain, place, result_at(chain, place))
    return chain.digits[0]


def sample_problem(operations: tuple[int, int], rng: random.Random, split: Split) -> Chain:
    """A problem with a product somewhere after a sum, from one side of the split."""
    while True:
        n = rng.randint(*operations)
        digits = tuple(rng.randrange(10) for _ in range(n + 1))
        chain = Chain(digits, tuple(rng.choice("+*") for _ in range(n)))
        if "+*" in "".join(chain.operators) and in_split(chain, split):
            return chain


def generate_problems(level: tuple[int, int], n: int, seed: int, split: Split = "eval") -> list[Problem]:
    """n distinct problems; see `tsae.testbed.chains.generate_problems`."""
    rng, found = random.Random(f"planning/{level}/{split}/{seed}"), dict[str, Problem]()
    while len(found) < n:
        chain = sample_problem(level, rng, split)
        text = chain.prompt
        found[text] = Problem(f"planning:{text[:-1]}", text, str(evaluate(chain)), "planning")
    return list(found.values())


def sample_document(rng: random.Random) -> Document:
    """One training text."""
    chain = sample_problem(OPERATIONS, rng, "train")
    prompt, planned, steps = chain.prompt, rng.random() < PLANNED, list[str]()
    while chain.operators:
        place = rng.choice(allowed(chain)) if planned else 0
        result = result_at(chain, place)
        if rng.random() < SLIP_RATE:
            result = (result + rng.randrange(1, 10)) % 10
        steps.append(f"{chain.digits[place]}{chain.operators[place]}{chain.digits[place + 1]}={result};")
        chain = replaced(chain, place, result)
    return Document(prompt, "".join(steps) + f"#{chain.digits[0]}")


def train_base(seed: int) -> LlamaForCausalLM:
    """The base of the task."""
    return pretraining.train_base(BASE, seed, draw=sample_document)


def annotate(prompt: str, response: Sequence[str]) -> list[TokenLabel]:
    """Ground truth of every token of a response; see `tsae.testbed.annotate.annotate`.

    1. What remains of the expression is a sum of products, whose order does not matter: 2+9 may come next in 9+4+2.
    2. A product is a right plan if its operands are factors of one product; a sum, if both operands stand alone.
    3. Any other operation on digits that remain is a wrong plan. The products that it takes them from become one: 3+5
       leaves 8*8 of 3+5*8. An operation on digits that do not remain is a wrong plan, too, and changes nothing.
    4. A result is right if it follows from the step's own operands. A wrong one is carried on.
    5. Where a digit occurs several times, all that may remain is followed: a step is right if any of it allows it.
    """
    remaining, labels, begin, step = {_terms(parse_prompt(prompt))}, list[TokenLabel](), 0, 0
    for end in (i for i, token in enumerate(response) if token == ";"):
        part = response[begin:end]
        if _is_step(part):
            left, operator, right, result = int(part[0]), part[1], int(part[2]), int(part[4])
            after = {found for terms in remaining for found in _after(terms, left, operator, right, result)}
            planned = {terms for is_allowed, terms in after if is_allowed}
            remaining = planned or {terms for _, terms in after} or remaining
            computed = apply_operator(left, operator, right) == result
            labels += [TokenLabel("planning", bool(planned), step)] * 3 + [TokenLabel("other", None, None)]
            labels += [TokenLabel("execution", computed, step), TokenLabel("other", None, None)]
            step += 1
        else:
            labels += [TokenLabel("other", None, None)] * (len(part) + 1)
        begin = end + 1
    return labels + [TokenLabel("other", None, None)] * (len(response) - begin)


_Terms = tuple[tuple[int, ...], ...]
"""Sorted factors of sorted products."""


def _terms(chain: Chain) -> _Terms:
    products = [[chain.digits[0]]]
    for operator, digit in zip(chain.operators, chain.digits[1:], strict=True):
        if operator == "*":
            products[-1].append(digit)
        else:
            products.append([digit])
    return tuple(sorted(tuple(sorted(product)) for product in products))


def _after(terms: _Terms, left: int, operator: str, right: int, result: int) -> set[tuple[bool, _Terms]]:
    """All that an operation may leave, and whether it may come next."""
    places = [(t, f) for t, product in enumerate(terms) for f in range(len(product))]
    found = set()
    for (t, f), (u, g) in itertools.permutations(places, 2):
        if (terms[t][f], terms[u][g]) != (left, right):
            continue
        kept = [
            digit
            for place, digit in zip(places, itertools.chain(*terms), strict=True)
            if place[0] in (t, u) and place not in ((t, f), (u, g))
        ]
        is_allowed = t == u if operator == "*" else len(terms[t]) == len(terms[u]) == 1
        others = [product for i, product in enumerate(terms) if i not in (t, u)]
        found.add((is_allowed, tuple(sorted([*others, tuple(sorted([*kept, result]))]))))
    return found


def _is_step(part: Sequence[str]) -> bool:
    return len(part) == 5 and all(
        token in signs for token, signs in zip(part, (_DIGITS, _SIGNS, _DIGITS, "=", _DIGITS), strict=True)
    )


_DIGITS, _SIGNS = tuple("0123456789"), tuple("+*")


def measure(model: PreTrainedModel, problems: Sequence[Problem], samples: int, seed: int) -> dict[str, float]:
    """Accuracy and behaviour on problems; see `behaviour`."""
    batch = answer(model.eval(), problems, torch.Generator().manual_seed(seed), samples=samples)
    _, batch.entropy = token_statistics(model, batch)
    return behaviour(batch)


def behaviour(batch: Batch) -> dict[str, float]:
    """What the responses of a batch with entropies show.

    accuracy            right final answers
    reward              mean
    plan_right          steps whose operation may come next
    result_right        steps whose result follows from its own operands
    planned             responses with a step for every operation, all of them with a right plan
    entropy/planning    nats, mean over steps: of the choice of the operation (the sum over its three tokens)
    entropy/execution   nats, mean over steps: of the result
    length              tokens

    What rests on steps is NaN where no response has any.
    """
    plans, results, planned = list[bool](), list[bool](), list[bool]()
    entropies: dict[str, list[float]] = {"planning": [], "execution": []}
    for problem, text, entropy in zip(batch.problems, batch.texts, batch.entropy, strict=True):
        labels, mine = annotate(problem.prompt, split_tokens(text)), list[bool]()
        for i, label in enumerate(labels):
            if label.role != "execution":
                continue
            # The operation stands before its equals sign and the result.
            mine.append(labels[i - 2].correct is True)
            results.append(label.correct is True)
            entropies["planning"].append(float(entropy[i - 4 : i - 1].sum()))
            entropies["execution"].append(float(entropy[i]))
        plans += mine
        planned.append(all(mine) and len(mine) == parse_prompt(problem.prompt).n_ops)
    return {
        "accuracy": float(batch.right.mean()),
        "reward": float(batch.rewards.mean()),
        "plan_right": _mean(plans),
        "result_right": _mean(results),
        "planned": _mean(planned),
        **{f"entropy/{name}": _mean(values) for name, values in entropies.items()},
        "length": _mean([len(ids) for ids in batch.responses]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
