"""Token ids of prompts: apply the chat template, unless that has been done, and tokenise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tsae.checkpoints.weight_files import first_line
from tsae.errors import TsaeError, is_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
