"""The influence of training samples on features, without forming the gradient of any single sample.

A step of plain SGD with learning rate η on the policy-gradient loss of a batch moves the weights by η Σ_i g_i, with

    g_i = w_i A_i Σ_t ∇ log π(y_it)            w_i by the loss's normalisation, over the response tokens of sample i

It moves a feature's mean F by η Σ_i ⟨∇F, g_i⟩ + O(η²). The influence of sample i on the feature is ⟨∇F, g_i⟩: the
change of its mean per unit of learning rate. F is the mean of the feature's activation f(τ) on response tokens, over
fixed trajectories τ in which problems count alike. It depends on the weights in two ways, so ∇F has two parts:

    representation   E_τ[∇f(τ)]               the model reads the same trajectories differently
    policy           E_τ[f(τ) ∇ log π(τ)]     the model writes other trajectories (the score function; subtracting
                                              the mean f of the problem's other responses leaves it unbiased)

1. Read the fixed trajectories once: activations, active codes, f(τ).
2. For every feature, backward passes over the trajectories give both parts of ∇F.
3. For every feature and part, one pass of forward differentiation over the samples along ∇F gives its inner product
   with the ∇ log π of every sample at once.

Which codes are active is held fixed, as differentiation does. A step can switch a code on or off at the SAE's
threshold: no derivative sees that jump. Measured representation shifts scatter around the prediction for this reason
(docs/measured.md), the less the more tokens they are averaged over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.attribution.config import InfluenceConfig
from tsae.attribution.sample_gradients import Batch, TrainedWeights, padded, slopes_along
from tsae.attribution.targets import summed_gradients
from tsae.base import display
from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import need_features, need_names, several, strongest
from tsae.base.progress import progress_bar
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.checkpoints.hooks import positions, rewritten
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.sites import check_sites
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        checkpoint: a whole model (no adapter); small, as its gradient is held several times in memory.
        rollouts: the batch of training samples, with advantages; taken as sampled by the checkpoint itself.
        sae: or its folder; its site is where the features live.
        features: indices.
        on: the checkpoint's trajectories over which features are averaged; by default the samples themselves.
        config: defaults of `InfluenceConfig`.
        progress: show a bar.

    Raises:
        TsaeError: for an adapter, missing advantages, a feature that the SAE lacks, an SAE of another width or site,
            another tokenizer, too long trajectories, fixed trajectories that another policy sampled, a problem with one
            response.
    """
    config, on = config or InfluenceConfig(), rollouts if on is None else on
    sae = TemporalSAE.of(sae, device=config.device)
    # Fused attention has no forward differentiation.
    model = ModelLoader(device=config.device, dtype=config.model_dtype, attention="eager").load(checkpoint)
    special = _check(checkpoint, model, sae, features, rollouts, on)
    score, problem = _score_weights(rollouts, config), pd.factorize(on.frame.problem_id)[0]
    size, used = np.bincount(problem), np.flatnonzero(score)
    weight = 1 / (size[problem] * len(size))  # (n,) of every fixed trajectory in the mean; problems count alike
    read = _Reader(TrainedWeights(model), sae, special, config.temperature)
    fixed = [*padded(on, np.arange(len(on)), config.batch_tokens, config.device)]
    means = read.feature_means(fixed, features)
    found = np.zeros((2, len(features), len(rollouts)))
    for j, feature in enumerate(progress_bar("influence", "feature", over=features, shown=progress)):
        others = means[:, j] - (np.bincount(problem, weights=means[:, j]) / size)[problem]
        by = weight, weight * others * (size / (size - 1))[problem]
        gradients = summed_gradients(read.trained, partial(read.summands, feature, by), iter(fixed))
        for part, gradient in enumerate(gradients):
            for batch in padded(rollouts, used, config.batch_tokens, config.device):
                along = slopes_along(read.trained, gradient, partial(read.log_likelihoods, batch))[1]
                found[part, j, batch[0]] = along.double().cpu().numpy() * score[batch[0]]
    frame = rollouts.frame[["problem_id", "policy", "band", "outcome", "advantage", "response_length"]]
    frame = frame.assign(trajectory=np.arange(len(rollouts)))[["trajectory", *frame.columns]]
    parts = zip(features, *found, strict=True)
    table = pd.concat([frame.assign(feature=f, representation=r, policy_part=p, total=r + p) for f, r, p in parts])
    if len(wrong := table[~np.isfinite(table.total)]):
        row = wrong.iloc[0]
        what = f"the influence of trajectory {row.trajectory} on feature {row.feature} is not finite"
        fix = "Check that checkpoint's weights, or compute in another precision (model_dtype)."
        raise TsaeError(what, where=checkpoint.path, fix=fix)
    return Influence(
        table.reset_index(drop=True),
        {
            "config": asdict(config),
            "checkpoint": checkpoint.id,
            "sae": sae.fingerprint,
            "rollouts": rollouts.fingerprint,
            "on": on.fingerprint,
            "means": {str(f): float(weight @ means[:, j]) for j, f in enumerate(features)},
        },
    )


