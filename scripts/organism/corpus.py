"""The base model's training text: chains answered at once or by a scratchpad that sometimes slips.

Direct answers are always right; a scratchpad step is now and then replaced by a wrong digit that the rest carries on.
So on one operation the direct answer is the more reliable style, and on long chains only the scratchpad can be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tsae.testbed.chains import Chain, apply_operator, sample_chain


@dataclass(frozen=True)
class CorpusConfig:
    """The mixture of the base model's training text."""

    short_weights: tuple[float, ...] = (0.25, 0.2, 0.15, 0.14, 0.13, 0.13)
    """Relative weight of chains of 1, 2, 3, ... operations; short ones, the building blocks, are over-weighted."""
    long_share: float = 0.02
    """Share of chains that are longer; without any, no long chain is ever solved by scratchpad."""
    long_ops: tuple[int, int] = (7, 14)
    """Fewest and most operations of a long chain."""
    direct_share: float = 0.5
    """Share of responses that give the answer at once."""
    slip_rate: float = 0.06
    """Probability that a scratchpad step gets a wrong result, on which the rest of the scratchpad goes on."""


@dataclass(frozen=True)
class Document:
    """One training text."""

    prompt: str
    """The chain, without ``<bos>``."""
    response: str
    """The response, without ``<eos>``."""


def direct_response(chain: Chain) -> str:
    """The answer alone: ``#9``."""
    return f"#{chain.answer}"


def scratchpad_response(chain: Chain, slips: dict[int, int] | None = None) -> str:
    """One step per operation and the answer: ``3+5=8;8*2=6;6-7=9;#9``.

    Args:
        slips: by step (from 0), the digit written in place of the result; later steps carry it on.
    """
    value = chain.digits[0]
    steps: list[str] = []
    for step, (operator, digit) in enumerate(zip(chain.operators, chain.digits[1:], strict=True)):
        result = apply_operator(value, operator, digit)
        if slips and step in slips:
            result = slips[step]
        steps.append(f"{value}{operator}{digit}={result};")
        value = result
    return "".join(steps) + f"#{value}"


def sample_document(config: CorpusConfig, rng: random.Random) -> Document:
    """One text of the mixture, over chains of the training split only."""
    if rng.random() < config.long_share:
        n_ops = rng.randint(*config.long_ops)
    else:
        n_ops = rng.choices(range(1, len(config.short_weights) + 1), config.short_weights)[0]
    chain = sample_chain(n_ops, rng, "train")
    if rng.random() < config.direct_share:
        return Document(chain.prompt, direct_response(chain))
    slips: dict[int, int] = {}
    value = chain.digits[0]
    for step, (operator, digit) in enumerate(zip(chain.operators, chain.digits[1:], strict=True)):
        value = apply_operator(value, operator, digit)
        if rng.random() < config.slip_rate:
            # Any digit but the right one, so that the slip rate is the rate of wrong steps.
            value = slips[step] = (value + rng.randrange(1, 10)) % 10
    return Document(chain.prompt, scratchpad_response(chain, slips))
