"""The two files of sae_lens, cfg.json and sae_weights.safetensors: T-SAEs written for it, and its SAEs read here.

A T-SAE is written as one of two architectures, with the same weights and the same arithmetic:

- ``jumprelu``: at inference a T-SAE is a JumpReLU SAE whose latents share one threshold. Plain sae_lens loads it and
  gives the same codes bit for bit; the metadata say which latents are high-level (``d_high``).
- ``tsae_temporal``: after ``import tsae.sae.saelens`` sae_lens loads it as a class of its own with ``encode_high``.

What is read:

| architecture in cfg.json | what it becomes |
|---|---|
| jumprelu | pre · 1[pre > threshold], a threshold per latent |
| batchtopk, matryoshka_batchtopk (checkpoints of a training) | the same, with the running threshold |
| gated | the same: the gate opens where the magnitude exceeds r · (−b_gate) + b_mag, r = exp(r_mag) |
| topk | the k largest of each token |
| standard | ReLU |
| any of these that `to_saelens` wrote | the `TemporalSAE` that it was |

Codes equal sae_lens's bit for bit. Where a config asks for codes rescaled by decoder norms, or the SAE is gated,
factors are folded into the weights, which costs the last bits. Where every token is normalised by itself (layer_norm,
constant_norm_rescale), codes are multiplied by the token's scale, so that they are in the units of the activations.
All latents form one group: nothing says which are high-level.

Refused, with what to do: factors of normalisation that the files do not hold, transcoders, attention heads, other
architectures. sae_lens is imported only to convert configs from before its version 6: that takes seconds.
`tsae.sae.exchange.published` reads other libraries' files into the same form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import load_file

from tsae.base.files import read_object, reading, write_json
from tsae.base.tensors import write_tensors
from tsae.base.validation import Count, NotNegative, Positive, Size, config
from tsae.errors import TsaeError, refuse
from tsae.sae.config import SAEConfig

LensArchitecture = Literal["jumprelu", "tsae_temporal"]

NATIVE: LensArchitecture = "tsae_temporal"
"""The name that `tsae.sae.saelens` registers. ("temporal" is sae_lens's name for something else, arXiv 2511.01836.)"""

FORMAT = "tsae-temporal-sae"
"""Format of our config.json, and of the entry ``tsae`` in our cfg.json."""
CONFIG_FILE, WEIGHTS_FILE = "cfg.json", "sae_weights.safetensors"


def lens_config(
    config: SAEConfig,
    d_model: int,
    site: str,
    architecture: LensArchitecture = "jumprelu",
    dtype: str = "float32",
    norm_limit: float | None = None,
    norm_centre: Sequence[float] = (),
) -> dict[str, Any]:
    """The content of sae_lens's cfg.json.

    Metadata holds hook_name (the site), d_high, temporal_weight, and under ``tsae`` all that is needed to load the
    folder as a TemporalSAE again: among it the norm beyond which its training left tokens out, and the centre from
    which that is measured.
    """
    if architecture not in get_args(LensArchitecture):
        what = f"unknown architecture {architecture!r}"
        raise TsaeError(what, where="to_saelens", fix=f"Choose one of {', '.join(get_args(LensArchitecture))}.")
    known = norm_limit if norm_limit is None or isfinite(norm_limit) else None  # JSON knows no infinity
    metadata = {
        # sae_lens rewrites configs of unknown or older versions while it loads them.
        "sae_lens_version": version("sae_lens"),
        "sae_lens_training_version": None,
        "hook_name": site,
        "d_high": config.d_high,
        "temporal_weight": config.temporal_weight,
        "tsae": {
            "format": FORMAT,
            "version": version("tsae"),
            "sae": asdict(config),
            "norm_limit": known,
            "norm_centre": list(norm_centre),
        },
    }
    content = plain_config(architecture, d_model, config.d_sae, metadata)
    content["dtype"] = dtype
    return {**content, "d_high": config.d_high} if architecture == NATIVE else content


def plain_config(architecture: str, d_model: int, d_sae: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of cfg.json that every architecture has, for an SAE that takes activations as they are."""
    return {
        "architecture": architecture,
        "d_in": d_model,
        "d_sae": d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata,
    }


def lens_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W_enc (d_model, d_sae), W_dec (d_sae, d_model), b_enc and threshold (d_sae,), b_dec (d_model,) on the CPU."""
    found = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    return {**found, "threshold": found["threshold"].expand(len(found["b_enc"])).contiguous()}


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write both files whole or not at all; the config comes last, so that a half-written folder is not read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    write_tensors(folder / WEIGHTS_FILE, weights)
    write_json(folder / CONFIG_FILE, config)
    return folder


Normalize = Literal["none", "layer_norm", "constant_norm_rescale"]
_SAVE = "Save it again."
TRANSCODER = (
    "is a transcoder: it predicts what leaves a module from what enters it, and reconstructs no activations",
    "Use an SAE of the residual stream.",
)
"""What is wrong, and what to do."""
NOT_FITTING = "the file of weights does not fit the config"
_KNOWN = ("jumprelu", "batchtopk", "matryoshka_batchtopk", "gated", "standard", "topk", NATIVE)
_NORMALIZED = {
    "expected_average_only_in": "Fold the factor in sae_lens (sae.fold_activation_norm_scaling_factor) and save again.",
    "covariance_whitening": "Fold the whitening in sae_lens (sae.fold_activation_whitening) and save again.",
}


@config
class ForeignConfig(SAEConfig):
    """Config of an SAE of sae_lens. Fields about training mean nothing: how it was trained is not known."""

    d_sae: Count = 4096
    k: Size = 0
    """Latents active per token; 0 where a threshold decides."""
    groups: tuple[Positive, ...] = (1.0,)
    temporal_weight: NotNegative = 0.0
    aux_weight: NotNegative = 0.0
    architecture: Literal["jumprelu", "topk"] = "jumprelu"
    apply_b_dec_to_input: bool = True
    """Whether the decoder's bias is subtracted from the input."""
    normalize: Normalize = "none"
    """What is done to every token by itself: (x − mean) / std, x · √d_model / ‖x‖, or nothing."""

    def __post_init__(self) -> None:
        if not (self.architecture == "topk") <= self.k <= self.d_sae:
            raise TsaeError(f"k={self.k} and d_sae={self.d_sae} do not make an SAE", where="ForeignConfig")


def is_saelens(folder: Path) -> bool:
    """Whether sae_lens or `to_saelens` wrote this folder, and not `TemporalSAE.save`."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


class FoundSAE(NamedTuple):
    """A published SAE in the terms of this package."""

    config: SAEConfig
    """A `ForeignConfig`, or the config of the T-SAE that `to_saelens` wrote."""
    weights: dict[str, torch.Tensor]
    """W_enc, b_enc, W_dec, b_dec and threshold, as the model of this config names and shapes them."""
    d_model: int
    site: str
    metadata: dict[str, Any]
    """Of sae_lens's cfg.json; ``promised`` holds the FVE and L0 that its makers name, where they do."""


def load_folder(folder: Path, site: str | None) -> FoundSAE:
    """Load and check cfg.json and sae_weights.safetensors.

    Args:
        folder: that sae_lens or `to_saelens` wrote.
        site: TransformerLens name; by default the config's hook_name.

    Raises:
        TsaeError: where a file is missing or damaged, or the SAE cannot be computed here (see the top of the module).
    """
    with reading(folder / CONFIG_FILE, _SAVE):
        config = _since_version_6(read_object(folder / CONFIG_FILE, _SAVE), folder)
    return from_lens(config, load_weights(folder / WEIGHTS_FILE), folder, site)


def load_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, those of floating-point numbers as float32.

    Raises:
        TsaeError: where it cannot be read.
    """
    with reading(file, "Fetch it again."):
        found = load_file(file)
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def from_lens(
    config: dict[str, Any], weights: dict[str, torch.Tensor], where: str | Path, site: str | None
) -> FoundSAE:
    """An SAE in the form of sae_lens 6.

    Args:
        config: of cfg.json.
        weights: by sae_lens's names.
        where: named in messages.
        site: TransformerLens name; by default the config's hook_name.

    Raises:
        TsaeError: where the SAE cannot be computed here, or the weights do not fit the config.
    """
    given = config.get("metadata")
    if not isinstance(given, dict | None):
        raise TsaeError(f"{CONFIG_FILE} is not an SAE's: its metadata is {shown(given)}", where=where, fix=_SAVE)
    metadata = {key: value for key, value in (given or {}).items() if value is not None}
    architecture = str(config.get("architecture"))
    d_model, d_sae = (whole(config.get(name), name, where) for name in ("d_in", "d_sae"))
    weights = as_weights(weights, where)
    normalize = _check(config, metadata, architecture, weights, where)
    site = site or metadata.get("hook_name")
    if not site:
        fix = "Say it: tsae.load_sae(…, site=), or tsae export --site, such as blocks.14.hook_resid_post."
        raise TsaeError("does not say where its activations come from (metadata.hook_name)", where=where, fix=fix)
    metadata["hook_name"] = check_residual(site, where)
    minus_bias = flag(config.get("apply_b_dec_to_input", True), "apply_b_dec_to_input", where)
    rescale = flag(config.get("rescale_acts_by_decoder_norm", False), "rescale_acts_by_decoder_norm", where)
    k = whole(config.get("k"), "k", where) if architecture == "topk" else 0
    with reading(where, _SAVE, NOT_FITTING):
        encoder = ("r_mag", "b_gate", "b_mag") if architecture == "gated" else ("b_enc",)
        check_shapes(weights, d_model, d_sae, ("W_enc", *encoder, "W_dec", "b_dec"))
        if k > d_sae:
            raise ValueError(f"k is {k}, of {d_sae} latents")
        if architecture in ("standard", "topk"):
            weights["threshold"] = torch.zeros(d_sae)
        elif architecture == "gated":
            rate, gate, magnitude = weights.pop("r_mag").exp(), weights.pop("b_gate"), weights.pop("b_mag")
            weights["W_enc"], weights["b_enc"] = weights["W_enc"] * rate, magnitude
            weights["threshold"] = magnitude - rate * gate
        elif architecture.endswith("batchtopk") and "topk_threshold" in weights:
            weights["threshold"] = weights.pop("topk_threshold").expand(d_sae).contiguous()
        if rescale:
            fold_norms(weights)
        weights = as_weights(weights, where)
        ours = SAEConfig(**metadata["tsae"]["sae"]) if metadata.get("tsae") else None
        if ours is not None and ours.d_sae != d_sae:
            raise ValueError(f"its metadata names {ours.d_sae} latents")
        plain = architecture in ("jumprelu", NATIVE) and normalize == "none" and minus_bias
        # One threshold for all latents, unless sae_lens has changed the SAE since (fold_W_dec_norm).
        if ours is not None and plain and bool((weights["threshold"] == weights["threshold"][0]).all()):
            weights["threshold"] = weights["threshold"][0].clone()
            return FoundSAE(ours, weights, d_model, site, metadata)
        foreign = ForeignConfig(
            d_sae=d_sae,
            k=k,
            groups=ours.groups if ours is not None else (1.0,),
            architecture="topk" if architecture == "topk" else "jumprelu",
            apply_b_dec_to_input=minus_bias,
            normalize=normalize,
        )
        return FoundSAE(foreign, weights, d_model, site, metadata)


def fold_norms(weights: dict[str, torch.Tensor]) -> None:
    """Give decoder rows norm 1, and codes their norms."""
    norm = weights["W_dec"].norm(dim=1).clamp_min(1e-8)
    weights["W_enc"], weights["b_enc"] = weights["W_enc"] * norm, weights["b_enc"] * norm
    weights["W_dec"] = weights["W_dec"] / norm[:, None]


def _since_version_6(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config as sae_lens 6 writes it; earlier ones are converted by sae_lens."""
    written_by = str((config.get("metadata") or {}).get("sae_lens_version") or config.get("sae_lens_version") or "0")
    if int(written_by.split(".")[0]) >= 6 or not config.keys() & {"hook_name", "hook_point"}:
        return config
    act = config.get("activation_fn_str", config.get("activation_fn"))
    what = f"its activation function is {shown(act)}, which sae_lens 6 reads as ReLU"
    refuse(folder, (act not in (None, "relu", "topk"), what, "Use one with relu or topk."))
    from sae_lens.loading.pretrained_sae_loaders import handle_pre_6_0_config

    return dict(handle_pre_6_0_config(config))


def _check(
    config: dict[str, Any],
    metadata: dict[str, Any],
    architecture: str,
    weights: dict[str, torch.Tensor],
    where: str | Path,
) -> Normalize:
    """How the SAE normalises each token. Refuses a config that needs what tsae cannot compute."""
    normalization = config.get("normalize_activations")
    known: dict[Any, Normalize] = {None: "none", **{name: name for name in get_args(Normalize)}}
    other = not isinstance(normalization, str | None) or normalization not in known
    heads = config.get("reshape_activations", "none") != "none" or metadata.get("hook_head_index") is not None
    factor = weights.pop("scaling_factor", torch.ones(()))
    refuse(
        where,
        ("transcoder" in architecture, *TRANSCODER),
        (
            architecture not in _KNOWN,
            f"the architecture {shown(architecture)} cannot be computed here",
            f"Use one of {', '.join(_KNOWN)}.",
        ),
        (
            other,
            f"expects activations normalised by {shown(normalization)}, which the weights do not hold",
            _NORMALIZED.get(str(normalization), "Use an SAE trained on activations as they are."),
        ),
        (heads, "reads attention heads, not a residual stream", None),
        (
            not torch.allclose(factor, torch.ones_like(factor)),
            "has a finetuning scaling factor, which sae_lens 6 does not apply either",
            "Multiply the rows of W_dec by it and save again.",
        ),
    )
    return known[normalization]


_AGAIN = "Fetch it again."
_MOST = sys.float_info.max
_SITE = re.compile(r"[\w.\[\]-]{1,200}")
_SHAPES = {
    "W_enc": ("d_model", "d_sae"), "W_dec": ("d_sae", "d_model"), "b_dec": ("d_model",), "b_enc": ("d_sae",),
    "r_mag": ("d_sae",), "b_gate": ("d_sae",), "b_mag": ("d_sae",), "threshold": ("d_sae",),
    "topk_threshold": ("d_sae",),
}  # fmt: skip
_MAY_BE_ONE = ("threshold", "topk_threshold")
"""One number for all latents, too."""


def shown(value: Any) -> str:
    """A value of a file, short enough for a message."""
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def whole(value: Any, name: str, where: str | Path, *, least: int = 1, fix: str = _AGAIN) -> int:
    """A whole number, or a tensor of one. Nothing is rounded or read from text."""
    found = _plain(value)
    good = type(found) is int and found >= least
    refuse(where, (not good, _other(value, name, f"a whole number of at least {least}"), fix))
    return int(found)


def number(value: Any, name: str, where: str | Path, *, positive: bool = False) -> float:
    """A finite number, or a tensor of one."""
    found = _plain(value)
    good = type(found) in (int, float) and abs(found) <= _MOST and (found > 0 or not positive)
    refuse(where, (not good, _other(value, name, f"a finite number{' above 0' if positive else ''}"), _AGAIN))
    return float(found)


def flag(value: Any, name: str, where: str | Path) -> bool:
    """True or false, and nothing that only counts as one."""
    refuse(where, (not isinstance(value, bool), _other(value, name, "true or false"), _AGAIN))
    return bool(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _other(value: Any, name: str, expected: str) -> str:
    return f"{name} is {shown(value)}, expected {expected}"


def as_weights(
    found: Mapping[str, Any], where: str | Path, fix: str = _AGAIN, *, infinite: Iterable[str] = ("threshold",)
) -> dict[str, torch.Tensor]:
    """Weights as float32.

    Args:
        found: by name.
        where: named in messages.
        fix: what to do about others.
        infinite: names that may hold +inf, such as the threshold of a latent that is never active.

    Raises:
        TsaeError: where one is not a tensor of real floating-point numbers, or some of its values are not finite.
    """
    weights = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TsaeError(f"{name[:60]} holds {kind}, expected floating-point numbers", where=where, fix=fix)
        weights[name] = value.float()
        finite = weights[name].isfinite()
        if name in infinite:
            finite |= weights[name] == torch.inf
        refuse(where, (not bool(finite.all()), f"{name[:60]} holds values that are not finite numbers", fix))
    return weights


def check_shapes(weights: Mapping[str, torch.Tensor], d_model: int, d_sae: int, needed: Iterable[str] = ()) -> None:
    """Check shapes before anything of such a size is made, or torch stretches one to another.

    Raises:
        ValueError: where a weight has another shape, is needed and missing, or the SAE is empty.
    """
    sizes = {"d_model": d_model, "d_sae": d_sae}
    if min(sizes.values()) < 1:
        raise ValueError(f"d_model is {d_model} and d_sae {d_sae}")
    for name in needed:
        if name not in weights:
            raise ValueError(f"it has no {name}")
    for name, axes in _SHAPES.items():
        expected = tuple(sizes[axis] for axis in axes)
        if name not in weights or weights[name].shape == expected:
            continue
        if name not in _MAY_BE_ONE or weights[name].shape not in ((), (1,)):
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, expected {expected}")


def check_site(site: Any, where: str | Path) -> str:
    """The name of a site, which is printed and compared from here on. It may be the name of any module."""
    if not isinstance(site, str) or _SITE.fullmatch(site) is None:
        what = f"names the site {shown(site)}, expected a name such as blocks.14.hook_resid_post"
        raise TsaeError(what, where=where, fix="Correct that name, or save the SAE again.")
    return site


def check_residual(site: Any, where: str | Path) -> str:
    """The name of a site. One of TransformerLens must be in the residual stream between blocks."""
    name = check_site(site, where)
    if "hook_" in name and re.fullmatch(r"blocks\.\d+\.hook_resid_(pre|post)", name) is None:
        fix = "Use an SAE of the residual stream (blocks.{L}.hook_resid_post or hook_resid_pre)."
        raise TsaeError(f"reads {name}; activations are captured between blocks only", where=where, fix=fix)
    return name
