"""Which token an id stands for, which texts a model can read, and what ends them. No model is loaded.

Trainers add tokens that no text holds, such as one for padding, and change reserved ones. So tokenizers are not
compared as wholes. A table of token ids notes the hash of its tokenizer's whole vocabulary. For readers that do not
have that tokenizer it also notes the hash of the part below the tokens that were added at the end, and these by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import first_line, folder_of, is_adapter, is_gguf, refuse_own_code
from tsae.errors import TsaeError

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


def text_limits(checkpoint: CheckpointRecord) -> tuple[int | None, set[int]]:
    """(context length, end tokens) of a checkpoint, or of an adapter's base; unknown without a config.json.

    Raises:
        TsaeError: where the configuration cannot be read, or names something else than token ids.
    """
    config, owner = _config_of(checkpoint)
    if config is None:
        return None, set()
    return _context(config), {id for ids in _ends(config, owner) for id in ids}


def told_ends(checkpoint: CheckpointRecord) -> list[list[int]]:
    """End tokens of a checkpoint, or of an adapter's base: those of config.json, then those of generation_config.json.

    Raises:
        TsaeError: as `text_limits`.
    """
    config, owner = _config_of(checkpoint)
    return [] if config is None else _ends(config, owner)


def reading_limits(checkpoint: CheckpointRecord) -> tuple[int | None, int | None]:
    """(context length, size of the vocabulary) of a checkpoint, or of an adapter's base. What is not known is None.

    Raises:
        TsaeError: where the configuration cannot be read.
    """
    config, _ = _config_of(checkpoint)
    found = getattr(config, "vocab_size", None)
    return _context(config), found if isinstance(found, int) else None


def _context(config: Any) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _ends(config: Any, owner: CheckpointRecord) -> list[list[int]]:
    from transformers import GenerationConfig

    folder, told = folder_of(owner, needs="tokenizer"), [getattr(config, "eos_token_id", None)]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            told.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
        except MemoryError:
            raise
        except Exception as error:  # transformers raises no narrower class
            fix = "Save the model again, or remove this file."
            raise TsaeError(f"cannot be read ({first_line(error)})", where=file, fix=fix) from error
    ends: list[list[int]] = []
    for found in told:
        ids = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
        odd = next((id for id in ids if isinstance(id, bool) or not isinstance(id, int)), None)
        if odd is not None:
            fix = "Name token ids as whole numbers."
            raise TsaeError(f"its eos_token_id holds {str(odd)[:60]!r}, which is no token id", where=folder, fix=fix)
        ends.append(list(ids))
    return ends


def _config_of(checkpoint: CheckpointRecord) -> tuple[Any, CheckpointRecord]:
    """The configuration of a checkpoint's text model, None where there is none; and the model that it is of."""
    from transformers import AutoConfig

    folder = folder_of(checkpoint, needs="tokenizer")
    if is_gguf(folder):
        return None, checkpoint
    if is_adapter(folder):
        return _config_of(base_of(checkpoint))
    if not (folder / "config.json").is_file():
        return None, checkpoint
    try:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return loaded.get_text_config(), checkpoint
    except MemoryError:
        raise
    except Exception as error:  # transformers and what it uses raise no narrower class
        refuse_own_code(error, folder)
        raise TsaeError(
            f"its configuration cannot be read ({first_line(error)})",
            where=checkpoint.path,
            fix="Give a Hugging Face model directory with config.json.",
        ) from error
