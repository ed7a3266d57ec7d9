"""Importing a long log: trajectories a second, megabytes a second, and peak memory at one size and at ten times it.

Writes a log as verl does, a JSONL file a step: groups of eight responses, about 5 KB a trajectory, of sentences with
numbers and formulas drawn at random. `tsae rollouts import` reads it in a child process, with one worker and with two.
The peak is that of the child and its workers together: proportional set sizes from /proc, added up ten times a second.
Needs Linux, and SmolLM2's tokenizer (`make smollm`) or takes the testbed's. Ends with one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tyro
from fault_injection.process import started_by

GROUP, GROUPS_A_STEP = 8, 128
NAMES = ("Ada", "Bruno", "Chen", "Dina", "Emre", "Farah", "Goran", "Hana", "Ivo", "Jun")
THINGS = ("apples", "tickets", "pages", "marbles", "litres of milk", "kilometres", "boxes of pencils", "old coins")
SENTENCES = (
    "First, we need to find how many {thing} {name} has after giving away {a} of the {b} that were there.",
    "So {name} starts with {b} and gives away {a}, which leaves \\({b} - {a} = {c}\\) {thing}.",
    "Let's denote the number of {thing} by $x_{{{d}}}$; then $\\frac{{x_{{{d}}}}}{{{a}}} = {b}$.",
    "Wait, that is not right: the problem says that {name} has {a} {thing} *each day*, not in all.",
    "Multiplying both sides by {a}, we get {a} * {b} = {c}, and we can check this by dividing again.",
    "Therefore the total cost of {a} {thing} at ${b}.{d} apiece is ${c}.",
    "### Step {d}: simplify\n\n$$\\sqrt{{{a}^2 + {b}^2}} \\le {a} + {b} = {c}$$\n",
    "Hmm, let me double-check by considering the case where {name} has only {d} {thing}.",
    "| day | {thing} | total |\n|---|---|---|\n| {d} | {a} | {c} |",
    "```python\nx = {a}\nfor day in range({d}):\n    x += {b}  # {thing}\nprint(x)\n```",
)


@dataclass(frozen=True)
class Bench:
    """Size."""

    trajectories: int = 5120
    """Of the smaller log; the larger has ten times as many."""
    full: bool = False
    """A million trajectories in the larger log: takes 10 GB of disk, and some hours on two cores."""
    workers: tuple[int, ...] = (1, 2)
    seed: int = 0
    folder: Path | None = None
    """Where log and output lie meanwhile; by default where temporary files do."""


def sentence(rng: random.Random) -> str:
    """A sentence of reasoning, with other numbers each time."""
    a, b = rng.randrange(2, 999), rng.randrange(2, 9999)
    return rng.choice(SENTENCES).format(
        a=a, b=b, c=a * b, d=rng.randrange(2, 30), name=rng.choice(NAMES), thing=rng.choice(THINGS)
    )


def rows(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a log: eight responses to a problem, of a step 128 problems."""
    rng = random.Random(seed)
    pool = [sentence(rng) for _ in range(50_000)]
    for i in range(n):
        if i % GROUP == 0:
            answer = str(rng.randrange(10**6))
            prompt = f"system\nReason step by step.\nuser\n{' '.join(rng.choices(pool, k=4))} How many?\nassistant\n"
        right = rng.random() < 0.4
        reasoning = " ".join(rng.choices(pool, k=1 + int(rng.gammavariate(4, 13))))
        yield {
            "input": prompt,
            "output": f"{reasoning}\n\nThe answer is \\boxed{{{answer if right else rng.randrange(10**6)}}}.",
            "gts": answer,
            "score": float(right),
            "step": 1 + i // (GROUP * GROUPS_A_STEP),
            "acc": right,
        }


def write_log(bench: Bench, n: int, folder: Path) -> int:
    """Write the log; returns the bytes of its lines."""
    folder.mkdir(parents=True)
    total = 0
    for step, part in groupby(rows(n, bench.seed), lambda row: row["step"]):
        with (folder / f"{step}.jsonl").open("wb") as out:
            for row in part:
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                out.write(line)
                total += len(line)
    return total


def save_tokenizer(folder: Path) -> str:
    """A tokenizer to import with, in a folder of its own; returns whose it is."""
    import tsae

    try:
        tsae.Checkpoint("base", str(tsae.testbed.smollm2())).load_tokenizer().save_pretrained(folder)
        return "SmolLM2"
    except tsae.TsaeError:
        tsae.testbed.make_tokenizer().save_pretrained(folder)
        return "testbed"


def memory(root: int) -> int:
    """Bytes that a process and those below it take, memory that they share counted once."""
    total = 0
    for process in (root, *started_by(root)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total


def measure(log: Path, tokenizer: Path, to: Path, workers: int) -> tuple[float, float, float]:
    """Import a log in a child process; returns seconds, CPU seconds of all processes, and the peak in bytes."""
    command = [sys.executable, "-m", "tsae", "rollouts", "import", str(log), "--to", str(to)]
    command += ["--checkpoint", str(tokenizer), "--workers", str(workers)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    start, before, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        command, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True
    ) as child:  # fmt: skip
        while child.poll() is None:
            peak = max(peak, memory(child.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"the import failed: {said.read()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    small = 100_000 if bench.full else bench.trajectories
    with tempfile.TemporaryDirectory(dir=bench.folder) as temporary:
        folder = Path(temporary)
        whose, found = save_tokenizer(folder / "tokenizer"), []
        for n in (small, 10 * small):
            megabytes = write_log(bench, n, folder / "log") / 1e6
            for workers in bench.workers:
                seconds, cpu, peak = measure(folder / "log", folder / "tokenizer", folder / "rollouts.parquet", workers)
                found.append(
                    {
                        "trajectories": n, "megabytes": round(megabytes), "workers": workers,
                        "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "rows_per_s": round(n / seconds),
                        "mb_per_s": round(megabytes / seconds, 1), "peak_mb": round(peak / 1e6),
                    }
                )  # fmt: skip
                print("  ".join(f"{name} {value:,}" for name, value in found[-1].items()), flush=True)
                (folder / "rollouts.parquet").unlink()
            shutil.rmtree(folder / "log")
    peaks = {(run["workers"], run["trajectories"]): run["peak_mb"] for run in found}
    ratio = max(peaks[workers, 10 * small] / peaks[workers, small] for workers in bench.workers)
    figures = {"name": "import", "ratio": round(ratio, 3), "tokenizer": whose, "cores": os.cpu_count()}
    print(json.dumps({**figures, "runs": found}))


if __name__ == "__main__":
    main()
