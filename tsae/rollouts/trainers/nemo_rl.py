"""NeMo-RL: its GRPO logs the training data of each step to ``train_data_step{N}.jsonl`` in the logger's folder.

After the source of NVIDIA-NeMo/RL (``algorithms/grpo.py`` and ``utils/logger.py``, main, 2026). A row has content,
rewards, input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, prev_logprobs and
idx. The batch axis is kept: every value but idx is a list of one.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tsae.rollouts.logs.adapters import Format, by_row, has, logprobs_of, masked_entry
from tsae.rollouts.logs.entry import Entry, Fields


def _entry(row: Fields) -> Entry:
    if "token_ids" not in row:
        raise row.error(
            "has no token_ids: a log of an early NeMo-RL, whose content cannot be put back together exactly",
            "Give a log of a version that writes token_ids and token_loss_mask.",
        )
    for name in ("input_lengths", "token_loss_mask", "rewards"):
        row.need(name)
    row = row.inside({name: _only(value) for name, value in row.row.items()})
    length = row.whole("input_lengths")
    if length is not None and length < 1:
        raise row.error(f"input_lengths is {length}", "Correct or drop that line.")
    rewards = row.inside({"rewards": row.row.get("filtered_rewards", row.row["rewards"])})
    logprobs, step = row.row["generation_logprobs"], row.file.step
    entry = masked_entry(
        # Padded as the batch is.
        row.inside({**row.row, **{name: _head(row.get(name), length) for name in ("token_ids", "advantages")}}),
        _sampled(row.marks("token_loss_mask")[:length], np.asarray(logprobs, dtype=float)[:length]),
        {"reward": rewards.score("rewards")},
        step=step,
        updates=None if step is None else step - 1,
        key=None if row.get("idx") is None else f"{step}/{row.row['idx']}",
        logprobs=_head(logprobs, length) if isinstance(logprobs, list) else None,
    )
    before, after = entry.prompt_ids, entry.response_ids
    assert before is not None
    assert after is not None
    old = logprobs_of(_head(row.get("prev_logprobs"), length), after, before=len(before), n=length)
    if old is not None and old.any():
        entry.training["old_logprobs"] = old.astype(np.float32)
    if "filtered_rewards" not in row:
        entry.assumed = "have the column rewards as their reward: no filtered_rewards, as with dynamic sampling"
    return entry


def _sampled(mask: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
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


def _head(values: Any, length: int | None) -> Any:
    return values[:length] if isinstance(values, list) else values


def _only(value: Any) -> Any:
    """The element of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


FORMAT = Format(
    "nemo-rl",
    "NeMo-RL training data",
    by_row(_entry),
    has("rewards", "input_lengths", "generation_logprobs", "idx"),
    re.compile(r"(^|/)train_data_step(?P<step>\d+)\.jsonl$"),
    a_file_a_step=True,
)
