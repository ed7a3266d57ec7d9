"""The loss of every trainer: against TRL's own code, and against the definitions of those that do not install here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from attribution.recipes import RECIPES, Recipe
from tsae.attribution.training.loss import BatchTokens, Correction, PolicyLoss
from tsae.errors import TsaeError

DEFAULTS = {field.name: field.default for field in fields(GRPOConfig)}
"""TRL's, of the version that is installed."""


@dataclass
class Generation:
    tokens: BatchTokens
    entropy: torch.Tensor
    parts: list[np.ndarray]
    """Rows of the micro-batches of one step, by process and then in their order."""
    all_parts: int
    """Micro-batches of the generation, of all processes."""

    def of(self, rows: np.ndarray) -> BatchTokens:
        given = {f.name: getattr(self.tokens, f.name) for f in fields(BatchTokens)}
        return BatchTokens(**{name: value if value is None else value[rows] for name, value in given.items()})


def make(
    seed: int, *, accumulation: int = 1, per_generation: int = 1, processes: int = 1, old: bool = True
) -> Generation:
    """Random log-probabilities, far enough apart that every clip and clamp acts; one row has no token that counts."""
    rng, n_parts, size, width = torch.Generator().manual_seed(seed), per_generation * processes, 3, 7
    shape = (n := n_parts * size, width)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    log = -0.1 - 3 * torch.rand(shape, generator=rng, dtype=torch.float64)
    before = log + 0.6 * normal(*shape)
    ref, sampler = before + 0.5 * normal(*shape), before + 0.2 * normal(*shape)
    ref[0, 0], ref[1, 0], sampler[0, 1] = log[0, 0] - 30, log[1, 0] + 5, torch.nan
    lengths = torch.randint(1, width + 1, (n, 1), generator=rng)
    lengths[n - 1] = 0
    tokens = BatchTokens(
        log.requires_grad_(),
        torch.arange(width) < lengths,
        normal(n).index_fill(0, torch.tensor([1]), 0.0),
        before if old else None,
        ref,
        sampler,
    )
    places = torch.randperm(n, generator=rng).numpy().reshape(processes, per_generation, size)
    parts = list(places[:, -accumulation:].reshape(-1, size))  # the last step of the generation
    return Generation(tokens, 2 * torch.rand(shape, generator=rng, dtype=torch.float64), parts, n_parts)


def ours(loss: PolicyLoss, made: Generation) -> torch.Tensor:
    rows, n_tokens = np.concatenate(made.parts), made.tokens.mask.sum(1).numpy()
    places = np.split(np.arange(len(rows)), np.cumsum([len(part) for part in made.parts])[:-1])
    step = made.of(rows)
    if loss.needs_entropy:
        kept = [loss.entropy_kept(made.entropy[part], made.tokens.mask[part]) for part in made.parts]
        step = replace(step, kept=torch.cat(kept))
    weights = loss.weights(
        n_tokens[rows], places, tokens_of_generation=int(n_tokens.sum()), parts_of_generation=made.all_parts
    )
    policy, kl = loss.summands(step)
    assert (kl is None) == (loss.beta == 0)
    return ((policy if kl is None else policy + kl).sum(1) * torch.from_numpy(weights)).sum()


def same(loss: PolicyLoss, made: Generation, expected: torch.Tensor) -> None:
    """Loss and gradient are those expected; every tensor of the batch that is not needed may be missing."""
    (wanted,) = torch.autograd.grad(expected, made.tokens.log)
    lean = made.tokens
    for name, needed in (("ref", loss.needs_ref), ("sampler", loss.needs_sampler)):
        lean = lean if needed else replace(lean, **{name: None})
    made = replace(made, tokens=lean)
    found = ours(loss, made)
    (gradient,) = torch.autograd.grad(found, made.tokens.log)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


