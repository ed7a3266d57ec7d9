"""Loading a checkpoint's weights and tokenizer, and checking them before anything is computed with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tsae.checkpoints.series import Checkpoint

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    checkpoint: Checkpoint, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa"
) -> PreTrainedModel:
    """Load a causal LM in evaluation mode, without gradients; nothing of its weights is folded or centred.

    Args:
        checkpoint: a local directory or .gguf file is read without any network call; a Hugging Face id goes through
            the local cache first.
        device: a torch device.
        dtype: "auto" keeps the precision of the file; or float32, bfloat16, float16.
        attention: Hugging Face's attn_implementation.

    Raises:
        TsaeError: where there are no weights, only a pickle, or the weights do not fit the configuration.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if dtype not in _DTYPES:
        raise TsaeError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}", where=checkpoint.id)
    _check_weights(checkpoint)
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    with _quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                **_source(checkpoint),
                dtype=torch_dtype,
                attn_implementation=attention,
                use_safetensors=None if _is_gguf(checkpoint) else True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise TsaeError(
                f"cannot be loaded as a causal language model ({_first_line(error)})",
                where=checkpoint.path,
                fix="Give a Hugging Face model directory with config.json and safetensors, or a GGUF file.",
            ) from error
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise TsaeError(
            f"{len(missing)} weights are missing (first: {missing[0]}) and would be random",
            where=checkpoint.path,
            fix="Give a complete checkpoint; for an adapter, merge it into its base first.",
        )
    model.to(device)
    model.eval()
    model.requires_grad_(False)
    return model


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises:
        TsaeError: where the directory holds no tokenizer files (transformers would make up a one-token tokenizer
            that encodes text to nothing) or the tokenizer encodes text to nothing.
    """
    from transformers import AutoTokenizer

    path = Path(checkpoint.path)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise TsaeError(
            f"holds no tokenizer (expected one of {', '.join(_TOKENIZER_FILES[:3])}, …)",
            where=path,
            fix="Copy the tokenizer files of the base model into this directory.",
        )
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**_source(checkpoint))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TsaeError(f"cannot load its tokenizer ({_first_line(error)})", where=path) from error
    if len(tokenizer) < 2 or not tokenizer("1", add_special_tokens=False)["input_ids"]:
        raise TsaeError(
            f"its tokenizer has {len(tokenizer)} tokens and encodes text to nothing",
            where=path,
            fix="Copy the tokenizer files of the base model into this directory.",
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary (tokens with their ids): equal exactly where token ids mean the same."""
    entries = sorted((id, token) for token, id in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(entries).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Hash of a local checkpoint's weight files: names, sizes, first and last MiB of each; its id otherwise.

    Reading 140 GB to name a checkpoint would cost more than capturing from it; training changes every tensor, so
    that both ends of a file change with it.
    """
    path = Path(checkpoint.path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256()
    if not files:
        digest.update(f"{checkpoint.path}@{checkpoint.revision}/{checkpoint.subfolder}".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()[:16]


def _is_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.path.endswith(".gguf")


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    path = Path(checkpoint.path)
    if _is_gguf(checkpoint):
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise TsaeError("reading GGUF needs gguf", where=path, fix="pip install 'tsae[smollm]'") from error
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "local_files_only": True,
        }
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": checkpoint.path,
        "local_files_only": path.exists(),
    }
    if checkpoint.revision is not None:
        source["revision"] = checkpoint.revision
    if checkpoint.subfolder is not None:
        source["subfolder"] = checkpoint.subfolder
    return source


def _check_weights(checkpoint: Checkpoint) -> None:
    path = Path(checkpoint.path)
    if _is_gguf(checkpoint):
        if not path.is_file():
            raise TsaeError("no such GGUF file", where=path, fix="Check the path.")
        return
    if not path.exists():
        if path.is_absolute() or checkpoint.path.startswith("."):
            raise TsaeError("no such checkpoint directory", where=path, fix="Check the path.")
        return
    if not (path / "config.json").is_file():
        raise TsaeError("holds no config.json", where=path, fix="Give a Hugging Face model directory.")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")))
        found = f"only pickled weights ({', '.join(pickles)}), which are never loaded" if pickles else "no weights"
        raise TsaeError(
            f"holds {found}; expected *.safetensors",
            where=path,
            fix="Save the model again with model.save_pretrained(directory), which writes safetensors.",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the loading bar and its report: tsae shows its own progress, and checks missing weights itself."""
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


def token_strings(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of every token id, decoded one by one; special tokens as they are named."""
    special = set(tokenizer.all_special_ids)
    return [
        tokenizer.convert_ids_to_tokens(id) if id in special else tokenizer.decode([id])
        for id in range(max(tokenizer.get_vocab().values()) + 1)
    ]
