"""rLLM: the episodes that its logger writes, ``episodes/train_step_{N}_epoch_{E}/episode_hash…_id….json``.

Read off rllm-org/rllm's ``utils/episode_logger.py`` (main, 2026). A file is one episode with training_step, epoch,
episode_id, task, task_hash, is_correct, termination_reason, metrics and trajectories, each with name, uid, reward and
steps; a step has chat_completions, the messages of its model call with the answer at their end, and model_response.

- Messages go through the checkpoint's chat template; token ids are not logged. A trajectory of several steps cannot be
  put back.
- An episode of several trajectories (a solver's and a judge's) gives one for each, under the trajectory's own reward;
  is_correct is said of episodes, and counts where there is one trajectory.
- Steps are counted from 1, and sampled before the step's update. Validation (``val_step_…``) is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.conversations import asked, only_answer
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    get,
    is_conversation,
    label,
    score,
    truth,
    whole,
)
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)((?P<run>[^/]+)/)?episodes/train_step_(?P<step>\d+)_epoch_\d+/episode_hash[^/]*\.json$")
_CUT_OFF = "max_response_length_exceeded"
_FAILED = ("error", "timeout")


def fits(row: Row, config: ImportConfig) -> bool:
    return {"training_step", "episode_id", "trajectories"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry | Unusable]:
        if row.get("termination_reason") in _FAILED:
            raise Unusable("errored", f"the episode ended with {row['termination_reason']}", where=where)
        trajectories = get(row, "trajectories", where)
        if not trajectories:
            raise Unusable("errored", "the episode has no trajectory", where=where)
        for index, trajectory in enumerate(trajectories):
            try:
                yield _entry(row, trajectory, index, len(trajectories) == 1, config, where)
            except Unusable as unusable:
                yield unusable

    return each_row(file, config, of)


def _entry(row: Row, trajectory: Row, index: int, alone: bool, config: ImportConfig, where: str) -> Entry:
    steps = trajectory.get("steps") or []
    if len(steps) != 1:
        raise Unusable(
            "multi-turn" if steps else "empty",
            f"a trajectory of {len(steps)} steps, which text does not give back as tokens",
            where=where,
        )
    messages = steps[0].get("chat_completions")
    if not is_conversation(messages) or len(messages) < 2:
        raise Unusable("empty", "its step has no chat_completions: no prompt and no answer", where=where)
    step = whole(get(row, "training_step", where), "training_step", where)
    reward = score(trajectory.get("reward"), "reward", where)
    task, reason = row.get("task"), row.get("termination_reason")
    task_id = label(row.get("task_hash"), "task_hash", where)
    return Entry(
        where,
        prompt=asked(messages[:-1], where),
        response=_answer_text(messages, steps[0].get("model_response"), where),
        rewards={"reward": reward},
        reward=reward,
        unscored=reward is None and row.get("is_correct") is None,
        correct=truth(row.get("is_correct"), "is_correct", where) if alone else None,
        answer=answer_text(_answer(task, config)),
        problem_id=f"{task_id}/{trajectory.get('name', '')}" if task_id else None,
        step=step,
        updates=None if step is None else step - 1,
        finish_reason="length" if reason == _CUT_OFF else None,
        key=json.dumps([step, row.get("epoch"), row.get("episode_id"), index]),
    )


def _answer_text(messages: list[Any], sampled: Any, where: str) -> str:
    """The answer as the model gave it, which the conversation may have with other space around it."""
    content = only_answer(messages[-1:], where)
    if not isinstance(sampled, str) or not sampled:
        return content
    if sampled.strip() != content.strip():
        raise Unusable("multi-turn", "model_response is not the answer in chat_completions", where=where)
    return sampled


def _answer(task: Any, config: ImportConfig) -> Any:
    if not isinstance(task, dict):
        return None
    return next((task[name] for name in (config.columns.answer, "ground_truth") if task.get(name) is not None), None)
