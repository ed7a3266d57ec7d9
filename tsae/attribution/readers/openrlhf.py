"""OpenRLHF's arguments (``train_ppo_ray``) as JSON or in Weights & Biases: with dots since 0.10, and as before.

Rows are drawn in an order that its settings do not tell. Since 0.10.3 a step is normalised by its tokens, before that
every micro-batch by its own. Its PPO logs no rollouts; what a reward function logs can be attributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import PolicyLoss, RewardKL
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings

_ADVANTAGES = {"group_norm": "grpo", "dr_grpo": "dr_grpo", "rloo": "rloo"}
_LOSSES = {"ppo": ("step", "token"), "gspo": ("grpo", "sequence")}
_SCHEDULES = {name: name for name in ("constant", "linear", "cosine", "cosine_with_min_lr")}
_SCHEDULES["constant_with_warmup"] = "constant"


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are OpenRLHF's."""
    return bool({"actor.eps_clip", "actor.policy_loss_type", "init_kl_coef"} & Words(settings, Path()).values.keys())


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file)
    steps = steps or words.whole("max_steps", default=0) or None
    words.usual("actor.entropy_coef entropy_loss_coef actor.aux_loss_coef aux_loss_coef actor.optim=adam kl_target")
    words.usual("algo.advantage.is_correction_enable enable_vllm_is_correction")
    words.usual("algo.kl.target critic.freezing_steps=-1 freezing_actor_steps=-1 ptx_coef=0.05")
    batch, n = (
        words.whole("rollout.batch_size", "rollout_batch_size"),
        ("rollout.n_samples_per_prompt", "n_samples_per_prompt"),
    )
    size = words.take("mini=train.batch_size|train_batch_size epochs=train.max_epochs|max_epochs:1")
    updates = words.updates(batch * words.whole(*n, default=1), int(size["mini"]))
    given = words.take("learning_rate=actor.adam.lr|actor_learning_rate max_grad_norm=actor.max_norm|max_norm:1.0")
    given |= words.take("eps=actor.adam.eps:1e-8 weight_decay=actor.adam.weight_decay|l2:0.0")
    given["schedule"] = words.choice(_SCHEDULES, "actor.lr_scheduler", "lr_scheduler", default="cosine_with_min_lr")
    if given["schedule"] == "cosine_with_min_lr":
        given["shape"] = words.take("min_lr_rate=actor.min_lr_ratio:0.1")
    given["betas"] = tuple(map(float, words.get("actor.adam.betas", "adam_betas", default=(0.9, 0.95))))
    rise = words.number("actor.lr_warmup_ratio", "lr_warmup_ratio", default=0.03)
    optimiser = Optimiser(warmup=ceil(rise * (steps or 0)), n_steps=steps, decay_all=False, **given)
    loss = words.take("temperature=rollout.temperature|temperature:1.0 dual_clip=actor.dual_clip|dual_clip:null")
    clip = words.number("actor.eps_clip", "eps_clip", default=0.2)
    both = words.get("actor.eps_clip_low_high", "eps_clip_low_high", default=(clip, clip))
    loss["epsilon"], loss["epsilon_high"] = map(float, both)
    loss["kl"] = words.choice({k: k for k in ("k1", "k2", "k3")}, "algo.kl.estimator", "kl_estimator", default="k1")
    loss["kind"], loss["level"] = words.choice(_LOSSES, "actor.policy_loss_type", "policy_loss_type", default="ppo")
    advantages = words.choice(_ADVANTAGES, "algo.advantage.estimator", "advantage_estimator", default="gae")
    facts: dict[str, Any] = {
        "num_generations": words.whole(*n, default=1),
        "max_steps": steps,
        "advantages": advantages,
        "advantage_epsilon": 1e-9,
    }
    facts |= {"order": "log" if updates == 1 else "unknown", "order_fix": "train.batch_size of all rollouts"}
    rest: dict[str, Any] = {"base": words.get("actor.model_name_or_path", "pretrain"), "autocast": "bfloat16"}
    beta = words.number("algo.kl.init_coef", "init_kl_coef", default=0.01)
    if words.flag("algo.kl.use_loss", "use_kl_loss"):
        loss["beta"] = beta
    elif beta:
        rest["reward_kl"] = RewardKL(beta, loss["kl"], clamp=10.0, to_go=True)
    rest |= {"dropout": words.number("ds.lora.dropout", "lora_dropout", default=0.0) > 0, "facts": facts}
    rest["notes"] = ("before 0.10.3 the token mean was that of micro-batches, whose members are not known",)
    batching = Batching(1, updates, size["epochs"], 1)
    return RunSettings(optimiser, PolicyLoss(**loss), batching, str(file), "openrlhf", **rest)
