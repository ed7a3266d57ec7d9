"""How long a model's texts may be, which token ids it knows and what ends a text, without loading the model."""

from __future__ import annotations

from typing import Any

from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import first_line, folder_of, is_adapter, is_gguf, refuse_own_code
from tsae.errors import TsaeError


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
