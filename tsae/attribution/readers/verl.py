"""verl's Hydra config (``.hydra/config.yaml``, or as Weights & Biases has it), 0.4 to 0.9.

Every process takes an equal run of consecutive rows of a generation (train_batch_size × n), splits it into mini-batches
in their order, and takes a step with each. All steps of a generation have one learning rate. ``rollout_data_dir`` has
the rows in that order, for balance_batch moves them before. The trainer of 0.9 (``use_v1``) sorts its log by problem.

The workers to 0.7 average over a micro-batch's tokens, those since 0.8 over the mini-batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss, RewardKL
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_ACTOR, _ALGO, _CORRECTION = "actor_rollout_ref.actor.", "algorithm.", "algorithm.rollout_correction."
_KINDS = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo"}
_KINDS["seq-mean-token-sum-norm"] = "dr_grpo"
_SURROGATES = {"sapo": "sapo", "cispo": "cispo"} | dict.fromkeys(("vanilla", "gspo", "gpg", "bypass_mode"), "clip")
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_GRADIENTS = _KL | {f"{name}+": "k2" for name in _KL}
"""With a plus the value is the named one's, and the gradient that of k2."""
_VALUES = _KL | {f"{name}+": of for name, of in _KL.items()}
_ADVANTAGES = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo"}
_LEVELS = {"None": None, "token": "token_truncate", "sequence": "sequence_truncate"}


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are verl's."""
    return any(str(name).split(".")[0] == "actor_rollout_ref" for name in settings)


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words, notes = Words(settings, file), list[str]()
    legacy = words.get("trainer.use_legacy_worker_impl")
    engine = legacy == "disable" or (legacy is None and f"{_ACTOR}optim.zero_indexed_step" in words.values)
    _refuse(words)
    size = words.take("n=rollout.n:1 length=rollout.response_length:512", "actor_rollout_ref.")
    size |= words.take("batch=data.train_batch_size:1024 nodes=trainer.nnodes:1 gpus=trainer.n_gpus_per_node:8")
    size |= words.take(
        "mini=ppo_mini_batch_size:256 epochs=ppo_epochs:1 split=ulysses_sequence_parallel_size:1", _ACTOR
    )
    size |= words.take("micro=ppo_micro_batch_size_per_gpu:0 dynamic=use_dynamic_bsz:false", _ACTOR)
    updates, processes = words.updates(size["batch"], size["mini"]), size["nodes"] * size["gpus"] // size["split"]
    fixed = size["micro"] and not (engine or size["dynamic"])
    parts = size["mini"] * size["n"] // (processes * size["micro"]) if fixed else 1
    steps_of = words.take(f"optim={_ACTOR}optim.total_training_steps:0 all=trainer.total_training_steps:0").values()
    total = next((n for n in steps_of if n > 0), steps)
    has = words.take(
        "dropped=filter_groups.enable:false kl=use_kl_in_reward:false std=norm_adv_by_std_in_grpo:true", _ALGO
    )
    has |= words.take(f"v1=trainer.use_v1:false shuffle={_ACTOR}shuffle:false")
    advantages = words.choice(_ADVANTAGES, "algorithm.adv_estimator", default="gae")
    loss = _loss(words, size["length"], engine=engine)
    if loss.kind == "bnpo" and size["dynamic"]:
        loss = replace(loss, kind="step")
        notes.append("micro-batches had no fixed size (use_dynamic_bsz): the token mean is taken over mini-batches")
    if has["dropped"]:
        notes.append("groups of equal rewards were dropped before the updates (filter_groups)")
    facts = {
        "num_generations": size["n"],
        "max_completion_length": size["length"],
        "max_steps": total and total * updates * size["epochs"],
    }
    facts |= {"advantages": advantages if has["std"] or advantages != "grpo" else "dr_grpo", "advantage_epsilon": 1e-6}
    facts["order"] = "unknown" if has["v1"] or (has["shuffle"] and engine) else "log"
    facts["order_fix"] = "trainer.use_v1=False and actor_rollout_ref.actor.shuffle=False keep the order in the log"
    facts["sampler_fix"] = (
        "rollout_data_dir holds no log-probabilities: set algorithm.rollout_correction.rollout_is=null"
    )
    kept, computed = (words.get(f"{_ACTOR}fsdp_config.{name}", default="") for name in ("model_dtype", "dtype"))
    given: dict[str, Any] = {"base": words.get("actor_rollout_ref.model.path"), "facts": facts, "notes": tuple(notes)}
    if has["kl"]:
        words.need("the weight of the KL penalty follows the divergence", "algorithm.kl_ctrl.type", "fixed")
        penalty = words.take("beta=kl_ctrl.kl_coef:0.001", _ALGO)
        penalty["kl"] = words.choice(_VALUES, "algorithm.kl_penalty", default="kl")
        penalty |= {"input_clamp": 20.0, "clamp": 10.0} if penalty["kl"] == "k3" else {}
        given["reward_kl"] = RewardKL(**penalty)
    given["autocast"] = "float32" if computed in ("float32", "fp32") else "bfloat16"
    given["weights"] = "bfloat16" if kept in ("bf16", "bfloat16") else "float32"
    batching = Batching(parts, parts * updates, size["epochs"], processes)
    optimiser = _optimiser(words, total, int(batching.updates), engine=engine)
    return RunSettings(optimiser, loss, batching, str(file), "verl", **given)


