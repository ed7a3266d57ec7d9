"""Logs that hold token ids: tsae's own, open-instruct, NeMo-RL, slime, Atropos.

tsae: the run log of `tsae.rl.run_log`, ``generations/generation-{number}-rank-{process}.parquet``.

A row is a response with the token ids as they were sampled. A step's responses are those that its generation sampled,
whatever the steps that use them; ``micro_batch`` says which do. Facts of the problem are ``data/NAME``.

open-instruct: the traces that its GRPO writes with ``--save_traces``, in JSONL shards of 10,000.

After the source of allenai/open-instruct (``rl_utils.RolloutRecord``, pull request 1406, January 2026, and later).
``{rollouts_save_path}/{run}_rollouts_{shard:06d}.jsonl`` has step, sample_idx, prompt_idx, prompt_tokens,
response_tokens, reward, advantage, finish_reason, dataset, ground_truth, request_info and, later, logprobs; a
``{run}_metadata.jsonl`` stands beside the shards.

NeMo-RL: its GRPO logs the training data of each step to ``train_data_step{N}.jsonl`` in the logger's folder.

After the source of NVIDIA-NeMo/RL (``algorithms/grpo.py`` and ``utils/logger.py``, main, 2026). A row has content,
rewards, input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, prev_logprobs and
idx. The batch axis is kept: every value but idx is a list of one.

slime: what it saves of every rollout with --save-debug-rollout-data or --dump-details, ``{rollout_id}.pt``.

After the source of THUDM/slime (``observability/rollout_data_utils.py`` and ``utils/types.py``, main, 2026). A file is
a ``torch.save`` of rollout_id and samples, with tokens (prompt and response), response_length, response, prompt, label,
reward, loss_mask, status, weight_versions, group_index and index. Files that hold more than tensors and plain
containers are refused.

Atropos: the groups of an environment, ``--env.data_path_to_save_groups``. A line is a group of scored sequences.

After the source of NousResearch/atropos (``envs/base.py``, 2026). A line has lists with one value a sequence: tokens,
masks (a token's id, or -100 where the policy did not sample it), scores and, if they are known, advantages,
inference_logprobs and messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from tsae.rollouts.logs.adapters import (
    Format,
    Split,
    by_row,
    each_response,
    is_conversation,
    logprobs_of,
    masked_entry,
    messages_of,
    split_by_mask,
)
from tsae.rollouts.logs.entry import Entry, Fields, is_score
from tsae.rollouts.schema import TRAINING

_LOGPROBS_TSAE = tuple(field.name for field in TRAINING if field.name.endswith("logprobs"))


def _tsae_entry(row: Fields) -> Entry:
    names, step = row.config.columns, row.count("step")
    data = row.inside({name.removeprefix("data/"): v for name, v in row.row.items() if name.startswith("data/")})
    response, mask = row.ids("response_ids"), None
    if row.get("response_mask") is not None:
        mask = _tsae_one_a_token(row, "response_mask", response) > 0
    messages, truncated = messages_of(row.get("messages")), row.truth("truncated")
    training = {"generation": row.count("generation"), "micro_batch": row.ids("micro_batch")}
    key = f"{training['generation']}/{row.count('rank')}/{row.line}"
    return Entry(
        row.where,
        prompt=row.text("prompt") if row.get("prompt") is not None else messages,
        prompt_ids=row.ids("prompt_ids"),
        response_ids=response,
        sampled=None if mask is None or mask.all() or not mask.any() else mask,
        masked=frozenset({"prompt", "response"}),
        rewards={n.removeprefix("reward/"): row.score(n) for n in row.row if n.startswith("reward/")},
        reward=row.score("reward"),
        answer=data.answer(names.answer),
        level=data.label(names.level),
        problem_id=None if names.by_prompt else data.label(names.problem_id),
        step=step,
        updates=step - 1,
        advantage=row.number("advantage"),
        advantage_varies=row.get("token_advantages") is not None,
        logprobs=logprobs_of(row.get("sampler_logprobs"), response),
        finish_reason=None if truncated is None else "length" if truncated else "stop",
        key=key,
        apart=key,  # Every row is a response of its own, however equal.
        training=training | {n: _tsae_one_a_token(row, n, response) for n in _LOGPROBS_TSAE if row.get(n) is not None},
    )


def _tsae_one_a_token(row: Fields, name: str, response: np.ndarray) -> np.ndarray:
    """(n_response,) values; NaN where there is none."""
    found = np.asarray(row.row[name], dtype=np.float32)
    if found.shape != response.shape:
        row.refuse(f"{name} has {len(found)} values for the {len(response)} response_ids")
    return found


TSAE = Format("tsae", by_row(_tsae_entry))


def _open_instruct_entry(row: Fields) -> Entry:
    step = row.count("step")
    request = row.get("request_info")
    if isinstance(request, dict) and request.get("tool_calleds"):
        row.leave_out("multi-turn", "the response holds a tool's output, and no mask says where")
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


OPEN_INSTRUCT = Format("open-instruct", by_row(_open_instruct_entry))


def _nemo_rl_entry(row: Fields) -> Entry:
    if "token_ids" not in row:
        row.refuse(
            "has no token_ids: a log of an early NeMo-RL, whose content cannot be put back together exactly",
            "Give a log of a version that writes token_ids and token_loss_mask.",
        )
    for name in ("input_lengths", "token_loss_mask", "rewards"):
        row.need(name)
    # The elements of a batch of one.
    row = row.inside({n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in row.row.items()})
    length = row.whole("input_lengths")
    if length is not None and length < 1:
        row.refuse(f"input_lengths is {length}", "Correct or drop that line.")
    rewards = row.inside({"rewards": row.row.get("filtered_rewards", row.row["rewards"])})
    logprobs, step = row.row["generation_logprobs"], row.file.step
    entry = masked_entry(
        # Padded as the batch is.
        row.inside({**row.row, **{name: _nemo_rl_head(row.get(name), length) for name in ("token_ids", "advantages")}}),
        _nemo_rl_sampled(row.marks("token_loss_mask")[:length], np.asarray(logprobs, dtype=float)[:length]),
        {"reward": rewards.score("rewards")},
        step=step,
        updates=None if step is None else step - 1,
        key=None if row.get("idx") is None else f"{step}/{row.row['idx']}",
        logprobs=_nemo_rl_head(logprobs, length) if isinstance(logprobs, list) else None,
    )
    before, after = entry.prompt_ids, entry.response_ids
    assert before is not None
    assert after is not None
    old = logprobs_of(_nemo_rl_head(row.get("prev_logprobs"), length), after, before=len(before), n=length)
    if old is not None and old.any():
        entry.training["old_logprobs"] = old.astype(np.float32)
    if "filtered_rewards" not in row:
        entry.assumed = "have the column rewards as their reward: no filtered_rewards, as with dynamic sampling"
    return entry


def _nemo_rl_sampled(mask: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """(n,) bool: the mask without the prompt's turns of the assistant, whose log-probabilities are 0."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    if logprobs.shape != mask.shape or len(edges) < 4:
        return mask
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        if logprobs[low:high].any():
            found = mask.copy()
            found[:low] = False
            return found
    return mask


