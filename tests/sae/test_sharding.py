"""A dictionary that several gloo processes divide, against one process with all of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.children import free_port, start
from support.trainings import CONFIG, SHORT, checkpoint, make_store, run, run_ranks, same_files
from tsae.activations.store import ActivationStore
from tsae.base.distributed import ALONE, Processes, join
from tsae.sae.config import SAEConfig
from tsae.sae.fitting.loss import temporal_loss
from tsae.sae.fitting.sharding import AXES, DictionaryShard, clip
from tsae.sae.fitting.threshold import calibrate
from tsae.sae.model import TemporalSAE

D = 8
DIVIDED = replace(SHORT, shard_dictionary=True)

# Config, and whether partners lie outside the batch.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "all terms": ({}, False),
    "partners from outside": ({}, True),
    "three groups": ({"groups": (0.1, 0.3, 0.6), "group_weights": (0.5, 2.0, 1.5)}, False),
    "weighted L1": ({"temporal": "l1"}, True),
    "a group that not all have": ({"d_sae": 20, "groups": (0.05, 0.95)}, False),
    "more than there are": ({"k": 50}, False),
}


def make_sae(config: dict[str, Any]) -> TemporalSAE:
    generator = torch.Generator().manual_seed(2)
    sae = TemporalSAE(D, SAEConfig(**{"d_sae": 61, "k": 4, "groups": (0.3, 0.7), "aux_weight": 0.2, **config}))
    sae.initialize(torch.randn(D, generator=generator), generator)
    with torch.no_grad():
        sae.b_enc.add_(0.3 * torch.randn(sae.config.d_sae, generator=generator))
    return sae.double()


def own(name: str, tensor: torch.Tensor, among: Processes) -> torch.Tensor:
    axis = AXES.get(name)
    if axis is None:
        return tensor
    return tensor.index_select(axis, torch.arange(among.rank, tensor.shape[axis], among.size))


def check_loss(config: dict[str, Any], apart: bool, among: Processes) -> None:
    generator = torch.Generator().manual_seed(7)
    x = 3 * torch.randn(80, D, generator=generator).double()
    at = torch.arange(79)
    pairs = torch.stack([at, at + 1], dim=1)[at % 4 != 3]
    others = 3 * torch.randn(len(pairs), D, generator=generator).double() if apart else None
    if apart:
        pairs[:, 0] = 80 + torch.arange(len(pairs))
    copies = torch.arange(80 + (len(pairs) if apart else 0)) % 60
    whole = make_sae(config)
    shard = DictionaryShard(D, whole.config, among).double().take(whole)
    dead = torch.arange(whole.config.d_sae) % 6 == 0  # with three processes, all on the first
    found = []
    for sae, asleep in ((whole, dead), (shard, dead[among.rank :: among.size])):
        terms = temporal_loss(sae, x, pairs, asleep, torch.arange(80) // 16, others, copies)
        terms.total.backward()
        found.append(terms)
    among.sum_gradients([shard.b_dec])
    exactly = {"atol": 1e-11, "rtol": 1e-10}
    for name in ("total", "reconstruction_high", "reconstruction", "temporal", "aux"):
        one, many = (getattr(terms, name).detach() for terms in found)
        assert one != 0
        torch.testing.assert_close(many, one, **exactly)
    assert torch.equal(found[1].fired, found[0].fired[among.rank :: among.size])
    for _ in range(2):
        for name, parameter in shard.named_parameters():
            gradient = whole.get_parameter(name).grad
            assert parameter.grad is not None
            assert gradient is not None
            torch.testing.assert_close(parameter.grad, own(name, gradient, among), **exactly)
        clip(whole, ALONE, 0.5)
        clip(shard, among, 0.5)
    calibrate(whole, x)
    calibrate(shard, x, among)
    torch.testing.assert_close(shard.threshold, whole.threshold, atol=1e-6, rtol=0)


def check_rank(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with join("cpu") as among:
        for config, apart in CASES.values():
            check_loss(config, apart, among)
        # Drawn and put together in parts, the weights are those of one process to the bit.
        one = TemporalSAE(D, SAEConfig(d_sae=5001))
        part = DictionaryShard(D, one.config, among)
        for sae in (one, part):
            sae.initialize(torch.ones(D), torch.Generator().manual_seed(3))
        assert len(part.b_enc) < 5001 / size + 1
        assert part.whole().fingerprint == one.fingerprint


@pytest.mark.slow  # starts several processes
@pytest.mark.parametrize("size", [2, 3])
def test_loss_and_gradients_are_those_of_one_process(size: int) -> None:
    port = free_port()
    ranks = [start(check_rank, rank, size, port) for rank in range(size)]
    for child in ranks:
        child.join(300)
    assert [child.exitcode for child in ranks] == [0] * size


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return make_store(tmp_path_factory.mktemp("sharded") / "acts")


@pytest.fixture(scope="module")
def one(store: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains."""
    folder = tmp_path_factory.mktemp("one") / "sae"
    run(store.path, folder)
    return folder


def as_one(folder: Path, one: Path) -> None:
    """Compare files with those that one process wrote."""
    expected, found = (load_file(f / "sae.safetensors") for f in (one, folder))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=3e-6, rtol=1e-5, msg=name)
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (one, folder)]
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


@pytest.mark.slow  # starts several processes
def test_a_divided_training_gives_the_weights_of_one_process(store: ActivationStore, one: Path, tmp_path: Path) -> None:
    """Also if three go on with what two have begun, and one with what three have."""
    assert run_ranks(store.path, tmp_path / "whole", CONFIG, DIVIDED) == [0, 0]
    as_one(tmp_path / "whole", one)
    ranks = [load_file(tmp_path / f"whole-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], weight) for name, weight in ranks[1].items())
    folder = tmp_path / "sae"
    assert all(run_ranks(store.path, folder, CONFIG, DIVIDED, die=10))
    names = sorted(p.name for p in next((folder / "checkpoint").glob("[0-9]*")).iterdir())
    assert names == ["state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors", "state.json"]
    if checkpoint(folder) == 10:
        assert all(run_ranks(store.path, folder, CONFIG, DIVIDED, die=20, size=3))
    run(store.path, folder)
    as_one(folder, one)


@pytest.mark.slow  # starts several processes
def test_a_divided_training_that_is_killed_ends_with_the_same_bits(store: ActivationStore, tmp_path: Path) -> None:
    assert run_ranks(store.path, tmp_path / "whole", CONFIG, DIVIDED) == [0, 0]
    assert all(run_ranks(store.path, tmp_path / "sae", CONFIG, DIVIDED, die=10))  # killed, or left alone by the other
    assert run_ranks(store.path, tmp_path / "sae", CONFIG, DIVIDED) == [0, 0]
    same_files(tmp_path / "sae", tmp_path / "whole")
