"""ROLL: what its RLVR pipeline writes to ``rollout_dump_dir``, ``rollout_dump_data.step_{N}.jsonl``.

After the source of alibaba/ROLL (``pipeline/rlvr/utils.py``, main, 2026). A file is one line, an object of columns:
global_step, id, prompt, messages (JSON), ground_truth, domain, tag, responses, scores, sampling_params and, by domain,
others.
"""

from __future__ import annotations

import re

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format, by_row, each_of_a_batch, messages_of
from tsae.rollouts.logs.entry import Entry, Fields, Row


def _fits(row: Row, config: ImportConfig) -> bool:
    return {"global_step", "responses", "scores"} <= row.keys() and isinstance(row["responses"], list)


def _entry(row: Fields) -> Entry:
    step = row.whole("global_step", needed=True)
    level, problem = row.row.get("difficulty", row.get(row.config.columns.level)), row.label("id")
    return Entry(
        row.where,
        prompt=messages_of(row.get("messages")) or row.text("prompt"),
        prompt_is="verbatim",
        response=row.text("responses"),
        rewards={"scores": row.score("scores")},
        answer=row.answer("ground_truth"),
        level=row.inside({"level": level}).label("level"),
        # Ids are those of one data set, and a domain may have several.
        problem_id=None if problem is None else f"{row.row.get('domain', '')}/{row.row.get('tag', '')}/{problem}",
        step=step,
        updates=step,
    )


FORMAT = Format(
    "roll",
    "ROLL rollout dump",
    by_row(_entry, each_of_a_batch),
    _fits,
    re.compile(r"(^|/)rollout_dump_data\.step_(?P<step>\d+)\.jsonl$"),
    a_file_a_step=True,
)
