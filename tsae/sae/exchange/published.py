"""Files of published SAEs as other libraries write them, in the form of sae_lens (`tsae.sae.exchange.saelens_files`).

| what lies there | of | site | checked against |
|---|---|---|---|
| layerN.sae.pt | Qwen-Scope (top-k; k from the repository's name, …-L0_50) | output of block N | sae_lens 6.54 |
| params.npz | Gemma Scope (JumpReLU; layer from the path) | residual repositories | sae_lens 6.54 |
| params.safetensors | Gemma Scope 2 (JumpReLU; layer from the path) | resid_post folders | sae_lens 6.54 |
| ae.pt, config.json | dictionary_learning: seven classes | trainer.layer, submodule_name | dictionary-learning 0.1.0 |
| cfg.json, sae.safetensors | EleutherAI sparsify (top-k) | the folder's name, such as layers.5 | eai-sparsify 1.3.3 |
| hyperparams.json, checkpoints/ | Llama Scope (JumpReLU, one threshold) | hook_point_in | sae_lens 6.54 |
| config.json, sae_weights.safetensors | Llamascopium, and lm-saes before it | hook_point_in | llamascopium 2.0.0b34 |
| N.pt | OpenAI (top-k on normalised tokens, or ReLU) | the path, resid_post_mlp | their model.py |

``.pt`` files are read as tensors and plain containers; one that needs pickle is refused. Transcoders, crosscoders and
SAEs of other sites are refused by name. Where a format has factors of normalisation, they are folded into the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tsae.base.array_files import read_npz, read_torch_file
from tsae.base.files import read_object, reading
from tsae.errors import TsaeError, refuse
from tsae.sae.exchange.saelens_files import (
    TRANSCODER,
    FoundSAE,
    as_weights,
    check_shapes,
    flag,
    fold_norms,
    from_lens,
    load_weights,
    number,
    plain_config,
    shown,
    whole,
)

_AGAIN = "Fetch it again."
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)[._](\d+)$")
_FIELDS = ("k", "apply_b_dec_to_input", "normalize_activations")
Weights = dict[str, torch.Tensor]


def read_published(path: Path, site: str | None = None) -> FoundSAE | None:
    """Read an SAE of another library; None where none of the formats above lies there.

    Args:
        path: of a folder, or of a .pt file.
        site: TransformerLens name, in place of the one that the files say.

    Raises:
        TsaeError: where a file is damaged or needs pickle, the site is unknown, or the SAE cannot be computed here.
    """
    lone = path.is_file() and path.suffix in (".pt", ".pth")
    folders = (read for marks, read in _FOLDERS.items() if all((path / mark).exists() for mark in marks))
    read = _lone_file if lone else next(folders, None)
    if read is None:
        return None
    with reading(path, _AGAIN):  # values that are of no use, wherever they stand
        return read(path, site)


def _found(
    of: str, path: Path, weights: Weights, site: str | None, *, architecture: str = "jumprelu", **facts: Any
) -> FoundSAE:
    """Args: weights by sae_lens's names; facts: `k`, `apply_b_dec_to_input`, `normalize_activations` of cfg.json, and
    further metadata."""
    fields: dict[str, Any] = {name: facts.pop(name) for name in _FIELDS if name in facts}
    with reading(path, _AGAIN, f"the file of weights does not fit the format of {of}"):
        d_model, d_sae = weights["W_enc"].shape
        check_shapes(weights, d_model, d_sae)
        weights.setdefault("b_enc", torch.zeros(d_sae))
        weights.setdefault("b_dec", torch.zeros(d_model))
        if "threshold" in weights:
            weights["threshold"] = weights["threshold"].expand(d_sae)
    metadata = {"sae_lens_version": version("sae_lens"), "hook_name": site, "format": of, **facts}
    config = {**plain_config(architecture, d_model, d_sae, metadata), **fields}
    return from_lens(config, {name: value.contiguous() for name, value in weights.items()}, path, site)


def _tensors(file: Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save, loaded without running code."""
    found = read_torch_file(
        file,
        refused="Ask its makers for safetensors, or save its state_dict() of plain tensors again.",
        damaged=_AGAIN,
    )
    return dict(found)


def _renamed(found: Mapping[str, Any], names: Mapping[str, str], where: Path) -> Weights:
    """Weights by our names, as float32 and of shapes that go together; a name that ends in .T is transposed."""
    chosen = {ours: found[theirs.removesuffix(".T")] for ours, theirs in names.items()}
    weights = {ours: v.T if names[ours].endswith(".T") else v for ours, v in as_weights(chosen, where).items()}
    with reading(where, _AGAIN):
        check_shapes(weights, *weights["W_enc"].shape)
    return weights