def _nemo_rl_head(values: Any, length: int | None) -> Any:
    return values[:length] if isinstance(values, list) else values


NEMO_RL = Format("nemo-rl", by_row(_nemo_rl_entry))


_ENDS_SLIME: dict[str, Literal["stop", "length"]] = {"completed": "stop", "truncated": "length"}

_TOTALS_SLIME = ("score", "reward", "total")
"""What a table of rewards calls the one that is trained on."""


def _slime_entry(row: Fields) -> Entry:
    status = str(row.need("status"))
    if status not in _ENDS_SLIME:
        row.leave_out("errored", f"its status is {status}")
    if row.get("multimodal_inputs"):
        row.refuse("its prompt has images or sound, which are not read", "Give a log of text alone.")
    prompt, response, sampled = _slime_tokens(row)
    rewards, step = _slime_rewards(row), row.whole("rollout_id")
    evaluation = SLIME.named(row.file.path.as_posix()) is None
    updates, mixed = _slime_updates(row, None if evaluation else step)
    asked, right, length = row.get("prompt"), rewards.get("acc"), row.row["response_length"]
    kwargs = row.get("apply_chat_template_kwargs")
    return Entry(
        row.where,
        prompt=_slime_as_json(asked) if isinstance(asked, str) or is_conversation(asked) else None,
        prompt_ids=prompt,
        response_ids=response,
        sampled=sampled,
        masked=frozenset() if row.get("loss_mask") is None else frozenset({"response"}),
        # The text includes what others wrote after the last sampled token.
        response=str(row.row["response"]) if row.get("response") and len(response) == length else None,
        rewards=rewards,
        reward=next((rewards[name] for name in _TOTALS_SLIME if name in rewards), None),
        unscored=all(value is None for value in rewards.values()),
        correct=None if right is None else right > 0,
        answer=row.answer("label"),
        step=step,
        updates=updates,
        group=None if row.get("group_index") is None else str(row.row["group_index"]),
        logprobs=logprobs_of(row.get("rollout_log_probs"), response, n=length),
        template=_slime_as_json(kwargs) if isinstance(kwargs, dict) else {},
        finish_reason=_ENDS_SLIME[status],
        assumed=mixed,
    )