class LossOnly(GRPOTrainer):
    """GRPOTrainer with what its `_compute_loss` reads, and log-probabilities that are given."""

    def __init__(self, settings: Mapping[str, Any], made: Generation, accumulation: int, processes: int) -> None:
        config = {**DEFAULTS, **settings}
        config["steps_per_generation"] = made.all_parts // processes
        vars(self).update(config)
        self.args = SimpleNamespace(**config)
        self.epsilon_low = config["epsilon"]
        self.epsilon_high = config["epsilon"] if config["epsilon_high"] is None else config["epsilon_high"]
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.current_gradient_accumulation_steps = accumulation
        self.accelerator = SimpleNamespace(
            num_processes=processes,
            gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
            reduce=lambda x, **_: x,
        )
        self.model = SimpleNamespace(training=True)
        self._metrics = {"train": defaultdict(list)}
        self.made, self.processes = made, processes

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return self.tokens.log, self.entropy, None

    def step(self) -> torch.Tensor:
        """Loss of the step: the mean over processes of the sums over their micro-batches."""
        total = torch.zeros((), dtype=torch.float64)
        for rows in self.made.parts:
            self.tokens, self.entropy = tokens, _ = self.made.of(rows), self.made.entropy[rows]
            ids = torch.zeros(tokens.log.shape, dtype=torch.long)
            mask = tokens.mask.long()
            inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
            inputs |= {"completion_mask": mask, "advantages": tokens.advantage, "ref_per_token_logps": tokens.ref}
            inputs["num_items_in_batch"] = self.made.tokens.mask.sum()
            if tokens.old is not None:
                inputs["old_per_token_logps"] = tokens.old
            if self.use_vllm:
                ratio = sampling_ratio(self.args, tokens.old, tokens.sampler, mask)
                inputs |= {"sampling_per_token_logps": tokens.sampler, "importance_sampling_ratio": ratio}
            total = total + self._compute_loss(None, inputs)
        return total / self.processes


