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
2. For every feature and part, one backward pass over the trajectories gives ∇F.
3. For every feature and part, one pass of forward differentiation over the samples along ∇F gives its inner product
   with the ∇ log π of every sample at once.

Which codes are active is held fixed, as differentiation does. A step can switch a code on or off at the SAE's
threshold: no derivative sees that jump. Measured representation shifts scatter around the prediction for this reason
(docs/measured.md), the less the more tokens they are averaged over.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch.autograd import forward_ad

from tsae.activations.forward_batches import pad, plan_batches
from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.base import display
from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import need_features, several, strongest
from tsae.base.progress import progress_bar
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.checkpoints.hooks import attach, decoder_blocks, positions
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.sites import Site, check_sites
from tsae.checkpoints.tokenizers import load_tokenizer
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf
from tsae.diff.config import InfluenceConfig
from tsae.errors import TsaeError, refuse
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
    targets, score = Fixed.of(on, special, checkpoint, config), _score_weights(rollouts, config)
    columns = torch.as_tensor(list(features), device=config.device)
    forward = Forward(model, sae, config.temperature)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    means = forward.feature_means(weights, targets, columns, config)  # (n_trajectories, n_features)
    found = {part: np.zeros((len(rollouts), len(features))) for part in PARTS}
    used = np.flatnonzero(score)
    with progress_bar("influence", "feature", len(features), shown=progress) as bar:
        for j in range(len(features)):
            gradients = forward.gradients(weights, targets, columns[j : j + 1], targets.score(means[:, j]), config)
            for part, gradient in gradients.items():
                for rows, ids, mask, response in padded(rollouts, used, config.batch_tokens, config.device):
                    along = forward.score_along(weights, gradient, ids, mask, response)
                    found[part][rows, j] = along.double().cpu().numpy() * score[rows]
            bar.update()
    frame = rollouts.frame[["problem_id", "policy", "band", "outcome", "advantage", "response_length"]]
    frame = frame.assign(trajectory=np.arange(len(rollouts)))[["trajectory", *frame.columns]]
    columns_of = [{"representation": r, "policy_part": p} for r, p in zip(*(x.T for x in found.values()), strict=True)]
    table = pd.concat([frame.assign(feature=f, **parts) for f, parts in zip(features, columns_of, strict=True)])
    table["total"] = table.representation + table.policy_part
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
    tokenizer = load_tokenizer(checkpoint)
    for given in rollouts:
        check_tokenizer(checkpoint, given, tokenizer)
        check_context(given, getattr(config, "max_position_embeddings", None), config.vocab_size)
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


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fixed:
    """The trajectories over which features are averaged."""

    rollouts: Rollouts
    weight: np.ndarray
    """(n,) of every trajectory in the mean; problems count alike."""
    problem: np.ndarray
    special: list[int]
    with_policy: bool

    @classmethod
    def of(cls, rollouts: Rollouts, special: list[int], checkpoint: Checkpoint, config: InfluenceConfig) -> Fixed:
        problem = pd.factorize(rollouts.frame.problem_id)[0]
        size = np.bincount(problem)
        with_policy = "policy" in config.parts
        fix = 'Give trajectories of this checkpoint, several a problem (on=…), or ask for parts ("representation",).'
        other = next((policy for policy in rollouts.policies if policy != checkpoint.id), None)
        foreign = f"{other} sampled some of the fixed trajectories; the policy part is that of {checkpoint.id}"
        alone = f"{(size < 2).sum()} problems have one response, which leaves the policy part without a baseline"
        if with_policy:
            refuse(rollouts.origin, (other is not None, foreign, fix), (size.min() < 2, alone, fix))
        return cls(rollouts, 1 / (size[problem] * len(size)), problem, special, with_policy)

    def score(self, values: np.ndarray) -> np.ndarray:
        """(n,) weight of ∇ log π of every trajectory: its value against the mean of the problem's others."""
        if not self.with_policy:
            return np.zeros(len(values))
        size = np.bincount(self.problem)
        centred = values - (np.bincount(self.problem, weights=values) / size)[self.problem]
        weighted: np.ndarray = self.weight * centred * (size / np.maximum(size - 1, 1))[self.problem]
        return weighted


