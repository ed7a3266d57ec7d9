"""Grading: verifiers check whether a response gives the reference answer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

from tsae.base.plugins import find_function
from tsae.errors import TsaeError

Verifier = Callable[[str, str], bool]
"""(response, reference answer) -> is it right?"""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(response: str, answer: str) -> bool:
    """The response is the answer, without spaces at the ends."""
    return response.strip() == answer.strip()


def last_number(response: str, answer: str) -> bool:
    """The last number of the response equals the last number of the answer, without thousands commas."""
    given, expected = number_in(response), number_in(answer)
    return given is not None and given == expected


def number_in(text: str) -> Decimal | None:
    """The last number of a text, exactly; None where it has none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def same_expression(response: str, answer: str) -> bool:
    """math-verify finds the response's answer equal to the reference as an expression: 0.5, \\frac{1}{2} and 50\\%.

    Raises:
        TsaeError: where math-verify is missing, or the reference answer is no expression.
    """
    gold = expressions(answer) or expressions(f"${answer}$")
    if not gold:
        what = f"the reference answer {answer[:40]!r} is no mathematical expression"
        fix = "Correct it, or check answers with last_number or a function of your own."
        raise TsaeError(what, where="verifier math", fix=fix)
    return equal(gold, expressions(response))


def expressions(text: str) -> list[Any]:
    """What math-verify takes for the answer of a text; empty where it finds none."""
    parse, _ = _math_verify()
    return list(_parsed(parse, text, _limit()))


@lru_cache(maxsize=1024)
def _parsed(parse: Callable[..., list[Any]], text: str, limit: int | None) -> tuple[Any, ...]:
    """Kept, because responses of a group are often alike, and even a short one takes a millisecond."""
    return tuple(parse(text, parsing_timeout=limit))


def equal(gold: list[Any], given: list[Any]) -> bool:
    """Whether math-verify finds two answers of `expressions` equal."""
    _, verify = _math_verify()
    return bool(verify(gold, given, timeout_seconds=_limit()))


def _limit() -> int | None:
    """Seconds; math-verify's limits need signals, which only the main thread gets."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise TsaeError(
            "the verifier math needs math-verify", where="verifier", fix="pip install 'tsae[verify]'"
        ) from error
    return parse, verify


BY_NAME: dict[str, Verifier] = {"exact": exact, "last_number": last_number, "math": same_expression}
"""The verifiers that hold a response against a reference answer."""


def find_verifier(name: str) -> Verifier:
    """Find a verifier by name: exact, last_number, math, or ``module:function`` of the user's own.

    Raises:
        TsaeError: where there is none, or math needs math-verify, which is missing.
    """
    if name == "math":
        _math_verify()
    if name in BY_NAME:
        return BY_NAME[name]
    fix = f"Use {', '.join(BY_NAME)}, or module:function for your own (response, answer) -> bool."
    return cast(Verifier, find_function(name, takes=2, where="verifier", fix=fix))
