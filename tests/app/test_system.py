"""What the machine lacks is said in one paragraph; errors of the program stay errors."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from support.refusals import fails
from tsae import cli
from tsae.commands.system import resource_error


def test_errors_of_the_system_and_of_libraries() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "out/page.html.tmp")
    assert str(resource_error(full)) == (
        "out/page.html.tmp: the system refuses: No space left on device. Make room, and give the same command again: "
        "what is finished is kept."
    )
    assert "may read and write" in str(resource_error(PermissionError(errno.EACCES, "Permission denied", "out")))
    assert "ulimit -n" in str(resource_error(OSError(errno.EMFILE, "Too many open files")))
    assert "Make room" in str(resource_error(OSError("Can't write data (errno = 28, error message = …)")))
    assert "not enough memory" in str(resource_error(MemoryError()))
    with pytest.raises(RuntimeError) as short:
        torch.empty(2**50)
    assert "not enough memory" in str(resource_error(short.value))
    assert "ulimit -u" in str(resource_error(RuntimeError("can't start new thread")))
    panic = type("PanicException", (BaseException,), {})("no entry found for key")
    assert "a library met what it did not expect (no entry found for key)" in str(resource_error(panic))
    for other in (
        OSError(errno.ENOENT, "No such file", "x"),
        ValueError("x"),
        RuntimeError("shape"),
        ConnectionError(),
    ):
        assert resource_error(other) is None


@pytest.mark.parametrize("device", ["3", "bogus", "", "cuda:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises((RuntimeError, AssertionError)) as refused:
        torch.nn.Linear(2, 2).to(device)
    assert "--device cpu" in str(resource_error(refused.value))


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").mkdir()
    for touch, named in (
        (lambda: (tmp_path / "a").replace(tmp_path / "b"), "b"),
        (lambda: (tmp_path / "a" / "below").mkdir(), "a/below"),
        (lambda: (tmp_path / "a").mkdir(), "a"),
        (lambda: (tmp_path / ("x" * 300)).write_text(""), "x" * 300),
    ):
        with pytest.raises(OSError) as refused:
            touch()
        found = resource_error(refused.value)
        assert found is not None
        assert found.where == str(tmp_path / named)
        assert "another path" in str(found) or "shorter path" in str(found)


def test_safetensors_on_a_full_disk(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises((OSError, SafetensorError)) as full:
            save_file({"x": torch.zeros(100_000)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Make room" in str(resource_error(full.value))


def test_the_command_line_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "run", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "out")))
    assert "tsae: out: the system refuses" in fails(capsys, "completion", "bash").err


def test_a_working_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working folder is not there any more. Change into" in fails(capsys, "verify", tmp_path).err
