"""The files of a checkpoint: where they lie, which of them hold weights, and whether they are complete.

A path never causes a network call. A Hugging Face id is looked up in the local cache first; only what the cache lacks
is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tsae.base.files import as_tsae_error, digest, read_object, reading
from tsae.checkpoints.fsdp import BESIDE, fsdp_shards, merged
from tsae.checkpoints.record import CheckpointRecord
from tsae.errors import TsaeError, refuse

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_DOWNLOADS = ("*.json", "model*.safetensors", ADAPTER_WEIGHTS, "*.model", "*.txt", "*.jinja", "*.tiktoken")
# Trainers leave these beside the weights. They are pickles too, but not the weights that a user asks for.
_TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state.*)\.(bin|pt|pth)")
# Masks and tables that older versions of transformers saved. The model computes them.
_TABLES = re.compile(r"(?:.+\.)?(?:rotary_emb\.\w+|(?:attn|attention)\.(?:masked_)?bias|position_ids)")
# What stands beside a causal language model and takes no part in what it computes.
_BESIDE = re.compile(
    r"(?:model\.)?(?:v_head|value_head|value_model|score|reward_head|classifier|critic|mtp|mtp_layers|"
    r"vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\..+"
)
# Embeddings and heads: their rows are the tokens of the vocabulary.
_BY_TOKEN = re.compile(r"(?:.+\.)?(?:embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)\.(?:weight|bias)")
_THREADS = 4
"""Files that are read at once; the lock of the interpreter is free meanwhile."""


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(".gguf")


def is_hub_id(path: str) -> bool:
    """Whether a text names a Hugging Face repository (``org/model``), not something on this machine.

    What exists here is a path, and so is anything below a folder that exists here: a mistyped path must not become a
    request to the network.
    """
    return bool(_HUB_ID.fullmatch(path)) and not Path(path.partition("/")[0]).exists()


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter instead of a whole model; False for anything but a folder.

    torchtune writes an adapter also for itself (adapter_model.pt), and the model that it is merged into beside it.

    Raises:
        TsaeError: where it holds a whole model too, and nothing says that this is the adapter merged.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    what = f"holds both an adapter ({ADAPTER_CONFIG}) and the weights of a whole model"
    both = any(folder.glob("model*.safetensors")) and not (folder / "adapter_model.pt").is_file()
    refuse(folder, (both, what, "Keep one of them in this folder."))
    return True


def folder_of(checkpoint: CheckpointRecord, *, needs: str = "weights") -> Path:
    """The folder with a checkpoint's files (or its GGUF file), on the disk or in the Hugging Face cache.

    Args:
        checkpoint: whose path is a folder, a GGUF file or a Hugging Face id.
        needs: "weights" or "tokenizer": what the cache must hold of a repository to do without the network. With
            "config" no weights are fetched or merged: the folder has configuration and tokenizer.

    Raises:
        TsaeError: where there is no such folder, or a repository is neither cached nor can be downloaded.
    """
    path, below = Path(checkpoint.path), Path(checkpoint.subfolder or ".")
    if is_hub_id(checkpoint.path):
        return _from_cache(checkpoint, needs)
    folder = path if is_gguf(path) else path / below
    if below.is_absolute() or ".." in below.parts or not (folder.is_file() if is_gguf(path) else folder.is_dir()):
        raise TsaeError("holds no such checkpoint", where=folder, fix="Check the path.")
    if not fsdp_shards(folder):
        return folder
    return merged(folder) if needs == "weights" else folder / BESIDE  # tokens need no weights


def weights_of(checkpoint: CheckpointRecord) -> tuple[int, str]:
    """Bytes of a checkpoint's weights, and whether they are "fetched" or "merged" first, or neither. Does neither.

    Raises:
        TsaeError: where it has no weights that are read.
    """
    folder, path = folder_of(checkpoint, needs="config"), Path(checkpoint.path)
    if is_hub_id(checkpoint.path) and not _has_weights(folder):
        return _size_on_hub(checkpoint), "fetched"
    shards = fsdp_shards(path / (checkpoint.subfolder or "")) if path.is_dir() else []
    files = shards or ([folder] if is_gguf(folder) else weight_files(folder))
    return sum(file.stat().st_size for file in files), "merged" if shards else ""


def _size_on_hub(checkpoint: CheckpointRecord) -> int:
    from huggingface_hub import HfApi

    with as_tsae_error("the Hub does not list its files", checkpoint.path, "Check the name, and the network."):
        told = HfApi().model_info(checkpoint.path, revision=checkpoint.revision, files_metadata=True).siblings or []
    place = Path(checkpoint.subfolder or "")
    sizes = [
        file.size or 0
        for file in told
        if (name := Path(file.rfilename)).parent == place
        and (name.match("model*.safetensors") or name.name == ADAPTER_WEIGHTS)
    ]
    what, fix = "holds no weights in safetensors", "Convert its pickled weights first, or give another model."
    refuse(checkpoint.path, (not sizes, what, fix))
    return sum(sizes)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except TsaeError:
        return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the weights of a model or an adapter.

    Raises:
        TsaeError: where there are none, some are missing, only pickles are there, or an index points elsewhere.
    """
    adapter, indexed = is_adapter(folder), (folder / _INDEX).is_file()
    expected, kind = (ADAPTER_WEIGHTS, "adapter") if adapter else (_WEIGHTS, "model")
    whole = (folder / expected).is_file()
    named = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}")))
    suffixes = (".bin", ".pt", ".pth")
    pickles = [p.name for s in suffixes for p in sorted(folder.glob(f"*{s}")) if not _TRAINER_STATE.fullmatch(p.name)]
    found = f"only pickled weights ({', '.join(pickles)}), which are never loaded" if pickles else "no weights"
    refuse(
        folder,
        (
            not adapter and not (folder / "config.json").is_file(),
            "holds no config.json" + f", and adapters in folders ({named})" * bool(named),
            "Give one of these folders." if named else "Give a Hugging Face model directory.",
        ),
        (
            not adapter and whole and indexed and any(folder.glob("model-*.safetensors")),
            f"holds weights twice: {_WEIGHTS}, and the files that {_INDEX} names",
            "Remove those of an earlier save.",
        ),
        (
            not whole and (adapter or not indexed),
            f"holds {found}; expected {expected}",
            f"Save the {kind} again with {kind}.save_pretrained(directory), which writes safetensors.",
        ),
    )
    # In the order of transformers, which looks for no other names.
    return [folder / expected] if whole else _indexed(folder)


