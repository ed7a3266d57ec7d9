"""Faults in flight: a command is stopped or starved while it writes, and given again afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from torments import artefacts, process
from torments.stages import BY_NAME, WRITERS, Stage

KILLS = (*("kill", "kill later", "kill twice") * 3, "kill worker")
KINDS = (
    "kill",
    "kill later",
    "kill twice",
    "kill worker",
    "int",
    "term",
    "full",
    "size",
    "files",
    "memory",
    "two",
    "clock",
    "reader",
)


def kill(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """As `attempt`, but for kills alone."""
    return attempt(rng, made, here, KILLS)


def attempt(rng: np.random.Generator, made: Path, here: Path, kinds: tuple[str, ...] = KINDS) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    stage = WRITERS[int(rng.integers(len(WRITERS)))]
    kind = str(rng.choice(kinds))
    if kind == "kill worker":
        spread = [stage for stage in WRITERS if "--workers" in stage.command]
        stage = spread[int(rng.integers(len(spread)))]
    if kind == "reader":
        stage = BY_NAME["capture" if rng.random() < 0.5 else "encode"]
    moments, seconds, _ = json.loads((made / "writes.json").read_text())[stage.name]
    artefacts.lay_out(stage, made, here)
    if kind == "two":
        return f"{stage.name}: two at once", _two(stage, here) or _again(stage, made, here)
    if kind == "reader":
        after = float(rng.uniform(0.3, 1.0)) * seconds
        return f"{stage.name}: read after {after:.1f} s", _read_early(stage, after, here) or _again(stage, made, here)
    said = []
    for _ in range(2 if kind == "kill twice" else 1):
        when = int(rng.integers(moments))
        what = kind.split()[0] if kind != "clock" else "kill"
        if what == "size":
            what = f"size-{int(2 ** rng.uniform(4, 18))}"
            process.afresh(True)  # whose words go through pipes, which have no size
        elif what == "files":
            what = f"files-{int(rng.integers(0, 8))}"
        elif what == "memory":
            what = f"memory-{int(2 ** rng.uniform(16, 28))}"
        if kind in ("kill later", "kill worker"):
            what, after = "kill", float(rng.uniform(0.1, 1.1)) * seconds
            said.append(f"{'a worker ' if kind == 'kill worker' else ''}killed after {after:.1f} s")
            wrong = _killed_at(stage, after, here, rng if kind == "kill worker" else None)
        else:
            said.append(f"{what} at moment {when} of {moments}")
            disturbed = {"TORMENT": f"{what}:{when}:{here / 'out'}"}
            ended, wrong = artefacts.watched(stage.command, here, disturbed)
            if ended is not None and _as_expected(what, ended):
                wrong = ""
        if wrong:
            return f"{stage.name}: {', '.join(said)}", wrong
    if kind == "clock":
        ahead = time.time() + 86_400
        for path in (here / "out").rglob("*"):
            os.utime(path, (ahead, ahead))
        said.append("then the clock set back by a day")
    return f"{stage.name}: {', '.join(said)}", _again(stage, made, here)


def _as_expected(what: str, ended: subprocess.CompletedProcess[str]) -> bool:
    """Whether a disturbed command ended as such a disturbance makes it end."""
    if what == "kill":
        return True
    if what == "int":
        return ended.returncode == 130 and "Traceback" not in ended.stderr
    if what == "term":
        return ended.returncode in (-15, 143)
    # Native code ends the process where it gets no memory: by a signal, or OpenBLAS with a word of its own.
    gave_up = ended.returncode < 0 or (ended.returncode == 1 and "OpenBLAS error: Memory allocation" in ended.stderr)
    return what.startswith("memory") and "Traceback" not in ended.stderr and gave_up


def _again(stage: Stage, made: Path, here: Path) -> str:
    """What is bad of the same command, undisturbed."""
    ended, wrong = artefacts.watched(stage.command, here)
    if wrong or ended is None:
        return f"again: {wrong}"
    if ended.returncode:
        return f"again: refused: {ended.stderr.strip()[-300:]}"
    left = [
        path.relative_to(here).as_posix() for path in (here / "out").rglob("*") if path.name.endswith((".tmp", ".lock"))
    ]
    if left:
        return f"again: leaves {', '.join(left)}"
    artefacts.clear_words(here / "out")
    return artefacts.difference(here / "out", made / f"expected-{stage.name}")


def _killed_at(stage: Stage, seconds: float, here: Path, rng: np.random.Generator | None) -> str:
    """Kill a command after some time, or one of its workers if there is a generator that draws it."""
    started = process.start(stage.command, here)
    try:
        started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if rng is None:
            process.end(started)
            return ""
    workers = _workers(started.pid) if rng is not None and started.returncode is None else []
    if rng is not None and workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[int(rng.integers(len(workers)))], signal.SIGKILL)
    if started.returncode is None:
        try:
            out, err = started.communicate(timeout=process.limit(stage.command))
        except subprocess.TimeoutExpired:
            process.end(started)
            return "takes too long after a worker was killed"
        return artefacts.unusual_end(subprocess.CompletedProcess(started.args, started.returncode or 0, out, err))
    return ""


def _workers(leader: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [leader]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return sorted(found)


def _two(stage: Stage, here: Path) -> str:
    """Start a command twice at once."""
    both = [process.start(stage.command, here) for _ in range(2)]
    ends: list[str] = []

    def wait(started: process.Process) -> None:
        try:
            out, err = started.communicate(timeout=process.limit(stage.command))
        except subprocess.TimeoutExpired:
            process.end(started)
            ends.append("two at once take too long")
        else:
            done = subprocess.CompletedProcess(started.args, started.returncode or 0, out, err)
            ends.append(artefacts.unusual_end(done))

    threads = [threading.Thread(target=wait, args=(started,)) for started in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next((end for end in ends if end), "")


def _read_early(stage: Stage, seconds: float, here: Path) -> str:
    """Read what a command has written before it has ended."""
    reader = {
        "capture": ("store", "show", "out/acts", "--json", "out/shown.json"),
        "encode": ("reinforcement", "--features", "out/features", "--n-permutations", "10", "--json", "out/shown.json"),
    }[stage.name]
    started = process.start(stage.command, here)
    time.sleep(seconds)
    ended, wrong = artefacts.watched(reader, here)
    _, err = started.communicate(timeout=process.limit(stage.command))
    if not wrong and started.returncode:
        wrong = f"a reader stops the writer: {err[-200:]}"
    if not wrong and ended is not None and ended.returncode == 0:
        early = (here / "out/shown.json").read_bytes()
        process.run(reader, here)
        same = (here / "out/shown.json").read_bytes() == early
        # Of a store that is being captured, its state is shown: it says that it is not complete.
        wrong = "" if same or json.loads(early).get("complete") is False else "read early, other results"
    (here / "out/shown.json").unlink(missing_ok=True)
    return wrong
