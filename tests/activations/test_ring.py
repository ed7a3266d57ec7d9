"""Live activations held on disk: the bits of a training in memory, fewer forward passes, and a bounded folder."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.children import free_port, start
from support.trainings import interrupted
from tsae.activations.live import LiveSource, LiveWindows
from tsae.activations.ring import Ring, RingOnDisk
from tsae.base.distributed import join
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig

SITE = "blocks.1.hook_resid_post"
CONFIG = tsae.LiveConfig(buffer_tokens=400, batch_tokens=128)
GB = 400 * 16 * 4 / 1e9  # 400 tokens of 16 float32 values
TRAINING = TrainingConfig(tokens=3500, batch_tokens=100, learning_rate=3e-3, save_every_steps=10)
SAE = SAEConfig(d_sae=64, k=4)


def on_disk(folder: Path, gigabytes: float = GB) -> tsae.LiveConfig:
    return replace(CONFIG, cache=folder, cache_gb=gigabytes)


@contextmanager
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The portions that are computed."""
    real, found = LiveWindows._computed, []
    with monkeypatch.context() as patch:
        patch.setattr(LiveWindows, "_computed", lambda self, portion: found.append(portion) or real(self, portion))
        yield found


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_holds_what_was_used_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, ring, used = rng.integers(1, 9, 40), Ring(50, 2, "float32"), list[int]()
    for _ in range(60):
        wanted = [int(p) for p in rng.permutation(40)[: rng.integers(1, 6)]]
        missing = ring.missing({p: int(sizes[p]) for p in wanted})
        # Those used last, as far as they fit beside what is wanted, are not missing.
        newest, total = set[int](), 0
        for portion in reversed(used):
            total += int(sizes[portion])
            if total > 50:
                break
            newest.add(portion)
        assert not newest & set(missing)
        for portion, rows in missing.items():
            ring.put(portion, rows, np.full((sizes[portion], 2), portion, np.float32))
        ring.all_put(missing, wanted)
        for portion, rows in zip(wanted, ring.rows(wanted), strict=True):
            assert (ring.values[rows] == portion).all()
            assert len(rows) == sizes[portion]
            np.testing.assert_allclose(ring.norms[rows], portion * 2**0.5, rtol=1e-6)
        used = [p for p in used if p not in wanted] + wanted


