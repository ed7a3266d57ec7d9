"""verl: what ``trainer.rollout_data_dir`` (or ``validation_data_dir``) is filled with, one JSONL file a step.

Read off the source of verl 0.8's ``RayPPOTrainer`` (main, 2026). ``{dir}/{global_steps}.jsonl`` has input, output, gts,
score, step, and whatever the reward function returned beside the score (``acc``, ``pred``, …); older versions have no
gts, newer ones a request_id.

- input is the prompt *after* the chat template, decoded without special tokens. It is put back: the checkpoint's
  template is rendered around the question, and has to give the logged text again.
- There is no problem id (a uid, where a fork writes one, names a group of one step): equal input and gts are one
  problem.
- score is the sum of the token-level scores, shaping such as DAPO's length penalty with it; where there is an ``acc``,
  that says what is right.
- output is decoded without special tokens, and no finish reason is logged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, answer_text, each_row, get, number, text, truth, whole
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)(?P<step>\d+)\.jsonl$")
_OWN = {"input", "output", "gts", "step", "uid", "request_id"}


def fits(row: Row, config: ImportConfig) -> bool:
    return {"input", "output", "score"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        score = number(get(row, "score", where), "score", where)
        rewards = {"score": score}
        for name, value in row.items():
            if name == "acc":
                # numpy's booleans are logged as text.
                right = truth(value, name, where) if isinstance(value, (str, bool)) else number(value, name, where)
                rewards[name] = None if right is None else float(right)
            elif name not in _OWN and isinstance(value, (int, float)):
                rewards[name] = number(value, name, where)
        step = whole(row.get("step"), "step", where)
        step = file.step if step is None else step
        yield Entry(
            where,
            prompt=text(get(row, "input", where), "input", where),
            prompt_is="stripped",
            response=text(get(row, "output", where), "output", where),
            rewards=rewards,
            reward=score,
            decides="acc" if rewards.get("acc") is not None else "score",
            answer=answer_text(row.get("gts")),
            step=step,
            # Steps are counted from 1, and responses sampled before the step's update.
            updates=None if step is None else step - 1,
            key=None if row.get("request_id") is None else f"{step}/{row['request_id']}",
        )

    return each_row(file, config, of)
