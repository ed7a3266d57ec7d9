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

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tsae.base.disk.torch_file import read_torch_file
from tsae.base.files import reading
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.crosscoder.crosscoder import OF_PAIR, Crosscoder

_FILES = ("model_final.pt", "ae.pt", "model.safetensors")
_NEEDED = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
_KNOWN = {*_NEEDED, "k", "threshold", "code_normalization_id", "target_rms"}
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
    file = _file_of(Path(folder))
    if file is None:
        raise TsaeError(f"holds none of {', '.join(_FILES)}", where=folder, fix=_FIX)
    weights = {name.removeprefix("_orig_mod."): value for name, value in _loaded(file).items()}
    missing = [name for name in _NEEDED if name not in weights]
    unknown = sorted(set(weights) - _KNOWN - set(_NORMALISER))
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has the unknown tensor {unknown[0]!r}"
        raise TsaeError(f"is no crosscoder: it {what}", where=file, fix=_FIX)
    encoder, decoder = weights["encoder.weight"].float(), weights["decoder.weight"].float()
    if encoder.ndim != 3 or encoder.shape[0] != 2 or encoder.mT.shape != decoder.shape:
        shapes = f"{tuple(encoder.shape)} and {tuple(decoder.shape)}"
        what = f"encoder and decoder have shapes {shapes}, expected (2, d_model, d_sae) and (2, d_sae, d_model)"
        raise TsaeError(what, where=file, fix=_FIX)
    limits = _limits(weights, decoder, file)
    scale, mean = _normaliser(weights, encoder.shape[1])
    # Into raw activations: x ↦ (x − mean) · scale on the way in, and back on the way out.
    encoder = encoder * scale[:, :, None]
    bias = weights["encoder.bias"].float() - torch.einsum("md,mdf->f", mean, encoder)
    decoder = decoder / scale[:, None]
    centre = (weights["decoder.bias"].float() / scale + mean).flatten()
    rows, weight = decoder.transpose(0, 1).flatten(1), encoder.flatten(0, 1)
    norm = rows.norm(dim=1).clamp_min(1e-12)
    k = int(weights["k"]) if "k" in weights else 0
    config = SAEConfig(d_sae=len(rows), k=min(max(k, 1), len(rows)), groups=(1.0,), temporal_weight=0.0)
    info = {OF_PAIR: list(compared), "dictionary_learning": {"k": k or None}}
    found = Crosscoder(len(centre), config, site=site, training=info)
    tensors = {"W_enc": weight * norm, "b_enc": (bias + centre @ weight) * norm, "W_dec": rows / norm[:, None]}
    found.load_state_dict({**tensors, "b_dec": centre, "threshold": limits * norm})
    return found.requires_grad_(False).eval()


def _file_of(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in (".pt", ".safetensors") else None
    return next((path / name for name in _FILES if (path / name).is_file()), None)


def _loaded(file: Path) -> Mapping[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        with reading(file, _FIX):
            return load_file(file)
    found = read_torch_file(file, refused="Save its state_dict again with torch.save, or as safetensors.", damaged=_FIX)
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise TsaeError("is no state_dict: it holds other things than tensors", where=file, fix=_FIX)
    return found


def _limits(weights: Mapping[str, torch.Tensor], decoder: torch.Tensor, file: Path) -> torch.Tensor:
    """(d_sae,) what a code must exceed to count, in the units of dictionary_learning's codes."""
    threshold = weights.get("threshold", torch.zeros(())).float()
    kind = int(weights.get("code_normalization_id", torch.tensor(1)))
    together, apart = decoder.norm(dim=(0, 2)), decoder.norm(dim=2).sum(0)
    norms = {1: apart, 2: together, 4: torch.ones_like(apart)}
    if kind == 3:
        alpha = _config(file)
        norms[3] = together * alpha.get("code_normalization_alpha_sae", 1.0) + apart * alpha.get(
            "code_normalization_alpha_cc", 0.1
        )
    if kind not in norms or threshold.numel() != 1:
        raise TsaeError(
            "selects codes for each model on its own (DECOUPLED), so that a token has two codes",
            where=file,
            fix="Give a crosscoder with the normalisation CROSSCODER, SAE, MIXED or NONE.",
        )
    # Below 0 the threshold was never set: ReLU alone decides.
    return threshold.clamp_min(0).reshape(()) / norms[kind].clamp_min(1e-12)


def _config(file: Path) -> dict[str, Any]:
    path = file.parent / "config.json"
    if not path.is_file():
        return {}
    with reading(path, _FIX):
        content = parse_json(path.read_text(encoding="utf-8"))
        found = content.get("trainer", content)
        return {key: value for key, value in found.items() if isinstance(value, int | float)}


def _normaliser(weights: Mapping[str, torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """((2, d_model) factors of the inputs, (2, d_model) what is subtracted before); ones and zeros without one."""
    mean, deviation, scale = (weights.get(name, torch.tensor(math.nan)).float() for name in _NORMALISER)
    if bool(mean.isnan().any()) or bool(deviation.isnan().any()):
        return torch.ones(2, width), torch.zeros(2, width)
    rms = weights.get("target_rms", torch.ones(())).float()
    whole = rms / (deviation.pow(2).sum(-1) + 1e-8).sqrt()
    if scale.shape == whole.shape and torch.allclose(scale, whole, rtol=1e-3):
        return scale[:, None].expand(2, width).clone(), mean
    return 1 / (deviation + 1e-8), mean  # every neuron on its own
