"""Chat templates: the last token before the response, which the first one is drawn from, is last_prompt in all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from support.checkpoints import ASK, TEMPLATES, TURNS, make_tokenizer
from support.logs import refused
from tsae.activations.shard import span_mask
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.logs.templates import ChatTemplate
from tsae.rollouts.problems import encode_prompt
from tsae.rollouts.table import Rollouts

CASES = [(name, thinking) for name in TEMPLATES for thinking in ((True, False) if name == "qwen3" else (None,))]


def prompt_ids(tokenizer: Any, text: str, thinking: bool | None) -> list[int]:
    options = {} if thinking is None else {"enable_thinking": thinking}
    messages = [{"role": "user", "content": text}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
    return list(found["input_ids"])


def check_spans(tokenizer: Any, prompts: list[list[int]], ends_in: str) -> None:
    response = [*tokenizer("5+5=10", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = np.concatenate([[*prompt, *response] for prompt in prompts])
    offsets = np.concatenate([[0], np.cumsum([len(prompt) + len(response) for prompt in prompts])])
    lengths, special = np.array([len(prompt) for prompt in prompts]), frozenset(tokenizer.all_special_ids)
    masks = {span: span_mask(ids, offsets, lengths, span, special) for span in ("prompt", "response", "all")}
    last = span_mask(ids, offsets, lengths, "last_prompt", special)
    # The response starts right behind it.
    assert np.flatnonzero(last).tolist() == (offsets[:-1] + lengths - 1).tolist()
    assert all(tokenizer.decode([id]).endswith(ends_in) for id in ids[last])
    is_special = np.isin(ids, list(special))
    assert is_special.any()
    for mask in masks.values():
        assert not (mask & is_special).any()
    assert (masks["all"] == ~is_special).all()


@pytest.mark.parametrize(("name", "thinking"), CASES)
def test_last_prompt_is_the_last_token_before_the_response(name: str, thinking: bool | None) -> None:
    tokenizer = make_tokenizer(name)
    prompts = [prompt_ids(tokenizer, text, thinking) for text in ("What is 5+5?", "1+1")]
    check_spans(tokenizer, prompts, TEMPLATES[name][3])
    if thinking is False:
        assert tokenizer.decode(prompts[0]).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.slow
def test_last_prompt_of_smollm2_itself(smollm2: Any) -> None:
    tokenizer = smollm2.load_tokenizer()
    prompts = [prompt_ids(tokenizer, text, None) for text in ("What is 5+5?", "1+1")]
    check_spans(tokenizer, prompts, "\n")


# --- logs without special tokens

ASKED, SYSTEM = {"role": "user", "content": "What is 5+5?\n Now."}, {"role": "system", "content": "Be short."}
ANSWERED, AGAIN = {"role": "assistant", "content": "It is 10."}, {"role": "user", "content": "And 1+1"}
CONVERSATIONS = {
    "user": [ASKED],
    "system": [SYSTEM, ASKED],
    "turns": [ASKED, ANSWERED, AGAIN],
    "system and turns": [SYSTEM, ASKED, ANSWERED, AGAIN],
}


@pytest.mark.parametrize("shape", CONVERSATIONS)
@pytest.mark.parametrize(("name", "thinking"), CASES)
def test_prompts_without_special_tokens_get_them_back_or_are_said_to_be_ambiguous(
    name: str, thinking: bool | None, shape: str
) -> None:
    """The oracle is what the template renders."""
    tokenizer = make_tokenizer(name)
    options = {} if thinking is None else {"enable_thinking": thinking}
    ids = tokenizer.apply_chat_template(CONVERSATIONS[shape], add_generation_prompt=True, return_dict=True, **options)[
        "input_ids"
    ]
    found = ChatTemplate(tokenizer).restore(tokenizer.decode(ids, skip_special_tokens=True))
    assert found is not None
    assert found.ids == list(ids) or found.several
    # Where a word of the role is left in the text, nothing is ambiguous but whether a question holds such words.
    if name in ("chatml", "llama3", "gemma", "qwen3", "smollm2"):
        assert found.ids == list(ids)
        assert found.arguments == ({"enable_thinking": False} if thinking is False else {})
    if shape == "user":
        assert found.ids == list(ids)


def test_a_text_of_another_template_is_not_put_back() -> None:
    chatml, smollm = ChatTemplate(make_tokenizer("chatml")), ChatTemplate(make_tokenizer("smollm2"))
    assert chatml.restore("What is 5+5?") is None
    assert not chatml.begins_or_ends("What is 5+5?")
    # Its beginning or end says that it is one of a template nevertheless.
    assert smollm.restore("system\nCut off\nuser\n5+5?\nassistant\n<think>\n") is None
    assert smollm.begins_or_ends("5+5?\nassistant\n")
    assert smollm.own_system
    assert not chatml.own_system
    assert ChatTemplate(make_tokenizer("qwen3")).open_arguments == ("enable_thinking",)
    assert ChatTemplate(make_tokenizer("qwen3"), {"enable_thinking": False}).open_arguments == ()
    assert smollm.open_arguments == ()


def test_a_date_that_a_template_writes_is_read_off_the_text() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "<|im_start|>system\nToday Date: {{ date_string }}<|im_end|>\n" + tokenizer.chat_template
    )
    ids = tokenizer.apply_chat_template(
        [ASKED], add_generation_prompt=True, return_dict=True, date_string="26 Jul 2024"
    )["input_ids"]
    found = ChatTemplate(tokenizer).restore(tokenizer.decode(ids, skip_special_tokens=True))
    assert found is not None
    assert found.ids == list(ids)
    assert found.arguments == {"date_string": "26 Jul 2024"}


@pytest.mark.parametrize(
    "line",
    ["Today Date: {} Jul 2024", "Today Date: {} July 2024", "Today's Date: July {}, 2024.", "Current date: 2024-07-{}"],
)
def test_the_date_that_a_template_writes_does_not_make_another_problem(tmp_path: Path, line: str) -> None:
    """Llama 3, SmolLM3, Granite and gpt-oss: a run goes past midnight, or is sampled again the next day."""
    log = [
        {"prompt": f"system\n{line.format(day)}\n\nuser\n{a}+1?", "response": f"#{a}", "reward": 1.0, "step": day}
        for day in (26, 27)
        for a in (1, 2)
    ]
    make_tokenizer("llama3").save_pretrained(tmp_path / "tokenizer")
    policy = Checkpoint("base", str(tmp_path / "tokenizer"))
    found = Rollouts.read(log, policy)
    assert any(note.startswith("4 prompts have the date of the day:") for note in found.info["log"]["notes"])
    assert found.frame.groupby("problem_id").step.agg(list).tolist() == [[26, 27]] * 2
    numbered = [{**row, "problem_id": str(i % 2)} for i, row in enumerate(log)]
    days = [Rollouts.read([row for row in numbered if row["step"] == day], policy) for day in (26, 27)]
    assert {*Rollouts.read(numbered, policy).frame.problem_id} == {"0", "1"}
    assert Rollouts.concat(days).n_problems == 2
    # What the question itself tells is a part of it.
    asked = [{**row, "prompt": f"Current date: 2024-07-{26 + i}, what day is it?"} for i, row in enumerate(log)]
    assert Rollouts.read(asked, policy).n_problems == 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_others_are_seen_in_a_response_where_their_headers_are_left(name: str) -> None:
    tokenizer = make_tokenizer(name)
    template = ChatTemplate(tokenizer)
    tool = {"role": "user", "content": "the result is 42"}
    whole = tokenizer.apply_chat_template([ASKED, ANSWERED, tool], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    asked = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=True)["input_ids"]
    # Qwen3's prompt may end in an empty thought, which the template does not repeat.
    text = tokenizer.decode(whole[len(asked) :], skip_special_tokens=True) + "So 42."
    seen = name in ("chatml", "llama3", "gemma", "qwen3", "qwen3-always-thinking", "smollm2")
    assert template.another_wrote(text) == seen
    for fine in ("It is 10.", "The user\nasked the assistant", "a literal assistant\n in it", "so\nuser\nsaid so"):
        assert not template.another_wrote(fine)


def test_a_model_that_writes_plain_headers_wrote_them_itself() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = TURNS.format(before="", between=": ", after="\n") + ASK + "assistant: {% endif %}"
    assert not ChatTemplate(tokenizer).another_wrote("10\nuser: 1+1\nassistant: 2")


# --- prompts that have been through the template before they were logged


def import_prompt(name: str, prompt: str, tmp_path: Path, **config: Any) -> tuple[list[int], str]:
    """(prompt ids, notes) of a table with one prompt, read with a tokenizer of that template."""
    make_tokenizer(name).save_pretrained(tmp_path / "tokenizer")
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": prompt, "response": "It is 10.", "reward": 1.0}))
    summary = import_log(log, tmp_path / "r.parquet", tmp_path / "tokenizer", ImportConfig(**config), progress=False)
    (row,) = pq.read_table(tmp_path / "r.parquet").to_pylist()
    return row["prompt_ids"], "; ".join(summary.notes)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("shape", "asks"), [("user", True), ("user", False), ("system", True), ("system and turns", True)]
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_templated_prompt_is_taken_as_it_is(name: str, shape: str, asks: bool, tmp_path: Path) -> None:
    """The oracle is the tokenizer, given the template's own text."""
    tokenizer = make_tokenizer(name)
    text = tokenizer.apply_chat_template(CONVERSATIONS[shape], tokenize=False, add_generation_prompt=asks)
    for prompt in (text, text + "<think>\n", "\n" + text):
        ids, notes = import_prompt(name, prompt, tmp_path)
        assert ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert "special tokens already: they were taken as they are" in notes
    assert ("without a generation prompt" in notes) == (not asks and name != "mistral")


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "qwen3", "qwen3-always-thinking", "smollm2"])
def test_a_templated_prompt_without_special_tokens_is_put_back(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(name)
    for shape, asks, ends in (("user", True, ""), ("system", True, "<think>\n"), ("user", False, "")):
        rendered = tokenizer.apply_chat_template(CONVERSATIONS[shape], tokenize=False, add_generation_prompt=asks)
        expected = tokenizer(rendered + ends, add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(expected, skip_special_tokens=True)
        ids, notes = import_prompt(name, text, tmp_path)
        assert ids == expected
        assert "logged without special tokens: those of the chat template were put back" in notes
        # A text that somebody has stripped lacks the line break after "assistant".
        if asks and not ends:
            assert import_prompt(name, text.strip(), tmp_path)[0] == expected
            with pytest.raises(TsaeError, match=r"does not give it again.*questions, say --prompt-format chat"):
                import_prompt(name, text + "Sure, it", tmp_path)


def test_the_templates_own_system_message_may_have_been_left_out(tmp_path: Path) -> None:
    ids, notes = import_prompt("smollm2", "user\nHi\nassistant\n", tmp_path)
    assert make_tokenizer("smollm2").decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "prompts have no system message, though the chat template writes one of its own" in notes


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", TEMPLATES)
def test_questions_still_go_through_the_template(name: str, tmp_path: Path) -> None:
    tokenizer, special = make_tokenizer(name), TEMPLATES[name][1]
    questions = ["What is 5+5?", "user asked: system of", f"What does {special[0]}x{special[-1]} mean?", "assistant"]
    for question in questions:
        ids, notes = import_prompt(name, question, tmp_path)
        assert ids == prompt_ids(tokenizer, question, None)
        assert "prompts are questions alone" in notes
        # It is what a problem's prompt becomes when it is sampled.
        assert ids == encode_prompt(tokenizer, question)
    whole = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    assert encode_prompt(tokenizer, whole) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    twice = prompt_ids(tokenizer, whole, None)
    assert import_prompt(name, whole, tmp_path, prompt_format="chat")[0] == twice
    other = "<|im_start|>user\nHi<|im_end|>\n" if name in ("mistral", "gemma", "llama3") else "<start_of_turn>user\nHi"
    refused("another chat template than the checkpoint's", import_prompt, name, other, tmp_path)


def test_a_begin_token_is_neither_lost_nor_doubled(tmp_path: Path) -> None:
    """Llama's and Gemma's tokenizers put one before every text; a trainer's log may have it, lack it, or have two."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer("llama3")
    bos = "<|begin_of_text|>"
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    once = prompt_ids(tokenizer, ASKED["content"], None)
    log, config = tmp_path / "log.jsonl", ImportConfig(format="plain")
    for template, prompt, expected in (
        (True, text, once),
        (True, text.removeprefix(bos), once),
        (True, bos + text, once[:1] + once),
        (False, text, once),
        (False, text.removeprefix(bos), once),
    ):
        if not template:
            (tmp_path / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
        log.write_text(json.dumps({"prompt": prompt, "response": "It is 10.", "reward": 1.0}))
        import_log(log, tmp_path / "r.parquet", tmp_path / "tokenizer", config, progress=False)
        assert pq.read_table(tmp_path / "r.parquet")["prompt_ids"].to_pylist() == [expected]
