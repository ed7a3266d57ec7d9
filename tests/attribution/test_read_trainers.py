"""Settings of trainers other than TRL, each field by hand. `test_loss` has the formulas of their losses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tsae.attribution.readers import ms_swift, nemo_rl, open_instruct, openrlhf, prime_rl, verl
from tsae.attribution.training.loss import Correction, PolicyLoss, RewardKL
from tsae.attribution.training.order import plan_updates
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

# Words and defaults as the trainers' own files have them: verl v0.7.0 and v0.9.0, NeMo-RL v0.7.0, open-instruct v0.3.0,
# prime-rl v0.8.0, OpenRLHF v0.9.0.
VERL = """
actor_rollout_ref:
  actor:
    {_target_: verl.workers.config.FSDPActorConfig, strategy: fsdp, ppo_mini_batch_size: 32, ppo_epochs: 1,
    ppo_micro_batch_size_per_gpu: 4, use_dynamic_bsz: false, grad_clip: 0.5, clip_ratio: 0.2, clip_ratio_low: 0.2,
    clip_ratio_high: 0.28, clip_ratio_c: 10.0, loss_agg_mode: token-mean, loss_scale_factor: null, entropy_coeff: 0,
    use_kl_loss: true, kl_loss_coef: 0.001, kl_loss_type: low_var_kl, shuffle: false, data_loader_seed: 42,
    ulysses_sequence_parallel_size: 1, fsdp_config: {model_dtype: fp32, dtype: bfloat16},
    policy_loss: {_target_: verl.workers.config.PolicyLossConfig, loss_mode: vanilla, clip_cov_ratio: 0.0002},
    optim: {optimizer: AdamW, optimizer_impl: torch.optim, lr: 1e-06, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1,
      total_training_steps: -1, weight_decay: 0.1, betas: [0.9, 0.999], min_lr_ratio: 0.0, num_cycles: 0.5,
      lr_scheduler_type: constant, warmup_style: null, clip_grad: 1.0, override_optimizer_config: null}}
  rollout: {n: 8, temperature: 1.0, response_length: '${oc.select:data.max_response_length,512}'}
  model: {path: Qwen/Qwen2.5-7B, lora_rank: 0}
data: {train_batch_size: 64, max_response_length: 8192}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: true, use_kl_in_reward: false, kl_penalty: kl,
  kl_ctrl: {type: fixed, kl_coef: 0.002},
  rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, bypass_mode: false}}
