"""Logs of models that think, with one turn and with several: which tokens are thinking, answer, or a tool's."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import make_tokenizer
from support.logs import notes, read, write
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames
from tsae.rollouts.problems import without
from tsae.rollouts.token_parts import ANSWER, OTHER, THINKING

A, T, O = ANSWER, THINKING, OTHER
Stretches = list[tuple[str, int]]


def ids_of(name: str, text: str) -> list[int]:
    return list(make_tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def tokens(name: str, stretches: Stretches) -> tuple[list[int], list[int]]:
    """(ids, parts) of stretches."""
    pieces = [ids_of(name, text) for text, _ in stretches]
    parts = [[part] * len(ids) for ids, (_, part) in zip(pieces, stretches, strict=True)]
    return list(chain(*pieces)), list(chain(*parts))


def asked(name: str, **arguments: Any) -> str:
    message = {"role": "user", "content": "3+4? Think in <think> tags."}
    return str(
        make_tokenizer(name).apply_chat_template([message], tokenize=False, add_generation_prompt=True, **arguments)
    )


def test_a_log_of_text(tokenizers: Any, tmp_path: Path) -> None:
    """verl's, of Qwen3 with thinking and without: the empty thinking is the prompt's."""
    outputs = ["<think>\n3+4=7\n</think>\n\n7", "<think>\n3+4", "7", "<think>\n\n</think>\n\n7"]
    special = [str(token) for token in make_tokenizer("qwen3").all_special_tokens]
    prompts = [without(asked("qwen3", **thinks), special) for thinks in ({}, {}, {}, {"enable_thinking": False})]
    rows = [
        {"input": prompt, "output": output, "gts": "7", "score": 1.0, "step": 1}
        for prompt, output in zip(prompts, [*outputs[:3], "7</think>"], strict=True)
    ]
    found = read(write(tmp_path / "rollout_data" / "1.jsonl", *rows), tokenizers("qwen3"))
    expected = [
        tokens("qwen3", [("<think>\n3+4=7\n</think>", T), ("\n\n7", A)])[1],
        tokens("qwen3", [(outputs[1], T)])[1],
        None,
        None,
    ]
    assert found.table["parts"].to_pylist() == expected
    assert "2 responses have thinking, marked by <think> (--span thinking or answer)" in notes(found)


def test_a_template_that_opens_thinking_and_a_tool(tokenizers: Any, tmp_path: Path) -> None:
    """slime's, with ids and a mask: the prompt opens thinking, and the template does so again behind a tool's result.

    A verifier that looks for the last number finds the policy's, not the tool's.
    """
    name = "qwen3-always-thinking"
    turns: Stretches = [
        ("I ask a tool.</think>", T), ("\n\ncall(3+4)<|im_end|>", A), ("\n<|im_start|>tool\n<think>99", O),
        ("<|im_end|>\n<|im_start|>assistant\n<think>\n", O), ("It is 7.</think>", T), ("\n\n7<|im_end|>", A),
    ]  # fmt: skip
    behind: Stretches = [("\n<|im_start|>tool\n12<|im_end|>", O)]
    rows: list[dict[str, Any]] = []
    for stretches in (turns + behind, turns[:2] + behind, [("cut off", T)], [("It is 7.</think>7<|im_end|>", A)]):
        ids, parts = tokens(name, stretches)
        prompt = ids_of(name, asked(name))
        rows.append(
            {
                "tokens": prompt + ids, "response_length": len(ids), "response": "", "prompt": asked(name),
                "label": "7", "reward": 1.0, "loss_mask": [int(part != O) for part in parts],
                "status": "truncated" if stretches[0][0] == "cut off" else "completed",
            }
        )  # fmt: skip
    torch.save({"rollout_id": 0, "samples": rows}, tmp_path / "0.pt")
    found = read(tmp_path / "0.pt", tokenizers(name), verifier="last_number")
    ids, parts = tokens(name, turns)
    assert found.table["response_ids"].to_pylist()[0] == ids
    assert found.table["parts"].to_pylist()[:3] == [
        parts, tokens(name, turns[:2])[1], tokens(name, [("cut off", T)])[1],
    ]  # fmt: skip
    assert found.frame.response[0] == "I ask a tool.</think>\n\ncall(3+4)\nIt is 7.</think>\n\n7"
    assert found.frame.outcome.tolist() == ["success", "failure", "failure", "success"]
    assert found.frame.response_length.tolist()[0] == len(ids) - parts.count(O)
    assert "4 responses have thinking, marked by <think> (--span thinking or answer)" in notes(found)
    assert "1 responses have several turns: what the policy did not sample in between counts nowhere" in notes(found)
    assert found.frame.finish_reason.tolist() == ["stop", "stop", "length", "stop"]


def test_parts_where_one_file_of_several_has_them(tokenizers: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "3+4?", "response": text, "reward": 1.0} for text in ("7", "<think>a</think>7", "8", "9")]
    write(tmp_path / "a.jsonl", *rows)
    found = read(tmp_path / "a.jsonl", tokenizers("qwen3"))
    parts = tokens("qwen3", [("<think>a</think>", T), ("7", A)])[1]
    assert found.table["parts"].to_pylist() == [None, parts, None, None]
    plain = read(write(tmp_path / "b.jsonl", rows[0], rows[2]), tokenizers("qwen3"))
    assert "parts" not in plain.table.column_names


def test_closing_what_nothing_opened_is_said(tokenizers: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "3+4?", "response": text, "reward": 1.0} for text in ("It is 7.</think>7", "8")]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizers("qwen3"))
    assert found.table["parts"].to_pylist() == [tokens("qwen3", [("It is 7.</think>", T), ("7", A)])[1], None]
    assert "1 responses close thinking that nothing opens: all before it in the turn counts as thinking" in notes(found)


def test_markers_that_a_log_of_text_lost_are_said(tokenizers: Any, tmp_path: Path) -> None:
    made = make_tokenizer("mistral")
    made.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]", "[THINK]", "[/THINK]"]})
    made.save_pretrained(tmp_path / "magistral")
    log = write(tmp_path / "a.jsonl", {"prompt": "3+4?", "response": "It is 7.7", "reward": 1.0})
    assert (
        "1 responses are text without special tokens, [THINK] among them: which of their tokens are thinking is not "
        "known"
    ) in notes(read(log, tmp_path / "magistral"))
    ids = made("[THINK]It is 7.[/THINK]7", add_special_tokens=False)["input_ids"]
    row = {"prompt": "3+4?", "response_ids": ids, "reward": 1.0}
    found = read(write(tmp_path / "b.jsonl", row), tmp_path / "magistral", format="plain")
    assert found.table["parts"].to_pylist() == [[T] * 10 + [A]]


def test_a_plain_log_with_a_mask(tokenizers: Any, tmp_path: Path) -> None:
    """Of any trainer: token ids, and which of them the policy sampled."""
    stretches: Stretches = [("<think>a</think>", T), ("call", A), ("7", O), ("It is 7.", A)]
    ids, parts = tokens("qwen3", [*stretches, ("behind", O)])
    row = {"prompt_ids": ids_of("qwen3", "3+4?"), "response_ids": ids, "mask": [int(part != O) for part in parts]}
    names = ColumnNames(response_mask="mask")
    rows = [row | {"reward": 1.0, "response": "whatever"}, row | {"mask": None, "reward": 0.0, "response": None}]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizers("qwen3"), columns=names)
    ids_kept, parts_kept = tokens("qwen3", stretches)
    assert found.table["response_ids"].to_pylist() == [ids_kept, ids]
    assert found.table["parts"].to_pylist()[0] == parts_kept
    assert found.frame.response[0] == "<think>a</think>call\nIt is 7."
    assert found.table["round_trip"].to_pylist() == [None, None]
    for change, message in (
        ({"mask": [1]}, rf"mask has 1 marks for the {len(ids)} tokens of response_ids"),
        ({"mask": ["x"] * len(ids)}, "mask is .*expected a list of marks"),
        ({"mask": [0] * len(ids)}, "no token is marked as sampled"),
        ({"response_ids": None, "response": "a"}, "has mask but no response_ids"),
        ({"prompt_ids": None, "prompt": "a", "mask": [0, *row["mask"][1:]]}, "the first token of the response was not"),
    ):
        with pytest.raises(TsaeError, match=rf"a\.jsonl:1.*{message}"):
            read(write(tmp_path / "a.jsonl", row | {"reward": 1.0} | change), tokenizers("qwen3"), columns=names)


def test_template_arguments_of_the_trainers_own_config(tokenizers: Any, tmp_path: Path) -> None:
    """verl's, by Hydra, in the run's folder."""
    row = {"prompt": [{"role": "user", "content": "3+4?"}], "response": "7", "reward": 1.0}
    log = write(tmp_path / "run" / "rollouts" / "a.jsonl", row)

    def prompt(**config: Any) -> str:
        found = read(log, tokenizers("qwen3"), **config)
        told.append(notes(found))
        return str(make_tokenizer("qwen3").decode(found.table["prompt_ids"][0].as_py()))

    told: list[str] = []
    assert "<think>" not in prompt()
    assert "prompts were rendered without enable_thinking" in told[-1]
    config = tmp_path / "run" / ".hydra" / "config.yaml"
    config.parent.mkdir()
    config.write_text("data:\n  max_prompt_length: 512\n  apply_chat_template_kwargs:\n    enable_thinking: false\n")
    assert prompt().endswith("<think>\n\n</think>\n\n")
    assert f'the chat template is given {{"enable_thinking": false}}, as {config.resolve()} says' in told[-1]
    assert "prompts were rendered without enable_thinking" not in told[-1]
    assert "<think>" not in prompt(template_arguments='{"enable_thinking": true}')  # The user's word goes first.
    assert "config.yaml" not in told[-1]
    for text in ("data: {apply_chat_template_kwargs: {}}", "data: [", "- a", "", "data:", "\0"):
        config.write_text(text)
        assert "<think>" not in prompt()