def _slime_as_json(value: Any) -> Any:
    """The same as JSON has it: a .pt file may hold tensors, and names that are not texts."""
    return json.loads(json.dumps(value, default=str))


def _slime_tokens(row: Fields) -> Split:
    ids, length = row.ids("tokens"), row.count("response_length")
    if not 0 <= length < max(len(ids), 1):
        row.refuse(f"{length} response tokens of {len(ids)} in all", "Correct or drop that sample.")
    if not length:
        row.leave_out("empty", "the response is empty")
    sampled = np.ones(length, dtype=bool) if row.get("loss_mask") is None else row.marks("loss_mask")
    return split_by_mask(ids, np.concatenate([np.zeros(len(ids) - length, dtype=bool), sampled]), row)


def _slime_rewards(row: Fields) -> dict[str, float | None]:
    found = row.row["reward"]
    if not isinstance(found, Mapping):
        return {"reward": row.score("reward")}
    # Beside the total, which must be a number, the reward function may have returned anything.
    return row.inside({str(n): v for n, v in found.items() if n == "score" or is_score(str(n), v)}).scores()


def _slime_updates(row: Fields, rollout_id: int | None) -> tuple[int | None, str | None]:
    """(updates of the weights, what was assumed)."""
    versions = [int(version) for version in row.get("weight_versions") or [] if str(version).isdigit()]
    if not versions:
        return rollout_id, None
    first, last = min(versions) - 1, max(versions) - 1
    return max(last, 0), None if first == last else "were sampled while weights were updated: named after the newest"


SLIME = Format("slime", by_row(_slime_entry))


_IGNORED_ATROPOS = -100


def _atropos_split(row: Fields) -> Iterable[Fields]:
    return each_response(row, "tokens", ("masks", "scores", "advantages", "inference_logprobs"))


def _atropos_entry(row: Fields) -> Entry:
    found = row.inside({"token_ids": row.row["tokens"], "advantages": row.get("advantages")})
    mask, scores = row.ids("masks") != _IGNORED_ATROPOS, {"scores": row.score("scores")}
    entry = masked_entry(found, mask, scores, step=None, key=None, logprobs=row.get("inference_logprobs"))
    entry.group = str(row.line)
    return entry


ATROPOS = Format("atropos", by_row(_atropos_entry, _atropos_split))
