"""A plain log: JSON lines or Parquet with one trajectory a row, columns named by the user."""

from __future__ import annotations

import numpy as np

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.conversations import is_conversation
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, Row
from tsae.rollouts.logs.entries.log_format import Format, by_row
from tsae.rollouts.logs.entries.masks import attended, split_by_mask

_TABLE = {"problem_id", "policy", "prompt_ids", "response_ids", "outcome", "band"}


def _fits(row: Row, config: ImportConfig) -> bool:
    names = config.columns
    return (names.prompt in row or names.prompt_ids in row) and (names.response in row or names.response_ids in row)


def _entry(row: Fields) -> Entry:
    names = row.config.columns
    if row.row.keys() >= _TABLE:
        raise row.error(
            "is a table of rollouts already, not a log",
            "Give the file to the next stage as it is (Rollouts.read without a config).",
        )
    # NaN is how pandas leaves a text empty.
    prompt, response = (None if value != value else value for value in map(row.get, (names.prompt, names.response)))
    has_ids = {name: row.get(name) is not None for name in (names.prompt_ids, names.response_ids)}
    there = {
        names.prompt: isinstance(prompt, str)
        or is_conversation(prompt)
        or (prompt is None and has_ids[names.prompt_ids]),
        names.response: isinstance(response, str) or (response is None and has_ids[names.response_ids]),
    }
    missing = [name for name, found in there.items() if not found]
    if missing:
        raise row.error(
            f"has no text in {' and '.join(missing)}; its columns are {', '.join(row.row)}",
            "Name the columns that hold them (--column prompt=NAME --column response=NAME).",
        )
    prompt_ids, response_ids = row.optional_ids(names.prompt_ids), row.optional_ids(names.response_ids)
    sampled, (read, heard, masked) = None, attended(row, prompt_ids, response_ids)
    prompt_ids = prompt_ids if prompt_ids is None or read is None else prompt_ids[read]
    if row.get(names.response_mask) is not None:
        prompt_ids, response_ids, sampled = _turns(row, prompt_ids, response_ids, heard)
        masked |= {"response"}
        response = None  # It is not known who wrote which words of the text.
    elif response_ids is not None and heard is not None:
        response_ids = response_ids[heard]
    reward = row.number(names.reward)
    columns = row.config.rewards or (() if reward is None else (names.reward,))
    step = row.whole(names.step)
    return Entry(
        row.where,
        prompt=prompt,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        sampled=sampled,
        masked=masked,
        rewards={name: row.number(name) for name in columns},
        reward=reward,
        unscored=False,
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


def _turns(
    row: Fields, prompt: np.ndarray | None, response: np.ndarray | None, heard: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """(prompt ids, response ids, which of these were sampled) of a response with a mask."""
    names = row.config.columns
    if response is None:
        raise row.error(
            f"has {names.response_mask} but no {names.response_ids}, whose tokens it is of",
            "Give the response's token ids (--column response_ids=NAME).",
        )
    sampled = row.marks(names.response_mask)
    if sampled.shape != response.shape:
        raise row.error(
            f"{names.response_mask} has {len(sampled)} marks for the {len(response)} tokens of {names.response_ids}",
            "Correct that row.",
        )
    if heard is not None:
        response, sampled = response[heard], sampled[heard]
    before = np.zeros(0, dtype=np.int64) if prompt is None else prompt
    mask = np.concatenate([np.zeros(len(before), dtype=bool), sampled])
    split = split_by_mask(np.concatenate([before, response]), mask, row)
    if prompt is None and len(split.prompt):
        raise row.error(
            f"{names.response_mask} says that the first token of the response was not sampled",
            "Give the prompt's token ids, to which such tokens belong (--column prompt_ids=NAME).",
        )
    return (None if prompt is None else split.prompt), split.response, split.sampled


FORMAT = Format("plain", "plain log", by_row(_entry), _fits)
