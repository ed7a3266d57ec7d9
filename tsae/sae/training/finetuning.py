"""Fine-tuning: training that starts from an SAE, such as that of an earlier checkpoint, in place of random weights.

Every latent starts with what it computes and writes, so that latent i of the result is the start's latent i, moved by
the new activations. Training selects latents in its own way: BatchTopK, k per token on average.

| start | its codes until the first step | k without a config |
|---|---|---|
| a T-SAE | the same | its own |
| sae_lens: one threshold for all latents | the same | L0 |
| sae_lens: thresholds that differ (jumprelu) | the same; training leaves them for one of all latents | L0 |
| sae_lens: topk | the k largest of each token become k per token on average | its own |
| sae_lens: standard (ReLU) | the same; training puts a threshold where there was none | L0 |

L0 is measured on a sample of the new store. Without a config, training on from an SAE of sae_lens gives a plain
BatchTopK SAE: one group, no temporal term. Its decoder rows may have any norm, ours have norm 1: the norms go into
the encoder, and codes grow by them.

The threshold is calibrated on the new store at the end, and the temporal term has its full weight from the first step.
Counters of idle tokens, Adam's moments and the learning rate's schedule begin anew; the scale is the new store's. At
the full learning rate a long training moves latents far; docs/measured.md has how far, and what a tenth of it costs.

Warm start (`warm_start`): a published SAE has no high-level latents, and may have more latents than a store of
rollouts uses. Its latents are sorted into the groups of a T-SAE. On about 16,384 tokens of the store, with f the codes
in units of norm-1 decoder rows:

1. the d_sae latents with the most energy, Σ f², are kept;
2. those that last longest, by Σ f_t f_{t−1} / Σ f² over adjacent tokens, become the high-level group, in this order;
   the others follow by energy.

Training continues from there; docs/measured.md has what that saves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tsae.activations.store import Source
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.exchange.saelens_files import ForeignConfig
from tsae.sae.model import ForeignSAE, TemporalSAE, check_fits


def starting_config(
    start: TemporalSAE, store: Source, config: SAEConfig | None = None, site: str | None = None
) -> SAEConfig:
    """The config of a training that starts from an SAE.

    Args:
        start: the SAE.
        store: what is trained on.
        config: asked for; by default the start's own (see the table above).
        site: asked for.

    Raises:
        TsaeError: where site, d_model, d_sae or groups of the start and of what is asked for differ.
    """
    if site is not None and site != start.site:
        raise TsaeError(
            f"site={site} is asked for, the start was trained at {start.site}",
            where="start",
            fix="Leave the site out, or start from an SAE of that site.",
        )
    check_fits(start, store)
    if isinstance(start, ForeignSAE) and start.config.normalize != "none":
        raise TsaeError(
            f"normalises every token ({start.config.normalize}), and training takes activations as they are",
            where="start",
            fix="Start from an SAE that takes them as they are too.",
        )
    if config is None or isinstance(config, ForeignConfig):  # which says what an SAE is, not how it is trained
        config = _own_config(start, store)
    asked, found = ((c.d_sae, c.group_bounds) for c in (config, start.config))
    if asked != found:
        raise TsaeError(
            f"d_sae={config.d_sae}, groups={config.groups} are asked for, "
            f"the start has d_sae={start.config.d_sae}, groups={start.config.groups}",
            where="start",
            fix="Ask for what the start has, or give no config to take the start's own.",
        )
    return config


def _own_config(start: TemporalSAE, store: Source) -> SAEConfig:
    config = start.config
    if isinstance(config, ForeignConfig):
        changed = start.training_info.get("sae_lens", {}).get("tsae")
        if changed is None:
            k = config.k or max(1, round(_mean_l0(start, store)))
            return SAEConfig(d_sae=config.d_sae, k=k, groups=config.groups, temporal_weight=0.0)
        config = SAEConfig(**changed["sae"])  # a T-SAE that sae_lens has rescaled
    # How long a latent may be idle depends on the length of the training, not on what the SAE is.
    return replace(config, dead_after_tokens=None)


@torch.no_grad()
def _mean_l0(sae: TemporalSAE, store: Source) -> float:
    sample = store.windows(sae.site, held_out=False).first_tokens
    parts = torch.from_numpy(sample).to(sae.W_dec.device).split(1024)
    return sum(int((sae.encode(x) > 0).sum()) for x in parts) / len(sample)


@torch.no_grad()
def trainable(start: TemporalSAE, config: SAEConfig) -> TemporalSAE:
    """A copy as SAEs are trained: decoder rows of norm 1, the decoder's bias subtracted from the input.

    Reconstructions are the start's; codes are the start's times the norms of its decoder rows. The threshold is a
    scalar where it is the same for all latents, else (d_sae,); topk's choice among codes is left out.
    """
    weights = {name: value.detach().cpu() for name, value in start.state_dict().items()}
    norm = weights["W_dec"].norm(dim=1)
    # Rows that have norm 1 but for rounding keep their bits.
    norm = torch.where((norm - 1).abs() < 1e-5, 1.0, norm)
    bias = weights["b_enc"]
    if isinstance(start, ForeignSAE) and not start.config.apply_b_dec_to_input:
        bias = bias + weights["b_dec"] @ weights["W_enc"]
    threshold = weights["threshold"] * norm
    sae = TemporalSAE(start.d_model, config, site=start.site)
    sae.W_enc.copy_(weights["W_enc"] * norm)
    sae.b_enc.copy_(bias * norm)
    # A row of zeros stays one: its latent's codes are now 0, as what it wrote was.
    sae.W_dec.copy_(weights["W_dec"] / norm.clamp_min(1e-12)[:, None])
    sae.b_dec.copy_(weights["b_dec"])
    sae.threshold = threshold[0].clone() if bool((threshold == threshold[0]).all()) else threshold
    return sae


_TOKENS = 16_384


@torch.no_grad()
def warm_start(published: TemporalSAE | str | Path, store: Source, config: SAEConfig | None) -> TemporalSAE:
    """The T-SAE before its first step.

    Args:
        published: any SAE, or where it lies (`tsae.load_sae`).
        store: what is trained on.
        config: of the T-SAE, with as many latents as `published` has or fewer.

    Raises:
        TsaeError: where the SAE does not fit the store, or is narrower than what is asked for.
    """
    published = TemporalSAE.of(published)
    if config is None:
        d_sae = min(SAEConfig().d_sae, published.config.d_sae)
        config = SAEConfig(d_sae=d_sae, k=min(SAEConfig().k, d_sae))
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
