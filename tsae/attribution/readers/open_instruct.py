"""open-instruct's GRPO arguments (``grpo_fast.py``), 0.1 to 0.3: JSON, YAML, or as Weights & Biases has them.

A step is normalised by its own tokens, of all processes. Packing mixes rows, so the members of several mini-batches
cannot be found. ``--save_traces`` logs what trained, with advantages and, later, the sampler's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings

_KL: Mapping[str, Any] = {"0": ("k1", False), "1": ("k2", False), "2": ("k3", False), "3": ("k1", True)}
"""kl_estimator: ours, and whether the ratio multiplies it."""
_SCHEDULES: Mapping[str, Any]
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are open-instruct's."""
    return "num_unique_prompts_rollout" in _plain(settings)


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, what is not replayed, and a missing word whose default has changed.
    """
    words = Words(_plain(settings), file)
    words.usual("loss_denominator=token masked_mean_denominator=token")
    size = words.take("prompts=num_unique_prompts_rollout n=num_samples_per_prompt_rollout minis=num_mini_batches:1")
    size |= words.take("epochs=num_epochs:1 last=num_training_steps:0 episodes=total_episodes:0")
    generations = size["last"] or steps or int(size["episodes"] // (size["prompts"] * size["n"]))
    total = generations * size["epochs"] * size["minis"]
    given = words.take("learning_rate=learning_rate weight_decay=weight_decay:0.0")
    given |= words.take("decay_all=set_weight_decay_on_bias_and_norm:true")
    warmup = words.whole("warm_up_steps", default=0) or int(words.number("warmup_ratio") * total)
    norm = words.values.get("max_grad_norm", "")
    given["max_grad_norm"] = None if norm in (None, "None") else words.number("max_grad_norm") or None
    given |= {"schedule": words.choice(_SCHEDULES, "lr_scheduler_type"), "warmup": warmup, "n_steps": total or None}
    loss = words.take("temperature=temperature mask_truncated=mask_truncated_completions:false epsilon=clip_lower:0.2")
    loss |= words.take("epsilon_high=clip_higher beta=beta:0.05")
    has = words.take("with_ref=load_ref_policy:true alpha=alpha:0.6 follows=ref_policy_update_freq:0")
    loss["kl"], loss["kl_corrected"] = words.choice(_KL, "kl_estimator", default="2")
    if words.choice({"dapo": False, "cispo": True}, "loss_fn", default="dapo"):
        loss |= {"surrogate": "cispo", "epsilon_high": 1 + loss["epsilon_high"]}
    loss |= {"beta": loss["beta"] * has["with_ref"], "kl_input_clamp": 40.0, "correction": _correction(words)}
    loss |= {"ratio_to": "sampler" if words.flag("use_vllm_logprobs") else "old"}
    if has["follows"]:
        loss["sync_ref"] = (has["alpha"], has["follows"])
    facts = words.take("num_generations=num_samples_per_prompt_rollout:1 max_completion_length=response_length:0")
    facts |= {"max_steps": total or None, "advantages": "logged", "order": "log" if size["minis"] == 1 else "unknown"}
    facts["order_fix"] = "--num_mini_batches 1 makes one step of a batch; traces do not say what was packed together"
    facts["sampler_fix"] = "--save_traces of open-instruct since 0.3 holds log-probabilities"
    rest: dict[str, Any] = {"base": words.get("model_name_or_path"), **words.take("seed=seed:42"), "facts": facts}
    rest["autocast"] = "float32" if words.get("model_dtype") == "float32" else "bfloat16"
    batching = Batching(1, size["minis"], size["epochs"], 1)
    return RunSettings(Optimiser(**given), PolicyLoss("step", **loss), batching, str(file), "open_instruct", **rest)


def _correction(words: Words) -> Correction | None:
    """Truncated importance sampling: bounds of ρ since 0.3, before that a cap."""
    if not any("rho_" in name for name in words.values):
        cap = words.take("cap=truncated_importance_sampling_ratio_cap")["cap"]
        return Correction("token_truncate", None, cap) if cap > 0 else None
    words.usual("rho_mask_sequence_level rho_mask_tv_divergence")
    has = words.take("on=use_rho_correction:true low=rho_clamp_lower_bound:0.0 high=rho_clamp_upper_bound:0.0")
    has |= words.take("least=rho_mask_lower_bound:0.0 most=rho_mask_upper_bound:0.0")
    if not has["on"]:
        return None
    if not (has["least"] or has["most"]):
        return Correction("token_truncate", has["low"] or None, has["high"] or None)
    if has["low"] > has["least"] or (has["high"] and not 0 < has["most"] <= has["high"]):
        words.usual("rho_clamp_lower_bound rho_clamp_upper_bound")  # Clamped and dropped.
    return Correction("token_mask", has["least"] or None, has["most"] or None)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without the names of their groups."""
    return {name.rsplit(".", 1)[-1]: value for name, value in Words(settings, Path()).values.items()}
