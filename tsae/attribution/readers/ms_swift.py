"""ms-swift's ``args.json`` of a GRPO run: TRL's words beside its own, 3.2 to 4.5.

It says every word, so no default counts. Those of its own that change updates have TRL's names here, or are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsae.attribution.readers import trl
from tsae.attribution.readers.words import Words
from tsae.attribution.training.settings import RunSettings

_OURS = {
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "overlong_filter": "mask_truncated_completions",
    "rollout_importance_sampling_mode": "vllm_importance_sampling_mode",
    "rollout_importance_sampling_threshold": "vllm_importance_sampling_clip_max",
}
_TRL = (
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay seed "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm max_steps per_device_train_batch_size steps_per_generation "
    "gradient_accumulation_steps generation_batch_size num_processes world_size bf16 fp16 torch_dtype deepspeed "
    "num_generations num_iterations max_completion_length temperature beta loss_type epsilon epsilon_high delta "
    "importance_sampling_level top_entropy_quantile sync_ref_model ref_model_sync_steps ref_model_mixup_alpha use_vllm "
    "scale_rewards lora_dropout logging_steps use_liger_kernel neftune_noise_alpha"
)
_ODD = (
    "optimizer multi_turn_scheduler quant_method off_policy_sequence_mask_delta chord_sft_dataset sdar_loss_coef "
    "advantage_reweight teacher_model teacher_model_server async_generate"
)


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are ms-swift's."""
    return "rlhf_type" in settings and "num_generations" in settings


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file)
    words.usual(f"rlhf_type=grpo rollout_importance_sampling_mode=token_truncate|token_mask {_ODD}")
    if words.get("rollout_importance_sampling_mode"):  # It weighs the KL term, too.
        words.usual("beta")
    given = {name: settings[name] for name in _TRL.split() if name in settings}
    given |= {ours: settings[name] for name, ours in _OURS.items() if settings.get(name) is not None}
    given["vllm_importance_sampling_correction"] = "vllm_importance_sampling_mode" in given
    if given.get("importance_sampling_level") == "sequence_token":  # The gradient of sequence.
        given["importance_sampling_level"] = "sequence"
    given["vllm_importance_sampling_cap"], given["use_bias_correction_kl"] = None, False
    found = trl.of(given, file=file, beside=trl.Beside(n_steps=steps, base=words.get("model")))
    loss = replace(found.loss, kl_input_clamp=20.0, kl_clamp=10.0)
    if words.flag("kl_in_reward"):  # It is in the advantages, which are logged.
        loss = replace(loss, beta=0.0)
    facts = {**found.facts, "advantages": "logged"}
    return replace(found, loss=loss, trainer="ms_swift", version=words.get("swift_version"), facts=facts)
