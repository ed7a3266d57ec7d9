"""Loading the folders of sae_lens: SAEs that others trained, and T-SAEs that `to_saelens` wrote.

| architecture in cfg.json | what it becomes |
|---|---|
| jumprelu | pre · 1[pre > threshold], a threshold per latent |
| batchtopk, matryoshka_batchtopk (checkpoints of a training) | the same, with the running threshold |
| topk | the k largest of each token |
| standard | ReLU |
| any of these that `to_saelens` wrote | the `TemporalSAE` that it was |

Codes equal sae_lens's bit for bit; where a config asks for codes rescaled by decoder norms, the norms are folded into
the weights, which costs the last bits. All latents form one group: nothing says which are high-level.

Refused, with what to do: weights that expect normalised activations (sae_lens computes the factors from data or per
token, and does not write them down), reshaped attention heads, single heads, other architectures.

sae_lens itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.exchange.saelens_files import CONFIG_FILE, NATIVE, WEIGHTS_FILE

_THRESHOLDED = ("jumprelu", "batchtopk", "matryoshka_batchtopk", "standard", NATIVE)
_NORMALIZED = {
    "expected_average_only_in": "Fold the factor in sae_lens (sae.fold_activation_norm_scaling_factor) and save again.",
    "covariance_whitening": "Fold the whitening in sae_lens (sae.fold_activation_whitening) and save again.",
}


@dataclass(frozen=True)
class ForeignConfig(SAEConfig):
    """Config of an SAE of sae_lens. Fields about training mean nothing: how it was trained is not known."""

    k: int = 0
    """Latents active per token; 0 where a threshold decides."""
    groups: tuple[float, ...] = (1.0,)
    temporal_weight: float = 0.0
    aux_weight: float = 0.0
    architecture: str = "jumprelu"
    """jumprelu or topk."""
    apply_b_dec_to_input: bool = True
    """Whether the decoder's bias is subtracted from the input."""

    def __post_init__(self) -> None:
        if not 0 <= self.k <= self.d_sae or self.d_sae < 1:
            raise TsaeError(f"k={self.k} and d_sae={self.d_sae} do not make an SAE", where="ForeignConfig")
        object.__setattr__(self, "groups", tuple(self.groups))


def is_saelens(folder: Path) -> bool:
    """Whether sae_lens or `to_saelens` wrote this folder, and not `TemporalSAE.save`."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


class LensSAE(NamedTuple):
    """The content of a folder of sae_lens, in the terms of this package."""

    config: SAEConfig
    """A `ForeignConfig`, or the config of the T-SAE that `to_saelens` wrote."""
    weights: dict[str, torch.Tensor]
    """W_enc, b_enc, W_dec, b_dec and threshold, as the model of this config names and shapes them."""
    d_model: int
    site: str
    metadata: dict[str, Any]


def load_folder(folder: Path, site: str | None = None) -> LensSAE:
    """Load and check cfg.json and sae_weights.safetensors.

    Args:
        folder: that sae_lens 6 or `to_saelens` wrote.
        site: TransformerLens name; by default the config's hook_name.

    Raises:
        TsaeError: where a file is missing or damaged, or the SAE cannot be computed here (see the top of the module).
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise TsaeError(f"holds no {name}", where=folder, fix="Save it with sae_lens's save_model.")
    try:
        config = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        metadata = dict(config.get("metadata") or {})
        architecture, d_model, d_sae = str(config.get("architecture")), int(config["d_in"]), int(config["d_sae"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TsaeError(f"{CONFIG_FILE} is not an SAE's ({type(error).__name__}: {error})", where=folder) from error
    try:
        weights = {name: value.float() for name, value in load_file(folder / WEIGHTS_FILE).items()}
    except (OSError, SafetensorError) as error:
        raise TsaeError(f"{WEIGHTS_FILE} cannot be read ({error})", where=folder, fix="Save it again.") from error
    _check(config, metadata, architecture, weights, folder)
    site = site or metadata.get("hook_name")
    if not site:
        raise TsaeError(
            "does not say where its activations come from (metadata.hook_name)",
            where=folder / CONFIG_FILE,
            fix="Enter it there, such as blocks.14.hook_resid_post, or give site= to read_saelens.",
        )
    with not_fitting(WEIGHTS_FILE, CONFIG_FILE, folder, "Save it again."):
        if architecture in ("standard", "topk"):
            weights["threshold"] = torch.zeros(d_sae)
        elif "topk_threshold" in weights:
            weights["threshold"] = weights.pop("topk_threshold").expand(d_sae).contiguous()
        if config.get("rescale_acts_by_decoder_norm"):
            norm = weights["W_dec"].norm(dim=1).clamp_min(1e-8)
            weights["W_enc"], weights["b_enc"] = weights["W_enc"] * norm, weights["b_enc"] * norm
            weights["W_dec"] = weights["W_dec"] / norm[:, None]
        ours = metadata.get("tsae")
        # One threshold for all latents, unless sae_lens has changed the SAE since (fold_W_dec_norm).
        if ours and bool((weights["threshold"] == weights["threshold"][0]).all()):
            weights["threshold"] = weights["threshold"][0].clone()
            return LensSAE(SAEConfig(**ours["sae"]), weights, d_model, site, metadata)
        foreign = ForeignConfig(
            d_sae=d_sae,
            k=int(config["k"]) if architecture == "topk" else 0,
            groups=ours["sae"]["groups"] if ours else (1.0,),
            architecture="topk" if architecture == "topk" else "jumprelu",
            apply_b_dec_to_input=bool(config.get("apply_b_dec_to_input", True)),
        )
        return LensSAE(foreign, weights, d_model, site, metadata)


@contextmanager
def not_fitting(weights: str, config: str, folder: Path, fix: str) -> Iterator[None]:
    """Say that the file of weights does not fit the config, in place of what torch says about it."""
    try:
        yield
    except (RuntimeError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise TsaeError(f"{weights} does not fit {config} ({reason})", where=folder, fix=fix) from error


def _check(
    config: dict[str, Any], metadata: dict[str, Any], architecture: str, weights: dict[str, torch.Tensor], folder: Path
) -> None:
    """Refuse configs that ask for what is not computed here."""
    where = folder / CONFIG_FILE
    written_by = str(metadata.get("sae_lens_version") or config.get("sae_lens_version") or "")
    if not written_by or int(written_by.split(".")[0]) < 6:
        raise TsaeError(
            f"was written by sae_lens {written_by or 'before 6'}, whose configs mean other things",
            where=where,
            fix="Load it with sae_lens 6 and save it again: SAE.load_from_disk(folder).save_model(other).",
        )
    if architecture not in (*_THRESHOLDED, "topk"):
        raise TsaeError(
            f"the architecture {architecture!r} cannot be computed here",
            where=where,
            fix=f"Use one of {', '.join((*_THRESHOLDED, 'topk'))}.",
        )
    normalization = config.get("normalize_activations", "none")
    if normalization != "none":
        raise TsaeError(
            f"expects activations normalised by {normalization!r}, which the weights do not hold",
            where=where,
            fix=_NORMALIZED.get(normalization, "Use an SAE trained on activations as they are."),
        )
    if config.get("reshape_activations", "none") != "none" or metadata.get("hook_head_index") is not None:
        raise TsaeError("reads attention heads, not a residual stream", where=where)
    if "scaling_factor" in weights:
        factor = weights.pop("scaling_factor")
        if not torch.allclose(factor, torch.ones_like(factor)):
            raise TsaeError(
                "has a finetuning scaling factor, which sae_lens 6 does not apply either",
                where=where,
                fix="Multiply the rows of W_dec by it and save again.",
            )
