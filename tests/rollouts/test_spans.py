"""Thinking and answer in token ids: worked by hand, and against a scan of the exact bytes of random responses."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.checkpoints import make_tokenizer
from tsae.rollouts.token_parts import ANSWER, OTHER, THINKING, Spans, TokenTexts, count_sampled

A, T, O = ANSWER, THINKING, OTHER
# What merges are learnt from: markers beside letters and line breaks, so that tokens cross their edges.
TEXTS = [
    "<think>Let me think.</think>\n\nIt is 5.", "a.<think>\nb</think>\nc", "x</think>y<think>z",
    "<thinking>a</thinking>",
    "naïve café 你好 🙂 <think>你好</think>🙂", "[THINK]a[/THINK]b", "<reasoning>\nx\n</reasoning>\n<answer>5</answer>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
]  # fmt: skip
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]


@cache
def tokenizer(kind: str) -> Any:
    """bytes: byte-level BPE with merges; spaces: Metaspace and byte fallback; tokens: as bytes, <think> being one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "spaces":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        ascii_only = [text.encode("ascii", "ignore").decode() for text in TEXTS]
        core.train_from_iterator(ascii_only * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=alphabet))
        # Anew, without the trainer's mark that bytes are special.
        learnt, parts = json.loads(core.to_str())["model"], (core.normalizer, core.decoder)
        merges = [tuple(pair) for pair in learnt["merges"]]
        core = Tokenizer(models.BPE(learnt["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.normalizer, core.decoder = parts
    else:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        core.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=360, initial_alphabet=letters))
    if kind == "tokens":
        core.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    special = ["<|im_start|>", *(HARMONY if kind == "tokens" else [])]
    made.add_special_tokens({"additional_special_tokens": special})
    return made


def ids_of(kind: str, text: str) -> list[int]:
    return list(tokenizer(kind)(text, add_special_tokens=False)["input_ids"])


def found(kind: str, prompt: str, *stretches: tuple[str, int]) -> tuple[list[int] | None, list[int]]:
    """(parts of what `Spans` finds, parts as given) of a response of stretches that are tokenised one by one."""
    ids, given = [], []
    for text, part in stretches:
        mine = ids_of(kind, text)
        ids += mine
        given += [part] * len(mine)
    sampled = np.array(given) != O
    parts = (
        Spans(tokenizer(kind))
        .of(np.array(ids_of(kind, prompt)), np.array(ids), None if sampled.all() else sampled)
        .parts
    )
    return None if parts is None else parts.tolist(), given


QUESTION = "<|im_start|>user\nUse <think> tags.<|im_end|>\n<|im_start|>assistant\n"
SAMPLED = {
    "plain": ("", [("It is 5.", A)]),
    "qwen3": (QUESTION, [("<think>", T), ("\na\n", T), ("</think>", T), ("\n\nIt is 5.", A), ("<|im_end|>", A)]),
    "opened by the prompt": (QUESTION + "<think>\n", [("a\n", T), ("</think>", T), ("\n\n5<|im_end|>", A)]),
    "closed by the prompt": (QUESTION + "<think>\n\n</think>\n\n", [("It is 5.</think>", A)]),
    "cut off inside": (QUESTION, [("<think>a", T)]),
    "cut off inside, opened by the prompt": (QUESTION + "<think>\n", [("a", T)]),
    "never opened": (QUESTION, [("a\n</think>", T), ("\n\n5", A)]),
    "closed again": (QUESTION, [("<think>a</think>", T), ("b</think>c", A)]),
    "twice": (QUESTION, [("<think>a</think>", T), ("b", A), ("<think>c</think>", T), ("d", A)]),
    "text first": (QUESTION, [("a.", A), ("<think>b</think>", T), ("c", A)]),
    "opened twice": (QUESTION, [("<think>a<think>b</think>", T), ("c", A)]),
    "empty": (QUESTION, [("<think></think>", T), ("c", A)]),
    "other tags": (QUESTION, [("<thinking>a</think>b</thinking>", T), ("c", A)]),
    "open-r1": (QUESTION, [("<think>\na\n</think>", T), ("\n<answer>5</answer>", A)]),
    "reasoning": (QUESTION, [("<reasoning>\nx\n</reasoning>", T), ("\n<answer>5</answer>", A)]),
    "magistral": (QUESTION, [("[THINK]a", T), ("[/THINK]", T), ("b", A)]),
    "characters cut over tokens": (QUESTION, [("🙂é", A), ("<think>你好🙂</think>", T), ("🙂ñ", A)]),
    "half a marker": (QUESTION, [("<think a</think", A)]),
    "a tool's turn": (
        QUESTION,
        [
            ("<think>a</think>", T), ("call<|im_end|>", A), ("\n<|im_start|>tool\n<think>7<|im_end|>", O),
            ("\n<|im_start|>assistant\n", O), ("<think>b</think>", T), ("7<|im_end|>", A),
        ],
    ),
    "a turn that the template opens": (
        QUESTION + "<think>\n",
        [
            ("a</think>", T), ("call<|im_end|>", A), ("\n<|im_start|>assistant\n<think>\n", O), ("b</think>", T),
            ("7", A),
        ],
    ),
    "a turn cut off inside thinking": (
        QUESTION, [("<think>a<|im_end|>", T), ("\n<|im_start|>assistant\n", O), ("7", A)],
    ),
    "a result inside of thinking": (
        QUESTION, [("<think>a", T), ("<result>7</result>", O), ("b</think>", T), ("c", A)],
    ),
    "a result inside of thinking that nothing opens": (
        QUESTION, [("a", T), ("<result>7</result>", O), ("b</think>", T), ("c", A)],
    ),
    "thinking that is closed by force": (QUESTION, [("<think>a", T), ("\n</think>\n\n", O), ("7", A)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "spaces", "tokens"])
@pytest.mark.parametrize("name", SAMPLED)
def test_parts_by_hand(name: str, kind: str) -> None:
    prompt, stretches = SAMPLED[name]
    parts, expected = found(kind, prompt, *stretches)
    assert (parts or [A] * len(expected)) == expected
    assert (parts is None) == (set(expected) == {A})


@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("<thought>", "</thought>"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        ("<|channel>thought\n", "<channel|>"),
    ],
)
def test_markers_of_other_models(opens: str, closes: str) -> None:
    for prompt, stretches in (
        (QUESTION, [(opens, T), ("a", T), (closes, T), ("b", A)]),
        (QUESTION + opens, [("a", T), (closes, T), ("b", A)]),
        (QUESTION + opens + closes, [("b", A)]),
        (QUESTION, [(opens, T), ("a", T)]),
    ):
        parts, expected = found("bytes", prompt, *stretches)
        assert (parts or [A] * len(expected)) == expected
    # What closes more than thinking says nothing of what comes before it.
    alone, expected = found("bytes", QUESTION, ("a" + closes, T), ("b", A))
    assert alone == (None if closes == "<channel|>" else expected)


def test_a_token_without_a_text_is_what_its_neighbour_on_the_left_is() -> None:
    """An id that the tokenizer lacks: models have more embeddings than that. In front, the prompt decides."""
    spans, empty = Spans(tokenizer("bytes")), len(tokenizer("bytes")) + 7
    a, opens, closes = (ids_of("bytes", text) for text in ("a", "<think>", "</think>"))
    for prompt, first in ((QUESTION, A), (QUESTION + "<think>\n", T), (QUESTION + "<think></think>", A)):
        think = [] if first == T else [(id, T) for id in opens]
        given = [(empty, first), *think, (empty, T), (a[0], T), *((id, T) for id in closes), (empty, T), (a[0], A)]
        given += [(empty, A), (empty, A)]
        parts = spans.of(np.array(ids_of("bytes", prompt)), np.array([id for id, _ in given])).parts
        assert parts is not None
        assert parts.tolist() == [part for _, part in given]


def test_harmony_by_hand() -> None:
    prompt = "<|start|>user<|message|>5?<|end|><|start|>assistant"
    analysis = ("<|channel|>analysis<|message|>Easy.<|end|>", T)
    final = [("<|start|>assistant<|channel|>final<|message|>", T), ("5<|return|>", A)]
    call = [("<|start|>assistant", T), ("<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", A)]
    result = ("<|start|>f to=assistant<|channel|>commentary<|message|>5<|end|><|start|>assistant", O)
    for stretches in (
        [analysis, *final],
        [("<|channel|>analysis<|message|>Easy.", T)],
        [analysis, *call, result, analysis, *final],
        [("<|channel|>analysis to=python code<|message|>1<|call|>", T), result, analysis, *final],
        [("<|channel|>final<|message|>5<|return|>", A)],
    ):
        parts, expected = found("tokens", prompt, *stretches)
        assert (parts or [A] * len(expected)) == expected


def test_the_space_before_a_first_word_belongs_to_its_token() -> None:
    texts = TokenTexts(tokenizer("spaces"))
    assert "".join(texts[id] for id in ids_of("spaces", "a <think")) == " a <think"
    assert tokenizer("spaces").decode(ids_of("spaces", "a <think")) == "a <think"


@cache
def exact_bytes(kind: str, id: int) -> bytes:
    """Of a token, by its name in the vocabulary."""
    made = tokenizer(kind)
    if id in made.added_tokens_decoder and not made.added_tokens_decoder[id].content.startswith("<0x"):
        return made.added_tokens_decoder[id].content.encode()
    name = made.convert_ids_to_tokens(id)
    if kind == "spaces":
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in kept}
    table |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in kept)}
    return bytes(table[letter] for letter in name)


