"""Texts to token ids, a third faster: without the positions of tokens in the text, which tokenizers compute as well.

An import of text spends most of its time here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tsae.rollouts.prompts import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
