"""Spans: which tokens of a trajectory count."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np

from tsae.errors import refuse
from tsae.rollouts.table import Rollouts
from tsae.rollouts.token_parts import ANSWER, OTHER, THINKING

TokenSpan = Literal["response", "thinking", "answer", "prompt", "last_prompt", "all"]
"""See `span_mask`."""


def span_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    prompt_lengths: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
    parts: np.ndarray | None = None,
) -> np.ndarray:
    """(n_tokens,) bool: tokens of a span.

    - response: tokens that the policy sampled; thinking: those in its thinking; answer: the rest of them;
    - prompt: tokens before the response; last_prompt: the last of these;
    - all: prompt and response.

    Tokens of the response that the policy did not sample are in no span. Special tokens count only as last_prompt: the
    response's first token is drawn from the prompt's last token, and chat templates may end in a special one.

    Args:
        token_ids: (n_tokens,) of whole trajectories, one after another.
        offsets: (n_trajectories + 1,) where each begins.
        prompt_lengths: (n_trajectories,) tokens of each prompt.
        span: which tokens.
        special_ids: ids of special tokens.
        parts: (n_tokens,) the part of each token (`tsae.rollouts.token_parts`); None where all responses are
            plain answers.
    """
    if span == "last_prompt":
        last = np.zeros(len(token_ids), dtype=bool)
        last[(offsets[:-1] + prompt_lengths - 1)[prompt_lengths > 0]] = True
        return last
    lengths = np.diff(offsets)
    position = np.arange(len(token_ids)) - np.repeat(offsets[:-1], lengths)
    in_prompt = position < np.repeat(prompt_lengths, lengths)
    wanted = np.ones_like(in_prompt) if span == "all" else in_prompt if span == "prompt" else ~in_prompt
    if parts is not None and span != "prompt":
        of_span = {"thinking": parts == THINKING, "answer": parts == ANSWER}
        wanted &= of_span.get(span, parts != OTHER)
    elif span == "thinking":
        wanted[:] = False
    return wanted & ~np.isin(token_ids, list(special_ids))


def rows_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    rollouts: Rollouts,
    rows: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
) -> np.ndarray:
    """`span_mask` of some rows of rollouts, which know the prompt lengths and parts.

    Raises:
        TsaeError: for thinking, where no response of the rollouts has any.
    """
    what = "no response has thinking, by any marker that is known"
    refuse(rollouts.origin, (span == "thinking" and not rollouts.has_thinking, what, "Use the span response."))
    lengths = rollouts.lengths("prompt_ids")[rows]
    return span_mask(token_ids, offsets, lengths, span, special_ids, rollouts.token_parts(rows))
