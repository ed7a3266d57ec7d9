"""OpenRLHF's arguments (``train_ppo_ray``) as JSON or in Weights & Biases: with dots since 0.10, and as before.

Rows are drawn in an order that its settings do not tell. Since 0.10.3 a step is normalised by its tokens, before that
every micro-batch by its own. Its PPO logs no rollouts; what a reward function logs can be attributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.optimiser import Optimiser
from tsae.attribution.training.read.words import Words
from tsae.attribution.training.settings import Batching, RunSettings

_ADVANTAGES = {"group_norm": "grpo", "dr_grpo": "dr_grpo", "rloo": "rloo"}
_LEVELS: Mapping[str, Any] = {"tis": "token_truncate", "icepop": "token_mask"}
_SCHEDULES: Mapping[str, Any] = {name: name for name in ("constant", "linear", "cosine", "cosine_with_min_lr")}
_SCHEDULES = {**_SCHEDULES, "constant_with_warmup": "constant"}


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are OpenRLHF's."""
    return bool({"actor.eps_clip", "actor.policy_loss_type", "init_kl_coef"} & Words(settings, Path()).values.keys())


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file)
    words.usual("actor.entropy_coef entropy_loss_coef actor.aux_loss_coef aux_loss_coef actor.optim=adam kl_target")
    words.usual("algo.kl.target critic.freezing_steps=-1 freezing_actor_steps=-1 ptx_coef=0.05")
    size = words.take(
        "batch=rollout.batch_size|rollout_batch_size n=rollout.n_samples_per_prompt|n_samples_per_prompt:1"
    )
    size |= words.take("mini=train.batch_size|train_batch_size epochs=train.max_epochs|max_epochs:1")
    updates = words.updates(int(size["batch"]) * size["n"], int(size["mini"]))
    given = words.take("learning_rate=actor.adam.lr|actor_learning_rate max_grad_norm=actor.max_norm|max_norm:1.0")
    given |= words.take("eps=actor.adam.eps:1e-8 weight_decay=actor.adam.weight_decay|l2:0.0")
    rise = words.take("part=actor.lr_warmup_ratio|lr_warmup_ratio:0.03 least=actor.min_lr_ratio:0.1")
    schedule = words.choice(_SCHEDULES, "actor.lr_scheduler", "lr_scheduler", default="cosine_with_min_lr")
    betas: Any = tuple(float(one) for one in words.get("actor.adam.betas", "adam_betas", default=(0.9, 0.95)))
    has = words.take("clip=actor.eps_clip|eps_clip:0.2 beta=algo.kl.init_coef|init_kl_coef:0.01")
    has |= words.take("in_loss=algo.kl.use_loss|use_kl_loss:false heat=rollout.temperature|temperature:1.0")
    has |= words.take("dual=actor.dual_clip|dual_clip:null")
    has |= words.take("weighed=algo.advantage.is_correction_enable|enable_vllm_is_correction:false")
    low, high = words.get("actor.eps_clip_low_high", "eps_clip_low_high", default=(has["clip"],) * 2)
    gspo = words.choice({"ppo": False, "gspo": True}, "actor.policy_loss_type", "policy_loss_type", default="ppo")
    kl: Any = words.choice({"k1": "k1", "k2": "k2", "k3": "k3"}, "algo.kl.estimator", "kl_estimator", default="k1")
    correction = None
    if has["weighed"] and not gspo:
        bounds = words.get("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold", default=(0.5, 5.0))
        bounds = bounds if isinstance(bounds, list | tuple) else (None, bounds)
        level = words.choice(_LEVELS, "algo.advantage.is_correction_type", default="tis")
        correction = Correction(level, *[None if one is None else float(one) for one in bounds])
    advantages = words.choice(_ADVANTAGES, "algo.advantage.estimator", "advantage_estimator", default="gae")
    facts = {"num_generations": size["n"], "max_steps": steps, "advantages": advantages}
    facts |= {"order": "log" if updates == 1 else "unknown", "order_fix": "train.batch_size of all rollouts"}
    if has["beta"] and not has["in_loss"]:
        facts["kl_in_reward"] = {"beta": has["beta"], "kl": kl}
    given |= {"betas": betas, "warmup": int(-(-rise["part"] * (steps or 0) // 1)), "n_steps": steps, "decay_all": False}
    given["shape"] = {"min_lr_rate": rise["least"]} if schedule == "cosine_with_min_lr" else {}
    return RunSettings(
        Optimiser("adamw", schedule=schedule, **given),
        PolicyLoss(
            "grpo" if gspo else "step",
            temperature=has["heat"],
            epsilon=float(low),
            epsilon_high=float(high),
            level="sequence" if gspo else "token",
            dual_clip=has["dual"],
            beta=has["beta"] if has["in_loss"] else 0.0,
            kl=kl,
            correction=correction,
            ratio_to="sampler" if gspo and has["weighed"] else "old",
        ),
        Batching(1, updates, size["epochs"], 1),
        str(file),
        "openrlhf",
        base=words.get("actor.model_name_or_path", "pretrain"),
        autocast="bfloat16",
        dropout=words.take("rate=ds.lora.dropout|lora_dropout:0.0")["rate"] > 0,
        facts=facts,
        notes=("before 0.10.3 the token mean is of micro-batches, whose members are not known: taken over the step",),
    )