def _names(found: Mapping[str, Any]) -> str:
    """The first names, for messages."""
    return ", ".join(name[:40] for name in list(found)[:8] if isinstance(name, str)) or "no names"


def _block(number: str | int | None) -> str | None:
    return None if number is None else f"blocks.{int(number)}.hook_resid_post"


def _in_path(pattern: str, path: Path) -> str | None:
    """The last match in a path: folders further up may have any name."""
    found = re.findall(pattern, path.absolute().as_posix())
    return str(found[-1]) if found else None


def _lone_file(file: Path, site: str | None) -> FoundSAE:
    found = _tensors(file)
    if "latent_bias" in found:
        return _openai(file, found, site)
    if layer := _in_path(r"/layer(\d+)\.sae\.pt$", file):
        k = _in_path(r"-L0_(\d+)", file)
        if k is None:
            what = "does not say how many latents a token has: that stands in the repository's name (…-L0_50)"
            fix = "Keep that name in the path, such as SAE-Res-Qwen3-1.7B-Base-W32K-L0_50/layer14.sae.pt."
            raise TsaeError(what, where=file, fix=fix)
        names = {"W_enc": "W_enc.T", "W_dec": "W_dec.T", "b_enc": "b_enc", "b_dec": "b_dec"}
        return _found(
            "Qwen-Scope", file, _renamed(found, names, file), site or _block(layer), architecture="topk",
            k=int(k), apply_b_dec_to_input=False, model_name=_in_path(r"SAE-Res-([^/]+?)-W\d+K", file),
        )  # fmt: skip
    what = f"is not a file of Qwen-Scope (layerN.sae.pt) or OpenAI; it holds {_names(found)}"
    raise TsaeError(what, where=file, fix="Give the folder that has its config, if there is one.")


def _openai(file: Path, found: dict[str, Any], site: str | None) -> FoundSAE:
    place, layer = _in_path(r"(resid_\w+?|mlp_post_act)(?:_v\d\w*)?/", file), _in_path(r"/(\d+)\.pth?$", file)
    if site is None and place is not None and not place.startswith("resid_post_mlp"):
        site = f"hook_{place}"  # refused by its name
    names = {"W_enc": "encoder.weight.T", "b_enc": "latent_bias", "b_dec": "pre_bias"}
    names["W_dec"] = "decoder.weight.T" if "decoder.weight" in found else "encoder.weight"
    weights, site = _renamed(found, names, file), site or _block(layer if place else None)
    act, state = found.get("activation"), found.get("activation_state_dict") or {}
    if act not in (None, "ReLU", "TopK") or state.get("postact_fn", "ReLU") != "ReLU":
        act = f"{act} with {state['postact_fn']}" if "postact_fn" in state else act
        raise TsaeError(f"its activation is {shown(act)}", where=file, fix="Use one with ReLU, or TopK with ReLU.")
    if act != "TopK":
        return _found("OpenAI", file, weights, site, architecture="standard", model_name="gpt2")
    k = whole(state.get("k"), "k", file)
    # Their TopK models are those that normalise.
    return _found(
        "OpenAI", file, weights, site, architecture="topk", k=k, normalize_activations="layer_norm", model_name="gpt2"
    )


def _gemma_scope(folder: Path, site: str | None) -> FoundSAE:
    file = folder / "params.npz"
    with reading(file, _AGAIN):
        arrays = read_npz(file)
        found = {re.sub("^w_", "W_", name): torch.from_numpy(value) for name, value in arrays.items()}
    return _gemma(folder, found, site, _in_path(r"gemma-scope-\w+-\w+-(\w+)", folder))


