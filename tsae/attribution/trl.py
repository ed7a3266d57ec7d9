"""Settings in the words of TRL's GRPOConfig, which open-r1 and Unsloth use too.

What a trainer dumped (`training_args.bin`, W&B) says every word that its version knew. A recipe says what differs from
the defaults, and those differ by version: ``trl.toml`` has them from TRL 0.14 to 1.16, with what a version did that did
not know the word. A word that is not known here is refused where it could change an update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from tsae.attribution.config_words import Words, table_of
from tsae.attribution.loss import Correction, PolicyLoss
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_OLDEST, _NEWEST = (0, 14), (1, 16)
_BALANCED = (1, 7)
"""Since this version the loss balances experts. Before, `router_aux_loss_coef` was a word of models."""
_RESCALES = (1, 10)
"""Since this version dapo divides a step by its part of the generation's tokens; before, by all of them (TRL's pull
requests 5890 and 6024)."""
_VERSION = "Give the version (--trainer-version; the run's README.md and `pip show trl` have it)"


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


def of(settings: Mapping[str, Any], *, file: Path, beside: Beside, rescales: bool = False) -> RunSettings:
    """The settings of a run of TRL.

    Args:
        settings: by name.
        file: that holds them.
        beside: what lies beside it.
        rescales: whether dapo brings the tokens of a generation to those of a step whatever the version of TRL.

    Raises:
        TsaeError: where the version has to be known and is not, or a word names what is not replayed, or is not known.
    """
    notes: list[str] = []
    _refuse_unknown(Words(settings, file, "trl"), beside.model)
    version = _parsed(beside.version, file)
    words = Words({**_defaults(settings, version, file, notes), **settings}, file, "trl")
    balances = version >= _BALANCED if version else "transformers_continuous_batching_config" in settings
    _refuse_known(words, balances and "output_router_logits" in {**settings, **beside.model})
    notes += [means for name, means in words.table["noted"].items() if words.flag(name)]
    if "8bit" in str(words.get("optim")):
        notes.append("Adam's state was kept in 8 bits; it is replayed in full.")
    if "dev" in (beside.version or ""):
        notes.append(f"TRL {beside.version} is a development version; it is read as the release.")
    if version and version > _NEWEST:
        notes.append(f"TRL {beside.version} is newer than 1.16, whose formulas are assumed.")
    loss, batching = _loss(words), _batching(words)
    if loss.kind == "dapo" and batching.parts != batching.accumulation and not rescales:
        if version is None:
            of_step = f"a generation has {batching.parts} micro-batches and a step {batching.accumulation}"
            what = f"does not say the version of TRL, and before 1.10 another number divided the loss: {of_step}"
            raise TsaeError(what, where=file, fix=f"{_VERSION}.")
        if version < _RESCALES:
            loss = replace(loss, dapo_factor=batching.accumulation / batching.parts)
    facts = {name: value for name in words.table["facts"].split() if (value := words.get(name)) is not None}
    scale = str(facts.get("scale_rewards", False)).lower()
    facts["scale_rewards"] = {"true": "group", "false": "none"}.get(scale, scale)
    if loss.correction:
        without = "vllm_importance_sampling_correction=False needs none"
        facts["sampler_fix"] = f"tsae.rl.TsaeCallback logs the sampler's log-probabilities; {without}"
    bases = (beside.adapter.get("base_model_name_or_path"), beside.model.get("_name_or_path"), beside.base)
    return RunSettings(
        _optimiser(words, beside),
        loss,
        batching,
        str(file),
        "trl",
        beside.version,
        words.take("run")["base"] or next((base for base in bases if base), None),
        int(words.number("seed")),
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
    table = table_of("trl")
    by_version = {
        name: [(tuple(map(int, since.split("."))), value) for since, value in values.items()]
        for name, values in table["defaults"].items()
    }
    if settings.keys() >= set(table["dump"].split()):
        unknown = {name: values[0][1] for name, values in by_version.items()} | table["same"]
        return unknown | ({"loss_type": "bnpo"} if "epsilon" in settings else {})  # of 0.16, which had no word for it
    asked = ["beta", "loss_type", "temperature", "epsilon"]
    asked += ["use_bias_correction_kl"] if settings.get("beta") else []
    asked += ["vllm_importance_sampling_correction"] if settings.get("use_vllm") else []
    asked += ["max_completion_length"] if settings.get("loss_type") == "dr_grpo" else []
    missing = [name for name in asked if name not in settings]
    if version is None and missing:
        what = f"does not say {', '.join(missing)}, whose defaults differ by version of TRL"
        raise TsaeError(what, where=file, fix=f"{_VERSION}, or the run's training_args.bin.")
    if version is None:
        if "bf16" not in settings:
            notes.append("The settings do not say bf16: float32 is assumed.")
        return {name: values[-1][1] for name, values in by_version.items()} | table["same"] | {"bf16": False}
    if version > _NEWEST:
        what = f"has the defaults of TRL {version[0]}.{version[1]}, which are not known; those of 0.14 to 1.16 are"
        raise TsaeError(what, where=file, fix="Give the run's training_args.bin, which says every word.")
    notes.append(f"What the file does not say has the defaults of TRL {version[0]}.{version[1]}.")
    known = {name: [v for since, v in values if since <= version][-1] for name, values in by_version.items()}
    return known | table["same"]


def _refuse_known(words: Words, experts: bool) -> None:
    """Refuse what is not replayed; experts: whether the trainer balances those of the model."""
    for name, does in words.table["not_replayed"].items():
        words.need(name, does=does)
    balanced = experts and words.get("router_aux_loss_coef") != 0
    if balanced or any("quantization_config" in name for name, value in words.values.items() if value):
        does = "the loss had a term that balances the model's experts" if balanced else "the base was quantised"
        raise TsaeError(f"{does}, which is not replayed", where=words.file, fix="Attribute a run without it.")


def _refuse_unknown(given: Words, model: Mapping[str, Any]) -> None:
    table, kind = given.table, given.get("model_type")
    known = {name for part in ("defaults", "same", "not_replayed", "noted") for name in table[part]}
    known |= set(f"{table['facts']} {table['used']} {table['no_effect_whole']}".split())
    known |= {*table["of_models"].split(), *model} if kind else set()
    if isinstance(kind, str):
        from transformers import AutoConfig

        with suppress(ValueError):  # a model that needs its own code
            known |= AutoConfig.for_model(kind).to_dict().keys()
    no_effect = re.compile("|".join(table["no_effect"].split()))
    for name, value in given.values.items():
        word = name.split(".")[0]
        passed = word in known or no_effect.match(word) or "/" in word
        if not passed and value not in (None, False, 0, "", "None", "no", [], {}):
            what = f"{name}={str(value)[:80]} is not known, and may change the updates"
            fix = "Where it does not, give a copy of the settings without it, as JSON or YAML."
            raise TsaeError(what, where=given.file, fix=fix)


def _optimiser(words: Words, beside: Beside) -> Optimiser:
    n_steps = beside.n_steps or max(0, int(words.number("max_steps", default=0))) or None
    if n_steps is None and words.get("lr_scheduler_type") != "constant":
        what = "does not say the number of steps of the whole training (max_steps), which the schedule needs"
        fix = "Keep trainer_state.json beside it, which the checkpoints have, or add max_steps."
        raise TsaeError(what, where=words.file, fix=fix)
    warmup = words.number("warmup_steps", default=0) or words.number("warmup_ratio", default=0)
    warmup = ceil((n_steps or 0) * warmup) if 0 < warmup < 1 else int(warmup)
    prefix, betas, given = "lr_scheduler_kwargs.", words.take("betas"), words.take("optimiser")
    given["max_grad_norm"] = given["max_grad_norm"] or None
    return Optimiser(
        warmup=0 if words.get("lr_scheduler_type") == "constant" else warmup,  # transformers gives this one none
        n_steps=n_steps,
        betas=(betas["first"], betas["second"]),
        shape={name.removeprefix(prefix): v for name, v in words.values.items() if name.startswith(prefix)},
        decay_all=False,
        **given,
    )


def _loss(words: Words) -> PolicyLoss:
    found = words.take("loss")
    found["kind"], found["surrogate"] = words.take("kind")["kind"]
    if found["kind"] == "dr_grpo":
        found["max_completion_length"] = int(words.number("max_completion_length"))
    if found["epsilon"] is None:
        found["temperature"] = 1.0  # logits were not divided before TRL 0.16
    if words.flag("use_vllm") and words.flag("vllm_importance_sampling_correction"):
        found["correction"] = Correction(**words.take("correction"))
    if found["beta"] and words.flag("sync_ref_model"):
        found["sync_ref"] = (words.number("ref_model_mixup_alpha"), int(words.number("ref_model_sync_steps")))
    sapo, vespo = (tuple(words.take(section).values()) for section in ("sapo_temperatures", "vespo"))
    return PolicyLoss(sapo_temperatures=sapo, vespo=vespo, **found)


def _batching(words: Words) -> Batching:
    processes = words.get("distributed_state.num_processes", "num_processes", "world_size")
    parts, rows = words.get("steps_per_generation"), words.get("generation_batch_size")
    if parts is None and rows is not None:
        if processes is None:
            what = f"generation_batch_size={rows} without the number of processes does not say how rows became steps"
            fix = "Add steps_per_generation or num_processes, or give the run's training_args.bin."
            raise TsaeError(what, where=words.file, fix=fix)
        parts = int(rows) // max(1, int(words.number("per_device_train_batch_size")) * int(processes))
    if words.get("epsilon") is None:
        parts = 1  # before TRL 0.16 every micro-batch was a generation
    processes = None if processes is None else int(processes)
    parts = None if parts is None else int(parts)
    return Batching(per_generation=parts, processes=processes, **words.take("batching"))


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
