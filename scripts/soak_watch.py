"""Soak: `tsae watch` follows a training that goes on for minutes, and is killed at random.

    python scripts/soak_watch.py --minutes 10 --seed 1

A thread plays the trainer. It appends log steps with rows of the testbed's hard run, some bytes at a time, and writes a
checkpoint after every few steps, file by file. Its weights lie between those of the shipped checkpoints. The command
`tsae watch` follows it in a process of its own. In the first half of the time it is killed (SIGKILL) at random, and
started again; in the second half it is left alone, and its memory is read after every update.

At the end the trainer stops, `tsae watch --once` takes what is left, and two analyses of the finished training are made
for comparison: one with the watch's SAE, whose files must be the same byte for byte, and `tsae run`, with which the
watch must agree after `--retrain`. The last line is JSON; "ratio" is the share of files that differ, expected 0.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro
from safetensors.torch import load_file, save_file
from tyro.conf import arg

import tsae
from tsae.base.files import sha256
from tsae.config import RunConfig
from tsae.pipeline import Before
from tsae.run import Grown, analyze_run, analyze_state

SHIPPED = tsae.testbed.series_path()
FEW: dict[str, Any] = {"d_sae": 32, "k": 4, "training_tokens": 20_000}
_TOKENS = 8_000
"""That a training of ten minutes is analysed on; of a longer one more, as its problems are asked more often."""
DIFF: dict[str, Any] = {"n_bootstrap": 100, "n_permutations": 100, "noise_draws": 0}
_ROWS = 64
_EVERY = 4  # steps from checkpoint to checkpoint
_KNOWN = (0, 25, 50, 100, 150)


@dataclass(frozen=True)
class Options:
    """How long, and which random numbers."""

    minutes: float = 10.0
    """How long the training goes on."""
    seed: int = 0
    """Seed of the training and of the kills; an odd one logs JSON lines, an even one a Parquet file a step."""
    step_seconds: float = 4.0
    """Seconds of a training step."""
    kill_seconds: float = 40.0
    """Longest life of the command in the first half of the time."""
    to: Annotated[Path | None, arg(help_behavior_hint="(default: a temporary folder)")] = None
    """Folder for the training and the analyses; by default a temporary one that is removed."""


class Trainer(threading.Thread):
    """Writes a training run into a folder, as trainers do: bit by bit."""

    def __init__(self, folder: Path, options: Options) -> None:
        super().__init__(daemon=True)
        self.folder, self.options = folder, options
        self.random = random.Random(options.seed)
        self.halt = threading.Event()
        logs = sorted((SHIPPED / "logs" / "hard" / "completions").glob("*.parquet"))
        self.rows = pd.concat([pd.read_parquet(file) for file in logs], ignore_index=True)
        self.steps = 0

    def run(self) -> None:
        while not self.halt.is_set():
            self.steps += 1
            self._log(self.steps)
            if self.steps % _EVERY == 0:
                self._checkpoint(self.steps)
            self.halt.wait(self.options.step_seconds * self.random.uniform(0.5, 1.5))

    def _log(self, step: int) -> None:
        problems = self.rows.problem_id.unique()
        chosen = self.random.sample(list(problems), 4)
        rows = pd.concat([self.rows[self.rows.problem_id == id].head(_ROWS // 4) for id in chosen]).assign(step=step)
        if self.options.seed % 2:
            lines = [json.dumps({"step": step, **_plain(row)}) + "\n" for row in rows.to_dict("records")]
            with (self.folder / "rollouts.jsonl").open("a") as log:
                for line in lines:
                    half = len(line) // 2
                    for part in (line[:half], line[half:]):
                        log.write(part)
                        log.flush()
                        self._pause(0.002)
        else:
            file = self.folder / "completions" / f"completions_{step:05d}.parquet"
            file.parent.mkdir(exist_ok=True)
            whole = rows.to_parquet(None)
            self._write(file, whole)

    def _checkpoint(self, step: int) -> None:
        """Weights between two that are shipped; step 600 has come to the end."""
        place = min(step / 4, 150.0)
        low = max(known for known in _KNOWN if known <= place)
        high = next((known for known in _KNOWN if known > place), low)
        share = 0.0 if high == low else (place - low) / (high - low)
        below, above = (load_file(_shipped(known) / "model.safetensors") for known in (low, high))
        mixed = {name: below[name] * (1 - share) + above[name] * share for name in below}
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir()
        with tempfile.TemporaryDirectory() as scratch:
            save_file(mixed, Path(scratch) / "weights", metadata={"format": "pt"})
            for file in sorted(_shipped(25).iterdir()):
                content = (Path(scratch) / "weights" if file.suffix == ".safetensors" else file).read_bytes()
                self._write(folder / file.name, content)
        self._write(folder / "trainer_state.json", json.dumps({"global_step": step}).encode())

    def _write(self, file: Path, content: bytes) -> None:
        size = max(1, len(content) // 5)
        with file.open("wb") as stream:
            for start in range(0, len(content), size):
                stream.write(content[start : start + size])
                stream.flush()
                self._pause(0.05)

    def _pause(self, most: float) -> None:
        time.sleep(self.random.uniform(0, most))


def main(options: Options) -> dict[str, Any]:
    """Run the soak; returns what the last line says."""
    with tempfile.TemporaryDirectory() as temporary:
        return _soak(options, options.to or Path(temporary))


def _soak(options: Options, folder: Path) -> dict[str, Any]:
    run, out, rng = folder / "run", folder / "out", random.Random(options.seed + 1)
    shutil.copytree(SHIPPED / "base", folder / "base")
    run.mkdir(parents=True)
    trainer = Trainer(run, options)
    trainer.start()
    few = {**FEW, "tokens": int(_TOKENS * max(1, options.minutes / 10))}
    command = [sys.executable, "-m", "tsae", "watch", str(run), "--base", str(folder / "base"), "--to", str(out)]
    for name, value in few.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in DIFF.items():
        command += [f"--diff.{name.replace('_', '-')}", str(value)]
    if options.seed % 2:
        command += ["--log", str(run / "rollouts.jsonl"), "--format", "trl"]
    began, kills, half = time.monotonic(), 0, options.minutes * 30
    lines: list[str] = []
    while (left := half - (time.monotonic() - began)) > 0:
        kills += _follow(
            [*command, "--every", "0.5", "--quiet", "0.5"], min(left, rng.uniform(2, options.kill_seconds)), lines
        )
    memory = _left_alone([*command, "--every", "0.5", "--quiet", "0.5"], half, lines)
    trainer.halt.set()
    trainer.join()
    _once(command, lines)
    config = RunConfig(
        run,
        to=folder / "one",
        base=str(folder / "base"),
        log=run / "rollouts.jsonl" if options.seed % 2 else None,
        diff=tsae.DiffConfig(**DIFF),
        attribute=False,
        importing=replace(RunConfig(run).importing, format="trl") if options.seed % 2 else RunConfig(run).importing,
        **few,
    )
    found = json.loads((out / "run.json").read_text())
    log = config.log or run / "completions"
    sizes = {(log / name if log.is_dir() else log): size for name, size in found["log"]}
    trained = found["found"]["fve_at_training"]
    nothing = folder / "nothing"
    quiet: dict[str, Any] = {"progress": False, "say": lambda line: None}
    different: list[str] = []
    if "sae" in found:  # kept from an earlier update
        before = Before(tsae.TemporalSAE.load(out / "sae"), trained, nothing, folder / "codes")
        analyze_state(config, Grown(frozenset(), sizes, nothing, folder / "parts", before), **quiet)
        different += _different(out, config.to, sae=False)
    _once([*command, "--retrain"], lines)
    analyze_run(replace(config, to=folder / "run-once"), **quiet)
    different += _different(out, folder / "run-once", sae=True)
    updates = [line for line in lines if "; reload " in line]
    n = len(list((folder / "run-once").rglob("*"))) + len(list(config.to.rglob("*")))
    return {
        "name": "soak_watch", "ratio": len(different) / n, "seed": options.seed, "minutes": options.minutes,
        "steps": trainer.steps, "trajectories": trainer.steps * _ROWS, "checkpoints": trainer.steps // _EVERY,
        "updates": len(updates), "kills": kills, "warnings": sum(line.startswith("warning") for line in lines),
        "different": different, "memory_mb": memory,
    }  # fmt: skip


def _follow(command: list[str], seconds: float, lines: list[str]) -> int:
    """Let the command live for some seconds, and kill it. What it printed is kept; it must not end by itself."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True)
        time.sleep(seconds)
        ended = process.poll()
        process.send_signal(signal.SIGKILL)
        process.wait()
        said.seek(0)
        new = said.read().splitlines()
    if ended is not None:
        raise SystemExit(f"tsae watch ended with {ended}: {new[-5:]}")
    lines += new
    print(f"killed after {seconds:.0f} s; {sum('; reload ' in line for line in new)} updates", flush=True)
    return 1


