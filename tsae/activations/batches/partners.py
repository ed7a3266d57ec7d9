"""Partners from further back than the token before: any earlier token of the trajectory, or of the reasoning step.

Counted tokens are numbered through the store: a token's rank. Each trajectory, or step, is a block of consecutive
ranks, known by its first. The earlier tokens of a token's block are the ranks from there to its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsae.activations.shards.shard import Shard
from tsae.rollouts.responses.token_parts import OTHER


class Partners:
    """Draws a partner for every token; tokens are given by their places (`tsae.activations.batches.places`).

    Args:
        begins: (n_segments,) places at which runs of counted tokens begin; ascending.
        lengths: (n_segments,) tokens of each run.
        blocks: (n_blocks,) ranks at which blocks begin; ascending, the first is 0.
    """

    def __init__(self, begins: np.ndarray, lengths: np.ndarray, blocks: np.ndarray) -> None:
        self._begins, self._blocks = begins, blocks
        ends = lengths.cumsum()
        self._before = ends - lengths  # (n_segments,) rank of a segment's first token
        self.longest = int(np.diff(blocks, append=ends[-1]).max())
        """Tokens of the longest block."""

    def draw(self, place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) rank of a partner, each earlier token of the block being equally likely; −1 for the first of a block.

        Args:
            place: (n,) of counted tokens.
            rng: gives one number a token.
        """
        segment = np.searchsorted(self._begins, place, side="right") - 1
        rank = self._before[segment] + place - self._begins[segment]
        first = self._blocks[np.searchsorted(self._blocks, rank, side="right") - 1]
        drawn = first + (rng.random(len(rank)) * (rank - first)).astype(np.int64)
        return np.where(rank > first, drawn, -1)

    def place(self, rank: np.ndarray) -> np.ndarray:
        """(n,) places of the tokens of given ranks."""
        segment = np.searchsorted(self._before, rank, side="right") - 1
        return np.asarray(self._begins[segment] + rank - self._before[segment])


def blocks(
    shard: Shard,
    counted: np.ndarray,
    prompt_lengths: np.ndarray | None,
    step_ends: Sequence[int],
    parts: np.ndarray | None = None,
) -> np.ndarray:
    """(n_blocks,) places among the shard's counted tokens at which trajectories, or steps, begin.

    Args:
        shard: whole trajectories.
        counted: (n_tokens,) bool.
        prompt_lengths: (n_trajectories,) tokens of each prompt, for steps; None for trajectories.
        step_ends: ids of the tokens that end a step, counted or not. A step also ends with the prompt, the trajectory,
            and where tokens begin that the policy did not sample.
        parts: (n_tokens,) the part of each (`tsae.rollouts.responses.token_parts`); None where the policy sampled all
            responses.
    """
    begins = np.zeros(shard.n_tokens, dtype=bool)
    begins[shard.offsets[:-1]] = True
    if prompt_lengths is not None:
        begins[1:] |= np.isin(shard.token_ids[:-1], list(step_ends))
        begins[shard.offsets[:-1] + prompt_lengths] = True
        if parts is not None:
            begins[1:] |= (parts[1:] == OTHER) != (parts[:-1] == OTHER)
    number = np.cumsum(begins)[counted]
    return np.flatnonzero(np.diff(number, prepend=0))
