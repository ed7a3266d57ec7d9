"""Token ids of a log's trajectories: as logged, or from text with the checkpoint's tokenizer and chat template.

Text gives back the tokens only approximately. A response whose tokens decode to another text is counted; one that
decodes to the same text may still have been sampled as other tokens. Both are marked (``round_trip`` is false). Nothing
is invented: a text gets an end token only if the log says that the response ended by itself, and every assumption about
a prompt is reported.

Padding is what the tensors of a batch have around prompts and responses, and nobody read or sampled.

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

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import text_limits
from tsae.checkpoints.weight_files import has_tokenizer
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.templates import ChatTemplate
from tsae.rollouts.problems import encode_prompt, templated, tokenize, without
from tsae.rollouts.token_parts import Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BEGUN = re.compile(r"<\w+>\s*$")
_OTHER_TEMPLATE = re.compile(
    r"\s*(<s>|<bos>|<\|begin_of_text\|>)?\s*"
    r"(<\|(im_start|start_header_id|user|system)\|>|<start_of_turn>|\[INST\]|<｜User｜>)"
)
_KEPT_PROMPTS = 256  # A group's trajectories follow one another, so that few prompts need to be remembered.


class Prompt(NamedTuple):
    """What the policy read."""

    ids: np.ndarray
    """(n,) int32."""
    text: str
    assumed: tuple[str, ...] = ()
    """What the log does not say about it, to be printed after the number of trajectories."""
    lost: float = 0.0
    """Which share of the characters of a logged text its ids do not have, because the tokenizer does not know them.
    Each character counts once. Letter case and compatible forms (NFKC) do not count, since some tokenizers change
    these on purpose."""


class Response(NamedTuple):
    """What the policy wrote."""

    ids: np.ndarray
    """(n,) int32."""
    text: str
    """Only the policy's turns."""
    finish_reason: Literal["stop", "length", "unknown"]
    same_text: bool | None
    """Whether the ids decode to the log's text; None if the log has no text."""
    logged: bool
    """Whether the log has the ids; otherwise they were made from the text, and may not be those that were sampled."""

    @property
    def round_trip(self) -> bool | None:
        """Whether the ids are those that were sampled and decode to the log's text; None if it has no text."""
        return self.same_text if self.logged else False


