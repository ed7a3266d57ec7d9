"""Entry: one trajectory as its log has it; and Fields: the columns of a row, checked when they are read.

`Findings` counts what is found beside the rows; hashes compare trajectories that are not kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, NoReturn

import numpy as np

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig, Unfit
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.problems import as_text


class Unusable(TsaeError):
    """A trajectory that cannot be imported; `ImportConfig.skip` leaves out those of its kind."""

    def __init__(self, kind: Unfit, what: str, *, where: str, fix: str | None = None) -> None:
        self.kind = kind
        skip = f"leave such rows out with --skip {kind}"
        super().__init__(what, where=where, fix=f"{fix}, or {skip}" if fix else skip.capitalize())


class _Placed:
    """A row of a log or a trajectory in it, which knows its file and line."""

    __slots__ = ()
    where: str

    def refuse(
        self, what: str, fix: str | None = "Correct or drop that row.", cause: Exception | None = None
    ) -> NoReturn:
        """Raise a `TsaeError` at this place."""
        raise TsaeError(what, where=self.where, fix=fix) from cause

    def unusable(self, kind: Unfit, what: str, fix: str | None = None) -> Unusable:
        """What is here, as a trajectory that cannot be imported."""
        return Unusable(kind, what, where=self.where, fix=fix)

    def leave_out(self, kind: Unfit, what: str, fix: str | None = None) -> NoReturn:
        """Raise what is here, as a trajectory that cannot be imported."""
        raise self.unusable(kind, what, fix)


@dataclass(slots=True)
class Entry(_Placed):
    """One trajectory as its log has it; None where the log does not say."""

    where: str
    """File and line, for error messages."""
    number: int = 0
    """Of the line or row in its file."""
    prompt: str | list[dict[str, Any]] | None = None
    """Text, or the messages of a conversation."""
    prompt_is: Literal["question", "verbatim", "stripped", "perhaps stripped", "rendered", "perhaps rendered"] = (
        "question"
    )
    """What a text is. question: the chat template is still to be applied. verbatim: exactly what the model read.
    stripped: that without its special tokens. perhaps stripped: one of the last two; the template shows which.
    rendered: with all special tokens written out, so that the tokenizer adds none. perhaps rendered: so if it has any,
    and otherwise perhaps stripped."""
    prompt_ids: np.ndarray | None = None
    """(n_prompt,) integers."""
    response: str | None = None
    response_ids: np.ndarray | None = None
    """(n_response,) integers, with the end token where the model gave one."""
    sampled: np.ndarray | None = None
    """(n_response,) bool: which of these the policy sampled, if others wrote tokens between them; None for all."""
    masked: frozenset[str] = frozenset()
    """Of prompt and response, those whose padding a mask of the log has shown; it is left out here."""
    response_rendered: bool = False
    """Special tokens are written out in the text: a response without an end token was cut off."""
    response_length: int | None = None
    """Number of sampled tokens, if a log of text counts them."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By name; None if a function did not score this trajectory."""
    reward: float | None = None
    """The trainer's own total; by default the only reward."""
    unscored: bool | None = None
    """Whether the log has rewards, but none for this trajectory; by default whether there are rewards and no total."""
    correct: bool | None = None
    """If the log says so outright."""
    decides: str | None = None
    """Name of the reward that says what is right, if the format knows it."""
    answer: str = ""
    level: str | None = None
    problem_id: str | None = None
    policy: str | None = None
    """The log's name for the weights that sampled it; where it has none, they are named by `updates`."""
    step: int | None = None
    """The trainer's step in which it was logged."""
    updates: int | None = None
    """Optimiser steps of the weights that sampled it."""
    advantage: float | None = None
    advantage_varies: bool = False
    """The tokens have several advantages, of which `advantage` is the mean."""
    group: str | None = None
    """The log's own name of the group in which the advantage was computed; of one problem and step."""
    logprobs: np.ndarray | None = None
    """(n_response,) log-probabilities of `response_ids` when they were sampled, in nats; empty where the log's do not
    fit these."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages, if the log says them."""
    finish_reason: Literal["stop", "length"] | None = None
    cut_without_end: bool = False
    """Its trainer counts responses without an end token as cut off."""
    key: str | None = None
    """Unique among the entries of a log, if the log has such an id."""
    apart: str = ""
    """What distinguishes it from another entry of equal text that was sampled as other tokens."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Columns that are kept as they are, by name."""
    training: dict[str, Any] = field(default_factory=dict)
    """How the training used it: columns of `TRAINING`, by name."""
    summed: bool = False
    """The reward is the sum of all rewards in the log: without one of them it is another quantity."""
    assumed: str | None = None
    """What its parser assumed, to be counted and printed: "were sampled by …"."""

    def __post_init__(self) -> None:
        if len(self.rewards) == 1 and self.reward is None:
            (self.reward,) = self.rewards.values()
        if self.unscored is None:
            self.unscored = bool(self.rewards) and self.reward is None


