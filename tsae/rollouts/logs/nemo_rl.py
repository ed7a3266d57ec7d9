"""NeMo-RL: the training data that its GRPO logs, ``train_data_step{N}.jsonl`` in the logger's folder.

Read off NVIDIA-NeMo/RL's ``algorithms/grpo.py`` and ``utils/logger.py`` (main, 2026). A row has content, rewards,
input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, prev_logprobs and idx; the
batch axis is kept, so that every value but idx is a list of one.

- token_ids are padded to the batch's width; input_lengths says where they end. The masked tokens are the response;
  what the environment said after it is dropped, and what it said in between is marked. The mask covers every turn of
  the assistant, those of the prompt too, whose generation_logprobs are 0.
- With dynamic sampling ``rewards`` runs over the batch before filtering and does not belong to its row;
  ``filtered_rewards`` does, and is read instead.
- idx is the row's number, not a problem's: problems are told by prompt tokens. There is no reference answer.
- Steps are counted from 1, and responses are sampled before the step's update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, each_row, get, marks, masked_entry, token_ids, whole
from tsae.rollouts.logs.files import LogFile

FILE = re.compile(r"(^|/)train_data_step(?P<step>\d+)\.jsonl$")


def fits(row: Row, config: ImportConfig) -> bool:
    return {"rewards", "input_lengths", "generation_logprobs", "idx"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        if "token_ids" not in row:
            raise TsaeError(
                "has no token_ids: a log of an early NeMo-RL, whose content cannot be put back together exactly",
                where=where,
                fix="Give a log of a version that writes token_ids and token_loss_mask.",
            )
        length = whole(_only(get(row, "input_lengths", where)), "input_lengths", where)
        if length is not None and length < 1:
            raise TsaeError(f"input_lengths is {length}", where=where, fix="Correct or drop that line.")
        advantages = _only(row.get("advantages"))
        entry = masked_entry(
            token_ids(_only(row["token_ids"]), "token_ids", where)[:length],
            _sampled(
                marks(_only(get(row, "token_loss_mask", where)), "token_loss_mask", where)[:length],
                np.asarray(_only(row["generation_logprobs"]), dtype=float)[:length],
            ),
            _only(row.get("filtered_rewards", get(row, "rewards", where))),
            advantages[:length] if isinstance(advantages, list) else advantages,  # Padded as the batch is.
            where,
            step=file.step,
            updates=None if file.step is None else file.step - 1,
            key=None if row.get("idx") is None else f"{file.step}/{row['idx']}",
            logprobs=_logprobs(_only(row.get("generation_logprobs")), length),
        )
        if "filtered_rewards" not in row:
            entry.assumed = "have the column rewards as their reward: no filtered_rewards, as with dynamic sampling"
        yield entry

    return each_row(file, config, of)


def _sampled(mask: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """(n,) bool: the mask without assistant's turns of the prompt: what nobody sampled has a log-probability of 0."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    if logprobs.shape != mask.shape or len(edges) < 4:
        return mask
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        if logprobs[low:high].any():
            found = mask.copy()
            found[:low] = False
            return found
    return mask


def _logprobs(values: Any, length: int | None) -> Any:
    """Those of the tokens that are no padding."""
    return values[:length] if isinstance(values, list) else None


def _only(value: Any) -> Any:
    """The element of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