trainer: {nnodes: 1, n_gpus_per_node: 8, total_training_steps: 100, balance_batch: true, use_legacy_worker_impl: auto}
reward_model: {overlong_buffer: {enable: true, len: 4096, penalty_factor: 1.0}}
"""
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 1000, seed: 42,
  overlong_filtering: false, use_dynamic_sampling: false, async_grpo: {enabled: true, max_trajectory_age_steps: 1}}
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, kl_input_clamp_value: 20.0,
  kl_output_clamp_value: 10.0, ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: null,
  use_on_policy_kl_approximation: false, use_importance_sampling_correction: true,
  truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 5.0,
  truncated_importance_sampling_ratio_min: null, sequence_level_importance_ratios: false, token_level_loss: true,
  force_on_policy_ratio: false, use_cispo: false, disable_ppo_ratio: false, positive_example_nll_weight: 0.0}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 256
  train_micro_batch_size: 4
  precision: bfloat16
  max_grad_norm: 1.0
  megatron_cfg: {enabled: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.95], eps: 1e-8}}
  scheduler:
  - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
  - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
  - {milestones: [50]}
  generation: {temperature: 1.0}
"""
OPEN = """
{model_name_or_path: allenai/OLMo-2-1124-7B-DPO, learning_rate: 5e-7, lr_scheduler_type: constant, warmup_ratio: 0.0,
max_grad_norm: 1.0, loss_fn: dapo, clip_lower: 0.2, clip_higher: 0.272, beta: 0.01, kl_estimator: 2, seed: 1,
load_ref_policy: true, num_epochs: 1, num_mini_batches: 1, num_unique_prompts_rollout: 48, total_episodes: 768000,
num_samples_per_prompt_rollout: 16, loss_denominator: token, use_rho_correction: true, rho_clamp_upper_bound: 2.0,
async_steps: 8, temperature: 1.0, response_length: 2048}
"""
PRIME = """
max_steps: 200
model: {name: PrimeIntellect/Qwen3-1.7B-Wordle-SFT}
trainer:
  model: {name: PrimeIntellect/Qwen3-1.7B-Wordle-SFT, optimization_dtype: float32}
  loss: {type: default, dppo_mask_low: 0.2, dppo_mask_high: 0.3, adv_tau: 1.0, kl_tau: 0.001}
  optim: {type: adamw, lr: 3e-06, weight_decay: 0.01, max_norm: 1.0, betas1: 0.9, betas2: 0.999}
  scheduler: {type: linear, warmup_steps: 10, decay_steps: 20, min_lr: 0.0}
orchestrator: {batch_size: 128, group_size: 8, max_off_policy_steps: 8, train: {sampling: {temperature: 0.9}}}
"""
OPENRLHF = """
{pretrain: OpenRLHF/Llama-3-8b-sft-mixture, init_kl_coef: 0.001, use_kl_loss: false, kl_estimator: k1, l2: 0.0,
actor_learning_rate: 5e-07, lr_scheduler: cosine_with_min_lr, lr_warmup_ratio: 0.03, adam_betas: [0.9, 0.95],
max_norm: 1.0, eps_clip: 0.2, rollout_batch_size: 128, n_samples_per_prompt: 8, train_batch_size: 1024,
advantage_estimator: group_norm, policy_loss_type: ppo}
"""
SWIFT = """
{rlhf_type: grpo, model: Qwen/Qwen2.5-7B-Instruct, tuner_type: lora, lora_dropout: 0.05, swift_version: 4.5.2, seed: 42,
learning_rate: 1e-6, lr_scheduler_type: cosine, lr_scheduler_kwargs: null, warmup_ratio: 0.05, weight_decay: 0.1,
adam_beta1: 0.9, adam_beta2: 0.95, adam_epsilon: 1e-8, max_grad_norm: 1.0, optim: adamw_torch_fused, bf16: true,
per_device_train_batch_size: 4, gradient_accumulation_steps: 4, steps_per_generation: 8, num_generations: 8,
num_iterations: 1, max_completion_length: 1024, temperature: 1.0, beta: 0.04, loss_type: sapo, epsilon: 0.2,
epsilon_high: null, delta: null, importance_sampling_level: token, tau_pos: 1.0, tau_neg: 1.1, overlong_filter: true,
top_entropy_quantile: 1.0, kl_in_reward: false, use_vllm: true, rollout_importance_sampling_mode: null,
rollout_importance_sampling_threshold: 2.0, max_steps: -1, scale_rewards: group, teacher_model: null}
"""
TRAINERS: dict[str, tuple[Any, str]]
TRAINERS = {"verl": (verl, VERL), "nemo": (nemo_rl, NEMO), "open": (open_instruct, OPEN), "prime": (prime_rl, PRIME)}
TRAINERS |= {"openrlhf": (openrlhf, OPENRLHF), "swift": (ms_swift, SWIFT)}


def read(trainer: str, steps: int | None = None, **changed: Any) -> RunSettings:
    """The settings, with words changed by dotted name (dots as __); ... leaves one out."""
    reader, text = TRAINERS[trainer]
    settings = copy.deepcopy(yaml.safe_load(text))
    for name, value in changed.items():
        *path, last = name.split("__")
        at = settings
        for one in path:
            at = at.setdefault(one, {})
        at.pop(last, None)
        if value is not ...:
            at[last] = value
    assert [other for other, _ in TRAINERS.values() if other.is_mine(settings)] == [reader]
    found: RunSettings = reader.of(settings, file=Path("config.yaml"), steps=steps)
    return found


def actor(**changed: Any) -> dict[str, Any]:
    return {f"actor_rollout_ref__actor__{name}": value for name, value in changed.items()}


ENGINE = {"trainer__use_legacy_worker_impl": ..., **actor(optim__zero_indexed_step=True)}
"""What tells a config of 0.8 or 0.9."""


def test_verl() -> None:
    found = read("verl")
    assert found.optimiser == Optimiser(
        "adamw", 1e-6, "constant", 10, 100, weight_decay=0.1, max_grad_norm=0.5, every=2
    )
    assert [found.optimiser.rate(step) for step in (1, 2, 3, 4, 21, 200)] == pytest.approx(
        [0, 0, 1e-7, 1e-7, 1e-6, 1e-6]
    )
    loss = PolicyLoss(
        "bnpo", epsilon=0.2, epsilon_high=0.28, dual_clip=10.0, beta=0.001, kl_input_clamp=20, kl_clamp=10
    )
    assert found.loss == loss
    # 512 rows: 64 a process, in two mini-batches of 32, each of 8 micro-batches of 4.
    assert found.batching == Batching(8, 16, 1, 8)
    assert found.batching.updates == 2
    assert (found.base, found.trainer) == ("Qwen/Qwen2.5-7B", "verl")
    assert (found.autocast, found.weights) == ("bfloat16", "float32")
    assert found.facts["max_completion_length"] == 8192
    assert (found.facts["order"], found.facts["advantages"]) == ("log", "grpo")


