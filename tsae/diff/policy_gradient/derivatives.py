"""The model as a function of its weights, and the derivatives that influence is made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch.autograd import forward_ad

from tsae.activations.forward_batches import plan_batches
from tsae.checkpoints.hooks import Site, decoder_blocks, positions
from tsae.checkpoints.loading import Checkpoint
from tsae.diff.config import InfluenceConfig
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        if with_policy:
            fix = (
                'Give trajectories of this checkpoint, several a problem (on=…), or ask for parts ("representation",).'
            )
            others = [policy for policy in rollouts.policies if policy != checkpoint.id]
            if others:
                what = f"{others[0]} sampled some of the fixed trajectories; the policy part is that of {checkpoint.id}"
                raise TsaeError(what, where=rollouts.origin, fix=fix)
            if size.min() < 2:
                what = f"{(size < 2).sum()} problems have one response, which leaves the policy part without a baseline"
                raise TsaeError(what, where=rollouts.origin, fix=fix)
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
        width = int((prompt + response)[batch].max())
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask, is_response = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for i, t in enumerate(batch):
            text = np.concatenate(rollouts.tokens(int(rows[t])))
            ids[i, : len(text)] = torch.from_numpy(text.astype(np.int64))
            mask[i, : len(text)] = 1
            is_response[i, prompt[t] : len(text)] = torch.from_numpy(rollouts.sampled(int(rows[t])))
        yield rows[batch], ids.to(device), mask.to(device), is_response.to(device)


class Forward:
    """The model as a function of its weights."""

    def __init__(self, model: PreTrainedModel, sae: TemporalSAE, temperature: float) -> None:
        self.model, self.sae, self.temperature = model, sae, temperature
        site = Site.parse(sae.site)
        self.block, self.after = decoder_blocks(model)[site.layer], site.point == "post"

    def __call__(
        self, weights: Weights, ids: torch.Tensor, mask: torch.Tensor, response: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """((B,) Σ_t log π of the response tokens, (B, T, d_model) activations at the site)."""
        found: list[torch.Tensor] = []

        def keep(value: Any) -> None:
            found.append(value[0] if isinstance(value, tuple) else value)

        if self.after:
            handle = self.block.register_forward_hook(lambda _m, _i, out: keep(out))
        else:
            handle = self.block.register_forward_pre_hook(
                lambda _m, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
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
