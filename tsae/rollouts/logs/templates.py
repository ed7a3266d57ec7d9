"""Chat templates and logs: reconstructs prompts that lost their special tokens, and notices turns of others.

1. A trainer that decodes prompts without special tokens logs, for a conversation, the text of its template without
   them. The template is rendered around placeholders; if the text without special tokens has the same beginning,
   seams and end, the messages are what stands between. A text that fits in several ways is reported.
2. Arguments of the template (``enable_thinking``, a date) show in that text. If the user did not give them, those that
   give the logged text are used.
3. A response that was decoded the same way may contain the turns of a tool: the header of another's turn, and after it
   the header that asks the assistant to continue.

`find_settings` reads the template's arguments from a trainer's own config beside the log: Hydra writes verl's config to
``.hydra/config.yaml`` in the run's folder. Its ``data.apply_chat_template_kwargs`` are the template's arguments (verl
0.5 and later). Other trainers whose logs need the template (TRL, open-r1) keep their settings in pickles, which are
never read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tsae.base.untrusted import parse_yaml
from tsae.errors import TsaeError
from tsae.rollouts.problems import DATE, special_tokens, tokenize, without

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = Mapping[str, Any]
_SENTINEL = "TSAE0MESSAGE{}0"
_MOST_TURNS, _MOST_SPLITS = 16, 16
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""What transformers itself gives to a template, beside the tokenizer's special tokens."""
_DATE = re.compile(rf"\b{DATE}\b")


