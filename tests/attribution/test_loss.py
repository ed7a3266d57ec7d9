"""The loss of every trainer: against TRL's own code, and against the definitions of those that do not install here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from attribution.recipes import RECIPES, Recipe
from support.refusals import refuses
from tsae.attribution import trl
from tsae.attribution.loss import BatchTokens, Correction, PolicyLoss, RewardKL

DEFAULTS = {field.name: field.default for field in fields(GRPOConfig)}
"""TRL's, of the version that is installed."""


@dataclass
class Generation:
    tokens: BatchTokens
    entropy: torch.Tensor
    parts: list[np.ndarray]
    """Rows of the micro-batches of one step, by process and then in their order."""
    per_generation: int
    """Micro-batches of the generation, of each process."""

    def of(self, rows: Any) -> BatchTokens:
        given = {field.name: getattr(self.tokens, field.name) for field in fields(BatchTokens)}
        return BatchTokens(**{name: value if value is None else value[rows] for name, value in given.items()})


def make(
    seed: int, accumulation: int = 1, per_generation: int = 1, processes: int = 1, *, old: bool = True
) -> Generation:
    """Random log-probabilities, far enough apart that every clip and clamp acts; one row has no token that counts."""
    rng, n_parts, size = torch.Generator().manual_seed(seed), per_generation * processes, 3
    shape = (n := n_parts * size, width := 7)
    uniform = torch.rand(2, *shape, generator=rng, dtype=torch.float64)
    normal = torch.randn(3, *shape, generator=rng, dtype=torch.float64)
    log = -0.1 - 3 * uniform[0]
    before = log + 0.6 * normal[0]
    ref, sampler = before + 0.5 * normal[1], before + 0.2 * normal[2]
    ref[0, 0], ref[1, 0], sampler[0, 1] = log[0, 0] - 50, log[1, 0] + 5, torch.nan
    lengths = torch.randint(1, width + 1, (n, 1), generator=rng)
    lengths[-1] = 0
    advantage = torch.randn(n, generator=rng, dtype=torch.float64)
    mask = torch.arange(width) < lengths
    tokens = BatchTokens(log.requires_grad_(), mask, advantage, before if old else None, ref, sampler)
    places = torch.randperm(n, generator=rng).numpy().reshape(processes, per_generation, size)
    return Generation(tokens, 2 * uniform[1], list(places[:, -accumulation:].reshape(-1, size)), per_generation)


def same(loss: PolicyLoss, made: Generation, expected: torch.Tensor) -> None:
    """Loss and gradient are those expected, also without the tensors that the loss does not need."""
    (wanted,) = torch.autograd.grad(expected, made.tokens.log)
    rows, n_tokens = np.concatenate(made.parts), made.tokens.mask.sum(1).numpy()
    step, ends = made.of(rows), np.cumsum([len(part) for part in made.parts])
    step.ref, step.sampler = step.ref if loss.needs_ref else None, step.sampler if loss.needs_sampler else None
    if loss.top_entropy_quantile < 1:
        step.kept = torch.cat([loss.entropy_kept(made.entropy[p], made.tokens.mask[p]) for p in made.parts])
    whole = {"tokens_of_generation": int(n_tokens.sum()), "rows_of_generation": len(n_tokens)}
    weights = loss.weights(n_tokens[rows], np.split(np.arange(len(rows)), ends[:-1]), **whole)
    policy, kl = loss.summands(step)
    assert (kl is None) == (loss.beta == 0)
    found = ((policy if kl is None else policy + kl).sum(1) * torch.from_numpy(weights)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(found, made.tokens.log)[0], wanted, rtol=1e-6, atol=1e-9)


class LossOnly(GRPOTrainer):
    """GRPOTrainer with what its `_compute_loss` reads, and log-probabilities that are given."""

    def __init__(self, settings: Mapping[str, Any], made: Generation, processes: int = 1) -> None:
        config = {**DEFAULTS, "steps_per_generation": made.per_generation, **settings}
        vars(self).update(config, args=SimpleNamespace(**config), made=made, model=SimpleNamespace(training=True))
        self.epsilon_low, self.epsilon_high = config["epsilon"], config["epsilon_high"] or config["epsilon"]
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.current_gradient_accumulation_steps = len(made.parts) // processes
        alone = {name: lambda x, **_: x for name in ("gather", "pad_across_processes", "reduce")}
        self.accelerator = SimpleNamespace(num_processes=processes, **alone)
        self._metrics = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return self.tokens.log, self.entropy, None

    def step(self) -> torch.Tensor:
        """Loss of the step: the mean over processes of the sums over their micro-batches."""
        total = torch.zeros((), dtype=torch.float64)
        for rows in self.made.parts:
            self.tokens, self.entropy = tokens, _ = self.made.of(rows), self.made.entropy[rows]
            ids, mask = torch.zeros(tokens.log.shape, dtype=torch.long), tokens.mask.long()
            inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
            inputs |= {"completion_mask": mask, "advantages": tokens.advantage, "ref_per_token_logps": tokens.ref}
            inputs |= {"num_items_in_batch": self.made.tokens.mask.sum(), "old_per_token_logps": tokens.old}
            if self.use_vllm:
                inputs["sampling_per_token_logps"] = tokens.sampler
                inputs["importance_sampling_ratio"] = sampling_ratio(self.args, tokens, mask)
            total = total + self._compute_loss(None, inputs)
        return total / self.accelerator.num_processes