def _refuse(words: Words) -> None:
    words.usual("entropy_coeff strategy=fsdp|fsdp2 optim.optimizer=AdamW optim.optimizer_impl=torch.optim", _ACTOR)
    words.usual(
        f"{_ACTOR}qat.enable distillation.enabled algorithm.use_pf_ppo trainer.critic_warmup algorithm.rollout_is"
    )
    words.usual("rollout_is_batch_normalize rollout_rs", _CORRECTION)
    words.only(f"{_ACTOR}optim.override_optimizer_config.", "")
    losses = "_target_ loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta"
    words.only(f"{_ACTOR}policy_loss.", f"{losses} rollout_correction")


def _loss(words: Words, length: int, *, engine: bool) -> PolicyLoss:
    mode = str(words.get(f"{_ACTOR}policy_loss.loss_mode", default="vanilla"))
    surrogate = words.choice(_SURROGATES, f"{_ACTOR}policy_loss.loss_mode", default="vanilla")
    kind: Any = words.choice(_KINDS, f"{_ACTOR}loss_agg_mode", default="token-mean")
    given = words.take("temperature=actor_rollout_ref.rollout.temperature:1.0")
    given |= words.take("dual_clip=clip_ratio_c:3.0 beta=kl_loss_coef:0.001", _ACTOR)
    has = words.take("kl=use_kl_loss:false up=tau_pos:1.0 down=tau_neg:1.05 both=clip_ratio:0.2", _ACTOR)
    has |= words.take(f"low=clip_ratio_low:{has['both']} high=clip_ratio_high:{has['both']}", _ACTOR)
    has |= words.take(f"old={_ACTOR}tis_imp_ratio_cap:0.0 cap={_CORRECTION}rollout_is_threshold:2.0")
    has |= words.take("bypass=bypass_mode:false", _CORRECTION)
    if mode in ("gspo", "sapo"):
        if has["kl"]:  # The KL term alone is averaged by loss_agg_mode.
            words.usual("loss_agg_mode=seq-mean-token-mean", _ACTOR)
        kind = "grpo"
    limit = None
    if kind == "dr_grpo":
        limit = words.whole(f"{_ACTOR}loss_scale_factor", default=None if engine else length)
        if not engine:  # By the length alone.
            words.usual("use_dynamic_bsz", _ACTOR)
            kind = "sum_norm"
    level: Any = words.choice(_LEVELS, f"{_CORRECTION}rollout_is", default="None")
    if has["old"] > 0:
        level, has["cap"] = "token_truncate", has["old"]
    if has["bypass"] or mode == "bypass_mode":  # The ratio itself corrects for the sampler.
        words.usual("loss_type=ppo_clip", _CORRECTION)
        level, given["ratio_to"] = None, "sampler"
    if mode not in ("vanilla", "bypass_mode"):
        del given["dual_clip"]
    given |= {"epsilon": None if mode == "gpg" else has["low"], "epsilon_high": has["high"], "surrogate": surrogate}
    if mode == "cispo":
        given |= {"epsilon_high": 1 + has["high"], "cispo_low": 1 - has["low"]}
    given |= {"level": "sequence" if mode == "gspo" else "token", "sapo_temperatures": (has["up"], has["down"])}
    given["kl"] = words.choice(_GRADIENTS, f"{_ACTOR}kl_loss_type", default="low_var_kl")
    given |= {"kl_input_clamp": 20.0, "kl_clamp": 10.0} if given["kl"] == "k3" else {}
    given["beta"] *= has["kl"]
    given["correction"] = None if level is None else Correction(level, None, has["cap"])
    return PolicyLoss("step" if kind == "bnpo" and engine else kind, limit, **given)


def _optimiser(words: Words, total: int | None, every: int, *, engine: bool) -> Optimiser:
    names = [f"{_ACTOR}optim.{name}" for name in ("warmup_style", "lr_scheduler_type", "betas")]
    cosine = words.choice({"constant": False, "cosine": True}, *names[:2], default="constant")
    given = words.take("learning_rate=lr:1e-6 weight_decay=weight_decay:0.01", f"{_ACTOR}optim.")
    shape = words.take("min_lr_rate=min_lr_ratio:0.0 num_cycles=num_cycles:0.5", f"{_ACTOR}optim.")
    rise = words.take("steps=lr_warmup_steps:-1 part=lr_warmup_steps_ratio:0.0", f"{_ACTOR}optim.")
    if rise["steps"] < int(engine):
        if rise["part"] and total is None:
            what = f"lr_warmup_steps_ratio={rise['part']} needs the number of steps of the whole training"
            raise TsaeError(what, where=words.file, fix="Give trainer.total_training_steps.")
        rise["steps"] = int(rise["part"] * (total or 0))
    clip = words.take("clip=optim.clip_grad:1.0" if engine else "clip=grad_clip:1.0", _ACTOR)["clip"]
    given |= {"schedule": "cosine_with_min_lr" if cosine else "constant", "shape": shape if cosine else {}}
    given |= {"warmup": rise["steps"], "n_steps": total, "max_grad_norm": clip or None, "every": every}
    return Optimiser(betas=tuple(map(float, words.get(names[2], default=(0.9, 0.999)))), **given)  # type: ignore[arg-type]
