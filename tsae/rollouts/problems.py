"""Problems, and the token ids of their prompts.

A problem is a question for a model, with a reference answer for a verifier. Its prompt goes through the chat template,
unless that has been done, and is tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tsae.base.files import as_path, write_text
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, first_line, is_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = r"(?:\d{1,2} [A-Z][a-z]{2,8} \d{4}|[A-Z][a-z]{2,8} \d{1,2}, \d{4}|\d{4}-\d{2}-\d{2})"
"""A date, as chat templates write it."""
_TODAY = re.compile(rf"^((?:Today(?:'s)? Date|Current date): ){DATE}(?=\.?$)", re.M)


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
            level = None if record.get("level") is None else as_text(record["level"])
            prompt = _text(record, "prompt", str)
            problem = Problem(_text(record, "id"), prompt, _text(record, "answer"), level)
            for text in (problem.id, problem.prompt, problem.answer, level or ""):
                text.encode()  # A lone surrogate, which no table can hold, is reported before anything is sampled.
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


def _text(record: Mapping[str, Any], name: str, kinds: Any = str | int | float) -> str:
    """A text, or a finite number as one."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, float) and not isfinite(value)):
        raise TypeError(f"the {name} is {value!r:.40}")
    return as_text(value)


def as_text(value: Any) -> str:
    """A value as text. If one is missing, pandas makes floats of whole numbers: 18.0 becomes 18."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def undated(prompt: str) -> str:
    """The prompt without the date of the day. With it, a question would be two problems on two days.

    It is a line of the chat template: "Today Date: 26 Jul 2024" (Llama 3, SmolLM3), "Today's Date: July 26, 2024."
    (Granite) or "Current date: 2024-07-26" (gpt-oss).
    """
    return _TODAY.sub(r"\1", prompt)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True, where: str = "tokenizer"
) -> list[int]:
    """Token ids of a text; a TsaeError where the tokenizer refuses it, as one without an unknown token does."""
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except BaseException as error:  # the tokenizers library raises no narrower class, and panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        shown = text if len(text) <= 40 else text[:40] + "…"
        what = f"{shown!r} cannot be tokenised ({error})"
        raise TsaeError(what, where=where, fix="Use texts in the tokenizer's alphabet.") from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    prompt_format: Literal["auto", "plain", "chat"] = "auto",
    where: str = "prompt",
) -> list[int]:
    """Token ids of what the model reads before its response; error messages name `where`.

    "auto" applies the tokenizer's chat template, if it has one, to a prompt that has not been through it.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if prompt_format == "chat" and not has_template:
        fix = 'Use prompt_format="plain" instead of "chat".'
        raise TsaeError("the tokenizer has no chat template", where="prompt_format", fix=fix)
    if prompt_format == "plain" or not has_template:
        return tokenize(tokenizer, prompt, where=where)
    if prompt_format == "auto" and (rendered := templated(tokenizer, prompt)) is not None:
        return tokenize(tokenizer, rendered, add_special_tokens=False, where=where)
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program
        what = f"the tokenizer's chat template cannot be applied ({first_line(error)})"
        raise TsaeError(what, where=where, fix='Correct the template, or use prompt_format="plain".') from error
    # The template writes its own special tokens.
    return tokenize(tokenizer, text, add_special_tokens=False, where=where)


def templated(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """What the model reads, if a text has been through the chat template and has its special tokens; None for others.

    Such a text begins as the template's conversations do, and holds what ends a turn or asks for the answer. It stays
    as it is; only the begin token, which tokenizers add themselves, is put before it if it is missing.
    """
    special = special_tokens(tokenizer)
    if not any(token in text for token in special):
        return None
    for roles in (("user",), ("system", "user")):
        marks: list[Any] = [{"role": role, "content": f"TSAE0{role}0"} for role in roles]
        try:
            rendered = str(tokenizer.apply_chat_template(marks, tokenize=False, add_generation_prompt=True))
        except Exception:  # a template may know no system message
            continue
        first, last = rendered.partition("TSAE0")[0], rendered.rpartition("TSAE0user0")[2]
        begins = [token for token in special if token in first] + without(first, special).split()[:1]
        ends = sorted((token for token in special if token in last), key=last.find) or last.split()
        whole = any(token in first for token in special) and text.lstrip().startswith(first.strip())
        if whole or (ends and ends[0] in text and text.lstrip().startswith(tuple(begins))):
            bos = str(tokenizer.bos_token or "")
            return (bos if first.startswith(bos) and not text.lstrip().startswith(bos) else "") + text
    return None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special tokens as texts, the longest first: one may be part of another."""
    found = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(found | {str(token) for token in tokenizer.all_special_tokens}, key=len, reverse=True)


def without(text: str, tokens: list[str]) -> str:
    """A text without these tokens."""
    for token in tokens:
        text = text.replace(token, "")
    return text