Parser = Callable[[LogFile, ImportConfig], Iterator[Entry | Unusable]]
"""(file, config) -> its trajectories, in order."""


def total(rewards: Mapping[str, float | None]) -> float | None:
    """The sum of the rewards that are known; None if none is."""
    known = [value for value in rewards.values() if value is not None]
    return sum(known) if known else None


Row = Mapping[str, Any]

_LONG = "an integer of hundreds of digits"
_STEP = re.compile(r"(?:global_?|train(?:ing)?_?)?(?:step|checkpoint|iter(?:ation)?)[_\- ]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.ASCII)
_REPR = re.compile(r"^(?:np\.|numpy\.|torch\.)?\w+\(\[?([^][(),]*)\]?(?:, *\w+=[^()]*)?\)$")
"""np.float64(1.0), array([1.]), tensor(1., device='cuda:0')."""
_LONGEST_REPR = 1 << 20
"""Characters; to parse Python takes much memory."""
_SPELLED = {
    "true": True, "np.true_": True, "yes": True, "false": False, "np.false_": False, "no": False,
    "": None, "none": None, "null": None,
}  # fmt: skip
_SCORE = re.compile(r"reward|score|accura|correct|(?<![a-z])acc(?![a-z])")

_FINISHES: Mapping[str, Literal["stop", "length"]] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length", "model_length"), "length"),
}
"""What engines and APIs write."""


