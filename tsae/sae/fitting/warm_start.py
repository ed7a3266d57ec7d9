"""A T-SAE that starts from a published SAE: its latents are sorted into the groups of a T-SAE, and trained on.

A published SAE knows no high-level latents, and may have more latents than a store of rollouts uses. On about 16,384
tokens of the store, with f the codes in units of norm-1 decoder rows:

1. the d_sae latents with the most energy, Σ f², are kept;
2. those that last longest, by Σ f_t f_{t−1} / Σ f² over adjacent tokens, become the high-level group, in this order;
   the others follow by energy.

`tsae.sae.fitting.finetuning` trains on from there. docs/measured.md has what that saves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tsae.activations.store import Source
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.fitting.finetuning import starting_config, trainable
from tsae.sae.model import TemporalSAE

_TOKENS = 16_384


def warm_start_config(published: TemporalSAE) -> SAEConfig:
    """The config of a T-SAE that starts from it where none is given: the default, no wider than what is there."""
    config = SAEConfig()
    d_sae = min(config.d_sae, published.config.d_sae)
    return replace(config, d_sae=d_sae, k=min(config.k, d_sae))


@torch.no_grad()
def warm_start(published: TemporalSAE | str | Path, store: Source, config: SAEConfig | None = None) -> TemporalSAE:
    """The T-SAE before its first step.

    Args:
        published: any SAE, or where it lies (`tsae.load_sae`).
        store: what is trained on.
        config: of the T-SAE, with as many latents as `published` has or fewer.

    Raises:
        TsaeError: where the SAE does not fit the store, or is narrower than what is asked for.
    """
    published = TemporalSAE.of(published)
    config = config or warm_start_config(published)
    if config.d_sae > published.config.d_sae:
        what = f"has {published.config.d_sae} latents, and d_sae={config.d_sae} are asked for"
        raise TsaeError(what, where="init_from", fix=f"Ask for as many or fewer (--d-sae {published.config.d_sae}).")
    starting_config(published, store)
    # Its own groups mean nothing here.
    sae = trainable(published, replace(config, d_sae=published.config.d_sae, groups=(1.0,), group_weights=None))
    energy, lasting = torch.zeros(2, published.config.d_sae, dtype=torch.float64)
    read = 0
    for batch in store.windows(sae.site, held_out=False, partner="previous").epoch(0, 1024):
        x = batch.x.float() if batch.others is None else torch.cat([batch.x, batch.others]).float()
        # Codes as the published SAE gives them, scaled as if every decoder row had norm 1.
        codes = published.encode(x) * published.W_dec.norm(dim=1)
        energy += codes[: len(batch.x)].double().pow(2).sum(0)
        earlier, later = torch.from_numpy(batch.pairs).T
        lasting += (codes[earlier] * codes[later]).sum(0).double()
        read += len(batch.x)
        if read >= _TOKENS:
            break
    kept = energy.argsort(descending=True, stable=True)[: config.d_sae]
    share = (lasting / energy.clamp_min(1e-12))[kept]
    high = kept[share.argsort(descending=True, stable=True)[: config.d_high]]
    order = torch.cat([high, kept[~torch.isin(kept, high)]])
    norms = published.training_info.get("norms", {})
    found = TemporalSAE(sae.d_model, config, site=sae.site, training={"norms": norms})
    found.W_enc.copy_(sae.W_enc[:, order])
    found.b_enc.copy_(sae.b_enc[order])
    found.W_dec.copy_(sae.W_dec[order])
    found.b_dec.copy_(sae.b_dec)
    found.threshold = sae.threshold if sae.threshold.ndim == 0 else sae.threshold[order]
    return found
