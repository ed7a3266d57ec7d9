"""Weights that FSDP divided among processes, as verl saves them, are merged to what they were."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.refusals import refuses
from tsae.checkpoints.fsdp import fsdp_shards
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import folder_of, weights_of
from tsae.config import RunConfig
from tsae.doctor import find_series
from tsae.errors import TsaeError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))


def ranks(shape: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """Every process of a mesh in turn, without starting any."""
    size = torch.Size(shape).numel()
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield rank, init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        finally:
            dist.destroy_process_group()


def divided(model: Path, actor: Path, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Save a model as verl does, in rows or, where these are 1-dimensional, in numbers; the whole weights."""
    whole = load_file(model / "model.safetensors")
    actor.mkdir(parents=True)
    shutil.copytree(model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    for rank, mesh in ranks(shape):
        part = {}
        for name, weight in whole.items():
            pieces = list(weight.chunk(shape[-1]))
            pieces += [weight[:0]] * (shape[-1] - len(pieces))
            own = pieces[rank % shape[-1]].clone()
            placements = [*[Replicate()] * (len(shape) - 1), Shard(0)]
            part[name] = DTensor.from_local(
                own, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
            )
        torch.save(part, actor / f"model_world_size_{len(mesh.mesh.flatten())}_rank_{rank}.pt")
    return whole


@pytest.mark.filterwarnings("ignore:It seems like pickling")
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_shards_are_merged_once_and_read_like_the_model(llama: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    actor = tmp_path / "dapo/global_step_10/actor"
    whole = divided(llama, actor, shape)
    series = CheckpointSeries.load(llama, tmp_path / "dapo")
    assert [(c.id, c.step) for c in series] == [("base", 0), ("dapo-00010", 10)]
    assert series.notes == ()
    series["dapo-00010"].load_tokenizer()
    size = sum(file.stat().st_size for file in actor.glob("*.pt"))
    assert weights_of(series["dapo-00010"]) == (size, "merged")
    assert find_series(RunConfig(tmp_path / "dapo", base=str(llama)))[0].notes == ()
    assert not (tmp_path / "cache").exists()  # neither tokens nor the check need weights
    with ThreadPoolExecutor(4) as pool:  # as workers of one command do
        (folder,) = set(pool.map(folder_of, [series["dapo-00010"]] * 4))
    assert folder.is_relative_to(tmp_path / "cache")
    found = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    model, base = series["dapo-00010"].load_model(), series.base.load_model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert {file: file.stat().st_mtime_ns for file in folder_of(series["dapo-00010"]).iterdir()} == written
    shard = actor / f"model_world_size_{torch.Size(shape).numel()}_rank_0.pt"
    shard.touch()
    assert folder_of(series["dapo-00010"]) != folder


@pytest.mark.filterwarnings("ignore:It seems like pickling")
def test_shards_that_do_not_fit_are_refused(llama: Path, tmp_path: Path) -> None:
    actor = tmp_path / "run/global_step_10/actor"
    divided(llama, actor, (2,))
    first, second = (actor / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    assert fsdp_shards(actor) == [first, second]
    series = CheckpointSeries.load(llama, tmp_path / "run")
    good = second.read_bytes()
    shutil.copyfile(first, second)  # the first process's part twice
    refuses(r"the parts of .* do not make a weight of shape", folder_of, series["run-00010"])
    torch.save({"other": torch.zeros(2)}, second)
    refuses(r"rank_1\.pt: holds other weights than model_world_size_2_rank_0\.pt", folder_of, series["run-00010"])
    torch.save({"x": torch.nn.Linear(1, 1)}, second)
    refuses(r"it needs pickle.*verl\.model_merger", folder_of, series["run-00010"])
    second.write_bytes(good[:-100])
    with pytest.raises(TsaeError):
        folder_of(series["run-00010"])
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    second.unlink()
    assert fsdp_shards(actor) == []
    refuses("all as FSDP shards", CheckpointSeries.load, llama, tmp_path / "run")
