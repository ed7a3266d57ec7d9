"""Writing a T-SAE as sae_lens reads SAEs: cfg.json and sae_weights.safetensors.

Two architectures, with the same weights and the same arithmetic:

- ``jumprelu``: at inference a T-SAE is a JumpReLU SAE whose latents share one threshold. Plain sae_lens loads it and
  gives the same codes bit for bit; which latents are high-level stands in the metadata (``d_high``).
- ``tsae_temporal``: after ``import tsae.sae.saelens`` sae_lens loads it as a class of its own with ``encode_high``.

sae_lens is not imported here: that takes seconds, and the two files are all that it reads.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from tsae.base.provenance import write_json
from tsae.errors import TsaeError
from tsae.sae.model import FORMAT, TemporalSAE

LensArchitecture = Literal["jumprelu", "tsae_temporal"]

NATIVE: LensArchitecture = "tsae_temporal"
"""The name that `tsae.sae.saelens` registers. ("temporal" is sae_lens's name for something else, arXiv 2511.01836.)"""

CONFIG_FILE, WEIGHTS_FILE = "cfg.json", "sae_weights.safetensors"


def lens_config(sae: TemporalSAE, architecture: LensArchitecture = "jumprelu") -> dict[str, Any]:
    """The content of sae_lens's cfg.json.

    Metadata holds hook_name (the site), d_high, temporal_weight, and under ``tsae`` all that is needed to read the
    folder back as a TemporalSAE.
    """
    if architecture not in get_args(LensArchitecture):
        raise TsaeError(
            f"unknown architecture {architecture!r}",
            where="to_saelens",
            fix=f"Choose one of {', '.join(get_args(LensArchitecture))}.",
        )
    config: dict[str, Any] = {
        "architecture": architecture,
        "d_in": sae.d_model,
        "d_sae": sae.config.d_sae,
        "dtype": str(sae.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            # Configs of unknown or older versions would be rewritten while they are loaded.
            "sae_lens_version": version("sae_lens"),
            "sae_lens_training_version": None,
            "hook_name": sae.site,
            "d_high": sae.config.d_high,
            "temporal_weight": sae.config.temporal_weight,
            "tsae": {"format": FORMAT, "version": version("tsae"), "sae": asdict(sae.config)},
        },
    }
    if architecture == NATIVE:
        config["d_high"] = sae.config.d_high
    return config


def lens_weights(sae: TemporalSAE) -> dict[str, torch.Tensor]:
    """W_enc (d_model, d_sae), W_dec (d_sae, d_model), b_enc and threshold (d_sae,), b_dec (d_model,) on the CPU."""
    weights = {name: value.detach().cpu().contiguous() for name, value in sae.state_dict().items()}
    weights["threshold"] = weights["threshold"].expand(sae.config.d_sae).contiguous()
    return weights


def write_saelens(sae: TemporalSAE, folder: str | Path, *, architecture: LensArchitecture = "jumprelu") -> Path:
    """Write cfg.json and sae_weights.safetensors.

    Args:
        sae: what to write.
        folder: made where it does not exist; the same two files in it are replaced.
        architecture: jumprelu for plain sae_lens; tsae_temporal for sae_lens with `tsae.sae.saelens` imported.

    Returns:
        the folder.
    """
    folder, config = Path(folder), lens_config(sae, architecture)
    return write_folder(folder, config, lens_weights(sae))


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write both files whole or not at all; the config comes last, so that a half-written folder is not read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    partial = folder / (WEIGHTS_FILE + ".tmp")
    save_file(weights, partial)
    partial.replace(folder / WEIGHTS_FILE)
    write_json(folder / CONFIG_FILE, config)
    return folder
