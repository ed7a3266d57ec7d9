"""ROLL: what its RLVR pipeline writes to ``rollout_dump_dir``, ``rollout_dump_data.step_{N}.jsonl``.

Read off alibaba/ROLL's ``pipeline/rlvr/utils.py`` (main, 2026). A file is one line, an object of columns: global_step,
id, prompt, messages (JSON), ground_truth, domain, tag, responses, scores, sampling_params and, by domain, others.

- The policy reads the messages through the chat template where there are any, and the prompt as it stands otherwise. A
  template of ROLL's own (other than native) is not in the log.
- responses are decoded without special tokens: whether one ended by itself is not in the log.
- Steps are counted from 0, so that step N samples with the weights of N updates; with ``async_generation_ratio`` above
  0 they may be older.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.columns import each_of_a_batch, one_by_one
from tsae.rollouts.logs.entry import Entry, Row, Unusable, answer_text, get, is_conversation, label, score, text, whole
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)rollout_dump_data\.step_(?P<step>\d+)\.jsonl$")


def fits(row: Row, config: ImportConfig) -> bool:
    return {"global_step", "responses", "scores"} <= row.keys() and isinstance(row["responses"], list)


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, index: int, where: str) -> Entry:
        return _entry(row, config, where)

    return each_of_a_batch(file, config, lambda rows, where: one_by_one(rows, where, of))


def _entry(row: Row, config: ImportConfig, where: str) -> Entry:
    step = whole(get(row, "global_step", where), "global_step", where)
    messages = _messages(row.get("messages"))
    reward = score(row.get("scores"), "scores", where)
    level, problem = row.get("difficulty", row.get(config.columns.level)), label(row.get("id"), "id", where)
    return Entry(
        where,
        prompt=messages or text(get(row, "prompt", where), "prompt", where),
        prompt_is="verbatim",
        response=text(get(row, "responses", where), "responses", where),
        rewards={"scores": reward},
        reward=reward,
        unscored=reward is None,
        answer=answer_text(row.get("ground_truth")),
        level=label(level, "level", where),
        # Ids are those of one data set, and a domain may have several.
        problem_id=None if problem is None else f"{row.get('domain', '')}/{row.get('tag', '')}/{problem}",
        step=step,
        updates=step,
    )


def _messages(found: Any) -> list[dict[str, Any]] | None:
    try:
        messages = json.loads(found) if isinstance(found, str) else found
    except ValueError:
        return None
    return messages if is_conversation(messages) else None
