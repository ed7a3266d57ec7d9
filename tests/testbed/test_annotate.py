"""Token labels and facts of responses: by hand, by brute force over planted faults, and on garbage."""

from __future__ import annotations

import random

import numpy as np
import pytest
from organism.corpus import direct_response, scratchpad_response

import tsae
from tsae.testbed import VOCABULARY, annotate, describe_response, generate_problems, given_answer, parse_prompt, verify
from tsae.testbed.classes import with_styles
from tsae.testbed.tokenizer import split_tokens

PROMPT = "3+5*2-7?"  # 3+5=8, 8*2=6, 6-7=9
STEP = ["operand", "operator", "operand", "equals", "result", "separator"]


def labels_of(response: str, prompt: str = PROMPT) -> list[tuple[str, bool | None, int | None]]:
    tokens = split_tokens(response)
    labels = annotate(prompt, tokens)
    assert len(labels) == len(tokens)
    return [(label.role, label.correct, label.step) for label in labels]


def wrong_tokens(response: str, prompt: str = PROMPT) -> list[int]:
    return [index for index, (_, correct, _) in enumerate(labels_of(response, prompt)) if correct is False]


def test_perfect_scratchpad_by_hand() -> None:
    labels = labels_of("3+5=8;8*2=6;6-7=9;#9<eos><pad>")
    assert [role for role, _, _ in labels] == [*STEP * 3, "answer_marker", "answer", "end", "other"]
    judged = [True, True, True, None, True, None]
    assert [correct for _, correct, _ in labels] == [*judged * 3, None, True, None, None]
    assert [step for _, _, step in labels] == [0] * 6 + [1] * 6 + [2] * 6 + [None] * 4
    assert {label.style for label in annotate(PROMPT, split_tokens("3+5=8;#8"))} == {"scratchpad"}


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        ("3+5=8;8*2=4;4-7=7;#7<eos>", [10, 19]),  # 8*2=4 is the slip; 4-7=7 follows from it, and is right
        ("3+5=8;8*3=4;4+7=1;#1", [8, 13, 19]),  # miscopied operand and operator do not make the result wrong
        ("3+5=8;6*2=2;2-7=5;#9", [6]),  # a step's first operand is copied from the step before, not from the truth
        ("#8<eos>", [1]),
    ],
)
def test_slips_and_miscopied_tokens_are_wrong_once(response: str, wrong: list[int]) -> None:
    assert wrong_tokens(response) == wrong


def test_direct_answers() -> None:
    assert labels_of("#9<eos>") == [("answer_marker", None, None), ("answer", True, None), ("end", None, None)]
    assert {label.style for label in annotate(PROMPT, ["#", "9", "<eos>"])} == {"direct"}


def test_steps_beyond_the_problem_are_wrong() -> None:
    labels = labels_of("1+1=2;2+1=3;#3", prompt="1+1?")
    assert [correct for _, correct, step in labels if step == 1] == [False, False, False, None, True, None]


@pytest.mark.parametrize(
    ("response", "roles", "wrong"),
    [
        ("3+5;", ["operand", "operator", "operand", "separator"], [3]),
        ("3+5#9", ["operand", "operator", "operand", "answer_marker", "answer"], [3]),
        ("35=8;#9", ["operand", "other", "other", "other", "separator", "answer_marker", "answer"], [1, 2, 3]),
        ("3+5=88;#9", [*STEP[:5], "other", "separator", "answer_marker", "answer"], [5]),
        ("3+5=8<eos>", [*STEP[:5], "end"], [5]),
        ("#9#9<eos>", ["answer_marker", "answer", "answer_marker", "answer", "end"], [2]),
        ("#98<eos>", ["answer_marker", "answer", "other", "end"], [2]),
        ("#<eos>", ["answer_marker", "end"], [1]),
        ("#+9", ["answer_marker", "other", "other"], [1, 2]),
        ("<pad>#9", ["other", "answer_marker", "answer"], [0]),
        ("#9<eos>3+<eos>", ["answer_marker", "answer", "end", "other", "other", "other"], []),
        ("<pad><pad>", ["other", "other"], []),
        ("", [], []),
    ],
)
def test_malformed_responses_by_hand(response: str, roles: list[str], wrong: list[int]) -> None:
    assert [role for role, _, _ in labels_of(response)] == roles
    assert wrong_tokens(response) == wrong


