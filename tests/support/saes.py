"""SAEs with random weights, ours and of sae_lens."""

from __future__ import annotations

from typing import Any

import torch

SITE = "blocks.1.hook_resid_post"


D_IN, D_SAE = 48, 160


def lens_config(architecture: str, **more: Any) -> dict[str, Any]:
    from sae_lens import __version__

    metadata = {"sae_lens_version": __version__, "hook_name": SITE, "model_name": "tiny"}
    return {"architecture": architecture, "d_in": D_IN, "d_sae": D_SAE, "device": "cpu", "metadata": metadata, **more}


def randomized(lens: Any) -> Any:
    """Weights of every kind, decoder rows of unequal norms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in lens.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(0.2 + 0.1 * noise.abs() if "threshold" in name else 0.3 * noise)
    return lens
