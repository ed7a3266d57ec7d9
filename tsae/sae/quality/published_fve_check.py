"""Whether a published SAE explains the activations at hand as well as it should.

Site, normalisation and biases come from its config. If one of them is wrong, or the SAE is of another model, it still
gives codes. Its FVE shows the mistake: the FVE on a sample is compared with the one that its makers name, where they
do, else with a half.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from tsae.activations.store import Source
from tsae.sae.model import ForeignSAE, TemporalSAE
from tsae.sae.quality.evaluation import TokenSums

_TOKENS = 4096
_DENSE = 1 << 24
"""Dense codes at once."""
_LEAST, _NEAR = 0.5, 0.1
"""Lowest FVE without a warning: `_LEAST` where its makers name none, else theirs less `_NEAR`."""
_TIMES = 3.0
"""A warning names more or fewer active latents than its makers do, from this factor on."""


def named_measures(sae: TemporalSAE) -> dict[str, float] | None:
    """FVE and L0 that its makers name, as far as they are numbers; None for an SAE that was not published."""
    found = sae.training_info.get("promised", _metadata(sae).get("promised"))
    if found is None and not isinstance(sae, ForeignSAE):
        return None
    named = found if isinstance(found, dict) else {}
    return {
        name: float(named[name])
        for name in ("fve", "l0")
        if type(named.get(name)) in (int, float) and abs(named[name]) <= sys.float_info.max
    }


def _metadata(sae: TemporalSAE) -> dict[str, Any]:
    """Metadata of sae_lens's cfg.json, where it has such."""
    found = sae.training_info.get("sae_lens")
    return found if isinstance(found, dict) else {}


@torch.no_grad()
def check_published_fve(sae: TemporalSAE, store: Source) -> tuple[float, float] | None:
    """Measure a published SAE on about 4,096 tokens of a store without outliers, and warn where it falls short.

    Returns:
        (FVE, L0); None for an SAE that was not published.
    """
    if named_measures(sae) is None:
        return None
    sample = store.windows(sae.site, held_out=None, partner=None).first_tokens
    sums, device = TokenSums(sae), sae.W_dec.device
    for x in torch.from_numpy(sample[:: max(1, len(sample) // _TOKENS)]).split(max(64, _DENSE // sae.config.d_sae)):
        sums.add(x.to(device), sae.encode(x.to(device)))
    found = sums.slice("all", "all")
    warn_where_short(sae, store, found.fve, found.l0, sums.n)
    return found.fve, found.l0


def warn_where_short(sae: TemporalSAE, store: Source, fve: float, l0: float, n_tokens: int) -> None:
    """Warn where a published SAE explains less than it should, or with far more or fewer latents."""
    named = named_measures(sae)
    if named is None:
        return
    short = fve < (named["fve"] - _NEAR if "fve" in named else _LEAST)
    other = "l0" in named and not named["l0"] / _TIMES <= l0 <= named["l0"] * _TIMES
    if not short and not other:
        return
    says = [f"FVE {named['fve']:.2f}"] if "fve" in named else []
    says += [f"L0 {named['l0']:.0f}"] if "l0" in named else []
    expected = f"its makers name {' and '.join(says)}" if says else f"expected at least {_LEAST:g}"
    without_bos = _metadata(sae).get("prepend_bos") is True and not _begins_with_special(store)
    bos = " Its config says that texts begin with a BOS token; these do not." if without_bos else ""
    warnings.warn(
        f"this published SAE explains {fve:.2f} of the variance of {n_tokens:,} tokens at {sae.site}, with {l0:.1f} "
        f"active latents a token ({expected}). It may be of another model or layer, or these texts may be unlike those "
        f"that it was trained on. A diff finds only what it explains.{bos}",
        UserWarning,
        stacklevel=3,
    )


def _begins_with_special(store: Source) -> bool:
    """Whether most prompts begin with a special token."""
    prompts = store.rollouts.table["prompt_ids"].slice(0, 100).to_pylist()
    special = set(store.special_ids)
    return sum(bool(prompt) and prompt[0] in special for prompt in prompts) * 2 > len(prompts)
