"""PEFT adapters: find their base, and put them on it without merging.

Only LoRA (with DoRA and rank stabilisation), which trainers of RLVR write. An adapter is put on the modules of a loaded
base and taken off again, so a series of adapters loads its base once.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import (
    ADAPTER_CONFIG,
    digests_of_files,
    first_line,
    folder_of,
    is_adapter,
    is_gguf,
    is_hub_id,
    json_object,
    weight_files,
)
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Checkpoint = TypeVar("_Checkpoint", bound=CheckpointRecord)

# These starts leave the base as it was; with others (PiSSA, OLoRA, …) training starts from a changed base.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_LONGEST_PATH = 4096
"""Characters."""
GIVE_ITS_BASE = "Give the base that the adapter was trained on."


def base_of(checkpoint: _Checkpoint) -> _Checkpoint:
    """The model that an adapter goes on: the base of its series, or else the one that its configuration names.

    Raises:
        TsaeError: where the configuration names another base than that of the series, or none.
    """
    folder = folder_of(checkpoint)
    config = checked_config(folder)
    named = config.get("base_model_name_or_path")
    if checkpoint.base is None:
        if not named or ".." in Path(str(named)).parts:
            raise TsaeError(
                f"is an adapter of {named}" if named else "does not say which model it is an adapter of",
                where=folder / ADAPTER_CONFIG,
                fix="Give the base before it, as the first of several paths.",
            )
        return type(checkpoint)(id="base", path=str(named), revision=config.get("revision"))
    if named and not _same_model(str(named), checkpoint.base):
        raise TsaeError(
            f"is an adapter of {named}, but the base of the series is {checkpoint.base.path}",
            where=folder,
            fix="Give the base that it was trained on; where that is the same model under another name, correct "
            "base_model_name_or_path in its adapter_config.json.",
        )
    return cast(_Checkpoint, checkpoint.base)


def checked_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter on an unchanged base. Raises TsaeError for other kinds of adapters."""
    config = json_object(folder / ADAPTER_CONFIG)
    kind, start = config.get("peft_type"), config.get("init_lora_weights", True)
    merged = "Merge it into its base (merge_and_unload) and save the whole model."
    if kind != "LORA":
        raise TsaeError(f"is an adapter of type {kind}, expected LORA", where=folder, fix=merged)
    if start not in _PLAIN_STARTS:
        raise TsaeError(
            f"started from init_lora_weights={start!r}, which changed its base",
            where=folder,
            fix="Save it with path_initial_model_for_weight_conversion, or merge it and save the whole model.",
        )
    named = config.get("base_model_name_or_path") or ""
    if not isinstance(named, str) or not named.isprintable() or len(named) > _LONGEST_PATH:
        what = f"its base_model_name_or_path ({str(named)[:60]!r}) is the name of no model"
        raise TsaeError(what, where=folder / ADAPTER_CONFIG, fix="Name the folder or the id of its base there.")
    odd = ("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config")
    # With a megatron_config, peft imports the module that megatron_core names.
    for name in (*odd, "megatron_config"):
        if config.get(name):
            raise TsaeError(f"uses {name}, which cannot be read", where=folder, fix=merged)
    return config


def put_on(model: PreTrainedModel, checkpoint: CheckpointRecord, base: CheckpointRecord, device: str) -> Any:
    """Put an adapter on its loaded base.

    Returns:
        a PeftModel. Its ``base_model.model`` is the base's own class with the adapter's modules in it; `unload()` gives
        back the base as it was.

    Raises:
        TsaeError: where the adapter does not fit the base.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise TsaeError("reading adapters needs peft", where=checkpoint.path, fix="pip install 'tsae[rl]'") from error
    from safetensors import SafetensorError

    folder = folder_of(checkpoint)
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        with warnings.catch_warnings():
            # peft calls what transformers has deprecated; users can do nothing about it.
            warnings.simplefilter("ignore", FutureWarning)
            # On the meta device first: a random start would use up random numbers, and is overwritten anyway.
            wrapped = PeftModel(model, config, low_cpu_mem_usage=True)
            found = wrapped.load_adapter(str(folder), "default", torch_device=device, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        what = f"cannot be put on {base.path} ({first_line(error)})"
        raise TsaeError(what, where=folder, fix=GIVE_ITS_BASE) from error
    odd = sorted({*found.missing_keys, *found.unexpected_keys})
    if odd:
        what = f"does not fit {base.path}: {len(odd)} weights are missing or have no place there (first: {odd[0]})"
        raise TsaeError(what, where=folder, fix=GIVE_ITS_BASE)
    return wrapped


def _same_model(named: str, base: CheckpointRecord) -> bool:
    """Whether the name in an adapter's configuration means the base.

    One model has several names: a hub id, its snapshot in the cache, the folder where it was before a move. Of a GGUF
    file transformers tells the adapter its folder only.
    """
    if named == base.path:
        return True
    here, ours = Path(named), Path(base.path)
    if is_gguf(ours) and not is_gguf(here):
        ours = ours.parent
    if is_hub_id(base.path):
        return not is_hub_id(named) and here.name == ours.name
    if here.exists() and ours.exists():
        if here.resolve() == ours.resolve():
            return True
        if not here.is_dir() or is_gguf(base.path) or is_adapter(here):
            return False
        return digests_of_files(weight_files(here)) == digests_of_files(weight_files(folder_of(base)))
    return here.name == ours.name or f"models--{named.replace('/', '--')}" in ours.parts
