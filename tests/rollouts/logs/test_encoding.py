"""Encoding texts in less time gives the ids that the tokenizer gives."""

from __future__ import annotations

import pytest

from support.checkpoints import TEMPLATES, make_tokenizer
from tsae.errors import TsaeError
from tsae.rollouts.logs.tokens import Encoder
from tsae.rollouts.problems import tokenize

TEXTS = [
    "",
    " ",
    "What is 3 + 4?\n\nIt is 7.",
    "<|im_start|>user\nHi<|im_end|>",
    "a" * 3000,
    "<s> </s> <think>x</think>",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_tokenizer(name: str) -> None:
    tokenizer = make_tokenizer(name)
    encode = Encoder(tokenizer)
    for text in TEXTS:
        assert encode(text, "here") == tokenize(tokenizer, text, add_special_tokens=False)


def test_a_length_limit_of_the_tokenizer_cuts_nothing() -> None:
    tokenizer = make_tokenizer("chatml")
    encode = Encoder(tokenizer)
    tokenizer("3 + 4", truncation=True, max_length=2)
    assert len(encode("What is 3 + 4?", "here")) > 2


def test_a_tokenizer_that_does_more_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("chatml")
    plain = type(tokenizer).__call__

    def upper(self: object, text: str, **options: object) -> object:
        return plain(tokenizer, text.upper(), **options)

    monkeypatch.setattr(type(tokenizer), "__call__", upper)
    assert Encoder(tokenizer)("a 1", "here") == tokenize(tokenizer, "a 1", add_special_tokens=False)


def test_a_text_that_is_refused_says_where() -> None:
    from tsae.testbed import make_tokenizer as testbed

    with pytest.raises(TsaeError, match=r"log:3: .*cannot be tokenised"):
        Encoder(testbed())("汉字", "log:3")