def _gemma_scope_2(folder: Path, site: str | None) -> FoundSAE:
    found = load_weights(folder / "params.safetensors")
    kind = _in_path(r"/(resid_post|attn_out|mlp_out|transcoder|clt)[^/]*(?=/)", folder)
    names = {"W_enc": "w_enc", "W_dec": "w_dec", "b_enc": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
    refuse(folder, (kind in ("transcoder", "clt") or "affine_skip_connection" in found, *TRANSCODER))
    return _gemma(folder, _renamed(found, names, folder), site, kind)


def _gemma(folder: Path, weights: Weights, site: str | None, kind: str | None) -> FoundSAE:
    """The SAE in a folder of Gemma Scope; `kind` is the module whose output it reads, as the folder's path names it."""
    refuse(folder, (kind == "transcoders", *TRANSCODER))
    if site is None and kind is not None:
        # Any other kind is refused by its name.
        site = _block(_in_path(r"layer_(\d+)", folder)) if kind in ("res", "resid_post") else f"hook_{kind}"
    l0 = _in_path(r"average_l0_(\d+)", folder)
    facts: dict[str, Any] = {"promised": {"l0": float(l0)}} if l0 else {}
    return _found("Gemma Scope", folder, weights, site, apply_b_dec_to_input=False, prepend_bos=True, **facts)


def _dictionary_learning(folder: Path, site: str | None) -> FoundSAE:
    found, file = _tensors(folder / "ae.pt"), folder / "config.json"
    trainer = dict(read_object(file, _AGAIN)["trainer"])
    kind = str(trainer.get("dict_class"))
    submodule = str(trainer.get("submodule_name") or "resid_post")
    if site is None and trainer.get("layer") is not None:
        layer = whole(trainer["layer"], "layer", file, least=0)
        point = next((f"resid_{p}" for p in ("pre", "post") if f"resid_{p}" in submodule), submodule)
        site = f"blocks.{layer}.hook_{point}"
    linear = {"W_enc": "encoder.weight.T", "W_dec": "decoder.weight.T", "b_enc": "encoder.bias"}
    plain = {name: name for name in ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")}
    kinds: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
        "AutoEncoder": ({**linear, "b_dec": "bias"}, "standard", {}),
        "AutoEncoderNew": ({**linear, "b_dec": "decoder.bias"}, "standard", {"apply_b_dec_to_input": False}),
        "AutoEncoderTopK": ({**linear, "b_dec": "b_dec"}, "topk", {}),
        "BatchTopKSAE": ({**linear, "b_dec": "b_dec", "threshold": "threshold"}, "jumprelu", {}),
        "MatryoshkaBatchTopKSAE": (plain, "jumprelu", {}),
        "JumpReluAutoEncoder": (plain, "jumprelu", {"apply_b_dec_to_input": False}),
        "GatedAutoEncoder": (
            {"W_enc": "encoder.weight.T", "W_dec": "decoder.weight.T", "b_dec": "decoder_bias", "r_mag": "r_mag",
             "b_gate": "gate_bias", "b_mag": "mag_bias"}, "gated", {},
        ),
    }  # fmt: skip
    refuse(file, (kind not in kinds, f"is a {kind}, which cannot be computed here", f"Use one of {', '.join(kinds)}."))
    names, architecture, more = kinds[kind]
    if architecture == "topk":
        found_k = [whole(has["k"], "k", file) for has in (trainer, found) if has.get("k") is not None]
        refuse(
            file,
            (not found_k, "has no k, the active latents of a token", _AGAIN),
            (len(set(found_k)) > 1, f"k is {' in config.json, and '.join(map(str, found_k))} in ae.pt", _AGAIN),
        )
        more = {**more, "k": found_k[0]}
    weights = _renamed(found, names, folder)
    return _found(
        "dictionary_learning", folder, weights, site, architecture=architecture, model_name=trainer.get("lm_name"),
        **more,
    )  # fmt: skip


def _sparsify(folder: Path, site: str | None) -> FoundSAE:
    config, found = read_object(folder / "cfg.json", _AGAIN), load_weights(folder / "sae.safetensors")
    transcodes, skips, signed = (_told(config, name, folder) for name in ("transcode", "skip_connection", "signed"))
    refuse(folder, (transcodes or skips or "W_skip" in found, *TRANSCODER))
    other = config.get("activation", "topk") != "topk" or signed
    kind = f"{str(config.get('activation'))[:60]}{' with signs' if signed else ''}"
    what = f"selects latents by {kind}, which is not computed here"
    refuse(folder / "cfg.json", (other, what, "Use one with activation topk."))
    if site is None:
        block = _BLOCK.search(folder.absolute().name)
        site = _block(block[1]) if block else f"hook_{folder.name}" if re.search(r"mlp|attn", folder.name) else None
    names = {"W_enc": "encoder.weight.T", "W_dec": "W_dec", "b_enc": "encoder.bias", "b_dec": "b_dec"}
    return _found(
        "sparsify", folder, _renamed(found, names, folder), site, architecture="topk",
        k=whole(config.get("k"), "k", folder / "cfg.json"),
    )  # fmt: skip


def _told(config: Mapping[str, Any], name: str, where: Path, default: bool = False) -> bool:
    return flag(config.get(name, default), name, where)


def _llama_scope(folder: Path, site: str | None) -> FoundSAE:
    config, names = read_object(folder / "hyperparams.json", _AGAIN), _linear_names()
    weights = _renamed(load_weights(folder / "checkpoints" / "final.safetensors"), names, folder)
    with reading(folder / "hyperparams.json", _AGAIN):
        factor = _factor(weights, config["dataset_average_activation_norm"]["in"], folder)
        threshold = number(config["jump_relu_threshold"], "jump_relu_threshold", folder)
        finite = as_weights({"threshold": torch.tensor(threshold * factor)}, folder, infinite=())
        return _scope(folder, weights | finite, site, config, factor)


def _factor(weights: Weights, norm: Any, where: Path) -> float:
    """What brings activations of this average norm to √d_model."""
    return weights["W_enc"].shape[0] ** 0.5 / number(norm, "dataset_average_activation_norm", where, positive=True)


def _llamascopium(folder: Path, site: str | None) -> FoundSAE:
    file, found = folder / "config.json", load_weights(folder / "sae_weights.safetensors")
    config = read_object(file, _AGAIN)
    kind = str(config.get("sae_type", "sae"))
    elsewhere = config.get("hook_point_out") not in (None, config.get("hook_point_in"))
    what = "an SAE with a gated linear unit" if kind == "sae" else f"a {kind}"
    act = str(config.get("act_fn", "jumprelu")).lower()
    by_batch = f"its act_fn {act} chooses latents by the batch, so that a token's codes depend on other tokens"
    glu, known = _told(config, "use_glu_encoder", file), ("relu", "jumprelu", "topk")
    refuse(
        file,
        (kind in ("clt", "molt", "transcoder") or elsewhere, *TRANSCODER),
        (kind != "sae" or glu, f"is {what}, which is not computed here", "Use one of sae_type sae."),
        (act not in known, by_batch, "Convert it to jumprelu in its library, and save it again."),
    )
    new = {"W_enc": "W_E", "W_dec": "W_D", "b_enc": "b_E", "b_dec": "b_D"}
    names = new if "W_E" in found else _linear_names()
    if not _told(config, "use_decoder_bias", file, True):
        names.pop("b_dec")
    gated_by_norm = _told(config, "sparsity_include_decoder_norm", file, "W_E" in found)
    if act == "jumprelu":
        log = "log_jumprelu_threshold"
        names = {**names, "threshold": next((name for name in found if name.endswith(log)), log)}
    weights = _renamed(found, names, folder)
    if act == "jumprelu":
        weights["threshold"] = weights["threshold"].exp() / (weights["W_dec"].norm(dim=1) if gated_by_norm else 1)
    elif act == "topk" and gated_by_norm:
        fold_norms(weights)
    facts: dict[str, Any] = {"architecture": {"relu": "standard"}.get(act, act)}
    if act == "topk":
        facts["k"] = whole(config.get("top_k"), "top_k", file)
    norm = str(config.get("norm_activation", "dataset-wise"))
    if norm == "token-wise":
        return _scope(folder, weights, site, config, None, normalize_activations="constant_norm_rescale", **facts)
    if norm == "inference":
        return _scope(folder, weights, site, config, None, **facts)
    average = found.get(f"dataset_average_activation_norm.{config.get('hook_point_in')}")
    if average is None:
        average = (config.get("dataset_average_activation_norm") or {}).get("in")
    what = f"expects activations normalised {norm}, by a norm that its files do not hold"
    fix = "Save it with fold_activation_scale=True; those of Llama Scope come with saelens:RELEASE/ID."
    refuse(folder, (norm != "dataset-wise" or average is None, what, fix))
    return _scope(folder, weights, site, config, _factor(weights, average, folder), **facts)


def _linear_names() -> dict[str, str]:
    return {"W_enc": "encoder.weight.T", "W_dec": "decoder.weight.T", "b_enc": "encoder.bias", "b_dec": "decoder.bias"}


def _scope(
    folder: Path, weights: Weights, site: str | None, config: Mapping[str, Any], factor: float | None, **facts: Any
) -> FoundSAE:
    """Codes are those of the normalised activations, x · factor; reconstructions are of x."""
    width = len(weights["W_enc"])
    named = whole(config.get("d_model", width), "d_model", folder)
    refuse(folder, (named != width, f"its config names d_model {named}, its weights have {width}", _AGAIN))
    if factor is not None:
        weights["W_enc"] = weights["W_enc"] * factor
        weights |= {name: weights[name] / factor for name in ("W_dec", "b_dec") if name in weights}
    facts = {"apply_b_dec_to_input": False, "prepend_bos": True, **facts}
    return _found("Llama Scope", folder, weights, site or config.get("hook_point_in"), **facts)


_FOLDERS: dict[tuple[str, ...], Callable[[Path, str | None], FoundSAE]] = {
    ("params.npz",): _gemma_scope,
    ("params.safetensors",): _gemma_scope_2,
    ("ae.pt", "config.json"): _dictionary_learning,
    ("cfg.json", "sae.safetensors"): _sparsify,
    ("hyperparams.json", "checkpoints"): _llama_scope,
    ("config.json", "sae_weights.safetensors"): _llamascopium,
}
"""By files that a folder of theirs holds, and none of ours."""
