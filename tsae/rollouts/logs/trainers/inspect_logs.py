"""Inspect: evaluations as ``.eval`` files, through inspect_ai's own code (``pip install 'tsae[inspect]'``).

After the source of inspect_ai 0.3 (``log/_log.py``). A sample has id, epoch, input, target, messages, output and
scores; the model is the log's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from tsae.rollouts.logs.entries.conversations import asked, is_conversation, only_answer
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, read_number
from tsae.rollouts.logs.entries.log_format import Format, by_row, has

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ENDS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "max_tokens": "length", "model_length": "length"}


def _entry(row: Fields) -> Entry:
    if row.get("error") is not None:
        raise row.unusable("errored", "the sample ended with an error")
    messages = row.need("messages")
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    if not is_conversation(messages[:first]):
        raise row.unusable("empty", "has no messages before its answer")
    choices = row.need("output").get("choices") or [{}]
    graded = {name: _graded(found) for name, found in (row.get("scores") or {}).items()}
    found = row.inside(graded).scores()
    scores = {name: value for name, value in found.items() if value is not None}
    task = row.row.get("task", "")
    return Entry(
        row.where,
        prompt=asked(messages[:first], row),
        response=only_answer(messages[first:], row),
        rewards=dict(scores),
        unscored=not scores,
        answer=row.answer("target"),
        problem_id=f"{task}/{row.row['id']}",
        policy=row.config.run or str(row.row.get("model", "unknown")),
        finish_reason=_ENDS.get(str(choices[0].get("stop_reason"))),
        key=f"{task}/{row.row['id']}/{row.row['epoch']}",
    )


def _graded(found: Any) -> float | None:
    """A score as a number; None for a text or several values."""
    value = found.get("value") if isinstance(found, Mapping) else found
    if isinstance(value, str):
        value = _GRADES.get(value, read_number(value))
    return float(value) if isinstance(value, (bool, int, float)) else None


FORMAT = Format(
    "inspect",
    "Inspect log",
    by_row(_entry),
    has("epoch", "input", "messages", "output", "scores"),
    re.compile(r"\.eval$"),
    suffixes=(".eval",),
)
