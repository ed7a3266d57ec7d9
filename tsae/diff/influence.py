"""Influence: which training samples push a feature, to first order and exactly.

A step of plain SGD with learning rate η on the policy-gradient loss of a batch moves the weights by η Σ_i g_i, with

    g_i = w_i A_i Σ_t ∇ log π(y_it)            w_i by the loss's normalisation, over the response tokens of sample i,

so that it moves a feature's mean F by η Σ_i ⟨∇F, g_i⟩ + O(η²). The influence of sample i on the feature is ⟨∇F, g_i⟩:
the change of its mean per unit of learning rate. F is a mean over fixed trajectories τ, problems counting alike, of
the feature's mean activation f(τ) over response tokens. It depends on the weights in two ways, and ∇F has two parts:

    representation   E_τ[∇f(τ)]               the model reads the same trajectories differently
    policy           E_τ[f(τ) ∇ log π(τ)]     it comes to write others (the score function; f has the mean of the
                                              problem's other responses taken off, which leaves it unbiased)

1. Read the trajectories once: activations, active codes, f(τ).
2. For every feature and part one pass of backpropagation over the trajectories: ∇F.
3. For every feature and part one pass of forward differentiation over the samples along ∇F: its inner product with
   every sample's ∇ log π at once. No gradient of a single sample is ever formed.

Which codes are active is held fixed, as differentiation does. A code that a step switches on or off at the SAE's
threshold jumps, which no derivative sees: measured representation shifts scatter around the prediction by that
(docs/measured.md), the less the more tokens they are averaged over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tsae.base.files import write_json
from tsae.base.filters import several
from tsae.base.views import views
from tsae.checkpoints.files import folder_of, is_adapter, is_gguf
from tsae.checkpoints.loading import ModelLoader, load_tokenizer, tokenizer_fingerprint
from tsae.checkpoints.series import Checkpoint
from tsae.diff.config import InfluenceConfig
from tsae.diff.derivatives import Fixed, Forward, padded
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tsae.sae.model import TemporalSAE

PARTS = ("representation", "policy")


@dataclass(frozen=True)
class Influence:
    """The first-order influence of every training sample on every chosen feature."""

    table: pd.DataFrame
    """One row a trajectory and feature:

    trajectory      row of the training samples
    problem_id, policy, band, outcome, advantage, response_length
    feature         index
    representation, policy_part, total: change of the feature's mean activation per unit of learning rate
    """
    info: dict[str, Any] = field(default_factory=dict)
    """config, checkpoint, sae, rollouts, and per feature its mean over the fixed trajectories."""

    def __repr__(self) -> str:
        n, m = self.table.trajectory.nunique(), self.table.feature.nunique()
        return f"Influence({n:,} samples on {m:,} features of {self.info['checkpoint']})"

    def _repr_html_(self) -> str:
        facts = {"samples": self.table.trajectory.nunique(), "checkpoint": self.info["checkpoint"]}
        caption = "change of the feature's mean activation per unit of learning rate, summed over samples"
        return views().card("Influence", facts, (caption, self.by("band", "outcome")))

    def by(self, *columns: str) -> pd.DataFrame:
        """Sums over the samples of every feature and value of the columns, such as band and outcome."""
        unknown = [name for name in columns if name not in self.table.columns]
        if unknown:
            raise TsaeError(f"no column {unknown[0]!r}", where="Influence.by", fix=", ".join(self.table.columns))
        keys = ["feature", *columns]
        sums = self.table.groupby(keys, dropna=False, sort=True)
        found = sums[["representation", "policy_part", "total"]].sum()
        found["n_samples"] = sums.trajectory.nunique()
        return found.reset_index()

    def top(self, feature: int | Sequence[int], n: int = 10) -> pd.DataFrame:
        """The n samples with the largest |total| on a feature, or on one of several."""
        for one in several(feature):
            if not (self.table.feature == one).any():
                raise TsaeError(f"feature {one} was not asked for", where="Influence.top")
        found = self.table[self.table.feature.isin(several(feature))]
        order = found.total.abs().sort_values(ascending=False, kind="stable").index
        return found.loc[order].head(n).reset_index(drop=True)

    def save(self, folder: str | Path) -> Path:
        """Write influence.parquet and influence.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.table.to_parquet(folder / "influence.parquet", index=False)
        write_json(folder / "influence.json", self.info)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Influence:
        """Read a folder that `save` wrote."""
        folder = Path(folder)
        for name in ("influence.json", "influence.parquet"):
            if not (folder / name).is_file():
                raise TsaeError(f"holds no {name}", where=folder, fix="Make it with `tsae influence`.")
        info = json.loads((folder / "influence.json").read_text(encoding="utf-8"))
        return cls(pd.read_parquet(folder / "influence.parquet"), info)


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
    """First-order influence of training samples on the means of features, at a checkpoint's weights.

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
    import torch
    from tqdm.auto import tqdm

    from tsae.sae.model import TemporalSAE

    config, on = config or InfluenceConfig(), rollouts if on is None else on
    sae = sae if isinstance(sae, TemporalSAE) else TemporalSAE.load(sae)
    # Forward differentiation knows no fused attention.
    model = ModelLoader(device=config.device, dtype=config.model_dtype, attention="eager").load(checkpoint)
    special = _check(checkpoint, model, sae, features, (rollouts, on))
    advantages = _advantages(rollouts)
    targets = Fixed.of(on, special, checkpoint, config)
    score = _score_weights(rollouts, advantages, config)
    columns = torch.as_tensor(list(features), device=config.device)
    forward = Forward(model, sae.to(config.device), config.temperature)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    means = forward.feature_means(weights, targets, columns, config)  # (n_trajectories, n_features)
    found = {part: np.zeros((len(rollouts), len(features))) for part in PARTS}
    used = np.flatnonzero(score)
    with tqdm(total=len(features), desc="influence", unit="feature", disable=not progress) as bar:
        for j in range(len(features)):
            gradients = forward.gradients(weights, targets, columns[j : j + 1], targets.score(means[:, j]), config)
            for part, gradient in gradients.items():
                for rows, ids, mask, response in padded(rollouts, used, config):
                    along = forward.score_along(weights, gradient, ids, mask, response)
                    found[part][rows, j] = along.double().cpu().numpy() * score[rows]
            bar.update()
    frame = rollouts.frame[["problem_id", "policy", "band", "outcome", "advantage", "response_length"]]
    table = pd.concat(
        [
            frame.assign(
                feature=feature, representation=found["representation"][:, j], policy_part=found["policy"][:, j]
            )
            for j, feature in enumerate(features)
        ]
    )
    table.insert(0, "trajectory", np.tile(np.arange(len(rollouts)), len(features)))
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
    """Special token ids of the checkpoint's tokenizer, once everything fits together."""
    from tsae.activations.reader.assignment import check_context, check_tokenizer
    from tsae.checkpoints.hooks import check_sites

    folder = folder_of(checkpoint)
    if not is_gguf(folder) and is_adapter(folder):
        raise TsaeError(
            "is an adapter", where=checkpoint.path, fix="Merge it into its base: influence is of all weights."
        )
    config = model.config.get_text_config()
    check_sites([sae.site], config.num_hidden_layers, checkpoint.path)
    if sae.d_model != config.hidden_size:
        raise TsaeError(
            f"the SAE has d_model {sae.d_model}, the model {config.hidden_size}",
            where=checkpoint.path,
            fix="Give the SAE that was trained on this model's activations.",
        )
    wrong = [f for f in features if not 0 <= f < sae.config.d_sae]
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
        check_tokenizer(checkpoint, tokenizer_fingerprint(tokenizer), given)
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
    lengths, n = rollouts.n_sampled, len(rollouts)
    if config.loss_type == "grpo":
        return advantages / (lengths * n)
    if config.loss_type == "dapo":
        return advantages / lengths.sum()
    assert config.max_completion_length is not None  # InfluenceConfig has checked it.
    return advantages / (config.max_completion_length * n)
