"""Measure the influence of training samples on features, without forming the gradient of any single sample.

1. Read the fixed trajectories once: activations, active codes, f(τ).
2. For every feature and part, one backward pass over the trajectories gives ∇F.
3. For every feature and part, one pass of forward differentiation over the samples along ∇F gives its inner product
   with the ∇ log π of every sample at once.

Which codes are active is held fixed, as differentiation does. A step can switch a code on or off at the SAE's
threshold: no derivative sees that jump. Measured representation shifts scatter around the prediction for this reason
(docs/measured.md), the less the more tokens they are averaged over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.checkpoints.hooks import check_sites
from tsae.checkpoints.loading import Checkpoint, ModelLoader, load_tokenizer
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf
from tsae.diff.config import InfluenceConfig
from tsae.diff.policy_gradient.derivatives import Fixed, Forward, padded
from tsae.diff.policy_gradient.influence import Influence
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = ("representation", "policy")


def influence(
    checkpoint: Checkpoint,
    rollouts: Rollouts,
    sae: TemporalSAE | str | Path,
    features: Sequence[int],
    *,
    on: Rollouts | None = None,
    config: InfluenceConfig | None = None,
    progress: bool = True,
) -> Influence:
    """Measure the first-order influence of training samples on the means of features, at a checkpoint's weights.

    Args:
        checkpoint: a whole model (no adapter); small, as its gradient is held twice in memory.
        rollouts: the batch of training samples, with advantages; taken as sampled by the checkpoint itself.
        sae: or its folder; its site is where the features live.
        features: indices.
        on: the fixed trajectories over which features are averaged; by default the samples themselves.
        config: defaults of `InfluenceConfig`.
        progress: show a bar.

    Raises:
        TsaeError: for an adapter, missing advantages, a feature that the SAE lacks, an SAE of another width or site,
            another tokenizer, too long trajectories; for the policy part also fixed trajectories that another policy
            sampled, or a problem with one response.
    """
    config, on = config or InfluenceConfig(), rollouts if on is None else on
    sae = TemporalSAE.of(sae, device=config.device)
    # Fused attention has no forward differentiation.
    model = ModelLoader(device=config.device, dtype=config.model_dtype, attention="eager").load(checkpoint)
    special = _check(checkpoint, model, sae, features, (rollouts, on))
    advantages = _advantages(rollouts)
    targets = Fixed.of(on, special, checkpoint, config)
    score = _score_weights(rollouts, advantages, config)
    columns = torch.as_tensor(list(features), device=config.device)
    forward = Forward(model, sae, config.temperature)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    means = forward.feature_means(weights, targets, columns, config)  # (n_trajectories, n_features)
    found = {part: np.zeros((len(rollouts), len(features))) for part in PARTS}
    used = np.flatnonzero(score)
    with tqdm(total=len(features), desc="influence", unit="feature", disable=not progress) as bar:
        for j in range(len(features)):
            gradients = forward.gradients(weights, targets, columns[j : j + 1], targets.score(means[:, j]), config)
            for part, gradient in gradients.items():
                for rows, ids, mask, response in padded(rollouts, used, config.batch_tokens, config.device):
                    along = forward.score_along(weights, gradient, ids, mask, response)
                    found[part][rows, j] = along.double().cpu().numpy() * score[rows]
            bar.update()
    for part, values in found.items():
        if not np.isfinite(values).all():
            row, j = np.argwhere(~np.isfinite(values))[0]
            raise TsaeError(
                f"the {part} influence of trajectory {row} on feature {features[j]} is not finite",
                where=checkpoint.path,
                fix="Check that checkpoint's weights, or compute in another precision (model_dtype).",
            )
    frame = rollouts.frame[["problem_id", "policy", "band", "outcome", "advantage", "response_length"]]
    frame = frame.assign(trajectory=np.arange(len(rollouts)))[["trajectory", *frame.columns]]
    columns_of = [{"representation": r, "policy_part": p} for r, p in zip(*(x.T for x in found.values()), strict=True)]
    table = pd.concat([frame.assign(feature=f, **parts) for f, parts in zip(features, columns_of, strict=True)])
    table["total"] = table.representation + table.policy_part
    return Influence(
        table.reset_index(drop=True),
        {
            "config": asdict(config),
            "checkpoint": checkpoint.id,
            "sae": sae.fingerprint,
            "rollouts": rollouts.fingerprint,
            "on": on.fingerprint,
            "means": {str(f): float(targets.weight @ means[:, j]) for j, f in enumerate(features)},
        },
    )


def _check(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    sae: TemporalSAE,
    features: Sequence[int],
    rollouts: tuple[Rollouts, Rollouts],
) -> list[int]:
    """Check that everything fits together, and return the special token ids of the checkpoint's tokenizer."""
    folder = folder_of(checkpoint)
    if not is_gguf(folder) and is_adapter(folder):
        raise TsaeError(
            "is an adapter", where=checkpoint.path, fix="Merge it into its base: influence is of all weights."
        )
    config = model.config.get_text_config()
    check_sites([sae.site], config.num_hidden_layers, checkpoint.path)
    if sae.d_model != config.hidden_size:
        what = f"the SAE has d_model {sae.d_model}, the model {config.hidden_size}"
        raise TsaeError(what, where=checkpoint.path, fix="Give the SAE that was trained on this model's activations.")
    wrong = [f for f in features if not isinstance(f, SupportsIndex) or not 0 <= int(f) < sae.config.d_sae]
    if wrong or not len(features) or len(set(features)) < len(features):
        raise TsaeError(
            f"no feature {wrong[0]}; there are 0 to {sae.config.d_sae - 1}"
            if wrong
            else "features are none, or repeated",
            where="features",
            fix="Give indices of features, each once.",
        )
    tokenizer = load_tokenizer(checkpoint)
    for given in rollouts:
        check_tokenizer(checkpoint, given, tokenizer)
        check_context(given, getattr(config, "max_position_embeddings", None), config.vocab_size)
    return list(tokenizer.all_special_ids)


def _advantages(rollouts: Rollouts) -> np.ndarray:
    advantages = rollouts.frame.advantage.to_numpy(dtype=float)
    missing = ~np.isfinite(advantages)
    if missing.any():
        raise TsaeError(
            f"{missing.sum()} of {len(advantages)} trajectories have no advantage (first: row {missing.argmax()})",
            where=rollouts.origin,
            fix="Set advantages from rewards (Rollouts.with_advantages), or drop these rows.",
        )
    if not advantages.any():
        raise TsaeError("all advantages are 0, so that no sample pushes anything", where=rollouts.origin)
    return advantages


def _score_weights(rollouts: Rollouts, advantages: np.ndarray, config: InfluenceConfig) -> np.ndarray:
    """(n,) what multiplies Σ_t ∇ log π of every sample in the step of the whole batch."""
    if config.loss_type == "dapo":
        return advantages / rollouts.n_sampled.sum()
    # InfluenceConfig demands a length for dr_grpo, and only there.
    return advantages / ((config.max_completion_length or rollouts.n_sampled) * len(rollouts))
