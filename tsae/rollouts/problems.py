"""Problems: questions for a model, with reference answers for a verifier."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsae.base.files import as_path, write_text
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Problem:
    """One question with a checkable answer."""

    id: str
    """Unique within a problem set."""
    prompt: str
    """The text for the model, before any chat template."""
    answer: str
    """The reference answer."""
    level: str | None = None
    """The author's own label (number of operations, school year); not a band, which depends on a model."""
    ids: tuple[int, ...] | None = None
    """Token ids of the prompt, where they are known: nothing is tokenised then."""


def write_problems(problems: Iterable[Problem], path: str | Path) -> None:
    """Write problems as JSON lines: id, prompt, answer, level."""
    written = ({name: value for name, value in vars(p).items() if name != "ids"} for p in problems)
    lines = [json.dumps(record, ensure_ascii=False) for record in written]
    write_text(path, "".join(line + "\n" for line in lines))


def read_problems(path: str | Path) -> list[Problem]:
    """Read JSON lines with the fields id, prompt, answer and, optionally, level.

    Raises:
        TsaeError: where the file is missing, a line is not JSON, a field is missing, or an id comes twice.
    """
    path = as_path(path)
    if not path.is_file():
        raise TsaeError("no such problem file", where=path, fix="Give a JSONL file of id, prompt and answer.")
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, line in json_lines(path):
        try:
            record = parse_line(line)
            level = None if record.get("level") is None else str(record["level"])
            problem = Problem(_text(record, "id"), record["prompt"], _text(record, "answer"), level)
            if not isinstance(problem.prompt, str):
                raise TypeError(f"the prompt is a {type(problem.prompt).__name__}")
            for text in (problem.id, problem.prompt, problem.answer, level or ""):
                text.encode()  # A lone surrogate, which no table can hold, is said before anything is sampled.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TsaeError(
                f"not a problem ({type(error).__name__}: {error}); expected a JSON object with id, prompt, answer, "
                "which are texts, or finite numbers for id and answer",
                where=f"{path}:{number}",
                fix="Correct that line.",
            ) from error
        if problem.id in seen:
            raise TsaeError(f"problem id {problem.id!r} comes twice", where=f"{path}:{number}", fix="Make ids unique.")
        seen.add(problem.id)
        problems.append(problem)
    if not problems:
        raise TsaeError("holds no problems", where=path, fix="Give a JSONL file of id, prompt and answer.")
    return problems


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of a file's lines, without blank ones. Only \\n ends a line: texts may hold U+2028."""
    with path.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def parse_line(line: bytes) -> Any:
    """What a line of `json_lines` says.

    Raises:
        ValueError: where it is not JSON in UTF-8.
    """
    return parse_json(line.decode("utf-8-sig"), names_once=True)


def _text(record: Mapping[str, Any], name: str) -> str:
    """A text, or a number as one."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"the {name} is a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the {name} is {value}")
    return str(value)
