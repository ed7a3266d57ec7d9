"""What a capture reads: which reader reads which trajectories, cut into shards; and whether they fit the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tsae.activations.config import ReadingConfig
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from tsae.checkpoints.series import Checkpoint
    from tsae.rollouts.table import Rollouts


class Piece(NamedTuple):
    """What one shard holds."""

    reader: str
    file: str
    """Below the store's folder."""
    rows: np.ndarray
    """(n_trajectories,) row ids into the rollouts."""


def plan_readers(ids: Sequence[str], rollouts: Rollouts, config: ReadingConfig) -> dict[str, np.ndarray]:
    """Row ids of the trajectories that each reader reads; the first of the ids is the base's."""
    policy = np.array(rollouts.table["policy"].to_pylist())
    base, plan = ids[0], config.plan
    if plan == "auto":
        plan = "paired" if set(policy) <= set(ids) and base in policy else "all"
    everything = np.arange(len(rollouts))
    if plan == "all":
        return dict.fromkeys(ids, everything)
    if plan == "own":
        return {id: _sampled_by(id, policy) for id in ids}
    if base not in policy:
        raise TsaeError(
            f"no trajectory was sampled by the base {base!r}; policies are {', '.join(rollouts.policies)}",
            where="CaptureConfig.plan",
            fix='Sample from the base too, or use plan="all".',
        )
    return {id: everything if id == base else np.flatnonzero((policy == base) | (policy == id)) for id in ids}


def _sampled_by(id: str, policy: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(policy == id)
    if not len(rows):
        raise TsaeError(
            f"no trajectory was sampled by {id!r}; policies are {', '.join(dict.fromkeys(policy))}",
            where="CaptureConfig.plan",
            fix="Sample from it too, leave that checkpoint out, or use another plan.",
        )
    return rows


def cut(plan: Mapping[str, np.ndarray], lengths: np.ndarray, shard_tokens: int) -> Iterator[Piece]:
    """Consecutive whole trajectories of each reader; a shard starts anew where the budget would be passed."""
    for reader, rows in plan.items():
        number, start, tokens = 0, 0, 0
        for end, row in enumerate(rows):
            if tokens and tokens + lengths[row] > shard_tokens:
                yield Piece(reader, f"{reader}/{number:05d}.h5", rows[start:end])
                number, start, tokens = number + 1, end, 0
            tokens += int(lengths[row])
        yield Piece(reader, f"{reader}/{number:05d}.h5", rows[start:])


def check_tokenizer(checkpoint: Checkpoint, fingerprint: str, rollouts: Rollouts) -> None:
    """Refuse a checkpoint whose token ids mean something else."""
    expected = rollouts.info.get("tokenizer")
    if expected is not None and expected != fingerprint:
        raise TsaeError(
            f"its tokenizer ({fingerprint}) is not the one that the trajectories were tokenised with ({expected})",
            where=checkpoint.path,
            fix="Use rollouts tokenised for this model; import the log again with its tokenizer.",
        )


def check_context(rollouts: Rollouts, context: int | None, vocabulary: int) -> None:
    """Refuse trajectories longer than the context, and token ids outside the vocabulary."""
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    longest = int(lengths.argmax())
    if context is not None and lengths[longest] > context:
        raise TsaeError(
            f"trajectory {longest} has {lengths[longest]} tokens, more than the model's context of {context}",
            where=rollouts.origin,
            fix="Leave out trajectories longer than the context.",
        )
    for name in ("prompt_ids", "response_ids"):
        values = rollouts.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if values.min() < 0 or values.max() >= vocabulary:
            raise TsaeError(
                f"{name} holds token id {values.max() if values.max() >= vocabulary else values.min()}, "
                f"outside the model's vocabulary of {vocabulary}",
                where=rollouts.origin,
                fix="These trajectories were tokenised for another model; import them with this model's tokenizer.",
            )
