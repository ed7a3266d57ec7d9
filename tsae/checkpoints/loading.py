"""Load a checkpoint's weights and tokenizer, and check them before anything is computed with them.

Every row of a batch is rotated by its own length: LongRoPE (Phi-3, Phi-4-mini) chooses its factors, and dynamic NTK its
base, by the longest text of a batch. Dynamic NTK also keeps the base of a longer text for the next one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.base.files import as_tsae_error, read_object
from tsae.base.usual_state import usual_state
from tsae.base.validation import config
from tsae.checkpoints.adapters import Adapter, base_of, is_lora, put_on
from tsae.checkpoints.record import CheckpointRecord, add_noise
from tsae.checkpoints.tokenizers import load_tokenizer, quiet, source_of, token_strings
from tsae.checkpoints.weight_files import (
    ADAPTER_CONFIG,
    check_stored,
    digests_of_files,
    folder_of,
    has_no_part,
    is_adapter,
    is_gguf,
    quantisation,
    weight_files,
)
from tsae.errors import TsaeError, refuse

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@config
class Checkpoint(CheckpointRecord):
    """One set of weights, which it can load. `CheckpointRecord` describes its fields."""

    base: Checkpoint | None = field(default=None, compare=False, repr=False)

    def load_model(self, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa") -> PreTrainedModel:
        """Load the Hugging Face causal LM in evaluation mode, without gradients; see `tsae.checkpoints.loading`.

        To load several checkpoints in turn, use one `ModelLoader`: it loads the base of adapters only once.
        """
        return ModelLoader(device=device, dtype=dtype, attention=attention).load(self)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, and check that it encodes text to something."""
        return load_tokenizer(self)

    def tokens_with(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text contains a text, without special tokens.

        Raises:
            TsaeError: where there is none.
        """
        tokenizer = self.load_tokenizer()
        special = set(tokenizer.all_special_ids)
        found = tuple(i for i, s in enumerate(token_strings(tokenizer)) if text and text in s and i not in special)
        what = f"its tokenizer has no token whose text contains {text!r}"
        refuse(self.path, (not found, what, "Give another text (--step-text)."))
        return found


_DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
_MODEL = "sha256+config:"
"""Begins a fingerprint of the weights, read from end to end, and of the configuration that says what they compute."""
_loading = threading.Lock()
"""transformers sets the default dtype of the whole process while it loads a model."""
_UNUSED = ("_name_or_path", "transformers_version")
"""Entries of config.json that say where a model came from. They change as it is saved again, and its numbers do not."""


class ModelLoader:
    """Loads checkpoints in turn. Adapters share the weights of their base, which is loaded once and never merged.

    A loaded model is valid until the next call of `load`. What was loaded before leaves no trace in it.

    Args:
        device: a torch device; "meta" checks that the weights have their places, and reads none.
        dtype: "auto" keeps the precision of the file; or float32, float64, bfloat16, float16.
        attention: Hugging Face's attn_implementation; "eager" for a model that has no "sdpa".
    """

    def __init__(self, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa") -> None:
        refuse("ModelLoader", (dtype not in _DTYPES, f"dtype {dtype!r} is none of {', '.join(_DTYPES)}", None))
        self.device, self.dtype, self.attention = device, dtype, attention
        self._model: PreTrainedModel | None = None
        self._loaded: Path | None = None
        self._adapter: Adapter | None = None

    @usual_state()
    def load(self, checkpoint: CheckpointRecord) -> PreTrainedModel:
        """Load a causal LM in evaluation mode, without gradients; no weights are folded, centred or merged.

        A local path is read without any network call; a Hugging Face id goes through the local cache first. For an
        adapter this is its base's own class, with the adapter's modules in place. A model with noise is not reused.

        Raises:
            TsaeError: where there are no weights, only a pickle, weights are missing, have another shape or no place
                in the model that the configuration describes, or an adapter is of another base.
        """
        if checkpoint.noise is not None:
            noisy = self.load(replace(checkpoint, noise=None))
            self._loaded = None  # What is in memory are no longer the weights of the file.
            add_noise(noisy, checkpoint.noise)
            return noisy
        folder = folder_of(checkpoint)
        if not is_adapter(folder):
            return self._whole(checkpoint, folder)
        weight_files(folder)
        base = base_of(checkpoint)
        base_folder = folder_of(base)
        refuse(folder, (is_adapter(base_folder), f"is an adapter of {base.path}, which is an adapter too", None))
        self._adapter = put_on(self._whole(base, base_folder), checkpoint, base, self.device)
        return self._adapter.model

    @property
    def not_plain(self) -> str | None:
        """What the adapter that was loaded last has beside A and B of linear layers; None for plain LoRA."""
        if self._adapter is None:
            return None
        if getattr(self._adapter.config, "target_parameters", None):
            return "updates of single parameters (target_parameters)"
        return next((n for n in self._adapter.added if ".lora_A." not in n and ".lora_B." not in n), None)

    @property
    def added(self) -> list[str]:
        """Names of the parameters that the adapter that was loaded last adds to its base or has in place of its."""
        return [] if self._adapter is None else self._adapter.added

    def _whole(self, checkpoint: CheckpointRecord, folder: Path) -> PreTrainedModel:
        self._adapter = None
        if self._model is None or self._loaded != folder.resolve():
            self._model = self._loaded = None  # Let go of it before the next takes up memory.
            self._model = self._from_files(checkpoint, folder)
            self._loaded = folder.resolve()
        return self._model

    def _from_files(self, checkpoint: CheckpointRecord, folder: Path) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        if not is_gguf(folder):
            check_stored(folder)
        quantised = quantisation(folder)
        what = f"its weights are quantised ({quantised}) and cannot be loaded"
        fix = "Install what transformers asks for, or give the weights before quantisation."
        if quantised is None:
            what = "cannot be loaded as a causal language model"
            fix = "Give a Hugging Face model directory with config.json and safetensors, or a GGUF file."
        with _loading, quiet(), as_tsae_error(what, checkpoint.path, fix):
            options = {
                **source_of(folder),
                "dtype": self.dtype if self.dtype == "auto" else getattr(torch, self.dtype),
                "use_safetensors": None if is_gguf(folder) else True,
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,  # they are refused below, by name
                **({"device_map": "meta"} if self.device == "meta" else {}),
            }
            load: Any = AutoModelForCausalLM.from_pretrained
            try:
                model, info = load(**options, attn_implementation=self.attention)
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                # Some models have no sdpa. One is gpt-oss, because of its attention sinks.
                model, info = load(**options, attn_implementation="eager")
        _check_places(info, checkpoint.path)
        if is_gguf(folder) and getattr(model, "hf_quantizer", None) is not None:
            # The weights are plain floats by now, and transformers would neither train nor save the model.
            model.hf_quantizer.remove_quantization_config(model)
        rotate_rows_alone(model)
        model.to(self.device)
        model.eval()
        model.requires_grad_(False)
        return model


def check_places(checkpoints: Iterable[CheckpointRecord]) -> None:
    """Check that the weights of all files have their places in the models, without reading them.

    Quantised models and adapters of other kinds than LoRA are checked when they are loaded.

    Raises:
        TsaeError: as `ModelLoader.load`.
    """
    loader = ModelLoader(device="meta")
    for checkpoint in checkpoints:
        folder = folder_of(checkpoint)
        whole = folder_of(base_of(checkpoint)) if is_adapter(folder) else folder
        if not is_gguf(whole) and quantisation(whole) is None and (whole == folder or is_lora(folder)):
            loader.load(replace(checkpoint, noise=None))


def _check_places(info: Mapping[str, Any], where: str) -> None:
    """Refuse a model that is not made of its file's weights: all that it has, and nothing else that would count."""
    missing, shapes = sorted(info.get("missing_keys", ())), sorted(info.get("mismatched_keys", ()))
    unused = [name for name in sorted(info.get("unexpected_keys", ())) if not has_no_part(name)]
    fix = "Correct config.json, or save the model again with save_pretrained."
    if any(".lora_" in name for name in unused):
        fix = "They are an adapter's: merge it into its base (merge_and_unload) and save the whole model."
    if missing:
        what = f"{len(missing)} weights are missing (first: {missing[0]}) and would be random"
        what += f"; {len(unused)} in the file have other names (first: {unused[0]})" if unused else ""
    elif shapes:
        name, stored, expected = shapes[0]
        what = f"{name} has the shape {tuple(stored)} in the file and {tuple(expected)} in the model of config.json"
        what += f", as have {len(shapes) - 1} more" if shapes[1:] else ""
    elif unused:
        what = f"{len(unused)} weights of the file have no place in the model of config.json (first: {unused[0]})"
        what += "; without them it would compute something else"
    else:
        return
    raise TsaeError(what, where=where, fix=fix if unused or shapes else "Give a complete checkpoint.")


def weights_fingerprint(checkpoint: CheckpointRecord) -> str:
    """Hash of a checkpoint's weight files (names, sizes, and every byte), of its config.json, and of its noise.

    In config.json every value counts but for `_name_or_path` and `transformers_version`; its layout does not. For an
    adapter, adapter_config.json and its base count.

    Args:
        checkpoint: whose weights.

    Raises:
        TsaeError: where there are no weights, or config.json cannot be read.
    """
    folder = folder_of(checkpoint)
    digest = hashlib.sha256(b"" if checkpoint.noise is None else repr(checkpoint.noise).encode())
    files = [folder] if is_gguf(folder) else weight_files(folder)
    if is_adapter(folder):
        files = [*files, folder / ADAPTER_CONFIG]
        digest.update(weights_fingerprint(base_of(checkpoint)).encode())
    elif not is_gguf(folder):
        config = read_object(folder / "config.json", "Give a complete checkpoint.")
        used = {name: value for name, value in config.items() if name not in _UNUSED}
        digest.update(json.dumps(used, sort_keys=True).encode())
    for name, content in digests_of_files(files):
        digest.update(name.encode() + content)
    return _MODEL + digest.hexdigest()[:16]


def need_unchanged(checkpoint: CheckpointRecord, before: str, *, loaded: bool = False) -> None:
    """Check that a checkpoint still has the fingerprint that it had. Files that have not changed are not read again.

    Call it after a model is loaded: the files may have changed since the fingerprint was computed. Call it again after
    the model has read texts: on a CPU its weights are mapped from the files, and change with them.

    Args:
        checkpoint: whose weights are in use.
        before: its fingerprint.
        loaded: whether the model is in memory. It can then be used even if its files have been removed.

    Raises:
        TsaeError: where its weights or its config are others.
    """
    if loaded and not Path(checkpoint.path, checkpoint.subfolder or "").exists():
        return  # or of the Hugging Face cache, in which nothing is rewritten
    found = weights_fingerprint(checkpoint)
    if found != before:
        what = f"its weights or its config changed while they were in use (hash {found}, before {before})"
        fix = "Put the earlier files back and give the command again, or start again with another output."
        raise TsaeError(what, where=checkpoint.path, fix=fix)


def rotate_rows_alone(model: PreTrainedModel) -> list[RemovableHandle]:
    """Have every row of a batch rotated by its own length: one more than its largest position.

    Returns:
        a handle for each module that depends on the length; none for most models.
    """
    return [module.register_forward_hook(_each_row, with_kwargs=True) for module in depends_on_length(model)]


def depends_on_length(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules whose rotations depend on a text's length."""
    return [m for m in model.modules() if re.search("longrope|dynamic", str(getattr(m, "rope_type", "")))]


def _each_row(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What the module gives for rows of one length after another, each time as if it had read nothing before."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    places = given["position_ids"]  # (B, T)
    length = places.amax(-1)
    parts = [part.new_empty(len(places), *part.shape[1:]) for part in output]  # cosines and sines
    for own in length.unique():
        _forget(module, f"{given['layer_type']}_" if given.get("layer_type") else "")
        found = module.forward(**{**given, "position_ids": places[length == own]})
        for part, rows in zip(parts, found, strict=True):
            part[length == own] = rows
    return tuple(parts)


def _forget(module: Any, prefix: str) -> None:
    """Forget the longest text that the module has read."""
    before = getattr(module, f"{prefix}inv_freq")
    fresh = getattr(module, f"{prefix}original_inv_freq").clone().to(before.device)  # LongRoPE writes into it
    module.register_buffer(f"{prefix}inv_freq", fresh, persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
