"""Token ids of prompts: apply the chat template, and tokenise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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
    """Token ids of what the model reads before its response; error messages name `where`."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if prompt_format == "chat" and not has_template:
        fix = 'Use prompt_format="plain" instead of "chat".'
        raise TsaeError("the tokenizer has no chat template", where="prompt_format", fix=fix)
    if prompt_format == "plain" or not has_template:
        return tokenize(tokenizer, prompt, where=where)
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program
        what = f"the tokenizer's chat template cannot be applied ({first_line(error)})"
        raise TsaeError(what, where=where, fix='Correct the template, or use prompt_format="plain".') from error
    # The template writes its own special tokens.
    return tokenize(tokenizer, text, add_special_tokens=False, where=where)