def _left_alone(command: list[str], seconds: float, lines: list[str]) -> dict[str, Any]:
    """Let the command live, and read its memory after every update."""
    held: list[float] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        ends = threading.Timer(seconds, process.kill)
        ends.start()
        for line in process.stdout:
            lines.append(line.rstrip())
            if "; reload " in line:
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except OSError:
                    break
                held.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
                print(f"update {len(held)}: {held[-1]:.0f} MB; {line.strip()}", flush=True)
        ends.join()
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"tsae watch ended with {process.returncode}: {lines[-5:]}")
    if len(held) < 2:
        return {"updates": held}
    later = np.array(held[1:])  # The first update loads torch and the models.
    slope = np.polyfit(np.arange(len(later)), later, 1)[0] if len(later) > 2 else 0.0
    return {
        "updates": len(held), "first": round(held[0]), "second": round(held[1]), "last": round(held[-1]),
        "largest": round(max(held)), "slope_an_update": round(float(slope), 2),
    }  # fmt: skip


def _once(command: list[str], lines: list[str]) -> None:
    done = subprocess.run([*command, "--once", "--quiet", "0.2"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tsae watch --once ended with {done.returncode}: {done.stderr}")
    lines += done.stdout.splitlines()


def _different(a: Path, b: Path, *, sae: bool) -> list[str]:
    """Files that are not the same, but for hidden ones, and for those that name the folder or the updates."""
    found = [
        {
            path.relative_to(folder).as_posix(): sha256(path)
            for path in folder.rglob("*")
            if path.is_file() and not path.relative_to(folder).as_posix().startswith(".")
        }
        for folder in (a, b)
    ]
    names = sorted(found[0].keys() | found[1].keys())
    names = [name for name in names if name not in ("run.json", "stages.json") and (sae or not name.startswith("sae/"))]
    return [name for name in names if found[0].get(name) != found[1].get(name)]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def _shipped(step: int) -> Path:
    return SHIPPED / ("base" if step == 0 else f"hard-{step:03d}")


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__))))