def sampling_ratio(args: Any, old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As TRL makes it where it scores completions, which needs a whole trainer."""
    level, what = args.vllm_importance_sampling_mode.split("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    apart = torch.nan_to_num((old - sampler) * mask, nan=0.0)
    ratio = (apart.sum(-1, keepdim=True) if level == "sequence" else apart).exp()
    if what == "truncate":
        return torch.clamp(ratio, min=low, max=high)
    outside = (ratio < (-torch.inf if low is None else low)) | (ratio > (torch.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


KINDS = {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}


def of_trl(settings: Mapping[str, Any]) -> PolicyLoss:
    """The loss that TRL's settings ask for."""
    s = {**DEFAULTS, **settings}
    kind = s["loss_type"]
    correction = Correction(
        s["vllm_importance_sampling_mode"],
        s["vllm_importance_sampling_clip_min"],
        s["vllm_importance_sampling_clip_max"],
    )
    return PolicyLoss(
        KINDS.get(kind, kind),
        s["max_completion_length"] if kind == "dr_grpo" else None,
        s["temperature"],
        s["epsilon"],
        s["epsilon_high"],
        kind if kind in KINDS else "clip",
        s["importance_sampling_level"],
        s["delta"],
        sapo_temperatures=(s["sapo_temperature_pos"], s["sapo_temperature_neg"]),
        vespo=(s["vespo_k_pos"], s["vespo_lambda_pos"], s["vespo_k_neg"], s["vespo_lambda_neg"]),
        beta=s["beta"],
        kl_corrected=s["use_bias_correction_kl"],
        top_entropy_quantile=s["top_entropy_quantile"],
        mask_truncated=s["mask_truncated_completions"],
        off_policy_threshold=s["off_policy_mask_threshold"],
        correction=correction if s["use_vllm"] and s["vllm_importance_sampling_correction"] else None,
    )


EXTRAS: list[dict[str, Any]] = [
    {},
    {"beta": 0.04, "epsilon_high": 0.28},
    {"beta": 0.1, "use_bias_correction_kl": False, "top_entropy_quantile": 0.3},
    {"delta": 1.3},
    {"delta": 1.2, "off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.6},
    {"use_vllm": True, "off_policy_mask_threshold": 0.05},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.9},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.1},
    {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate", "beta": 0.04},
    {"vespo_k_pos": 1.0, "vespo_lambda_neg": 1.5, "sapo_temperature_neg": 2.0},
]
LAYOUTS = [(1, 1, 1), (4, 4, 1), (2, 4, 1), (1, 3, 2), (3, 3, 2)]
"""Micro-batches of a step and of a generation, processes."""


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_loss_and_gradient_are_those_of_trl(kind: str, level: str) -> None:
    for seed, extra in enumerate(EXTRAS * 2):
        accumulation, per_generation, processes = LAYOUTS[seed % len(LAYOUTS)]
        processes = 1 if "top_entropy_quantile" in extra else processes  # its threshold is that of all processes
        settings = {"loss_type": kind, "importance_sampling_level": level, **extra}
        settings |= {"epsilon_high": 1.4} if kind == "cispo" else {}
        old = accumulation < per_generation or "use_vllm" in extra or seed % 2 == 0
        layout: dict[str, Any] = {"accumulation": accumulation, "per_generation": per_generation}
        made = make(seed, **layout, processes=processes, old=old)
        same(of_trl(settings), made, LossOnly(settings, made, accumulation, processes).step())


def test_a_response_may_have_an_advantage_for_every_token() -> None:
    made = make(1)
    per_token = torch.randn(made.tokens.log.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    made = replace(made, tokens=replace(made.tokens, advantage=per_token))
    for settings in ({}, {"loss_type": "sapo"}, {"off_policy_mask_threshold": 0.1}):
        same(of_trl(settings), made, LossOnly(settings, made, 1, 1).step())


# The other trainers, by their definitions. Each gives the loss of one step.


def verl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """verl/trainer/ppo/core_algos.py (agg_loss, compute_policy_loss_vanilla, _gspo, _cispo, kl_penalty_forward) and
    verl/workers/actor/dp_actor.py, at b178a3cd."""
    s = {"loss_mode": "vanilla", "loss_agg_mode": "token-mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    s |= {"clip_ratio_c": 3.0, "use_kl_loss": False, "rollout_is_threshold": None, **settings}
    total = torch.zeros((), dtype=torch.float64)
    for part in made.parts:
        b = made.of(part)
        mask, advantage = b.mask.double(), b.advantage[:, None]

        def mean(matrix: torch.Tensor, mode: str, mask: torch.Tensor = mask) -> torch.Tensor:
            sums, n = (matrix * mask).sum(-1), mask.sum(-1)
            if mode == "token-mean":
                return sums.sum() / n.sum()
            if mode == "seq-mean-token-sum":
                return sums.sum() / (n > 0).sum()
            if mode == "seq-mean-token-mean":
                return (sums / (n + 1e-8)).sum() / (n > 0).sum()
            return sums.sum() / s.get("loss_scale_factor", mask.shape[-1])

        assert b.old is not None
        apart = (b.log - b.old).clamp(-20, 20)
        if s["loss_mode"] == "gspo":
            of_sequence = ((b.log - b.old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
            apart = (b.log - b.log.detach() + of_sequence.detach()[:, None]).clamp(max=10.0)
        ratio = apart.exp()
        clipped = ratio.clamp(1 - s["clip_ratio_low"], 1 + s["clip_ratio_high"])
        policy = torch.maximum(-advantage * ratio, -advantage * clipped)
        if s["loss_mode"] == "vanilla":
            lower = torch.minimum(-advantage * s["clip_ratio_c"], policy)
            policy = torch.where(advantage < 0, lower, policy)
        elif s["loss_mode"] == "cispo":
            policy = -clipped.detach() * advantage * b.log
        if s["rollout_is_threshold"] is not None:
            assert b.sampler is not None
            policy = policy * (b.old - b.sampler).nan_to_num(nan=0.0).exp().clamp(max=s["rollout_is_threshold"])
        found = mean(policy, "seq-mean-token-mean" if s["loss_mode"] == "gspo" else s["loss_agg_mode"])
        if s["use_kl_loss"]:
            assert b.ref is not None
            d = b.log - b.ref
            capped = (-d).clamp(-20, 20)
            low_var = (capped.exp() - capped - 1).clamp(-10, 10)
            kl = {"k1": d, "abs": d.abs(), "mse": 0.5 * d.square(), "low_var_kl": low_var}[s["kl_loss_type"]]
            found = found + s["kl_loss_coef"] * mean(kl, s["loss_agg_mode"])
        total = total + found * len(part) / sum(map(len, made.parts))
    return total


def nemo_rl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """ClippedPGLossFn in nemo_rl/algorithms/loss/loss_functions.py and calculate_kl in algorithms/utils.py, at
    7ea279ab; global tokens and sequences are those of the step."""
    s = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None, "token_level_loss": True}
    s |= {"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0}
    s |= {"kl_output_clamp_value": 10.0, "use_on_policy_kl_approximation": False, "sequence": False, "tis": None}
    s |= settings
    b = made.of(np.concatenate(made.parts))
    mask, advantage = b.mask.double(), b.advantage[:, None]
    n = mask.sum(-1)
    assert b.old is not None
    assert b.sampler is not None
    assert b.ref is not None
    sampler = torch.where(b.sampler.isnan(), b.old, b.sampler)

    def reduced(matrix: torch.Tensor) -> torch.Tensor:
        if s["token_level_loss"]:
            return (matrix * mask).sum() / (mask.sum() + 1e-8)
        return ((matrix * mask).sum(-1) / (n + 1e-8)).sum() / len(n)

    apart = b.log - b.old
    if s["sequence"]:
        apart = ((apart * mask).sum(-1) / (n + 1e-8))[:, None].expand(mask.shape)
    ratio = apart.exp()
    clipped = ratio.clamp(1 - s["ratio_clip_min"], 1 + s["ratio_clip_max"])
    policy = torch.maximum(-advantage * ratio, -advantage * clipped)
    if s.get("use_cispo"):
        policy = -advantage * clipped.detach() * b.log
    if s.get("disable_ppo_ratio"):
        policy = -advantage * b.log
    if s["ratio_clip_c"] is not None:
        policy = torch.where(advantage < 0, torch.minimum(policy, -advantage * s["ratio_clip_c"]), policy)
    if s.get("use_importance_sampling_correction"):
        apart = (b.old - sampler) * mask
        weight = (apart.sum(-1, keepdim=True) if s["sequence"] else apart).exp()
        low, high = s.get("tis_min"), s.get("tis_max")
        if s["tis"] == "tis":
            weight = weight.clamp(low or 0.0, high)
        elif s["tis"] == "icepop":
            weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
        elif s["tis"] == "seq-mask-tis":
            geometric = (apart.sum(-1, keepdim=True) / (n[:, None] + 1e-8)).exp()
            weight = weight * ((geometric >= low) & (geometric <= high))
        policy = policy * weight
    loss = reduced(policy)
    if s["reference_policy_kl_penalty"]:
        weight = (b.log - (sampler if s["use_on_policy_kl_approximation"] else b.log.detach())).exp()
        free = b.ref - b.log
        cap = s["kl_input_clamp_value"]
        d = free if cap is None else free.clamp(-cap, cap)
        weight = torch.where(d == free, weight, weight.detach())
        kl = weight * {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[s["reference_policy_kl_type"]]
        cap = s["kl_output_clamp_value"]
        loss = loss + s["reference_policy_kl_penalty"] * reduced(kl if cap is None else kl.clamp(-cap, cap))
    return loss


def open_instruct_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """compute_grpo_loss and compute_rho_correction in open_instruct/grpo_utils.py, estimate_kl in model_utils.py, at
    e6c3044a."""
    s = {"clip_lower": 0.2, "clip_higher": 0.272, "loss_fn": "dapo", "beta": 0.05, "kl_estimator": 2}
    s |= {"use_rho_correction": True, "rho_clamp_upper_bound": 2.0, **settings}
    b = made.of(np.concatenate(made.parts))
    mask, advantage = b.mask.double(), b.advantage[:, None]
    assert b.old is not None
    assert b.sampler is not None
    assert b.ref is not None
    sampler = torch.where(b.sampler.isnan(), b.old, b.sampler)
    ratio = (b.log - (sampler if s.get("use_vllm_logprobs") else b.old)).exp()
    clipped = ratio.clamp(1 - s["clip_lower"], 1 + s["clip_higher"])
    policy = torch.maximum(-advantage * ratio, -advantage * clipped)
    if s["loss_fn"] == "cispo":
        policy = -advantage * ratio.detach().clamp(max=1 + s["clip_higher"]) * b.log
    if s["use_rho_correction"]:
        policy = policy * (b.old - sampler).clamp(-10, 10).exp().clamp(max=s["rho_clamp_upper_bound"])
    d = (b.log - b.ref).clamp(-40, 40)
    kl = torch.stack([d, d**2 / 2, torch.expm1(-d) + d, ratio * d])[s["kl_estimator"]]
    return ((policy + s["beta"] * kl) * mask).sum() / mask.sum()


def prime_rl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """default_loss_fn and ipo_loss_fn in src/prime_rl/trainer/rl/loss.py, at 559b4477; `mask` as it was at 4704e538."""
    s = {"type": "default", "low": 0.2, "high": 0.2, "kl_tau": 1e-3, **settings}
    b = made.of(np.concatenate(made.parts))
    mask, advantage = b.mask, b.advantage[:, None]
    assert b.old is not None
    assert b.sampler is not None
    sampler = torch.where(b.sampler.isnan(), b.old, b.sampler)
    apart, moved = b.log - sampler, b.log.exp() - sampler.exp()
    if s["type"] == "default":
        outside = torch.where(advantage > 0, moved > s["high"], moved < -s["low"])
    elif s["type"] == "ipo":
        outside = moved.abs() > s["high"]
    else:
        outside = (apart.exp() < s["low"]) | (apart.exp() > s["high"])
    policy = (mask & ~outside) * advantage * apart.exp()
    kl = apart if s["type"] == "mask" else apart**2
    return (-policy + s["kl_tau"] * (mask * kl)).sum() / mask.sum()


References = Callable[[Mapping[str, Any], Generation], torch.Tensor]
FORMULAS: dict[str, References] = {
    "verl": verl_loss,
    "nemo_rl": nemo_rl_loss,
    "open_instruct": open_instruct_loss,
    "prime_rl": prime_rl_loss,
}


def generation_of(recipe: Recipe, seed: int) -> Generation:
    if recipe.trainer == "trl":
        accumulation, per_generation = min(recipe.accumulation, 4), min(recipe.per_generation, 4)
        return make(seed, accumulation=accumulation, per_generation=per_generation, old=accumulation < per_generation)
    made = make(seed, accumulation=3, per_generation=3)
    made.tokens.mask[-1, :2] = True  # none of these trainers keeps a response without tokens
    # Micro-batches that differ in size, as verl's with use_dynamic_bsz do. The others' do not matter.
    return replace(made, parts=np.split(np.concatenate(made.parts), [2, 5]))


def check(recipe: Recipe, seed: int) -> None:
    made = generation_of(recipe, seed)
    if recipe.trainer == "trl":
        expected = LossOnly(recipe.settings, made, len(made.parts), 1).step()
    else:
        expected = FORMULAS[recipe.trainer](recipe.settings, made)
    same(recipe.loss, made, expected)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_popular_recipe_has_the_loss_and_gradient_of_its_trainer(recipe: Recipe) -> None:
    if recipe.trainer == "trl":
        assert recipe.loss == of_trl(recipe.settings)
    for seed in range(3):
        check(recipe, seed)


CLAMPS: dict[str, Any] = {"kl_input_clamp": 20.0, "kl_clamp": 10.0}
NEMO: dict[str, Any] = {"beta": 0.1, "kl_corrected": True, "kl_corrected_to": "now", **CLAMPS}
KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.1}
IS: dict[str, Any] = {"use_importance_sampling_correction": True}
OTHERS: list[tuple[str, dict[str, Any], PolicyLoss]] = [
    *(
        ("verl", {"loss_agg_mode": mode, "clip_ratio_c": 1.5}, PolicyLoss(kind, length, dual_clip=1.5))
        for mode, kind, length in (
            ("token-mean", "bnpo", None),
            ("seq-mean-token-sum", "luspo", None),
            ("seq-mean-token-mean", "grpo", None),
            ("seq-mean-token-sum-norm", "sum_norm", 7),
        )
    ),
    *(
        (
            "verl",
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": name},
            PolicyLoss("bnpo", dual_clip=3.0, beta=0.1, kl=kl, **(CLAMPS if kl == "k3" else {})),
        )
        for name, kl in (("k1", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3"))
    ),
    (
        "verl",
        {"loss_mode": "cispo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 50},
        PolicyLoss("sum_norm", 50, surrogate="cispo", cispo_low=0.8, epsilon_high=1.2),
    ),
    (
        "verl",
        {"rollout_is_threshold": 1.1},
        PolicyLoss("bnpo", dual_clip=3.0, correction=Correction("token_truncate", None, 1.1)),
    ),
    ("nemo_rl", {"ratio_clip_c": 1.5}, PolicyLoss("step", dual_clip=1.5)),
    ("nemo_rl", {"token_level_loss": False, "sequence": True}, PolicyLoss("grpo", level="sequence")),
    ("nemo_rl", {"use_cispo": True}, PolicyLoss("step", surrogate="cispo", cispo_low=0.8, epsilon_high=1.2)),
    ("nemo_rl", {"disable_ppo_ratio": True}, PolicyLoss("step", epsilon=None)),
    *(("nemo_rl", {**KL, "reference_policy_kl_type": kl}, PolicyLoss("step", kl=kl, **NEMO)) for kl in ("k1", "k2")),
    (
        "nemo_rl",
        {**KL, "use_on_policy_kl_approximation": True},
        PolicyLoss("step", **{**NEMO, "kl_corrected_to": "sampler"}),
    ),
    ("nemo_rl", IS, PolicyLoss("step", correction=Correction("token_truncate", None, None))),
    (
        "nemo_rl",
        {**IS, "tis": "tis", "tis_max": 1.2},
        PolicyLoss("step", correction=Correction("token_truncate", 0, 1.2)),
    ),
    (
        "nemo_rl",
        {**IS, "tis": "icepop", "tis_min": 0.9, "tis_max": 1.2},
        PolicyLoss("step", correction=Correction("token_mask", 0.9, 1.2)),
    ),
    (
        "nemo_rl",
        {**IS, "tis": "seq-mask-tis", "tis_min": 0.95, "tis_max": 1.05},
        PolicyLoss("step", correction=Correction("geometric_mask", 0.95, 1.05)),
    ),
    (
        "open_instruct",
        {"use_rho_correction": False, "use_vllm_logprobs": True},
        PolicyLoss("step", epsilon_high=0.272, ratio_to="sampler", beta=0.05, kl_input_clamp=40.0),
    ),
    (
        "open_instruct",
        {"kl_estimator": 3, "loss_fn": "cispo"},
        PolicyLoss(
            "step",
            surrogate="cispo",
            epsilon_high=1.272,
            beta=0.05,
            kl="k1",
            kl_corrected=True,
            kl_input_clamp=40.0,
            correction=Correction("token_truncate", None, 2.0),
        ),
    ),
    (
        "prime_rl",
        {"type": "ipo", "high": 0.1},
        PolicyLoss("step", surrogate="ipo", epsilon=0.1, ratio_to="sampler", beta=2e-3, kl="k2", kl_to="sampler"),
    ),
    (
        "prime_rl",
        {"type": "mask", "low": 0.6, "high": 2.0, "kl_tau": 0.1},
        PolicyLoss(
            "step", None, 1.0, 0.4, 1.0, surrogate="mask", ratio_to="sampler", beta=0.1, kl="k1", kl_to="sampler"
        ),
    ),
]


@pytest.mark.parametrize(("trainer", "settings", "loss"), OTHERS, ids=lambda part: str(part)[:60])
def test_other_settings_of_other_trainers(trainer: str, settings: Mapping[str, Any], loss: PolicyLoss) -> None:
    for seed in range(3):
        check(Recipe("", trainer, "", settings, loss), seed)


def test_a_samples_summands_are_its_own() -> None:
    made = make(0)
    for loss in (of_trl({"loss_type": kind, "beta": 0.1, **extra}) for kind in ("dapo", "vespo") for extra in EXTRAS):
        whole = loss.summands(made.of(np.arange(3)))
        for row, (found, wanted) in itertools.product(range(3), zip(loss.summands(made.of([1])), whole, strict=True)):
            if row == 1:
                torch.testing.assert_close(found[0], wanted[row])


LOSSES = [
    PolicyLoss(),
    PolicyLoss(epsilon_high=0.4, delta=1.3),
    PolicyLoss(dual_clip=1.5),
    PolicyLoss(surrogate="cispo", epsilon_high=1.5),
    PolicyLoss(surrogate="sapo"),
    PolicyLoss(epsilon=None),
]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_pull_is_the_derivative_of_the_policy_term(loss: PolicyLoss, positive: bool) -> None:
    log = torch.linspace(-1, 1, 41)[None].requires_grad_()
    advantage = 1.3 if positive else -0.7
    zero = torch.zeros(1, 41)
    policy, _ = loss.summands(BatchTokens(log, zero == 0, torch.tensor([advantage]), zero))
    (wanted,) = torch.autograd.grad(policy.sum(), log)
    torch.testing.assert_close(-advantage * loss.pull(log.detach(), torch.tensor(positive)), wanted)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kind": "ppo"}, "kind='ppo' is none of grpo, bnpo"),
        ({"kind": "dr_grpo"}, "do not go together"),
        ({"max_completion_length": 8}, "do not go together"),
        ({"kind": "dr_grpo", "max_completion_length": 0}, "is less than 1"),
        ({"kl": "full"}, "kl='full' is none of"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"epsilon": -0.1}, "must be at least 0"),
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"beta": float("nan")}, "is not finite"),
        ({"top_entropy_quantile": 0.0}, "must be above 0, and at most 1"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(TsaeError, match=what):
        PolicyLoss(**given)
    with pytest.raises(TsaeError, match="mode 'x' is none of"):
        Correction("x")  # type: ignore[arg-type]
