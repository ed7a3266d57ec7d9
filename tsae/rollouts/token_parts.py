"""Token parts: which tokens of a response are its answer, which are thinking, and which the policy did not sample.

The column ``parts`` of a Rollouts table has a list with one small integer a response token; null means that the whole
response is a plain answer. A table without such responses has no such column. Parts are labels, as outcomes are:
activations do not depend on them.

`Spans` tells thinking from answer in the tokens of a response, by the markers around thinking:

1. Every token id has a text of its own. The texts of a response's tokens are joined, so a marker is found with exact
   token offsets, whether it is one token or several. A token with any character of a marker or of thinking is
   thinking. Characters that are cut over tokens do no harm: markers are ASCII.
2. The end of the prompt says how the response begins. After a marker that opens (``<think>\\n``, as the templates of
   DeepSeek R1 and others write) it is thinking from its first token; after one that closes (the empty
   ``<think>\\n\\n</think>\\n\\n`` of Qwen3 with enable_thinking false) it is not. The same holds for what stands
   between the turns of a response and was not sampled.
3. Thinking lasts until the marker that closes it, or the end of the turn. If the first marker of a turn closes,
   everything before it in the turn is thinking, as inference engines read it: some models never write the one that
   opens.
4. A turn ends with a special token. Text that was inserted without one, such as a tool's result inside thinking, does
   not end one: thinking continues after it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tsae.errors import TsaeError
from tsae.rollouts.parquet import list_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ANSWER, THINKING, OTHER = 0, 1, 2
"""Sampled, but not while thinking; sampled while thinking, with the markers around it; not sampled: a tool's result, a
user's turn, what a template writes between turns."""

COLUMN = "parts"
FIELD = pa.field(COLUMN, pa.list_(pa.int8()))
_ROWS = 1024
_KNOWN = pa.array([ANSWER, THINKING, OTHER], pa.int8())


class TokenParts:
    """What a table of rollouts says about the tokens of its responses."""

    table: pa.Table

    @cached_property
    def n_sampled(self) -> np.ndarray:
        """(n,) response tokens that the policy sampled, without those of tools, users and templates."""
        return count_sampled(self.table)

    @cached_property
    def has_thinking(self) -> bool:
        """Whether any response has thinking."""
        if COLUMN not in self.table.column_names:
            return False
        return any(pc.any(pc.equal(chunk.flatten(), THINKING)).as_py() for chunk in self.table[COLUMN].chunks)

    @property
    def _is_plain(self) -> bool:
        """Whether all responses are plain answers, whether or not the table has the column."""
        return COLUMN not in self.table.column_names or self.table[COLUMN].null_count == len(self.table)

    def token_parts(self, rows: np.ndarray | Sequence[int]) -> np.ndarray | None:
        """(n_tokens,) int8 part of every token of some rows, prompts (ANSWER) and responses; None where all responses
        of the table are plain."""
        if self._is_plain:
            return None
        rows = np.asarray(rows, dtype=np.int64)
        prompt, response = (list_lengths(self.table[name])[rows] for name in ("prompt_ids", "response_ids"))
        found = np.zeros(int((prompt + response).sum()), dtype=np.int8)
        begin = (prompt + response).cumsum() - response  # where every response begins
        order = np.argsort(rows, kind="stable")
        edges = np.cumsum([0, *(len(chunk) for chunk in self.table[COLUMN].chunks)])
        bounds = np.searchsorted(rows[order], edges)
        # Chunk by chunk: the column stays where it is, in a mapped file.
        for number, chunk in enumerate(self.table[COLUMN].chunks):
            mine = order[bounds[number] : bounds[number + 1]]
            place = rows[mine] - edges[number]
            known = ~np.asarray(chunk.is_null())[place]
            mine, place = mine[known], place[known]
            offsets = chunk.offsets.to_numpy()
            low, length = offsets[place].astype(np.int64), (offsets[place + 1] - offsets[place]).astype(np.int64)
            found[_ranges(begin[mine], length)] = chunk.values.to_numpy()[_ranges(low, length)]
        return found

    def response_parts(self, row: int) -> np.ndarray:
        """(n,) int8 part of every response token of one trajectory."""
        found = self.table[COLUMN][row].values if COLUMN in self.table.column_names else None
        if found is None:
            return np.full(len(self.table["response_ids"][row].values), ANSWER, dtype=np.int8)
        return np.array(found.to_numpy())

    def sampled(self, row: int) -> np.ndarray:
        """(n,) bool: which response tokens of one trajectory the policy sampled."""
        return np.asarray(self.response_parts(row) != OTHER)

    @cached_property
    def parts_fingerprint(self) -> str:
        """Hash of the parts of all responses; empty where all are plain."""
        if self._is_plain:
            return ""
        digest = hashlib.sha256()
        # The fingerprint of the trajectories covers the lengths. A null differs from a list of ANSWER.
        digest.update(np.packbits(np.asarray(self.table[COLUMN].is_null())).tobytes())
        for chunk in self.table[COLUMN].chunks:
            digest.update(np.ascontiguousarray(chunk.flatten().to_numpy()).data)
        return digest.hexdigest()[:16]


