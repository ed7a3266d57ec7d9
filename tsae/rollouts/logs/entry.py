"""Entry: what a reader makes of one trajectory of a log; and the checks that its values go through."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig, Unfit
from tsae.rollouts.logs.files import HalfLine, LogFile

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class Entry:
    """One trajectory as its log has it; None where the log does not say."""

    where: str
    """File and line, for error messages."""
    number: int = 0
    """Of the line or row in its file."""
    prompt: str | list[dict[str, Any]] | None = None
    """Text, or the messages of a conversation."""
    prompt_is: Literal["question", "verbatim", "stripped", "perhaps stripped", "rendered"] = "question"
    """What a text is: the question, to which a chat template is still to be applied; exactly what the model read; that
    with its special tokens left out; one of the two last, as the template tells; or with all special tokens written
    out, so that the tokenizer adds none."""
    prompt_ids: np.ndarray | None = None
    """(n_prompt,) integers."""
    response: str | None = None
    response_ids: np.ndarray | None = None
    """(n_response,) integers, with the end token where the model gave one."""
    sampled: np.ndarray | None = None
    """(n_response,) bool: which of these the policy sampled, where others' tokens stand between them; None for all."""
    response_rendered: bool = False
    """The text has its special tokens written out: without an end token it was cut off."""
    response_length: int | None = None
    """Tokens that were sampled, where a log of text counts them."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By name; None where a function did not score this trajectory."""
    reward: float | None = None
    """The trainer's own total."""
    unscored: bool = False
    """The log has rewards, but none for this trajectory."""
    correct: bool | None = None
    """Where the log says so outright."""
    decides: str | None = None
    """Name of the reward that says what is right, where the format knows it."""
    answer: str = ""
    level: str | None = None
    problem_id: str | None = None
    policy: str | None = None
    step: int | None = None
    """The trainer's step in which it was logged."""
    updates: int | None = None
    """Optimiser steps that the weights had behind them that sampled it."""
    advantage: float | None = None
    advantage_varies: bool = False
    """The advantage is the mean of others that the tokens have."""
    group: str | None = None
    """The log's own name of the group that its advantage was computed in; of one problem and step."""
    logprobs: np.ndarray | None = None
    """(n_response,) natural logarithms of the probabilities that `response_ids` had when they were sampled."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """What the log says that the chat template was given beside the messages."""
    finish_reason: Literal["stop", "length"] | None = None
    cut_without_end: bool = False
    """Its trainer counts responses whose token ids lack an end token as cut off."""
    key: str | None = None
    """Unique among the entries of a log, where the log has such a thing."""
    apart: str = ""
    """What tells it from another of equal text that was sampled as other tokens."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Columns that are kept as they are, by name."""
    summed: bool = False
    """The reward is the sum of all rewards that the log has: without one of them it is another quantity."""
    assumed: str | None = None
    """What its reader took for granted, to be counted and printed: "were sampled by …"."""


class Unusable(TsaeError):
    """A trajectory that cannot be taken; `ImportConfig.skip` leaves those of its kind out."""

    def __init__(self, kind: Unfit, what: str, *, where: str, fix: str | None = None) -> None:
        self.kind = kind
        skip = f"leave such rows out with --skip {kind}"
        super().__init__(what, where=where, fix=f"{fix}, or {skip}" if fix else skip.capitalize())


Reader = Callable[[LogFile, ImportConfig], Iterator[Entry | Unusable]]
"""(file, config) -> its trajectories, in order."""


def each_row(
    file: LogFile, config: ImportConfig, read: Callable[[Row, str], Iterator[Entry | Unusable]]
) -> Iterator[Entry | Unusable]:
    """The trajectories of every row of a file; `read` gets a row and where it is."""
    try:
        for number, row in file.rows():
            kept = columns_to_keep(row, config)
            try:
                for found in as_its_trainer_writes(read(row, file.place(number)), file.place(number)):
                    if isinstance(found, Entry):
                        found.number, found.extra = number, kept | found.extra
                    yield found
            except Unusable as unusable:
                yield unusable
    except HalfLine as half:
        yield Unusable("cut", half.what, where=str(half.where), fix="Correct or delete that line")


def as_its_trainer_writes(entries: Iterator[T], where: str) -> Iterator[T]:
    """What a reader makes of a row. A row that it cannot walk through is none that its trainer writes.

    Raises:
        TsaeError: in place of what Python says of a value of another kind than expected.
    """
    try:
        yield from entries
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise TsaeError(
            f"is not built as its trainer writes it ({type(error).__name__}: {error})",
            where=where,
            fix="Correct or drop that row.",
        ) from error


