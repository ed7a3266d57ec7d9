"""Settings in the words of TRL's GRPOConfig, which open-r1 and Unsloth use too.

What a trainer dumped (`training_args.bin`, W&B) says every word that its version knew. A recipe says what differs from
the defaults, and those differ by version: `_DEFAULTS` has them from TRL 0.14 to 1.16, with what a version did that did
not know the word. A word that is not known here is refused where it could change an update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_OLDEST, _NEWEST = (0, 14), (1, 16)
_BALANCED = (1, 7)
"""Since this version the loss balances experts. Before, `router_aux_loss_coef` was a word of models."""
_FULL = {"beta", "optim", "adam_beta1", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "dataloader_num_workers"}
"""A file with all of these is a dump: nobody writes them all."""
_BUFFERED = (0, 16)
"""Since this version a generation is used for several micro-batches, and its ratios are clipped."""

_DEFAULTS: dict[str, tuple[tuple[tuple[int, int], Any], ...]] = {
    "per_device_train_batch_size": ((_OLDEST, 1), ((0, 15), 8)),
    "gradient_accumulation_steps": ((_OLDEST, 8), ((0, 15), 1)),
    "temperature": ((_OLDEST, 0.9), ((0, 18), 1.0)),
    "beta": ((_OLDEST, 0.04), ((0, 19), 0.0)),
    "loss_type": ((_OLDEST, "grpo"), (_BUFFERED, "bnpo"), ((0, 22), "dapo")),
    "epsilon": ((_OLDEST, None), (_BUFFERED, 0.2)),
    "bf16": ((_OLDEST, False), ((0, 19), True)),
    "max_completion_length": ((_OLDEST, 256), ((1, 10), 512)),
    "use_bias_correction_kl": ((_OLDEST, False), ((1, 10), True)),
    "ref_model_mixup_alpha": ((_OLDEST, 0.9), (_BUFFERED, 0.6)),
    "ref_model_sync_steps": ((_OLDEST, 64), (_BUFFERED, 512)),
    "vllm_importance_sampling_correction": ((_OLDEST, False), ((0, 23), True)),
    "vllm_importance_sampling_mode": ((_OLDEST, "token_truncate"), ((0, 26), "sequence_mask")),
    "vllm_importance_sampling_cap": ((_OLDEST, 2.0), ((0, 26), 3.0), ((1, 6), None)),
    "vllm_importance_sampling_clip_max": ((_OLDEST, None), ((1, 6), 3.0)),
    "router_aux_loss_coef": ((_OLDEST, 0.0), ((1, 7), 0.001), ((1, 14), None)),
    "logging_steps": ((_OLDEST, 500), ((0, 19), 10)),
    "dtype": ((_OLDEST, None), ((0, 26), "auto"), ((0, 27), None)),
}
_SAME: dict[str, Any] = {
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0,
    "optim": "adamw_torch", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0, "seed": 42, "num_generations": 8, "num_iterations": 1, "scale_rewards": True,
    "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "mask_truncated_completions": False,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "sync_ref_model": False, "use_vllm": False, "shuffle_dataset": True,
}  # fmt: skip
"""Defaults of all versions, of TRL and of transformers."""

_ADAM = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_hf",
    "adamw", "paged_adamw_32bit",
)  # fmt: skip
_ADAM_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_OPTIMISERS: Mapping[str, Any] = {**dict.fromkeys((*_ADAM, *_ADAM_8BIT), "adamw"), "sgd": "sgd"}
_SCHEDULES: Mapping[str, Any] = {
    name: name.removesuffix("_with_warmup")
    for name in (
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt", "warmup_stable_decay",
    )
}  # fmt: skip
_LOSSES: Mapping[str, Any] = {name: (name, "clip") for name in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")} | {
    "cispo": ("dapo", "cispo"),
    "vespo": ("dapo", "vespo"),
    "sapo": ("grpo", "sapo"),
}
"""Normalisation and surrogate by loss_type."""
_NOTED = {
    "use_liger_kernel": "Liger's kernels computed the loss, which is the same formula.",
    "use_liger_loss": "Liger's kernels computed the loss, which is the same formula.",
    "cast_lm_head_to_fp32": "The trainer computed logits in float32; here they are computed as the rest is.",
}
_NOT_REPLAYED = {
    "fp16": "gradients were scaled, and steps that overflowed were left out",
    "optim_args": "the optimiser had arguments of its own",
    "optim_target_modules": "gradients were projected",
    "neftune_noise_alpha": "the training added noise to embeddings",
    "entropy_coef": "the loss rewarded entropy",
    "use_adaptive_entropy": "the loss rewarded entropy by a weight that adapted itself",
    "max_tool_calling_iterations": "responses called tools, whose tokens the log does not mark",
    "auto_find_batch_size": "the batch may have shrunk while the training ran",
    "load_in_4bit": "the base was quantised",
    "load_in_8bit": "the base was quantised",
}
_FACTS = (
    "num_generations", "max_completion_length", "max_steps", "num_train_epochs", "scale_rewards", "logging_steps",
    "use_vllm", "reward_weights", "multi_objective_aggregation", "mask_truncated_completions", "sync_ref_model",
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "num_iterations", "loss_type", "shuffle_dataset", "data_seed", "resume_from_checkpoint", "use_cpu",
)  # fmt: skip
_USED = {
    *_DEFAULTS, *_SAME, *_NOT_REPLAYED, *_NOTED, *_FACTS, "lr_scheduler_kwargs", "model_init_kwargs", "epsilon_high",
    "delta", "off_policy_mask_threshold", "vllm_importance_sampling_clip_min", "disable_dropout", "deepspeed",
    "torch_dtype", "model_name_or_path", "distributed_state", "num_processes", "trl_version",
}  # fmt: skip
_NO_EFFECT = re.compile(
    r"_|logging_|log_|eval_|save_|hub_|push_to_hub|dataloader_|ddp_|vllm_(?!importance)|wandb_|trackio_|tpu_|torch_compile"
    r"|dataset_|fsdp|include_|lora_|bnb_4bit|code_|unsloth_|transformers_|use_transformers_|gradient_checkpointing"
    r"|activation_checkpointing|(bf16|fp16)_|entropy_(coef_|target)|cosine_m|repetition_|sglang_"
)
"""How words begin that change no update: of logging, saving, evaluation, sampling, datasets and rewards."""


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_EFFECT_WHOLE = _words_of(
    """output_dir overwrite_output_dir do_train do_eval do_predict evaluation_strategy prediction_loss_only run_name
    project report_to disable_tqdm debug tf32 average_tokens_across_devices label_smoothing_factor label_names
    no_cuda use_cache liger_kernel_config torch_empty_cache_steps per_device_eval_batch_size
    batch_eval_metrics per_gpu_train_batch_size per_gpu_eval_batch_size load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism accelerator_config
    parallelism_config remove_unused_columns train_sampling_strategy group_by_length length_column_name
    skip_memory_metrics local_rank enable_jit_checkpoint mixed_precision deepspeed_plugin hf_deepspeed_config
    trust_remote_code past_index jit_mode_eval use_mps_device use_ipex half_precision_backend fp16_backend
    mp_parameters ray_scope torchdynamo split_batches dispatch_batches use_legacy_prediction_loop
    ds3_gather_for_generation pad_to_multiple_of max_prompt_length top_p top_k min_p generation_kwargs
    chat_template_kwargs cache_implementation num_generations_eval num_completions_to_print callbacks benchmarks
    chat_template system_prompt overwrite_hub_revision model_revision attn_implementation use_peft use_rslora
    use_dora use_bnb_nested_quant reward_funcs reward_model_name_or_path ignore_bias_buffers max_seq_length
    parallel_code_exec_per_proc e2b_router_url morph_router_url ioi_provider max_completion_len soft_punish_cache
    world_size config gradient_accumulation_kwargs peft_config"""
)
_OF_MODELS = _words_of(
    """return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss pruned_heads
    tie_word_embeddings chunk_size_feed_forward is_encoder_decoder is_decoder cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty typical_p length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens architectures
    finetuning_task id2label label2id tokenizer_class prefix bos_token_id pad_token_id eos_token_id sep_token_id
    decoder_start_token_id task_specific_params problem_type model_type rope_theta rope_scaling rope_parameters
    head_dim partial_rotary_factor"""
)
"""Words of every model's configuration in transformers 4, which W&B has among the arguments."""


