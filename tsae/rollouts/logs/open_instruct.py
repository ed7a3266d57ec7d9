"""open-instruct: the traces that its GRPO writes with ``--save_traces``, in JSONL shards of 10,000.

Read off allenai/open-instruct's ``rl_utils.RolloutRecord`` (pull request 1406, January 2026, and later).
``{rollouts_save_path}/{run}_rollouts_{shard:06d}.jsonl`` has step, sample_idx, prompt_idx, prompt_tokens,
response_tokens, reward, advantage, finish_reason, dataset, ground_truth, request_info and, later, logprobs; a
``{run}_metadata.jsonl`` stands beside the shards.

- prompt_idx counts within a step: problems are told by prompt tokens and ground truth.
- Shards are appended to: a run that went on from an older checkpoint logs its steps a second time.
- Where a tool was called, its output stands among the response tokens, and no mask says where.
- Steps are counted from 0 (the loop of ``DataPreparationActor``), so that step N has N updates behind it. Sampling is
  asynchronous: the weights are those, or older ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    get,
    logged_score,
    logprobs_of,
    number,
    token_ids,
    whole,
)
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.plain import finish

FILE = re.compile(r"(^|/)(?P<run>[^/]+)_rollouts_\d{6}\.jsonl$")


def fits(row: Row, config: ImportConfig) -> bool:
    return {"step", "sample_idx", "prompt_tokens", "response_tokens", "reward"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        step = whole(get(row, "step", where), "step", where)
        request = row.get("request_info") or {}
        if isinstance(request, dict) and request.get("tool_calleds"):
            raise Unusable("multi-turn", "the response holds a tool's output, and no mask says where", where=where)
        reward = logged_score(row, "reward", where)
        response = token_ids(get(row, "response_tokens", where), "response_tokens", where)
        yield Entry(
            where,
            prompt_ids=token_ids(get(row, "prompt_tokens", where), "prompt_tokens", where),
            response_ids=response,
            logprobs=logprobs_of(row.get("logprobs"), response),
            rewards={"reward": reward},
            reward=reward,
            unscored=reward is None,
            answer=answer_text(row.get("ground_truth")),
            step=step,
            updates=step,
            advantage=number(row.get("advantage"), "advantage", where),
            group=None if row.get("prompt_idx") is None else str(row["prompt_idx"]),
            finish_reason=finish(row.get("finish_reason")),
            key=f"{step}/{get(row, 'sample_idx', where)}",
        )

    return each_row(file, config, of)
