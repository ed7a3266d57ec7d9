"""Answer checking: does a response give the reference answer?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from tsae.plugins import find_function

Verifier = Callable[[str, str], bool]
"""(response, reference answer) -> is it right?"""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(response: str, answer: str) -> bool:
    """The response is the answer, spaces at the ends aside."""
    return response.strip() == answer.strip()


def last_number(response: str, answer: str) -> bool:
    """The last number of the response equals the last number of the answer; thousands commas do not matter."""
    given, expected = _NUMBER.findall(response), _NUMBER.findall(answer)
    if not given or not expected:
        return False
    return float(given[-1].replace(",", "")) == float(expected[-1].replace(",", ""))


_BY_NAME: dict[str, Verifier] = {"exact": exact, "last_number": last_number}


def find_verifier(name: str) -> Verifier:
    """A verifier by name: exact, last_number, or ``module:function`` of the user's own.

    Raises:
        TsaeError: where there is none.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    fix = f"Use {', '.join(_BY_NAME)}, or module:function for your own (response, answer) -> bool."
    return cast(Verifier, find_function(name, where="verifier", fix=fix))
