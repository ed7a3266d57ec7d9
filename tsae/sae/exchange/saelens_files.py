"""The files of a T-SAE in the form that sae_lens loads: cfg.json and sae_weights.safetensors.

Two architectures, with the same weights and the same arithmetic:

- ``jumprelu``: at inference a T-SAE is a JumpReLU SAE whose latents share one threshold. Plain sae_lens loads it and
  gives the same codes bit for bit; which latents are high-level stands in the metadata (``d_high``).
- ``tsae_temporal``: after ``import tsae.sae.saelens`` sae_lens loads it as a class of its own with ``encode_high``.

sae_lens is not imported here: that takes seconds, and the two files are all that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tsae.base.disk.tensors import write_tensors
from tsae.base.files import write_json
from tsae.errors import TsaeError
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