def has_no_part(name: str) -> bool:
    """Whether a weight may be left out, because the model computes the same without it: masks, value heads."""
    return bool(_TABLES.fullmatch(name) or _BESIDE.fullmatch(name))


def common_rows(name: str, shape: Sequence[int], other: Sequence[int]) -> int | None:
    """How many rows of a weight two models share: all of one shape, and the fewer of two vocabularies; else None."""
    if tuple(shape) == tuple(other):
        return shape[0] if len(shape) else 1
    return min(shape[0], other[0]) if _BY_TOKEN.fullmatch(name) and tuple(shape[1:]) == tuple(other[1:]) else None


def beside_the_model(folder: Path) -> tuple[list[str], list[str]]:
    """(weights of value heads and the like, files of weights that are not read) of a folder.

    Both are empty where its files cannot be read: loading them says what is wrong.
    """
    try:
        kinds = _stored(folder)
    except TsaeError:
        return [], []
    patterns = ("adapter_model*", "*/adapter_model*") if is_adapter(folder) else ("model*.safetensors", "*model*.bin")
    others = {str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern)} - {*kinds}
    return [name for of_file in kinds.values() for name in of_file if _BESIDE.fullmatch(name)], sorted(others)


def check_stored(folder: Path) -> None:
    """Refuse weights that lie in two files, and whole numbers whose scale nothing gives.

    Raises:
        TsaeError: as `weight_files`, too.
    """
    seen: dict[str, str] = {}
    for file, of_file in _stored(folder).items():
        for name, kind in of_file.items():
            whole = kind[0] in "IU" and not has_no_part(name) and quantisation(folder) is None
            if whole or name in seen:
                what = (
                    f"holds {name} twice: in {seen[name]} and {file}"
                    if name in seen
                    else (
                        f"{name} is stored as whole numbers ({kind}), and config.json does not say how they are scaled"
                    )
                )
                raise TsaeError(what, where=folder, fix="Save the model again into an empty folder, not quantised.")
        seen |= dict.fromkeys(of_file, file)


def _stored(folder: Path) -> dict[str, dict[str, str]]:
    """How every weight is stored (``F32``), by file and name."""
    from safetensors import safe_open

    found = {}
    for path in weight_files(folder):
        with reading(path, "Complete the checkpoint."), safe_open(path, framework="np") as file:
            found[path.name] = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return found


def quantisation(folder: Path) -> str | None:
    """How the weights in a folder are quantised, such as "awq, 4 bits", by its config.json; None if it does not say."""
    found = config_of(folder).get("quantization_config")
    if not isinstance(found, dict):
        return None
    loaded = next((bits for bits in (4, 8) if found.get(f"load_in_{bits}bit")), None)
    bits = found.get("bits", loaded)
    method = str(found.get("quant_method", "method unknown"))
    return method if bits is None else f"{method}, {bits} bits"