@dataclass(frozen=True)
class Beside:
    """What lies beside a file with settings."""

    version: str | None = None
    """Of the trainer."""
    n_steps: int | None = None
    """Of the whole training, by trainer_state.json."""
    base: str | None = None
    """By the run's README.md."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """config.json of the model."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """adapter_config.json."""
    weights: str | None = None
    """Type of the numbers in the first file of weights, in the words of safetensors: F32, BF16, F16."""


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether these are words of TRL's GRPOConfig, or of a trainer that took them over."""
    return not settings.keys().isdisjoint(("num_generations", "max_completion_length", "num_iterations", "loss_type"))


def of(settings: Mapping[str, Any], *, file: Path, beside: Beside) -> RunSettings:
    """The settings of a run of TRL.

    Raises:
        TsaeError: where the version has to be known and is not, or a word names what is not replayed, or is not known.
    """
    notes: list[str] = []
    _refuse_unknown(Words(settings, file), beside.model)
    version = _parsed(beside.version, file)
    words = Words({**_defaults(settings, version, file, notes), **settings}, file)
    balances = version >= _BALANCED if version else "transformers_continuous_batching_config" in settings
    _refuse_known(words, balances and "output_router_logits" in {**settings, **beside.model})
    notes += [means for name, means in _NOTED.items() if words.flag(name)]
    notes += ["Adam's state was kept in 8 bits; it is replayed in full."] if words.get("optim") in _ADAM_8BIT else []
    if "dev" in (beside.version or ""):
        notes.append(f"TRL {beside.version} is a development version; it is read as the release.")
    if version and version > _NEWEST:
        notes.append(f"TRL {beside.version} is newer than 1.16, whose formulas are assumed.")
    loss = _loss(words)
    facts = {name: words.get(name) for name in _FACTS if words.get(name) is not None} | {"scale_rewards": _scale(words)}
    if loss.correction:
        without = "vllm_importance_sampling_correction=False needs none"
        facts["sampler_fix"] = f"tsae.rl.TsaeCallback logs the sampler's log-probabilities; {without}"
    bases = (beside.adapter.get("base_model_name_or_path"), beside.model.get("_name_or_path"), beside.base)
    return RunSettings(
        _optimiser(words, beside),
        loss,
        _batching(words),
        str(file),
        "trl",
        beside.version,
        words.get("model_name_or_path", "_name_or_path") or next((base for base in bases if base), None),
        words.whole("seed"),
        "bfloat16" if words.flag("bf16") else "float32",
        _weights(words, beside, notes),
        _dropout(words, beside),
        facts,
        tuple(notes),
    )


