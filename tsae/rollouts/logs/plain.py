"""A plain log: JSON lines or Parquet with one trajectory a row, columns named by the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    is_conversation,
    label,
    marks,
    number,
    split_by_mask,
    token_ids,
    truth,
    whole,
)
from tsae.rollouts.logs.files import LogFile


def fits(row: Row, config: ImportConfig) -> bool:
    names = config.columns
    return (names.prompt in row or names.prompt_ids in row) and (names.response in row or names.response_ids in row)


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    names = config.columns

    def of(row: Row, where: str) -> Iterator[Entry]:
        if {"problem_id", "policy", "prompt_ids", "response_ids", "outcome", "band"} <= row.keys():
            raise TsaeError(
                "is a table of rollouts already, not a log",
                where=where,
                fix="Give the file to the next stage as it is (Rollouts.read without a config).",
            )
        prompt, response = row.get(names.prompt), row.get(names.response)
        ids = {name: row.get(name) for name in (names.prompt_ids, names.response_ids)}
        has_prompt = isinstance(prompt, str) or is_conversation(prompt) or ids[names.prompt_ids] is not None
        has_response = isinstance(response, str) or ids[names.response_ids] is not None
        if not (has_prompt and has_response):
            missing = [
                name for name, there in ((names.prompt, has_prompt), (names.response, has_response)) if not there
            ]
            raise TsaeError(
                f"has no text in {' and '.join(missing)}; its columns are {', '.join(row)}",
                where=where,
                fix="Name the columns that hold them (--column prompt=NAME --column response=NAME).",
            )
        prompt_ids, response_ids = (_optional_ids(ids, name, where) for name in ids)
        sampled = None
        if row.get(names.response_mask) is not None:
            prompt_ids, response_ids, sampled = _turns(prompt_ids, response_ids, row[names.response_mask], names, where)
            response = None  # Of the text nobody knows whose words it has.
        reward = number(row.get(names.reward), names.reward, where)
        columns = config.rewards or (() if reward is None else (names.reward,))
        steps = whole(row.get(names.step), names.step, where)
        yield Entry(
            where,
            prompt=prompt,
            prompt_ids=prompt_ids,
            response=response,
            response_ids=response_ids,
            sampled=sampled,
            rewards={name: number(row.get(name), name, where) for name in columns},
            reward=reward,
            correct=truth(row.get(names.correct), names.correct, where),
            answer=answer_text(row.get(names.answer)),
            level=label(row.get(names.level), names.level, where),
            problem_id=label(row.get(names.problem_id), names.problem_id, where),
            policy=label(row.get(names.policy), names.policy, where),
            step=steps,
            updates=steps,
            advantage=number(row.get(names.advantage), names.advantage, where),
            finish_reason=finish(row.get(names.finish_reason)),
        )

    return each_row(file, config, of)


def finish(value: Any) -> Literal["stop", "length"] | None:
    """A finish reason where it is one of ours."""
    return cast(Literal["stop", "length"], value) if value in ("stop", "length") else None


def _turns(
    prompt: np.ndarray | None, response: np.ndarray | None, mask: Any, names: ColumnNames, where: str
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """(prompt ids, response ids, which of these were sampled) of a response with a mask."""
    if response is None:
        raise TsaeError(
            f"has {names.response_mask} but no {names.response_ids}, whose tokens it is of",
            where=where,
            fix="Give the response's token ids (--column response_ids=NAME).",
        )
    sampled = marks(mask, names.response_mask, where)
    if sampled.shape != response.shape:
        raise TsaeError(
            f"{names.response_mask} has {len(sampled)} marks for the {len(response)} tokens of {names.response_ids}",
            where=where,
            fix="Correct that row.",
        )
    before = np.zeros(0, dtype=np.int64) if prompt is None else prompt
    split = split_by_mask(
        np.concatenate([before, response]), np.concatenate([np.zeros(len(before), dtype=bool), sampled]), where
    )
    if prompt is None and len(split.prompt):
        raise TsaeError(
            f"{names.response_mask} says that the first token of the response was not sampled",
            where=where,
            fix="Give the prompt's token ids, to which such tokens belong (--column prompt_ids=NAME).",
        )
    return (None if prompt is None else split.prompt), split.response, split.sampled


def _optional_ids(row: Row, name: str, where: str) -> Any:
    return None if row[name] is None else token_ids(row[name], name, where)