@dataclass(frozen=True, slots=True)
class Fields(_Placed):
    """The columns of a row, or of an object in it.

    Every method that takes a column's name raises `TsaeError` for a value of another kind. All but `need`, `text`
    and `count` return None (or the empty value of their kind) for a column that is missing or null.
    """

    row: Row
    where: str
    """File and line, for error messages."""
    file: LogFile
    config: ImportConfig
    line: int = 0
    """Number of the line or row in its file."""
    source: Row | None = None
    """The row from which columns are kept, if not this one."""
    index: int = 0
    """Position in a line that holds a batch."""

    def __contains__(self, name: str) -> bool:
        return name in self.row

    def inside(self, row: Row) -> Fields:
        """An object inside this row."""
        return replace(self, row=row, source=self.row if self.source is None else self.source)

    def kept(self) -> dict[str, Any]:
        """The columns of `ImportConfig.keep_columns` that have a value; NaN is how pandas leaves one empty."""
        row = self.row if self.source is None else self.source
        found = {name: row.get(name) for name in self.config.keep_columns}
        return {name: value for name, value in found.items() if value is not None and value == value}

    def get(self, *names: str) -> Any:
        """The first of these columns that has a value."""
        return next((self.row[name] for name in names if self.row.get(name) is not None), None)

    def need(self, name: str) -> Any:
        """A column that must have a value."""
        if self.row.get(name) is None:
            fix = "Give the log as its trainer wrote it, or name its columns and --format plain."
            self.refuse(f"has no {name}; its columns are {', '.join(self.row)}", fix)
        return self.row[name]

    def _wrong(self, name: str, value: Any, expected: str) -> NoReturn:
        shown = _LONG if isinstance(value, int) and not is_finite(value) else repr(value)[:80]
        self.refuse(f"{name} is {shown}, expected {expected}")

    def text(self, name: str) -> str:
        """A text that must be there."""
        value = self.need(name)
        return value if isinstance(value, str) else self._wrong(name, value, "a text")

    def number(self, name: str) -> float | None:
        """A finite number, or its text; see `read_number`."""
        value = read_number(self.row.get(name))
        if value is not None and not is_finite(value):
            self._wrong(name, value, "a finite number")
        return None if value is None else float(value)

    def score(self, name: str) -> float | None:
        """A reward; NaN, which is how torch and pandas write that there is none, becomes None."""
        value = read_number(self.row.get(name))
        return None if isinstance(value, float) and math.isnan(value) else self.number(name)

    def logged_score(self, name: str) -> float | None:
        """A reward whose column must be there; it may be empty."""
        if name not in self.row:
            self.need(name)
        return self.score(name)

    def scores(self) -> dict[str, float | None]:
        """All columns as rewards."""
        return {name: self.score(name) for name in self.row}

    def whole(self, name: str) -> int | None:
        """A whole number; see `count`."""
        return None if read_number(self.row.get(name)) is None else self.count(name)

    def count(self, name: str) -> int:
        """A whole number that must be there; of a step also its name, such as global_step_10."""
        logged = self.need(name)
        named = _STEP.fullmatch(logged.strip()) if isinstance(logged, str) else None
        value = read_number(logged if named is None else named[1])
        if not is_finite(value) or int(value) != value or not is_finite(int(value)):
            self._wrong(name, logged, "a whole number of at most 63 bits")
        return int(value)

    def truth(self, name: str) -> bool | None:
        """True or false: a flag, 0 or 1, or the text of one."""
        value = read_number(self.row.get(name))
        # True == 1 == 1.0, so that the flags of other languages and of pandas are understood.
        if value is not None and value not in (0, 1):
            self._wrong(name, value, "true or false")
        return None if value is None else bool(value)

    def label(self, name: str) -> str | None:
        """A name, given as a text or a number; NaN, which is how pandas writes that there is none, becomes None."""
        value = self.row.get(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (math.inf, -math.inf):
            self._wrong(name, value, "a text or a number")
        if isinstance(value, float):
            return None if math.isnan(value) else as_text(value)
        return str(value) if value.bit_length() <= 63 else hex(value)

    def object(self, name: str) -> Fields:
        """The object in a column; an empty one if there is none."""
        found = self.row.get(name)
        if found is not None and not isinstance(found, Mapping):
            self._wrong(name, found, "an object")
        return self.inside(found or {})

    def marks(self, name: str) -> np.ndarray:
        """(n,) bool: which tokens are marked, by true or by a number above 0. The column must be there."""
        value = read_numbers(self.need(name))
        found = np.asarray(value) if isinstance(value, (list, tuple, np.ndarray)) else np.zeros((0, 0))
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "biuf") or not np.isfinite(found).all():
            self._wrong(name, value, "a list of marks, one a token")
        return np.asarray(found > 0)

    def ids(self, name: str) -> np.ndarray:
        """(n,) int64 token ids. The column must be there."""
        value = read_numbers(self.need(name))
        try:
            found = np.asarray(value)
        except (ValueError, OverflowError):
            found = np.zeros((0, 0))
        # numpy takes True among integers for 1.
        flags = isinstance(value, (list, tuple)) and any(isinstance(id, bool) for id in value)
        if found.ndim != 1 or flags or (len(found) and found.dtype.kind != "i"):
            self._wrong(name, value, "a list of token ids")
        return found.astype(np.int64)

    def optional_ids(self, name: str) -> np.ndarray | None:
        """(n,) int64 token ids."""
        return None if self.row.get(name) is None else self.ids(name)

    def answer(self, *names: str) -> str:
        """A reference answer as text; a list of one counts as that one, anything else structured becomes JSON."""
        value = self.get(*names)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if value is None or value != value:
            return ""
        if isinstance(value, (str, float)):
            return as_text(value)
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)

    def finish(self, name: str) -> Literal["stop", "length"] | None:
        """A finish reason, whatever the engine calls it; None for another one."""
        return _FINISHES.get(str(self.row.get(name)).lower())


