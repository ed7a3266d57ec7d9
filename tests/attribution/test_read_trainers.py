"""Settings of trainers other than TRL, each field by hand. `test_loss` has the formulas of their losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from support.builders import make_rollouts
from support.refusals import refuses
from tsae.attribution.config_words import trainer_of
from tsae.attribution.find_settings import read_settings
from tsae.attribution.loss import Correction, PolicyLoss, RewardKL
from tsae.attribution.order import plan_updates
from tsae.attribution.other_trainers import READERS
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError


def own(trainer: str) -> dict[str, Any]:
    """Words and defaults as the trainer's own file has them."""
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "trainers" / f"{trainer}.yaml").read_text())
    return found


def read(trainer: str, steps: int | None = None, **changed: Any) -> RunSettings:
    """The settings, with words changed by dotted name (dots as __); ... leaves one out."""
    settings = own(trainer)
    for name, value in changed.items():
        *path, last = name.split("__")
        at = settings
        for one in path:
            at = at.setdefault(one, {})
        at.pop(last, None)
        if value is not ...:
            at[last] = value
    assert trainer_of(settings) == trainer
    return READERS[trainer](settings, Path("config.yaml"), steps)


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
    log = make_rollouts(n_problems=8, n_samples=8).with_column("step", np.repeat([1, 2], 32))
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
    found = read("nemo_rl")
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
    before = read("nemo_rl", loss_fn__positive_example_nll_weight=..., loss_fn__sequence_level_importance_ratios=True)
    assert (before.loss.kl_corrected, before.loss.level) == (False, "sequence")
    assert before.loss.correction == Correction("sequence_truncate", None, 5.0)


def test_open_instruct() -> None:
    found = read("open_instruct")
    assert found.optimiser == Optimiser("adamw", 5e-7, "constant", n_steps=1000)
    assert found.loss == PolicyLoss(
        "step", epsilon=0.2, epsilon_high=0.272, beta=0.01, kl_input_clamp=40.0,
        correction=Correction("token_truncate", None, 2.0),
    )  # fmt: skip
    assert (found.batching, found.seed, found.facts["order"]) == (Batching(1, 1, 1, 1), 1, "log")
    masked = read("open_instruct", rho_mask_lower_bound=0.5, rho_mask_upper_bound=2.0).loss.correction
    assert masked == Correction("token_mask", 0.5, 2.0)
    old = read(
        "open_instruct", use_rho_correction=..., rho_clamp_upper_bound=..., truncated_importance_sampling_ratio_cap=0.0
    )
    assert old.loss.correction is None
    several = read("open_instruct", num_mini_batches=4).facts
    assert several["order"] == "unknown"
    assert "--num_mini_batches 1" in several["order_fix"]
    nested = {"args": own("open_instruct"), "streaming": {"mask_truncated_completions": True}}
    assert READERS["open_instruct"](nested, Path("config.yaml"), None).loss.mask_truncated


def test_prime_rl() -> None:
    found = read("prime_rl")
    factors = [found.optimiser.rate(step) / 3e-6 for step in (1, 6, 11, 181, 200)]
    assert factors == pytest.approx([1e-8, 0.5, 1, 1, 1e-8], abs=1e-7)
    assert found.loss == PolicyLoss(
        "step", temperature=0.9, epsilon=0.2, epsilon_high=0.3, surrogate="dppo", beta=0.002, kl="k2", kl_to="sampler",
        ratio_to="sampler",
    )  # fmt: skip
    assert (found.loss.needs_ref, found.loss.needs_sampler, found.facts["num_generations"]) == (False, True, 8)
    of_wandb = {**own("prime_rl")["trainer"], "weight_broadcast": {"type": "nccl"}, "max_steps": 200}  # as W&B has it
    assert READERS["prime_rl"](of_wandb, Path("config.yaml"), None).optimiser == found.optimiser
    old = {"type": "default", "ipo_mask_low": 0.2, "ipo_mask_high": 0.2, "kl_tau": 0.0}
    assert read("prime_rl", trainer__loss=old).loss.surrogate == "ipo"


