"""Chat templates of models in use, and tokenizers that have them."""

from __future__ import annotations

from typing import Any

TURNS = "{{% for m in messages %}}{before}{{{{ m['role'] }}}}{between}{{{{ m['content'] }}}}{after}{{% endfor %}}"
CHATML = TURNS.format(before="<|im_start|>", between="\n", after="<|im_end|>\n")
ASK = "{% if add_generation_prompt %}"
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
# The template, its special tokens, further added ones, and the text that it ends in before the response.
TEMPLATES: dict[str, tuple[str, list[str], list[str], str]] = {
    "chatml": (CHATML + ASK + "<|im_start|>assistant\n{% endif %}", ["<|im_start|>", "<|im_end|>"], [], "\n"),
    "llama3": (
        "<|begin_of_text|>"
        + TURNS.format(before="<|start_header_id|>", between="<|end_header_id|>\n\n", after="<|eot_id|>")
        + ASK
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [],
        "\n",
    ),
    "gemma": (
        "<bos>"
        + TURNS.format(before="<start_of_turn>", between="\n", after="<end_of_turn>\n")
        + ASK
        + "<start_of_turn>model\n{% endif %}",
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        [],
        "\n",
    ),
    "qwen3": (
        CHATML + ASK + "<|im_start|>assistant\n" + THINKING + "{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>"],
        "\n",
    ),
    "qwen3-always-thinking": (
        CHATML + ASK + "<|im_start|>assistant\n<think>\n{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>"],
        "\n",
    ),
    "smollm2": (SMOLLM2 + ASK + "<|im_start|>assistant\n{% endif %}", ["<|im_start|>", "<|im_end|>"], [], "\n"),
    # These end in a special token.
    "mistral": (
        "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% else %}"
        "{{ m['content'] }}</s>{% endif %}{% endfor %}",
        ["<s>", "</s>", "[INST]", "[/INST]"],
        [],
        "[/INST]",
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜>{% for m in messages %}<｜User｜>{{ m['content'] }}{% endfor %}" + ASK
        + "<｜Assistant｜>{% endif %}",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        [],
        "<｜Assistant｜>",
    ),
    "phi4": (
        TURNS.format(before="<|im_start|>", between="<|im_sep|>", after="<|im_end|>") + ASK
        + "<|im_start|>assistant<|im_sep|>{% endif %}",
        ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
        [],
        "<|im_sep|>",
    ),
}  # fmt: skip


def make_tokenizer(name: str) -> Any:
    """A token for every byte, with a template and its tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, special, added, _ = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1], pad_token=special[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": special[:-1]})
    tokenizer.chat_template = template
    return tokenizer
