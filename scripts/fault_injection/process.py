"""Processes of the command line: started afresh, or forked off one that has imported everything (`--warm`)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from fault_injection import forked

LIMIT_S = 120
"""Seconds that a command may take; three times as many where it starts processes of its own or does everything."""
_INSIDE = Path(__file__).parent / "inside"
_MEMORY = 8 << 30
"""Bytes of addresses that a command may have."""
_forking = False
_here = threading.local()
_starting = threading.Lock()


class _Forked:
    """A command in a process that was forked off, with the interface of `subprocess.Popen` as far as it is needed."""

    def __init__(self, words: Sequence[str], where: Path, environment: Mapping[str, str], humble: bool) -> None:
        self.args = ["tsae", *words]
        self.returncode: int | None = None
        self._said = Path(tempfile.mkdtemp(prefix="said-"))
        target = (list(words), str(where), dict(environment), str(self._said), humble)
        self._process = multiprocessing.get_context("forkserver").Process(target=forked.command, args=target)
        with _starting:
            self._process.start()
        self.pid = self._process.pid or 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        connection.wait([self._process.sentinel], timeout)
        with _starting:  # A start in another thread reads the exit codes of all processes, and each can be read once.
            self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        out, err = ((self._said / name).read_text(errors="replace") if (self._said / name).is_file() else ""
                    for name in ("out", "err"))  # fmt: skip
        for file in self._said.iterdir():
            file.unlink()
        self._said.rmdir()
        with _starting:
            self._process.close()
        return out, err


Process = subprocess.Popen[str] | _Forked


def warm(modules: Sequence[str]) -> None:
    """From now on fork commands off a process that has imported these modules: several times as quick.

    All commands then share one seed of Python's hashes.
    """
    global _forking
    _forking = True
    os.environ.update(_environment(None), FAULT_IMPORTS=" ".join(modules))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_INSIDE.parents[1]), os.environ.get("PYTHONPATH")]))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fault_injection.forked"])


def afresh(fresh: bool) -> None:
    """Whether this thread's commands are fresh processes all the same."""
    _here.fresh = fresh


def start(
    words: Sequence[str | Path], where: Path, disturbed: Mapping[str, str] | None = None, humble: bool = False
) -> Process:
    """Start a command in a folder, in a group of processes of its own; ValueError for a word that no process takes.

    `disturbed` is what `fault_injection/inside/sitecustomize.py` is to do inside of the process. With `humble`,
    permissions of files count, although it is the superuser's; then it is forked in any case.
    """
    texts = [str(word) for word in words]
    if any("\0" in text for text in texts):
        raise ValueError("a null byte in an argument")
    environment = _environment(disturbed)
    if _forking and (humble or not getattr(_here, "fresh", False)):
        found: Process = _Forked(texts, where, environment, humble)
    else:
        found = subprocess.Popen(
        [sys.executable, "-m", "tsae", *texts], cwd=where, env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(found.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    return found


def run(
    words: Sequence[str | Path], where: Path, disturbed: Mapping[str, str] | None = None, humble: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `start` starts it.

    Raises:
        subprocess.TimeoutExpired: where it takes longer than the limit; then all its processes are killed.
    """
    process = start(words, where, disturbed, humble)
    try:
        out, err = process.communicate(timeout=limit(words))
    except subprocess.TimeoutExpired:
        end(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def limit(words: Sequence[str | Path]) -> float:
    """Seconds that a command may take."""
    return LIMIT_S * (3 if "--workers" in words or words[0] in ("run", "demo") else 1)


def end(process: Process) -> None:
    """Kill a command and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # forked this moment, and no leader of a group yet
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def started_by(leader: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = list[int](), [leader]
    while left:
        new = children.get(left.pop(), [])
        found, left = found + new, left + new
    return sorted(found)


def _environment(disturbed: Mapping[str, str] | None) -> dict[str, str]:
    """What a command's environment has beside this process's own."""
    found = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
    if disturbed is not None:
        paths = [str(_INSIDE), os.environ.get("PYTHONPATH", "")]
        found |= {**disturbed, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return found
