"""The testbed's tokenizer: 20 tokens, one per character, as an ordinary fast Hugging Face tokenizer.

One character is one token, so that labels of characters are labels of tokens, and decoding gives back exactly
the text that was encoded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, PAD, EOS = "<bos>", "<pad>", "<eos>"

VOCABULARY: tuple[str, ...] = (*"0123456789", "+", "-", "*", "?", "=", ";", "#", BOS, PAD, EOS)
"""Token strings in the order of their ids, 0 to 19."""

TOKEN_IDS: dict[str, int] = {token: index for index, token in enumerate(VOCABULARY)}

MAX_TOKENS = 128
"""Longest sequence, prompt and response together; a full scratchpad of 14 operations takes 118."""

MAX_RESPONSE_TOKENS = 96
"""Limit of sampling: a full scratchpad of 14 operations takes 87 tokens with its <eos>."""

_TOKEN = re.compile("|".join(re.escape(token) for token in (BOS, PAD, EOS)) + "|.", re.DOTALL)


def split_tokens(text: str) -> list[str]:
    """Cut text into token strings as the tokenizer does: special tokens whole, every other character by
    itself.

    Characters outside the vocabulary are kept as they are, so that no text is refused.
    """
    return _TOKEN.findall(text)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, as `AutoTokenizer.from_pretrained` loads it from a checkpoint folder.

    It puts ``<bos>`` in front of every text (``add_special_tokens=False`` leaves it out), pads on the right,
    and decodes without inserting spaces. Pad on the left for generation in batches: ``tokenizer.padding_side
    = "left"``. Encoding a character outside the vocabulary raises the tokenizers library's own exception.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # No unknown token: a character outside the vocabulary is refused instead of being encoded to something
    # else.
    core = Tokenizer(models.WordLevel(vocab=dict(TOKEN_IDS), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, TOKEN_IDS[BOS])]
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MAX_TOKENS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
