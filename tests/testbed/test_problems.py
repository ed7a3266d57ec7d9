"""Chains, their answers, and the split between training and evaluation."""

from __future__ import annotations

import random

import pytest
from organism.corpus import CorpusConfig, sample_document

from support.refusals import refuses
from tsae.testbed import eval_problems, evaluate, generate_problems, parse_prompt
from tsae.testbed.chains import LEVELS, in_split


@pytest.mark.parametrize(
    ("prompt", "results"),
    [
        ("3+5*2-7?", (8, 6, 9)),  # 16 mod 10 = 6; 6 - 7 = -1 = 9 mod 10
        ("0-1?", (9,)),
        ("9*9?", (1,)),
        ("2-5-5-5?", (7, 2, 7)),
        ("1+1?", (2,)),
    ],
)
def test_chains_worked_by_hand(prompt: str, results: tuple[int, ...]) -> None:
    chain = parse_prompt(prompt)
    assert (chain.results, chain.prompt) == (results, prompt)
    assert evaluate(prompt) == str(results[-1])
    assert parse_prompt(f"<bos>{prompt[:-1]}") == chain


def test_evaluation_agrees_with_python_on_parenthesised_chains() -> None:
    for problem in generate_problems("hard", 200, seed=3):
        chain = parse_prompt(problem.prompt)
        text = str(chain.digits[0])
        for operator, digit in zip(chain.operators, chain.digits[1:], strict=True):
            text = f"({text}{operator}{digit})"
        assert problem.answer == str(eval(text) % 10)


@pytest.mark.parametrize("prompt", ["", "3", "3+", "3+5=8?", "12+3?", "3/5?", "3+5??", "a"])
def test_what_is_no_chain_is_refused(prompt: str) -> None:
    refuses("not an arithmetic chain", parse_prompt, prompt)


@pytest.mark.parametrize("level", ["easy", "medium", "hard", (2, 2), (1, 3)])
def test_problems_are_distinct_stable_and_within_their_level(level: str | tuple[int, int]) -> None:
    problems = generate_problems(level, 150, seed=1)
    assert problems == generate_problems(level, 150, seed=1)
    assert problems != generate_problems(level, 150, seed=2)
    assert len({problem.id for problem in problems}) == len({problem.prompt for problem in problems}) == 150
    fewest, most = LEVELS[level] if isinstance(level, str) else level
    sizes = {parse_prompt(problem.prompt).n_ops for problem in problems}
    assert sizes == set(range(fewest, most + 1))


def test_first_problems_are_the_ones_that_shipped_results_refer_to() -> None:
    # A change of the generator would silently change what every measured number is about.
    assert [problem.id for problem in generate_problems("medium", 2, seed=0)] == ["chain:9*7+9-5*8", "chain:4-9-9+9-4"]


def test_easy_has_all_300_chains_and_no_more() -> None:
    prompts = {problem.prompt for problem in generate_problems("easy", 300, seed=0)}
    assert prompts == {problem.prompt for problem in generate_problems("easy", 300, seed=7, split="train")}
    refuses("only 300 distinct", generate_problems, "easy", 301, seed=0)


@pytest.mark.parametrize("level", ["medium", "hard", (2, 3)])
def test_training_and_evaluation_chains_never_meet(level: str | tuple[int, int]) -> None:
    evaluation = {problem.id for problem in generate_problems(level, 500, seed=0)}
    training = {problem.id for seed in range(3) for problem in generate_problems(level, 1000, seed, split="train")}
    assert not evaluation & training
    assert all(in_split(parse_prompt(id.removeprefix("chain:")), "train") for id in training)


def test_the_base_never_reads_an_evaluation_chain() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        chain = parse_prompt(sample_document(CorpusConfig(), rng).prompt)
        assert chain.n_ops == 1 or not in_split(chain, "eval")


def test_unknown_levels_and_empty_ranges_are_refused() -> None:
    refuses("unknown level 'esay'", generate_problems, "esay", 1, seed=0)
    refuses("found 3 and 2", generate_problems, (3, 2), 1, seed=0)


def test_eval_problems_are_in_order_of_level() -> None:
    assert [problem.level for problem in eval_problems(2)] == ["easy"] * 2 + ["medium"] * 2 + ["hard"] * 2
