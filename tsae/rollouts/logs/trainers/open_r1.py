"""open-r1: data sets of generations, a row a problem, as JSON lines or Parquet.

After the source of huggingface/open-r1 (``scripts/pass_rate_filtering/compute_pass_rate.py``: prompt,
pass_rate_generations, pass_rate_rewards beside the columns of the source) and OpenR1-Math-220k (problem, answer,
solution, generations, correctness_math_verify, finish_reasons, uuid).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.conversations import is_conversation
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, Row
from tsae.rollouts.logs.entries.log_format import Format, by_row

_GENERATIONS = ("pass_rate_generations", "generations")
_TOLD = ("pass_rate_rewards", "correctness_math_verify", "finish_reasons")


def _fits(row: Row, config: ImportConfig) -> bool:
    return any(isinstance(row.get(name), list) for name in _GENERATIONS)


def _split(row: Fields) -> Iterator[Fields]:
    """The generations of a row, each with its own value of the columns of `_TOLD`."""
    names = row.config.columns
    column = next((name for name in _GENERATIONS if isinstance(row.get(name), list)), None)
    prompt = row.get(names.prompt, "problem", "question")
    if column is None or not (isinstance(prompt, str) or is_conversation(prompt)):
        raise row.error(
            f"has no generations, or no prompt or problem; its columns are {', '.join(row.row)}",
            "Name the column of the prompt (--column prompt=NAME).",
        )
    generations = row.row[column]
    told = [_aligned(row, name, len(generations)) for name in _TOLD]
    for generation, *values in zip(generations, *told, strict=True):
        yield row.inside({**row.row, **dict(zip(_TOLD, values, strict=True)), "generation": generation})


def _entry(row: Fields) -> Entry:
    names, name = row.config.columns, _TOLD[0]
    value = row.score(name)
    return Entry(
        row.where,
        prompt=row.get(names.prompt, "problem", "question"),
        response=row.text("generation"),
        rewards={} if value is None else {name: value},
        unscored=row.source is not None and name in row.source and value is None,
        correct=row.truth(_TOLD[1]),
        answer=row.answer(names.answer, "solution"),
        level=row.label(names.level),
        problem_id=None
        if names.by_prompt
        else row.inside({names.problem_id: row.get(names.problem_id, "uuid")}).label(names.problem_id),
        policy=row.label(names.policy),
        finish_reason=row.finish(_TOLD[2]),
    )


def _aligned(row: Fields, name: str, n: int) -> list[Any]:
    values = row.get(name)
    if values is None:
        return [None] * n
    if not isinstance(values, list) or len(values) != n:
        found = len(values) if isinstance(values, list) else type(values).__name__
        raise row.error(f"{n} generations but {name} is {found}")
    return values


FORMAT = Format("open-r1", "open-r1 generations", by_row(_entry, _split), _fits)