class Restored(NamedTuple):
    """A prompt that was reconstructed."""

    ids: list[int]
    arguments: Mapping[str, Any]
    """Arguments of the template, beside those that were given, without which it does not give the text."""
    several: bool
    """Whether other conversations give the same text."""
    bare: bool = False
    """Whether it has no system message, though the template always writes one."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: has one.
        arguments: given to every rendering.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.arguments = tokenizer, dict(arguments or {})
        self._special = special_tokens(tokenizer)
        self._rendered: dict[str, list[str] | None] = {}

    def render(self, messages: Sequence[Message], *, goes_on: bool = False, **arguments: Any) -> str:
        """The text that the model reads; `goes_on` if the last message is the beginning of the response."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            **{"add_generation_prompt": not goes_on, "continue_final_message": goes_on, **self.arguments, **arguments},
        )
        return str(text)

    @cached_property
    def open_arguments(self) -> tuple[str, ...]:
        """Arguments that the template reads and that were not given, such as enable_thinking."""
        from jinja2 import Environment, TemplateSyntaxError, meta, nodes

        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self.tokenizer.get_chat_template())
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except TemplateSyntaxError:
            return ()
        # A variable that the template sets itself is not an argument, unless it asks whether it was given.
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        asked = {
            node.node.name
            for node in tree.find_all((nodes.Test, nodes.Filter))
            if node.name in ("defined", "default", "d") and isinstance(node.node, nodes.Name)
        }
        read = meta.find_undeclared_variables(tree) - (own - asked)
        return tuple(sorted(read - _GIVEN - set(self.tokenizer.special_tokens_map) - set(self.arguments)))

    @cached_property
    def own_system(self) -> bool:
        """Whether it writes a system message of its own if there is none."""
        first, turns = self._skeleton(("user",)), self._skeleton(("user", "assistant", "user"))
        return bool(first and turns and re.search(r"\w", first[0].removesuffix(turns[2].lstrip())))

    def keeps_special(self, text: str) -> bool:
        """Whether a text contains special tokens."""
        return any(token in text for token in self._special)

    def restore(self, stripped: str, begun: str = "") -> Restored | None:
        """Reconstruct a prompt from its text without special tokens.

        Args:
            stripped: the text.
            begun: the beginning of a response that was put behind the prompt, such as <think>.

        Returns:
            None if no rendering decodes to `stripped`, or to that with the white space at its end that it lost.
        """
        for bare, arguments in product((False, True)[: 1 + self.own_system], self.variants(stripped)):
            end = self._end(arguments)
            for text in (stripped, stripped + end[len(end.rstrip()) :]):
                found = list(dict.fromkeys(self._fits(text, arguments, begun, bare=bare)))
                if found:
                    return Restored(list(found[0]), arguments, len(found) > 1 or self._hides_turns, bare)
        return None

    def _end(self, arguments: Mapping[str, Any]) -> str:
        """What a prompt ends in, without special tokens: "assistant" and a line break in most templates."""
        return (self._skeleton(("user",), arguments) or [""])[-1]

    @cached_property
    def _opening(self) -> str:
        """What a conversation begins with if its first turn is the user's, and the template's own system message is
        left out."""
        system, both = self._parts(("system",), {"add_generation_prompt": False}), self._parts(("system", "user"))
        if not (system and both):
            raise ValueError("the template knows no system message")
        opening = both[1].removeprefix(system[-1])
        turn = next((token for token in self._special if opening.startswith(token)), opening)
        return system[0].partition(turn)[0] * (turn in system[0]) + opening

    @cached_property
    def _hides_turns(self) -> bool:
        """Whether only special tokens separate some messages."""
        known = (self._parts(roles) or [] for roles in (("system", "user"), ("user", "assistant", "user")))
        seams = [seam for parts in known for seam in parts[1:-1]]
        return any(self.keeps_special(seam) and not re.search(r"\w", self._stripped(seam)) for seam in seams)

    def asks(self, rendered: str) -> bool:
        """Whether a prompt with its special tokens ends by asking for the answer, and not with the user's turn."""
        plain, asked = self._parts(("user",), {"add_generation_prompt": False}), self._parts(("user",))
        if not (plain and asked):
            return True
        end = plain[-1]
        asking = asked[-1].removeprefix(end).strip()
        return asking in (rendered.rpartition(end.strip())[2] if end.strip() else rendered)

    def begins_or_ends(self, stripped: str, edge: str = r"\w") -> bool:
        """Whether a text begins or ends as the template's conversations do without special tokens.

        Args:
            stripped: the text.
            edge: a pattern of the beginnings and ends that count.
        """
        known = [parts for roles in (("user",), ("system", "user")) if (parts := self._skeleton(roles))]
        edges = [(parts[0], stripped.startswith) for parts in known]
        edges += [(_header(parts[-1]), stripped.endswith) for parts in known]
        return any(re.search(edge, part) and there(part) for part, there in edges)

    def another_wrote(self, response: str) -> bool:
        """Whether a response without special tokens contains another's turn, after which the assistant continues."""
        # Searching for the end first takes a tenth of the time.
        return any(end in response and pattern.search(response) for end, pattern in self._turns)

    @cached_property
    def _turns(self) -> list[tuple[str, re.Pattern[str]]]:
        """The end of another's turn, and a pattern of the whole turn, for every role."""
        patterns = {}
        for role in ("user", "tool", "ipython"):
            *_, opening, closing = self._parts(("user", "assistant", role)) or ("", "")
            # A model may write headers of plain text itself; after special tokens it would have ended.
            if not all(self.keeps_special(part) for part in (opening, closing)):
                continue
            headers = [self._stripped(part) for part in (opening, closing)]
            # A header of special tokens only leaves nothing behind, and a bare word is too common.
            if all(re.search(r"\w\W+$", _header(header)) for header in headers):
                # A header may begin a line, and a tool's turn still follow the call directly.
                first, second = (
                    (r"(?<!\w)" if header[:1] in ("\n", " ") else "") + re.escape(_header(header)) for header in headers
                )
                patterns[first, second] = _header(headers[1]), re.compile(f"{first}.*{second}", re.DOTALL)
        return list(patterns.values())

    def variants(self, stripped: str) -> Iterator[dict[str, Any]]:
        """Further arguments that may have been given: thinking or not, a date in the text, no generation prompt."""
        yield {}
        if "enable_thinking" in self.open_arguments:
            yield from ({"enable_thinking": value} for value in (False, True))
        if "date_string" in self.tokenizer.get_chat_template() and "date_string" not in self.arguments:
            yield from ({"date_string": date} for date in dict.fromkeys(_DATE.findall(stripped[:2000])))
        line = _header(self._end({})).partition("\n")
        if line[1] and "".join(line[:2]) not in stripped + "\n":
            yield {"add_generation_prompt": False}

    def _fits(self, stripped: str, arguments: dict[str, Any], begun: str, *, bare: bool) -> Iterator[tuple[int, ...]]:
        """Token ids of the conversations that give the text, the most turns first, each with `begun` behind it."""
        _, answer, *_ = self._skeleton(("user", "assistant", "user"), arguments) or ("", "")
        answer = _header(answer)
        turns = min(_MOST_TURNS, 1 + stripped.count(answer)) if re.search(r"\w", answer) else 1
        for n in range(turns, 0, -1):
            asked = ("user", *("assistant", "user") * (n - 1))
            for roles in (asked,) if bare else (asked, ("system", *asked)):
                try:
                    parts = self._parts(roles, arguments) or []
                    parts = [self._opening, *parts[1:]] if bare else parts
                    for contents in islice(_between([self._stripped(part) for part in parts], stripped), _MOST_SPLITS):
                        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
                        joined = "".join(part + content for part, content in zip(parts, (*contents, ""), strict=True))
                        text = joined if bare else self.render(messages, **arguments)
                        ids = tokenize(self.tokenizer, text + begun, add_special_tokens=False)
                        if self.tokenizer.decode(ids, skip_special_tokens=True) == stripped + begun:
                            yield tuple(ids)
                except TsaeError:
                    raise
                except Exception:  # a template may know no system message
                    continue

    def _skeleton(self, roles: Sequence[str], arguments: Mapping[str, Any] | None = None) -> list[str] | None:
        """`_parts` without special tokens."""
        parts = self._parts(roles, arguments)
        return None if parts is None else [self._stripped(part) for part in parts]

    def _parts(self, roles: Sequence[str], arguments: Mapping[str, Any] | None = None) -> list[str] | None:
        """What the template writes before, between and after the messages; None where it renders no such messages."""
        key = json.dumps([roles, arguments or {}])
        if key not in self._rendered:
            marks = [_SENTINEL.format(i) for i in range(len(roles))]
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            try:
                *parts, rest = [self.render(messages, **(arguments or {}))]
                for mark in marks:
                    before, rest = rest.split(mark, 1)  # a ValueError where it is not rendered
                    parts.append(before)
                self._rendered[key] = [*parts, rest]
            except Exception:  # templates raise what they like: one may know no system message, and no tools
                self._rendered[key] = None
        return self._rendered[key]

    def _stripped(self, text: str) -> str:
        return without(text, self._special)