def check_parts(table: pa.Table, where: str) -> None:
    """Refuse parts that do not go with the responses.

    Raises:
        TsaeError: for lists of another length than the response, unknown parts, and responses without a sampled token.
    """
    if COLUMN not in table.column_names:
        return
    lengths, known = list_lengths(table["response_ids"]), ~np.asarray(table[COLUMN].is_null())
    found = list_lengths(table[COLUMN])
    what = ""
    if len(wrong := np.flatnonzero(known & (found != lengths))):
        what = f"row {wrong[0]} has {found[wrong[0]]} parts for {lengths[wrong[0]]} response tokens"
    elif not all(pc.all(pc.is_in(chunk.flatten(), _KNOWN)).as_py() is not False for chunk in table[COLUMN].chunks):
        what = f"{COLUMN} holds values other than {ANSWER} (answer), {THINKING} (thinking) and {OTHER} (not sampled)"
    elif len(empty := np.flatnonzero(count_sampled(table) == 0)):
        what = f"row {empty[0]} has no sampled token"
    if what:
        raise TsaeError(what, where=where, fix=f"Correct the column {COLUMN}: one part a response token, or null.")


def count_sampled(table: pa.Table) -> np.ndarray:
    """(n,) response tokens that the policy sampled."""
    lengths = list_lengths(table["response_ids"])
    if COLUMN not in table.column_names:
        return lengths
    others, row = np.zeros(len(lengths), dtype=np.int64), 0
    for chunk in table[COLUMN].chunks:
        offsets, values, known = chunk.offsets.to_numpy(), chunk.values.to_numpy(), ~np.asarray(chunk.is_null())
        for low in range(0, len(chunk), _ROWS):  # Counts take eight times the memory of the parts.
            ends = offsets[low : low + _ROWS + 1]
            before = np.concatenate([[0], (values[ends[0] : ends[-1]] == OTHER).cumsum()])
            counts = np.diff(before[ends - ends[0]])
            # Values under a null mean nothing.
            others[row : row + len(counts)] = np.where(known[low : low + _ROWS], counts, 0)
            row += len(counts)
    return np.asarray(lengths - others)