class Tokens:
    """Encodes the entries of one log.

    Args:
        checkpoint: has the tokenizer, chat template, end tokens and context length.
        config: of the import.
        pads: by edge, the token ids that pad the log (`find_pads`).
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ImportConfig, pads: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.pads = pads or {}
        self.tokenizer: PreTrainedTokenizerBase = checkpoint.load_tokenizer()
        self.special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        self.config, self.path = config, checkpoint.path
        self.vocabulary = max(self.tokenizer.get_vocab().values()) + 1
        self.context, ends = text_limits(checkpoint)
        end: Any = self.tokenizer.eos_token_id
        self.end: int | None = end if end is not None else next(iter(ends), None)
        self.ends = ends | ({self.end} if self.end is not None else set())
        self.encode = Encoder(self.tokenizer)
        self.spans = Spans(self.tokenizer)
        self.lost_markers = self.spans.lost(self.tokenizer.get_vocab())
        """Markers of thinking that are lost in texts without special tokens."""
        self._prompts: dict[str, Prompt] = {}
        self.template: ChatTemplate | None = None
        if self.tokenizer.chat_template is not None:
            self.template = ChatTemplate(self.tokenizer, json.loads(config.template_arguments))

    def prompt(self, entry: Entry) -> Prompt:
        """Token ids and text of what was read before the response.

        Raises:
            TsaeError: if the template does not reproduce the logged text, or ids are not the tokenizer's.
        """
        if entry.prompt_ids is not None:
            ids = self._checked(entry, entry.prompt_ids, "prompt")
            shown = shown_prompt(entry.prompt) if entry.prompt is not None else self._decode(ids)
            return Prompt(ids, shown)
        assert entry.prompt is not None
        key = entry.prompt_is + json.dumps(entry.prompt, sort_keys=True, default=str)
        if key not in self._prompts:
            if len(self._prompts) == _KEPT_PROMPTS:
                self._prompts.clear()
            tokens, *assumed = self._encode_prompt(entry)
            ids, text = np.asarray(tokens, dtype=np.int32), shown_prompt(entry.prompt)
            said = without(text, self.tokenizer.all_special_tokens)
            logged, kept = _characters(said), _characters(self._decode(ids))
            self._prompts[key] = Prompt(ids, text, tuple(assumed), len(logged - kept) / max(len(logged), 1))
        return self._prompts[key]

    def response(self, entry: Entry) -> Response:
        """Token ids of the response, its text, and how it ended.

        Raises:
            Unusable: if it is empty, or contains text that others wrote.
            TsaeError: if ids are not the tokenizer's.
        """
        if entry.response_ids is not None:
            ids = self._checked(entry, entry.response_ids, "response")
            if not len(ids):
                entry.leave_out("empty", "the response is empty")
            text, ended = self._decode(ids), int(ids[-1]) in self.ends
            otherwise: Any = entry.finish_reason or ("length" if entry.cut_without_end else "unknown")
            same = None if entry.response is None else entry.response in self._as_logged(ids, text)
            if entry.sampled is not None:
                text = self._decode_sampled(ids, entry.sampled)
            return Response(ids, text, "stop" if ended else otherwise, same, logged=True)
        assert entry.response is not None
        if self.template is not None and self.template.another_wrote(entry.response):
            entry.leave_out(
                "multi-turn",
                "the response's text holds the turn of another (a tool's, a user's), and nothing says which tokens the "
                "policy sampled",
                "Give a log with token ids and masks, if the trainer writes one (tsae rollouts formats)",
            )
        tokens = self.encode(entry.response, entry.where)
        same = self.tokenizer.decode(np.asarray(tokens, dtype=np.int32)) == entry.response
        # If the number of tokens differs, other tokens were sampled.
        same = same and entry.response_length in (None, len(tokens))
        reason = entry.finish_reason or ("length" if entry.response_rendered else None)
        limit = self.config.max_response_tokens
        if reason is None and limit is not None:
            reason = "stop" if len(tokens) < limit else "length"
        if tokens and tokens[-1] in self.ends:  # The log keeps special tokens in its texts.
            reason = "stop"
        elif reason == "stop" and self.end is not None and not entry.response_rendered:
            tokens.append(self.end)
        if not tokens:
            entry.leave_out("empty", "the response is empty")
        text = self._decode(np.asarray(tokens)) if entry.response_rendered else entry.response
        return Response(np.asarray(tokens, dtype=np.int32), text, reason or "unknown", same, logged=False)

    def check_length(self, entry: Entry, prompt: Prompt, response: Response) -> None:
        """Refuse a trajectory that is longer than the model's context, as `Unusable`."""
        n, m = len(prompt.ids), len(response.ids)
        if self.context is not None and n + m > self.context:
            what = f"{n} prompt and {m} response tokens exceed the model's context of {self.context}"
            entry.leave_out("too-long", what, "Give the checkpoint that was trained")

    def encodes(self, entry: Entry, ids: np.ndarray) -> tuple[bool | None, str]:
        """Whether the logged prompt, encoded again, gives the logged token ids.

        A text may be the question, or what the template made of it, with or without special tokens.

        Args:
            entry: has a prompt.
            ids: (n,) logged.

        Returns:
            whether it does (None if the template renders no such prompt), and as JSON the arguments that the template
            needs beside those that are known ("" for none).
        """
        prompt, logged, rendered = entry.prompt, ids.tolist(), False
        if isinstance(prompt, str):
            for special in (False, True):
                if self._gives(prompt, logged, special=special):
                    return True, ""
            if self.template is None or self.template.keeps_special(prompt):
                return False, ""
        if self.template is None or not prompt:
            return None, ""
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(prompt, str) and self.config.system_prompt is not None:
            asked = [{"role": "system", "content": self.config.system_prompt}, *asked]
        plain = [{name: part for name, part in message.items() if part is not None} for message in asked]
        shown = self._decode(ids)
        for more in self.template.variants(shown):
            try:
                given = {**entry.template, **more}
                text = self.template.render(plain, goes_on=plain[-1].get("role") == "assistant", **given)
            except Exception:  # templates raise what they like
                continue
            rendered = True
            if self._gives(text, logged, special=False):
                return True, json.dumps(more) if more else ""
        if isinstance(prompt, str):
            # Some logs keep a text without special tokens beside the ids.
            return prompt == shown, ""
        return (False if rendered else None), ""

    def _gives(self, text: str, ids: list[int], *, special: bool) -> bool:
        """Whether a text is encoded to these ids; a text that cannot be encoded is not."""
        try:
            return tokenize(self.tokenizer, text, add_special_tokens=special) == ids
        except TsaeError:
            return False

    def _encode_prompt(self, entry: Entry) -> tuple[Any, ...]:
        """(token ids, assumption, …)."""
        prompt, style = entry.prompt, self.config.prompt_format
        if isinstance(prompt, list):
            return self._encode_conversation(prompt, entry)
        assert prompt is not None
        encoded = partial(tokenize, self.tokenizer, prompt, where=entry.where)
        special = self.template is not None and self.template.keeps_special(prompt)
        if style == "auto" and (entry.prompt_is == "rendered" or (special and entry.prompt_is == "perhaps rendered")):
            return (encoded(add_special_tokens=False),)
        if style == "plain" or self.template is None:
            bos = self.tokenizer.bos_token
            if style != "chat" and entry.prompt_is == "question" and bos and prompt.startswith(str(bos)):
                return (encoded(add_special_tokens=False),)
            # Reports what is wrong if a template was asked for.
            return (encode_prompt(self.tokenizer, prompt, style, entry.where),)
        if style == "chat":
            return self._encode_question(prompt, entry)
        if entry.prompt_is == "verbatim" and not special:
            return (
                encoded(),
                "prompts have none of the chat template's special tokens: they were taken as they stand "
                "(--prompt-format chat, if they are questions for it)",
            )
        if entry.prompt_is == "verbatim" or (special and entry.prompt_is == "perhaps stripped"):
            return (encoded(),)
        if special and (rendered := templated(self.tokenizer, prompt)) is not None:
            return (
                tokenize(self.tokenizer, rendered, add_special_tokens=False, where=entry.where),
                "prompts have the chat template's special tokens already: they were taken as they are"
                + ", behind the begin token that they lack" * (rendered != prompt)
                + ", without a generation prompt" * (not self.template.asks(prompt)),
            )
        question = entry.prompt_is == "question"
        found = None
        if not question or self.template.begins_or_ends(prompt):
            found = self.template.restore(prompt)
            if found is None and (begun := _BEGUN.search(prompt)):
                found = self.template.restore(prompt[: begun.start()], begun[0])
        # A question may begin with the word "user", but hardly with a line of that word alone.
        if question and found is None and not self.template.begins_or_ends(prompt, r"\w\W+$"):
            if other := _OTHER_TEMPLATE.match(prompt):
                entry.refuse(
                    f"the prompt begins with {other[0].strip()}, as with another chat template than the checkpoint's",
                    "Give the checkpoint that was trained. Or say how to read prompts: as they stand "
                    "(--prompt-format plain), or as questions for the template (--prompt-format chat).",
                )
            return self._encode_question(prompt, entry)
        if found is not None:
            or_plain = entry.prompt_is.startswith("perhaps")
            assumed = [
                "prompts were logged without special tokens: those of the chat template were put back"
                + " (--prompt-format plain, if they were not conversations)" * or_plain
            ]
            assumed += [f"prompts were rendered with {json.dumps(found.arguments)}, as their text shows"] * bool(
                found.arguments
            )
            if found.bare:
                assumed.append("prompts have no system message, though the chat template writes one of its own")
            if found.several:
                assumed.append(
                    "prompts without special tokens may have been several conversations: the one with the most turns, "
                    "and without a system message where none can be seen, was taken"
                )
            return (found.ids, *assumed)
        if entry.prompt_is.startswith("perhaps") and not self.template.begins_or_ends(prompt):
            return encoded(), "prompts are not a text that the chat template gives: they were taken as they stand"
        return entry.refuse(
            "the prompt was logged without special tokens, and the checkpoint's chat template around a question "
            "(and a system message) does not give it again",
            "Give the checkpoint that was trained, or what its template was given (--template-arguments), or "
            "tokenise prompts as they stand with --prompt-format plain: what the model read then lacks its special "
            "tokens." + " If they are questions, say --prompt-format chat." * (entry.prompt_is == "question"),
        )

    def _encode_question(self, question: str, entry: Entry) -> tuple[Any, ...]:
        """(token ids, assumption, …) of a question: the log does not say what else was in the conversation."""
        assert self.template is not None
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        assumed = "prompts are questions alone, which the chat template was put around"
        if self.config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
            assumed += ", after the system message that was asked for"
        elif self.template.own_system:
            assumed += ", with the template's own system message (--system-prompt, if the run had another)"
        else:
            assumed += ", without a system message (--system-prompt, if the run had one)"
        tokens, *others = self._encode_conversation(messages, entry)
        return (tokens, assumed, *others)

    def _encode_conversation(self, messages: list[dict[str, Any]], entry: Entry) -> tuple[Any, ...]:
        if self.config.prompt_format == "plain" or self.template is None:
            what = "the prompt is a conversation, which only a chat template turns into text"
            what += ", and the checkpoint has none" * (self.config.prompt_format != "plain")
            entry.refuse(what, "Give the checkpoint that was trained, and no --prompt-format plain.")
        plain = [{name: part for name, part in message.items() if part is not None} for message in messages]
        for message in plain:
            _check_content(message, entry)
        try:
            text = self.template.render(plain, goes_on=plain[-1]["role"] == "assistant")
        except Exception as error:  # templates raise what they like
            what = f"the chat template refuses the prompt ({error})"
            entry.refuse(what, "Give the checkpoint's own messages.", error)
        names = ", ".join(self.template.open_arguments)
        return (
            tokenize(self.tokenizer, text, add_special_tokens=False, where=entry.where),
            *[f"prompts were rendered without {names}, which the chat template reads and the log does not say "
              "(--template-arguments)"] * bool(names),
        )  # fmt: skip

    @cached_property
    def own_edges(self) -> tuple[set[int], set[int]]:
        """The special tokens with which the tokenizer or the chat template begins a prompt by itself, and ends one."""
        prompts: list[list[int]] = []
        with suppress(Exception):  # no such letter, or no template, which raises what it likes
            prompts.append(tokenize(self.tokenizer, "1"))
            if self.template is not None:
                text = self.template.render([{"role": "user", "content": "1"}])
                prompts.append(tokenize(self.tokenizer, text, add_special_tokens=False))
        return {ids[0] for ids in prompts if ids} & self.special, {ids[-1] for ids in prompts if ids} & self.special

    def written(self, id: int) -> str:
        """A token as texts with special tokens have it."""
        return str(self.tokenizer.decode([id]))

    def _decode(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _decode_sampled(self, ids: np.ndarray, sampled: np.ndarray) -> str:
        """What the policy wrote; a line break replaces what others wrote, to keep words apart."""
        turns = np.split(ids, np.flatnonzero(np.diff(sampled)) + 1)
        return "\n".join(self._decode(turn) for turn in turns[0 if sampled[0] else 1 :: 2])

    def _as_logged(self, ids: np.ndarray, text: str) -> tuple[str, ...]:
        """Ways to log these tokens: without special tokens, with them, and without only the end token."""
        body = ids[:-1] if int(ids[-1]) in self.ends else ids
        return (text, *(str(self.tokenizer.decode(part)) for part in (ids, body)))

    def _checked(self, entry: Entry, ids: np.ndarray, what: str) -> np.ndarray:
        """(n,) int32 token ids of a prompt or response."""
        if not len(ids) and what == "prompt":
            entry.refuse("the prompt has no tokens")
        if (least := int(ids.min(initial=0))) < 0:
            fix = "Give all token ids, and a column that marks the sampled ones (--column response_mask=NAME)."
            entry.refuse(f"the {what} has {least} between its tokens, which is a mask value and not a token id", fix)
        if len(unknown := ids[ids >= self.vocabulary]):
            known = f"the tokenizer of {self.path} has 0 to {self.vocabulary - 1}"
            entry.refuse(f"the {what} has the token id {unknown[0]}; {known}", "Give the checkpoint that was trained.")
        return ids.astype(np.int32)


def tokenizer_alone(folder: Path) -> CheckpointSeries | None:
    """A folder with a tokenizer and no model as a series; an import needs no more. None for any other folder."""
    others = ("series.json", "config.json", "adapter_config.json", "checkpoint-*", "*/checkpoint-*")
    if not has_tokenizer(folder) or any(any(folder.glob(name)) for name in others):
        return None
    note = f"{folder} holds a tokenizer alone: how long the model's context is, is not known"
    checkpoint = Checkpoint(id="base", path=str(folder.resolve()))
    return CheckpointSeries((checkpoint,), name=folder.resolve().name, notes=(note,))


def _check_content(message: dict[str, Any], entry: Entry) -> None:
    """Refuse a message with anything but text that the template would read.

    Raises:
        TsaeError: for such a message, for example with an image.
    """
    content = message.get("content", "" if "tool_calls" in message else None)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
            found = type(content).__name__ if found == "text" else f"a part of type {found}"
            what = f"a message of the prompt from {message['role']!r} holds {found}, where only text is read"
            entry.refuse(what, "Give a log of text alone: what a model made of images or sound is not read.")


def _characters(text: str) -> set[str]:
    return set("".join(unicodedata.normalize("NFKC", text).casefold().split()))


def shown_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt's text; for a conversation, the texts of its messages."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    return "\n\n".join(c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in contents)


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
        n = _repeated(turned, turned[0]) if len(turned) else 0
        if n < len(turned) and turned[0] not in border and int(turned[n]) in border and (n > 1 or side == "prompt"):
            (before if side == "prompt" else own).add(int(turned[0]))
        filled.update({(side, int(turned[0])) for turned in (ids, ids[::-1]) if _repeated(turned, *turned[:1]) > 1})
    if 4 * len({(side, len(ids)) for side, ids in sides}) <= len(sides):
        both = ("prompt", "response")
        own |= {id for _, id in filled if all(4 * filled[side, id] >= len(sides) / 2 for side in both)}
    for side, ids in sides:
        for id in {id for id in own | before if id is not None and id >= 0}:
            runs.update([(f"{side} left", id, _repeated(ids, id)), (f"{side} right", id, _repeated(ids[::-1], id))])
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
        ids, (low, high) = entry.prompt_ids, _unpadded(entry.prompt_ids, pads, "prompt")
        low -= low > 0 and int(ids[low - 1]) in tokens.own_edges[0]
        high += high < len(ids) and int(ids[high]) in tokens.own_edges[1]
        entry.prompt_ids, n_prompt = ids[low:high], len(ids) - (high - low)
    if entry.response_ids is not None and "response" not in entry.masked:
        ids, (low, high) = entry.response_ids, _unpadded(entry.response_ids, pads, "response")
        ended = high > low and int(ids[high - 1]) in tokens.ends
        high += high < len(ids) and int(ids[high]) in tokens.ends and not ended and not cut
        if entry.logprobs is not None and len(entry.logprobs) == len(ids):
            entry.logprobs = entry.logprobs[low:high]
        entry.response_ids, n_response = ids[low:high], len(ids) - (high - low)
    # Where ids show that there is no padding, a text is what it seems.
    if any(pads.values()) and isinstance(entry.prompt, str) and (entry.prompt_ids is None or n_prompt):
        before, entry.prompt, after = _split_pads(entry.prompt, "prompt", tokens)
        n_prompt = n_prompt or len(before) + len(after)
        if before or after or entry.prompt.startswith(tokens.tokenizer.bos_token or "\0"):
            entry.prompt_is = "rendered"  # It was decoded with its special tokens.
    if any(pads.values()) and isinstance(entry.response, str) and (entry.response_ids is None or n_response):
        before, entry.response, after = _split_pads(entry.response, "response", tokens)
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


def _repeated(ids: np.ndarray, id: int = -1) -> int:
    """How many times an id stands at the beginning."""
    return int(np.argmin(np.r_[ids == id, False]))


def _unpadded(ids: np.ndarray, pads: Mapping[str, Sequence[int]], side: str) -> tuple[int, int]:
    """Where the ids of a prompt or response begin and end that are not padding; (0, 0) if all are."""
    low, high = (
        int(np.argmin(np.r_[(turned < 0) | np.isin(turned, pads[f"{side} {edge}"]), False]))
        for edge, turned in (("left", ids), ("right", ids[::-1]))
    )
    return (low, max(low, len(ids) - high)) if low < len(ids) else (0, 0)


def _split_pads(text: str, side: str, tokens: Tokens) -> tuple[list[str], str, list[str]]:
    """(pads that are written out before a prompt or response, its text, those after it)."""
    written = [[tokens.written(id) for id in tokens.pads[f"{side} {edge}"] if id >= 0] for edge in ("left", "right")]
    left, right = ("|".join(map(re.escape, filter(None, pads))) or "(?!)" for pads in written)
    found = re.fullmatch(f"((?:{left})*)(.*?)((?:{right})*)", text, re.DOTALL)
    assert found is not None
    return re.findall(left, found[1]), found[2], re.findall(right, found[3])


_SAMPLE = " So  x² = 12,345.5\n\n\n<think>\tнет, 汉字 🙂 don't</think>\r\n```py\nif x:\n    return 1``` "


class Encoder:
    """Encodes texts exactly as a tokenizer does, without adding special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special = "".join(str(token) for token in tokenizer.added_tokens_decoder.values())
        try:
            # Some tokenizer classes do more than their backend, which shows in the ids.
            if self._fast(_SAMPLE + special) != tokenize(tokenizer, _SAMPLE + special, add_special_tokens=False):
                self._backend = None
        except Exception:  # an alphabet of its own, or an older library
            self._backend = None

    def __call__(self, text: str, where: str) -> list[int]:
        """Token ids of a text.

        Raises:
            TsaeError: if the tokenizer refuses it.
        """
        if self._backend is not None:
            try:
                return self._fast(text)
            except Exception:  # the tokenizers library raises no narrower class; tokenize reports it
                pass
        return tokenize(self.tokenizer, text, add_special_tokens=False, where=where)

    def _fast(self, text: str) -> list[int]:
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        found: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found
