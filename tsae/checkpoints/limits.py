"""How long a model's texts may be and what ends them, without loading the model."""

from __future__ import annotations

from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf, refuse_own_code
from tsae.errors import TsaeError


def text_limits(checkpoint: Checkpoint) -> tuple[int | None, set[int]]:
    """(context length, end tokens) of a checkpoint, or of an adapter's base; unknown without a config.json.

    Raises:
        TsaeError: where the configuration cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    folder = folder_of(checkpoint, needs="tokenizer")
    if is_gguf(folder):
        return None, set()
    if is_adapter(folder):
        return text_limits(base_of(checkpoint))
    if not (folder / "config.json").is_file():
        return None, set()
    try:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = loaded.get_text_config()
    except (OSError, ValueError, KeyError, RecursionError) as error:
        refuse_own_code(error, folder)
        raise TsaeError(
            f"its configuration cannot be read ({(str(error).splitlines() or ['?'])[0]})",
            where=checkpoint.path,
            fix="Give a Hugging Face model directory with config.json.",
        ) from error
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        generation = None
    ends: set[int] = set()
    for found in (getattr(config, "eos_token_id", None), getattr(generation, "eos_token_id", None)):
        ends |= set(found) if isinstance(found, (list, tuple)) else {found} if found is not None else set()
    return getattr(config, "max_position_embeddings", None), ends
