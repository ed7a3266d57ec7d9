"""Crosscoders of the library dictionary_learning, as its fork science-of-finetuning writes them.

A folder holds `model_final.pt` or `ae.pt` (read with weights_only, never as a pickle), or `model.safetensors`:

    encoder.weight (2, d_model, d_sae)   encoder.bias (d_sae,)       codes: ReLU(Σ_m x_m W_m + b)
    decoder.weight (2, d_sae, d_model)   decoder.bias (2, d_model)
    k, threshold                         of BatchTopK: a code counts where code · norm > threshold
    code_normalization_id                which norm: 1 sum of both rows' norms, 2 norm of both together, 3 a mixture,
                                         4 none, 5 one for each model
    activation_mean, activation_std (2, d_model), activation_global_scale (2,)   NaN, or how inputs are normalised

All of it is folded into the form of `Crosscoder`: raw activations in, decoder rows of norm 1 over both models. Codes
are theirs times those norms; reconstructions are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from tsae.base.disk.torch_file import read_torch_file
from tsae.base.files import as_path, read_object, reading
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.crosscoder.crosscoder import OF_PAIR, Crosscoder
from tsae.sae.exchange.checks import as_weights, check_site, number, shown, whole

_FILES = ("model_final.pt", "ae.pt", "model.safetensors")
_SHAPES = {
    "encoder.weight": "2 d_model d_sae", "encoder.bias": "d_sae", "decoder.weight": "2 d_sae d_model",
    "decoder.bias": "2 d_model", "activation_mean": "2 d_model", "activation_std": "2 d_model",
    "activation_global_scale": "2", "threshold": "", "target_rms": "",
}  # fmt: skip
_NEEDED = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
_WHOLE = ("k", "code_normalization_id")
_NORMALISER = ("activation_mean", "activation_std", "activation_global_scale")
_FIX = "Give a crosscoder of two models that dictionary_learning wrote."


def read_published(folder: str | Path, *, site: str, compared: tuple[str, str]) -> Crosscoder:
    """Read a crosscoder of dictionary_learning.

    Args:
        folder: that holds it, or the file.
        site: TransformerLens name of where its activations come from, which the file does not say.
        compared: ids of the base and the other checkpoint, in the order of its two halves.

    Raises:
        TsaeError: where there is no such file, it needs a pickle, or it is computed in another way.
    """
    with reading(str(folder)[:200], _FIX):
        file = _file_of(as_path(folder))
    if file is None:
        raise TsaeError(f"holds none of {', '.join(_FILES)}", where=folder, fix=_FIX)
    with reading(file, _FIX):
        return _folded(file, check_site(site, file), compared)


def _folded(file: Path, site: str, compared: tuple[str, str]) -> Crosscoder:
    found = _loaded(file)
    weights = _checked(found, file)
    encoder, decoder = weights["encoder.weight"], weights["decoder.weight"]
    k = whole(found["k"], "k", file) if "k" in found else None
    if k is not None and k > encoder.shape[2]:
        raise TsaeError(f"k is {k}, which exceeds its {encoder.shape[2]} latents", where=file, fix=_FIX)
    limits = _limits(weights, whole(found.get("code_normalization_id", 1), "code_normalization_id", file), file)
    scale, mean = _normaliser(weights, file)
    # Into raw activations: x ↦ (x − mean) · scale on the way in, and back on the way out.
    encoder = encoder * scale[:, :, None]
    bias = weights["encoder.bias"] - torch.einsum("md,mdf->f", mean, encoder)
    decoder = decoder / scale[:, None]
    centre = (weights["decoder.bias"] / scale + mean).flatten()
    rows, weight = decoder.transpose(0, 1).flatten(1), encoder.flatten(0, 1)
    norm = rows.norm(dim=1).clamp_min(1e-12)
    config = SAEConfig(d_sae=len(rows), k=k or 1, groups=(1.0,), temporal_weight=0.0)
    info = {OF_PAIR: list(compared), "dictionary_learning": {"k": k}}
    crosscoder = Crosscoder(len(centre), config, site=site, training=info)
    tensors = {"W_enc": weight * norm, "b_enc": (bias + centre @ weight) * norm, "W_dec": rows / norm[:, None]}
    tensors |= {"b_dec": centre, "threshold": limits * norm}
    crosscoder.load_state_dict(as_weights(tensors, file, _FIX, infinite=()))
    return crosscoder.requires_grad_(False).eval()


def _file_of(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in (".pt", ".safetensors") else None
    return next((path / name for name in _FILES if (path / name).is_file()), None)


def _loaded(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, by the names that its class has for them."""
    if file.suffix == ".safetensors":
        found = load_file(file)
    else:
        refused = "Save its state_dict again with torch.save, or as safetensors."
        found = read_torch_file(file, refused=refused, damaged=_FIX)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise TsaeError("is no state_dict: it holds other things than tensors by name", where=file, fix=_FIX)
    tensors = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    if len(tensors) < len(found):
        raise TsaeError("holds tensors of one name twice, with _orig_mod. and without", where=file, fix=_FIX)
    return tensors


