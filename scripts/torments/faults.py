"""Faults in flight: a command is stopped or starved while it writes, and given again afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from torments import artefacts
from torments.artefacts import LIMIT_S, WRITERS, Stage

KINDS = ("kill", "kill later", "kill twice", "int", "term", "full", "size", "files", "memory", "two", "clock", "reader")


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    stage = WRITERS[int(rng.integers(len(WRITERS)))]
    kind = str(rng.choice(KINDS))
    if kind == "reader":
        name = "capture" if rng.random() < 0.5 else "encode"
        stage = next(stage for stage in WRITERS if stage.name == name)
    moments, seconds = json.loads((made / "writes.json").read_text())[stage.name]
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
        elif what == "files":
            what = f"files-{int(rng.integers(0, 8))}"
        elif what == "memory":
            what = f"memory-{int(2 ** rng.uniform(16, 28))}"
        if kind == "kill later":
            what, after = "kill", float(rng.uniform(0.3, 1.1)) * seconds
            said.append(f"killed after {after:.1f} s")
            wrong = _killed_at(stage, after, here)
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
    # Native code ends the process where it gets no memory.
    return what.startswith("memory") and "Traceback" not in ended.stderr and ended.returncode < 0


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
    for said in (here / "out").glob("*.parts"):
        for path in sorted(said.rglob("*"), reverse=True):
            path.unlink()
        said.rmdir()
    return artefacts.difference(here / "out", made / f"expected-{stage.name}")


def _killed_at(stage: Stage, seconds: float, here: Path) -> str:
    """Kill a command after some time."""
    process = artefacts.start(stage.command, here)
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
    return ""


def _two(stage: Stage, here: Path) -> str:
    """Start a command twice at once."""
    both = [artefacts.start(stage.command, here) for _ in range(2)]
    ends: list[str] = []

    def wait(process: subprocess.Popen[str]) -> None:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            ends.append("two at once take too long")
        else:
            done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
            ends.append(artefacts.unusual_end(done))

    threads = [threading.Thread(target=wait, args=(process,)) for process in both]
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
    process = artefacts.start(stage.command, here)
    time.sleep(seconds)
    ended, wrong = artefacts.watched(reader, here)
    _, err = process.communicate(timeout=LIMIT_S)
    if not wrong and process.returncode:
        wrong = f"a reader stops the writer: {err[-200:]}"
    if not wrong and ended is not None and ended.returncode == 0:
        early = (here / "out/shown.json").read_bytes()
        artefacts.run(reader, here)
        wrong = "" if (here / "out/shown.json").read_bytes() == early else "read early, other results"
    (here / "out/shown.json").unlink(missing_ok=True)
    return wrong
