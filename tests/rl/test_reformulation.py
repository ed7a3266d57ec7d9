"""Reformulations: chains against brute force, word problems against cases read by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.refusals import fails, refuses
from tsae.cli import main
from tsae.rl.reformulation import (
    calculations,
    read_word_problems,
    reformulate_words,
    write_reformulations,
)
from tsae.rollouts.problems import Problem, read_problems, write_problems
from tsae.testbed.backward import reformulate_backward, reformulate_chains, reformulate_operands
from tsae.testbed.chains import evaluate, generate_problems, in_split, parse_prompt


def chain(prompt: str) -> Problem:
    return Problem(f"chain:{prompt[:-1]}", prompt, evaluate(prompt), "hard")


def word_problem(question: str, answer: str, solution: str | None = None) -> tuple[list[str], list[tuple[str, str]]]:
    """Answers of the reformulations, and (number, reason) of what was left out."""
    problem = Problem("w", question, answer)
    made, left_out = reformulate_words([problem], None if solution is None else {"w": solution})
    return [item.problem.answer for item in made], [(item.text, item.reason) for item in left_out]


def right_digits(prompts: list[str]) -> np.ndarray:
    """(n, 10) bool: which digits in place of the first ? make ``3+?*2=8?`` true; all prompts and digits at once."""
    width = max(map(len, prompts))
    text = np.array([list(prompt.ljust(width)) for prompt in prompts])
    hidden = (text == "?") & (np.arange(width) < np.array([len(p) - 1 for p in prompts])[:, None])
    digits = np.char.isdigit(text)
    number = np.where(digits, text, "0").astype(int)
    value = np.zeros((len(prompts), 10), dtype=int)
    done = np.zeros(len(prompts), dtype=bool)
    right = np.zeros((len(prompts), 10), dtype=bool)
    for place in range(0, width, 2):
        operand = np.where(hidden[:, place, None], np.arange(10), number[:, place, None])
        operator = text[:, place - 1] if place else np.full(len(prompts), "+")
        results = np.select(
            [(operator == sign)[:, None] for sign in "+-*"], [value + operand, value - operand, value * operand], value
        )
        stated = operator == "="
        right[stated] = value[stated] == operand[stated]
        done |= stated
        value = np.where(done[:, None], value, results % 10)
    assert done.all()
    return right


def test_every_digit_of_a_chain_is_hidden_where_the_answer_settles_it() -> None:
    found = reformulate_operands(chain("3+5*2-7?"))  # ((3 + 5) * 2 - 7) mod 10 = 9
    # 3 and 5 are multiplied by 2 afterwards, so that two digits fit each; 8 * x = 6 has 2 and 7.
    assert [(item.problem.prompt, item.accepted) for item in found] == [("3+5*2-?=9?", ("7",))]
    every = reformulate_operands(chain("3+5*2-7?"), ambiguous="accept")
    assert [(item.problem.prompt, item.problem.answer, item.accepted) for item in every] == [
        ("?+5*2-7=9?", "3", ("3", "8")),
        ("3+?*2-7=9?", "5", ("0", "5")),
        ("3+5*?-7=9?", "2", ("2", "7")),
        ("3+5*2-?=9?", "7", ("7",)),
    ]
    assert every[1].parent == "chain:3+5*2-7"
    assert every[1].hidden == (2, 3)


def test_a_chain_is_undone_from_its_answer() -> None:
    found = reformulate_backward(chain("4*5-2*3+6?"), split=None)  # 4*5=0, -2=8, *3=4, +6=0
    # 0-6=4; 4*7=8, the inverse of 3 being 7; 8+2=0; times 5 cannot be undone.
    assert [(item.problem.prompt, item.problem.answer) for item in found] == [
        ("0-6?", "4"),
        ("0-6*7?", "8"),
        ("0-6*7+2?", "0"),
    ]
    assert found[1].hidden == (0, 5)
    assert "4*5-2*3+6?"[slice(*found[1].hidden)] == "4*5-2"


@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_problems_agree_with_brute_force(n: int) -> None:
    problems = [*generate_problems("medium", n // 2, 1, "train"), *generate_problems("hard", n // 2, 1, "train")]
    items = [item for problem in problems for item in reformulate_operands(problem, ambiguous="accept")]
    assert len(items) > 8 * n
    right = right_digits([item.problem.prompt for item in items])
    claimed = np.zeros_like(right)
    for row, item in enumerate(items):
        claimed[row, [int(answer) for answer in item.accepted]] = True
    np.testing.assert_array_equal(claimed, right)
    assert all(item.problem.answer in item.accepted for item in items)
    settled = sum(len(item.accepted) == 1 for item in items)
    assert settled == sum(len(reformulate_operands(problem)) for problem in problems)

    backward = [item for problem in problems for item in reformulate_backward(problem, n_ops=(1, 13))]
    assert len(backward) > 2.5 * n
    parents = {problem.id: parse_prompt(problem.prompt) for problem in problems}
    for item in backward:
        original = parents[item.parent]
        kept = (item.hidden[1] - 1) // 2  # operations before the hidden value
        value = original.digits[0] if kept == 0 else original.results[kept - 1]
        assert item.problem.answer == str(value) == evaluate(item.problem.prompt)


def test_no_evaluation_chain_is_posed_for_training() -> None:
    made = reformulate_chains(generate_problems("hard", 300, 0, "train"), n_ops=(2, 9))
    assert all(in_split(parse_prompt(item.problem.prompt), "train") for item in made)
    everything = reformulate_chains(generate_problems("hard", 300, 0, "train"), n_ops=(2, 9), split=None)
    assert 0.8 < len(made) / len(everything) < 0.95
    assert len({item.problem.prompt for item in made}) == len(made)


def test_a_wrong_answer_is_refused() -> None:
    refuses("the answer '1' is not that of '3\\+5\\?', which is 8", reformulate_operands, Problem("p", "3+5?", "1"))
    refuses("n_ops=\\(3, 2\\) is not a range", lambda: reformulate_backward(chain("3+5*2?"), n_ops=(3, 2)))


def test_numbers_of_a_question_are_hidden_one_by_one() -> None:
    question = "A pen costs $3. Ann buys 4 pens and a $1,200 desk. How much does she pay?"
    solution = "Pens: 3*4=<<3*4=12>>12. In all 1200+12=<<1200+12=1212>>1212."
    made, left_out = reformulate_words([Problem("w", question, "1212")], {"w": solution})
    assert left_out == []
    assert [(item.problem.id, item.problem.answer) for item in made] == [
        ("w~n13", "3"),
        ("w~n25", "4"),
        ("w~n39", "1200"),
    ]
    assert made[2].problem.prompt == (
        "A pen costs $3. Ann buys 4 pens and a $X desk. How much does she pay? The answer to this question is 1212. "
        "What number does X stand for?"
    )
    assert question[slice(*made[2].hidden)] == "1,200"


@pytest.mark.parametrize(
    ("question", "answer", "solution", "number", "reason"),
    [
        ("Add 1/2 cup to 5 cups?", "5.5", None, "1", "part of something"),
        ("The 3:30 train takes 5 hours?", "8", None, "30", "part of something"),
        ("In 2015 Ann had 5 cats. And now?", "9", None, "2015", "year"),
        ("Ann is in Room 5 with 3 cats. How many legs?", "12", None, "5", "label"),
        ("Ann has 5 cats, and Ben has five. How many in all?", "10", None, "5", "twice"),
        ("Ann has 2 cats and twice as many dogs. How many dogs?", "4", None, "2", "twice"),
        ("Ann has 5 cats. How many cats does she have?", "5", None, "5", "trivial"),
        ("Ann has 7 cats and 3 dogs. How many cats?", "9", "<<3+6=9>>", "7", "unused"),
        # 7 - 7 * 1 = 0 whatever the 7 was: its calculations name it twice.
        ("Ann has 7 cats and gives all away. How many?", "0", "<<7-7=0>>", "7", "cancels"),
        ("Boxes hold 6 eggs. How many full boxes do 20 eggs make?", "3", None, "20", "not settled"),
        ("Ann has 1 cat and 3 dogs. How many pets?", "4", None, "1", "singular"),
        ("Ann rolls 3, 5 and X, 14 in all. What is X?", "6", None, "5", "has an X"),
    ],
)
def test_what_is_left_out(question: str, answer: str, solution: str | None, number: str, reason: str) -> None:
    made, left_out = word_problem(question, answer, solution)
    assert (number, reason) in left_out
    assert number not in made


def test_a_solution_is_replayed() -> None:
    # The 5 changes nothing that the answer depends on.
    idle = "<<5+3=8>>8 and <<4*6=24>>24"
    assert word_problem("5 cats, 3 dogs, 4 boxes of 6. How many in the boxes?", "24", idle) == (
        ["4", "6"],
        [("5", "cancels"), ("3", "cancels")],
    )
    assert calculations("<<20%*50=10>> <<1,000-(2+3)*4=980>> <<x=3>> <<3/0=1>>") == [
        (["20", "/", "100", "*", "50"], 10),
        (["1000", "-", "(", "2", "+", "3", ")", "*", "4"], 980),
    ]
    assert word_problem("What is 20% of 50 cats?", "10", "<<20%*50=10>>") == (["20", "50"], [])


def test_a_question_without_a_numerical_answer_is_left_out() -> None:
    assert word_problem("Who has 5 cats?", "Ann") == ([], [("Ann", "no numerical answer")])
    assert word_problem("Who has 5 cats?", "1e999999999") == ([], [("1e999999999", "no numerical answer")])
    assert word_problem("Who has 5 cats?", "1e3") == (["5"], [])


def test_numbers_and_calculations_without_end_are_left_out() -> None:
    digits = "7" * 5000
    assert word_problem(f"I have {digits} pens and 3 more. How many?", "12") == (["3"], [(digits, "too long")])
    for endless in ("+".join(["1"] * 3000), "(" * 5000 + "1" + ")" * 5000, "(" * 99 + "1" + ")" * 99, "-" * 150 + "1"):
        assert calculations(f"<<{endless}=3000>> <<3+4=7>>")[-1] == (["3", "+", "4"], 7)
    # Each stands for the square of the one before.
    squares = "".join(f"<<{i}*{i}={i + 1}>>" for i in range(5, 60))
    assert word_problem("What comes of 5 cats?", "60", squares) == ([], [("5", "cancels")])
    grown = "<<5*6=30>>" + "".join(f"<<{i}*{i}={i + 1}>>" for i in range(30, 90))
    assert word_problem("What comes of 5 cats?", "90", grown) == ([], [("5", "cancels")])


GSM8K = {"question": "A pen costs $3.\u2028How much do 4 pens cost?", "answer": "<<3*4=12>>12\n#### 12"}
PLAIN = {"id": "a", "prompt": GSM8K["question"], "answer": "12"}


@pytest.mark.parametrize("record", [GSM8K, PLAIN])
@pytest.mark.parametrize("text", ["{}", "\ufeff{}\r\n", "\n{}\n\n"])
def test_only_newlines_end_a_line_and_blank_ones_are_skipped(tmp_path: Path, record: dict[str, str], text: str) -> None:
    (tmp_path / "p.jsonl").write_text(text.replace("{}", json.dumps(record, ensure_ascii=False)), encoding="utf-8")
    problems, solutions = read_word_problems(tmp_path / "p.jsonl")
    assert [(problem.prompt, problem.answer) for problem in problems] == [(GSM8K["question"], "12")]
    made, _ = reformulate_words(problems, solutions)
    write_reformulations(made, tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "r.jsonl").read_bytes())
    assert read_problems(tmp_path / "r.jsonl") == [one.problem for one in made]
    assert len(made) == 2


def test_the_command_writes_problems_that_sampling_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_problems(generate_problems("hard", 20, 0, "train"), tmp_path / "hard.jsonl")
    main(["reformulate", str(tmp_path / "hard.jsonl"), "--to", str(tmp_path / "easier.jsonl"), "--show", "2"])
    said = capsys.readouterr().out
    made = read_problems(tmp_path / "easier.jsonl")
    assert f"{len(made)} reformulations of" in said
    assert made[0].prompt in said
    assert all(evaluate(item.prompt) == item.answer for item in made)

    gsm8k = {"question": "A pen costs $3. How much do 4 pens cost?", "answer": "<<3*4=12>>12\n#### 12"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(gsm8k) + "\n")
    main(["reformulate", str(tmp_path / "gsm8k.jsonl"), "--to", str(tmp_path / "hidden.jsonl")])
    assert "left out: nothing" in capsys.readouterr().out
    assert [item.answer for item in read_problems(tmp_path / "hidden.jsonl")] == ["3", "4"]

    for broken, what in (
        (json.dumps({"question": "?", "answer": "no marker"}).encode(), "no #### before the final answer"),
        (json.dumps({"question": 5, "answer": "#### 1"}).encode(), "the question is a int"),
        (b"PAR1\x98", "broken.jsonl:1: not a problem (UnicodeDecodeError"),
    ):
        (tmp_path / "broken.jsonl").write_bytes(broken + b"\n")
        assert what in fails(capsys, "reformulate", tmp_path / "broken.jsonl", "--to", tmp_path / "x.jsonl").err
