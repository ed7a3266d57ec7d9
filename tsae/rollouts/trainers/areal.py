"""AReaL: the trajectories that ``rollout.dump_to_file`` appends to ``rollout/{version}/{task_id}.jsonl``.

After the source of AReaL 1.0 (``infra/workflow_executor.py``). A line has task_id, sample_idx, seqlen, prompt_len,
head_version, tail_version, reward, prompt and completion. Evaluations go to ``eval-rollout``, which is not read.
"""

from __future__ import annotations

import json
import re

from tsae.rollouts.logs.adapters import Format, by_row, has
from tsae.rollouts.logs.entry import Entry, Fields


def _entry(row: Fields) -> Entry:
    tail = row.whole("tail_version", needed=True)
    head = row.whole("head_version") if "head_version" in row else tail
    total, asked = row.whole("seqlen"), row.whole("prompt_len")
    return Entry(
        row.where,
        prompt=row.text("prompt"),
        prompt_is="rendered",
        response=row.text("completion"),
        response_rendered=True,
        response_length=None if total is None or asked is None else total - asked,
        rewards={"reward": row.score("reward")},
        step=tail,
        updates=tail,
        # The number of a task is one process's, and several write into one folder.
        key=json.dumps(dict(row.row), sort_keys=True),
        assumed=None if head == tail else "were sampled while weights were updated: named after the newest",
    )


FORMAT = Format(
    "areal",
    "AReaL trajectories",
    by_row(_entry),
    has("task_id", "sample_idx", "tail_version", "prompt", "completion", "reward"),
    re.compile(r"(^|/)((?P<run>[^/]+)/)?rollout/(?P<step>\d+)/\d+\.jsonl$"),
    synchronous=False,
)
