"""The files of a checkpoint: where they lie, which hold weights, and whether they are an adapter.

A path never causes a network call. A Hugging Face id is looked up in the local cache first; only what the cache lacks
is downloaded, and then read from there like any other folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from tsae.checkpoints.series import Checkpoint

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
# What a trainer leaves beside the weights; pickles too, but nobody means them when asking for a model.
_TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state.*)\.(bin|pt|pth)")


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(".gguf")


def is_hub_id(path: str) -> bool:
    """Whether a text names a Hugging Face repository (``org/model``), rather than something on this machine.

    What exists here is a path, and so is what lies below a folder that exists here: a mistyped path must not become
    a request to the network.
    """
    return bool(_HUB_ID.fullmatch(path)) and not Path(path.partition("/")[0]).exists()


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter instead of a whole model.

    Raises:
        TsaeError: where it holds both.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if any(folder.glob("model*.safetensors")):
        raise TsaeError(
            f"holds both an adapter ({ADAPTER_CONFIG}) and the weights of a whole model",
            where=folder,
            fix="Keep one of them in this folder.",
        )
    return True


def folder_of(checkpoint: Checkpoint, *, needs: str = "weights") -> Path:
    """The folder with a checkpoint's files (the GGUF file itself for one), from the disk or the Hugging Face cache.

    Args:
        checkpoint: whose path is a folder, a GGUF file or a Hugging Face id.
        needs: "weights" or "tokenizer": what of a Hugging Face repository has to be in the cache for it to do
            without the network.

    Raises:
        TsaeError: where there is no such folder, or a repository is neither cached nor can be downloaded.
    """
    path = Path(checkpoint.path)
    if is_gguf(path):
        if not path.is_file():
            raise TsaeError("no such GGUF file", where=path, fix="Check the path.")
        return path
    below = Path(checkpoint.subfolder or ".")
    if below.is_absolute() or ".." in below.parts:
        raise TsaeError(f"the subfolder {checkpoint.subfolder!r} leaves the folder", where=path)
    if not is_hub_id(checkpoint.path):
        folder = path / below
        if not folder.is_dir():
            raise TsaeError("no such checkpoint directory", where=folder, fix="Check the path.")
        return folder
    folder = _from_cache(checkpoint, has_weights if needs == "weights" else has_tokenizer)
    if needs == "weights" and not has_weights(folder):
        raise TsaeError(
            "no weights in safetensors are in the cache, and none could be downloaded",
            where=checkpoint.path,
            fix="Download it with a network; a repository with pickled weights alone has to be converted first.",
        )
    return folder


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a whole model or an adapter with all of its weights."""
    try:
        return bool(weight_files(folder))
    except TsaeError:
        return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the weights of a model or an adapter.

    Raises:
        TsaeError: where there are none, some are missing, only pickles are there, or an index points elsewhere.
    """
    if is_adapter(folder):
        files = [folder / ADAPTER_WEIGHTS]
        if not files[0].is_file():
            _refuse(folder, ADAPTER_WEIGHTS, "adapter")
        return files
    if not (folder / "config.json").is_file():
        raise TsaeError("holds no config.json", where=folder, fix="Give a Hugging Face model directory.")
    # In the order of transformers, which looks for no other names.
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        _refuse(folder, _WEIGHTS, "model")
    return _indexed(folder)


def adapter_config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says.

    Raises:
        TsaeError: where it is not a JSON object.
    """
    return _json(folder / ADAPTER_CONFIG)


def model_config(folder: Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
        TsaeError: where it is not a JSON object.
    """
    return _json(folder / "config.json")


def _indexed(folder: Path) -> list[Path]:
    names = _json(folder / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise TsaeError("holds no weight_map from names of weights to files", where=folder / _INDEX)
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise TsaeError(
                f"names the file {name!r}, expected a .safetensors file of the same folder", where=folder / _INDEX
            )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise TsaeError(
            f"lacks {len(missing)} of {len(files)} weight files (first: {missing[0]})",
            where=folder,
            fix="Complete the checkpoint.",
        )
    return [folder / name for name in files]


def _refuse(folder: Path, expected: str, what: str) -> None:
    names = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
    pickles = [name for name in names if not _TRAINER_STATE.fullmatch(name)]
    found = f"only pickled weights ({', '.join(pickles)}), which are never loaded" if pickles else "no weights"
    raise TsaeError(
        f"holds {found}; expected {expected}",
        where=folder,
        fix=f"Save the {what} again with {what}.save_pretrained(directory), which writes safetensors.",
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TsaeError(f"not a file of JSON ({error})", where=file) from error
    if not isinstance(content, dict):
        raise TsaeError(f"a JSON {type(content).__name__}, expected an object", where=file)
    return content


def _from_cache(checkpoint: Checkpoint, complete: Callable[[Path], bool]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # A star of these patterns takes in subfolders too, each of which may hold a model of its own.
    below = f"{checkpoint.subfolder}/" if checkpoint.subfolder else ""
    request: dict[str, Any] = {
        "repo_id": checkpoint.path,
        "revision": checkpoint.revision,
        "allow_patterns": [
            below + name
            for name in ("*.json", "model*.safetensors", ADAPTER_WEIGHTS, "*.model", "*.txt", "*.jinja", "*.tiktoken")
        ],
        "ignore_patterns": [f"{below}*/*"],
    }
    where = checkpoint.path + (f"@{checkpoint.revision}" if checkpoint.revision else "") + ("/" + below).rstrip("/")
    try:
        folder = Path(snapshot_download(**request, local_files_only=True)) / below
        if complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:
        raise TsaeError(f"not the name of a Hugging Face repository ({error})", where=where) from error
    try:
        folder = Path(snapshot_download(**request)) / below
    except OSError as error:
        raise TsaeError(
            f"neither a folder here nor in the Hugging Face cache, and cannot be downloaded ({_first_line(error)})",
            where=where,
            fix="Check the name, or download it once with a network: hf download.",
        ) from error
    if not folder.is_dir():
        raise TsaeError("the repository has no such folder with a model in it", where=where, fix="Check the subfolder.")
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
