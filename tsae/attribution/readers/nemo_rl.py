"""NeMo-RL's GRPO config, 0.2 to 0.7.

A generation is split into batches of train_global_batch_size rows in the order of the log; every one is a step,
normalised by its own tokens. All steps of a generation have one learning rate. Logs hold advantages and the sampler's
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_LOSS = (
    "reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value ratio_clip_min "
    "ratio_clip_max ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction token_level_loss "
    "truncated_importance_sampling_type truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min "
    "sequence_level_importance_ratios force_on_policy_ratio use_cispo disable_ppo_ratio"
)
_CUTS = {"tis": "truncate", "icepop": "mask"}
_ODD = "seq_logprob_error_threshold invalid_tool_call_advantage malformed_thinking_advantage"


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are NeMo-RL's."""
    return {"grpo", "loss_fn", "policy"} <= {str(name).split(".")[0] for name in settings}


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file)
    words.only("loss_fn.", _LOSS)
    words.only("policy.optimizer.kwargs.", "lr weight_decay betas eps foreach fused")
    words.usual("megatron_cfg.enabled optimizer.name=torch.optim.AdamW", "policy.")
    words.usual(_ODD, "grpo.")
    size = words.take("prompts=num_prompts_per_step n=num_generations_per_prompt last=max_num_steps:0", "grpo.")
    size |= words.take("mini=policy.train_global_batch_size drops=grpo.use_dynamic_sampling:false")
    updates = words.updates(int(size["prompts"] * size["n"]), int(size["mini"]))
    given = words.take("learning_rate=lr weight_decay=weight_decay:0.01 eps=eps:1e-8", "policy.optimizer.kwargs.")
    given |= words.take("max_grad_norm=policy.max_grad_norm:null")
    given["betas"] = tuple(map(float, words.get("policy.optimizer.kwargs.betas", default=(0.9, 0.999))))
    optimiser = Optimiser(
        points=_points(words.get("policy.scheduler"), file), schedule="constant", every=updates, **given
    )
    lora = words.take("on=enabled:false dropout=dropout:0.0", "policy.dtensor_cfg.lora_cfg.")
    facts = {
        "num_generations": int(size["n"]),
        "max_steps": (size["last"] or steps or 0) * updates or None,
        "advantages": "logged",
    }
    facts |= {"order": "log", "sampler_fix": "train_data_step*.jsonl holds generation_logprobs: import it anew"}
    rest: dict[str, Any] = {"facts": facts, "dropout": lora["on"] and lora["dropout"] > 0}
    rest["autocast"] = "float32" if words.get("policy.precision") == "float32" else "bfloat16"
    rest["notes"] = ("groups of equal rewards were dropped (use_dynamic_sampling)",) * size["drops"]
    rest |= {"base": words.get("policy.model_name"), **words.take("seed=grpo.seed:42")}
    return RunSettings(optimiser, _loss(words, updates), Batching(1, updates, 1, 1), str(file), "nemo_rl", **rest)


def _loss(words: Words, updates: int) -> PolicyLoss:
    has = words.take("by_token=token_level_loss:true by_sequence=sequence_level_importance_ratios:false", "loss_fn.")
    has |= words.take("cispo=use_cispo:false weighed=use_importance_sampling_correction:false", "loss_fn.")
    has |= words.take("free=disable_ppo_ratio:false low=ratio_clip_min:0.2 high=ratio_clip_max:0.2", "loss_fn.")
    bounds = words.take("low=ratio_min:null high=ratio:null", "loss_fn.truncated_importance_sampling_")
    given = words.take("dual_clip=ratio_clip_c:null beta=reference_policy_kl_penalty:0.01", "loss_fn.")
    given |= words.take("kl_input_clamp=kl_input_clamp_value:null kl_clamp=kl_output_clamp_value:null", "loss_fn.")
    given |= words.take("temperature=policy.generation.temperature:1.0 mask_truncated=grpo.overlong_filtering:false")
    if not has["by_token"]:
        words.usual("grpo.overlong_filtering")  # The mean of responses leaves them out, too.
    if given["beta"]:
        words.usual("loss_fn.use_kl_in_reward")
    if updates > 1:
        words.usual("loss_fn.force_on_policy_ratio")
    given["level"] = "sequence" if has["by_sequence"] else "token"
    cut = words.choice(_CUTS, "loss_fn.truncated_importance_sampling_type", default="tis")
    if has["weighed"]:
        given["correction"] = Correction(f"{given['level']}_{cut}", **bounds)  # type: ignore[arg-type]
    given |= {"epsilon": None if has["free"] else has["low"], "epsilon_high": has["high"]}
    if has["cispo"]:
        given |= {"surrogate": "cispo", "epsilon_high": 1 + has["high"], "cispo_low": 1 - has["low"]}
    given["kl"] = words.choice({k: k for k in ("k1", "k2", "k3")}, "loss_fn.reference_policy_kl_type", default="k3")
    by_sampler = words.flag("loss_fn.use_on_policy_kl_approximation")
    if by_sampler or "loss_fn.positive_example_nll_weight" in words.values:  # Since 0.7.
        given |= {"kl_corrected": True, "kl_corrected_to": "sampler" if by_sampler else "now"}
    return PolicyLoss("step" if has["by_token"] else "grpo", **given)


def _points(scheduler: Any, file: Path) -> tuple[tuple[float, float], ...]:
    """Factors of the learning rate by torch's schedulers, of which the last lasts."""
    phases = [dict(one) for one in (scheduler if isinstance(scheduler, list) else [scheduler or {}])]
    starts = [0, *next((one.pop("milestones") for one in phases if "milestones" in one), [])]
    points: list[tuple[float, float]] = []
    for start, phase in zip(starts, [one for one in phases if one], strict=False):
        name, given = str(phase.get("name")).rsplit(".", 1)[-1], dict(phase.get("kwargs") or {})
        last = int(given.get("T_max") or given.get("total_iters") or 5)
        if name == "LinearLR":
            first, end = float(given.get("start_factor", 1 / 3)), float(given.get("end_factor", 1.0))
            points += [(start, first), (start + last, end)]
        elif name == "ConstantLR" and float(given.get("factor", 1 / 3)) == 1:
            points.append((start, 1.0))
        elif name == "CosineAnnealingLR" and not float(given.get("eta_min", 0)):
            points += [(start + done, (1 + cos(pi * done / last)) / 2) for done in range(last + 1)]
        else:
            what = f"policy.scheduler: {name} {given} is not known"
            raise TsaeError(what, where=file, fix="Known are LinearLR, CosineAnnealingLR to 0 and a constant factor 1.")
    return tuple(sorted(points)) or ((0, 1.0),)
