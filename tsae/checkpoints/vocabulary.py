"""Which token an id stands for, and whether another tokenizer says the same of the ids at hand.

Trainers add tokens that no text holds, such as one for padding, and change reserved ones. So tokenizers are not
compared as wholes. A table of token ids notes the hash of its tokenizer's whole vocabulary. For readers that do not
have that tokenizer it also notes the hash of the part below the tokens that were added at the end, and these by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ADDED = 1024
"""Tokens noted one by one."""


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The vocabulary, added tokens too."""
    return {id: token for token, id in tokenizer.get_vocab().items()}


def vocabulary_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a table of token ids notes of its tokenizer, as JSON: ``tokenizer`` (hash of the vocabulary) and
    ``vocabulary`` (``ids``, how many are below the tokens added at the end; ``hash`` of these; ``added``, by id)."""
    tokens, added = tokens_by_id(tokenizer), set(tokenizer.get_added_vocab().values())
    below = end = max(tokens) + 1
    while (below - 1 in added or below - 1 not in tokens) and 0 < below > end - _MOST_ADDED:
        below -= 1
    tail = {str(id): token for id, token in sorted(tokens.items()) if id >= below}
    return {
        "tokenizer": vocabulary_hash(tokens),
        "vocabulary": {"ids": below, "hash": vocabulary_hash(tokens, below), "added": tail},
    }


def vocabulary_hash(tokens: Mapping[int, str], below: float = float("inf")) -> str:
    """Hash of the tokens with ids below a number: equal exactly where these ids mean the same."""
    entries = sorted((id, token) for id, token in tokens.items() if id < below)
    return hashlib.sha256(repr(entries).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def noted_tokens(info: Mapping[str, Any], known: Sequence[Mapping[int, str]]) -> Mapping[int, str] | None:
    """The vocabulary of a table's tokenizer, found by what the table notes of it.

    Args:
        info: of the table.
        known: vocabularies, one of which it may be or begin with.

    Returns:
        token by id; None where these do not tell.
    """
    noted: Any = info.get("vocabulary")
    for tokens in known:
        if vocabulary_hash(tokens) == info.get("tokenizer"):
            return tokens
    try:  # a file may say anything
        below, tail = int(noted["ids"]), {int(id): str(token) for id, token in noted["added"].items()}
        tokens = next(tokens for tokens in known if vocabulary_hash(tokens, below) == noted["hash"])
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return None
    found = {**{id: token for id, token in tokens.items() if id < below}, **tail}
    return found if vocabulary_hash(found) == info.get("tokenizer") else None


def joined_facts(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The facts of tables put together: those of the one that has the tokens of all; None where there is none."""
    try:  # a file may say anything
        if len({info.get("tokenizer") for info in infos}) == 1:
            return {name: infos[0][name] for name in ("tokenizer", "vocabulary") if name in infos[0]}
        whole = max(infos, key=lambda info: len(info["vocabulary"]["added"]))
        same = [{**info["vocabulary"], "added": None} == {**whole["vocabulary"], "added": None} for info in infos]
        held = [info["vocabulary"]["added"].items() <= whole["vocabulary"]["added"].items() for info in infos]
        return {name: whole[name] for name in ("tokenizer", "vocabulary")} if all(same + held) else None
    except (KeyError, TypeError, AttributeError):
        return None