def columns_to_keep(row: Row, config: ImportConfig) -> dict[str, Any]:
    """The columns of `ImportConfig.keep_columns` that a row fills; NaN is how pandas leaves one empty."""
    found = {name: row.get(name) for name in config.keep_columns}
    return {name: value for name, value in found.items() if value is not None and value == value}


def get(row: Row, name: str, where: str) -> Any:
    """A column that has to be there.

    Raises:
        TsaeError: where it is not; the message lists the columns that are.
    """
    if row.get(name) is None:
        raise TsaeError(
            f"has no {name}; its columns are {', '.join(row)}",
            where=where,
            fix="Give the log as its trainer wrote it, or name its columns and --format plain.",
        )
    return row[name]


def text(value: Any, name: str, where: str) -> str:
    """A text.

    Raises:
        TsaeError: where it is something else.
    """
    if not isinstance(value, str):
        raise TsaeError(f"{name} is a {type(value).__name__}, expected a text", where=where, fix="Correct that row.")
    return value


def number(value: Any, name: str, where: str) -> float | None:
    """A finite number; None stays None.

    Raises:
        TsaeError: for NaN, infinity, and what is no number.
    """
    if value is None:
        return None
    # 64 bits hold what any log counts; float() of an integer of hundreds of digits fails.
    huge = isinstance(value, int) and value.bit_length() > 63
    if not isinstance(value, (int, float)) or huge or not math.isfinite(value):
        shown = "an integer of hundreds of digits" if huge else repr(value)[:80]
        raise TsaeError(f"{name} is {shown}, expected a finite number", where=where, fix="Correct or drop that row.")
    return float(value)


def score(value: Any, name: str, where: str) -> float | None:
    """A reward; NaN, which is how torch and pandas write that there is none, is None as well.

    Raises:
        TsaeError: for infinity, and what is no number.
    """
    return None if isinstance(value, float) and math.isnan(value) else number(value, name, where)


def logged_score(row: Row, name: str, where: str) -> float | None:
    """The reward in a column that has to be there, and may be empty.

    Raises:
        TsaeError: where there is no such column, and as `score`.
    """
    return score(row[name] if name in row else get(row, name, where), name, where)


def whole(value: Any, name: str, where: str) -> int | None:
    """A whole number; None stays None.

    Raises:
        TsaeError: where it is something else.
    """
    found = number(value, name, where)
    if found is not None and found != int(found):
        raise TsaeError(f"{name} is {value!r}, expected a whole number", where=where, fix="Correct that row.")
    return None if found is None else int(found)


def truth(value: Any, name: str, where: str) -> bool | None:
    """True or false, as a flag, 0 or 1, or spelled out; None stays None.

    Raises:
        TsaeError: where it is something else.
    """
    if value is None:
        return None
    spelled = value.lower() if isinstance(value, str) else value
    # True == 1 == 1.0, so that the flags of other languages and of pandas are understood.
    for right, spellings in ((True, (1, "true")), (False, (0, "false"))):
        if spelled in spellings:
            return right
    raise TsaeError(f"{name} is {value!r}, expected true or false", where=where, fix="Correct or drop that row.")


def label(value: Any, name: str, where: str) -> str | None:
    """What something is called, a text or a number; None stays None, and NaN is how pandas writes that.

    Raises:
        TsaeError: where it is something else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (math.inf, -math.inf):
        raise TsaeError(
            f"{name} is {repr(value)[:80]}, expected a text or a number", where=where, fix="Correct that row."
        )
    if isinstance(value, float):
        # Where one is missing, pandas makes floats of whole numbers.
        return None if math.isnan(value) else str(int(value) if value.is_integer() else value)
    return str(value) if value.bit_length() <= 63 else hex(value)


def mapping(row: Row, name: str, where: str) -> Row:
    """The object in a column; an empty one where there is none.

    Raises:
        TsaeError: where it is something else.
    """
    found = row.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise TsaeError(f"{name} is a {type(found).__name__}, expected an object", where=where, fix="Correct that row.")
    return found or {}


def marks(value: Any, name: str, where: str) -> np.ndarray:
    """(n,) bool: which tokens are marked, by true, or by a number above 0.

    Raises:
        TsaeError: where it is no list of flags or finite numbers.
    """
    found = np.asarray(value) if isinstance(value, (list, tuple, np.ndarray)) else np.zeros((0, 0))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "biuf") or not np.isfinite(found).all():
        raise TsaeError(f"{name} is no list of marks, one a token", where=where, fix="Correct that row.")
    return np.asarray(found > 0)


def token_ids(value: Any, name: str, where: str) -> np.ndarray:
    """(n,) int64 token ids.

    Raises:
        TsaeError: where it is no list of whole numbers.
    """
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):
        found = np.zeros((0, 0))
    # Among integers, numpy takes True for 1.
    flags = isinstance(value, (list, tuple)) and any(isinstance(id, bool) for id in value)
    if found.ndim != 1 or flags or (len(found) and found.dtype.kind != "i"):
        raise TsaeError(f"{name} is no list of token ids", where=where, fix="Correct that row.")
    return found.astype(np.int64)


def answer_text(value: Any) -> str:
    """A reference answer as text; a list of one is that one, anything else structured is JSON."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if value is None or value != value:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages with a role each."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and _is_role(m) for m in value)


