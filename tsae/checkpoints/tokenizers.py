"""Which token an id stands for, which texts a model can read, and what ends them. No model is loaded.

Trainers add tokens that no text holds, such as one for padding, and change reserved ones. So tokenizers are not
compared as wholes. A table of token ids notes the hash of its tokenizer's whole vocabulary. For readers that do not
have that tokenizer it also notes the hash of the part below the tokens that were added at the end, and these by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.base.files import as_tsae_error
from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import folder_of, has_tokenizer, is_adapter, is_gguf
from tsae.errors import TsaeError, needing, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ADDED = 1024
"""Tokens noted one by one."""


def load_tokenizer(checkpoint: CheckpointRecord) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer; an adapter without one has its base's.

    Raises:
        TsaeError: where the directory holds no tokenizer files (transformers would make up a one-token tokenizer), or
            the tokenizer encodes text to nothing.
    """
    from transformers import AutoTokenizer

    folder = folder_of(checkpoint, needs="tokenizer")
    fix = "Copy the tokenizer files of the base model into this directory."
    if not is_gguf(folder) and not has_tokenizer(folder):
        if is_adapter(folder):
            return load_tokenizer(base_of(checkpoint))
        what = "holds no tokenizer (expected tokenizer.json, tokenizer.model, vocab.json, …)"
        raise TsaeError(what, where=folder, fix=fix)
    with quiet(), as_tsae_error("cannot load its tokenizer", folder, fix):
        tokenizer = AutoTokenizer.from_pretrained(**source_of(folder))
        nothing = not tokenizer("1", add_special_tokens=False)["input_ids"]
    last = max(tokenizer.get_vocab().values(), default=0)
    if len(tokenizer) < 2 or nothing or last > 10 * len(tokenizer) + 100_000:  # lists by token would fill the memory
        what = f"its tokenizer has {len(tokenizer):,} tokens, the last with the id {last:,}, or encodes text to nothing"
        raise TsaeError(what, where=folder, fix=fix)
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary (tokens with their ids): equal exactly where token ids mean the same."""
    return vocabulary_hash(tokens_by_id(tokenizer))


def token_strings(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of every token id, decoded one by one; special tokens as they are named."""
    return list(some_strings(tokenizer, range(max(tokenizer.get_vocab().values()) + 1)).values())


def some_strings(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> dict[str, str]:
    """Text of some token ids, by id as text (JSON has no other keys), without lone surrogates, which UTF-8 lacks."""
    special, end = set(tokenizer.all_special_ids), max(tokenizer.get_vocab().values()) + 1
    texts = {
        id: tokenizer.convert_ids_to_tokens(id) if id in special else tokenizer.decode([id]) for id in ids if id < end
    }
    return {str(id): text.encode("utf-8", "replace").decode() for id, text in texts.items()}


def text_of(strings: Sequence[str], id: int) -> str:
    """The text of a token id. A model may have more ids than its tokenizer; such an id is shown by its number."""
    return strings[id] if id < len(strings) else f"#{id}"


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


def text_limits(checkpoint: CheckpointRecord) -> tuple[int | None, set[int]]:
    """(context length, end tokens) of a checkpoint, or of an adapter's base; unknown without a config.json.

    Raises:
        TsaeError: where the configuration cannot be read, or names something else than token ids.
    """
    return reading_limits(checkpoint)[0], {id for ids in named_ends(checkpoint) for id in ids}


def named_ends(checkpoint: CheckpointRecord) -> list[list[int]]:
    """End tokens of a checkpoint, or of an adapter's base: those of config.json, then those of generation_config.json.

    Raises:
        TsaeError: as `text_limits`.
    """
    from transformers import GenerationConfig

    config, folder = _config_of(checkpoint)
    if config is None:
        return []
    named = [getattr(config, "eos_token_id", None)]
    file = folder / "generation_config.json"
    if file.is_file():
        with as_tsae_error("cannot be read", file, "Save the model again, or remove this file."):
            named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    ends = [[*ids] if isinstance(ids, list | tuple) else [] if ids is None else [ids] for ids in named]
    odd = next((id for ids in ends for id in ids if type(id) is not int), None)
    what = f"its eos_token_id holds {str(odd)[:60]!r}, which is not a token id"
    refuse(folder, (odd is not None, what, "Name token ids as whole numbers."))
    return ends


def reading_limits(checkpoint: CheckpointRecord) -> tuple[int | None, int | None]:
    """(context length, size of the vocabulary) of a checkpoint, or of an adapter's base. What is not known is None.

    Raises:
        TsaeError: where the configuration cannot be read.
    """
    config, _ = _config_of(checkpoint)
    context, vocabulary = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    return (
        context if isinstance(context, int) and context > 0 else None,
        vocabulary if isinstance(vocabulary, int) else None,
    )


def _config_of(checkpoint: CheckpointRecord) -> tuple[Any, Path]:
    """The configuration of a checkpoint's text model, None where there is none; and the folder that holds it."""
    from transformers import AutoConfig

    folder = folder_of(checkpoint, needs="tokenizer")
    if is_adapter(folder):
        return _config_of(base_of(checkpoint))
    if is_gguf(folder) or not (folder / "config.json").is_file():
        return None, folder
    fix = "Give a Hugging Face model directory with config.json."
    with as_tsae_error("its configuration cannot be read", checkpoint.path, fix):
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return loaded.get_text_config(), folder


def source_of(folder: Path) -> dict[str, Any]:
    """Where transformers finds a model or a tokenizer, as arguments of from_pretrained."""
    # Left to itself, transformers would ask in the terminal whether to run a checkpoint's own code.
    plain = {"local_files_only": True, "trust_remote_code": False}
    if not is_gguf(folder):
        return {"pretrained_model_name_or_path": str(folder), **plain}
    with needing("gguf", "reading GGUF", folder):
        import gguf  # noqa: F401
    return {"pretrained_model_name_or_path": str(folder.parent), "gguf_file": folder.name, **plain}


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' loading bar and report: tsae shows its own progress, and checks missing weights itself."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
