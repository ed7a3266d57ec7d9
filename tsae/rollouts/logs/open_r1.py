"""open-r1: data sets of generations, a row a problem, as JSON lines or Parquet.

Read off huggingface/open-r1's ``scripts/pass_rate_filtering/compute_pass_rate.py`` (prompt, pass_rate_generations,
pass_rate_rewards beside the columns of the source) and OpenR1-Math-220k (problem, answer, solution, generations,
correctness_math_verify, finish_reasons, uuid). Texts alone, decoded without special tokens; prompts are questions, and
the run's system prompt is not in the data set. There is no training step, and all generations are one policy's: name it
with ``--run``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    score,
    text,
    truth,
)
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.plain import finish

_GENERATIONS = ("pass_rate_generations", "generations")


def fits(row: Row, config: ImportConfig) -> bool:
    return any(isinstance(row.get(name), list) for name in _GENERATIONS)


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    names = config.columns

    def of(row: Row, where: str) -> Iterator[Entry]:
        column = next((name for name in _GENERATIONS if isinstance(row.get(name), list)), None)
        prompt = _first(row, names.prompt, "problem", "question")
        if column is None or not (isinstance(prompt, str) or is_conversation(prompt)):
            raise TsaeError(
                f"has no generations, or no prompt or problem; its columns are {', '.join(row)}",
                where=where,
                fix="Name the column of the prompt (--column prompt=NAME).",
            )
        generations = row[column]
        rewards = _aligned(row, "pass_rate_rewards", generations, where)
        correct = _aligned(row, "correctness_math_verify", generations, where)
        reasons = _aligned(row, "finish_reasons", generations, where)
        problem = label(_first(row, names.problem_id, "uuid"), names.problem_id, where)
        level, policy = (label(row.get(name), name, where) for name in (names.level, names.policy))
        for generation, reward, right, reason in zip(generations, rewards, correct, reasons, strict=True):
            value = score(reward, "pass_rate_rewards", where)
            yield Entry(
                where,
                prompt=prompt,
                response=text(generation, column, where),
                rewards={} if value is None else {"pass_rate_rewards": value},
                reward=value,
                unscored="pass_rate_rewards" in row and value is None,
                correct=truth(right, "correctness_math_verify", where),
                answer=answer_text(_first(row, names.answer, "solution")),
                level=level,
                problem_id=problem,
                policy=policy,
                finish_reason=finish(reason),
            )

    return each_row(file, config, of)


def _first(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _aligned(row: Row, name: str, generations: list[Any], where: str) -> list[Any]:
    values = row.get(name)
    if values is None:
        return [None] * len(generations)
    if not isinstance(values, list) or len(values) != len(generations):
        found = len(values) if isinstance(values, list) else type(values).__name__
        raise TsaeError(
            f"{len(generations)} generations but {name} is {found}", where=where, fix="Correct or drop that row."
        )
    return values
