"""A plain log: JSON lines or Parquet with one trajectory a row, columns named by the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    is_conversation,
    label,
    number,
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
        reward = number(row.get(names.reward), names.reward, where)
        columns = config.rewards or (() if reward is None else (names.reward,))
        steps = whole(row.get(names.step), names.step, where)
        yield Entry(
            where,
            prompt=prompt,
            prompt_ids=_optional_ids(ids, names.prompt_ids, where),
            response=response,
            response_ids=_optional_ids(ids, names.response_ids, where),
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


def _optional_ids(row: Row, name: str, where: str) -> Any:
    return None if row[name] is None else token_ids(row[name], name, where)