def sampling_ratio(args: Any, tokens: BatchTokens, mask: torch.Tensor) -> torch.Tensor:
    """As TRL makes it where it scores completions, which needs a whole trainer."""
    level, what = args.vllm_importance_sampling_mode.split("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    apart = torch.nan_to_num((tokens.old - tokens.sampler) * mask, nan=0.0)
    ratio = (apart.sum(-1, keepdim=True) if level == "sequence" else apart).exp()
    if what == "truncate":
        return torch.clamp(ratio, min=low, max=high)
    outside = (ratio < (-torch.inf if low is None else low)) | (ratio > (torch.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


def of_trl(settings: Mapping[str, Any]) -> PolicyLoss:
    """The loss that TRL's settings ask for."""
    return trl.of({"max_steps": 8, **settings}, file=Path("recipe.yaml"), beside=trl.Beside("1.16.0")).loss


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
        accumulation, per_generation, processes = LAYOUTS[(seed + seed // len(EXTRAS)) % len(LAYOUTS)]
        processes = 1 if "top_entropy_quantile" in extra else processes  # its threshold is that of all processes
        settings = {"loss_type": kind, "importance_sampling_level": level, **extra}
        settings |= {"epsilon_high": 1.4} if kind == "cispo" else {}
        old = accumulation < per_generation or "use_vllm" in extra or seed % 2 == 0
        made = make(seed, accumulation, per_generation, processes, old=old)
        same(of_trl(settings), made, LossOnly(settings, made, processes).step())


def test_a_response_may_have_an_advantage_for_every_token() -> None:
    made = make(1)
    made.tokens.advantage = torch.randn(made.tokens.log.shape, dtype=torch.float64)
    for settings in ({}, {"loss_type": "sapo"}, {"off_policy_mask_threshold": 0.1}):
        same(of_trl(settings), made, LossOnly(settings, made).step())


# The other trainers, by their definitions. Each gives the loss of one step.


def clipped(s: Mapping[str, Any], ratio: torch.Tensor, advantage: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """PPO's loss with dual clipping, or CISPO's: the same in all of them."""
    inside = ratio.clamp(1 - s["low"], 1 + s["high"])
    if s.get("cispo"):
        return -inside.detach() * advantage * log
    loss = torch.maximum(-advantage * ratio, -advantage * inside)
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * s["dual"]), loss) if s.get("dual") else loss


def verl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """verl/trainer/ppo/core_algos.py (agg_loss, compute_policy_loss_vanilla, _gspo, _cispo, kl_penalty_forward) and
    verl/workers/actor/dp_actor.py, at b178a3cd."""
    s = {"loss_agg_mode": "token-mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, **settings}
    clips = {"low": s["clip_ratio_low"], "high": s["clip_ratio_high"], "cispo": s.get("loss_mode") == "cispo"}
    clips["dual"] = s["clip_ratio_c"] if s.get("loss_mode", "vanilla") == "vanilla" else None
    total = torch.zeros((), dtype=torch.float64)
    for part in made.parts:
        b = made.of(part)
        mask, n = b.mask.double(), b.mask.sum(-1)

        def mean(matrix: torch.Tensor, mode: str, mask: torch.Tensor = mask, n: torch.Tensor = n) -> torch.Tensor:
            sums = (matrix * mask).sum(-1)
            return {
                "token-mean": sums.sum() / n.sum(),
                "seq-mean-token-sum": sums.sum() / (n > 0).sum(),
                "seq-mean-token-mean": (sums / (n + 1e-8)).sum() / (n > 0).sum(),
                "seq-mean-token-sum-norm": sums.sum() / s.get("loss_scale_factor", mask.shape[-1]),
            }[mode]

        apart, mode = (b.log - b.old).clamp(-20, 20), s["loss_agg_mode"]
        if s.get("loss_mode") == "gspo":
            of_sequence = (apart * mask).sum(-1) / n.clamp(min=1)
            apart, mode = b.log - b.log.detach() + of_sequence.detach()[:, None], "seq-mean-token-mean"
        policy = clipped(clips, apart.exp(), b.advantage[:, None], b.log)
        if "rollout_is_threshold" in s:
            policy = policy * (b.old - b.sampler).nan_to_num(nan=0.0).exp().clamp(max=s["rollout_is_threshold"])
        found, d = mean(policy, mode), b.log - b.ref
        if s.get("use_kl_loss"):
            low_var = ((-d).clamp(-20, 20).exp() + d.clamp(-20, 20) - 1).clamp(-10, 10)
            kl = {"k1": d, "abs": d.abs(), "mse": 0.5 * d.square(), "low_var_kl": low_var}[s["kl_loss_type"]]
            found = found + s["kl_loss_coef"] * mean(kl, s["loss_agg_mode"])
        total = total + found * len(part) / sum(map(len, made.parts))
    return total


def nemo_rl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """ClippedPGLossFn in nemo_rl/algorithms/loss/loss_functions.py and calculate_kl in algorithms/utils.py, at
    7ea279ab; global tokens and sequences are those of the step."""
    s = {"low": 0.2, "high": 0.2, "reference_policy_kl_type": "k3", "type": None, "most": 10, **settings}
    b = made.of(np.concatenate(made.parts))
    mask, n, advantage = b.mask.double(), b.mask.sum(-1, keepdim=True) + 1e-8, b.advantage[:, None]
    sampler = torch.where(b.sampler.isnan(), b.old, b.sampler)
    apart, off = b.log - b.old, (b.old - sampler) * mask
    if s.get("sequence"):  # sequence_level_importance_ratios, and token_level_loss is false
        apart, off = ((apart * mask).sum(-1, keepdim=True) / n).expand(mask.shape), off.sum(-1, keepdim=True)
    policy = -advantage * b.log if s.get("disable_ppo_ratio") else clipped(s, apart.exp(), advantage, b.log)
    weight, low, high = off.exp(), s.get("min"), s.get("max")
    if s["type"] == "tis":
        weight = weight.clamp(low or 0.0, high)
    elif s["type"] is not None:  # icepop, seq-mask-tis
        compared = weight if s["type"] == "icepop" else (off.sum(-1, keepdim=True) / n).exp()
        weight = weight * ((compared >= low) & (compared <= high))
    policy = policy * weight if "use_importance_sampling_correction" in s else policy
    to = sampler if s.get("use_on_policy_kl_approximation") else b.log.detach()
    weight, d = (b.log - to).exp(), (b.ref - b.log).clamp(-20, 20)
    weight = torch.where(d == b.ref - b.log, weight, weight.detach())
    kl = weight * {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[s["reference_policy_kl_type"]]
    loss = (policy + s.get("reference_policy_kl_penalty", 0.0) * kl.clamp(-s["most"], s["most"])) * mask
    return (loss / n).sum() / len(n) if s.get("sequence") else loss.sum() / mask.sum()


def open_instruct_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """compute_grpo_loss and compute_rho_correction in open_instruct/grpo_utils.py, estimate_kl in model_utils.py, at
    e6c3044a."""
    s = {"beta": 0.05, "kl_estimator": 2, "use_rho_correction": True, **settings}
    b = made.of(np.concatenate(made.parts))
    advantage, sampler = b.advantage[:, None], torch.where(b.sampler.isnan(), b.old, b.sampler)
    ratio = (b.log - (sampler if s.get("use_vllm_logprobs") else b.old)).exp()
    policy = clipped({"low": 0.2, "high": 0.272}, ratio, advantage, b.log)
    if s.get("loss_fn") == "cispo":
        policy = -advantage * ratio.detach().clamp(max=1.272) * b.log
    if s["use_rho_correction"]:
        policy = policy * (b.old - sampler).clamp(-10, 10).exp().clamp(max=2.0)
    d = (b.log - b.ref).clamp(-40, 40)
    kl = torch.stack([d, d**2 / 2, torch.expm1(-d) + d, ratio * d])[s["kl_estimator"]]
    return ((policy + s["beta"] * kl) * b.mask).sum() / b.mask.sum()


def prime_rl_loss(settings: Mapping[str, Any], made: Generation) -> torch.Tensor:
    """default_loss_fn and ipo_loss_fn in src/prime_rl/trainer/rl/loss.py, at 559b4477; `mask` as it was at 4704e538."""
    s = {"type": "default", "low": 0.2, "high": 0.2, "kl_tau": 1e-3, **settings}
    b = made.of(np.concatenate(made.parts))
    advantage, sampler = b.advantage[:, None], torch.where(b.sampler.isnan(), b.old, b.sampler)
    apart, moved = b.log - sampler, b.log.exp() - sampler.exp()
    outside = {
        "default": torch.where(advantage > 0, moved > s["high"], moved < -s["low"]),
        "ipo": moved.abs() > s["high"],
        "mask": (apart.exp() < s["low"]) | (apart.exp() > s["high"]),
    }[s["type"]]
    policy = (b.mask & ~outside) * advantage * apart.exp()
    return (-policy + s["kl_tau"] * b.mask * (apart if s["type"] == "mask" else apart**2)).sum() / b.mask.sum()


FORMULAS: dict[str, Any] = {
    "verl": verl_loss, "nemo_rl": nemo_rl_loss, "open_instruct": open_instruct_loss, "prime_rl": prime_rl_loss,
}  # fmt: skip


def check(recipe: Recipe) -> None:
    for seed in range(3):
        if recipe.trainer == "trl":
            size = recipe.accumulation, recipe.per_generation
            made = make(seed, *size, old=size[0] < size[1])
            expected = LossOnly(recipe.settings, made).step()
        else:
            made = make(seed, 3, 3)
            made.tokens.mask[-1, :2] = True  # none of these trainers keeps a response without tokens
            # Micro-batches that differ in size, as verl's with use_dynamic_bsz do. The others' do not matter.
            made.parts = np.split(np.concatenate(made.parts), [2, 5])
            expected = FORMULAS[recipe.trainer](recipe.settings, made)
        same(recipe.loss, made, expected)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.place.rpartition("/")[2])
def test_a_popular_recipe_has_the_loss_and_gradient_of_its_trainer(recipe: Recipe) -> None:
    if recipe.trainer == "trl":
        assert recipe.loss == of_trl(recipe.settings)
    check(recipe)


# fmt: off
K3: dict[str, Any] = {"kl_input_clamp": 20.0, "kl_clamp": 10.0}
NEMO: dict[str, Any] = {"beta": 0.1, "kl_corrected": True, "kl_corrected_to": "now", **K3}
KL, IS = {"reference_policy_kl_penalty": 0.1}, {"use_importance_sampling_correction": True}
ASYNC: dict[str, Any] = {"ratio_to": "sampler", "kl_to": "sampler"}
OTHERS: list[tuple[str, dict[str, Any], PolicyLoss]] = [
    *(("verl", {"loss_agg_mode": f"seq-mean-token-{mode}", "clip_ratio_c": 1.5}, PolicyLoss(kind, size, dual_clip=1.5))
      for mode, kind, size in (("sum", "luspo", None), ("mean", "grpo", None), ("sum-norm", "sum_norm", 7))),
    *(("verl", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": name},
       PolicyLoss("bnpo", dual_clip=3.0, beta=0.1, kl=kl, **(K3 if kl == "k3" else {})))
      for name, kl in (("k1", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3"))),
    ("verl", {"loss_mode": "cispo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 50},
     PolicyLoss("sum_norm", 50, surrogate="cispo", cispo_low=0.8, epsilon_high=1.2)),
    ("verl", {"rollout_is_threshold": 1.1},
     PolicyLoss("bnpo", dual_clip=3.0, correction=Correction("token_truncate", None, 1.1))),
    ("nemo_rl", {"dual": 1.5}, PolicyLoss("step", dual_clip=1.5)),
    ("nemo_rl", {"sequence": True, **IS, "type": "tis", "max": 1.2},
     PolicyLoss("grpo", level="sequence", correction=Correction("sequence_truncate", None, 1.2))),
    ("nemo_rl", {"cispo": True}, PolicyLoss("step", surrogate="cispo", cispo_low=0.8, epsilon_high=1.2)),
    ("nemo_rl", {"disable_ppo_ratio": True}, PolicyLoss("step", epsilon=None)),
    *(("nemo_rl", {**KL, "reference_policy_kl_type": kl}, PolicyLoss("step", kl=kl, **NEMO)) for kl in ("k1", "k2")),
    ("nemo_rl", {**KL, "most": torch.inf}, PolicyLoss("step", **{**NEMO, "kl_clamp": None})),
    ("nemo_rl", {**KL, "use_on_policy_kl_approximation": True},
     PolicyLoss("step", **{**NEMO, "kl_corrected_to": "sampler"})),
    ("nemo_rl", IS, PolicyLoss("step", correction=Correction("token_truncate", None, None))),
    ("nemo_rl", {**IS, "type": "icepop", "min": 0.9, "max": 1.2},
     PolicyLoss("step", correction=Correction("token_mask", 0.9, 1.2))),
    ("nemo_rl", {**IS, "type": "seq-mask-tis", "min": 0.95, "max": 1.05},
     PolicyLoss("step", correction=Correction("geometric_mask", 0.95, 1.05))),
    ("open_instruct", {"use_rho_correction": False, "use_vllm_logprobs": True},
     PolicyLoss("step", epsilon_high=0.272, ratio_to="sampler", beta=0.05, kl_input_clamp=40.0)),
    ("open_instruct", {"kl_estimator": 3, "loss_fn": "cispo"},
     PolicyLoss("step", surrogate="cispo", epsilon_high=1.272, beta=0.05, kl="k1", kl_corrected=True,
                kl_input_clamp=40.0, correction=Correction("token_truncate", None, 2.0))),
    ("prime_rl", {"type": "ipo", "high": 0.1},
     PolicyLoss("step", surrogate="ipo", epsilon=0.1, beta=2e-3, kl="k2", **ASYNC)),
    ("prime_rl", {"type": "mask", "low": 0.6, "high": 2.0, "kl_tau": 0.1},
     PolicyLoss("step", None, 1.0, 0.4, 1.0, surrogate="mask", beta=0.1, kl="k1", **ASYNC)),
]
# fmt: on


@pytest.mark.parametrize(("trainer", "settings", "loss"), OTHERS)
def test_other_settings_of_other_trainers(trainer: str, settings: Mapping[str, Any], loss: PolicyLoss) -> None:
    check(Recipe(trainer, "", settings, loss))


@pytest.mark.parametrize("kind", ["dapo", "vespo"])
def test_summands_of_a_sample_depend_on_that_sample_alone(kind: str) -> None:
    made = make(0)
    for extra in EXTRAS:
        loss = of_trl({"loss_type": kind, "beta": 0.1, **extra})
        for whole, alone in zip(loss.summands(made.of([0, 1, 2])), loss.summands(made.of([1])), strict=True):
            torch.testing.assert_close(alone[0], whole[1])


LOSSES = (
    PolicyLoss(), PolicyLoss(epsilon_high=0.4, delta=1.3), PolicyLoss(dual_clip=1.5), PolicyLoss(epsilon=None),
    PolicyLoss(surrogate="cispo", epsilon_high=1.5), PolicyLoss(surrogate="sapo"),
)  # fmt: skip


@pytest.mark.parametrize("advantage", [-0.7, 1.3])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_pull_is_the_derivative_of_the_policy_term(loss: PolicyLoss, advantage: float) -> None:
    log, zero = torch.linspace(-1, 1, 41)[None].requires_grad_(), torch.zeros(1, 41)
    policy, _ = loss.summands(BatchTokens(log, zero == 0, torch.tensor([advantage]), zero))
    (wanted,) = torch.autograd.grad(policy.sum(), log)
    torch.testing.assert_close(-advantage * loss.pull(log.detach(), torch.tensor(advantage > 0)), wanted)


def test_a_kl_penalty_in_the_rewards_is_that_of_verl() -> None:
    """Its kinds, by their definitions: k1 (kl), abs, k2 (mse), and k3 (low_var_kl), which it clamps twice."""
    old, ref = torch.tensor([-0.5, -1.0, -30.0]), torch.tensor([-1.0, -0.7, -2.0])
    apart = [0.5, -0.3, -28.0]
    wanted = {
        "k1": apart, "abs": [0.5, 0.3, 28.0], "k2": [0.125, 0.045, 392.0],
        "k3": [np.exp(-0.5) - 1 + 0.5, np.exp(0.3) - 1 - 0.3, 10.0],
    }  # fmt: skip
    for kind, values in wanted.items():
        clamps = (20.0, 10.0) if kind == "k3" else ()
        torch.testing.assert_close(RewardKL(0.1, kind, *clamps).of(old, ref), 0.1 * torch.tensor(values).float())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kind": "ppo"}, "kind='ppo'"),
        ({"kind": "dr_grpo"}, "do not go together"),
        ({"max_completion_length": 8}, "do not go together"),
        ({"kind": "dr_grpo", "max_completion_length": 0}, "max_completion_length"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"beta": float("nan")}, "is not finite"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(given: dict[str, Any], what: str) -> None:
    refuses(what, PolicyLoss, **given)
    refuses("mode='x'", Correction, "x")
