"""Logs of a few kilobytes that stand for gigabytes: refused, in little memory."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs import readers
from tsae.rollouts.parquet import read_pieces
from tsae.rollouts.table import Rollouts


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Not a gigabyte more is ever in memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before < 1 << 30


def refused(path: Path, llama: Path, match: str) -> None:
    with pytest.raises(TsaeError, match=match) as said:
        Rollouts.read(path, Checkpoint("base", str(llama)), ImportConfig(run="r"))
    assert str(path) in str(said.value)


def long_texts(path: Path, *, rows: int, size: int) -> Path:
    """A dictionary of one text, and rows that name it."""
    texts = pa.array(["7" * size]).dictionary_encode().dictionary
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), texts)
    table = pa.table({"prompt": column, "response": ["1"] * rows, "correct": [True] * rows})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)
    assert path.stat().st_size < 20_000
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_a_long_text_that_a_parquet_file_repeats(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows of 16 MB: 32 GB."""
    path = long_texts(tmp_path / "log.parquet", rows=2000, size=1 << 24)
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    refused(path, llama, "row 0 has more than 1 MiB")


@pytest.mark.usefixtures("little_memory")
def test_pieces_of_rollouts_are_no_larger_than_a_row(tmp_path: Path) -> None:
    path = long_texts(tmp_path / "rollouts.parquet", rows=2000, size=1 << 24)
    pieces = read_pieces(path)
    assert len(next(pieces)) == 0
    assert next(pieces).nbytes < 1 << 29


@pytest.mark.usefixtures("little_memory")
def test_a_run_of_equal_ids_without_end(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million equal token ids in one row, in a few hundred bytes."""
    ids = pa.ListArray.from_arrays(pa.array([0, 10_000_000], pa.int32()), pa.array([7], pa.int32()).take(
        pa.array([0], pa.int32()).take(pa.nulls(10_000_000, pa.int32()).fill_null(0))))  # fmt: skip
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"prompt_ids": ids, "response_ids": [[1]], "correct": [True]}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    refused(path, llama, "row 0 has more than 1 MiB")


@pytest.mark.usefixtures("little_memory")
def test_lists_of_a_torch_file_that_hold_each_other(tmp_path: Path, llama: Path) -> None:
    """Ten lists of the list before, twelve times over."""
    content: list[Any] = ["x"]
    for _ in range(12):
        content = [content] * 10
    path = tmp_path / "rollout_data_1.pt"
    torch.save({"samples": [{"prompt": "1+1=", "response": "2", "metadata": content}], "rollout_id": 1}, path)
    assert path.stat().st_size < 5000
    refused(path, llama, "stands for more values than it has bytes")


@pytest.mark.usefixtures("little_memory")
def test_a_torch_file_whose_parts_are_compressed(tmp_path: Path, llama: Path) -> None:
    torch.save({"samples": [{"tokens": torch.zeros(1 << 21, dtype=torch.int64)}]}, tmp_path / "plain.pt")
    path = tmp_path / "rollout_data_1.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert path.stat().st_size < 200_000
    refused(path, llama, "is compressed")
