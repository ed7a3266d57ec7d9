"""Settings of TRL as they lie: what trainers of many versions leave is read as the trainer itself read it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from trl import GRPOConfig, SFTConfig

from support.refusals import refuses
from tsae.attribution.find_settings import find_settings, read_settings
from tsae.attribution.loss import Correction, PolicyLoss
from tsae.attribution.settings import Batching, Optimiser
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

RECIPE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2",
    "dataset_name": "open-r1/OpenR1-Math-220k",
    "bf16": True,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2.0e-05,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "max_completion_length": 1024,
    "max_steps": -1,
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    "reward_funcs": ["accuracy", "format"],
    "reward_weights": [1.0, 0.5],
    "warmup_ratio": 0.1,
}
"""As open-r1 has them."""
STATE = {"max_steps": 95, "global_step": 40}
CARD = "---\nlibrary_name: transformers\nbase_model: 'some/base'\n---\n# Model\n### Framework versions\n\n- TRL: {}\n"
SAYS_ALL = {"beta": 0.0, "loss_type": "dapo", "temperature": 1.0, "epsilon": 0.2, "bf16": False, "max_steps": 10}


MIXTURE = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
"""Words of a model of experts."""


def config(folder: Path, **words: Any) -> GRPOConfig:
    usual = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 40, "per_device_train_batch_size": 8}
    return GRPOConfig(output_dir=str(folder), **{**usual, **words})


def dumped(folder: Path, **words: Any) -> GRPOConfig:
    made = config(folder, **words)
    torch.save(made, folder / "training_args.bin")
    return made


def recipe(folder: Path, words: dict[str, Any], version: str | None = None, state: Any = STATE) -> Path:
    (folder / "config_demo.yaml").write_text(yaml.safe_dump(words))
    if version:
        (folder / "README.md").write_text(CARD.format(version))
    (folder / "checkpoint-40").mkdir(exist_ok=True)
    (folder / "checkpoint-40" / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"optim": "adamw_bnb_8bit", "lr_scheduler_type": "cosine", "warmup_steps": 5, "weight_decay": 0.1},
        {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"generation_batch_size": 32, "sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 7},
        {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 90, "epsilon_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 5.0, "bf16": True, "warmup_steps": 0.25, "temperature": 0.7},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "delta": 3.0, "importance_sampling_level": "sequence"},
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "top_entropy_quantile": 0.2, "mask_truncated_completions": True},
        {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.1, "off_policy_mask_threshold": 0.5},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 9},
            "max_grad_norm": 0.0,
        },
    ],
)
def test_a_dump_says_what_trl_had(words: dict[str, Any], tmp_path: Path) -> None:
    args = dumped(tmp_path, **words)
    found = read_settings(tmp_path, version="1.16.0")
    o, loss = found.optimiser, found.loss
    assert o.name == "adamw"
    assert (o.learning_rate, o.schedule, o.n_steps) == (args.learning_rate, args.lr_scheduler_type, args.max_steps)
    assert o.warmup == args.get_warmup_steps(args.max_steps)
    assert (*o.betas, o.eps, o.weight_decay) == (
        args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay,
    )  # fmt: skip
    assert (o.max_grad_norm or 0.0, o.shape, o.decay_all) == (args.max_grad_norm, args.lr_scheduler_kwargs or {}, False)
    normalised = {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(args.loss_type, args.loss_type)
    surrogate = args.loss_type if args.loss_type in ("cispo", "vespo", "sapo") else "clip"
    correction = Correction("sequence_mask", args.vllm_importance_sampling_clip_min, 3.0) if args.use_vllm else None
    assert loss == PolicyLoss(
        normalised,  # type: ignore[arg-type]
        args.max_completion_length if args.loss_type == "dr_grpo" else None,
        args.temperature,
        args.epsilon,
        args.epsilon_high,
        surrogate=surrogate,  # type: ignore[arg-type]
        level=args.importance_sampling_level,  # type: ignore[arg-type]
        delta=args.delta,
        sapo_temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
        vespo=(args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg),
        beta=args.beta,
        kl_corrected=args.use_bias_correction_kl,
        sync_ref=(args.ref_model_mixup_alpha, args.ref_model_sync_steps) if args.sync_ref_model else None,
        top_entropy_quantile=args.top_entropy_quantile,
        mask_truncated=args.mask_truncated_completions,
        off_policy_threshold=args.off_policy_mask_threshold,
        correction=correction,
    )
    assert found.batching == Batching(
        args.gradient_accumulation_steps, args.steps_per_generation, args.num_iterations, args.world_size
    )
    assert (found.seed, found.autocast) == (args.seed, "bfloat16" if args.bf16 else "float32")
    assert (found.weights, found.dropout, found.trainer) == ("float32", False, "trl")
    assert found.facts["scale_rewards"] == args.scale_rewards
    assert found.facts["generation_batch_size"] == args.generation_batch_size


def test_defaults_are_those_of_trl(tmp_path: Path) -> None:
    """A recipe that says little, against the object that TRL made of the same words."""
    words = {"learning_rate": 1e-6, "num_generations": 8, "max_steps": 40, "bf16": False}
    whole = recipe(tmp_path, {**words, "per_device_train_batch_size": 8}, "1.16.0", {})
    found = read_settings(whole)
    assert found.notes == ("What the file does not say has the defaults of TRL 1.16.",)
    dumped(tmp_path)
    real = read_settings(tmp_path)
    assert real.source.endswith("training_args.bin")
    assert (found.optimiser, found.loss, found.seed) == (real.optimiser, real.loss, real.seed)
    assert found.batching.updates == real.batching.updates
    assert found.facts.items() <= real.facts.items()


@pytest.mark.parametrize(
    ("version", "loss", "batching"),
    [
        ("0.14.0", PolicyLoss("grpo", epsilon=None, beta=0.04), Batching(4, 1)),
        ("0.16.1", PolicyLoss("bnpo", temperature=0.9, beta=0.04), Batching(4)),
        ("0.18.0.dev0", PolicyLoss("bnpo", beta=0.04), Batching(4)),
        ("0.19.1", PolicyLoss("bnpo"), Batching(4)),
        ("0.25.1", PolicyLoss("dapo"), Batching(4)),
        ("1.10.0", PolicyLoss("dapo", kl_corrected=True), Batching(4)),
    ],
)
def test_a_recipe_has_the_defaults_of_its_version(
    version: str, loss: PolicyLoss, batching: Batching, tmp_path: Path
) -> None:
    found = read_settings(recipe(tmp_path, RECIPE, version))
    assert found.optimiser == Optimiser(
        "adamw", 2e-5, "cosine_with_min_lr", 10, 95, shape={"min_lr_rate": 0.1}, decay_all=False
    )
    assert (found.loss, found.batching, found.version) == (loss, batching, version)
    assert (found.base, found.weights, found.autocast) == (RECIPE["model_name_or_path"], "bfloat16", "bfloat16")
    assert found.facts["reward_weights"] == [1.0, 0.5]
    assert ("is read as the release" in str(found.notes)) == ("dev" in version)


def test_a_dump_lacks_the_words_that_its_version_did_not_know(tmp_path: Path) -> None:
    words = json.loads(config(tmp_path, beta=0.04, temperature=0.9).to_json_string())
    later = r"transformers_|importance|loss_type|steps_per|generation_b|top_ent|sapo|vespo|vllm|use_bias|.*bf16"
    of_16 = {name: value for name, value in words.items() if not re.match(later, name)}
    for dump, loss in (
        ({**of_16, **MIXTURE}, PolicyLoss("bnpo", temperature=0.9, beta=0.04)),
        (
            {name: value for name, value in of_16.items() if name != "epsilon"},
            PolicyLoss("grpo", epsilon=None, beta=0.04),
        ),
    ):
        (tmp_path / "training_args.json").write_text(json.dumps(dump))
        found = read_settings(tmp_path)
        assert (found.loss, found.autocast, found.notes) == (loss, "float32", ())


def test_the_samplers_correction_has_the_defaults_of_its_version(tmp_path: Path) -> None:
    for version, correction in {
        "0.22.0": None,
        "0.23.0": Correction("token_truncate", None, 2.0),
        "0.26.0": Correction("sequence_mask", None, 3.0),
        "1.6.0": Correction("sequence_mask", None, 3.0),
    }.items():
        whole = recipe(tmp_path, {**RECIPE, "use_vllm": True}, version)
        assert read_settings(whole).loss.correction == correction, version


def test_what_depends_on_the_version_is_asked_for(tmp_path: Path) -> None:
    whole = recipe(tmp_path, {**RECIPE, "temperature": 0.7})
    refuses("does not say beta, loss_type, epsilon, whose defaults differ by version of TRL", read_settings, whole)
    assert read_settings(whole, version="0.18").loss == PolicyLoss("bnpo", temperature=0.7, beta=0.04)
    refuses(r"has the defaults of TRL 9\.1, which are not known", read_settings, whole, version="9.1")
    refuses("TRL new, which is not a version with GRPO", read_settings, whole, version="new")
    recipe(tmp_path, {**RECIPE, **SAYS_ALL, "bf16": None})
    assert read_settings(whole).version is None
    recipe(tmp_path, {**RECIPE, **SAYS_ALL, "steps_per_generation": 8})
    refuses(r"a generation has 8 micro-batches and a step 4\. Give the version", read_settings, whole)


@pytest.mark.parametrize(
    ("version", "loss_type", "weight"),
    [
        ("0.22.0", "dapo", 1 / 480),
        ("1.9.0", "cispo", 1 / 480),
        ("1.10.0", "dapo", 1 / 120),
        ("1.16.0", "vespo", 1 / 120),
    ],
)
def test_before_1_10_a_step_was_divided_by_the_tokens_of_its_generation(
    version: str, loss_type: str, weight: float, tmp_path: Path
) -> None:
    """Four steps of 12 responses with 10 tokens each."""
    words = {**SAYS_ALL, "loss_type": loss_type, "steps_per_generation": 4, "per_device_train_batch_size": 12}
    loss = read_settings(recipe(tmp_path, words, version)).loss
    found = loss.weights(np.full(12, 10), tokens_of_generation=480, rows_of_generation=48)
    np.testing.assert_allclose(found, weight)


def test_what_weights_and_biases_keeps(tmp_path: Path) -> None:
    """Its config has the words of the model too, and each in an object."""
    args = config(tmp_path, beta=0.04)
    model = {"_name_or_path": "/models/base", "model_type": "qwen2", "rope_theta": 1e6, "vocab_size": 9, "num_beams": 1}
    words = {**model, **json.loads(args.to_json_string()), "model/num_parameters": 12, "dtype": "bfloat16"}
    files = tmp_path / "wandb" / "run-20260101_000000-abc" / "files"
    files.mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to(files.parent.name)
    shown = {name: {"value": value} for name, value in words.items()}
    (files / "config.yaml").write_text(yaml.safe_dump({"wandb_version": 1, **shown}))
    (files / "requirements.txt").write_text("torch==2.9.0\ntrl==1.16.0\n")
    found = read_settings(tmp_path)
    dumped(tmp_path, beta=0.04)
    real = read_settings(tmp_path)
    assert (found.base, found.version, found.weights) == ("/models/base", "1.16.0", "bfloat16")
    assert (found.optimiser, found.loss, found.seed) == (real.optimiser, real.loss, real.seed)
    shown["peft_config"] = {"value": {"default": {"r": 8, "lora_dropout": 0.1}}}
    (files / "config.yaml").write_text(yaml.safe_dump(shown))
    found = read_settings(files / "config.yaml", version="1.20.0")
    assert (found.weights, found.dropout, found.notes[0][:20]) == ("float32", True, "TRL 1.20.0 is newer ")
    shown["strange_penalty"] = {"value": 0.3}
    (files / "config.yaml").write_text(yaml.safe_dump(shown))
    refuses(r"strange_penalty=0\.3 is not known, and may change the updates", read_settings, files / "config.yaml")


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def item(name: str, value: Any) -> bytes:
    return field(1, field(1, name.encode()) + field(16, json.dumps(value).encode()))


def log_of_wandb(*records: bytes) -> bytes:
    """As LevelDB writes logs, with blocks of 32 KB."""
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while record or first:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += bytes(room)
                continue
            piece, record = record[: room - 7], record[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
            content += bytes(4) + len(piece).to_bytes(2, "little") + bytes([kind]) + piece
            first = False
    return content


def test_an_offline_run_of_weights_and_biases(tmp_path: Path) -> None:
    run = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    run.mkdir(parents=True)
    file, number = run / "run-abc.wandb", varint(1 << 3) + varint(300)
    begun = item("learning_rate", 1e-5) + item("num_generations", 8) + item("system_prompt", "x" * 70_000)
    later = item("beta", 0.1) + item("lr_scheduler_kwargs", {"num_cycles": 2}) + item("lr_scheduler_type", "cosine")
    changes = [later, item("beta", 0.2) + item("neftune_noise_alpha", 5), field(2, field(1, b"neftune_noise_alpha"))]
    run_record = field(17, field(1, b"abc") + field(4, begun))
    file.write_bytes(log_of_wandb(field(21, b""), number + run_record, *(field(5, change) for change in changes)))
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    found = read_settings(tmp_path, version="1.16")
    assert found.optimiser == Optimiser("adamw", 1e-5, "cosine", 0, 95, shape={"num_cycles": 2}, decay_all=False)
    assert found.loss.beta == 0.2
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])  # of a run that was killed: the last change is lost
    refuses("neftune_noise_alpha=5: the training added noise", read_settings, file, version="1.16")
    for damaged in (whole.replace(b":W&B", b"none"), log_of_wandb(field(17, field(4, b"\x0f" * 9)))):
        file.write_bytes(damaged)
        refuses("cannot be read", read_settings, file, version="1.16")


def test_where_settings_lie(tmp_path: Path) -> None:
    """Beside the checkpoints before inside of them, and a dump before a recipe."""
    inside, parent = tmp_path / "run" / "checkpoint-10", tmp_path / "run"
    inside.mkdir(parents=True)
    series = CheckpointSeries((Checkpoint("base", "b"), Checkpoint("c", str(inside), run="run", step=10)))
    refuses("the trainer's settings do not lie beside the checkpoints", find_settings, series)
    refuses("holds no settings of a training", find_settings, series, where=parent)
    (parent / "other.yaml").write_text("a: 1\n")
    (parent / "broken.yaml").write_text("{")
    for learning_rate, folder in ((1e-5, inside), (2e-5, parent)):
        dumped(folder, learning_rate=learning_rate)
        assert find_settings(series).optimiser.learning_rate == learning_rate
        assert find_settings(series, "run").optimiser.learning_rate == learning_rate
    recipe(parent, {**RECIPE, **SAYS_ALL})
    assert find_settings(series).source == str(parent / "training_args.bin")
    assert find_settings(series, where=parent / "config_demo.yaml").optimiser.learning_rate == 2e-5
    (parent / "training_args.json").write_text(json.dumps({**SAYS_ALL, "learning_rate": 3e-5}))
    assert find_settings(series).optimiser.learning_rate == 3e-5
    refuses("does not hold the settings of a trainer that is known", read_settings, parent / "other.yaml")
    refuses("is not YAML", read_settings, parent / "broken.yaml")


def test_base_weights_and_dropout_are_those_of_the_checkpoints(tmp_path: Path) -> None:
    dumped(tmp_path)
    (tmp_path / "README.md").write_text(CARD.format("1.16.0"))
    assert read_settings(tmp_path).base == "some/base"
    newest = tmp_path / "checkpoint-40"
    newest.mkdir()
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, newest / "model.safetensors")
    (newest / "config.json").write_text(json.dumps({"_name_or_path": "/of/model", "attention_dropout": 0.0}))
    found = read_settings(tmp_path)
    assert (found.base, found.weights, found.dropout) == ("/of/model", "bfloat16", False)
    save_file({"a": torch.zeros(2)}, newest / "adapter_model.safetensors")
    adapter = {"base_model_name_or_path": "/of/adapter", "lora_dropout": 0.05}
    (newest / "adapter_config.json").write_text(json.dumps(adapter))
    found = read_settings(tmp_path)
    assert (found.base, found.weights, found.dropout) == ("/of/adapter", "float32", True)
    dumped(tmp_path, disable_dropout=True)
    assert not read_settings(tmp_path).dropout
    (newest / "config.json").write_text(json.dumps({"attention_dropout": 0.1}))
    assert read_settings(tmp_path).dropout  # the switch does not reach attention's
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, newest / "adapter_model.safetensors")
    refuses("trained weights were kept in F16, expected float32 or bfloat16", read_settings, tmp_path)
    recipe(tmp_path, {**RECIPE, **SAYS_ALL, "deepspeed": "zero3.json"})
    found = read_settings(tmp_path / "config_demo.yaml")
    assert (found.weights, found.notes[-1][:9]) == ("float32", "DeepSpeed")


def test_logged_rates_must_agree(tmp_path: Path) -> None:
    logged = [{"step": 1, "learning_rate": 1e-5}, {"step": 50, "learning_rate": 5.1e-6}]
    words = {**SAYS_ALL, "num_generations": 8, "learning_rate": 1e-5}
    whole = recipe(tmp_path, words, state={"max_steps": 100, "log_history": logged})
    assert read_settings(whole).optimiser.rate(50) == pytest.approx(5.1e-6)
    recipe(tmp_path, {**words, "learning_rate": 3e-5, "lr_scheduler_type": "constant"}, state={"log_history": logged})
    refuses(r"step 1 was 1e-05 by trainer_state\.json, 3e-05 by the settings", read_settings, whole)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optim": "adafactor"}, "optim=adafactor is not known"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type=greedy is not known"),
        ({"lr_scheduler_kwargs": {"steep": 2}}, "does not fit a linear schedule"),
        ({"loss_type": "ppo"}, "loss_type=ppo is not known"),
        ({"fp16": True}, "gradients were scaled, and steps that overflowed were left out, which is not replayed"),
        ({"entropy_coef": 0.01}, "the loss rewarded entropy"),
        ({"use_adaptive_entropy": True}, "a weight that adapted itself"),
        ({"neftune_noise_alpha": 5}, "added noise to embeddings"),
        ({"max_tool_calling_iterations": 3}, "responses called tools"),
        ({"load_in_4bit": True}, "the base was quantised"),
        ({"model_init_kwargs": {"quantization_config": {"bits": 4}}}, "the base was quantised"),
        ({**MIXTURE, "transformers_continuous_batching_config": None}, "balances the model's experts"),
        ({"strange_bonus": 0.3}, r"strange_bonus=0\.3 is not known, and may change the updates"),
        ({"learning_rate": "fast"}, "learning_rate='fast' is not a number"),
        ({"max_steps": -1}, "does not say the number of steps of the whole training"),  # TRL's way to say: by epochs
        ({"learning_rate": -1}, "learning_rate=-1"),
        ({"learning_rate": "nan"}, "learning_rate=nan is not finite"),
        ({"adam_beta1": 1.0}, "betas.0=1.0"),
        ({"generation_batch_size": 64}, "without the number of processes does not say how rows became steps"),
        ({"warmup_steps": "soon"}, "warmup_steps='soon' is not a number"),
        ({"gradient_accumulation_steps": 0}, "accumulation=0"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0}, "learning_rate=0"),
    ],
)
def test_what_is_not_replayed_is_said(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps({**SAYS_ALL, **changed}))
    refuses(said, read_settings, tmp_path)


def test_words_without_effect_are_passed_over(tmp_path: Path) -> None:
    words = {
        "logging_dir": "x",
        "hub_token": "secret",
        "vllm_tensor_parallel_size": 4,
        "new_switch": False,
        "other": None,
    }
    (tmp_path / "training_args.json").write_text(json.dumps({**SAYS_ALL, **words, "use_liger_kernel": True}))
    found = read_settings(tmp_path)
    assert "secret" not in repr(found)
    assert found.notes == ("Liger's kernels computed the loss, which is the same formula.",)


@pytest.mark.parametrize(
    "state",
    [
        {"log_history": True},
        {"log_history": [{"learning_rate": "x", "step": 1}]},
        {"log_history": [5]},
        {"max_steps": "many"},
    ],
)
def test_damaged_states_are_named(state: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps(SAYS_ALL))
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    refuses(r"trainer_state\.json: cannot be read", read_settings, tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save(SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), tmp_path / "training_args.bin")
    refuses(r"holds a trl\.trainer\.sft_config\.SFTConfig, expected a GRPOConfig", read_settings, tmp_path)
    for content, said in (("{", "is not JSON"), ("[1]", "holds a list, expected settings by name")):
        (tmp_path / "training_args.json").write_text(content)
        refuses(said, read_settings, tmp_path)


def test_settings_in_words(tmp_path: Path) -> None:
    words = {"warmup_steps": 3, "max_grad_norm": 0.2, "beta": 0.04, "num_iterations": 2, "bf16": True}
    dumped(tmp_path, **words, weight_decay=0.1, epsilon_high=0.28)
    assert str(replace(read_settings(tmp_path), source="training_args.bin")) == (
        "adamw, learning rate 1e-06 (linear, 3 steps of warm-up), weight decay 0.1, gradients clipped at norm 0.2, "
        "loss dapo, ratios clipped at 0.8 and 1.28, KL penalty 0.04, 2 updates a generation, bfloat16 "
        "(by training_args.bin; trl)"
    )