def _ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, … for every length, one after another."""
    return np.arange(int(length.sum())) + np.repeat(begin - length.cumsum() + length, length)


class Markers(NamedTuple):
    """How thinking is marked."""

    name: str
    """For people."""
    opens: str
    """A pattern; linear in time, because models write the texts."""
    closes: str
    may_begin_inside: bool = True
    """Whether a turn whose first marker closes began inside thinking."""


MARKERS = (
    # <think>: DeepSeek R1, Qwen3, QwQ, open-r1, SmolLM3, GLM-4.5, Olmo 3, Nemotron, MiniMax and most others.
    *(
        Markers(f"<{tag}>", f"<{tag}>", f"</{tag}>")
        for tag in ("think", "thinking", "reasoning", "thought", "seed:think")
    ),
    Markers("[THINK]", r"\[THINK\]", r"\[/THINK\]"),  # Magistral
    Markers("<|START_THINKING|>", r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere
    Markers("<|begin_of_thought|>", r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThoughts, Sky-T1
    Markers("<|inner_prefix|>", r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    Markers("<|channel>thought", r"<\|channel>thought", r"<channel\|>", may_begin_inside=False),  # Gemma 4
    Markers(  # gpt-oss (harmony); the header of the final channel is not part of the answer.
        "<|channel|>analysis",
        r"<\|channel\|>analysis(?:<\|message\|>)?",
        r"<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?(?:<\|channel\|>final<\|message\|>)?",
        may_begin_inside=False,
    ),
)
"""All known markers. A model with others needs a line here."""

# Without groups: re then looks for the characters that markers begin with, which is much faster.
_OPENS = re.compile("|".join(m.opens for m in MARKERS))
_CLOSES = [re.compile(m.closes) for m in MARKERS]
_FIRST = re.compile("|".join(m.closes for m in MARKERS if m.may_begin_inside))
_OPENED = re.compile(rf"({'|'.join(m.opens for m in MARKERS)})\s*\Z")
_CLOSED = re.compile(rf"(?:{'|'.join(m.closes for m in MARKERS)})\s*\Z")
_LOOK_BACK = 64
"""Tokens at a prompt's end to look at: more than any marker and white space take."""


class Found(NamedTuple):
    """What was found in one response."""

    parts: np.ndarray | None
    """(n_response,) int8, see `tsae.rollouts.token_parts`; None if all of it is one plain answer."""
    marker: str = ""
    """Name of the markers; empty without thinking."""
    unopened: bool = False
    """Whether a turn closes thinking that nothing opened."""


