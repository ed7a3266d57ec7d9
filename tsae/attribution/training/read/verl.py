"""verl's Hydra config (``.hydra/config.yaml``, or as Weights & Biases has it), 0.4 to 0.9.

Of a generation of train_batch_size × n rows every process takes a run of rows that follow each other, splits it into
mini-batches in their order, and takes a step with each; all of a generation have one learning rate. ``rollout_data_dir``
is written in that order, after balance_batch has changed it. With the trainer of 0.9 (``use_v1``) it is not.

The workers to 0.7 average over a micro-batch's tokens, those since 0.8 over the mini-batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.optimiser import Optimiser
from tsae.attribution.training.read.words import Words
from tsae.attribution.training.settings import Batching, RunSettings
from tsae.errors import TsaeError

_ACTOR, _ROLLOUT, _CORRECTION = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
)
_KINDS = {
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_SURROGATES = {
    "vanilla": "clip",
    "gspo": "clip",
    "gpg": "clip",
    "sapo": "sapo",
    "cispo": "cispo",
    "bypass_mode": "clip",
}
_KL: Mapping[str, Literal["k1", "abs", "k2", "k3"]]
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_GRADIENTS = _KL | {f"{name}+": "k2" for name in _KL}
"""With a plus the value is the named one's, and the gradient that of k2."""
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
    words, notes = Words(settings, file), []
    legacy = words.get("trainer.use_legacy_worker_impl")
    engine = legacy == "disable" or (legacy is None and f"{_ACTOR}optim.zero_indexed_step" in words.values)
    _refuse(words)
    batching = _batching(words, by_step=engine)
    loss = _loss(words, batching, engine=engine)
    if words.flag(f"{_ACTOR}use_dynamic_bsz") and loss.kind == "bnpo":
        notes.append("micro-batches had no fixed size (use_dynamic_bsz): the token mean is taken over mini-batches")
        loss = PolicyLoss(**{**loss.__dict__, "kind": "step"})
    if words.flag("algorithm.filter_groups.enable"):
        notes.append("groups of equal rewards were dropped before the updates (filter_groups)")
    order, fix = "log", ""
    if words.flag("trainer.use_v1"):
        order, fix = "unknown", "trainer.use_v1=False writes the log in the order of the updates"
    elif words.flag(f"{_ACTOR}shuffle") and engine:
        order, fix = "unknown", "actor_rollout_ref.actor.shuffle=False keeps the order of the log"
    advantages = words.choice(_ADVANTAGES, "algorithm.adv_estimator", default="gae")
    scaled = words.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    precision = str(words.get(f"{_ACTOR}fsdp_config.dtype", default="bfloat16"))
    facts: dict[str, Any] = {
        "num_generations": words.whole(f"{_ROLLOUT}n", default=1),
        "max_completion_length": words.whole("data.max_response_length", f"{_ROLLOUT}response_length", default=512),
        "max_steps": _total(words, steps),
        "advantages": "dr_grpo" if advantages == "grpo" and not scaled else advantages,
        "advantage_epsilon": 1e-6,
        "order": order,
        "order_fix": fix,
        "sampler_fix": "rollout_data_dir holds texts alone: set algorithm.rollout_correction.rollout_is=null, or log "
        "rollout_log_probs in a reward manager",
    }
    if words.flag("algorithm.use_kl_in_reward"):
        words.need("the KL penalty of rewards followed a target", "algorithm.kl_ctrl.type", "fixed")
        beta = words.number("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.coef", default=0.001)
        facts["kl_in_reward"] = {"beta": beta, "kl": words.choice(_KL, "algorithm.kl_penalty", default="kl")}
    kept = str(words.get(f"{_ACTOR}fsdp_config.model_dtype", default="fp32"))
    return RunSettings(
        _optimiser(words, steps, batching, engine=engine),
        loss,
        batching,
        str(file),
        "verl",
        base=words.get("actor_rollout_ref.model.path"),
        seed=words.whole(f"{_ACTOR}data_loader_seed", default=42),
        autocast="float32" if precision in ("float32", "fp32") else "bfloat16",
        weights="bfloat16" if kept in ("bf16", "bfloat16") else "float32",
        facts=facts,
        notes=tuple(notes),
    )


