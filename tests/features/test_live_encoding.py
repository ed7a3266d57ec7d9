"""Encoding while models read: the codes of a store, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, save_base_and_run
from support.refusals import fails
from tsae.activations.live import LiveSource
from tsae.base.part import Part
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.features.encode import encode, encode_part

SITE = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def world(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("world")
    series = tsae.CheckpointSeries.load(save_base_and_run(folder, llama))
    rollouts = make_rollouts(n_problems=6, n_samples=4, tokenizer=fingerprint)
    file = rollouts.write(folder / "rollouts.parquet")
    store = tsae.capture(series, rollouts, [SITE], to=folder / "acts", progress=False)
    training = tsae.TrainingConfig(tokens=2000, batch_tokens=100)
    sae = tsae.train(store, tsae.SAEConfig(d_sae=32, k=4), training=training, to=folder / "sae", progress=False)
    return {"folder": folder, "series": series, "rollouts": rollouts, "file": file, "store": store, "sae": sae}


def live(world: dict[str, Any], shard_tokens: int, monkeypatch: pytest.MonkeyPatch, **config: Any) -> LiveSource:
    monkeypatch.setattr("tsae.activations.live._SHARD_TOKENS", shard_tokens)
    return LiveSource(world["series"], world["rollouts"], SITE, config=tsae.LiveConfig(**config))


def assert_alike(ours: Any, theirs: Any) -> None:
    """Equal but for the last bits, which depend on the batch of the forward pass."""
    for name in ("token_ids", "row_offsets", "reader", "trajectory", "outlier"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_allclose(ours.codes[:].toarray(), theirs.codes[:].toarray(), atol=2e-5)
    for mine, yours in zip(ours.info["readers"], theirs.info["readers"], strict=True):
        assert {k: v for k, v in mine.items() if not isinstance(v, float)} == {
            k: v for k, v in yours.items() if not isinstance(v, float)
        }
        assert mine["fve"] == pytest.approx(yours["fve"], abs=1e-5)
        assert mine["l0"] == pytest.approx(yours["l0"], abs=1e-2)


def test_codes_are_those_of_the_store(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encode(world["sae"], world["store"], progress=False)
    source = live(world, 60, monkeypatch)
    assert sum(1 for _ in source.shards()) > 7
    assert_alike(encode(world["sae"], source, progress=False), stored)


def test_a_subset_reads_no_more(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a model of another reader opened."""
    stored = encode(world["sae"], world["store"].subset(runs="run", outcomes="success"), progress=False)
    source = live(world, 200, monkeypatch).subset(runs="run", outcomes="success")
    opened: list[str] = []
    real = LiveSource._opened
    monkeypatch.setattr(LiveSource, "_opened", lambda self, reader: opened.append(reader) or real(self, reader))
    assert_alike(encode(world["sae"], source, progress=False), stored)
    assert set(opened) == set(source.readers) == {"run-1"}


@pytest.mark.slow(ci=True)
def test_bytes_do_not_depend_on_parts(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = live(world, 60, monkeypatch)
    encode(world["sae"], source, to=tmp_path / "one", progress=False)
    for index in (2, 0, 1):
        encode_part(world["sae"], live(world, 60, monkeypatch), to=tmp_path / "three", part=Part(index, 3))
    encode(world["sae"], source, to=tmp_path / "three", progress=False)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "three" / file.name).read_bytes()
    encode_part(world["sae"], source, to=tmp_path / "other", part=Part(0, 2))
    with pytest.raises(TsaeError, match="pieces of another encoding: shards differ"):
        encode(world["sae"], live(world, 60, monkeypatch, batch_tokens=100), to=tmp_path / "other", progress=False)


def test_short_memory_changes_no_result(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of more than 20 tokens fails, once some texts have been encoded already."""
    stored = encode(world["sae"], world["store"], progress=False)
    source = live(world, 500_000, monkeypatch)
    real = tsae.checkpoints.hooks.HuggingFaceReader.read
    calls = []

    def short(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        calls.append(ids.numel())
        if len(calls) > 3 and ids.numel() > 20:
            raise MemoryError
        return real(self, ids, mask)

    monkeypatch.setattr("tsae.checkpoints.hooks.HuggingFaceReader.read", short)
    with pytest.warns(RuntimeWarning, match="was short of memory"):
        found = encode(world["sae"], source, progress=False)
    assert_alike(found, stored)


def test_the_command(world: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world["folder"]
    words = ["encode", "--sae", folder / "sae", "--to", tmp_path / "features"]
    given = ["--live.series", world["folder"], "--live.rollouts", world["file"]]
    main([str(word) for word in [*words, *given]])
    stored = encode(world["sae"], world["store"], progress=False)
    found = tsae.FeatureTable.load(tmp_path / "features")
    np.testing.assert_allclose(found.codes[:].toarray(), stored.codes[:].toarray(), atol=2e-5)
    said = "tsae encode: activations come from a store, or from live models"
    assert said in fails(capsys, *words, *given[:2]).err
