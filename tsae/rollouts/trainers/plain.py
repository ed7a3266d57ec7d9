"""Tables: a plain log, a row a trajectory or a problem; and the data sets of open-r1.

The user names the columns of a plain log. Data sets of open-r1, and tables alike, have a row a problem with all of its
responses and rewards; after the source of huggingface/open-r1 (``scripts/pass_rate_filtering/compute_pass_rate.py``:
prompt, pass_rate_generations, pass_rate_rewards beside the columns of the source) and OpenR1-Math-220k (problem,
answer, solution, generations, correctness_math_verify, finish_reasons, uuid).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import (
    Format,
    asked,
    attended,
    by_row,
    each_response,
    is_conversation,
    messages_of,
    only_answer,
    split_by_mask,
)
from tsae.rollouts.logs.entry import Entry, Fields, Row, is_score, read_list, read_number, total

_TOTAL = ("total", "reward", "score")
_TABLE = {"problem_id", "policy", "prompt_ids", "response_ids", "outcome", "band"}


def _fits(row: Row, config: ImportConfig) -> bool:
    names = config.columns
    if {"generation", "micro_batch", "rank"} <= row.keys():  # A run log of tsae.
        return False
    answered = names.response in row or names.response_ids in row
    dialogue = _dialogue(row, config) is not None and not _fits_open_r1(row, config)
    return dialogue or (answered and (names.prompt in row or names.prompt_ids in row))


def _dialogue(row: Row, config: ImportConfig) -> list[dict[str, Any]] | None:
    """The messages of a row in which the last one is the response."""
    names = config.columns
    if not row.keys().isdisjoint((names.response, names.response_ids)):
        return None
    found = (messages_of(row.get(name)) for name in (names.prompt, "messages"))
    return next((messages for messages in found if messages and messages[-1]["role"] == "assistant"), None)


def _split(row: Fields) -> Iterable[Fields]:
    """The trajectories of a row, whose columns may be lists with a value for each response."""
    names = row.config.columns
    told = (*(row.config.rewards or (names.reward,)), names.correct, names.advantage, names.finish_reason)
    texts, ids = read_list(row.get(names.response)), read_list(row.get(names.response_ids))
    # A response may be a text that looks like a list.
    listed = any(isinstance(value, list) for value in (row.get(names.response), *(read_list(row.get(n)) for n in told)))
    if listed and _is_list_of((str, list, type(None)), texts):
        column = names.response
    elif row.get(names.response) is None and _is_list_of(list, ids):
        column = names.response_ids
    else:
        return [row]
    whole = [name for name in (names.prompt, "messages") if is_conversation(row.get(name))]
    whole += [names.prompt_ids] * (not _is_list_of(list, row.get(names.prompt_ids)))
    aligned = (names.response, names.response_ids, names.response_mask, *told)
    # A list about the problem may happen to be as long.
    whole += [name for name in (names.answer, names.level, *row.config.keep_columns) if name not in aligned]
    return each_response(row, column, aligned, whole)


def _is_list_of(kind: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(inside, kind) for inside in value)


def _entry(row: Fields) -> Entry:
    names = row.config.columns
    if row.row.keys() >= _TABLE:
        fix = "Give the file to the next stage as it is (Rollouts.read without a config)."
        row.refuse("is a table of rollouts already, not a log", fix)
    if is_conversation(told := read_list(row.get(names.prompt))):  # A table of texts keeps lists as JSON.
        row = row.inside({**row.row, names.prompt: told})
    # NaN is how pandas leaves a text empty.
    prompt, response = (None if value != value else value for value in map(row.get, (names.prompt, names.response)))
    if (messages := _dialogue(row.row, row.config)) is not None:
        if row.get("tools"):
            row.leave_out("multi-turn", "its prompt had tools, which the template writes out elsewhere")
        if any(message["role"] == "assistant" for message in messages[:-1]):
            what = "its messages have several turns of the assistant, and nothing says which of them were sampled"
            fix = f"Put the last into a column {names.response}, if it alone was, and the others into {names.prompt}"
            row.leave_out("multi-turn", what, fix)
        prompt, response = asked(messages[:-1], row) or None, only_answer(messages[-1:], row)
    elif is_conversation(response):
        response = only_answer(response, row)
    asks = isinstance(prompt, str) or is_conversation(prompt)
    asks |= prompt is None and row.get(names.prompt_ids) is not None
    answers = isinstance(response, str) or (response is None and row.get(names.response_ids) is not None)
    if asks and not answers and not response and names.response in row:
        row.leave_out("empty", "the response is empty")
    if missing := [name for name, there in ((names.prompt, asks), (names.response, answers)) if not there]:
        fix = "Name the columns that hold them (--column prompt=NAME --column response=NAME)."
        row.refuse(f"has no text in {' and '.join(missing)}; its columns are {', '.join(row.row)}", fix)
    prompt_ids, response_ids = row.optional_ids(names.prompt_ids), row.optional_ids(names.response_ids)
    sampled, (read, heard, masked) = None, attended(row, prompt_ids, response_ids)
    prompt_ids = prompt_ids if prompt_ids is None or read is None else prompt_ids[read]
    if row.get(names.response_mask) is not None:
        prompt_ids, response_ids, sampled = _turns(row, prompt_ids, response_ids, heard)
        masked |= {"response"}
        response = None  # It is not known who wrote which words of the text.
    elif response_ids is not None and heard is not None:
        response_ids = response_ids[heard]
    rewards, reward = _rewards(row)
    step = row.whole(names.step)
    return Entry(
        row.where,
        prompt=prompt,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        sampled=sampled,
        masked=masked,
        rewards=rewards,
        reward=reward,
        unscored=isinstance(logged := read_number(row.get(names.reward)), float) and math.isnan(logged),
        correct=row.truth(names.correct),
        answer=row.answer(names.answer),
        level=row.label(names.level),
        problem_id=None if names.by_prompt else row.label(names.problem_id),
        policy=row.label(names.policy),
        step=step,
        updates=step,
        advantage=row.number(names.advantage),
        finish_reason=row.finish(names.finish_reason),
    )


def _rewards(row: Fields) -> tuple[dict[str, float | None], float | None]:
    """The rewards by name, and the total: a number, or an object of rewards with a total in it, or their sum."""
    name = row.config.columns.reward
    if isinstance(parts := read_list(row.get(name)), dict):
        rewards = row.inside({n: value for n, value in parts.items() if is_score(n, value)}).scores()
        return rewards, next((rewards[n] for n in _TOTAL if rewards.get(n) is not None), total(rewards))
    reward = row.score(name)
    named = row.config.rewards or (() if reward is None else (name,))
    return {name: row.score(name) for name in named}, reward


def _turns(
    row: Fields, prompt: np.ndarray | None, response: np.ndarray | None, heard: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """(prompt ids, response ids, which of these were sampled) of a response with a mask."""
    names = row.config.columns
    if response is None:
        fix = "Give the response's token ids (--column response_ids=NAME)."
        row.refuse(f"has {names.response_mask} but no {names.response_ids}, whose tokens it is of", fix)
    sampled = row.marks(names.response_mask)
    if sampled.shape != response.shape:
        row.refuse(
            f"{names.response_mask} has {len(sampled)} marks for the {len(response)} tokens of {names.response_ids}",
            "Correct that row.",
        )
    if heard is not None:
        response, sampled = response[heard], sampled[heard]
    before = np.zeros(0, dtype=np.int64) if prompt is None else prompt
    mask = np.concatenate([np.zeros(len(before), dtype=bool), sampled])
    split = split_by_mask(np.concatenate([before, response]), mask, row)
    if prompt is None and len(split.prompt):
        fix = "Give the prompt's token ids, to which such tokens belong (--column prompt_ids=NAME)."
        row.refuse(f"{names.response_mask} says that the first token of the response was not sampled", fix)
    return (None if prompt is None else split.prompt), split.response, split.sampled


FORMAT = Format("plain", by_row(_entry, _split), _fits)


_GENERATIONS = ("pass_rate_generations", "generations", "responses", "completions")
_REWARDS = ("pass_rate_rewards", "rewards", "scores", "score")
_CORRECT = ("correctness_math_verify", "is_correct")
_PROMPTS = ("problem", "question")


def _fits_open_r1(row: Row, config: ImportConfig) -> bool:
    # A user who names the column of responses has a plain log.
    named = config.columns.response in _GENERATIONS
    prompt = next((row[name] for name in (config.columns.prompt, *_PROMPTS) if row.get(name) is not None), None)
    asked = isinstance(prompt, str) or is_conversation(prompt)
    lists = [name for name in _GENERATIONS if isinstance(read_list(row.get(name)), list)]
    return not named and (asked or any(name in _GENERATIONS[:2] for name in lists)) and bool(lists)


def _generations(row: Fields) -> Iterator[Fields]:
    """The generations of a row, each with its own reward, correctness and finish reason."""
    names = row.config.columns
    told = (*_REWARDS, names.reward, *_CORRECT, names.correct)
    column = next((name for name in _GENERATIONS if isinstance(read_list(row.get(name)), list)), None)
    prompt = row.get(names.prompt, *_PROMPTS)
    if column is None or not (isinstance(prompt, str) or is_conversation(prompt)):
        fix = "Name the column of the prompt (--column prompt=NAME)."
        row.refuse(f"has no generations, or no prompt or problem; its columns are {', '.join(row.row)}", fix)
    # Of these names, others use some for a number of the whole problem.
    about = {name for name in told if not isinstance(read_list(row.get(name)), list)} - {_REWARDS[0], _CORRECT[0]}
    row = replace(row, row={name: value for name, value in row.row.items() if name not in about})
    for each in each_response(
        row, column, (*told, "finish_reasons"), whole=(names.prompt, *_PROMPTS, names.answer, "solution")
    ):
        yield replace(each, row={**each.row, "generation": each.row[column]})


def _generation(row: Fields) -> Entry:
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


OPEN_R1 = Format("open-r1", by_row(_generation, _generations), _fits_open_r1)