def vocabulary_size(folder: Path) -> int | None:
    """How many tokens the config.json in a folder gives the text model; None where it does not say."""
    config = config_of(folder)
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("vocab_size")
    return found if isinstance(found, int) else None


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json in a folder; empty where it cannot be read: loading the model says what is wrong."""
    try:
        return read_object(folder / "config.json", "")
    except TsaeError:
        return {}


def digests_of_files(files: Sequence[Path]) -> list[tuple[str, bytes]]:
    """(name and size, SHA-256) of every file. A process reads a file again only if its size or times have changed."""
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(digest, files))
    sizes = [f"{file.name}:{file.stat().st_size}:" for file in files]
    return [(size, found.encode()) for size, found in zip(sizes, digests, strict=True)]


def _indexed(folder: Path) -> list[Path]:
    """The files that an index names, all of which must be in its folder."""
    names = read_object(folder / _INDEX, "Complete the checkpoint.").get("weight_map")
    files = sorted({str(name) for name in names.values()}) if isinstance(names, dict) else []
    odd = not files or any(Path(name).name != name or not name.endswith(".safetensors") for name in files)
    what = "its weight_map does not name .safetensors files of the same folder"
    refuse(folder / _INDEX, (odd, what, "Save the model again."))
    missing = [name for name in files if not (folder / name).is_file()]
    what = f"lacks {len(missing)} of {len(files)} weight files (first: {', '.join(missing[:1])})"
    refuse(folder, (missing, what, "Complete the checkpoint."))
    return [folder / name for name in files]


def _from_cache(checkpoint: CheckpointRecord, needs: str) -> Path:
    """The folder of a Hugging Face repository in the cache, downloaded if the cache lacks what is needed of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    below = f"{checkpoint.subfolder}/" if checkpoint.subfolder else ""
    request: dict[str, Any] = {
        "repo_id": checkpoint.path,
        "revision": checkpoint.revision,
        "allow_patterns": [below + name for name in _DOWNLOADS if needs != "config" or "safetensors" not in name],
        # A star of these patterns matches subfolders too, each of which may hold a model of its own.
        "ignore_patterns": [f"{below}*/*"],
    }
    where = checkpoint.path + (f"@{checkpoint.revision}" if checkpoint.revision else "") + ("/" + below).rstrip("/")
    fix = "Check the name, or download it once with a network: hf download."
    with as_tsae_error("neither a folder here nor in the Hugging Face cache, and cannot be downloaded", where, fix):
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(**request, local_files_only=True)) / below
            there = {"weights": _has_weights(folder), "config": (folder / "config.json").is_file()}
            if there.get(needs, True) and (needs == "weights" or has_tokenizer(folder)):
                return folder
        folder = Path(snapshot_download(**request)) / below
    if not folder.is_dir() or (needs == "weights" and not _has_weights(folder)):
        what = "no weights in safetensors are in the cache, and none could be downloaded"
        fix = "Download it with a network, or check the subfolder. Pickled weights have to be converted first."
        raise TsaeError(what, where=where, fix=fix)
    return folder


_LAST = "trainer_state.json"
"""The Hugging Face Trainer writes it after weights and optimizer."""


def unfinished(folders: Sequence[Path], *, state: bool = True) -> dict[Path, str]:
    """The checkpoints of one training that are not complete, and what is missing.

    Complete is a checkpoint with a configuration that can be read, and with all weight files in the length that their
    heads announce; and with a tokenizer and, where the trainer's `state` matters, a trainer_state.json, if another
    checkpoint has one.
    """
    last = state and any((folder / _LAST).is_file() for folder in folders)
    tokens = any(map(has_tokenizer, folders))
    found = {folder: _missing(folder, last=last, tokens=tokens) for folder in folders}
    return {folder: missing for folder, missing in found.items() if missing}


def _missing(folder: Path, *, last: bool, tokens: bool) -> str:
    try:
        if fsdp_shards(folder):
            read_object(folder / BESIDE / "config.json", "")
            return ""
        # An adapter has that of its base.
        lacks = tokens and not is_adapter(folder) and not has_tokenizer(folder)
        refuse(folder, (lacks, "holds no tokenizer", None))
        files = weight_files(folder)
        for name in (ADAPTER_CONFIG if is_adapter(folder) else "config.json", *((_LAST,) if last else ())):
            refuse(folder, (not (folder / name).is_file(), f"holds no {name}", None))
            read_object(folder / name, "")
        short = next((file.name for file in files if not _whole(file)), None)
        return f"{short} is not all there" if short else ""
    except TsaeError as error:
        return error.what


def _whole(file: Path) -> bool:
    """Whether a safetensors file has the length that its head announces, by safetensors itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(file, ""), safe_open(file, framework="np"):
            return True
    except TsaeError as error:
        if isinstance(error.__cause__, SafetensorError):
            return False
        raise
