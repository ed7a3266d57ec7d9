"""What the adapters of trainers share: formats, conversations, and masks of sampled tokens.

A `Format` says how the log of one trainer is recognised, and how its rows become entries: a row may hold several
responses, a trajectory may be messages, or token ids with a mask that marks which of them the policy sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.known_logs import FORMAT_FILES, FormatFiles
from tsae.rollouts.logs.entry import Entry, Fields, Parser, Row, Unusable, is_finite, read_list, read_number
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.readers import OTHER_TABLES, HalfLine, kind_of

TABLES = (".jsonl", ".parquet")
Fits = Callable[[Row, ImportConfig], bool]
"""Whether a row has the columns of a format."""


@dataclass(frozen=True)
class Format:
    """One trainer's way of logging rollouts."""

    name: str
    read: Parser
    fits: Fits | None = None
    """By default a row fits that has the columns which `rollouts/known_logs.toml` lists."""
    validates: Callable[[Path], bool] | None = None
    """Whether a file is a validation's, by its name."""
    notes: Callable[[Sequence[LogFile]], Iterable[str]] = lambda files: ()
    """What an import of these files should say."""

    @property
    def files(self) -> FormatFiles:
        """Its files, as `rollouts/known_logs.toml` describes them."""
        return FORMAT_FILES[self.name]

    @property
    def suffixes(self) -> Sequence[str]:
        """Of its files, by `kind_of`."""
        return self.files.suffixes or (*TABLES, *OTHER_TABLES)

    def takes(self, file: Path, row: Row, config: ImportConfig) -> bool:
        """Whether a file with this first row may be its."""
        if kind_of(file) not in self.suffixes:
            return False
        if self.fits is not None:
            return self.fits(row, config)
        return any(set(columns.split()) <= row.keys() for columns in self.files.columns)

    def named(self, path: str) -> re.Match[str] | None:
        """What the path of a file says, with named groups step, run and subset; None if it is not one of its files."""
        return re.search(self.files.path, path) if self.files.path else None


EntryOf = Callable[[Fields], Entry | None]
"""The entry of a trajectory; None for one that does not belong to what was asked for."""
SplitRow = Callable[[Fields], Iterable[Fields | Unusable]]
"""The trajectories of a row."""


def by_row(entry: EntryOf, split: SplitRow | None = None) -> Parser:
    """A parser that reads every row alike.

    Args:
        entry: see `EntryOf`.
        split: see `SplitRow`; by default a row is a trajectory.
    """
    return lambda file, config: each_row(file, config, entry, split)


def each_row(file: LogFile, config: ImportConfig, entry: EntryOf, split: SplitRow | None) -> Iterator[Entry | Unusable]:
    """The trajectories of every row of a file.

    Raises:
        TsaeError: for a row that its trainer does not write, in place of Python's own error about the value.
    """
    try:
        for number, row in file.rows():
            fields = Fields(row, file.place(number), file, config, number)
            where = fields.where
            try:
                for part in [fields] if split is None else split(fields):
                    if isinstance(part, Unusable):
                        yield part
                        continue
                    where = part.where
                    try:
                        found = entry(part)
                    except Unusable as unusable:
                        yield unusable
                        continue
                    if found is not None:
                        found.number, found.extra = part.line, part.kept() | found.extra
                        yield found
            except Unusable as unusable:
                yield unusable
            # RuntimeError: PyTorch's, where a tensor of a .pt file stands for a number or a list.
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
                what = f"is not built as its trainer writes it ({type(error).__name__}: {error})"
                raise TsaeError(what, where=where, fix="Correct or drop that row.") from error
    except HalfLine as half:
        yield Unusable("cut", half.what, where=str(half.where), fix="Correct or delete that line")


def each_response(fields: Fields, column: str, aligned: Iterable[str], whole: Iterable[str] = ()) -> list[Fields]:
    """The trajectories of a row that holds all responses to a problem, or a batch.

    Args:
        fields: of the row.
        column: the list of responses.
        aligned: columns that hold a list with a value for each response, or nothing.
        whole: columns that are not divided. Any other list of as many values is.

    Raises:
        Unusable: where there is no response.
        TsaeError: for an aligned column that is not a list of as many values.
    """
    row: Row = {name: read_list(value) if name in (column, *aligned) else value for name, value in fields.row.items()}
    if not isinstance(row[column], list):
        fields.refuse(f"{column} is not a list of responses", "Correct or drop that row.")
    if not (n := len(row[column])):
        fields.leave_out("empty", f"{column} holds no response")
    for name in aligned:
        value = row.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != n):
            found = len(value) if isinstance(value, list) else f"a {type(value).__name__}"
            what = f"{n} values in {column} but {found} in {name}"
            fields.refuse(what, "Correct or drop that row: one value for each response.")
    lists = {name for name, value in row.items() if isinstance(value, list) and len(value) == n} - set(whole)
    return [
        replace(
            fields,
            row={name: value[index] if name in lists else value for name, value in row.items()},
            where=f"{fields.where}, trajectory {index + 1}",
            index=index,
        )
        for index in range(n)
    ]


