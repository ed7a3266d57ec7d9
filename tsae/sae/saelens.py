"""The T-SAE as an architecture of sae_lens: importing this module registers ``tsae_temporal``.

::

    import tsae.sae.saelens
    from sae_lens import SAE

    sae = SAE.load_from_disk("exported")  # of `tsae export --architecture tsae_temporal`
    sae = SAE.load_from_disk("saes/l14", converter=tsae.sae.saelens.disk_loader)  # of `tsae train` itself
    sae.encode_high(x)

sae_lens has no entry points, so that the architecture is known only after this import. It takes a few seconds; nothing
else in tsae imports sae_lens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sae_lens.registry import SAE_CLASS_REGISTRY, register_sae_class
from sae_lens.saes.jumprelu_sae import JumpReLUSAE, JumpReLUSAEConfig
from sae_lens.util import str_to_dtype

from tsae.errors import TsaeError
from tsae.sae.exchange.saelens_files import NATIVE, lens_config, lens_weights
from tsae.sae.model import ForeignSAE, TemporalSAE


@dataclass
class LensTemporalSAEConfig(JumpReLUSAEConfig):
    """sae_lens's JumpReLU config and the size of the high-level group."""

    d_high: int = 0
    """Number of high-level latents, the first ones."""

    @classmethod
    def architecture(cls) -> str:
        return NATIVE


class LensTemporalSAE(JumpReLUSAE):
    """sae_lens's JumpReLU SAE whose first d_high latents are high-level."""

    cfg: LensTemporalSAEConfig

    def encode_high(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_in) -> (…, d_high) codes of the high-level latents."""
        return self.encode(x)[..., : self.cfg.d_high]

    def decode_high(self, codes: torch.Tensor) -> torch.Tensor:
        """(…, d_high) -> (…, d_in): what the high-level latents reconstruct alone, with the decoder's bias."""
        return codes @ self.W_dec[: self.cfg.d_high] + self.b_dec


def disk_loader(
    path: str | Path, device: str = "cpu", cfg_overrides: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A ``converter`` for `SAE.load_from_disk` that reads the folder that `tsae train` wrote, without exporting it.

    Returns:
        (content of a cfg.json, weights by name).
    """
    sae = TemporalSAE.load(path)
    if isinstance(sae, ForeignSAE):
        raise TsaeError("is a published SAE, not a T-SAE", where=path, fix="Load it with sae_lens itself.")
    own = lens_config(sae.config, sae.d_model, sae.site, NATIVE, norm_limit=sae.norm_limit, norm_centre=sae.norm_centre)
    config = {**own, "device": device, **(cfg_overrides or {}), "architecture": NATIVE}
    dtype = str_to_dtype(config["dtype"])
    return config, {
        name: value.to(device=device, dtype=dtype) for name, value in lens_weights(sae.state_dict()).items()
    }


if NATIVE not in SAE_CLASS_REGISTRY:
    register_sae_class(NATIVE, LensTemporalSAE, LensTemporalSAEConfig)