class Spans:
    """Finds thinking in the responses of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts = TokenTexts(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {id for id, token in added if token.special} | set(tokenizer.all_special_ids)

    def of(self, prompt: np.ndarray, response: np.ndarray, sampled: np.ndarray | None = None) -> Found:
        """Find what the tokens of a response are.

        Args:
            prompt: (n_prompt,) token ids.
            response: (n_response,) token ids.
            sampled: (n_response,) bool, which of them the policy sampled; None for all.
        """
        texts = [self._texts[id] for id in response.tolist()]
        whole, begins = "".join(texts), self._end(prompt)
        if sampled is None and begins is None and not _OPENS.search(whole) and not _FIRST.search(whole):
            return Found(None)
        at = np.concatenate([[0], np.cumsum([len(text) for text in texts])])  # (n_response + 1,) start of every text
        others = np.zeros(len(response), dtype=bool) if sampled is None else ~sampled
        scan = _Scan(whole, begins)
        for low, high in _runs(others):
            if not others[low]:
                scan.sampled(int(at[low]), int(at[high]))
                continue
            ends = self._end(response[low:high])
            if ends is not None or any(int(id) in self._special for id in response[max(low - 1, 0) : high]):
                scan.begin(ends, int(at[high]))
        before = np.concatenate([[0], np.cumsum(scan.thinking)])
        thinks = before[at[1:]] > before[at[:-1]]
        # A token without a text is what its neighbour on the left is.
        for i in np.flatnonzero(at[1:] == at[:-1]).tolist():
            thinks[i] = bool(thinks[i - 1]) if i else begins is not None and begins >= 0
        parts = np.where(others, OTHER, np.where(thinks, THINKING, ANSWER)).astype(np.int8)
        if not parts.any():
            return Found(None)
        return Found(parts, scan.marker if (parts == THINKING).any() else "", scan.unopened)

    def lost(self, vocabulary: dict[str, int]) -> str | None:
        """Name of markers that are special tokens of a vocabulary, which texts without special tokens lack; or None."""
        for markers in MARKERS:
            first = re.match(r"<\|?[\w:]+\|?>|\[\w+\]", markers.name)
            if first and vocabulary.get(first[0]) in self._special:
                return markers.name
        return None

    def _end(self, ids: np.ndarray) -> int | None:
        """Number of the markers that the end of a text opens; −1 if it closes any, None if it does neither."""
        text = "".join(self._texts[id] for id in ids[-_LOOK_BACK:].tolist())
        if (opened := _OPENED.search(text)) is not None:
            return _opening(opened[1])
        return -1 if _CLOSED.search(text) else None


def told(found: Found, sampled: np.ndarray | None) -> list[str]:
    """What was found in a response, to print after the number of such responses."""
    lines = []
    if found.marker:
        lines.append(f"responses have thinking, marked by {found.marker} (--span thinking or answer)")
    if found.unopened:
        lines.append("responses close thinking that nothing opens: all before it in the turn counts as thinking")
    if sampled is not None:
        lines.append("responses have several turns: what the policy did not sample in between counts nowhere")
    return lines


class _Scan:
    """Goes through the characters of a response, stretch by stretch, and marks thinking."""

    def __init__(self, text: str, begins: int | None) -> None:
        self.text = text
        self.thinking = np.zeros(len(text), dtype=bool)
        self.unopened = False
        self._names: Counter[str] = Counter()
        self.begin(begins, 0)

    @property
    def marker(self) -> str:
        """Name of the most frequent markers; empty without any."""
        return self._names.most_common(1)[0][0] if self._names else ""

    def begin(self, end: int | None, at: int) -> None:
        """Begin a turn at a character, after a text with this end (see `Spans._end`)."""
        self._open = None if end == -1 else end
        self._turn, self._fresh = at, end is None
        if self._open is not None:
            self._names[MARKERS[self._open].name] += 1

    def sampled(self, low: int, high: int) -> None:
        """Go through a sampled stretch, from a character to another."""
        if self._fresh and self._open is None:
            self._unopened(low, high)
        while low < high:
            start = low
            if self._open is None:
                found = _OPENS.search(self.text, low, high)
                if found is None:
                    return
                self._open, self._fresh = _opening(found[0]), False
                self._names[MARKERS[self._open].name] += 1
                start, low = found.start(), found.end()
            closed = _CLOSES[self._open].search(self.text, low, high)
            low = high if closed is None else closed.end()
            self.thinking[start:low] = True
            if closed is not None:
                self._open = None

    def _unopened(self, low: int, high: int) -> None:
        """If the first marker of the turn closes, mark everything before it as thinking."""
        closed = _FIRST.search(self.text, low, high)
        opened = _OPENS.search(self.text, low, high)
        if closed is None or (opened is not None and opened.start() < closed.start()):
            return
        self.thinking[self._turn : closed.end()] = True
        self._fresh, self.unopened = False, True
        self._names[next(m.name for m in MARKERS if re.fullmatch(m.closes, closed[0]))] += 1


class TokenTexts(dict[int, str]):
    """The text of every token id inside a longer text; looked up once each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> str:
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        # Twice, because decoders leave out the space before a first word.
        once, twice = (
            str(self._tokenizer.decode(ids, skip_special_tokens=False, **options)) for ids in ([id], [id, id])
        )
        self[id] = found = twice[len(once) :]
        return found


def _opening(text: str) -> int:
    """Number of the markers that a text opens."""
    return next(number for number, m in enumerate(MARKERS) if re.fullmatch(m.opens, text))


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of every run of equal values."""
    edges = np.flatnonzero(np.diff(values)) + 1
    yield from zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True)
