"""SAEs that sae_lens trained, read into the analysis.

| architecture in cfg.json | what it becomes |
|---|---|
| jumprelu | pre · 1[pre > threshold], a threshold per latent |
| batchtopk, matryoshka_batchtopk (checkpoints of a training) | the same, with the running threshold |
| topk | the k largest of each token |
| standard | ReLU |
| any of these that `to_saelens` wrote | the `TemporalSAE` that it was |

Codes equal sae_lens's bit for bit; where a config asks for codes rescaled by decoder norms, the norms are folded into
the weights, which costs the last bits. Latents are one group: which are high-level is not known of them.

Refused, with what to do: weights that expect normalised activations (sae_lens computes the factors from data or per
token, and does not write them down), reshaped attention heads, single heads, other architectures.

sae_lens itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.exchange.saelens_files import CONFIG_FILE, NATIVE, WEIGHTS_FILE, write_folder
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from tsae.sae.exchange.saelens_files import LensArchitecture

_THRESHOLDED = ("jumprelu", "batchtopk", "matryoshka_batchtopk", "standard", NATIVE)
_NORMALIZED = {
    "expected_average_only_in": "Fold the factor in sae_lens (sae.fold_activation_norm_scaling_factor) and save again.",
    "covariance_whitening": "Fold the whitening in sae_lens (sae.fold_activation_whitening) and save again.",
}


@dataclass(frozen=True)
class ForeignConfig(SAEConfig):
    """What an SAE of sae_lens is. How it was trained is not known here: fields about training mean nothing."""

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


class ForeignSAE(TemporalSAE):
    """An SAE of sae_lens behind the face of ours: `encode`, `evaluate` and what follows take it as they take a T-SAE.

    It is saved as sae_lens saves it. Training starts from it (`tsae.sae.fitting.finetuning`) and gives a `TemporalSAE`.
    """

    config: ForeignConfig

    def __init__(
        self, d_model: int, config: ForeignConfig, *, site: str, training: dict[str, Any] | None = None
    ) -> None:
        super().__init__(d_model, config, site=site, training=training)
        self.register_buffer("threshold", torch.zeros(config.d_sae))

    def __repr__(self) -> str:
        c = self.config
        return f"ForeignSAE({c.architecture}, d_model={self.d_model}, d_sae={c.d_sae}, site={self.site!r})"

    @property
    def fingerprint(self) -> str:
        """Hash of weights, thresholds and what is computed with them."""
        c = self.config
        text = f"{super().fingerprint} {c.architecture} {c.k} {c.apply_b_dec_to_input}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, d_sae) codes."""
        pre = (x - self.b_dec * self.config.apply_b_dec_to_input) @ self.W_enc
        pre += self.b_enc
        if self.config.architecture == "jumprelu":
            return torch.relu(pre) * (pre > self.threshold)
        largest = torch.topk(pre, self.config.k, dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter_(-1, largest.indices, torch.relu(largest.values))

    def save(self, folder: str | Path) -> Path:
        """As `to_saelens`: this is the form that `TemporalSAE.load` reads it from."""
        return self.to_saelens(folder)

    def to_saelens(self, folder: str | Path, *, architecture: LensArchitecture = "jumprelu") -> Path:
        """Write it as sae_lens reads it; its own architecture stays."""
        if architecture == NATIVE:
            raise TsaeError(f"an SAE of sae_lens is no T-SAE, and is not written as {NATIVE}", where="to_saelens")
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        config: dict[str, Any] = {
            "architecture": self.config.architecture,
            "d_in": self.d_model,
            "d_sae": self.config.d_sae,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": self.config.apply_b_dec_to_input,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": self.training_info["sae_lens"],
        }
        if self.config.architecture == "topk":
            config |= {"k": self.config.k, "rescale_acts_by_decoder_norm": False}
            del weights["threshold"]
        return write_folder(Path(folder), config, weights)


def is_saelens(folder: Path) -> bool:
    """That sae_lens, or `to_saelens`, wrote this folder, and `TemporalSAE.save` did not."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def read_saelens(folder: str | Path, *, site: str | None = None, device: str = "cpu") -> TemporalSAE:
    """Read a folder with cfg.json and sae_weights.safetensors.

    Args:
        folder: that sae_lens 6 or `to_saelens` wrote.
        site: TransformerLens name; by default the config's hook_name.
        device: a torch device.

    Raises:
        TsaeError: where a file is missing or damaged, or the SAE cannot be computed here (see the top of the module).
    """
    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise TsaeError(f"holds no {name}", where=folder, fix="Save it with sae_lens's save_model.")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        metadata = dict(config.get("metadata") or {})
        architecture, shape = str(config.get("architecture")), (int(config["d_in"]), int(config["d_sae"]))
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
    if architecture == "standard":
        weights["threshold"] = torch.zeros(shape[1])
    elif "topk_threshold" in weights:
        weights["threshold"] = weights.pop("topk_threshold").expand(shape[1]).contiguous()
    if config.get("rescale_acts_by_decoder_norm"):
        norm = weights["W_dec"].norm(dim=1).clamp_min(1e-8)
        weights["W_enc"], weights["b_enc"] = weights["W_enc"] * norm, weights["b_enc"] * norm
        weights["W_dec"] = weights["W_dec"] / norm[:, None]
    ours = metadata.get("tsae")
    sae: TemporalSAE
    try:
        # One threshold for all latents, unless sae_lens has changed the SAE since (fold_W_dec_norm).
        if ours and bool((weights["threshold"] == weights["threshold"][0]).all()):
            weights["threshold"] = weights["threshold"][0].clone()
            sae = TemporalSAE(shape[0], SAEConfig(**ours["sae"]), site=site, training={"sae_lens": metadata})
        else:
            foreign = ForeignConfig(
                d_sae=shape[1],
                k=int(config["k"]) if architecture == "topk" else 0,
                groups=ours["sae"]["groups"] if ours else (1.0,),
                architecture="topk" if architecture == "topk" else "jumprelu",
                apply_b_dec_to_input=bool(config.get("apply_b_dec_to_input", True)),
            )
            if architecture == "topk":
                weights["threshold"] = torch.zeros(shape[1])
            sae = ForeignSAE(shape[0], foreign, site=site, training={"sae_lens": metadata})
        sae.load_state_dict(weights)
    except (RuntimeError, KeyError, TypeError) as error:
        raise TsaeError(
            f"{WEIGHTS_FILE} does not fit {CONFIG_FILE} ({str(error).splitlines()[-1].strip()})",
            where=folder,
            fix="Save it again.",
        ) from error
    return sae.requires_grad_(False).to(device).eval()


def _check(
    config: dict[str, Any], metadata: dict[str, Any], architecture: str, weights: dict[str, torch.Tensor], folder: Path
) -> None:
    """That what the config asks for is what is computed here."""
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
