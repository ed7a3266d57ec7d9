"""verifiers before its traces, and prime-rl before 0.7: a line a rollout, with prompt and completion as messages.

After the source of verifiers 0.1.14 (``utils/save_utils.py``) and of prime-rl 0.6 (its orchestrator). prime-rl writes
``rollouts/step_{N}/train_rollouts.jsonl``, an evaluation of verifiers ``results.jsonl``. A line has example_id, task,
prompt, completion, answer, info, reward, error, is_truncated, stop_condition and metrics, and each metric again as a
column; prime-rl adds env_name, policy_version, off_policy_steps, advantage and is_filtered.
"""

from __future__ import annotations

import re

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.conversations import asked_or_text, only_answer
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, Row, is_score
from tsae.rollouts.logs.entries.log_format import Format, by_row

_NO_METRICS = {
    *("id", "example_id", "reward", "advantage", "policy_version", "off_policy_steps"),
    *("generation_ms", "scoring_ms", "total_ms"),
}


def _fits(row: Row, config: ImportConfig) -> bool:
    # Since 0.2 there is no task.
    return {"prompt", "completion", "reward"} <= row.keys() and ("example_id" in row or {"task", "id"} <= row.keys())


def _entry(row: Fields) -> Entry | None:
    if row.get("error") is not None:
        raise row.unusable("errored", "the rollout ended with an error")
    if row.get("is_filtered") and row.config.subset.endswith("effective"):
        return None
    if row.get("tool_defs") or row.object("info").get("oai_tools"):
        raise row.unusable(
            "multi-turn",
            "its prompt had tools, which the template writes out elsewhere",
            "Train with prime-rl 0.7 or later, whose traces have token ids and masks",
        )
    metrics, reward = _metrics(row), row.score("reward")
    rewards = {"reward" if metrics else row.config.outcome or "reward": reward}
    cut = row.truth("is_truncated")
    return Entry(
        row.where,
        prompt=asked_or_text(row, "prompt"),
        prompt_is="verbatim",
        response=only_answer(row.get("completion"), row),
        rewards=rewards | row.inside(metrics).scores(),
        reward=reward,
        answer=row.answer("answer"),
        problem_id=_problem(row),
        step=row.file.step,
        updates=row.whole("policy_version"),
        advantage=row.number("advantage"),
        finish_reason=None if cut is None else "length" if cut else "stop",
        assumed="were sampled while weights were updated: named after the version that is logged"
        if row.get("off_policy_steps")
        else None,
    )


def _problem(row: Fields) -> str | None:
    example = row.label("example_id" if "example_id" in row else "id", "the example's id")
    return None if example is None else f"{row.label('env_name') or row.label('task') or ''}/{example}"


def _metrics(row: Fields) -> Row:
    """By name; before 0.1.10 they were columns only."""
    found = row.get("metrics")
    if isinstance(found, dict):
        return found
    others = {name: value for name, value in row.row.items() if name not in _NO_METRICS}
    return {n: v for n, v in others.items() if is_score(n, v) and not isinstance(v, bool)}


FORMAT = Format(
    "verifiers",
    "verifiers rollouts",
    by_row(_entry),
    _fits,
    re.compile(r"(^|/)(step_(?P<step>\d+)/(train_)?rollouts|results)\.jsonl$"),
    synchronous=False,
)
