"""One writer at a time: the second is told who the first is, and a dead one is not in the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from support.refusals import fails, refuses
from tsae.base import output_lock as lock
from tsae.base.output_lock import drop_dead_lock, output_lock
from tsae.base.part import Part, begin
from tsae.errors import TsaeError
from tsae.stages import RunRecord

_HOLD = """
import sys
from tsae.base.output_lock import output_lock
from tsae.base.part import Part
with output_lock(sys.argv[1], None if sys.argv[2] == "whole" else Part.of(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""

_AGAIN_AND_AGAIN = """
import os, sys, time
from tsae.base.output_lock import output_lock
from tsae.errors import TsaeError
end = time.monotonic() + 1
while time.monotonic() < end:
    try:
        with output_lock(sys.argv[1]):
            os.mkdir(sys.argv[1])  # Fails where two are here.
            os.rmdir(sys.argv[1])
            print("written")
    except TsaeError as error:
        print(error)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.05)


def holder(to: Path, part: str = "whole") -> subprocess.Popen[str]:
    """Another process that holds the lock until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(to), part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refused_in_a_thread(to: Path) -> str:
    """What another thread of this process is told."""
    with ThreadPoolExecutor() as pool:
        return str(pool.submit(lambda: output_lock(to).__enter__()).exception())


def locks(folder: Path) -> set[str]:
    """What lies in a folder of locks."""
    return {path.name for path in folder.iterdir()}


def test_the_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    to = tmp_path / "deep" / "features"
    first = holder(to)
    refuses(rf"features: is being written by process {first.pid} on \S+", output_lock(to).__enter__)
    first.communicate()
    with output_lock(to):
        assert locks(to.parent) == {".features.lock"}
    assert list(to.parent.iterdir()) == []


@pytest.mark.slow
def test_a_folder_has_one_lock_whatever_link_leads_there(tmp_path: Path) -> None:
    (tmp_path / "big" / "f").mkdir(parents=True)
    (tmp_path / "f").symlink_to(tmp_path / "big" / "f")
    (tmp_path / "small").symlink_to(tmp_path / "big")
    first = holder(tmp_path / "f")
    for to in (tmp_path / "big" / "f", tmp_path / "small" / "f", tmp_path / "f"):
        with pytest.raises(TsaeError, match="process"), output_lock(to):
            pass
    first.communicate()
    first = holder(tmp_path / "small" / "new.parquet")
    with pytest.raises(TsaeError, match="process"), output_lock(tmp_path / "big" / "new.parquet"):
        pass
    first.communicate()


@pytest.mark.slow(ci=True)
def test_eight_processes_take_it_again_and_again(tmp_path: Path) -> None:
    """Never two at once, and nothing is left."""
    to = tmp_path / "features"
    writers = [
        subprocess.Popen([sys.executable, "-c", _AGAIN_AND_AGAIN, str(to)], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    told = [line for writer in writers for line in writer.communicate()[0].splitlines()]
    assert all(writer.returncode == 0 for writer in writers)
    assert "written" in told
    assert [line for line in told if line != "written" and "is being written by" not in line] == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_is_no_obstacle(tmp_path: Path) -> None:
    to = tmp_path / "features"
    first = holder(to)
    part = holder(tmp_path / "other", "2/3")
    for killed in (first, part):
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    assert locks(tmp_path) == {".features.lock", ".other.part-1.lock"}
    with output_lock(tmp_path / "other"):
        pass
    drop_dead_lock(to)
    assert list(tmp_path.iterdir()) == []
    first = holder(to)
    drop_dead_lock(to)
    assert locks(tmp_path) == {".features.lock"}
    first.communicate()


def test_parts_exclude_the_whole_and_not_each_other(tmp_path: Path) -> None:
    to = tmp_path / "acts[1]"
    first = holder(to, "1/3")
    with output_lock(to, Part(1, 3)):
        pass
    for part in (None, Part(0, 3)):
        refuses(f"process {first.pid}", output_lock(to, part).__enter__)
    first.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_part_waits_for_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "acts"
    whole = holder(to)
    threading.Timer(0.5, whole.communicate).start()
    with output_lock(to, Part(2, 3)):
        assert whole.wait(10) == 0
    assert f"waiting: {to} is being written by process {whole.pid} on" in capsys.readouterr().err


def test_the_part_that_finishes_last_takes_the_whole(tmp_path: Path) -> None:
    to = tmp_path / "acts"
    other = holder(to, "1/3")
    with output_lock(to, Part(2, 3)), output_lock(to):
        assert locks(tmp_path) == {f".acts{x}.lock" for x in ("", ".part-0", ".part-2")}
    other.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_thread_may_take_it_again_and_another_may_not(tmp_path: Path) -> None:
    with output_lock(tmp_path / "sae"), output_lock(tmp_path / "x" / ".." / "sae"):
        assert f"is being written by process {os.getpid()}" in refused_in_a_thread(tmp_path / "sae")


def test_torchruns_other_processes_leave_it_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = holder(tmp_path / "sae")
    monkeypatch.setenv("RANK", "1")
    with output_lock(tmp_path / "sae"):
        pass
    first.communicate()


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    with output_lock(tmp_path / "sae"), output_lock(tmp_path / "sae"):
        said = refused_in_a_thread(tmp_path / "sae")
    assert f"process {os.getpid()} on" in said
    assert "(if it has died, remove .sae.lock)" in said
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_while_it_looks_for_locks_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    monkeypatch.setattr(lock, "lock_descriptor", lambda _: seen.append(list(tmp_path.iterdir())))
    with output_lock(tmp_path / "sae"):
        assert seen == [[]]


def test_one_machine_without_locks_takes_none_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "sae"
    with ThreadPoolExecutor() as pool:
        with output_lock(to), monkeypatch.context() as patched:
            without_locks(patched)
            part = pool.submit(lambda: output_lock(to, Part(1, 2)).__enter__())
            time.sleep(3)  # filelock takes a file that it cannot read from its holder after two seconds
            assert not part.done()
        assert part.exception(timeout=10) is None
    with monkeypatch.context() as patched:
        without_locks(patched, errno.EIO)
        with pytest.raises(TsaeError, match="cannot be written"), output_lock(tmp_path / "sae"):
            raise AssertionError("a disk that fails is not one without locks")


@pytest.mark.parametrize("locks", [True, False])
def test_the_lock_of_the_next_writer_stays(locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has removed the file of a lock that is held, as of a process that has died; the next one has its own."""
    if not locks:
        without_locks(monkeypatch)
    file = tmp_path / ".sae.lock"
    with output_lock(tmp_path / "sae"):
        file.rename(tmp_path / "removed")
        file.write_text("the next writer's")
    assert file.read_text() == "the next writer's"


def test_a_link_to_a_file_has_the_lock_of_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "page").symlink_to(tmp_path / "elsewhere" / "page")
    (tmp_path / "elsewhere" / "page").touch()
    with output_lock(tmp_path / "page"):
        assert locks(tmp_path) == {"elsewhere", "page", ".page.lock"}


def test_a_volume_that_can_be_written_only_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with output_lock(volume):
        assert locks(volume) == {".volume.lock"}
        RunRecord(volume, "run.json", {"run": {}, "versions": {}}, "a run")
        (volume / "run.json").unlink()
        (tmp_path / "link").symlink_to(volume)
        begin(tmp_path / "link" / "manifest.json", {}, "is not empty", "Give another folder.")
    assert locks(volume) == {"manifest.json"}


def test_a_command_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = holder(tmp_path / "page.html")
    said = fails(capsys, "report", "--diff", tmp_path / "diff", "--to", tmp_path / "page.html")
    assert f"process {first.pid}" in said.err
    first.communicate()


def test_a_disk_that_is_full_when_the_lock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", Mock(side_effect=full))
        found = r"cannot be written to \(.*No space left.*Make room there"
        with pytest.raises(TsaeError, match=found), output_lock(tmp_path / "to"):
            raise AssertionError("nothing runs without the lock")
    with output_lock(tmp_path / "to"):
        pass
