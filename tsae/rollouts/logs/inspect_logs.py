"""Inspect: evaluations as ``.eval`` files, through inspect_ai's own reader (``pip install 'tsae[inspect]'``).

Read off inspect_ai 0.3's ``log/_log.py``. A sample has id, epoch, input, target, messages, output and scores; the
model is the log's.

- The prompt is the conversation before the answer, as solvers made it, through the checkpoint's chat template; token
  ids are not logged. A sample of several turns, with calls of tools or with reasoning apart, cannot be put back.
- A score is a number, a flag, or C, P, I or N (correct, partly, incorrect, no answer: 1, 0.5, 0, 0).
- All responses are one policy's, the model's: name it with ``--run`` where the checkpoint has another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.conversations import asked, only_answer
from tsae.rollouts.logs.entry import Entry, Row, Unusable, answer_text, each_row, get, is_conversation, score
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"\.eval$")
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ENDS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "max_tokens": "length", "model_length": "length"}


def fits(row: Row, config: ImportConfig) -> bool:
    return {"epoch", "input", "messages", "output", "scores"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        if row.get("error") is not None:
            raise Unusable("errored", "the sample ended with an error", where=where)
        messages = get(row, "messages", where)
        first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        if not is_conversation(messages[:first]):
            raise Unusable("empty", "has no messages before its answer", where=where)
        choices = get(row, "output", where).get("choices") or [{}]
        scores = {
            name: value
            for name, found in (row.get("scores") or {}).items()
            if (value := _score(found, name, where)) is not None
        }
        yield Entry(
            where,
            prompt=asked(messages[:first], where),
            response=only_answer(messages[first:], where),
            rewards=dict(scores),
            reward=next(iter(scores.values())) if len(scores) == 1 else None,
            unscored=not scores,
            answer=answer_text(row.get("target")),
            problem_id=f"{row.get('task', '')}/{row['id']}",
            policy=config.run or str(row.get("model", "unknown")),
            finish_reason=_ENDS.get(str(choices[0].get("stop_reason"))),
            key=f"{row.get('task', '')}/{row['id']}/{row['epoch']}",
        )

    return each_row(file, config, of)


def _score(found: Any, name: str, where: str) -> float | None:
    """A score as a number; None where it is a text or several values."""
    value = found.get("value") if isinstance(found, Mapping) else found
    if isinstance(value, str):
        return _GRADES.get(value)
    return score(float(value) if isinstance(value, bool) else value, name, where) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