def each_of_a_batch(fields: Fields) -> list[Fields]:
    """The trajectories of a line that is an object of columns; a line of single values is one trajectory."""
    first = next((name for name, value in fields.row.items() if isinstance(value, list)), None)
    return [fields] if first is None else each_response(fields, first, fields.row)


_TEXT = {"role", "content"}
_ABOUT = {"id", "source", "model", "metadata"}
"""What Inspect says about a message."""


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages with a role each."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Messages, which may be written as JSON, alone or as the only item of a list; None for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    found = read_list(value)
    return found if is_conversation(found) else None


def only_answer(messages: Any, fields: Fields) -> str:
    """The text of an answer that is one message of the assistant.

    Raises:
        Unusable: for several messages, and for a message with more than text, such as calls of tools, or reasoning
            that the server took out of it.
    """
    if isinstance(messages, str):
        return messages
    if not is_conversation(messages):
        fields.leave_out("empty", "has no answer")
    if messages[-1].get("content") in (None, []) and not messages[-1].get("tool_calls"):
        fields.leave_out("empty", "its answer has no text")
    parts = [{name for name, value in message.items() if value not in (None, [], "")} for message in messages]
    others = sorted(set().union(*parts) - _TEXT - _ABOUT)
    content = _text(messages[-1].get("content"))
    if len(messages) > 1 or messages[0]["role"] != "assistant" or others or content is None:
        shown = f" with {', '.join(others)}" if others else ""
        n = f"{len(messages)} message{'s' * (len(messages) > 1)}"
        fields.leave_out("multi-turn", f"its answer is {n}{shown}, which text does not give back as tokens")
    return content


def asked(messages: Sequence[dict[str, Any]], fields: Fields) -> list[dict[str, Any]]:
    """Messages of a prompt, reduced to role and text.

    Raises:
        Unusable: for a message with more than text.
    """
    found = []
    for message in messages:
        content = _text(message.get("content"))
        others = sorted(name for name in ("tool_calls", "tool_call_id") if message.get(name))
        if content is None or others:
            none = "more than text" if message.get("content") else "no text"
            fields.leave_out(
                "multi-turn", f"a message of its prompt has {' and '.join(others) or none}, which is not read"
            )
        found.append({"role": str(message["role"]), "content": content})
    return found


def _text(content: Any) -> str | None:
    """A message's text, put together from parts if need be; None if any part is not a text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return None
    return "".join(str(part.get("text", "")) for part in parts)


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
                fields.refuse(what, "Correct that row.")
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
        fields.refuse(f"{len(ids)} token ids but {len(mask)} mask values", "Correct that row.")
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        fields.leave_out("empty", "no token is marked as sampled")
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
    logprobs: Any,
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
    """(n_response,) logged log-probabilities; None if there are none, empty if they are not a number for every token.

    Args:
        values: one a token of the response, or of the whole sequence.
        response: its token ids.
        before: tokens in front of the response, if the values are the whole sequence's.
        n: how many values there must be; by default one a token of the response.
    """
    if values is None or (isinstance(values, list) and not values):
        return None
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        return np.empty(0)
    if found.ndim != 1 or len(found) != (len(response) if n is None else n):
        return np.empty(0)
    found = found[before : before + len(response)]
    return found if np.isfinite(found).all() else np.empty(0)


def _mean_over(fields: Fields, mask: np.ndarray) -> tuple[float | None, bool]:
    """The advantage, or the mean of the sampled tokens' advantages; and whether these differ."""
    values = read_number(fields.get("advantages"))
    if values is None or isinstance(values, (int, float)):
        return fields.number("advantages"), False
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) not in (1, len(mask)):
        fields.refuse("advantages is neither a number nor one a token", "Correct that row.")
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
