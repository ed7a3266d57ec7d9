"""Padding of a log: what the tensors of a batch have around prompts and responses, and nobody read or sampled.

1. Negative ids (−100, −1) are mask values, not tokens.
2. A token pads a log if it stands several times at an edge of a prompt or response, or at the beginning of some prompts
   alone. Candidates are the tokenizer's pad token, end tokens, and any id that fills a prompt up to the special token
   with which prompts begin, repeats itself behind an end token, or, where rows have the width of a batch, at edges of
   a quarter of prompts and responses. In texts only special tokens count. The first rows of the first files decide.
3. Special tokens that pad a log are left out at all edges, others only at those where the log repeats them. A token
   that the tokenizer or the chat template writes at that edge of a prompt stays once, and so does the end token of a
   response, unless the log says that the response was cut.

Where masks of the log have shown what is padding (`Entry.masked`), only these count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.tokens import Tokens

_EDGES = ("prompt left", "prompt right", "response left", "response right")
_FILES, _ROWS = 8, 256
"""How many files, and rows of them, decide what pads a log."""


def find_pads(form: Format, files: Sequence[LogFile], config: ImportConfig, tokens: Tokens) -> dict[str, list[int]]:
    """By edge ("prompt left", …), the token ids that pad a log; those of `ImportConfig.pad_ids` if they are given."""
    if config.pad_ids is not None:
        return {edge: list(config.pad_ids) for edge in _EDGES}
    sides: list[tuple[str, np.ndarray]] = []
    with suppress(TsaeError):  # the import itself reports it
        for file in files[:_FILES]:
            for entry in islice(form.read(file, config), _ROWS // len(files[:_FILES])):
                sides += [] if isinstance(entry, Unusable) else _sides(entry, tokens)
    own, runs = tokens.ends | {tokens.tokenizer.pad_token_id}, Counter[tuple[str, int, int]]()
    filled, before = Counter[tuple[str, int]](), set[int]()
    for side, ids in sides:  # what repeats itself behind an end token, or before the beginning
        turned, border = (ids[::-1], tokens.ends) if side == "response" else (ids, tokens.own_edges[0])
        n = _run(turned, turned[0]) if len(turned) else 0
        if n < len(turned) and turned[0] not in border and int(turned[n]) in border and (n > 1 or side == "prompt"):
            (before if side == "prompt" else own).add(int(turned[0]))
        filled.update({(side, int(turned[0])) for turned in (ids, ids[::-1]) if _run(turned, *turned[:1]) > 1})
    if 4 * len({(side, len(ids)) for side, ids in sides}) <= len(sides):
        both = ("prompt", "response")
        own |= {id for _, id in filled if all(4 * filled[side, id] >= len(sides) / 2 for side in both)}
    for side, ids in sides:
        for id in {id for id in own | before if id is not None and id >= 0}:
            runs.update([(f"{side} left", id, _run(ids, id)), (f"{side} right", id, _run(ids[::-1], id))])
    uneven = Counter(id for side, id, _ in runs if side == "prompt left")
    # What stands before the beginning of prompts pads nothing by what stands elsewhere, such as line breaks.
    shown = {(edge, id) for edge, id, n in runs if n > 1 and (id in own or edge == "prompt left")}
    shown |= {("prompt left", id) for id, times in uneven.items() if times > 1}
    everywhere = tokens.ends | tokens.special
    pads = sorted({id for _, id in shown})
    return {edge: [id for id in pads if id in everywhere or (edge, id) in shown] for edge in _EDGES}


def strip(entry: Entry, tokens: Tokens) -> tuple[int, int]:
    """Leave out the padding of an entry's ids, or of its texts; returns how many of the prompt and response that is."""
    n_prompt, n_response, pads = 0, 0, tokens.pads
    cut = entry.finish_reason == "length"
    if entry.prompt_ids is not None and "prompt" not in entry.masked:
        ids, (low, high) = entry.prompt_ids, _inside(entry.prompt_ids, pads, "prompt")
        low -= low > 0 and int(ids[low - 1]) in tokens.own_edges[0]
        high += high < len(ids) and int(ids[high]) in tokens.own_edges[1]
        entry.prompt_ids, n_prompt = ids[low:high], len(ids) - (high - low)
    if entry.response_ids is not None and "response" not in entry.masked:
        ids, (low, high) = entry.response_ids, _inside(entry.response_ids, pads, "response")
        ended = high > low and int(ids[high - 1]) in tokens.ends
        high += high < len(ids) and int(ids[high]) in tokens.ends and not ended and not cut
        if entry.logprobs is not None and len(entry.logprobs) == len(ids):
            entry.logprobs = entry.logprobs[low:high]
        entry.response_ids, n_response = ids[low:high], len(ids) - (high - low)
    # Where ids show that there is no padding, a text is what it seems.
    if any(pads.values()) and isinstance(entry.prompt, str) and (entry.prompt_ids is None or n_prompt):
        before, entry.prompt, after = _split(entry.prompt, "prompt", tokens)
        n_prompt = n_prompt or len(before) + len(after)
        if before or after or entry.prompt.startswith(tokens.tokenizer.bos_token or "\0"):
            entry.prompt_is = "rendered"  # It was decoded with its special tokens.
    if any(pads.values()) and isinstance(entry.response, str) and (entry.response_ids is None or n_response):
        before, entry.response, after = _split(entry.response, "response", tokens)
        ended = entry.response.endswith(tuple(map(tokens.written, tokens.ends)))
        kept = after[:1] if after and after[0] in map(tokens.written, tokens.ends) and not ended and not cut else []
        n_response = n_response or len(before) + len(after) - len(kept)
        entry.response += "".join(kept)
    return n_prompt, n_response


def _sides(entry: Entry, tokens: Tokens) -> Iterator[tuple[str, np.ndarray]]:
    """(prompt or response, its ids without mask values) where no mask shows what is padding."""
    both = (("prompt", entry.prompt_ids, entry.prompt), ("response", entry.response_ids, entry.response))
    for side, ids, text in both:
        if ids is None and isinstance(text, str):
            found = np.asarray(tokens.encode(text, entry.where), dtype=np.int64)
            yield side, np.where(np.isin(found, tokens.tokenizer.all_special_ids), found, -1 - found)  # no pads
        elif ids is not None and side not in entry.masked:
            yield side, ids[ids >= 0]


def _run(ids: np.ndarray, id: int = -1) -> int:
    """How many times an id stands at the beginning."""
    return int(np.argmin(np.r_[ids == id, False]))


def _inside(ids: np.ndarray, pads: Mapping[str, Sequence[int]], side: str) -> tuple[int, int]:
    """Where the ids of a prompt or response begin and end that are not padding; (0, 0) if all are."""
    low, high = (
        int(np.argmin(np.r_[(turned < 0) | np.isin(turned, pads[f"{side} {edge}"]), False]))
        for edge, turned in (("left", ids), ("right", ids[::-1]))
    )
    return (low, max(low, len(ids) - high)) if low < len(ids) else (0, 0)


def _split(text: str, side: str, tokens: Tokens) -> tuple[list[str], str, list[str]]:
    """(pads that are written out before a prompt or response, its text, those after it)."""
    written = [[tokens.written(id) for id in tokens.pads[f"{side} {edge}"] if id >= 0] for edge in ("left", "right")]
    left, right = ("|".join(map(re.escape, filter(None, pads))) or "(?!)" for pads in written)
    found = re.fullmatch(f"((?:{left})*)(.*?)((?:{right})*)", text, re.DOTALL)
    assert found is not None
    return re.findall(left, found[1]), found[2], re.findall(right, found[3])
