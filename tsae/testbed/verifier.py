"""The testbed's verifier: is the final answer of a response right?"""

from __future__ import annotations

import re

from tsae.testbed.tokenizer import BOS, EOS, PAD

_FINAL = re.compile(r"#(\d)\Z")


def given_answer(response_text: str) -> str | None:
    """The digit after the last ``#``, if the response ends with it; None without a final answer.

    Args:
        response_text: the response with or without its special tokens. Text after the first ``<eos>`` is
            ignored.
    """
    text = response_text.partition(EOS)[0].removeprefix(BOS)
    while text.endswith(PAD):
        text = text.removesuffix(PAD)
    match = _FINAL.search(text)
    return match.group(1) if match else None


def verify(response_text: str, answer: str) -> bool:
    """Whether a response ends in ``#`` and the right digit, whatever the way to it.

    A response that was cut off, continues after the answer, or gives none is wrong.
    """
    return given_answer(response_text) == answer.strip()
