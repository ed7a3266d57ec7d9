"""verl: what ``trainer.rollout_data_dir`` (or ``validation_data_dir``) is filled with, one JSONL file a step.

Read off the source of verl 0.8's ``RayPPOTrainer`` (main, 2026). ``{dir}/{global_steps}.jsonl`` has input, output, gts,
score, step, and whatever the reward function returned beside the score (``acc``, ``pred``, …); older versions have no
gts, newer ones a request_id.

- input is the prompt *after* the chat template, decoded without special tokens. It is put back: the checkpoint's
  template is rendered around the question, and has to give the logged text again.
- There is no problem id (a uid names a group of one step or, later, a trajectory): equal input and gts are one problem.
- score is the sum of the token-level scores, shaping such as DAPO's length penalty with it. But what the reward
  function returned under the name score takes its place, and then lacks the penalty, which is added here. Where there
  is an ``acc``, that says what is right. Other numbers that the function returned are kept where they are finite.
- A validation dump has a column reward: there the true total, whatever score is. It is sampled *after* the step's
  update, by weights of N updates, where training samples for step N before it.
- output is decoded without special tokens, and no finish reason is logged. What tools said stands in it, and no mask
  says where: with more than two turns (num_turns), or another's header in the text, it is no single response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    get,
    logged_score,
    number,
    score,
    text,
    truth,
    whole,
)
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)(?P<step>\d+)\.jsonl$")
_OWN = {"input", "output", "gts", "step", "uid", "request_id", "num_turns"}


def fits(row: Row, config: ImportConfig) -> bool:
    return {"input", "output", "score"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        turns = row.get("num_turns")
        if isinstance(turns, (int, float)) and turns > 2:
            raise Unusable(
                "multi-turn",
                f"the output holds {turns:g} turns, and nothing says which tokens were sampled",
                where=where,
                fix="Give a log with token ids and masks, which no setting of verl writes",
            )
        rewards, trained_on = _rewards(row, where), _trained_on(row, file)
        total = _total(row, rewards)
        assumed = [] if trained_on else ["are a validation's, sampled after the step's update"]
        if total != rewards["score"]:
            parts = "the column reward" if "reward" in row else "the sum of score and overlong_reward"
            assumed.append(f"have {parts} as their reward")
        step = whole(row.get("step"), "step", where)
        step = file.step if step is None else step
        yield Entry(
            where,
            prompt=text(get(row, "input", where), "input", where),
            prompt_is="stripped",
            response=text(get(row, "output", where), "output", where),
            rewards=rewards,
            reward=total,
            unscored=total is None,
            decides="acc" if rewards.get("acc") is not None else "score",
            answer=answer_text(row.get("gts")),
            step=step,
            # Steps are counted from 1, and step 0 is a validation.
            updates=None if step is None else max(0, step - 1) if trained_on else step,
            assumed=" and ".join(assumed) or None,
            apart=str(rewards.get("overlong_reward", "")),
            key=None if row.get("request_id") is None else f"{step}/{row['request_id']}",
        )

    return each_row(file, config, of)


def validates(path: Path) -> bool:
    """Whether a file is a validation's, by the name of its folder, which the run's config gives it."""
    return re.search(r"(^|[_-])(val|validation|eval|test)([_-]|$)", path.resolve().parent.name) is not None


def _trained_on(row: Row, file: LogFile) -> bool:
    """Whether it is no validation dump: by the folder's name, or where that says nothing, by the total of its own."""
    if validates(file.path):
        return False
    return "reward" not in row or re.search(r"rollout|train", file.path.resolve().parent.name) is not None


def _rewards(row: Row, where: str) -> dict[str, float | None]:
    rewards = {"score": logged_score(row, "score", where)}
    for name, value in row.items():
        if name == "acc":
            # numpy's booleans are logged as text.
            right = truth(value, name, where) if isinstance(value, (str, bool)) else score(value, name, where)
            rewards[name] = None if right is None else float(right)
        elif name not in _OWN | rewards.keys() and isinstance(value, (int, float)):
            rewards[name] = number(value, name, where) if math.isfinite(value) else None
    return rewards


def _total(row: Row, rewards: dict[str, float | None]) -> float | None:
    """What the trainer used."""
    if rewards.get("reward") is not None:
        return rewards["reward"]
    found, penalty = rewards["score"], rewards.get("overlong_reward")
    if found is None or not penalty:
        return found
    acc: Any = row.get("acc")
    # Of a function that returns a number alone, acc is that number, and score the sum with the penalty.
    alone = isinstance(acc, (int, float)) and not isinstance(acc, bool)
    return found if alone and abs(acc + penalty - found) < 1e-6 else found + penalty
