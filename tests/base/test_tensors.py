"""Files of tensors are whole, and a killed process leaves nothing that the next one keeps."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tsae.base import tensors
from tsae.base.files import new_folder, write_json
from tsae.base.tensors import write_tensors
from tsae.rollouts.parquet import write_table

TABLE = pa.table({"x": [1]})

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from tsae.base import tensors

def half(tensors, file, metadata=None):
    # As safetensors does: a random name in the folder of the file.
    (Path(file).parent / ".tmpA1b2C3").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

tensors.save_file = half
tensors.write_tensors(sys.argv[1], {"a": torch.ones(2)})
"""


@pytest.mark.slow(ci=True)
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.safetensors"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in file.parent.rglob("*") if path.is_file()] == [".tmpA1b2C3"]
    write_tensors(file, {"a": torch.ones(2)[:1], "b": torch.ones(4, 2).T}, {"site": "x"})
    assert list(file.parent.rglob("*")) == [file]
    found = load_file(file)
    assert found["a"].tolist() == [1.0]
    assert found["b"].shape == (2, 4)


def test_an_error_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    monkeypatch.setattr(tensors, "save_file", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_tensors(file, {"a": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == [file]
    assert load_file(file)["a"].tolist() == [1.0, 1.0]


def test_files_of_somebody_else_are_neither_removed_nor_in_the_way(tmp_path: Path) -> None:
    """Whatever they are called: an earlier version took FILE.tmp for its own."""
    names = ("a.tmp", "a.json.tmp", "a.parquet.tmp", "a.safetensors.tmp", "a.safetensors.writing.tmp", ".to.partial/x")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    write_json(tmp_path / "a.json", {})
    write_table(tmp_path / "a.parquet", TABLE.schema, [TABLE], {})
    with new_folder(tmp_path / "to") as folder:
        (folder / "whole").touch()
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert files.keys() == {*names, "a.safetensors", "a.json", "a.parquet", "to/whole"}
    assert {files[name].read_text() for name in names} == {"theirs"}


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[pa.Table]:
        yield TABLE
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_table(tmp_path / "a.parquet", TABLE.schema, failing(), {})
    assert not list(tmp_path.iterdir())