def padded(
    rollouts: Rollouts, rows: np.ndarray, batch_tokens: int, device: str
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(rows, ids, attention mask, response mask) of right-padded batches of similar length; (B, T) tensors.

    The response mask leaves out tokens that the policy did not sample.
    """
    prompt, response = rollouts.lengths("prompt_ids")[rows], rollouts.lengths("response_ids")[rows]
    for batch in plan_batches(prompt + response, batch_tokens):
        ids, mask = pad([np.concatenate(rollouts.tokens(int(row))) for row in rows[batch]])
        is_response = torch.zeros_like(ids, dtype=torch.bool)
        for i, t in enumerate(batch):
            is_response[i, prompt[t] : prompt[t] + response[t]] = torch.from_numpy(rollouts.sampled(int(rows[t])))
        yield rows[batch], *(part.to(device) for part in (ids, mask, is_response))


class Forward:
    """The model as a function of its weights."""

    def __init__(self, model: PreTrainedModel, sae: TemporalSAE, temperature: float) -> None:
        self.model, self.sae, self.temperature = model, sae, temperature
        self.blocks, self.site = decoder_blocks(model), Site.parse(sae.site)

    def __call__(
        self, weights: Weights, ids: torch.Tensor, mask: torch.Tensor, response: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """((B,) Σ_t log π of the response tokens, (B, T, d_model) activations at the site)."""
        found: list[torch.Tensor] = []
        handle = attach(self.blocks, self.site, found.append)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
        try:
            logits = torch.func.functional_call(self.model, weights, kwargs=inputs).logits
        finally:
            handle.remove()
        log = torch.log_softmax(logits[:, :-1].to(found[0].dtype) / self.temperature, dim=-1)  # (B, T − 1, vocabulary)
        chosen = log.gather(-1, ids[:, 1:, None])[..., 0]
        return (chosen * response[:, 1:]).sum(1), found[0]

    def _means(
        self, x: torch.Tensor, ids: torch.Tensor, response: torch.Tensor, columns: torch.Tensor, special: list[int]
    ) -> torch.Tensor:
        """(B, n_features) mean activation over the response, special tokens and outliers aside; differentiable in x."""
        x = x.to(self.sae.W_enc.dtype)
        codes = self.sae.encode(x.detach())[..., columns]
        # A code is its pre-activation where it is active, and 0 elsewhere: this gives every architecture's gradient.
        shifted, scale = self.sae.encoder_input(x)
        linear = (shifted @ self.sae.W_enc[:, columns].detach() + self.sae.b_enc[columns].detach()) * scale
        codes = codes + (codes > 0) * (linear - linear.detach())
        counted = response & ~torch.isin(ids, torch.as_tensor(special, device=ids.device))
        counted = counted & ~self.sae.outliers(x.detach())
        total = (codes * counted[..., None]).sum(1)
        return total / counted.sum(1).clamp_min(1)[:, None]

    def feature_means(
        self, weights: Weights, fixed: Fixed, columns: torch.Tensor, config: InfluenceConfig
    ) -> np.ndarray:
        """(n_trajectories, n_features)."""
        means = np.zeros((len(fixed.rollouts), len(columns)))
        with torch.no_grad():
            for rows, ids, mask, response in padded(
                fixed.rollouts, np.arange(len(means)), config.batch_tokens, config.device
            ):
                _, x = self(weights, ids, mask, response)
                means[rows] = self._means(x, ids, response, columns, fixed.special).double().cpu().numpy()
        return means

    def gradients(
        self, weights: Weights, fixed: Fixed, column: torch.Tensor, score: np.ndarray, config: InfluenceConfig
    ) -> dict[str, Weights]:
        """∇F of one feature, by the parts that are asked for."""
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        found: dict[str, Weights] = {
            part: {name: torch.zeros_like(w) for name, w in weights.items()} for part in config.parts
        }
        for rows, ids, mask, response in padded(
            fixed.rollouts, np.arange(len(score)), config.batch_tokens, config.device
        ):
            log, x = self(leaves, ids, mask, response)
            means = self._means(x, ids, response, column, fixed.special)[:, 0]
            for part, values, by in (("representation", means, fixed.weight), ("policy", log, score)):
                if part in found and np.any(by[rows]):
                    loss = values @ torch.as_tensor(by[rows], dtype=values.dtype, device=values.device)
                    if loss.requires_grad:
                        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
                        for total, grad in zip(found[part].values(), grads, strict=True):
                            if grad is not None:
                                total += grad
        return found

    def score_along(
        self, weights: Weights, direction: Weights, ids: torch.Tensor, mask: torch.Tensor, response: torch.Tensor
    ) -> torch.Tensor:
        """(B,) ⟨direction, Σ_t ∇ log π⟩ of every trajectory."""

        with warnings.catch_warnings(), forward_ad.dual_level():
            # Forward differentiation in torch uses scripts that torch itself deprecates.
            warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
            # Not torch.func.jvp, in which LongRoPE cannot choose its factors.
            moved = {name: forward_ad.make_dual(weight, direction[name]) for name, weight in weights.items()}
            found = forward_ad.unpack_dual(self(moved, ids, mask, response)[0])
            return torch.zeros_like(found.primal) if found.tangent is None else found.tangent
