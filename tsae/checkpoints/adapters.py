"""PEFT adapters: find their base, and put them on it without merging.

An adapter gets modules of its own around the weights of a loaded base. What peft puts in the place of these modules,
such as trained embeddings, norms or biases, the base never has. So a series of adapters loads its base once, and
nothing has to be taken off again.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from tsae.base.files import as_tsae_error, read_object
from tsae.checkpoints.record import CheckpointRecord
from tsae.checkpoints.weight_files import (
    ADAPTER_CONFIG,
    digests_of_files,
    folder_of,
    is_adapter,
    is_gguf,
    is_hub_id,
    weight_files,
)
from tsae.errors import TsaeError, needing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Checkpoint = TypeVar("_Checkpoint", bound=CheckpointRecord)

_KINDS = (
    *("LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR"),
    *("MISS", "OFT", "OSF", "RANDLORA", "ROAD", "TRAINABLE_TOKENS", "VERA", "WAVEFT"),
)
"""Kinds that change modules and leave the base's tensors as they are; a test reads each of them. Prompts and prefixes
would need tokens of their own before the text."""
# These starts leave the base as it was; with others (PiSSA, OLoRA, …) training starts from a changed base.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_OF_TOKENS = "token_adapter.base_layer."
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
    if checkpoint.base is None and named and ".." not in Path(str(named)).parts:
        return type(checkpoint)(id="base", path=str(named), revision=config.get("revision"))
    if checkpoint.base is not None and (not named or _same_model(str(named), checkpoint.base)):
        return cast(_Checkpoint, checkpoint.base)
    what = f"is an adapter of {named}" if named else "does not say which model it is an adapter of"
    if checkpoint.base is not None:
        what += f", but the base of the series is {checkpoint.base.path}"
    fix = (
        "Give its base before it, as the first of several paths. Where that is the same model under another name, "
        "correct base_model_name_or_path in its adapter_config.json."
    )
    raise TsaeError(what, where=folder / ADAPTER_CONFIG, fix=fix)


def checked_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter on an unchanged base. Raises TsaeError for kinds that are not read."""
    config = read_object(folder / ADAPTER_CONFIG, "Save the adapter again.")
    kind, start = config.get("peft_type"), config.get("init_lora_weights", True)
    named = config.get("base_model_name_or_path") or ""
    odd = ("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config")
    # With a megatron_config, peft imports the module that megatron_core names.
    used = next((name for name in (*odd, "megatron_config") if config.get(name)), None)
    fix = "Merge it into its base (merge_and_unload) and save the whole model. Prompts and prefixes cannot be merged."
    if kind not in _KINDS:
        what = f"is an adapter of type {kind}, expected one of {', '.join(_KINDS)}"
    elif start not in _PLAIN_STARTS:
        what = f"started from init_lora_weights={start!r}, which changed its base"
        fix = "Save it with path_initial_model_for_weight_conversion, or merge it and save the whole model."
    elif not isinstance(named, str) or not named.isprintable() or len(named) > _LONGEST_PATH:
        what = f"its base_model_name_or_path ({str(named)[:60]!r}) is not the name of a model"
        fix = "Name the folder or the id of its base there."
    elif used is not None:
        what = f"uses {used}, which cannot be read"
    else:
        return config
    raise TsaeError(what, where=folder / ADAPTER_CONFIG, fix=fix)


def is_lora(folder: Path) -> bool:
    return bool(checked_config(folder)["peft_type"] == "LORA")


class Adapter(NamedTuple):
    """An adapter on its base."""

    model: PreTrainedModel
    """The base's own class, with the adapter's modules in it."""
    config: Any
    """peft's."""
    added: list[str]
    """Names of the parameters that are not the base's own: what was trained, and what peft computes it from."""