def test_perfect_responses_are_all_right_and_planted_slips_are_found_where_they_are() -> None:
    rng = random.Random(0)
    for problem in [p for level in ("easy", "medium", "hard") for p in generate_problems(level, 100, seed=5)]:
        chain = parse_prompt(problem.prompt)
        full = scratchpad_response(chain) + "<eos>"
        assert wrong_tokens(full, problem.prompt) == wrong_tokens(direct_response(chain), problem.prompt) == []
        facts = describe_response(problem.prompt, full)
        assert (facts.correct, facts.style, facts.first_wrong, facts.skip_index) == (True, "scratchpad", None, None)
        assert facts.n_steps_required == facts.n_steps_written == facts.n_steps_valid == chain.n_ops
        assert (facts.n_steps_skipped, facts.skipped_share, facts.n_tokens) == (0, 0.0, 6 * chain.n_ops + 3)

        step = rng.randrange(chain.n_ops)
        slip = (chain.results[step] + rng.randrange(1, 10)) % 10
        slipped = scratchpad_response(chain, {step: slip}) + "<eos>"
        facts = describe_response(problem.prompt, slipped)
        assert facts.first_wrong == 6 * step + 4
        assert facts.n_steps_skipped == 0
        # Multiplying by 0, 2 or 5 can heal a slip; the answer is wrong exactly if it was not healed.
        healed = facts.answer == problem.answer
        assert wrong_tokens(slipped, problem.prompt) == [6 * step + 4] + ([] if healed else [6 * chain.n_ops + 1])
        assert facts.correct == healed


def test_each_changed_character_of_a_perfect_scratchpad_is_the_first_wrong_token() -> None:
    perfect = split_tokens("3+5=8;8*2=6;6-7=9;#9<eos>")
    for index in range(len(perfect) - 1):
        for token in VOCABULARY:
            changed = [*perfect[:index], token, *perfect[index + 1 :]]
            if token == perfect[index]:
                continue
            # The one other token that the grammar allows between steps is the answer marker, and the <eos>
            # that ends early is an "end" before an answer: both leave the fault to what follows, or carry it
            # themselves.
            expected = index + 1 if (token == "#" and index % 6 == 0 and index < 18) else index
            assert describe_response(PROMPT, "".join(changed)).first_wrong == expected, (index, token)


def test_every_response_has_one_style() -> None:
    """A step that is not the problem's is no scratchpad, and neither is one that ends without an answer."""
    texts = {"#9": 0, "3+5=8;8*2=6;6-7=9;#9": 1, "3+5=8;#9": 1, "4+5=9;#9": 2, "3+5=8;": 2, "#9#9": 2, "": 2}
    row = {"policy": "base", "problem_id": "p", "prompt": PROMPT, "outcome": "unknown"}
    row |= {"prompt_ids": [1], "response_ids": [2]}
    rollouts = with_styles(tsae.Rollouts.from_records([row | {"response": text} for text in texts]))
    assert (names := rollouts.info["behaviours"]) == ["direct", "scratchpad", "broken"]
    assert rollouts.frame[names].to_numpy().tolist() == np.eye(3)[[*texts.values()]].tolist()


def test_facts_of_skipped_computation() -> None:
    direct = describe_response(PROMPT, "#9<eos>")
    assert (direct.style, direct.n_steps_skipped, direct.skipped_share, direct.skip_index) == ("direct", 3, 1.0, 0)
    assert (direct.correct, direct.first_wrong, direct.n_tokens) == (True, None, 3)
    partial = describe_response(PROMPT, "3+5=8;#9")
    assert (partial.style, partial.skip_index) == ("scratchpad", 6)
    assert (partial.n_steps_written, partial.n_steps_skipped) == (1, 2)
    # A slipped step was written; a miscopied one does not carry out what was due.
    assert describe_response(PROMPT, "3+5=9;9*2=8;8-7=1;#1").n_steps_skipped == 0
    miscopied = describe_response(PROMPT, "3+5=8;8*3=4;4-7=7;#7")
    assert (miscopied.n_steps_written, miscopied.n_steps_valid, miscopied.n_steps_skipped) == (3, 2, 1)
    extra = describe_response("1+1?", "1+1=2;2+1=3;#2")
    assert (extra.n_steps_written, extra.n_steps_valid, extra.n_steps_skipped) == (2, 1, 0)


def test_random_garbage_never_raises_and_labels_every_token() -> None:
    rng = random.Random(1)
    alphabet = [*VOCABULARY, "x", " ", "\n", "é"]
    for _ in range(3000):
        tokens = rng.choices(alphabet, k=rng.randrange(0, 25))
        assert len(annotate(PROMPT, tokens)) == len(tokens)
        facts = describe_response(PROMPT, "".join(tokens))
        assert 0 <= facts.skipped_share <= 1
        assert facts.n_tokens <= len(tokens)
        assert facts.correct == (facts.answer == "9")
        if facts.style == "direct":
            assert facts.n_steps_valid == 0
    assert len(annotate(PROMPT, ["", "12", "<eos> "])) == 3  # tokens of another tokenizer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#9", "9"),
        ("#9<eos>", "9"),
        ("#9<eos><pad><pad>", "9"),
        ("#9<pad>", "9"),
        ("3+5=8;#9<eos>", "9"),
        ("#8#9", "9"),
        ("#9<eos>#8", "9"),
        ("#98", None),
        ("#9;", None),
        ("#9\n", None),
        ("#", None),
        ("9", None),
        ("3+5=8;", None),
        ("", None),
    ],
)
def test_verifier(response: str, answer: str | None) -> None:
    assert given_answer(response) == answer
    assert verify(response, "9") == (answer == "9")
    assert not verify(response, "1")
