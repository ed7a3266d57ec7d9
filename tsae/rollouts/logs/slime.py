"""slime: what it saves of every rollout with --save-debug-rollout-data or --dump-details, ``{rollout_id}.pt``.

Read off THUDM/slime's ``observability/rollout_data_utils.py`` and ``utils/types.py`` (main, 2026). A file is a
``torch.save`` of rollout_id and samples, with tokens (prompt and response), response_length, response, prompt, label,
reward, loss_mask, status, weight_versions, group_index and index. Files that hold more than tensors and plain
containers are refused.

- A rollout_id counts from 0, and is the number of rollouts that were trained on before it. weight_versions counts the
  updates of the engine's weights, the first of which is the weights before training: where a sample has one, it says
  which weights sampled it.
- loss_mask marks, among the response tokens, those that the policy sampled.
- reward is a number, or a table of them of which ``--reward-key`` names the one that is trained on; the log does not
  hold that name. A score is taken for the total where there is one, and an acc says what is right.
- ``eval_{rollout_id}.pt`` holds evaluations, and is read where that file is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Split,
    Unusable,
    answer_text,
    each_row,
    get,
    is_conversation,
    logprobs_of,
    marks,
    score,
    split_by_mask,
    token_ids,
    whole,
)
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)(?![^/]*eval)([^/]*_)?(?P<step>\d+)\.pt$")
_ENDS: dict[str, Literal["stop", "length"]] = {"completed": "stop", "truncated": "length"}


def fits(row: Row, config: ImportConfig) -> bool:
    return {"tokens", "response_length", "reward", "status"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    evaluation = FILE.search(file.path.as_posix()) is None

    def of(row: Row, where: str) -> Iterator[Entry]:
        status = str(get(row, "status", where))
        if status not in _ENDS:
            raise Unusable("errored", f"its status is {status}", where=where)
        if row.get("multimodal_inputs"):
            raise TsaeError(
                "its prompt has images or sound, which are not read", where=where, fix="Give a log of text alone."
            )
        prompt, response, sampled = _tokens(row, where)
        rewards = _rewards(row["reward"], where)
        step = whole(row.get("rollout_id"), "rollout_id", where)
        updates, mixed = _updates(row, None if evaluation else step)
        asked, right = row.get("prompt"), rewards.get("acc")
        yield Entry(
            where,
            prompt=asked if isinstance(asked, str) or is_conversation(asked) else None,
            prompt_ids=prompt,
            response_ids=response,
            sampled=sampled,
            # The text goes on behind the last sampled token, where something does.
            response=str(row["response"]) if row.get("response") and len(response) == row["response_length"] else None,
            rewards=rewards,
            reward=rewards.get("score") if len(rewards) > 1 else next(iter(rewards.values()), None),
            unscored=all(value is None for value in rewards.values()),
            correct=None if right is None else right > 0,
            answer=answer_text(row.get("label")),
            step=step,
            updates=updates,
            group=None if row.get("group_index") is None else str(row["group_index"]),
            logprobs=logprobs_of(row.get("rollout_log_probs"), response, n=row["response_length"]),
            template=kwargs if isinstance(kwargs := row.get("apply_chat_template_kwargs"), dict) else {},
            finish_reason=_ENDS[status],
            assumed=mixed,
        )

    return each_row(file, config, of)


def _tokens(row: Row, where: str) -> Split:
    ids = token_ids(get(row, "tokens", where), "tokens", where)
    length = whole(get(row, "response_length", where), "response_length", where) or 0
    if not 0 <= length < max(len(ids), 1):
        raise TsaeError(
            f"{length} response tokens of {len(ids)} in all", where=where, fix="Correct or drop that sample."
        )
    if not length:
        raise Unusable("empty", "the response is empty", where=where)
    mask = row.get("loss_mask")
    sampled = np.ones(length, dtype=bool) if mask is None else marks(mask, "loss_mask", where)
    if len(sampled) != length:
        raise TsaeError(
            f"{len(sampled)} values of loss_mask but {length} response tokens", where=where, fix="Correct that sample."
        )
    return split_by_mask(ids, np.concatenate([np.zeros(len(ids) - length, dtype=bool), sampled]), where)


def _rewards(found: Any, where: str) -> dict[str, float | None]:
    if not isinstance(found, Mapping):
        return {"reward": score(found, "reward", where)}
    return {
        str(name): score(float(value) if isinstance(value, bool) else value, str(name), where)
        for name, value in found.items()
        if isinstance(value, (bool, int, float))
    }


def _updates(row: Row, rollout_id: int | None) -> tuple[int | None, str | None]:
    """(updates that the weights had behind them, what was assumed)."""
    versions = [int(version) for version in row.get("weight_versions") or [] if str(version).isdigit()]
    if not versions:
        return rollout_id, None
    first, last = min(versions) - 1, max(versions) - 1
    return max(last, 0), None if first == last else "were sampled while weights were updated: named after the newest"
