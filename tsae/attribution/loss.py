"""The policy-gradient losses of GRPO and its relatives, as a sum over the tokens of samples.

    loss = Σ_i w_i Σ_t (policy_it + beta · kl_it)        over the tokens that the policy sampled

    clip:   policy_it = −min(ρ_it A_i, clip(ρ_it, 1 − ε, 1 + ε_high) A_i)      Schulman et al. 2017; Shao et al. 2024
    cispo:  −stop(min(ρ_it, ε_high)) A_i log π_it                              MiniMax 2025; Khatri et al. 2025
    sapo:   −4/τ sigmoid(τ (ρ_it − 1)) A_i                                     Gao et al. 2025; τ by sign of A_i
    vespo:  −stop(e^λ W_i^k e^(−λ W_i)) A_i log π_it, W_i = Π_t ρ_it           k, λ by sign of A_i
    mask:   −ρ_it A_i, or 0 where ρ_it − 1 is above ε_high or below −ε         prime-rl before 2026
    ipo:    the same where π_it − sampler_it is                                prime-rl
    dppo:   the same where it is above ε_high and A_i > 0, or below −ε and not prime-rl since 2026-04; arXiv 2602.04879

ρ_it is the probability of token t against its probability when it was sampled, or, for a loss of level `sequence`, the
geometric mean of a response's (GSPO; Zheng et al. 2025). A_i is the advantage. w_i is the normalisation: it belongs to
the whole step, so leaving a sample out takes its summands away and changes no other.

Formulas are those of TRL 1.16 where a trainer is not named. They agree with its code to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from tsae.base.validation import NotNegative, Positive, config
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from torch import Tensor

Again = Literal["on-policy", "replayed"]
"""How a run is imagined anew: with responses that its policy samples, or with those of the log."""

_OF_LENGTH = ("dr_grpo", "sum_norm")
_LARGEST = 3.0
"""Ratios are extrapolated, and far ones would rule."""


@config
class Correction:
    """Truncated importance sampling: weighs the policy term by how far the sampler and the trainer differ.

    The ratio is the probability by the trainer's own forward pass at the start of the generation against the one that
    the sampler (vLLM) logged.
    """

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"] = (
        "sequence_mask"
    )
    """Ratio of every token, or of the whole response (their product); truncate clips ratios, mask takes others as 0.
    geometric_mask: of every token, and 0 for responses whose geometric mean is outside (NeMo-RL: seq-mask-tis)."""
    low: float | None = None
    """Smallest ratio."""
    high: float | None = 3.0
    """Largest ratio. TRL's default is 3; open-instruct's is 2, by token."""


Estimator = Literal["k1", "abs", "k2", "k3"]
"""Of KL(π ‖ reference), by d = log π − log reference: d, |d|, d²/2, or e^(−d) + d − 1 (Schulman 2020)."""


def estimate_kl(kind: Estimator, apart: Tensor) -> Tensor:
    """Estimates of the KL divergence in nats, token by token, from log π − log reference."""
    if kind == "k3":
        return (-apart).exp() + apart - 1
    return apart if kind == "k1" else apart.abs() if kind == "abs" else apart**2 / 2


def _within(values: Tensor, size: float | None) -> Tensor:
    return values if size is None else values.clamp(-size, size)


@config
class RewardKL:
    """A KL penalty in the rewards, by the log-probabilities that the policy gave when it sampled."""

    beta: NotNegative
    """Weight of the divergence."""
    kl: Estimator = "k1"
    input_clamp: float | None = None
    """Largest size of d (verl's k3: 20)."""
    clamp: float | None = None
    """Largest size of the estimate (OpenRLHF, verl's k3: 10)."""
    to_go: bool = False
    """False: advantages are made of the reward less the divergence of the whole response (verl, ms-swift). True: of the
    reward alone, and every token is then charged with its own divergence and that of later tokens (OpenRLHF)."""

    def of(self, old: Tensor, ref: Tensor) -> Tensor:
        """(n,) penalties of the tokens of a response."""
        return self.beta * _within(estimate_kl(self.kl, _within(old - ref, self.input_clamp)), self.clamp)


@dataclass
class BatchTokens:
    """Response tokens of some samples, padded to (B, T). Log-probabilities are in nats, of the tokens sampled."""

    log: Tensor
    """(B, T) at the weights of now; differentiable."""
    mask: Tensor
    """(B, T) bool: tokens that count."""
    advantage: Tensor
    """(B,), or (B, T)."""
    old: Tensor | None = None
    """(B, T) at the weights of the generation's start; None: the weights have not moved since."""
    ref: Tensor | None = None
    """(B, T) of the reference model."""
    sampler: Tensor | None = None
    """(B, T) that the sampler logged; NaN where it could not."""
    kept: Tensor | None = None
    """(B, T) bool: tokens of the policy term, by `PolicyLoss.entropy_kept` of their micro-batch; None: all."""


@config
class PolicyLoss:
    """What a step made of samples and their advantages."""

    kind: Literal["grpo", "bnpo", "dapo", "step", "dr_grpo", "sum_norm", "luspo"] = "dapo"
    """Normalisation of each micro-batch, of which a step has the mean: by every response's own tokens and the number of
    responses (grpo; verl's seq-mean-token-mean), by its tokens (bnpo; verl's token-mean), by max_completion_length and
    the number of responses (dr_grpo), by max_completion_length alone (sum_norm; verl's seq-mean-token-sum-norm), or by
    the number of responses (luspo; verl's seq-mean-token-sum). dapo: by the tokens of the whole generation. step: by
    those of the whole step, as verl since 0.8, NeMo-RL, open-instruct and prime-rl do. TRL's default is dapo; its cispo
    and vespo normalise as dapo, its sapo as grpo."""
    max_completion_length: Annotated[float, Field(ge=1)] | None = None
    """For dr_grpo and sum_norm alone: the limit in tokens (verl: loss_scale_factor)."""
    temperature: Positive = 1.0
    """Of the sampling, by which the trainer divides logits."""
    epsilon: NotNegative | None = 0.2
    """How far below 1 the ratio may fall before a token with negative advantage stops to count; None: no ratio."""
    epsilon_high: NotNegative | None = None
    """How far above 1 it may rise with positive advantage; by default epsilon. For cispo the largest ratio itself."""
    surrogate: Literal["clip", "cispo", "sapo", "vespo", "mask", "ipo", "dppo"] = "clip"
    """The policy term, as above. prime-rl's need ratio_to="sampler"."""
    level: Literal["token", "sequence"] = "token"
    """Whose ratio it is (TRL: importance_sampling_level)."""
    delta: Positive | None = None
    """Largest ratio of the unclipped term (TRL's two-sided clipping)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest loss of a token with negative advantage, in units of −A (verl: clip_ratio_c; Ye et al. 2020)."""
    cispo_low: float | None = None
    """Smallest ratio of cispo (verl, NeMo-RL: 1 − clip_ratio_low; TRL, open-instruct: none)."""
    sapo_temperatures: tuple[Positive, Positive] = (1.0, 1.05)
    """τ of positive advantages, and of the others."""
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    """k and λ of advantages of at least 0, k and λ of negative ones."""
    beta: NotNegative = 0.0
    """Weight of the KL term."""
    kl: Estimator = "k3"
    kl_corrected: bool = False
    """Whether the KL term is multiplied by a ratio (TRL: use_bias_correction_kl)."""
    kl_corrected_to: Literal["old", "now", "sampler"] = "old"
    """What that ratio is against: old is the policy term's. NeMo-RL's is π itself, of which the gradient alone remains,
    or with use_on_policy_kl_approximation the sampler."""
    kl_to: Literal["ref", "sampler"] = "ref"
    """What the KL term is against. prime-rl's kl_tau (log ρ)² is k2 to the sampler with beta = 2 kl_tau."""
    kl_input_clamp: float | None = None
    """Largest size of d (NeMo-RL, verl's k3: 20; open-instruct: 40)."""
    kl_clamp: float | None = None
    """Largest size of the estimate (NeMo-RL, verl's k3: 10)."""
    sync_ref: tuple[float, int] | None = None
    """(ref_model_mixup_alpha, ref_model_sync_steps) where the reference follows the policy."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of a micro-batch's tokens, those of largest entropy, that the policy term keeps (Wang et al. 2025)."""
    mask_truncated: bool = False
    """Whether responses that reached the limit count no tokens (TRL: mask_truncated_completions)."""
    off_policy_threshold: float | None = None
    """Mean of log old − log π, nats, above which a response with negative advantage is dropped (DeepSeek-V3.2). In
    place of old are the sampler's log-probabilities where a batch has them (TRL with vLLM)."""
    correction: Correction | None = None
    """Importance sampling for the difference of sampler and trainer (TRL with vLLM, verl, NeMo-RL, open-instruct)."""
    ratio_to: Literal["old", "sampler"] = "old"
    """What ratios are against: the trainer's own pass at the generation's start, or what the sampler logged."""
    dapo_factor: Positive = 1.0
    """Of dapo's w_i, where a trainer does not bring the tokens of a generation to those of a step (TRL before 1.10)."""

    def __post_init__(self) -> None:
        if (self.kind in _OF_LENGTH) != (self.max_completion_length is not None):
            what = f"kind={self.kind} and max_completion_length={self.max_completion_length} do not go together"
            fix = "Give max_completion_length for dr_grpo and sum_norm, and only there."
            raise TsaeError(what, where="PolicyLoss", fix=fix)

    @property
    def needs_old(self) -> bool:
        """Whether the loss differs with log-probabilities at the generation's start, once the weights have moved."""
        ratio = self.epsilon is not None and self.ratio_to == "old"
        return ratio or self.correction is not None or self.off_policy_threshold is not None

    @property
    def needs_ref(self) -> bool:
        """Whether the loss has a KL term to a reference model."""
        return self.beta != 0 and self.kl_to == "ref"

    @property
    def needs_sampler(self) -> bool:
        """Whether the sampler's own log-probabilities are needed."""
        of_kl = self.beta != 0 and "sampler" in (self.kl_to, self.kl_corrected_to if self.kl_corrected else "")
        return self.correction is not None or self.ratio_to == "sampler" or of_kl

    def weights(
        self,
        n_tokens: np.ndarray,
        parts: Sequence[np.ndarray] | None = None,
        *,
        tokens_of_generation: int | None = None,
        rows_of_generation: int | None = None,
    ) -> np.ndarray:
        """Normalisation w_i of the samples of one step of the optimiser.

        Args:
            n_tokens: (n,) counted tokens of each; 0 where all are masked.
            parts: places of the samples, 0 to n − 1, by micro-batch and process; by default one part.
            tokens_of_generation: counted tokens of all samples of the generation, for dapo; by default the step's.
            rows_of_generation: samples of the generation, for dapo; by default the step's.
        """
        n, parts = len(n_tokens), [np.arange(len(n_tokens))] if parts is None else parts
        if self.kind == "step":
            return np.full(n, 1 / max(n_tokens.sum(), 1))
        if self.kind == "dapo":
            total = n_tokens.sum() if tokens_of_generation is None else tokens_of_generation
            return np.full(n, self.dapo_factor * (rows_of_generation or n) / (max(total, 1) * n))
        own = np.ones(n)
        if self.kind == "grpo":
            own = np.maximum(n_tokens, 1)
        elif self.kind == "dr_grpo":
            own = np.full(n, self.max_completion_length)
        elif self.kind in ("bnpo", "sum_norm"):
            for part in parts:
                own[part] = (self.max_completion_length or max(n_tokens[part].sum(), 1)) / len(part)
        return np.asarray(1 / (n * own))

    def entropy_kept(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """(B, T) bool: the tokens of a micro-batch, of all processes, whose entropy (nats) is in the top quantile."""
        if not mask.any():
            return mask.bool()
        threshold = entropy[mask.bool()].float().quantile(1 - self.top_entropy_quantile)
        return (entropy >= threshold) & mask.bool()

    def summands(self, batch: BatchTokens) -> tuple[Tensor, Tensor | None]:
        """Summands of the loss, not normalised: of the policy term, and of the KL term times beta, (B, T) each.

        A sample's summands depend on that sample alone. Tokens that do not count are 0.
        """
        mask, log = batch.mask.bool(), batch.log
        advantage = batch.advantage if batch.advantage.ndim == 2 else batch.advantage[:, None]
        old = log.detach() if batch.old is None else batch.old.detach()
        sampler = old if batch.sampler is None else old.where(batch.sampler.isnan(), batch.sampler)
        per_token = (log - (old if self.ratio_to == "old" else sampler)).where(mask, 0.0)
        log_ratio = per_token if self.level == "token" else _mean(per_token, mask)
        correction = None if self.correction is None else self._correction(old - sampler, mask)
        if self.surrogate == "vespo":
            policy = self._vespo(log, per_token, advantage, correction)
        else:
            policy = self._policy(log, log_ratio, advantage)
            policy = policy if correction is None else policy * correction
        if self.surrogate in ("mask", "ipo", "dppo"):
            moved = log_ratio.exp() - 1 if self.surrogate == "mask" else log.exp() - sampler.exp()
            policy = policy.where(~self._outside(moved, advantage), 0.0)
        if self.off_policy_threshold is not None:
            far = _mean(sampler - log.detach(), mask) > self.off_policy_threshold
            policy = policy.where(~(far & (advantage < 0)), 0.0)
        policy = policy.where(mask if batch.kept is None else mask & batch.kept, 0.0)
        if not self.beta:
            return policy, None
        to = sampler if self.kl_to == "sampler" else batch.ref
        assert to is not None
        against = {"old": log_ratio, "now": log - log.detach(), "sampler": log - sampler}
        kl = self._kl(log - to, against[self.kl_corrected_to] if self.kl_corrected else None)
        return policy, (self.beta * kl).where(mask, 0.0)

    def _policy(self, log: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Summands of the policy term, from log π and log ρ."""
        if self.epsilon is None:
            return -advantage * log
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        ratio = log_ratio.exp()
        if self.surrogate == "cispo":
            return -ratio.clamp(self.cispo_low, high).detach() * advantage * log
        if self.surrogate == "sapo":
            tau = _either(advantage > 0, *self.sapo_temperatures)
            return -(tau * (ratio - 1)).sigmoid() * 4 / tau * advantage
        if self.surrogate != "clip":
            return -ratio * advantage
        clipped = ratio.clamp(1 - self.epsilon, 1 + high)
        free = ratio if self.delta is None else ratio.clamp(max=self.delta)
        loss = -(free * advantage).minimum(clipped * advantage)
        if self.dual_clip is None:
            return loss
        return loss.minimum(-self.dual_clip * advantage).where(advantage < 0, loss)

    def _outside(self, moved: Tensor, advantage: Tensor) -> Tensor:
        """Whether tokens left the trust region of a surrogate that masks."""
        assert self.epsilon is not None
        above, below = moved > (self.epsilon if self.epsilon_high is None else self.epsilon_high), moved < -self.epsilon
        return above.where(advantage > 0, below) if self.surrogate == "dppo" else above | below

    def _vespo(self, log: Tensor, per_token: Tensor, advantage: Tensor, correction: Tensor | None) -> Tensor:
        k_of_more, rate_of_more, k_of_less, rate_of_less = self.vespo
        of_sample = per_token.detach().clamp(-20, 20).sum(1, keepdim=True)
        if correction is not None:
            of_sample = of_sample + correction.log().clamp(_LEAST, 20).sum(1, keepdim=True)
        of_sample = of_sample.clamp(_LEAST, 20)
        k = _either(advantage >= 0, k_of_more, k_of_less)
        rate = _either(advantage >= 0, rate_of_more, rate_of_less).clamp(min=1e-4)
        return -(rate + k * of_sample - rate * of_sample.exp()).exp() * advantage * log

    def _correction(self, apart: Tensor, mask: Tensor) -> Tensor:
        """(B, T) or (B, 1) factors of the policy term, from log old − log sampler."""
        assert self.correction is not None
        mode, low, high = self.correction.mode, self.correction.low, self.correction.high
        apart = apart.where(mask, 0.0)
        ratio = (apart.sum(1, keepdim=True) if mode.startswith("sequence") else apart).exp()
        compared = _mean(apart, mask).exp() if mode == "geometric_mask" else ratio
        clipped = compared if low is None and high is None else compared.clamp(low, high)
        return clipped if mode.endswith("truncate") else ratio.where(clipped == compared, 0.0)

    def _kl(self, apart: Tensor, log_weight: Tensor | None) -> Tensor:
        """Estimates of the KL divergence, from log π − log reference and the log of the ratio that weighs them."""
        free = _within(apart, self.kl_input_clamp)
        kl = estimate_kl(self.kl, free)
        if log_weight is not None:
            if self.kl_corrected_to != "old":  # NeMo-RL stops both gradients where d is clamped.
                log_weight = log_weight.where(free == apart, log_weight.detach())
            kl = kl * log_weight.exp()
        return _within(kl, self.kl_clamp)

    def pull(self, log_ratio: Tensor, positive: Tensor, again: Again = "replayed") -> Tensor:
        """Factor of a token's gradient A ∇log π on another path.

        Args:
            log_ratio: log ρ, in nats; for losses of level sequence the mean of the response.
            positive: whether the advantage is; broadcasts.
            again: replayed: the logged responses are used again, and the loss weighs and clips them: ρ, or 0 where it
                is clipped. on-policy: the policy samples anew; ρ makes the logged responses stand for those (importance
                weights, truncated; Ionides 2008).
        """
        import torch

        ratio = log_ratio.exp().clamp(max=_LARGEST)
        if again == "on-policy":
            return ratio
        sign = _either(positive, 1.0, -1.0)
        with torch.enable_grad():
            log = ratio.log().detach().requires_grad_()
            found: Tensor = torch.autograd.grad((-sign * self._policy(log, log, sign)).sum(), log)[0]
        return found


_LEAST = float(np.log(1e-8))
"""Smallest log of a response's ratio in vespo."""


def _either(where: Tensor, one: float, other: float) -> Tensor:
    import torch  # the settings of a run are read without it

    return torch.where(where, one, other)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) mean of the tokens that count."""
    return values.where(mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