def test_verl_since_0_8_averages_over_the_mini_batch() -> None:
    found = read("verl", **ENGINE)
    assert (found.loss.kind, found.batching) == ("step", Batching(1, 2, 1, 8))
    assert found.optimiser.max_grad_norm == 1.0  # clip_grad in place of grad_clip
    assert read("verl", **ENGINE, trainer__use_v1=True).facts["order"] == "unknown"
    shuffled = read("verl", **ENGINE, **actor(shuffle=True)).facts
    assert shuffled["order"] == "unknown"
    assert "actor.shuffle=False" in shuffled["order_fix"]
    assert read("verl", **actor(shuffle=True)).facts["order"] == "log"  # Workers before split in order all the same.


def rows_by_hand(n_processes: int, mini: int, micro: int, rows: int = 32) -> list[list[list[int]]]:
    """By update the micro-batches of all processes: verl hands out chunks, splits them, and splits those."""
    chunks = torch.arange(rows).chunk(n_processes)
    by_process = [chunk.split(mini // n_processes) for chunk in chunks]
    return [[part.tolist() for own in minis for part in own.split(micro)] for minis in zip(*by_process, strict=True)]


def test_processes_of_verl_split_their_rows() -> None:
    small = {"data__train_batch_size": 4, "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": 2}
    small |= actor(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=4)
    records = [
        {"problem_id": "p", "policy": "run", "prompt_ids": [1], "response_ids": [2], "outcome": "unknown", "step": step}
        for step in (1, 2)
        for _ in range(32)
    ]
    log = Rollouts.from_records(records)
    for changed, micro in (({}, 4), (ENGINE, 8)):
        plan = plan_updates(log, read("verl", **small, **changed), checkpoints={}, vocabulary=None)
        assert [(update.step, update.generation) for update in plan.updates] == [(1, 0), (2, 0), (3, 1), (4, 1)]
        parts = [[part.tolist() for part in update.parts] for update in plan.updates[:2]]
        assert parts == rows_by_hand(2, mini=16, micro=micro)
    with pytest.raises(TsaeError, match=r"2 steps use each generation.* trainer.use_v1=False"):
        plan_updates(log, read("verl", **small, trainer__use_v1=True), checkpoints={}, vocabulary=None)


def test_variants_of_verl() -> None:
    gspo = read("verl", **actor(policy_loss__loss_mode="gspo", use_kl_loss=False)).loss
    assert (gspo.kind, gspo.level, gspo.dual_clip, gspo.beta) == ("grpo", "sequence", None, 0.0)
    dr = read("verl", **actor(loss_agg_mode="seq-mean-token-sum-norm"), algorithm__norm_adv_by_std_in_grpo=False)
    assert (dr.loss.kind, dr.loss.max_completion_length, dr.facts["advantages"]) == ("sum_norm", 8192, "dr_grpo")
    newer = read("verl", **{**ENGINE, **actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512)}).loss
    assert (newer.kind, newer.max_completion_length) == ("dr_grpo", 512)
    cispo = read("verl", **actor(policy_loss__loss_mode="cispo")).loss
    assert (cispo.surrogate, cispo.cispo_low, cispo.epsilon_high) == ("cispo", 0.8, 1.28)
    dynamic = read("verl", **actor(use_dynamic_bsz=True))
    assert (dynamic.loss.kind, dynamic.batching) == ("step", Batching(1, 2, 1, 8))
    assert "use_dynamic_bsz" in dynamic.notes[0]
    cosine = read("verl", **actor(optim__warmup_style="cosine", optim__min_lr_ratio=0.1)).optimiser
    assert cosine.rate(200) == pytest.approx(1e-6 * (0.1 + 0.9 * (1 + np.cos(np.pi * 89 / 90)) / 2))
    in_reward = read("verl", algorithm__use_kl_in_reward=True, **actor(use_kl_loss=False))
    assert in_reward.reward_kl == RewardKL(0.002, "k1")
    k3 = read("verl", algorithm__use_kl_in_reward=True, algorithm__kl_penalty="low_var_kl").reward_kl
    assert k3 == RewardKL(0.002, "k3", 20.0, 10.0)
    weighed = read("verl", algorithm__rollout_correction__rollout_is="token").loss
    assert weighed.correction == Correction("token_truncate", None, 2.0)
    assert read("verl", algorithm__rollout_correction__bypass_mode=True).loss.ratio_to == "sampler"
    assert read("verl", **actor(kl_loss_type="k3+")).loss.kl == "k2"


def test_nemo_rl() -> None:
    found = read("nemo")
    rates = [found.optimiser.rate(step) / 5e-6 for step in (1, 2, 3, 99, 101, 102, 4000)]
    assert rates == pytest.approx([0.1, 0.1, 0.1 + 0.9 / 50, 0.1 + 0.9 * 49 / 50, 1, 1, 1])
    assert (found.optimiser.betas, found.optimiser.weight_decay, found.optimiser.every) == ((0.9, 0.95), 0.01, 2)
    assert found.loss == PolicyLoss(
        "step", epsilon=0.2, epsilon_high=0.28, beta=0.01, kl_corrected=True, kl_corrected_to="now",
        kl_input_clamp=20.0, kl_clamp=10.0,
        correction=Correction("token_truncate", None, 5.0),
    )  # fmt: skip
    assert found.loss.needs_sampler
    assert (found.batching, found.facts["order"]) == (Batching(1, 2, 1, 1), "log")
    before = read("nemo", loss_fn__positive_example_nll_weight=..., loss_fn__sequence_level_importance_ratios=True)
    assert (before.loss.kl_corrected, before.loss.level) == (False, "sequence")
    assert before.loss.correction == Correction("sequence_truncate", None, 5.0)


def test_open_instruct() -> None:
    found = read("open")
    assert found.optimiser == Optimiser("adamw", 5e-7, "constant", n_steps=1000)
    assert found.loss == PolicyLoss(
        "step", epsilon=0.2, epsilon_high=0.272, beta=0.01, kl_input_clamp=40.0,
        correction=Correction("token_truncate", None, 2.0),
    )  # fmt: skip
    assert (found.batching, found.seed, found.facts["order"]) == (Batching(1, 1, 1, 1), 1, "log")
    masked = read("open", rho_mask_lower_bound=0.5, rho_mask_upper_bound=2.0).loss.correction
    assert masked == Correction("token_mask", 0.5, 2.0)
    old = read("open", use_rho_correction=..., rho_clamp_upper_bound=..., truncated_importance_sampling_ratio_cap=0.0)
    assert old.loss.correction is None
    several = read("open", num_mini_batches=4).facts
    assert several["order"] == "unknown"
    assert "--num_mini_batches 1" in several["order_fix"]
    nested = {"args": yaml.safe_load(OPEN), "streaming": {"mask_truncated_completions": True}}
    assert open_instruct.of(nested, file=Path("config.yaml"), steps=None).loss.mask_truncated


def test_prime_rl() -> None:
    found = read("prime")
    factors = [found.optimiser.rate(step) / 3e-6 for step in (1, 6, 11, 181, 200)]
    assert factors == pytest.approx([1e-8, 0.5, 1, 1, 1e-8], abs=1e-7)
    assert found.loss == PolicyLoss(
        "step", temperature=0.9, epsilon=0.2, epsilon_high=0.3, surrogate="dppo", beta=0.002, kl="k2", kl_to="sampler",
        ratio_to="sampler",
    )  # fmt: skip
    assert (found.loss.needs_ref, found.loss.needs_sampler, found.facts["num_generations"]) == (False, True, 8)
    own = {**yaml.safe_load(PRIME)["trainer"], "weight_broadcast": {"type": "nccl"}, "max_steps": 200}  # as W&B has it
    assert prime_rl.of(own, file=Path("config.yaml"), steps=None).optimiser == found.optimiser
    old = {"type": "default", "ipo_mask_low": 0.2, "ipo_mask_high": 0.2, "kl_tau": 0.0}
    assert read("prime", trainer__loss=old).loss.surrogate == "ipo"


def test_openrlhf() -> None:
    found = read("openrlhf", steps=100)
    assert found.optimiser == Optimiser(
        "adamw", 5e-7, "cosine_with_min_lr", 3, 100, (0.9, 0.95), shape={"min_lr_rate": 0.1}, decay_all=False
    )
    assert (found.loss.kind, found.loss.beta) == ("step", 0.0)
    assert found.reward_kl == RewardKL(0.001, "k1", clamp=10.0, to_go=True)
    dotted = {"actor.eps_clip": 0.2, "actor.adam.lr": 1e-6, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"}
    dotted |= {"rollout.batch_size": 128, "train.batch_size": 32, "algo.advantage.estimator": "rloo"}
    new = openrlhf.of(dotted, file=Path("args.json"), steps=100)
    assert (new.loss.beta, new.batching.updates, new.facts["order"]) == (0.01, 4, "unknown")


def test_ms_swift() -> None:
    found = read("swift", steps=100)
    assert found.optimiser == Optimiser(
        "adamw", 1e-6, "cosine", 5, 100, (0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0, decay_all=False
    )
    assert found.loss == PolicyLoss(
        "grpo", surrogate="sapo", sapo_temperatures=(1.0, 1.1), beta=0.04, kl_input_clamp=20.0, kl_clamp=10.0,
        mask_truncated=True,
    )  # fmt: skip
    assert (found.batching.updates, found.trainer, found.version, found.dropout) == (2, "ms_swift", "4.5.2", True)
    assert found.base == "Qwen/Qwen2.5-7B-Instruct"
    assert read("swift", steps=100, kl_in_reward=True).loss.beta == 0  # It is in the logged advantages.
    weighed = read("swift", steps=100, rollout_importance_sampling_mode="token_mask", beta=0.0).loss.correction
    assert weighed == Correction("token_mask", None, 2.0)


@pytest.mark.parametrize(
    ("trainer", "changed", "said"),
    [
        ("verl", actor(policy_loss__loss_mode="clip_cov"), "policy_loss.loss_mode=clip_cov is not known"),
        ("verl", actor(policy_loss__new_knob=0.3), "policy_loss.new_knob=0.3 is not known, and may change"),
        ("verl", actor(entropy_coeff=0.001), "entropy_coeff=0.001: it changes the updates, which is not replayed"),
        ("verl", actor(strategy="megatron"), "strategy=megatron"),
        ("verl", actor(optim__override_optimizer_config={"eps": 1e-5}), "override_optimizer_config.eps=1e-05"),
        ("verl", actor(ppo_mini_batch_size=48), "64 rows of a generation are not a multiple of the 48"),
        ("verl", {"algorithm__adv_estimator": "gae"}, "adv_estimator=gae is not known"),
        ("verl", {"algorithm__rollout_correction__rollout_rs": "seq_mean_k1"}, "rollout_rs=seq_mean_k1"),
        ("verl", {"trainer__total_training_steps": None}, "needs the number of steps of the whole training"),
        ("verl", actor(clip_ratio_low="low"), "clip_ratio_low='low' is not a number"),
        ("verl", actor(policy_loss__loss_mode="gspo"), "loss_agg_mode=token-mean"),
        ("verl", {**ENGINE, **actor(loss_agg_mode="seq-mean-token-sum-norm")}, "does not say .*loss_scale_factor"),
        (
            "verl",
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
            "follows the divergence",
        ),
        ("nemo", {"loss_fn__positive_example_nll_weight": 0.1}, "positive_example_nll_weight=0.1 is not known"),
        ("nemo", {"loss_fn__truncated_importance_sampling_type": "seq-mask-tis"}, "seq-mask-tis is not known"),
        ("nemo", {"policy__optimizer__kwargs__amsgrad": True}, "amsgrad=True is not known"),
        ("nemo", {"policy__scheduler": [{"name": "torch.optim.lr_scheduler.StepLR"}]}, "StepLR {} is not known"),
        ("open", {"clip_higher": ...}, "does not say clip_higher"),
        ("open", {"loss_fn": "gspo"}, "loss_fn=gspo is not known"),
        ("open", {"rho_mask_tv_divergence": True}, "rho_mask_tv_divergence=True"),
        ("prime", {"trainer__loss": {"type": "default"}}, "does not say trainer.loss.dppo_mask_low"),
        ("prime", {"trainer__loss__type": "custom"}, "loss.type=custom is not known"),
        ("prime", {"trainer__loss__token_mask_high": 8.0}, "token_mask_high=8.0 is not known"),
        ("openrlhf", {"advantage_estimator": "gae"}, "advantage.estimator=gae is not known"),
        ("swift", {"loss_type": "fipo"}, "loss_type=fipo is not known"),
        ("swift", {"sdar_loss_coef": 0.1}, "sdar_loss_coef=0.1: it changes the updates"),
        ("swift", {"rollout_importance_sampling_mode": "token_mask"}, "beta=0.04"),
    ],
)
def test_unknown_words_are_named(trainer: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(TsaeError, match=said):
        read(trainer, steps=100 if trainer in ("openrlhf", "swift") else None, **changed)
