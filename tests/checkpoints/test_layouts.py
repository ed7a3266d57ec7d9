"""Every trainer's folder of checkpoints, laid out by the rules of its own saving code."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.refusals import refuses
from tsae.checkpoints.layouts import refuse_shards, step_folders, step_of

MODEL, ADAPTER = ("config.json", "model.safetensors"), ("adapter_config.json", "adapter_model.safetensors")
CONFIG = ("config.json", "tokenizer.json")  # verl writes it beside every checkpoint, with or without weights

LAYOUTS: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, list[int]]]] = {
    "TRL": ({"checkpoint-8": MODEL, "checkpoint-16": MODEL, "completions": ()}, {"": [8, 16]}),
    "ms-swift": (
        {"v0-20260101-120000/checkpoint-5": ADAPTER, "v1-20260102-120000/checkpoint-5": ADAPTER},
        {"v0-20260101-120000": [5], "v1-20260102-120000": [5]},
    ),
    "verl, whole": (
        {
            f"project/experiment/global_step_{n}/{place}": files
            for n in (50, 100)
            for place, files in (
                ("actor/huggingface", (*CONFIG, *MODEL)), ("actor", ("model_world_size_2_rank_0.pt",)),
                ("critic/huggingface", MODEL),
            )
        } | {"project/experiment": ("latest_checkpointed_iteration.txt",)},
        {"project/experiment": [50, 100]},
    ),
    "verl, LoRA": (
        {f"global_step_{n}/{place}": files for n in (2, 10) for place, files in (
            ("actor/lora_adapter", ADAPTER), ("actor/huggingface", CONFIG),
            ("actor", ("model_world_size_1_rank_0.pt",)),
        )},
        {"": [2, 10]},
    ),
    "open-instruct": (
        {"run_checkpoints/step_200": MODEL, "run_checkpoints/step_1000": MODEL},
        {"run_checkpoints": [200, 1000]},
    ),
    "prime-rl": (
        {"weights/step_20": MODEL, "weights/step_40": MODEL, "checkpoints/step_40/trainer": ("__0_0.distcp",)},
        {"weights": [20, 40]},
    ),
    "NeMo-RL": (
        {"step_10/policy/weights/model/consolidated": MODEL, "step_10/policy/tokenizer": ("tokenizer.json",),
         "step_10/policy/weights/model": ("__0_0.distcp",)},
        {"": [10]},
    ),
    "OpenRLHF": (
        {"global_step10_hf": MODEL, "global_step20_hf": MODEL, "_actor/global_step20": ("mp_rank_00_model_states.pt",)},
        {"": [10, 20]},
    ),
    "AReaL": (
        {f"checkpoints/me/gsm8k/trial0/default/epoch{e}epochstep{s}globalstep{g}": MODEL
         for e, s, g in ((0, 9, 9), (1, 9, 19))},
        {"checkpoints/me/gsm8k/trial0/default": [10, 20]},
    ),
    "AReaL, PPO from step 0": (
        {f"trial0/{role}/epoch0epochstep{n}globalstep{n}": MODEL for n in (0, 1) for role in ("default", "critic")},
        {"trial0/default": [1, 2]},
    ),
    "torchtune": ({"epoch_0": MODEL, "epoch_1": MODEL}, {"": [1, 2]}),
    "torchtune, LoRA merged": ({f"epoch_{n}": (*MODEL, *ADAPTER, "adapter_model.pt") for n in (0, 1)}, {"": [1, 2]}),
    "slime": ({f"hf/rollout_{n}": MODEL for n in (0, 1)}, {"hf": [1, 2]}),
    "slime, by number": (
        {"hf/49": MODEL, "hf/99": MODEL, "iter_0000050": ("__0_0.distcp",), "rollouts/3": ()}, {"hf": [49, 99]},
    ),
    "slime, beside its shards": (
        {"iter_0000050": ("__0_0.distcp",), "iter_0000050_hf": MODEL, "iter_0000100_hf": MODEL}, {"": [50, 100]},
    ),
    "verl as it was": ({f"{role}/global_step_100": MODEL for role in ("actor", "critic")}, {"actor": [100]}),
    "verl, merged Megatron": (
        {f"global_step_{n}/{place}": files for n in (5, 10) for place, files in (
            ("actor/huggingface", CONFIG), ("actor/hf_model", MODEL), ("actor/dist_ckpt", ("__0_0.distcp",)),
        )},
        {"": [5, 10]},
    ),
    "verl, merged": ({"global_step_5/merged_hf_model": MODEL, "global_step_5/actor/huggingface": CONFIG}, {"": [5]}),
    "ROLL": ({"checkpoint-20/actor_train": MODEL, "checkpoint-20/critic_train": MODEL}, {"": [20]}),
    "ART": ({"models/agent/checkpoints/0001": ADAPTER, "models/agent/checkpoints/0002": ADAPTER},
            {"models/agent/checkpoints": [1, 2]}),
    "prime-rl, LoRA": (
        {"weights/step_39": ADAPTER, "run_default/broadcasts/step_40": ADAPTER}, {"weights": [39]},
    ),
    "nano-aha-moment": (
        {"ckpt_000050/hf_model": MODEL, "ckpt_000050/deepspeed/global_step50": ("mp_rank_00_model_states.pt",)},
        {"": [50]},
    ),
    "numbered folders": ({"iter_0000050": MODEL, "iter_0000100": MODEL, "log_3": ()}, {"": [50, 100]}),
    "named models": (
        {"Qwen3-4B-RL-step-50": MODEL, "Qwen3-4B-RL-step-100": MODEL, "SmolLM_checkpoint_5": MODEL, "log-step-9": ()},
        {"Qwen3-4B-RL": [50, 100], "SmolLM": [5]},
    ),
    "epochs beside steps": ({"checkpoint-50": MODEL, "epoch_1": MODEL}, {"": [50]}),
}  # fmt: skip


def laid_out(folder: Path, layout: dict[str, tuple[str, ...]]) -> Path:
    for place, files in layout.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name in files:
            (folder / place / name).write_text("{}")
    return folder


@pytest.mark.parametrize("trainer", LAYOUTS)
def test_runs_and_steps_of_a_trainer(trainer: str, tmp_path: Path) -> None:
    layout, expected = LAYOUTS[trainer]
    folder = laid_out(tmp_path.resolve(), layout)
    found = [each for each in step_folders(folder) if each.shards is None]
    steps = {name: [each.step for each in found if each.run == folder / name] for name in expected}
    assert steps == expected
    assert len(found) == sum(map(len, expected.values()))
    refuse_shards(folder, step_folders(folder))
    for each in found:
        assert {"model.safetensors", "adapter_model.safetensors"} & {file.name for file in each.model.iterdir()}
        assert "critic" not in each.model.parts
        assert step_of(each.model) == (each.step, each.run)


@pytest.mark.parametrize(("layout", "says"), [
    ({"global_step_5/actor": ("model_world_size_8_rank_0.pt",), "global_step_5/actor/huggingface": CONFIG},
     r"1 checkpoints, all as FSDP shards.*verl\.model_merger merge --backend fsdp --local_dir \S*global_step_5/actor "),
    ({"step_5/policy/weights": ("__0_0.distcp", ".metadata")}, r"convert_dcp_to_hf\.py --config \S*step_5/config\."),
    ({"_actor/global_step5": ("mp_rank_00_model_states.pt",)},
     r"\S*_actor/zero_to_fp32\.py \S*_actor \S+ -t global_step5 "),
])  # fmt: skip
def test_shards_name_the_command_that_merges_them(
    layout: dict[str, tuple[str, ...]], says: str, tmp_path: Path
) -> None:
    folder = laid_out(tmp_path, layout)
    refuses(says, lambda: refuse_shards(folder, step_folders(folder)))


def test_a_run_that_a_link_names_too_is_one(tmp_path: Path) -> None:
    laid_out(tmp_path, {"run1/checkpoint-8": MODEL})
    (tmp_path / "last").symlink_to("run1")
    (tmp_path / "run1" / "up").symlink_to("..")
    found = step_folders(tmp_path)
    assert [(each.run.name, each.step) for each in found] == [("run1", 8)]


def test_a_folder_that_is_no_checkpoint_has_no_step(tmp_path: Path) -> None:
    assert step_of(tmp_path / "llama") is None
    assert step_folders(laid_out(tmp_path, {"a/step_5": (), "v0": MODEL, ".hidden/checkpoint-5": MODEL})) == []


def test_a_model_beside_its_own_shards_is_a_model(tmp_path: Path) -> None:
    files = {"checkpoint-10": MODEL, "checkpoint-10/global_step10": ("mp_rank_00_model_states.pt",)}
    assert step_folders(laid_out(tmp_path, files) / "checkpoint-10") == []
    assert [each.step for each in step_folders(tmp_path)] == [10]


def test_numbered_runs_are_no_steps(tmp_path: Path) -> None:
    files = {"1": MODEL, "1/checkpoint-8": MODEL, "2": MODEL, "2/checkpoint-8": MODEL, "3": MODEL}
    found = [(each.run.name, each.step) for each in step_folders(laid_out(tmp_path, files))]
    assert found == [("1", 8), ("2", 8)]
    assert [each.step for each in step_folders(tmp_path / "1")] == [8]
    assert step_of(tmp_path / "3") is None
    assert [each.step for each in step_folders(laid_out(tmp_path / "checkpoint-1", {"checkpoint-50": MODEL}))] == [50]