def _parsed(version: str | None, file: Path) -> tuple[int, int] | None:
    if version is None:
        return None
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if not found or (number := (int(found[1]), int(found[2]))) < _OLDEST:
        what = f"was written by TRL {version}, which is not a version with GRPO"
        raise TsaeError(what, where=file, fix="Give 0.14 or a later version.")
    return number


def _defaults(
    settings: Mapping[str, Any], version: tuple[int, int] | None, file: Path, notes: list[str]
) -> dict[str, Any]:
    """The values of words that the file does not have. A full dump lacks a word because its version did not know it."""
    if settings.keys() >= _FULL:
        unknown = {name: values[0][1] for name, values in _DEFAULTS.items()} | _SAME
        return unknown | ({"loss_type": "bnpo"} if "epsilon" in settings else {})  # of 0.16, which had no word for it
    asked = ["beta", "loss_type", "temperature", "epsilon"]
    asked += ["use_bias_correction_kl"] if settings.get("beta") else []
    asked += ["vllm_importance_sampling_correction"] if settings.get("use_vllm") else []
    asked += ["max_completion_length"] if settings.get("loss_type") == "dr_grpo" else []
    missing = [name for name in asked if name not in settings]
    if version is None and missing:
        raise TsaeError(
            f"does not say {', '.join(missing)}, whose defaults differ by version of TRL",
            where=file,
            fix="Give the version (--trainer-version; the run's README.md and `pip show trl` have it), or the run's "
            "training_args.bin.",
        )
    if version is not None and version > _NEWEST:
        raise TsaeError(
            f"has the defaults of TRL {version[0]}.{version[1]}, which are not known; those of 0.14 to 1.16 are",
            where=file,
            fix="Give the run's training_args.bin, which says every word.",
        )
    if version is None:
        if "bf16" not in settings:
            notes.append("The settings do not say bf16: float32 is assumed.")
        return {name: values[-1][1] for name, values in _DEFAULTS.items()} | _SAME | {"bf16": False}
    notes.append(f"What the file does not say has the defaults of TRL {version[0]}.{version[1]}.")
    return {name: [v for since, v in values if since <= version][-1] for name, values in _DEFAULTS.items()} | _SAME