@pytest.mark.slow
def test_a_cache_on_disk_changes_no_bit(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a kill, what the cache has is not computed again, but for a portion whose bytes have changed."""
    source = LiveSource(series, rollouts, SITE, config=CONFIG)
    expected = tsae.train(source, SAE, training=TRAINING, progress=False)
    cached = LiveSource(series, rollouts, SITE, config=on_disk(tmp_path / "cache"))

    def train(to: Path) -> tsae.TemporalSAE:
        return tsae.train(cached, SAE, to=to, training=TRAINING, progress=False)

    interrupted(monkeypatch, cached, tmp_path / "sae", saves=1, training_of=train)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["activations.bin", "index.jsonl"]
    assert (tmp_path / "cache" / "activations.bin").stat().st_size == round(GB * 1e9)
    lines = [json.loads(line) for line in (tmp_path / "cache" / "index.jsonl").read_text().splitlines()]
    held = {line["portion"]: line["rows"] for line in lines if "portion" in line}
    for line in lines:
        for portion in line.get("given up", ()):
            del held[portion]
    with (tmp_path / "cache" / "activations.bin").open("r+b") as stream:
        stream.seek(next(iter(held.values()))[0][0] * 64)
        stream.write(b"damaged!")
    with (tmp_path / "cache" / "index.jsonl").open("a") as stream:
        stream.write("[" * 100_000 + "\n")  # no line of ours
        stream.write('{"portion": 7, "ro')  # killed while it wrote
    with computed(monkeypatch) as portions:
        found = train(tmp_path / "sae")
    assert found.fingerprint == expected.fingerprint
    assert not (tmp_path / "cache").exists()
    with computed(monkeypatch) as without:
        train(tmp_path / "other")
    assert 0 < len(portions) < len(without)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 200_000,
        '{"portion": 0, "rows": [[0, 100000000000000]], "crc32": 1}',
        '{"portion": 0, "rows": [[0.5, 3]], "crc32": 1}',
        '{"portion": 0, "rows": [[5, -3]], "crc32": 1}',
        '{"portion": 0, "rows": [[98, 3]], "crc32": 1}',
        '{"portion": 0, "rows": [["a", 3]], "crc32": 1}',
    ],
    ids=range(6),
)
def test_an_index_of_nonsense_is_begun_anew(line: str, tmp_path: Path) -> None:
    for text in ("", line + "\n"):
        with (tmp_path / "index.jsonl").open("a") as stream:
            stream.write(text)
        ring = RingOnDisk(tmp_path, "x", 100, 4, "float32")
        assert {portion: len(rows) for portion, rows in ring.missing({0: 60, 1: 40}).items()} == {0: 60, 1: 40}
        ring._held.close()


def test_a_cache_that_holds_an_epoch_has_every_trajectory_read_once(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cached = LiveSource(series, rollouts, SITE, config=on_disk(tmp_path / "cache", 10 * GB))
    with computed(monkeypatch) as portions:
        tsae.train(cached, SAE, training=TRAINING, progress=False)
    windows = cached.training_windows(SITE, held_out=False, balance=("reader",))
    assert sorted(portions) == list(range(len(windows._portions.size)))
    assert windows.n_tokens < TRAINING.tokens / 2
    size = (tmp_path / "cache" / "activations.bin").stat().st_size
    assert size == windows.n_tokens * 64  # no more than there is
    # Another training takes the folder over.
    LiveSource(series, rollouts, SITE, config=on_disk(tmp_path / "cache", GB)).training_windows(SITE)
    assert (tmp_path / "cache" / "activations.bin").stat().st_size == round(GB * 1e9)


def test_a_folder_that_cannot_be_the_cache_is_refused(series: CheckpointSeries, rollouts: Any, tmp_path: Path) -> None:
    def train(folder: Path, gigabytes: float = GB) -> None:
        source = LiveSource(series, rollouts, SITE, config=on_disk(folder, gigabytes))
        tsae.train(source, SAE, training=TRAINING, progress=False)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(TsaeError, match=r"mine: holds other files \(thesis\.tex\)"):
        train(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(TsaeError, match=r"(?s)full: cannot be written to .*lower cache_gb \(--live.cache-gb\)"):
            train(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "full" / "activations.bin").exists()
    with pytest.raises(TsaeError, match=r"cache_gb=5e-06 \(78 tokens\) must hold at least two batches"):
        train(tmp_path / "small", 5e-6)
    with pytest.raises(TsaeError, match=r"cache_gb=-1\.0 is not above 0"):
        on_disk(tmp_path, -1.0)
    sae = tsae.TemporalSAE(16, SAE, site=SITE)
    with pytest.raises(TsaeError, match="reads every trajectory once"):
        tsae.encode(sae, LiveSource(series, rollouts, SITE, config=on_disk(tmp_path / "c")), to=tmp_path / "features")


def run_rank(rank: int, port: int, series: Path, rollouts: Path, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    config = on_disk(folder / "cache")
    with join("cpu"), pytest.MonkeyPatch.context() as patch, computed(patch) as portions:
        source = LiveSource(CheckpointSeries.load(series), tsae.Rollouts.read(rollouts), SITE, config=config)
        windows = source.training_windows(SITE, balance=("reader",))
        batches = [batch.x.clone() for epoch in range(3) for batch in windows.epoch(epoch, 100)]
        windows.discard()
    torch.save([torch.cat(batches), torch.tensor(portions)], folder / f"{rank}.pt")


@pytest.mark.slow
def test_processes_divide_what_is_computed(series_folder: Path, rollouts: Any, tmp_path: Path) -> None:
    file, port = rollouts.write(tmp_path / "rollouts.parquet"), free_port()
    ranks = [start(run_rank, rank, port, series_folder, file, tmp_path) for rank in range(2)]
    for child in ranks:
        child.join(300)
    assert [child.exitcode for child in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    source = LiveSource(CheckpointSeries.load(series_folder), rollouts, SITE, config=CONFIG)
    with pytest.MonkeyPatch.context() as patch, computed(patch) as portions:
        windows = source.windows(SITE, balance=("reader",))
        expected = torch.cat([batch.x for epoch in range(3) for batch in windows.epoch(epoch, 100)])
    for batches, _ in found:
        assert torch.equal(batches, expected)
    assert sorted(torch.cat([mine for _, mine in found]).tolist()) == sorted(portions)
    assert abs(len(found[0][1]) - len(found[1][1])) <= len(portions) // 10
    assert not (tmp_path / "cache").exists()