def _is_role(message: dict[str, Any]) -> bool:
    return isinstance(message.get("role"), str)


def masked_entry(
    ids: Any,
    mask: Any,
    reward: Any,
    advantages: Any,
    where: str,
    *,
    step: int | None,
    key: str | None,
    updates: int | None = None,
    rewarded: bool = True,
    logprobs: Any = None,
) -> Entry:
    """The entry of a token sequence that marks what the policy sampled, with one reward, as trainers of tokens log it.

    Args:
        ids: (n,) token ids.
        mask: (n,) true, or above 0, for tokens that the policy sampled.
        reward: a number; without one the trajectory is unscored.
        advantages: a number, or one a token.
        where: file and line.
        step: the trainer's.
        key: unique among the entries of a log.
        updates: optimiser steps of the policy, where they are known.
        rewarded: whether the log has rewards at all.
        logprobs: (n,) one a token, if the log has them.
    """
    found, sampled = token_ids(ids, "token_ids", where), marks(mask, "the mask", where)
    prompt, response, inside = split_by_mask(found, sampled, where)
    value = score(reward, "rewards", where)
    advantage, varies = _mean_over(advantages, sampled, where)
    return Entry(
        where,
        prompt_ids=prompt,
        response_ids=response,
        sampled=inside,
        rewards={"reward": value} if rewarded else {},
        reward=value,
        unscored=rewarded and value is None,
        step=step,
        updates=updates,
        advantage=advantage,
        advantage_varies=varies,
        logprobs=logprobs_of(logprobs, response, before=len(prompt), n=len(found)),
        key=key,
    )


def logprobs_of(values: Any, response: np.ndarray, *, before: int = 0, n: int | None = None) -> np.ndarray | None:
    """(n_response,) logged log-probabilities; None where there are none, or not one for every token.

    Args:
        values: one a token of the response, or of the whole sequence.
        response: its token ids.
        before: tokens in front of the response, where the values are the whole sequence's.
        n: tokens of the whole sequence, or that the trainer counts as the response's; by default those of the response.
    """
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        return None
    if found.ndim != 1 or len(found) != (len(response) if n is None else n):
        return None
    found = found[before : before + len(response)]
    return found if np.isfinite(found).all() else None


def _mean_over(values: Any, mask: np.ndarray, where: str) -> tuple[float | None, bool]:
    """Mean of per-token advantages over the sampled tokens, a single number being that number; whether they differ."""
    if values is None or isinstance(values, (int, float)):
        return number(values, "advantages", where), False
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) not in (1, len(mask)):
        raise TsaeError("advantages is neither a number nor one a token", where=where, fix="Correct that row.")
    values = [number(value, "advantages", where) for value in values]
    found = [value for value, sampled in zip(values, mask.tolist(), strict=False) if sampled and value is not None]
    if len(values) == 1:
        found = list(values)
    # One advantage for all tokens is given back as it is.
    mean = found[0] if len(set(found)) == 1 else float(np.mean(found)) if found else None
    return number(mean, "advantages", where), len(set(found)) > 1


class Split(NamedTuple):
    """A sequence of tokens as prompt and response."""

    prompt: np.ndarray
    response: np.ndarray
    """From the first sampled token to the last."""
    sampled: np.ndarray | None
    """(n_response,) bool: which of the response were sampled; None for all."""


def split_by_mask(ids: np.ndarray, mask: np.ndarray, where: str) -> Split:
    """Divide a sequence whose sampled tokens are marked; what follows the last of them is dropped.

    Args:
        ids: (n,) token ids.
        mask: (n,) bool, true for tokens that the policy sampled.

    Raises:
        Unusable: where no token is sampled.
    """
    if len(ids) != len(mask):
        raise TsaeError(f"{len(ids)} token ids but {len(mask)} mask values", where=where, fix="Correct that row.")
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        raise Unusable("empty", "no token is marked as sampled", where=where)
    first, last = sampled[0], sampled[-1] + 1
    return Split(ids[:first], ids[first:last], None if last - first == len(sampled) else mask[first:last])