def _refuse_known(words: Words, experts: bool) -> None:
    """Refuse what is not replayed; experts: whether the trainer balances those of the model."""
    for name, does in _NOT_REPLAYED.items():
        words.need(does, name)
    balanced = experts and words.get("router_aux_loss_coef") != 0
    if balanced or any("quantization_config" in name for name, value in words.values.items() if value):
        does = "the loss had a term that balances the model's experts" if balanced else "the base was quantised"
        raise TsaeError(f"{does}, which is not replayed", where=words.file, fix="Attribute a run without it.")


def _refuse_unknown(given: Words, model: Mapping[str, Any]) -> None:
    of_model = _OF_MODELS | model.keys() if (kind := given.get("model_type")) else frozenset[str]()
    if isinstance(kind, str):
        with suppress(ValueError):  # a model that needs its own code
            of_model |= AutoConfig.for_model(kind).to_dict().keys()
    for name, value in given.values.items():
        word = name.split(".")[0]
        if word in _USED or word in _NO_EFFECT_WHOLE or word in of_model or _NO_EFFECT.match(word) or "/" in word:
            continue
        if value not in (None, False, 0, "", "None", "no", [], {}):
            raise TsaeError(
                f"{name}={str(value)[:80]} is not known, and may change the updates",
                where=given.file,
                fix="Where it does not, give a copy of the settings without it, as JSON or YAML.",
            )


def _optimiser(words: Words, beside: Beside) -> Optimiser:
    schedule = words.get("lr_scheduler_type")
    n_steps = beside.n_steps or max(0, words.whole("max_steps", default=0)) or None
    if n_steps is None and schedule != "constant":
        raise TsaeError(
            "does not say the number of steps of the whole training (max_steps), which the schedule needs",
            where=words.file,
            fix="Keep trainer_state.json beside it, which the checkpoints have, or add max_steps.",
        )
    warmup = words.number("warmup_steps", default=0) or words.number("warmup_ratio", default=0)
    warmup = ceil((n_steps or 0) * warmup) if 0 < warmup < 1 else int(warmup)
    prefix = "lr_scheduler_kwargs."
    return Optimiser(
        words.choice(_OPTIMISERS, "optim"),
        schedule=words.choice(_SCHEDULES, "lr_scheduler_type"),
        warmup=0 if schedule == "constant" else warmup,  # transformers gives this one none
        n_steps=n_steps,
        betas=(words.number("adam_beta1"), words.number("adam_beta2")),
        max_grad_norm=words.number("max_grad_norm", default=0) or None,
        shape={name.removeprefix(prefix): v for name, v in words.values.items() if name.startswith(prefix)},
        decay_all=False,
        **words.take("learning_rate=learning_rate eps=adam_epsilon weight_decay=weight_decay"),
    )