def scanned(kind: str, ids: list[int]) -> list[int]:
    """Parts of a response, byte by byte."""
    tags = [(b"<think>", b"</think>"), (b"<thinking>", b"</thinking>"), (b"<reasoning>", b"</reasoning>"),
            (b"[THINK]", b"[/THINK]")]  # fmt: skip
    pieces = [exact_bytes(kind, id) for id in ids]
    whole = b"".join(pieces)
    inside, seen = [False] * len(whole), False
    close, at = b"", 0
    while at < len(whole):
        opened = [end for begin, end in tags if whole.startswith(begin, at)]
        closed = [end for _, end in tags if whole.startswith(end, at)]
        if close and whole.startswith(close, at):
            inside[at : at + len(close)] = [True] * len(close)
            at, close = at + len(close), b""
        elif not close and opened:
            close, seen = opened[0], True
        elif not close and closed and not seen:
            inside[: at + len(closed[0])] = [True] * (at + len(closed[0]))
            at, seen = at + len(closed[0]), True
        else:
            inside[at] = bool(close)
            at += 1
    edges = np.cumsum([0, *map(len, pieces)])
    return [T if any(inside[low:high]) else A for low, high in pairwise(edges)]


@pytest.mark.parametrize("kind", ["bytes", "spaces", "tokens"])
def test_random_responses_against_their_bytes(kind: str) -> None:
    rng = np.random.default_rng(0)
    spans, made = Spans(tokenizer(kind)), tokenizer(kind)
    bits = ["<think>", "</think>", "<thinking>", "</thinking>", "<reasoning>", "[THINK]", "[/THINK]", "<", ">", "/",
            "think", " think", ".", "\n\n", "é", "🙂", "你好", " a", "Let me"]  # fmt: skip
    thinking = 0
    for _ in range(400):
        ids = ids_of(kind, "".join(rng.choice(bits, rng.integers(1, 25))))
        # Tokens from anywhere between them cut characters in pieces.
        for _ in range(rng.integers(0, 4)):
            ids.insert(int(rng.integers(len(ids) + 1)), int(rng.integers(made.vocab_size)))
        # A character of several byte tokens in Metaspace's vocabulary is only one where all are there: no matter.
        parts = spans.of(np.array([], dtype=np.int64), np.array(ids)).parts
        expected = scanned(kind, ids)
        assert (parts.tolist() if parts is not None else [A] * len(ids)) == expected, made.convert_ids_to_tokens(ids)
        thinking += expected.count(T)
    assert thinking > 1000


