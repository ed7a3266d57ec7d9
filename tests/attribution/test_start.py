"""Where a replay begins: adapters, against a LoRA training with peft; other vocabularies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tsae
from support.builders import save_model, save_perturbed
from support.checkpoints import save_adapter, save_resized
from support.grpo_loop import ADAPTER, CASES, GrpoLoop, make_log, replay_of
from support.refusals import refuses
from tsae.attribution.forward_passes import Run
from tsae.attribution.order import plan_updates
from tsae.attribution.start import Start, checkpoints_of, start_of
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError

LORA = CASES["LoRA"][1]


@pytest.fixture(scope="module")
def run(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GrpoLoop, Path]:
    """Four steps of a LoRA training by peft and torch, each with its adapter."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    return GrpoLoop(llama, make_log(LORA, 4), LORA, ADAPTER).run(to=folder, save=(1, 2, 3, 4)), folder


def begin(base: Path, folder: Path, **given: Any) -> Start:
    series = tsae.CheckpointSeries.load(base, folder)
    return start_of(series, checkpoints_of(series, None), LORA.optimiser, **given)


def late(folder: Path, to: Path) -> Path:
    """The last two checkpoints, without the optimiser's state."""
    for step in (3, 4):
        shutil.copytree(folder / f"checkpoint-{step}", to / f"checkpoint-{step}")
        (to / f"checkpoint-{step}" / "optimizer.pt").unlink()
    return to


def test_a_run_of_adapters_is_replayed(llama: Path, run: tuple[GrpoLoop, Path], tmp_path: Path) -> None:
    """From A of the seed exactly; from A of the first checkpoint exactly, too: the first step leaves it as it was."""
    loop, folder = run
    plan = plan_updates(loop.log, LORA, checkpoints={}, vocabulary=None)

    def distances(begun: Start) -> Any:
        replayed = replay_of(Run(begun.trained, loop.log, LORA, plan, begun.begin), tmp_path, controls=begun.controls)
        return replayed.steps.distance.dropna()

    for seed, notes in ((5, ["The adapter's A was drawn from the trainer's seed, 5."]), (6, [])):
        begun = begin(llama, folder, seed=seed)
        assert begun.notes == notes
        modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in begun.trained.parameters}
        assert modules == {"q_proj", "v_proj", "down_proj"}
        found = distances(begun)
        assert len(found) == 4
        assert found.max() < 1e-5
    folder = late(folder, tmp_path / "late")
    assert distances(begin(llama, folder, seed=5)).max() < 1e-5
    begun = begin(llama, folder)
    assert begun.notes == [
        "The adapter before the first step is not there: it is taken to have had the A of step 3, and B = 0."
    ]
    parts = dict(zip(begun.trained.parameters, begun.begin.weights.split(begun.trained.sizes), strict=True))
    assert all((part == 0).all() == (".lora_B." in name) for name, part in parts.items())
    assert 1e-3 < distances(begun).max() < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"bias": "all"}, r"self_attn.q_proj.base_layer.bias beside A and B"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head.modules_to_save.default.weight beside A and B"),
        ({"target_parameters": ["k_proj.weight"]}, "updates of single parameters"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    base = save_model(tmp_path / "base", "qwen2")  # which has biases
    save_adapter(base, tmp_path / "run" / "checkpoint-1", target_modules=["q_proj", "v_proj"], **options)
    refuses(said, begin, base, tmp_path / "run")


def test_checkpoints_that_are_no_run(llama: Path, run: tuple[GrpoLoop, Path], tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(run[1] / "checkpoint-1", mixed / "checkpoint-1")
    save_perturbed(llama, mixed / "checkpoint-2")
    refuses("has whole models and adapters", begin, llama, mixed)
    series = tsae.CheckpointSeries.load(llama, run[1])
    refuses(r"has the runs run; no other\. Name one of them", checkpoints_of, series, "other")
    with pytest.raises(TsaeError, match=r"has the runs none\. Give the folder with the run's last checkpoint"):
        checkpoints_of(tsae.CheckpointSeries((series.base,)), None)


def test_a_run_that_resized_the_vocabulary_begins_at_the_base(llama: Path, tmp_path: Path) -> None:
    """More tokens, and spare ones cut off: those that both have begin with the base's weights."""
    base = Checkpoint("base", str(llama)).load_model()
    for name, size in (("more", 24), ("fewer", 19)):
        save_resized(llama, tmp_path / name / "checkpoint-1", size)
        begun = begin(llama, tmp_path / name)
        assert begun.notes[0].startswith("The run resized the vocabulary: tokens that base does not have")
        first, n = list(tsae.CheckpointSeries.load(llama, tmp_path / name))[1].load_model(), min(size, 20)
        begun.trained.put(begun.begin.weights)
        for key, weight in begun.trained.parameters.items():
            by_token = "embed_tokens" in key or "lm_head" in key
            rows = n if by_token else len(weight)
            assert torch.equal(weight[:rows], base.get_parameter(key)[:rows])
            assert torch.equal(weight[rows:], first.get_parameter(key)[rows:])


def test_checkpoints_of_other_sizes_make_no_path(llama: Path, tmp_path: Path) -> None:
    """Both sizes are named; and a vocabulary that changes on the way is none that one run trained."""
    save_model(tmp_path / "wide" / "checkpoint-1", d_model=24)
    refuses(r"has the shape \(\d+, 24\) for the weight \S+, and \S+ has \(\d+, 16\)", begin, llama, tmp_path / "wide")
    for step, size in ((1, 20), (2, 24)):
        save_resized(llama, tmp_path / "grows" / f"checkpoint-{step}", size)
    with pytest.raises(
        TsaeError, match=r"has the shape \(24, 16\) for the weight \S+, and the run began with the shape"
    ):
        begin(llama, tmp_path / "grows").controls[2]()
