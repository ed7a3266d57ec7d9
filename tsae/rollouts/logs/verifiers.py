"""verifiers before its traces, and prime-rl before 0.7: a line a rollout, with prompt and completion as messages.

Read off verifiers 0.1.14's ``utils/save_utils.py`` and prime-rl 0.6's orchestrator. prime-rl writes
``rollouts/step_{N}/train_rollouts.jsonl``, an evaluation of verifiers ``results.jsonl``. A line has example_id, task,
prompt, completion, answer, info, reward, error, is_truncated, stop_condition and metrics, each metric once more as a
column; prime-rl adds env_name, policy_version, off_policy_steps, advantage and is_filtered.

- Messages go through the checkpoint's chat template; the tokens themselves are not logged. A rollout of several turns,
  or with tools, cannot be put back.
- Every reward function is a metric, and reward their weighted sum; metrics that have no weight are not told apart.
  Where there are no metrics, the reward has no name, and goes by the one that is asked for (``--outcome``).
- A policy version counts the updates of the weights. Where they were updated while it sampled (off_policy_steps), only
  the version that is logged is known.
- is_filtered marks what did not reach the trainer: ``--subset`` train/all keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
    mapping,
    number,
    score,
    text,
    truth,
    whole,
)
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)(step_(?P<step>\d+)/(train_)?rollouts|results)\.jsonl$")


_NO_METRICS = {
    *("id", "example_id", "reward", "advantage", "policy_version", "off_policy_steps"),
    *("generation_ms", "scoring_ms", "total_ms"),
}


def fits(row: Row, config: ImportConfig) -> bool:
    return {"task", "prompt", "completion", "reward"} <= row.keys() and bool(row.keys() & {"example_id", "id"})


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        if row.get("error") is not None:
            raise Unusable("errored", "the rollout ended with an error", where=where)
        if row.get("is_filtered") and config.subset.endswith("effective"):
            return
        if row.get("tool_defs") or mapping(row, "info", where).get("oai_tools"):
            raise Unusable(
                "multi-turn",
                "its prompt had tools, which the template writes out elsewhere",
                where=where,
                fix="Train with prime-rl 0.7 or later, whose traces have token ids and masks",
            )
        prompt, metrics = get(row, "prompt", where), _metrics(row)
        reward = score(row["reward"], "reward", where)
        rewards = {"reward" if metrics else config.outcome or "reward": reward}
        rewards |= {name: score(value, name, where) for name, value in metrics.items()}
        cut = truth(row.get("is_truncated"), "is_truncated", where)
        version = whole(row.get("policy_version"), "policy_version", where)
        yield Entry(
            where,
            prompt=asked(prompt, where) if is_conversation(prompt) else text(prompt, "prompt", where),
            prompt_is="verbatim",
            response=only_answer(row.get("completion"), where),
            rewards=rewards,
            reward=reward,
            unscored=reward is None,
            answer=answer_text(row.get("answer")),
            problem_id=_problem(row, where),
            step=file.step,
            updates=version,
            advantage=number(row.get("advantage"), "advantage", where),
            finish_reason=None if cut is None else "length" if cut else "stop",
            assumed="were sampled while weights were updated: named after the version that is logged"
            if row.get("off_policy_steps")
            else None,
        )

    return each_row(file, config, of)


def _problem(row: Row, where: str) -> str | None:
    env = label(row.get("env_name"), "env_name", where) or label(row.get("task"), "task", where) or ""
    example = label(row["example_id"] if "example_id" in row else row.get("id"), "the example's id", where)
    return None if example is None else f"{env}/{example}"


def _metrics(row: Row) -> Row:
    """By name; before 0.1.10 they were columns alone."""
    if isinstance(row.get("metrics"), dict):
        return row["metrics"]
    others = {name: value for name, value in row.items() if name not in _NO_METRICS}
    return {n: v for n, v in others.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