def _check(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    sae: TemporalSAE,
    features: Sequence[int],
    rollouts: Rollouts,
    on: Rollouts,
) -> list[int]:
    """Check that everything fits together, and return the special token ids of the checkpoint's tokenizer."""
    folder, config = folder_of(checkpoint), model.config.get_text_config()
    adapter, wrong = not is_gguf(folder) and is_adapter(folder), sae.d_model != config.hidden_size
    widths = f"the SAE has d_model {sae.d_model}, the model {config.hidden_size}"
    refuse(
        checkpoint.path,
        (adapter, "is an adapter", "Merge it into its base: influence is of all weights."),
        (wrong, widths, "Give the SAE that was trained on this model's activations."),
    )
    check_sites([sae.site], config.num_hidden_layers, checkpoint.path)
    need_features(features, sae.config.d_sae, "features")
    odd = not len(features) or len(set(features)) < len(features)
    refuse("features", (odd, "none, or one twice", "Give indices of features, each once."))
    for given in (rollouts, on):
        tokenizer = check_tokenizer(checkpoint, given)
        check_context(given, getattr(config, "max_position_embeddings", None), config.vocab_size)
    other = next((policy for policy in on.policies if policy != checkpoint.id), None)
    foreign = f"{other} sampled some of the fixed trajectories; the policy part is that of {checkpoint.id}"
    n_alone = (on.frame.problem_id.value_counts() < 2).sum()
    alone = f"{n_alone} problems have one response, which leaves the policy part without a baseline"
    fix = "Give trajectories of this checkpoint, several a problem (on=…)."
    refuse(on.origin, (other is not None, foreign, fix), (n_alone, alone, fix))
    return list(tokenizer.all_special_ids)


def _score_weights(rollouts: Rollouts, config: InfluenceConfig) -> np.ndarray:
    """(n,) what multiplies Σ_t ∇ log π of every sample in the step of the whole batch."""
    advantages = rollouts.frame.advantage.to_numpy(dtype=float)
    missing = ~np.isfinite(advantages)
    what = f"{missing.sum()} of {len(advantages)} trajectories have no advantage (first: row {missing.argmax()})"
    fix = "Set advantages from rewards (Rollouts.with_advantages), or drop these rows."
    nothing = "all advantages are 0, so that no sample pushes anything"
    refuse(rollouts.origin, (missing.any(), what, fix), (not advantages.any(), nothing, fix))
    if config.loss_type == "dapo":
        return advantages / rollouts.n_sampled.sum()
    # InfluenceConfig demands a length for dr_grpo, and only there.
    return advantages / ((config.max_completion_length or rollouts.n_sampled) * len(rollouts))