def put_on(model: PreTrainedModel, checkpoint: CheckpointRecord, base: CheckpointRecord, device: str) -> Adapter:
    """Put an adapter on a copy of its loaded base, which shares the base's weights and leaves them as they are.

    Raises:
        TsaeError: where the adapter does not fit the base, or peft does not know one of its settings.
    """
    import torch

    with needing("peft", "reading adapters", checkpoint.path):
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftModel, PeftType
    from safetensors import safe_open

    folder = folder_of(checkpoint)
    settings = checked_config(folder)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(settings["peft_type"])]
    known = {*kind.__dataclass_fields__, "peft_version", "unsloth_fixed"}
    unknown = next((name for name, value in settings.items() if value and name not in known), None)
    if unknown is not None:
        what = f"has the setting {unknown}, which the installed peft does not know and would ignore"
        fix = "Install the version of peft that saved it, or a later one."
        raise TsaeError(what, where=folder / ADAPTER_CONFIG, fix=fix)
    shell, shared = _apart(model)
    # peft draws random starts, which the adapter's weights overwrite.
    with as_tsae_error(f"cannot be put on {base.path}", folder, GIVE_ITS_BASE), torch.random.fork_rng(devices=()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's advice to those who train or merge; what does not fit is refused
            config = kind.from_pretrained(str(folder))
            config.inference_mode = True
            with safe_open(weight_files(folder)[0], framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _resize(shell, shapes)
            wrapped: Any = PeftModel(shell, config)
            _give_own(wrapped, shared, shapes)
            found = wrapped.load_adapter(str(folder), "default", torch_device="cpu" if device == "meta" else device)
        if odd := sorted({*found.missing_keys, *found.unexpected_keys} - said_twice(shapes)):
            raise ValueError(f"{len(odd)} weights are missing or have no place there, the first is {odd[0]}")
    inner: PreTrainedModel = wrapped.base_model.model
    inner.eval()
    inner.requires_grad_(False)
    return Adapter(inner, config, [name for name, p in inner.named_parameters() if id(p) not in shared])


def said_twice(names: Collection[str]) -> set[str]:
    """Names in an adapter's file that another one says too. Of a trained embedding or head, peft writes its weight; in
    a run with a resized vocabulary also the module around it, with that weight once more and the base's."""
    plain = {name: re.sub(r"\.(modules_to_save|original_module)(?=\.\w+$)", "", name) for name in names}
    return {name for name, short in plain.items() if short != name and short in plain}


def _apart(model: PreTrainedModel) -> tuple[PreTrainedModel, set[int]]:
    """A copy of a model with modules of its own around the same weights, and the ids of its parameters."""
    from torch.nn import Parameter

    # Tensors of a quantised layer have classes and states of their own: such an object is shared.
    kept: dict[int, Any] = {
        id(t): Parameter(t.detach(), requires_grad=False) if type(t) is Parameter else t
        for t in chain(model.parameters(), model.buffers())
    }
    return copy.deepcopy(model, kept), {id(value) for value in kept.values()}


def _resize(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give the model as many tokens as an adapter's file has embeddings for: its run had resized the vocabulary."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [next((name for name, module in model.named_modules() if module is end), "none") for end in ends]
    keys = [[f"base_model.model.{name}.{of}weight" for of in ("", "base_layer.", _OF_TOKENS)] for name in names]
    rows, head = (next((shapes[key][0] for key in of if key in shapes), None) for of in keys)
    if rows not in (None, len(ends[0].weight)):
        if head != rows and ends[1] is not None and ends[1].weight is not ends[0].weight:
            raise ValueError(f"it has {rows} embeddings, and a head for {head or len(ends[1].weight)} tokens")
        model.resize_token_embeddings(rows, mean_resizing=False)


def _give_own(model: Any, shared: set[int], names: Collection[str]) -> None:
    """Give the model copies of those of the base's parameters that an adapter's file holds, such as trained biases:
    peft writes into them. What was tied stays tied."""
    from torch.nn import Parameter

    every = [(f"{at}.{name}", module, name) for at, module in model.named_modules() for name in module._parameters]
    written = {id(p): p for full, module, name in every if full in names and id(p := getattr(module, name)) in shared}
    own = {key: Parameter(parameter.clone(), requires_grad=False) for key, parameter in written.items()}
    for _, module, name in every:
        if (key := id(getattr(module, name))) in own:
            setattr(module, name, own[key])


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
