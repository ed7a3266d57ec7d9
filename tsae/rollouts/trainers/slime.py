"""slime: what it saves of every rollout with --save-debug-rollout-data or --dump-details, ``{rollout_id}.pt``.

After the source of THUDM/slime (``observability/rollout_data_utils.py`` and ``utils/types.py``, main, 2026). A file is
a ``torch.save`` of rollout_id and samples, with tokens (prompt and response), response_length, response, prompt, label,
reward, loss_mask, status, weight_versions, group_index and index. Files that hold more than tensors and plain
containers are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tsae.rollouts.logs.adapters import Format, Split, by_row, has, is_conversation, logprobs_of, split_by_mask
from tsae.rollouts.logs.entry import Entry, Fields, is_score

# --dump-details also writes train_data/{rollout_id}_{rank}.pt, what each rank trained on, which is not read.
_FILE = re.compile(r"(^|/)(?<!/train_data/)(?![^/]*eval)([^/]*_)?(?P<step>\d+)\.pt$")
_ENDS: dict[str, Literal["stop", "length"]] = {"completed": "stop", "truncated": "length"}


def _entry(row: Fields) -> Entry:
    status = str(row.need("status"))
    if status not in _ENDS:
        raise row.unusable("errored", f"its status is {status}")
    if row.get("multimodal_inputs"):
        raise row.error("its prompt has images or sound, which are not read", "Give a log of text alone.")
    prompt, response, sampled = _tokens(row)
    rewards, step = _rewards(row), row.whole("rollout_id")
    evaluation = _FILE.search(row.file.path.as_posix()) is None
    updates, mixed = _updates(row, None if evaluation else step)
    asked, right, length = row.get("prompt"), rewards.get("acc"), row.row["response_length"]
    kwargs = row.get("apply_chat_template_kwargs")
    return Entry(
        row.where,
        prompt=_as_json(asked) if isinstance(asked, str) or is_conversation(asked) else None,
        prompt_ids=prompt,
        response_ids=response,
        sampled=sampled,
        masked=frozenset() if row.get("loss_mask") is None else frozenset({"response"}),
        # The text includes what others wrote after the last sampled token.
        response=str(row.row["response"]) if row.get("response") and len(response) == length else None,
        rewards=rewards,
        reward=rewards.get("score"),
        unscored=all(value is None for value in rewards.values()),
        correct=None if right is None else right > 0,
        answer=row.answer("label"),
        step=step,
        updates=updates,
        group=None if row.get("group_index") is None else str(row.row["group_index"]),
        logprobs=logprobs_of(row.get("rollout_log_probs"), response, n=length),
        template=_as_json(kwargs) if isinstance(kwargs, dict) else {},
        finish_reason=_ENDS[status],
        assumed=mixed,
    )


def _as_json(value: Any) -> Any:
    """The same as JSON has it: a .pt file may hold tensors, and names that are not texts."""
    return json.loads(json.dumps(value, default=str))


def _tokens(row: Fields) -> Split:
    ids, length = row.ids("tokens"), row.whole("response_length", needed=True) or 0
    if not 0 <= length < max(len(ids), 1):
        raise row.error(f"{length} response tokens of {len(ids)} in all", "Correct or drop that sample.")
    if not length:
        raise row.unusable("empty", "the response is empty")
    sampled = np.ones(length, dtype=bool) if row.get("loss_mask") is None else row.marks("loss_mask")
    return split_by_mask(ids, np.concatenate([np.zeros(len(ids) - length, dtype=bool), sampled]), row)


def _rewards(row: Fields) -> dict[str, float | None]:
    found = row.row["reward"]
    if not isinstance(found, Mapping):
        return {"reward": row.score("reward")}
    # Beside the total, which must be a number, the reward function may have returned anything.
    return row.inside({str(n): v for n, v in found.items() if n == "score" or is_score(str(n), v)}).scores()


def _updates(row: Fields, rollout_id: int | None) -> tuple[int | None, str | None]:
    """(updates of the weights, what was assumed)."""
    versions = [int(version) for version in row.get("weight_versions") or [] if str(version).isdigit()]
    if not versions:
        return rollout_id, None
    first, last = min(versions) - 1, max(versions) - 1
    return max(last, 0), None if first == last else "were sampled while weights were updated: named after the newest"


FORMAT = Format(
    "slime",
    "slime rollout data",
    by_row(_entry),
    has("tokens", "response_length", "reward", "status"),
    _FILE,
    a_file_a_step=True,
    suffixes=(".pt",),
)
