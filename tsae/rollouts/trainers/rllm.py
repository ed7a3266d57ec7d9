"""rLLM: the episodes that its logger writes, ``episodes/train_step_{N}_epoch_{E}/episode_hash…_id….json``.

After the source of rllm-org/rllm (``utils/episode_logger.py``, main, 2026). A file is one episode with training_step,
epoch, episode_id, task, task_hash, is_correct, termination_reason, metrics and trajectories, each with name, uid,
reward and steps; a step has chat_completions, which are the messages of its model call and the answer, and
model_response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tsae.rollouts.logs.adapters import Format, asked, by_row, has, is_conversation, only_answer
from tsae.rollouts.logs.entry import Entry, Fields

_CUT_OFF = "max_response_length_exceeded"
_FAILED = ("error", "timeout")


def _split(episode: Fields) -> Iterator[Fields]:
    """The trajectories of an episode, each with the episode's columns."""
    if episode.get("termination_reason") in _FAILED:
        raise episode.unusable("errored", f"the episode ended with {episode.row['termination_reason']}")
    trajectories = episode.need("trajectories")
    if not trajectories:
        raise episode.unusable("errored", "the episode has no trajectory")
    for index, trajectory in enumerate(trajectories):
        row = {**episode.row, "trajectory": trajectory, "alone": len(trajectories) == 1}
        yield replace(episode.inside(row), index=index)


def _entry(row: Fields) -> Entry:
    trajectory = row.inside(row.row["trajectory"])
    steps = trajectory.get("steps") or []
    if len(steps) != 1:
        what = f"a trajectory of {len(steps)} steps, which text does not give back as tokens"
        raise row.unusable("multi-turn" if steps else "empty", what)
    messages = steps[0].get("chat_completions")
    if not is_conversation(messages) or len(messages) < 2:
        raise row.unusable("empty", "its step has no chat_completions: no prompt and no answer")
    step = row.whole("training_step", needed=True)
    reward = trajectory.score("reward")
    task, task_id = row.get("task"), row.label("task_hash")
    return Entry(
        row.where,
        prompt=asked(messages[:-1], row),
        response=_answer(messages, steps[0].get("model_response"), row),
        rewards={"reward": reward},
        unscored=reward is None and row.get("is_correct") is None,
        correct=row.truth("is_correct") if row.row["alone"] else None,
        answer=row.inside(task).answer(row.config.columns.answer, "ground_truth") if isinstance(task, dict) else "",
        problem_id=f"{task_id}/{trajectory.row.get('name', '')}" if task_id else None,
        step=step,
        updates=None if step is None else step - 1,
        finish_reason="length" if row.get("termination_reason") == _CUT_OFF else None,
        key=json.dumps([step, row.get("epoch"), row.get("episode_id"), row.index]),
    )


def _answer(messages: list[Any], sampled: Any, row: Fields) -> str:
    """The answer as the model gave it; in the conversation it may have other space around it."""
    content = only_answer(messages[-1:], row)
    if not isinstance(sampled, str) or not sampled:
        return content
    if sampled.strip() != content.strip():
        raise row.unusable("multi-turn", "model_response is not the answer in chat_completions")
    return sampled


FORMAT = Format(
    "rllm",
    "rLLM episodes",
    by_row(_entry, _split),
    has("training_step", "episode_id", "trajectories"),
    re.compile(r"(^|/)((?P<run>[^/]+)/)?episodes/train_step_(?P<step>\d+)_epoch_\d+/episode_hash[^/]*\.json$"),
    suffixes=(".json",),
)
