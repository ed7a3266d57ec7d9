"""tsae: the run log of `tsae.rl.run_log`, ``generations/generation-{number}-rank-{process}.parquet``.

A row is a response with the token ids as they were sampled. A step's responses are those that its generation sampled,
whatever the steps that use them; ``micro_batch`` says which do. Facts of the problem are ``data/NAME``.
"""

from __future__ import annotations

import re

import numpy as np

from tsae.rollouts.logs.adapters import Format, by_row, has, logprobs_of, messages_of
from tsae.rollouts.logs.entry import Entry, Fields
from tsae.rollouts.schema import TRAINING

_LOGPROBS = tuple(field.name for field in TRAINING if field.name.endswith("logprobs"))


def _entry(row: Fields) -> Entry:
    names, step = row.config.columns, row.whole("step", needed=True)
    data = row.inside({name.removeprefix("data/"): v for name, v in row.row.items() if name.startswith("data/")})
    response, mask = row.ids("response_ids"), None
    if row.get("response_mask") is not None:
        mask = _one_a_token(row, "response_mask", response) > 0
    messages, truncated = messages_of(row.get("messages")), row.truth("truncated")
    training = {"generation": row.whole("generation", needed=True), "micro_batch": row.ids("micro_batch")}
    key = f"{training['generation']}/{row.whole('rank', needed=True)}/{row.line}"
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
        updates=None if step is None else step - 1,
        advantage=row.number("advantage"),
        advantage_varies=row.get("token_advantages") is not None,
        logprobs=logprobs_of(row.get("sampler_logprobs"), response),
        finish_reason=None if truncated is None else "length" if truncated else "stop",
        key=key,
        apart=key,  # Every row is a response of its own, however equal.
        training=training | {n: _one_a_token(row, n, response) for n in _LOGPROBS if row.get(n) is not None},
    )


def _one_a_token(row: Fields, name: str, response: np.ndarray) -> np.ndarray:
    """(n_response,) values; NaN where there is none."""
    found = np.asarray(row.row[name], dtype=np.float32)
    if found.shape != response.shape:
        row.refuse(f"{name} has {len(found)} values for the {len(response)} response_ids")
    return found


FORMAT = Format(
    "tsae",
    "tsae run log",
    by_row(_entry),
    has("generation", "micro_batch", "rank", "prompt_ids", "response_ids"),
    re.compile(r"(^|/)((?P<run>[^/]+)/tsae/)?generations/generation-\d{6,}-rank-\d+\.parquet$"),
    suffixes=(".parquet",),
)
