"""NeMo-RL's GRPO config, 0.2 to 0.8.

A generation is split into batches of train_global_batch_size rows in the order of the log; every one is a step,
normalised by its own tokens. All steps of a generation have one learning rate. Logs hold advantages and the sampler's
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.optimiser import Optimiser
from tsae.attribution.training.read.words import Words
from tsae.attribution.training.settings import Batching, RunSettings
from tsae.errors import TsaeError

_LOSS = (
    "reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value ratio_clip_min "
    "ratio_clip_max ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction token_level_loss "
    "truncated_importance_sampling_type truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min "
    "sequence_level_importance_ratios force_on_policy_ratio use_cispo disable_ppo_ratio"
).split()
_CORRECTIONS = {"tis": "token_truncate", "icepop": "token_mask"}


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
    words.only("policy.optimizer.kwargs.", ("lr", "weight_decay", "betas", "eps", "foreach", "fused"))
    words.need("its own words say how it stepped", "policy.megatron_cfg.enabled")
    words.need("it is another optimiser", "policy.optimizer.name", "torch.optim.AdamW")
    for name in ("seq_logprob_error_threshold", "invalid_tool_call_advantage", "malformed_thinking_advantage"):
        words.need("responses or tokens were changed after their rewards", f"grpo.{name}")
    rows = words.whole("grpo.num_prompts_per_step") * words.whole("grpo.num_generations_per_prompt")
    updates = words.updates(rows, words.whole("policy.train_global_batch_size"), "grpo by train_global_batch_size")
    betas = words.get("policy.optimizer.kwargs.betas", default=(0.9, 0.999))
    clip = words.number("policy.max_grad_norm", default=0.0)
    notes = ["groups of equal rewards were dropped (use_dynamic_sampling)"] * words.flag("grpo.use_dynamic_sampling")
    return RunSettings(
        Optimiser(
            "adamw",
            words.number("policy.optimizer.kwargs.lr"),
            "constant",
            betas=(float(betas[0]), float(betas[1])),
            eps=words.number("policy.optimizer.kwargs.eps", default=1e-8),
            weight_decay=words.number("policy.optimizer.kwargs.weight_decay", default=0.01),
            max_grad_norm=clip or None,
            points=_points(words.get("policy.scheduler"), file),
            every=updates,
        ),
        _loss(words, updates),
        Batching(1, updates, 1, 1),
        str(file),
        "nemo_rl",
        base=words.get("policy.model_name"),
        seed=words.whole("grpo.seed", default=42),
        autocast="float32" if words.get("policy.precision") == "float32" else "bfloat16",
        dropout=words.flag("policy.dtensor_cfg.lora_cfg.enabled")
        and words.number("policy.dtensor_cfg.lora_cfg.dropout", default=0.0) > 0,
        facts={
            "num_generations": words.whole("grpo.num_generations_per_prompt"),
            "max_steps": words.whole("grpo.max_num_steps", default=steps or 0) or None,
            "advantages": "logged",
            "order": "log",
            "sampler_fix": "train_data_step*.jsonl has generation_logprobs: import it anew",
        },
        notes=tuple(notes),
    )


def _loss(words: Words, updates: int) -> PolicyLoss:
    by_token = words.flag("loss_fn.token_level_loss", default=True)
    by_sequence, cispo = words.flag("loss_fn.sequence_level_importance_ratios"), words.flag("loss_fn.use_cispo")
    if not by_token:
        words.need("masked responses left the mean of responses", "grpo.overlong_filtering")
    beta = words.number("loss_fn.reference_policy_kl_penalty", default=0.01)
    if beta:
        words.need("the KL term was weighed by the sampler's probabilities", "loss_fn.use_on_policy_kl_approximation")
    if updates > 1:
        words.need("ratios were 1 in later updates, too", "loss_fn.force_on_policy_ratio")
    correction = None
    if words.flag("loss_fn.use_importance_sampling_correction"):
        kind = words.get("loss_fn.truncated_importance_sampling_type", default="tis")
        mode: Any = words.choice(_CORRECTIONS, "loss_fn.truncated_importance_sampling_type", default=kind)
        low, high = (words.get(f"loss_fn.truncated_importance_sampling_ratio{end}") for end in ("_min", ""))
        mode = mode.replace("token", "sequence") if by_sequence else mode
        correction = Correction(mode, None if low is None else float(low), None if high is None else float(high))
    low, high = words.number("loss_fn.ratio_clip_min", default=0.2), words.number("loss_fn.ratio_clip_max", default=0.2)
    dual, clamps = (
        words.get("loss_fn.ratio_clip_c"),
        [words.get(f"loss_fn.kl_{end}put_clamp_value") for end in ("in", "out")],
    )
    return PolicyLoss(
        "step" if by_token else "grpo",
        temperature=words.number("policy.generation.temperature", default=1.0),
        epsilon=None if words.flag("loss_fn.disable_ppo_ratio") else low,
        epsilon_high=1 + high if cispo else high,
        surrogate="cispo" if cispo else "clip",
        cispo_low=1 - low if cispo else None,
        level="sequence" if by_sequence else "token",
        dual_clip=None if dual is None else float(dual),
        beta=beta,
        kl=words.choice({"k1": "k1", "k2": "k2", "k3": "k3"}, "loss_fn.reference_policy_kl_type", default="k3"),  # type: ignore[arg-type]
        kl_scored="loss_fn.positive_example_nll_weight" in words.values,
        kl_input_clamp=None if clamps[0] is None else float(clamps[0]),
        kl_clamp=None if clamps[1] is None else float(clamps[1]),
        mask_truncated=words.flag("grpo.overlong_filtering"),
        correction=correction,
    )


def _points(scheduler: Any, file: Path) -> tuple[tuple[float, float], ...]:
    """Factors of the learning rate by torch's schedulers, of which the last lasts."""
    if not scheduler:
        return ((0, 1.0),)
    phases = [dict(one) for one in (scheduler if isinstance(scheduler, list) else [scheduler])]
    starts = [0, *next((one.pop("milestones") for one in phases if "milestones" in one), [])]
    points: list[tuple[float, float]] = []
    for start, phase in zip(starts, [one for one in phases if one], strict=False):
        name, given = str(phase.get("name")).rsplit(".", 1)[-1], dict(phase.get("kwargs") or {})
        if name == "LinearLR":
            last = int(given.get("total_iters", 5))
            ends = float(given.get("start_factor", 1 / 3)), float(given.get("end_factor", 1.0))
            points += [(start, ends[0]), (start + last, ends[1])]
        elif name == "ConstantLR" and float(given.get("factor", 1 / 3)) == 1:
            points.append((start, 1.0))
        elif name == "CosineAnnealingLR" and not float(given.get("eta_min", 0)):
            last = int(given["T_max"])
            points += [(start + done, (1 + cos(pi * done / last)) / 2) for done in range(last + 1)]
        else:
            raise TsaeError(
                f"policy.scheduler: {name} {given} is not known", where=file, fix="Attribute a run without."
            )
    if [at for at, _ in points] != sorted(at for at, _ in points):
        raise TsaeError("policy.scheduler: a phase ends after the next begins", where=file, fix="Correct milestones.")
    return tuple(points)