@dataclass(frozen=True)
class Influence(Tables):
    """The first-order influence of every training sample on every chosen feature."""

    table: pd.DataFrame
    """One row a trajectory and feature:

    trajectory      row of the training samples
    problem_id, policy, band, outcome, advantage, response_length
    feature         index
    representation, policy_part, total  change of the feature's mean activation per unit of learning rate
    """
    info: dict[str, Any] = field(default_factory=dict)
    """config, checkpoint, sae, rollouts, and per feature its mean over the fixed trajectories."""

    def __repr__(self) -> str:
        n, m = self.table.trajectory.nunique(), self.table.feature.nunique()
        return f"Influence({n:,} samples on {m:,} features of {self.info['checkpoint']})"

    def _repr_html_(self) -> str:
        facts = {"samples": self.table.trajectory.nunique(), "checkpoint": self.info["checkpoint"]}
        caption = "change of the feature's mean activation per unit of learning rate, summed over samples"
        return display.card("Influence", facts, (caption, self.by("band", "outcome")))

    def by(self, *columns: str) -> pd.DataFrame:
        """Sums over the samples of every feature and value of the columns, such as band and outcome."""
        need_names("column", columns, self.table.columns, "Influence.by")
        keys = ["feature", *columns]
        sums = self.table.groupby(keys, dropna=False, sort=True)
        found = sums[["representation", "policy_part", "total"]].sum()
        found["n_samples"] = sums.trajectory.nunique()
        return found.reset_index()

    def top(self, feature: int | Sequence[int], n: int = 10) -> pd.DataFrame:
        """The n samples with the largest |total| on a feature, or on one of several."""
        need_names("feature", several(feature), self.table.feature, "Influence.top")
        return strongest(self.table[self.table.feature.isin(several(feature))], "total", n)

    def save(self, folder: str | Path) -> Path:
        """Write influence.parquet, and influence.json last."""
        return write_artefact(folder, INFLUENCE, self.info, table_files({"influence": self.table}))

    @classmethod
    def load(cls, folder: str | Path) -> Influence:
        """Read a folder that `save` wrote."""
        info, tables = read_tables(as_path(folder), INFLUENCE, ["influence"])
        return cls(tables["influence"], info)


INFLUENCE = Kind("influence", 1, "influence.json", "Make it with `tsae influence`.", Influence.load)


@dataclass(frozen=True)
class _Reader:
    """The model and its SAE, as functions of the weights."""

    trained: TrainedWeights
    sae: TemporalSAE
    special: list[int]
    """Token ids that count in no mean."""
    temperature: float

    def __call__(self, batch: Batch, weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """((B,) Σ_t log π of the response tokens, (B, T, d_model) activations at the site)."""
        _, ids, mask, response = batch
        found: list[torch.Tensor] = []

        def keep(x: torch.Tensor) -> torch.Tensor:
            found.append(x)
            return x

        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
        with rewritten(self.trained.model, self.sae.site, keep):
            logits = torch.func.functional_call(self.trained.model, dict(weights), kwargs=inputs).logits
        log = torch.log_softmax(logits[:, :-1].to(found[0].dtype) / self.temperature, dim=-1)  # (B, T − 1, vocabulary)
        chosen = log.gather(-1, ids[:, 1:, None])[..., 0]
        return (chosen * response[:, 1:]).sum(1), found[0]

    def log_likelihoods(self, batch: Batch, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B,) Σ_t log π of the response tokens."""
        return self(batch, weights)[0]

    def means(self, batch: Batch, x: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
        """(B, n_features) mean activation over the response, special tokens and outliers aside; differentiable in x."""
        _, ids, _, response = batch
        columns = torch.as_tensor(list(features), device=x.device)
        x = x.to(self.sae.W_enc.dtype)
        codes = self.sae.encode(x.detach())[..., columns]
        # A code is its pre-activation where it is active, and 0 elsewhere: this gives every architecture's gradient.
        shifted, scale = self.sae.encoder_input(x)
        linear = (shifted @ self.sae.W_enc[:, columns].detach() + self.sae.b_enc[columns].detach()) * scale
        codes = codes + (codes > 0) * (linear - linear.detach())
        counted = response & ~torch.isin(ids, torch.as_tensor(self.special, device=ids.device))
        counted = counted & ~self.sae.outliers(x.detach())
        total = (codes * counted[..., None]).sum(1)
        return total / counted.sum(1).clamp_min(1)[:, None]

    @torch.no_grad()
    def feature_means(self, fixed: Sequence[Batch], features: Sequence[int]) -> np.ndarray:
        """(n_trajectories, n_features)."""
        means = np.zeros((sum(len(batch[0]) for batch in fixed), len(features)))
        for batch in fixed:
            x = self(batch, self.trained.parameters)[1]
            means[batch[0]] = self.means(batch, x, features).double().cpu().numpy()
        return means

    def summands(
        self, feature: int, by: Sequence[np.ndarray], trained: TrainedWeights, batch: Batch
    ) -> list[torch.Tensor]:
        """What the batch adds to two sums whose gradients are the parts of ∇F; `by` has the weights of trajectories."""
        log, x = self(batch, trained.parameters)
        values = self.means(batch, x, [feature])[:, 0], log
        return [value @ torch.as_tensor(weight[batch[0]]).to(value) for value, weight in zip(values, by, strict=True)]