def _loss(words: Words) -> PolicyLoss:
    kind, surrogate = words.choice(_LOSSES, "loss_type")
    found = words.take(
        "temperature=temperature epsilon=epsilon:null epsilon_high=epsilon_high:null delta=delta:null beta=beta "
        "kl_corrected=use_bias_correction_kl:false mask_truncated=mask_truncated_completions:false "
        "top_entropy_quantile=top_entropy_quantile off_policy_threshold=off_policy_mask_threshold:null"
    )
    if found["epsilon"] is None:
        found["temperature"] = 1.0  # logits were not divided before TRL 0.16
    correction = None
    if words.flag("use_vllm") and words.flag("vllm_importance_sampling_correction"):
        low = "low=vllm_importance_sampling_clip_min:null"
        high = "high=vllm_importance_sampling_cap|vllm_importance_sampling_clip_max:null"
        correction = Correction(words.get("vllm_importance_sampling_mode"), **words.take(f"{low} {high}"))
    synced = found["beta"] and words.flag("sync_ref_model")
    vespo = words.take("a=vespo_k_pos b=vespo_lambda_pos c=vespo_k_neg d=vespo_lambda_neg")
    return PolicyLoss(
        kind,
        words.whole("max_completion_length") if kind == "dr_grpo" else None,
        surrogate=surrogate,
        level=words.get("importance_sampling_level"),
        sapo_temperatures=(words.number("sapo_temperature_pos"), words.number("sapo_temperature_neg")),
        vespo=(vespo["a"], vespo["b"], vespo["c"], vespo["d"]),
        sync_ref=(words.number("ref_model_mixup_alpha"), words.whole("ref_model_sync_steps")) if synced else None,
        correction=correction,
        **found,
    )


def _batching(words: Words) -> Batching:
    processes = words.get("distributed_state.num_processes", "num_processes", "world_size")
    parts, rows = words.get("steps_per_generation"), words.get("generation_batch_size")
    if parts is None and rows is not None:
        if processes is None:
            raise TsaeError(
                f"generation_batch_size={rows} without the number of processes does not say how rows became steps",
                where=words.file,
                fix="Add steps_per_generation or num_processes, or give the run's training_args.bin.",
            )
        parts = int(rows) // max(1, words.whole("per_device_train_batch_size") * int(processes))
    if words.get("epsilon") is None:
        parts = 1  # before TRL 0.16 every micro-batch was a generation
    used = words.take("accumulation=gradient_accumulation_steps:1 iterations=num_iterations:1")
    return Batching(
        per_generation=parts and int(parts), processes=None if processes is None else int(processes), **used
    )


def _weights(words: Words, beside: Beside, notes: list[str]) -> Any:
    """In what trained weights were kept: as checkpoints hold them, or as the model was loaded."""
    if words.get("deepspeed", "deepspeed_plugin") or any(name.startswith("deepspeed.") for name in words.values):
        notes.append("DeepSpeed keeps trained weights in float32, whatever the checkpoints hold.")
        return "float32"
    loaded = words.get("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype")
    loaded = beside.model.get("dtype", beside.model.get("torch_dtype")) if loaded in (None, "auto") else loaded
    adapter = beside.adapter or words.flag("use_peft") or any(name.startswith("peft_config.") for name in words.values)
    kept = beside.weights or ("float32" if adapter else str(loaded or "float32"))
    found = {"F32": "float32", "BF16": "bfloat16"}.get(kept, kept.removeprefix("torch."))
    if found not in ("float32", "bfloat16"):
        what = f"trained weights were kept in {found}, expected float32 or bfloat16"
        raise TsaeError(what, where=words.file, fix="Attribute a run without it.")
    return found


def _dropout(words: Words, beside: Beside) -> bool:
    """Whether forward passes dropped something. TRL trains with dropout where the model has it, unless disable_dropout;
    that switch does not reach the dropout inside of attention."""
    model = {name: value for name, value in beside.model.items() if re.search("dropout|pdrop", name)}
    given = words.get("lora_dropout", "peft_config.default.lora_dropout", default=0)
    lora = {"lora_dropout": beside.adapter.get("lora_dropout", given)}
    names = ("attention_dropout",) if words.flag("disable_dropout") else {**model, **lora}
    return any(
        isinstance(value, (int, float)) and value > 0 and not re.match("classifier|summary", name)
        for name, value in {**model, **lora}.items()
        if name in names
    )


def _scale(words: Words) -> str:
    scale = str(words.get("scale_rewards", default=False)).lower()
    return {"true": "group", "false": "none"}.get(scale, scale)