def _checked(found: Mapping[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """All but the whole numbers as float32, of the shapes that `_SHAPES` names. A normaliser of NaN alone is none."""
    missing = [name for name in _NEEDED if name not in found]
    unknown = sorted(set(found) - set(_SHAPES) - set(_WHOLE))
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has the unknown tensor {shown(unknown[0])}"
        raise TsaeError(f"is no crosscoder: it {what}", where=file, fix=_FIX)
    without = [name for name in _NORMALISER if name in found and bool(found[name].isnan().all())]
    weights = as_weights(
        {name: value for name, value in found.items() if name not in (*_WHOLE, *without)}, file, _FIX, infinite=()
    )
    shape = tuple(weights["encoder.weight"].shape)
    width, latents = shape[1:] if len(shape) == 3 and min(shape) > 0 else (1, 1)
    sizes = {"2": 2, "d_model": width, "d_sae": latents}
    for name, value in weights.items():
        axes = _SHAPES[name].split()
        one = not axes and value.shape == (1,)
        if value.shape != tuple(sizes[axis] for axis in axes) and not one:
            expected = ", ".join(axes) + ("," if len(axes) == 1 else "")
            what = f"{name} has shape {tuple(value.shape)}, expected ({expected})"
            raise TsaeError(what, where=file, fix=_FIX)
        weights[name] = value.reshape(()) if one else value
    return weights


def _limits(weights: Mapping[str, torch.Tensor], kind: int, file: Path) -> torch.Tensor:
    """(d_sae,) what a code must exceed to count, in the units of dictionary_learning's codes."""
    decoder, threshold = weights["decoder.weight"], weights.get("threshold", torch.zeros(()))
    together, apart = decoder.norm(dim=(0, 2)), decoder.norm(dim=2).sum(0)
    norms = {1: apart, 2: together, 4: torch.ones_like(apart)}
    if kind == 3:
        sae, cc = _mixture(file)
        norms[3] = together * sae + apart * cc
    if kind not in norms:
        raise TsaeError(
            "selects codes for each model on its own (DECOUPLED), so that a token has two codes"
            if kind == 5
            else f"code_normalization_id is {kind}, expected 1 to 5",
            where=file,
            fix="Give a crosscoder with the normalisation CROSSCODER, SAE, MIXED or NONE.",
        )
    # Below 0 the threshold was never set: ReLU alone decides.
    return threshold.clamp_min(0) / norms[kind].clamp_min(1e-12)


def _mixture(file: Path) -> list[float]:
    """Weights of both norms in a mixture, from config.json where there is one."""
    path = file.parent / "config.json"
    content = read_object(path, _FIX) if path.is_file() else {}
    told, weights = content.get("trainer", content), []
    for name, default in (("code_normalization_alpha_sae", 1.0), ("code_normalization_alpha_cc", 0.1)):
        value = told.get(name)
        weights.append(default if value is None else number(value, name, path))
    if min(weights) < 0 or max(weights) == 0:
        raise TsaeError(f"its code_normalization_alpha are {weights}, expected none below 0", where=path, fix=_FIX)
    return weights


def _normaliser(weights: Mapping[str, torch.Tensor], file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """((2, d_model) factors of the inputs, (2, d_model) what is subtracted before); ones and zeros without one."""
    mean, deviation, scale = (weights.get(name) for name in _NORMALISER)
    if mean is None and deviation is None:
        return torch.ones_like(weights["decoder.bias"]), torch.zeros_like(weights["decoder.bias"])
    if mean is None or deviation is None:
        raise TsaeError("has one of activation_mean and activation_std without the other", where=file, fix=_FIX)
    rms = weights.get("target_rms", torch.ones(()))
    for name, value in (("activation_std", deviation), ("activation_global_scale", scale), ("target_rms", rms)):
        if value is not None and not bool((value > 0).all()):
            raise TsaeError(f"{name} holds values of 0 or less", where=file, fix=_FIX)
    whole_model = rms / (deviation.pow(2).sum(-1) + 1e-8).sqrt()
    if scale is not None and torch.allclose(scale, whole_model, rtol=1e-3):
        return scale[:, None].expand_as(mean).clone(), mean
    return 1 / (deviation + 1e-8), mean  # every neuron on its own
