"""The inference threshold, set after training so that tokens outside training have k active codes on average.

BatchTopK keeps k codes per token of a batch; inference keeps the codes above a threshold. A running mean of the
batches' smallest codes lags behind weights that still move: after 600 steps it left 12 % too few codes. The quantile of
the finished SAE's own codes has no lag, and needs one pass over a sample.

The sample comes from the problems that training leaves out. Training tokens have fewer codes than others, and the more
often they were seen, the fewer: after six passes over 300 problems, new problems had 9 % more than k codes. Only this
one number comes from those problems, and it is not set to make any error smaller. With fewer than `FEWEST` problems
chance would move the number more than that; the sample is then of training tokens.
"""

from __future__ import annotations

import torch

from tsae.sae.model import TemporalSAE

FEWEST = 20
"""Problems left out, from which on the threshold is set on them."""

_CHUNK = 1024  # tokens whose pre-activations are held at once


@torch.no_grad()
def calibrate(sae: TemporalSAE, x: torch.Tensor) -> None:
    """Set the threshold so that x has k active codes per token on average, or all positive ones where they are fewer.

    Args:
        sae: in the units of x.
        x: (n, d_model) tokens, in any floating-point precision; chunks of it go to the SAE's device.
    """
    wanted, device = sae.config.k * len(x), sae.W_enc.device
    # The largest codes so far: one more than are to be active.
    largest, bound = torch.zeros(0, device=device), torch.zeros((), device=device)
    sae.threshold = torch.zeros((), device=device)
    for part in x.split(_CHUNK):
        codes = sae.encode(part.to(device).float())
        largest = torch.cat([largest, codes[codes > bound]])
        if len(largest) > wanted:
            largest = largest.topk(wanted + 1, sorted=False).values
            bound = largest.min()
    if len(largest) > wanted:
        # Between two codes, not at one: other batches round it to either side.
        largest = largest.topk(wanted + 1, sorted=False).values
        bound = largest.topk(2, largest=False).values.mean()
    else:
        bound = torch.zeros((), device=device)
    sae.threshold = bound