def test_openrlhf() -> None:
    found = read("openrlhf", steps=100)
    assert found.optimiser == Optimiser(
        "adamw", 5e-7, "cosine_with_min_lr", 3, 100, (0.9, 0.95), shape={"min_lr_rate": 0.1}, decay_all=False
    )
    assert (found.loss.kind, found.loss.beta) == ("step", 0.0)
    assert found.reward_kl == RewardKL(0.001, "k1", clamp=10.0, to_go=True)
    dotted = {"actor.eps_clip": 0.2, "actor.adam.lr": 1e-6, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"}
    dotted |= {"rollout.batch_size": 128, "train.batch_size": 32, "algo.advantage.estimator": "rloo"}
    new = READERS["openrlhf"](dotted, Path("args.json"), 100)
    assert (new.loss.beta, new.batching.updates, new.facts["order"]) == (0.01, 4, "unknown")


def test_ms_swift() -> None:
    found = read("ms_swift", steps=100)
    assert found.optimiser == Optimiser(
        "adamw", 1e-6, "cosine", 5, 100, (0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0, decay_all=False
    )
    assert found.loss == PolicyLoss(
        "grpo", surrogate="sapo", sapo_temperatures=(1.0, 1.1), beta=0.04, kl_input_clamp=20.0, kl_clamp=10.0,
        mask_truncated=True,
    )  # fmt: skip
    assert (found.batching.updates, found.trainer, found.version, found.dropout) == (2, "ms_swift", "4.5.2", True)
    assert found.base == "Qwen/Qwen2.5-7B-Instruct"
    assert read("ms_swift", steps=100, kl_in_reward=True).loss.beta == 0  # It is in the logged advantages.
    weighed = read("ms_swift", steps=100, rollout_importance_sampling_mode="token_mask", beta=0.0).loss.correction
    assert weighed == Correction("token_mask", None, 2.0)
    # A step is divided by the tokens of the generation, which has twice as many, and by its 4 micro-batches.
    assert read("ms_swift", steps=100, loss_type="dapo").loss.dapo_factor == 1 / 8


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
        ("nemo_rl", {"loss_fn__positive_example_nll_weight": 0.1}, "positive_example_nll_weight=0.1 is not known"),
        ("nemo_rl", {"loss_fn__truncated_importance_sampling_type": "seq-mask-tis"}, "seq-mask-tis is not known"),
        ("nemo_rl", {"policy__optimizer__kwargs__amsgrad": True}, "amsgrad=True is not known"),
        ("nemo_rl", {"policy__scheduler": [{"name": "torch.optim.lr_scheduler.StepLR"}]}, "StepLR {} is not known"),
        ("open_instruct", {"clip_higher": ...}, "does not say clip_higher"),
        ("open_instruct", {"loss_fn": "gspo"}, "loss_fn=gspo is not known"),
        ("open_instruct", {"rho_mask_tv_divergence": True}, "rho_mask_tv_divergence=True"),
        ("prime_rl", {"trainer__loss": {"type": "default"}}, "does not say trainer.loss.dppo_mask_low"),
        ("prime_rl", {"trainer__loss__type": "custom"}, "loss.type=custom is not known"),
        ("prime_rl", {"trainer__loss__token_mask_high": 8.0}, "token_mask_high=8.0 is not known"),
        ("openrlhf", {"advantage_estimator": "gae"}, "advantage.estimator=gae is not known"),
        ("ms_swift", {"loss_type": "fipo"}, "loss_type=fipo is not known"),
        ("ms_swift", {"sdar_loss_coef": 0.1}, "sdar_loss_coef=0.1: it changes the updates"),
        ("ms_swift", {"rollout_importance_sampling_mode": "token_mask"}, "beta=0.04"),
    ],
)
def test_unknown_words_are_named(trainer: str, changed: dict[str, Any], said: str) -> None:
    refuses(said, read, trainer, steps=100 if trainer in ("openrlhf", "ms_swift") else None, **changed)


def test_sizes_that_are_0_are_named(tmp_path: Path) -> None:
    for changed, said in (({"n_gpus_per_node": 0}, "a size in it is 0"), ({"nnodes": -1}, "must be at least 1")):
        settings = own("verl")
        settings["trainer"] |= changed
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        refuses(said, read_settings, tmp_path)
