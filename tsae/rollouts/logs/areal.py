"""AReaL: the trajectories that it appends to ``rollout/{version}/{task_id}.jsonl`` with ``rollout.dump_to_file``.

Read off AReaL 1.0's ``infra/workflow_executor.py``. A line has task_id, sample_idx, seqlen, prompt_len, head_version,
tail_version, reward, prompt and completion. Evaluations go to ``eval-rollout``, which is not read.

- Texts are decoded with their special tokens: a completion without an end token was cut off. seqlen and prompt_len
  count tokens, so that a text which was sampled as other tokens is found out where their number differs.
- A version is the number of updates behind the weights. Where they were updated while a response was sampled, the
  folder is that of the newest.
- Trajectories of several turns are cut at the number of sampled tokens, not at their first: the log does not tell.
- Files are appended to. Lines that stand there twice, as a run that was started again leaves them, count once.
- There is no reference answer, and a task_id is a number of one process: problems are told by their prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, each_row, get, score, text, whole
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)((?P<run>[^/]+)/)?rollout/(?P<step>\d+)/\d+\.jsonl$")


def fits(row: Row, config: ImportConfig) -> bool:
    return {"task_id", "sample_idx", "tail_version", "prompt", "completion", "reward"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        tail = whole(get(row, "tail_version", where), "tail_version", where)
        head = whole(row.get("head_version", tail), "head_version", where)
        total, asked = (whole(row.get(name), name, where) for name in ("seqlen", "prompt_len"))
        reward = score(row["reward"], "reward", where)
        yield Entry(
            where,
            prompt=text(row["prompt"], "prompt", where),
            prompt_is="rendered",
            response=text(row["completion"], "completion", where),
            response_rendered=True,
            response_length=None if total is None or asked is None else total - asked,
            rewards={"reward": reward},
            reward=reward,
            unscored=reward is None,
            step=tail,
            updates=tail,
            # The number of a task is one process's, and several write into one folder.
            key=json.dumps(dict(row), sort_keys=True),
            assumed=None if head == tail else "were sampled while weights were updated: named after the newest",
        )

    return each_row(file, config, of)
