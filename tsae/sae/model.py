"""The temporal sparse autoencoder.

    pre = (x − b_dec) W_enc + b_enc                      (n_tokens, d_sae)
    training:   f = BatchTopK(ReLU(pre)):  the k · n_tokens largest of the batch are kept
    inference:  f = pre · 1[pre > threshold]
    x̂_high = f[:, :d_high] W_dec[:d_high] + b_dec,   x̂ = f W_dec + b_dec

Rows of W_dec have unit norm. The first d_high latents are high-level, the others low-level.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tsae.activations.batches import distances
from tsae.activations.store import Source
from tsae.base import display
from tsae.base.artefact import Kind, read_artefact, write_artefact
from tsae.base.files import as_path, read_object, reading, write_json
from tsae.base.tensors import write_tensors
from tsae.base.usual_state import usual_state
from tsae.errors import TsaeError, refuse
from tsae.sae.config import SAEConfig
from tsae.sae.exchange.finding import find_foreign
from tsae.sae.exchange.saelens_files import (
    FORMAT,
    NATIVE,
    NOT_FITTING,
    ForeignConfig,
    FoundSAE,
    LensArchitecture,
    as_weights,
    check_shapes,
    check_site,
    lens_config,
    lens_weights,
    number,
    plain_config,
    whole,
    write_folder,
)

_AGAIN = "Train it again."


class TemporalSAE(torch.nn.Module):
    """A two-group Matryoshka BatchTopK SAE whose high-level codes are trained to be alike on adjacent tokens.

    Args:
        d_model: width of the residual stream.
        config: of the SAE.
        site: where its activations come from.
        training: metadata of its training, saved beside the weights.
    """

    @usual_state()
    def __init__(
        self, d_model: int, config: SAEConfig, *, site: str = "", training: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.d_model, self.config, self.site = d_model, config, site
        self.training_info = training or {}
        self.W_enc = torch.nn.Parameter(torch.zeros(d_model, config.d_sae))
        self.b_enc = torch.nn.Parameter(torch.zeros(config.d_sae))
        self.W_dec = torch.nn.Parameter(torch.zeros(config.d_sae, d_model))
        self.b_dec = torch.nn.Parameter(torch.zeros(d_model))
        self.threshold: torch.Tensor
        self.register_buffer("threshold", torch.zeros(()))

    def __repr__(self) -> str:
        c = self.config
        return f"TemporalSAE(d_model={self.d_model}, d_sae={c.d_sae}, k={c.k}, d_high={c.d_high}, site={self.site!r})"

    def _repr_html_(self) -> str:
        c = self.config
        facts = {
            "site": self.site,
            "d_model": self.d_model,
            "latents": c.d_sae,
            "of which high-level": c.d_high,
            "active a token (k)": c.k,
            "tokens farther than this from their centre are left out": self.norm_limit,
        }
        return display.card(type(self).__name__, facts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, d_model): the reconstruction of activations. No gradients pass."""
        return self.decode(self.encode(x), x).detach()

    @property
    def fingerprint(self) -> str:
        """Hash of weights and threshold: the same SAE wherever its folder lies."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    @property
    def norm_limit(self) -> float | None:
        """Norm about `norm_centre` beyond which its training left tokens out; None where that is not known."""
        limit = self.training_info.get("norms", {}).get("limit")
        return None if limit is None else float(limit)

    @property
    def norm_centre(self) -> list[float]:
        """d_model values from which `norm_limit` is measured; none, for 0, where that is not known."""
        return list(self.training_info.get("norms", {}).get("centre", ()))

    def outliers(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…) bool: tokens beyond `norm_limit`; the SAE saw none of them in training."""
        limit = math.inf if self.norm_limit is None else self.norm_limit
        return distances(x, self.norm_centre) > limit

    @torch.no_grad()
    def initialize(self, bias: torch.Tensor, generator: torch.Generator) -> None:
        """Random unit decoder rows, the encoder their transpose, and the given decoder bias (d_model,)."""
        rows = torch.randn(self.config.d_sae, self.d_model, generator=generator, device=generator.device)
        self.W_dec.copy_(rows / rows.norm(dim=1, keepdim=True))
        self.W_enc.copy_(self.W_dec.T)
        self.b_enc.zero_()
        self.b_dec.copy_(bias)

    def preactivations(self, x: torch.Tensor) -> torch.Tensor:
        """(n, d_model) -> (n, d_sae) ReLU of the encoder, before any selection."""
        return torch.relu(torch.addmm(self.b_enc - self.b_dec @ self.W_enc, x, self.W_enc))

    def encoder_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """(…, d_model) what W_enc reads of activations x, and the factor (…, 1) that brings codes to the units of x."""
        return x - self.b_dec, 1.0

    @usual_state(keep_gradients=True)
    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, d_sae) codes at inference, in the units of x. No gradients pass."""
        # In sae_lens's order of operations, not that of `preactivations`: exported SAEs give the same bits.
        pre = (x - self.b_dec) @ self.W_enc
        pre += self.b_enc
        return torch.relu(pre) * (pre > self.threshold)

    def encode_high(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, d_high) codes of the high-level latents."""
        return self.encode(x)[..., : self.config.d_high]

    def offset(self, x: torch.Tensor) -> torch.Tensor:
        """(d_model,) or (…, d_model): what reconstructions of x hold beside the active latents."""
        return self.b_dec

    @usual_state(keep_gradients=True)
    def decode(self, codes: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """(…, d_sae) -> (…, d_model). Gradients pass, unless the caller switched them off.

        Args:
            codes: of the activations.
            x: (…, d_model) the activations; needed only by SAEs that normalise every token by itself.
        """
        return codes @ self.W_dec + (self.b_dec if x is None else self.offset(x))

    @torch.no_grad()
    def fold_scale(self, scale: float, centre: torch.Tensor | float = 0.0) -> None:
        """Turn an SAE of scale · (x − centre) into one of x; centre is (d_model,).

        ReLU and threshold are homogeneous, so that W_enc and W_dec stay.
        """
        self.b_enc.div_(scale)
        self.b_dec.div_(scale).add_(centre)
        self.threshold.div_(scale)

    def save(self, folder: str | Path) -> Path:
        """Write sae.safetensors, config.json and training.json."""
        return self._save(folder)

    def _save(self, folder: str | Path, **more: Any) -> Path:
        config = {"format": FORMAT, "d_model": self.d_model, "site": self.site, "sae": asdict(self.config)}
        files: dict[str, Callable[[Path], object]] = {
            "training.json": partial(write_json, content=self.training_info),
            "sae.safetensors": partial(write_tensors, tensors=self.state_dict()),
        }
        return write_artefact(folder, SAE, config, files, gives={"sae": self.fingerprint}, **more)

    def to_saelens(self, folder: str | Path, *, architecture: LensArchitecture = "jumprelu") -> Path:
        """Write a folder that sae_lens loads and encodes the same with; see `tsae.sae.exchange.saelens_files`."""
        dtype = str(self.W_enc.dtype).removeprefix("torch.")
        config = lens_config(
            self.config, self.d_model, self.site, architecture, dtype, self.norm_limit, self.norm_centre
        )
        return write_folder(as_path(folder), config, lens_weights(self.state_dict()))

    @classmethod
    def of(cls, sae: TemporalSAE | str | Path, *, device: str | None = None) -> TemporalSAE:
        """The SAE itself, or the one in a folder. On a device where one is named; one on another device is copied."""
        if not isinstance(sae, TemporalSAE):
            return cls.load(sae, device=device or "cpu")
        there = device is None or torch.empty(0, device=device).device == sae.W_dec.device
        return sae if there else deepcopy(sae).to(device)

    @classmethod
    @usual_state()
    def load(cls, where: str | Path, *, site: str | None = None, device: str = "cpu") -> TemporalSAE:
        """Read a folder that `save` wrote, or an SAE that others published, here or on the Hugging Face Hub.

        Args:
            where: a path, or a name as `tsae.sae.exchange.finding` lists them. `tsae.sae.exchange.saelens_files` and
                `tsae.sae.exchange.published` say what can be read.
            site: TransformerLens name, for published SAEs whose files do not say where their activations come from.
            device: a torch device.

        Raises:
            TsaeError: where a file is missing or damaged, weights and config disagree, or the SAE cannot be reached or
                computed here.
        """
        folder, found = find_foreign(where, site)
        if found is not None:
            return _of_others(found, where, device)
        content = read_artefact(folder, SAE, ["training.json", "sae.safetensors"], _AGAIN)
        info = read_object(folder / "training.json", _AGAIN)
        with reading(folder / "config.json", _AGAIN):
            # An SAE that was made by hand may have no site.
            own_site = content["site"] and check_site(content["site"], folder)
            d_model, config = whole(content["d_model"], "d_model", folder, fix=_AGAIN), SAEConfig(**content["sae"])
        with reading(folder, _AGAIN, "sae.safetensors does not fit config.json"):
            weights = as_weights(load_file(folder / "sae.safetensors"), folder, _AGAIN)
            check_shapes(weights, d_model, config.d_sae)
            sae = cls(d_model, config, site=own_site, training=info)
            sae.load_state_dict(weights)
            sae.outliers(sae.b_dec)  # refuses a norm limit or a centre that does not fit
        return sae.to(device).eval()


class ForeignSAE(TemporalSAE):
    """A published SAE, which `encode`, `evaluate` and all later stages take like a T-SAE.

    It is saved as sae_lens saves it. `tsae.sae.training.finetuning` starts from it and gives a `TemporalSAE`.
    """

    config: ForeignConfig

    @usual_state()
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
        text += "" if c.normalize == "none" else f" {c.normalize}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _normalization(self, x: torch.Tensor) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """(…, 1) center and scale of every token."""
        if self.config.normalize == "layer_norm":
            return x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        if self.config.normalize == "constant_norm_rescale":
            return 0.0, x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return 0.0, 1.0

    def offset(self, x: torch.Tensor) -> torch.Tensor:
        center, scale = self._normalization(x)
        return self.b_dec * scale + center

    def decode(self, codes: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        if x is None and self.config.normalize != "none":
            what = f"normalises every token ({self.config.normalize}), which codes alone do not tell"
            raise TsaeError(what, where="ForeignSAE.decode", fix="Give the activations too: decode(codes, x).")
        return super().decode(codes, x)

    def encoder_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        c, (center, scale) = self.config, self._normalization(x)
        if c.normalize != "none":
            x = (x - center) / (scale + (1e-5 if c.normalize == "layer_norm" else 0))
        return x - self.b_dec * c.apply_b_dec_to_input, scale

    @usual_state(keep_gradients=True)
    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, d_sae) codes, in the units of x."""
        c, (shifted, scale) = self.config, self.encoder_input(x)
        pre = shifted @ self.W_enc
        pre += self.b_enc
        if c.architecture == "jumprelu":
            codes = torch.relu(pre) * (pre > self.threshold)
        else:
            largest = torch.topk(pre, c.k, dim=-1, sorted=False)
            codes = torch.zeros_like(pre).scatter_(-1, largest.indices, torch.relu(largest.values))
        return codes if c.normalize == "none" else codes * scale

    def save(self, folder: str | Path) -> Path:
        """Write it as `to_saelens` does; `TemporalSAE.load` loads that form."""
        return self.to_saelens(folder)

    def to_saelens(self, folder: str | Path, *, architecture: LensArchitecture = "jumprelu") -> Path:
        """Write it in the form that sae_lens loads, with its own architecture."""
        if architecture == NATIVE:
            raise TsaeError(f"a published SAE is not a T-SAE, and is not written as {NATIVE}", where="to_saelens")
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        c = self.config
        config = plain_config(c.architecture, self.d_model, c.d_sae, self.training_info["sae_lens"])
        config |= {"apply_b_dec_to_input": c.apply_b_dec_to_input, "normalize_activations": c.normalize}
        if c.architecture == "topk":
            config |= {"k": c.k, "rescale_acts_by_decoder_norm": False}
            del weights["threshold"]
        return write_folder(as_path(folder), config, weights)


SAE = Kind("SAE", 1, "config.json", "Train one with `tsae train`.", TemporalSAE.load)
load_sae = TemporalSAE.load
"""Load an SAE: ours or a published one, here or on the Hugging Face Hub; see `TemporalSAE.load`."""


def _of_others(found: FoundSAE, where: str | Path, device: str) -> TemporalSAE:
    info: dict[str, Any] = {"sae_lens": found.metadata}
    # `to_saelens` writes the norm limit of ours. Files of others do not have it.
    ours = found.metadata.get("tsae") or {}
    if (limit := ours.get("norm_limit")) is not None:
        centre = [number(value, "metadata.tsae.norm_centre", where) for value in ours.get("norm_centre", [])]
        info["norms"] = {"limit": number(limit, "metadata.tsae.norm_limit", where, positive=True), "centre": centre}
    kept: dict[str, Any] = {"site": found.site, "training": info}
    sae: TemporalSAE
    with reading(where, "Save it again.", NOT_FITTING):
        check_shapes(found.weights, found.d_model, found.config.d_sae)
        if isinstance(found.config, ForeignConfig):
            sae = ForeignSAE(found.d_model, found.config, **kept)
        else:
            sae = TemporalSAE(found.d_model, found.config, **kept)
        sae.load_state_dict(found.weights)
        sae.outliers(sae.b_dec)
    return sae.requires_grad_(False).to(device).eval()


def check_fits(sae: TemporalSAE, store: Source) -> None:
    """Check that the SAE was made for the store's activations.

    Raises:
        TsaeError: where the site or d_model differ.
    """
    what = f"the SAE was trained at {sae.site}, the store has {', '.join(store.sites)}"
    refuse(store.path, (sae.site not in store.sites, what, "Capture that site, or train an SAE on this store."))
    if store.d_model(sae.site) != sae.d_model:
        compared = sae.training_info.get("crosscoder", ())
        what = f", as a crosscoder of {' and '.join(compared)}" if compared else ""
        raise TsaeError(
            f"{sae.site} has d_model {store.d_model(sae.site)}, the SAE expects {sae.d_model}{what}",
            where=store.path,
            fix="Give it tsae.Pair(store, reader)."
            if compared
            else "Use an SAE trained on this model, or train one on this store.",
        )