def test_markers_that_are_special_tokens_are_lost_in_text() -> None:
    assert Spans(tokenizer("tokens")).lost(tokenizer("tokens").get_vocab()) == "<|channel|>analysis"
    assert Spans(tokenizer("bytes")).lost(tokenizer("bytes").get_vocab()) is None
    qwen3 = make_tokenizer("qwen3")
    assert Spans(qwen3).lost(qwen3.get_vocab()) is None  # <think> is an added token, but no special one


def test_sampled_tokens_are_counted_row_by_row() -> None:
    """In a long table, in chunks, and in a slice of it."""
    rng = np.random.default_rng(0)
    parts = [None if i % 7 == 3 else rng.integers(0, 3, rng.integers(1, 6)).tolist() for i in range(2500)]
    lengths = [3 if part is None else len(part) for part in parts]
    table = pa.table(
        {"response_ids": pa.array([[1] * n for n in lengths]), "parts": pa.array(parts, pa.list_(pa.int8()))}
    )
    expected = [n if part is None else n - part.count(OTHER) for n, part in zip(lengths, parts, strict=True)]
    assert count_sampled(table).tolist() == expected
    assert count_sampled(table.slice(1500, 700)).tolist() == expected[1500:2200]
    pieces = pa.concat_tables([table.slice(900, 11), table.slice(0, 1025)])
    assert count_sampled(pieces).tolist() == expected[900:911] + expected[:1025]
    assert count_sampled(table.drop_columns("parts")).tolist() == lengths


@pytest.mark.slow
def test_smollm2_writes_markers_in_several_tokens(smollm2: Any) -> None:
    made = smollm2.load_tokenizer()
    ids = made("<think>\nIt is 5.\n</think>\n\nThe answer is 5.", add_special_tokens=False)["input_ids"]
    parts = Spans(made).of(np.array([]), np.array(ids)).parts
    assert parts is not None
    text = made.decode([id for id, part in zip(ids, parts.tolist(), strict=True) if part == T])
    assert text.startswith("<think>\nIt is 5.\n</think>")
    assert text.strip().endswith("</think>")
    assert made.decode([id for id, part in zip(ids, parts.tolist(), strict=True) if part == A]).strip() == (
        "The answer is 5."
    )
