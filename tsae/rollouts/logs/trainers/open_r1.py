"""open-r1: data sets of generations, a row a problem; and other tables with the responses and rewards of a problem.

After the source of huggingface/open-r1 (``scripts/pass_rate_filtering/compute_pass_rate.py``: prompt,
pass_rate_generations, pass_rate_rewards beside the columns of the source) and OpenR1-Math-220k (problem, answer,
solution, generations, correctness_math_verify, finish_reasons, uuid).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.conversations import is_conversation
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, Row, read_list
from tsae.rollouts.logs.entries.log_format import Format, by_row, each_response

_GENERATIONS = ("pass_rate_generations", "generations", "responses", "completions")
_REWARDS = ("pass_rate_rewards", "rewards", "scores", "score")
_CORRECT = ("correctness_math_verify", "is_correct")
_PROMPTS = ("problem", "question")


def _fits(row: Row, config: ImportConfig) -> bool:
    # A user who names the column of responses has a plain log.
    named = config.columns.response in _GENERATIONS
    prompt = next((row[name] for name in (config.columns.prompt, *_PROMPTS) if row.get(name) is not None), None)
    asked = isinstance(prompt, str) or is_conversation(prompt)
    lists = [name for name in _GENERATIONS if isinstance(read_list(row.get(name)), list)]
    return not named and (asked or any(name in _GENERATIONS[:2] for name in lists)) and bool(lists)


def _split(row: Fields) -> Iterator[Fields]:
    """The generations of a row, each with its own reward, correctness and finish reason."""
    names = row.config.columns
    told = (*_REWARDS, names.reward, *_CORRECT, names.correct)
    column = next((name for name in _GENERATIONS if isinstance(read_list(row.get(name)), list)), None)
    prompt = row.get(names.prompt, *_PROMPTS)
    if column is None or not (isinstance(prompt, str) or is_conversation(prompt)):
        fix = "Name the column of the prompt (--column prompt=NAME)."
        raise row.error(f"has no generations, or no prompt or problem; its columns are {', '.join(row.row)}", fix)
    # Of these names, others use some for a number of the whole problem.
    about = {name for name in told if not isinstance(read_list(row.get(name)), list)} - {_REWARDS[0], _CORRECT[0]}
    row = replace(row, row={name: value for name, value in row.row.items() if name not in about})
    for each in each_response(
        row, column, (*told, "finish_reasons"), whole=(names.prompt, *_PROMPTS, names.answer, "solution")
    ):
        yield replace(each, row={**each.row, "generation": each.row[column]})


def _entry(row: Fields) -> Entry:
    names = row.config.columns
    name = next((name for name in (*_REWARDS, names.reward) if name in row), names.reward)
    value = row.score(name)
    correct = next((name for name in (*_CORRECT, names.correct) if name in row), names.correct)
    return Entry(
        row.where,
        prompt=row.get(names.prompt, *_PROMPTS),
        response=row.text("generation"),
        rewards={} if value is None else {name: value},
        unscored=name in row and value is None,
        correct=row.truth(correct),
        answer=row.answer(names.answer, "solution"),
        level=row.label(names.level),
        problem_id=None
        if names.by_prompt
        else row.inside({names.problem_id: row.get(names.problem_id, "uuid")}).label(names.problem_id),
        policy=row.label(names.policy),
        finish_reason=row.finish("finish_reasons"),
    )


FORMAT = Format("open-r1", "open-r1 generations", by_row(_entry, _split), _fits)
