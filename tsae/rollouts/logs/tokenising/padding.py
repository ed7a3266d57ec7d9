"""Padding of a log: what the tensors of a batch have around prompts and responses, and nobody read or sampled.

1. Negative ids (−100, −1) are mask values, not tokens.
2. A token pads a log if it stands several times at an edge of a prompt or response, or at the beginning of some prompts
   alone. Candidates are the tokenizer's pad token, and any id that is repeated behind an end token. The first rows of
   the first files decide, for the whole log.
3. Padding is left out at the edges, on both sides. A token that the tokenizer or the chat template writes at that edge
   of a prompt stays once, and so does the end token of a response, unless the log says that the response was cut.

Where masks of the log have shown what is padding (`Entry.masked`), only these count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.entry import Entry, Unusable
from tsae.rollouts.logs.entries.log_format import Format
from tsae.rollouts.logs.on_disk.log_files import LogFile

if TYPE_CHECKING:
    from tsae.rollouts.logs.tokenising.tokens import Tokens

_FILES, _ROWS = 4, 64
"""How many files, and rows of each, decide what pads a log."""


class Stripped(NamedTuple):
    """How many ids were left out of a trajectory."""

    prompt: int
    response: int


def find_pads(form: Format, files: Sequence[LogFile], config: ImportConfig, tokens: Tokens) -> tuple[int, ...]:
    """The token ids that pad a log; those of `ImportConfig.pad_ids` if they are given."""
    if config.pad_ids is not None:
        return config.pad_ids
    pad = tokens.tokenizer.pad_token_id
    own, runs = tokens.ends | ({pad} - {None}), Counter[tuple[str, int, int]]()
    sides: list[tuple[str, np.ndarray]] = []
    with suppress(TsaeError):  # the import itself reports it
        for file in files[:_FILES]:
            for entry in islice(form.read(file, config), _ROWS):
                sides += [] if isinstance(entry, Unusable) else _sides(entry, tokens)
    for side, ids in sides:
        if side == "response" and (tail := _behind_end(ids, tokens.ends)) is not None:
            own.add(tail)
    for side, ids in sides:
        for id in own:
            here = np.r_[False, ids == id, False]
            first, last = int(np.argmin(here[1:])), int(np.argmin(here[-2::-1]))
            runs.update([(f"{side} left", id, first), (f"{side} right", id, last)])
    uneven = {id for id in own if len({n for side, other, n in runs if side == "prompt left" and other == id}) > 1}
    return tuple(sorted({id for _, id, n in runs if n > 1} | uneven))


def strip(entry: Entry, pads: Sequence[int], tokens: Tokens) -> Stripped:
    """Leave out the padding of an entry's token ids, or of its texts."""
    n_prompt = n_response = 0
    if entry.prompt_ids is not None and "prompt" not in entry.masked:
        low, high = _inside(entry.prompt_ids, pads)
        if low and entry.prompt_ids[low - 1] in tokens.own_edges[0]:
            low -= 1
        if high < len(entry.prompt_ids) and entry.prompt_ids[high] in tokens.own_edges[1]:
            high += 1
        n_prompt = len(entry.prompt_ids) - (high - low)
        entry.prompt_ids = entry.prompt_ids[low:high]
    if entry.response_ids is not None and "response" not in entry.masked:
        ids = entry.response_ids
        low, high = _inside(ids, pads)
        ended = high > low and ids[high - 1] in tokens.ends
        if high < len(ids) and ids[high] in tokens.ends and not ended and entry.finish_reason != "length":
            high += 1
        n_response = len(ids) - (high - low)
        if entry.logprobs is not None and len(entry.logprobs) == len(ids):
            entry.logprobs = entry.logprobs[low:high]
        entry.response_ids = ids[low:high]
    # Where ids show that there is no padding, a text is what it seems.
    if isinstance(entry.prompt, str) and (entry.prompt_ids is None or n_prompt):
        entry.prompt, _, n = _text_inside(entry.prompt, pads, tokens)
        n_prompt = n_prompt or n
        begin = tokens.tokenizer.bos_token
        if n or (pads and begin is not None and entry.prompt.startswith(str(begin))):
            entry.prompt_is = "rendered"  # It was decoded with its special tokens.
    if isinstance(entry.response, str) and (entry.response_ids is None or n_response):
        entry.response, after, n = _text_inside(entry.response, pads, tokens)
        ended = any(entry.response.endswith(tokens.written(id)) for id in tokens.ends)
        if after in tokens.ends and not ended and entry.finish_reason != "length":
            entry.response, n = entry.response + tokens.written(after), n - 1
        n_response = n_response or n
    return Stripped(n_prompt, n_response)


def _sides(entry: Entry, tokens: Tokens) -> Iterator[tuple[str, np.ndarray]]:
    """(prompt or response, its ids without mask values) where no mask shows what is padding."""
    for side, ids, text in (
        ("prompt", entry.prompt_ids, entry.prompt),
        ("response", entry.response_ids, entry.response),
    ):
        if ids is None and isinstance(text, str):
            yield side, np.asarray(tokens.encoded(text, entry.where), dtype=np.int64)
        elif ids is not None and side not in entry.masked:
            yield side, ids[ids >= 0]


def _behind_end(ids: np.ndarray, ends: set[int]) -> int | None:
    """The id that fills a response from its end token to its edge, at least twice; None if there is none."""
    last = len(ids) - int(np.argmin(np.r_[ids[::-1] == ids[-1], False])) if len(ids) else 0
    return int(ids[-1]) if len(ids) - last > 1 and last > 0 and ids[last - 1] in ends else None


def _inside(ids: np.ndarray, pads: Sequence[int]) -> tuple[int, int]:
    """Where the ids begin and end that are not padding; (0, 0) if all are."""
    inside = np.flatnonzero((ids >= 0) & ~np.isin(ids, pads))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


def _text_inside(text: str, pads: Sequence[int], tokens: Tokens) -> tuple[str, int | None, int]:
    """(text without the padding that is written out at its edges, the first pad after it, how many pads there were)."""
    written, n, after = {tokens.written(id): id for id in pads}, 0, None
    while pad := next((pad for pad in written if pad and text.startswith(pad)), ""):
        text, n = text.removeprefix(pad), n + 1
    while pad := next((pad for pad in written if pad and text.endswith(pad)), ""):
        text, n, after = text.removesuffix(pad), n + 1, written[pad]
    return text, after, n
