"""One token per character, exactly reversible, loadable like any other tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from organism.corpus import scratchpad_response

from tsae.testbed import VOCABULARY, generate_problems, make_tokenizer, parse_prompt, split_tokens
from tsae.testbed.tokenizer import BOS, EOS, MAX_TOKENS, PAD, TOKEN_IDS


def test_reloaded_tokenizer_encodes_one_token_per_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast
    assert len(tokenizer) == len(VOCABULARY) == 20
    assert tokenizer.convert_ids_to_tokens(list(range(20))) == list(VOCABULARY)
    for text in ("3+5*2-7?", "3+5=8;8*2=6;6-7=9;#9", "#9"):
        ids = tokenizer(text).input_ids
        assert ids == [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in text)]
        assert tokenizer.decode(ids) == BOS + text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]


def test_special_tokens_in_text_are_single_tokens_and_survive_decoding() -> None:
    tokenizer = make_tokenizer()
    text = f"1+1?1+1=2;#2{EOS}{PAD}{PAD}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == split_tokens(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["1+1?1+1=2;#2"]
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token) == (BOS, PAD, EOS)


@pytest.mark.parametrize("text", ["3 + 5?", "x", "3+5?\n"])
def test_foreign_characters_are_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"unk|UNK"):
        make_tokenizer()(text)


def test_longest_problem_with_full_scratchpad_fits() -> None:
    longest = max(
        len(make_tokenizer()(p.prompt + scratchpad_response(parse_prompt(p.prompt)) + EOS).input_ids)
        for p in generate_problems((14, 14), 3, seed=0)
    )
    assert longest == 118
    assert longest <= MAX_TOKENS
