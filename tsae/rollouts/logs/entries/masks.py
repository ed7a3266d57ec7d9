"""Trajectories of token ids and a mask that marks which of them the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, is_finite, read_number


class Split(NamedTuple):
    """A sequence of tokens as prompt and response."""

    prompt: np.ndarray
    response: np.ndarray
    """From the first sampled token to the last."""
    sampled: np.ndarray | None
    """(n_response,) bool: which tokens of the response were sampled; None for all."""


def attended(
    fields: Fields, prompt: np.ndarray | None, response: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None, frozenset[str]]:
    """Which ids of a prompt and a response were read, by the attention masks of a row.

    A mask is of both together (``attention_mask``) or of one of them (``prompt_mask``, ``completion_mask``).

    Returns:
        (n_prompt,) and (n_response,) bool, None for a side without a mask; and the names of the sides that have one.

    Raises:
        TsaeError: for a mask of another length.
    """
    n = [0 if ids is None else len(ids) for ids in (prompt, response)]
    found: dict[str, np.ndarray] = {}
    for name, sides in (("attention_mask", n), ("prompt_mask", n[:1]), ("completion_mask", n[1:])):
        if fields.get(name) is not None:
            marks, ends = fields.marks(name), "completion" in name
            if len(marks) != sum(sides):
                what = f"{name} has {len(marks)} marks for {n[0]} ids of the prompt and {n[1]} of the response"
                raise fields.error(what, "Correct that row.")
            parts = [np.zeros(0, bool), marks] if ends else np.split(marks, n[:1])
            # A trainer masks whole completions that it does not train on.
            found |= {side: part for side, part in zip(("prompt", "response"), parts, strict=True) if part.any()}
    return found.get("prompt"), found.get("response"), frozenset(found)


def split_by_mask(ids: np.ndarray, mask: np.ndarray, fields: Fields) -> Split:
    """Divide a sequence whose sampled tokens are marked, and drop what follows the last of them.

    Args:
        ids: (n,) token ids.
        mask: (n,) bool, true for tokens that the policy sampled.
        fields: of the row, for error messages.

    Raises:
        Unusable: if no token is sampled.
    """
    if len(ids) != len(mask):
        raise fields.error(f"{len(ids)} token ids but {len(mask)} mask values", "Correct that row.")
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        raise fields.unusable("empty", "no token is marked as sampled")
    first, last = sampled[0], sampled[-1] + 1
    return Split(ids[:first], ids[first:last], None if last - first == len(sampled) else mask[first:last])


def masked_entry(
    fields: Fields,
    mask: np.ndarray,
    rewards: dict[str, float | None],
    *,
    step: int | None,
    key: str | None,
    updates: int | None = None,
    logprobs: Any = None,
) -> Entry:
    """The entry of a row with ``token_ids`` and ``advantages`` (a number, or one a token).

    Args:
        fields: of the row.
        mask: (n,) bool, which tokens the policy sampled.
        rewards: the only one; empty if the log has none.
        step: the trainer's.
        key: unique among the entries of a log.
        updates: optimiser steps of the policy, if they are known.
        logprobs: (n,) one a token, if the log has them.
    """
    ids = fields.ids("token_ids")
    prompt, response, inside = split_by_mask(ids, mask, fields)
    advantage, varies = _mean_over(fields, mask)
    return Entry(
        fields.where,
        prompt_ids=prompt,
        response_ids=response,
        sampled=inside,
        masked=frozenset({"response"}),
        rewards=rewards,
        step=step,
        updates=updates,
        advantage=advantage,
        advantage_varies=varies,
        logprobs=logprobs_of(logprobs, response, before=len(prompt), n=len(ids)),
        key=key,
    )


def logprobs_of(values: Any, response: np.ndarray, *, before: int = 0, n: int | None = None) -> np.ndarray | None:
    """(n_response,) logged log-probabilities; None if there are none, or not one for every token.

    Args:
        values: one a token of the response, or of the whole sequence.
        response: its token ids.
        before: tokens in front of the response, if the values are the whole sequence's.
        n: how many values there must be; by default one a token of the response.
    """
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        return None
    if found.ndim != 1 or len(found) != (len(response) if n is None else n):
        return None
    found = found[before : before + len(response)]
    return found if np.isfinite(found).all() else None


def _mean_over(fields: Fields, mask: np.ndarray) -> tuple[float | None, bool]:
    """The advantage, or the mean of the sampled tokens' advantages; and whether these differ."""
    values = read_number(fields.get("advantages"))
    if values is None or isinstance(values, (int, float)):
        return fields.number("advantages"), False
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) not in (1, len(mask)):
        raise fields.error("advantages is neither a number nor one a token", "Correct that row.")
    for value in values:
        if value is not None and not is_finite(value):
            fields.inside({"advantages": value}).number("advantages")
    counted = [True] if len(values) == 1 else mask.tolist()
    return mean_advantage([value for value, sampled in zip(values, counted, strict=True) if sampled], fields)


def mean_advantage(values: Sequence[float | None], fields: Fields) -> tuple[float | None, bool]:
    """The mean of the advantages of tokens, where they are known; and whether these differ."""
    found = [float(value) for value in values if value is not None]
    # One advantage for all tokens stays exactly what it is.
    mean = found[0] if len(set(found)) == 1 else float(np.mean(found)) if found else None
    return fields.inside({"advantages": mean}).number("advantages"), len(set(found)) > 1
