"""open-instruct: the traces that its GRPO writes with ``--save_traces``, in JSONL shards of 10,000.

After the source of allenai/open-instruct (``rl_utils.RolloutRecord``, pull request 1406, January 2026, and later).
``{rollouts_save_path}/{run}_rollouts_{shard:06d}.jsonl`` has step, sample_idx, prompt_idx, prompt_tokens,
response_tokens, reward, advantage, finish_reason, dataset, ground_truth, request_info and, later, logprobs; a
``{run}_metadata.jsonl`` stands beside the shards.
"""

from __future__ import annotations

import re

from tsae.rollouts.logs.adapters import Format, by_row, has, logprobs_of
from tsae.rollouts.logs.entry import Entry, Fields


def _entry(row: Fields) -> Entry:
    step = row.whole("step", needed=True)
    request = row.get("request_info")
    if isinstance(request, dict) and request.get("tool_calleds"):
        raise row.unusable("multi-turn", "the response holds a tool's output, and no mask says where")
    response = row.ids("response_tokens")
    return Entry(
        row.where,
        prompt_ids=row.ids("prompt_tokens"),
        response_ids=response,
        logprobs=logprobs_of(row.get("logprobs"), response),
        rewards={"reward": row.logged_score("reward")},
        answer=row.answer("ground_truth"),
        step=step,
        updates=step,
        advantage=row.number("advantage"),
        group=None if row.get("prompt_idx") is None else str(row.row["prompt_idx"]),
        finish_reason=row.finish("finish_reason"),
        key=f"{step}/{row.need('sample_idx')}",
    )


FORMAT = Format(
    "open-instruct",
    "open-instruct traces",
    by_row(_entry),
    has("step", "sample_idx", "prompt_tokens", "response_tokens", "reward"),
    re.compile(r"(^|/)(?P<run>[^/]+)_rollouts_\d{6}\.jsonl$"),
    synchronous=False,
)
