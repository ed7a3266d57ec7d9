"""Checkpoint: one set of weights, where it came from, and how to load it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tsae.checkpoints.loading import ModelLoader, load_tokenizer, token_strings
from tsae.checkpoints.record import CheckpointRecord
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint(CheckpointRecord):
    """One set of weights, which it can load. `CheckpointRecord` describes its fields."""

    base: Checkpoint | None = field(default=None, compare=False, repr=False)

    def load_model(self, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa") -> PreTrainedModel:
        """Load the Hugging Face causal LM in evaluation mode, without gradients; see `tsae.checkpoints.loading`.

        To load several checkpoints in turn, use one `ModelLoader`: it loads the base of adapters only once.
        """
        return ModelLoader(device=device, dtype=dtype, attention=attention).load(self)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, and check that it encodes text to something."""
        return load_tokenizer(self)

    def tokens_with(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text contains a text, without special tokens.

        Raises:
            TsaeError: where there is none.
        """
        tokenizer = self.load_tokenizer()
        special = set(tokenizer.all_special_ids)
        found = tuple(i for i, s in enumerate(token_strings(tokenizer)) if text and text in s and i not in special)
        if not found:
            what = f"its tokenizer has no token whose text contains {text!r}"
            raise TsaeError(what, where=self.path, fix="Give another text (--step-text).")
        return found