def _refuse(words: Words) -> None:
    words.need("the loss rewarded entropy", f"{_ACTOR}entropy_coeff")
    words.need("another trainer's words say how it stepped", f"{_ACTOR}strategy", "fsdp", "fsdp2")
    words.need("it is another optimiser", f"{_ACTOR}optim.optimizer", "AdamW")
    words.need("it is another optimiser", f"{_ACTOR}optim.optimizer_impl", "torch.optim")
    words.need("a teacher took part", "distillation.enabled")
    words.need("rows were drawn anew by their rewards", "algorithm.use_pf_ppo")
    words.need("first updates were skipped", "trainer.critic_warmup")
    words.need("weights were rounded in the forward pass", f"{_ACTOR}qat.enable")
    words.need("ratios were divided by their mean", f"{_CORRECTION}rollout_is_batch_normalize")
    words.need("responses were dropped by their ratios", f"{_CORRECTION}rollout_rs")
    words.only(f"{_ACTOR}optim.override_optimizer_config.", ())
    words.only(
        f"{_ACTOR}policy_loss.",
        ("_target_", "loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
        + ("dro_beta", "rollout_correction"),
    )


def _batching(words: Words, *, by_step: bool) -> Batching:
    n = words.whole(f"{_ROLLOUT}n", default=1)
    rows = n * words.whole("data.train_batch_size", default=1024)
    mini = n * words.whole(f"{_ACTOR}ppo_mini_batch_size", default=256)
    updates = words.updates(rows, mini, "data.train_batch_size by actor.ppo_mini_batch_size")
    processes = words.whole("trainer.nnodes", default=1) * words.whole("trainer.n_gpus_per_node", default=8)
    processes //= words.whole(f"{_ACTOR}ulysses_sequence_parallel_size", default=1)
    micro = words.whole(f"{_ACTOR}ppo_micro_batch_size_per_gpu", default=0)
    micro = micro or words.whole(f"{_ACTOR}ppo_micro_batch_size", default=0) // processes
    parts = 1 if by_step or not micro or words.flag(f"{_ACTOR}use_dynamic_bsz") else mini // (processes * micro)
    return Batching(parts, parts * updates, words.whole(f"{_ACTOR}ppo_epochs", default=1), processes)


def _loss(words: Words, batching: Batching, *, engine: bool) -> PolicyLoss:
    mode, by = str(words.get(f"{_ACTOR}policy_loss.loss_mode", default="vanilla")), f"{_ACTOR}loss_agg_mode"
    surrogate = words.choice(_SURROGATES, f"{_ACTOR}policy_loss.loss_mode", default="vanilla")
    kind: Any = words.choice(_KINDS, by, default="token-mean")
    with_kl = words.flag(f"{_ACTOR}use_kl_loss")
    if mode in ("gspo", "sapo"):
        if with_kl and kind != "grpo":
            words.need("the KL term was averaged otherwise than the policy term", by)
        kind = "grpo"
    kind = "step" if kind == "bnpo" and engine else kind
    limit = None
    if kind == "dr_grpo":
        scale = f"{_ACTOR}loss_scale_factor"
        length = words.number("data.max_response_length", f"{_ROLLOUT}response_length", default=512)
        limit = words.number(scale) if engine else words.number(scale, default=length)
        if not engine:  # Divided by the length, and not by the rows of a micro-batch.
            words.need("the loss was divided by micro-batches of no fixed size", f"{_ACTOR}use_dynamic_bsz")
            rows = words.whole(f"{_ACTOR}ppo_mini_batch_size", default=256) * words.whole(f"{_ROLLOUT}n", default=1)
            limit /= rows / (batching.accumulation * (batching.processes or 1))
    bypass = words.flag(f"{_CORRECTION}bypass_mode") or mode == "bypass_mode"
    if bypass:
        words.need("tokens were weighed without clipping", f"{_CORRECTION}loss_type", "ppo_clip")
    level: Any = words.choice(_LEVELS, f"{_CORRECTION}rollout_is", default="None")
    cap = words.number(f"{_ACTOR}tis_imp_ratio_cap", default=0.0)
    if level is None and cap > 0:
        level = "token_truncate"
    else:
        cap = words.number(f"{_CORRECTION}rollout_is_threshold", default=2.0)
    both = words.number(f"{_ACTOR}clip_ratio", default=0.2)
    low, high = (words.number(f"{_ACTOR}clip_ratio_{end}", default=both) for end in ("low", "high"))
    return PolicyLoss(
        kind,
        limit,
        words.number(f"{_ROLLOUT}temperature", default=1.0),
        None if mode == "gpg" else low,
        1 + high if surrogate == "cispo" else high,
        surrogate,  # type: ignore[arg-type]
        1 - low if surrogate == "cispo" else None,
        "sequence" if mode == "gspo" else "token",
        dual_clip=words.number(f"{_ACTOR}clip_ratio_c", default=3.0) if mode in ("vanilla", "bypass_mode") else None,
        sapo_temperatures=(
            words.number(f"{_ACTOR}tau_pos", default=1.0),
            words.number(f"{_ACTOR}tau_neg", default=1.05),
        ),
        beta=words.number(f"{_ACTOR}kl_loss_coef", default=0.001) if with_kl else 0.0,
        kl=words.choice(_GRADIENTS, f"{_ACTOR}kl_loss_type", default="low_var_kl"),
        kl_input_clamp=20.0,
        kl_clamp=10.0,
        correction=None if level is None or bypass else Correction(level, None, cap),
        ratio_to="sampler" if bypass else "old",
    )


def _total(words: Words, steps: int | None) -> int | None:
    """Generations of the whole training."""
    said = (
        words.whole(name, default=0) for name in (f"{_ACTOR}optim.total_training_steps", "trainer.total_training_steps")
    )
    return next((total for total in said if total > 0), steps)


def _optimiser(words: Words, steps: int | None, batching: Batching, *, engine: bool) -> Optimiser:
    optim = f"{_ACTOR}optim."
    total = _total(words, steps)
    name = words.get(f"{optim}warmup_style", f"{optim}lr_scheduler_type", default="constant")
    if name not in ("constant", "cosine"):
        raise TsaeError(f"lr_scheduler_type={name} is not known", where=words.file, fix="Known are constant, cosine.")
    warmup, ratio = words.whole(f"{optim}lr_warmup_steps", default=-1), f"{optim}lr_warmup_steps_ratio"
    if warmup < (1 if engine else 0):
        warmup = 0
        if part := words.number(ratio, default=0.0):
            if total is None:
                what = f"{ratio}={part} needs the number of steps of the whole training"
                raise TsaeError(what, where=words.file, fix="Give trainer.total_training_steps.")
            warmup = int(part * total)
    least, cycles = words.number(f"{optim}min_lr_ratio", default=0.0), words.number(f"{optim}num_cycles", default=0.5)
    betas = words.get(f"{optim}betas", default=(0.9, 0.999))
    clip = words.number(f"{optim}clip_grad" if engine else f"{_ACTOR}grad_clip", default=1.0)
    return Optimiser(
        "adamw",
        words.number(f"{optim}lr", default=1e-6),
        "cosine_with_min_lr" if name == "cosine" else "constant",
        warmup,
        total,
        (float(betas[0]), float(betas[1])),
        weight_decay=words.number(f"{optim}weight_decay", default=0.01),
        max_grad_norm=clip or None,
        shape={"min_lr_rate": least, "num_cycles": cycles} if name == "cosine" else {},
        every=int(batching.updates),
    )