def some_of(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are, for a sentence."""
    names = list(names)
    return ", ".join(names[:most]) + f" and {len(names) - most:,} more" * (len(names) > most)


def writable(value: Any) -> Any:
    """JSON content whose texts have the code points (``\\ud800``) of lone surrogates, which no file can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {writable(name): writable(inside) for name, inside in value.items()}
    return [writable(inside) for inside in value] if isinstance(value, list) else value


def read_number(value: Any) -> Any:
    """A number that is given as text, as a list of one, or by numpy; None if the text says that there is none.

    Texts are those of JSON and Python, of numpy and torch ("np.float64(1.0)", "tensor(1.)"), and "True" and "False".
    Anything else stays what it is, for the error message.
    """
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if math.prod(getattr(value, "shape", (0,))) == 1:
        return value.item()
    if not isinstance(value, str):
        return value
    text = _REPR.sub(r"\1", value.strip()).lower()
    if text in _SPELLED:
        return _SPELLED[text]
    if not _NUMBER.fullmatch(text):
        return value
    # As a float, an integer above 2⁵³ would be its neighbour.
    return int(text) if text.lstrip("+-").isdecimal() and len(text) < 100 else float(text)


def read_list(value: Any) -> Any:
    """A list, or the object, that is given as text, in JSON or as Python prints it; anything else stays what it is."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return parse_json(value)
        # pandas writes lists into CSV as Python prints them; numpy prints no commas between lines.
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return literal_eval(re.sub(r"}\n *{", "}, {", value.strip())) if len(value) < _LONGEST_REPR else value
    return value


def read_numbers(value: Any) -> Any:
    """A list of numbers, which may be texts, as may be the list; anything else stays what it is."""
    value = read_list(value)
    texts = isinstance(value, (list, tuple)) and isinstance(next(iter(value), None), str)
    return [read_number(inside) for inside in value] if texts else value


def is_score(name: str, value: Any) -> bool:
    """Whether a further column of a log is a reward: it holds a number, or under a reward's name one as text."""
    if isinstance(value, (str, list)):
        return bool(_SCORE.search(name.lower())) and isinstance(read_number(value), (int, float))
    return isinstance(value, (int, float, np.number))


def is_finite(value: Any) -> bool:
    """Whether it is a finite number; 64 bits hold what any log counts."""
    if isinstance(value, int):
        return value.bit_length() <= 63
    return isinstance(value, float) and math.isfinite(value)


def hash64(*parts: str | bytes) -> int:
    """64 bits of the parts, kept apart."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def place_hash(where: str) -> int:
    """64 bits of a file's name and a row, without its folder: a log that was moved draws the same samples."""
    return hash64(PurePath(where).name)


_DRAWN = {"answers": 8, "log-probabilities": 4}
"""Sizes of samples, by the first word of their kind."""


class Findings:
    """What is found in a log beside its rows. The findings of its parts add up to those of the whole."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By kind, how often each thing was found. Each keeps the order in which things were found first."""
        self.first: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By kind, where each thing was found first."""
        self.samples: defaultdict[str, list[list[Any]]] = defaultdict(list)
        """By kind, [hash, what was drawn]: those with the smallest hashes, so that parts can be sampled one by one."""

    def draw(self, kind: str, key: int, what: Any) -> None:
        """Take something into a sample, if its hash is small enough."""
        kept = self.samples[kind]
        kept.append([key, what])
        if len(kept) > _DRAWN[kind.split()[0]]:
            kept.remove(max(kept, key=lambda one: one[0]))

    def add(self, found: Mapping[str, Any]) -> None:
        """Add the variables of the findings of the next part of the log, as JSON has them."""
        for kind, counts in found["counts"].items():
            self.counts[kind].update(counts)
        for kind, places in found["first"].items():
            for name, where in places.items():
                self.first[kind].setdefault(name, where)
        for kind, drawn in found["samples"].items():
            for key, what in drawn:
                self.draw(kind, key, what)
