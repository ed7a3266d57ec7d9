"""Logit effect: the next tokens that a feature's decoder direction promotes and suppresses.

Along the direct path alone: what a unit of activation, written into the residual stream, adds to the logits if no later
block acts on it,

    effect = W_dec · diag(g) · W_U   (n_features, vocabulary), minus its mean over the vocabulary,

with g the weight of the final norm. The norm also divides by the length of the stream, which scales all logits of a
token alike and is left out: only ratios mean something. Features far below the last block mostly act through later
blocks, so this is a hint at what a feature does and no test of it (`tsae.intervene` is one).
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from einops import einsum, reduce
from transformers import PreTrainedModel

from tsae.checkpoints.hooks import decoder_blocks
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE

_CHUNK = 1 << 25
"""Effects computed at once: 128 MiB in float32."""


@torch.no_grad()
def logit_effects(
    sae: TemporalSAE, checkpoint: Checkpoint | PreTrainedModel, strings: Sequence[str], *, n: int = 8
) -> pd.DataFrame:
    """The tokens that every feature promotes and suppresses most.

    Args:
        sae: gives the decoder directions.
        checkpoint: gives the final norm and the unembedding; or its loaded model.
        strings: text of every token id; ids beyond them pad the vocabulary and are left out.
        n: tokens on either side.

    Returns:
        indexed by feature: promotes and suppresses (lists of up to n tokens, strongest first), promotes_by and
        suppresses_by (their effects on the logit per unit of activation, relative to the mean over the vocabulary).

    Raises:
        TsaeError: where the model's unembedding does not read a residual stream of the SAE's width.
    """
    model = checkpoint if isinstance(checkpoint, PreTrainedModel) else checkpoint.load_model(dtype="float32")
    head = model.get_output_embeddings()
    if head is None or head.weight.shape[1] != sae.d_model:
        raise TsaeError(
            f"{type(model).__name__} has no unembedding that reads {sae.d_model} dimensions",
            where=model.config._name_or_path,
            fix="Give a checkpoint of the series that the SAE was trained on.",
        )
    unembedding = head.weight[: len(strings)].float()  # (vocabulary, d_model)
    unembedding = unembedding - reduce(unembedding, "token d_model -> d_model", "mean")
    unembedding = unembedding * final_norm_weight(model, sae.d_model)
    n = min(n, len(unembedding))
    columns: dict[str, list[list[object]]] = {
        name: [] for name in ("promotes", "promotes_by", "suppresses", "suppresses_by")
    }
    for block in sae.W_dec.float().to(unembedding.device).split(max(1, _CHUNK // len(unembedding))):
        effect = einsum(block, unembedding, "feature d_model, token d_model -> feature token")
        for side, sign in (("promotes", 1), ("suppresses", -1)):
            values, ids = (sign * effect).topk(n, dim=1)
            kept = [(r, v[: sum(x > 0 for x in v)]) for r, v in zip(ids.tolist(), values.tolist(), strict=True)]
            columns[side] += [[strings[i] for i in row[: len(found)]] for row, found in kept]
            columns[f"{side}_by"] += [[sign * x for x in found] for _, found in kept]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(sae.W_dec), name="feature"))


def final_norm_weight(model: PreTrainedModel, d_model: int) -> torch.Tensor:
    """(d_model,) weight of the final norm; ones where the model has none.

    It is measured on a vector of ±1 with mean 0, to which a norm only applies its weight and bias.
    """
    blocks = decoder_blocks(model)
    owner = next(m for m in model.modules() if any(child is blocks for child in m.children()))
    norms = [m for m in owner.children() if "norm" in type(m).__name__.lower()]
    if not norms:
        return torch.ones(d_model)
    weight = next(norms[-1].parameters(), torch.ones(d_model))
    signs = torch.ones(d_model, device=weight.device, dtype=weight.dtype)
    signs[1::2] = -1
    return ((norms[-1](signs) - norms[-1](-signs)) / 2 * signs).float()