def _header(part: str) -> str:
    """The first line that the template writes before a message, which names the author, and its line breaks."""
    found = re.match(r"[^\n]*\n*", part.lstrip("\n "))
    return found[0] if found else ""


def _between(skeleton: Sequence[str], text: str) -> Iterator[list[str]]:
    """All possible messages of `text` between the parts of `skeleton`, the shortest first messages first."""
    first, *middle, last = skeleton
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return
    yield from _splits(text[len(first) : len(text) - len(last)], middle)


def _splits(text: str, middle: Sequence[str]) -> Iterator[list[str]]:
    if not middle:
        yield [text]
        return
    if not middle[0]:  # The end of the message cannot be found.
        return
    at = text.find(middle[0])
    while at >= 0:
        for others in _splits(text[at + len(middle[0]) :], middle[1:]):
            yield [text[:at], *others]
        at = text.find(middle[0], at + 1)


_CONFIG = Path(".hydra") / "config.yaml"
_LEVELS_UP = 2  # From the folder of the log to that of the run.


def find_settings(log: Path) -> tuple[dict[str, Any], Path] | None:
    """The arguments of the chat template in the nearest config, and its path; None if there are none."""
    folder = (log if log.is_dir() else log.parent).resolve()
    for above in (folder, *list(folder.parents)[:_LEVELS_UP]):
        if not (above / _CONFIG).is_file():
            continue
        try:
            config = parse_yaml((above / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return None  # An import does not need the trainer's config.
        data = config.get("data") if isinstance(config, dict) else None
        arguments = data.get("apply_chat_template_kwargs") if isinstance(data, dict) else None
        return (arguments, above / _CONFIG) if isinstance(arguments, dict) and arguments else None
    return None
