"""What a run costs at sizes that we cannot run: bytes, work, hours and money, and the time lost to nodes that die.

    python scripts/simulate_scale.py plan        # the tables of docs/scale.md
    python scripts/simulate_scale.py simulate --parts 512 --workers 64 --part-hours 2 --failures-per-node-day 0.2
    python scripts/simulate_scale.py check       # predicts a real run of 8 parts with kills, and then does it

The simulation: parts wait in a queue, and each worker takes the next. A part starts up, and then finishes one shard
after another. A node dies at exponential times; its part keeps its finished shards, and waits again. Nodes differ in
speed (log-normal), and every shard varies.

`check` captures the testbed with `tsae capture --parts 8 --workers 2`: once undisturbed, which gives the seconds of
start-up and of a shard; then with processes killed at exponential times. The wall time of the second run is predicted
before it begins. Ends with one line of JSON.
"""

from __future__ import annotations

import heapq
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

# --- the simulation


@dataclass(frozen=True)
class Simulate:
    """A stage of independent parts on workers that die."""

    parts: int = 512
    workers: int = 64
    part_hours: float = 2.0
    """Of one part on one node of usual speed, start-up included."""
    startup_minutes: float = 3.0
    """Before a part's first shard: imports, loading the model, looking what is there."""
    shards: int = 40
    """Of a part; what a death loses is at most one of them."""
    failures_per_node_day: float = 0.05
    restart_minutes: float = 5.0
    """Until a part whose node died may start again, and until a new node is there."""
    spread: float = 0.1
    """Standard deviation of the logarithm of the speed of nodes."""
    jitter: float = 0.05
    """The same of shards."""
    draws: int = 60
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Of many draws."""

    hours: tuple[float, float, float]
    """Wall time: 5th percentile, median, 95th."""
    ideal_hours: float
    """Of workers that are alike and never die."""
    deaths: float
    """Mean."""
    lost_share: float
    """Mean share of the work that was done in vain: lost shards and repeated start-ups."""


def simulate(options: Simulate) -> Outcome:
    """Draw runs."""
    rng = np.random.default_rng(options.seed)
    found = [_draw(options, rng) for _ in range(options.draws)]
    hours = [wall / 3600 for wall, _, _ in found]
    work = options.part_hours * 3600
    ideal = -(-options.parts // options.workers) * work / 3600
    return Outcome(
        hours=tuple(float(q) for q in np.percentile(hours, [5, 50, 95])),  # type: ignore[arg-type]
        ideal_hours=ideal,
        deaths=float(np.mean([deaths for _, deaths, _ in found])),
        lost_share=float(np.mean([lost for _, _, lost in found]) / (options.parts * work)),
    )


def _draw(options: Simulate, rng: np.random.Generator) -> tuple[float, int, float]:
    """(seconds until all parts are done, deaths, seconds of work in vain) of one run."""
    startup, restart = options.startup_minutes * 60, options.restart_minutes * 60
    shard = (options.part_hours * 3600 - startup) / options.shards
    rate = options.failures_per_node_day / 86_400
    speed = np.exp(rng.normal(0, options.spread, options.workers))
    waiting = deque((0.0, options.shards) for _ in range(options.parts))  # earliest start, shards left
    free = [(0.0, worker) for worker in range(options.workers)]
    end, deaths, lost = 0.0, 0, 0.0
    while waiting:
        now, worker = heapq.heappop(free)
        earliest, left = waiting.popleft()
        now = max(now, earliest)
        death = now + rng.exponential(1 / rate) if rate else np.inf
        begun = now
        ready = now + startup * speed[worker]
        times = ready + np.cumsum(shard * speed[worker] * np.exp(rng.normal(0, options.jitter, left)))
        if death >= times[-1]:
            end = max(end, float(times[-1]))
            heapq.heappush(free, (float(times[-1]), worker))
            continue
        finished = int((times <= death).sum())
        deaths += 1
        # The start-up was in vain, too: the part starts up again.
        lost += death - float(times[finished - 1]) + startup * speed[worker] if finished else death - begun
        # The next part to start: it has waited longest.
        waiting.appendleft((death + restart, left - finished))
        heapq.heappush(free, (death + restart, worker))
    return end, deaths, lost


# --- the plan


@dataclass(frozen=True)
class Model:
    """A policy, and the SAE that would be trained on it."""

    name: str
    parameters: float
    d_model: int
    d_sae: int
    k: int = 64


MODELS = (
    Model("1.5 B", 1.5e9, 1536, 32_768),
    Model("7 B", 7.6e9, 3584, 65_536),
    Model("70 B", 70.6e9, 8192, 131_072),
)
TOKENS = (1e7, 1e9, 1e11)


@dataclass(frozen=True)
class Plan:
    """Rates and prices that the tables are made with."""

    forward: float = 350e12
    """FLOP/s of one H100 in a bfloat16 forward pass: 35 % of its peak, as inference of long batches reaches."""
    product: float = 40e12
    """FLOP/s of one H100 in the float32 product of encoding: 60 % of its peak."""
    train: float = 200e12
    """FLOP/s of one H100 in a training step in bfloat16, at the goal of half the floor."""
    dollars: float = 2.5
    """Of an H100 for an hour."""
    codes: float = 2.0e6
    """Codes a second of a diff on two CPU threads (`bench_diff.py`: 192 M in 98 s)."""
    upload: float = 1e9
    """Bytes a second of one node to or from an object store or a parallel file system."""
    bytes_a_code: float = 20.0
    """On disk: by rows, by columns and means (`bench_diff.py`: 3.9 GB for 192 M)."""
    depth: float = 0.5
    """Where the site is; layers above it are not run."""
    training_tokens: float = 2e8
    """Tokens that train an SAE, at most: more of them add little."""


def costs(model: Model, tokens: float, plan: Plan) -> dict[str, float]:
    """Bytes, and hours: of one GPU (capture, train, encode), of one node's link (upload), of two CPU threads (diff)."""
    trained = min(tokens, plan.training_tokens)
    stored, codes = tokens * model.d_model * 2, tokens * model.k
    found = {
        "store_bytes": stored,
        "feature_bytes": codes * plan.bytes_a_code,
        "capture": 2 * model.parameters * plan.depth * tokens / plan.forward / 3600,
        # One dense encode forward; the way back and decoding are sparse. Twice, for the goal is half that floor.
        "train": 2 * 2 * model.d_model * model.d_sae * trained / plan.train / 3600,
        "encode": 2 * 2 * model.d_model * model.d_sae * tokens / plan.product / 3600,
        "upload": stored / plan.upload / 3600,
        "diff": codes / plan.codes / 3600,
    }
    return found | {"dollars": plan.dollars * (found["capture"] + found["train"] + found["encode"])}


def amount(value: float, unit: str) -> str:
    """With two digits: 3.6 TB, 12 h."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")) if unit == "B" else ():
        if value >= size:
            return f"{_two(value / size)} {prefix}B"
    if unit == "h" and value < 1:
        return f"{_two(value * 60)} min"
    if unit == "h" and value >= 72:
        return f"{_two(value / 24)} days"
    return f"{_two(value)} {unit}" if unit != "$" else f"{_two(value)} $"


def _two(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def table(plan: Plan) -> str:
    """The plan in Markdown: one row a model and number of tokens."""
    units = {
        "store": ("store_bytes", "B"), "features": ("feature_bytes", "B"), "capture": ("capture", "h"),
        "training": ("train", "h"), "encode": ("encode", "h"), "store over one link": ("upload", "h"),
        "diff": ("diff", "h"), "GPUs": ("dollars", "$"),
    }  # fmt: skip
    heads = ["policy", "tokens", *units]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for model in MODELS:
        for tokens in TOKENS:
            found = costs(model, tokens, plan)
            shown = [amount(found[name], unit) for name, unit in units.values()]
            lines.append(f"| {model.name} | 10^{round(np.log10(tokens))} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def failures(base: Simulate) -> str:
    """How much dying nodes cost, in Markdown."""
    heads = "deaths per node and day", "wall time, median (5 to 95 %)", "deaths", "work in vain"
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- |"]
    for rate in (0.0, 0.05, 0.5, 5.0):
        found = simulate(replace(base, failures_per_node_day=rate))
        low, middle, high = found.hours
        lines.append(
            f"| {rate:g} | {middle:.1f} h ({low:.1f} to {high:.1f}) | {found.deaths:.0f} | {found.lost_share:.1%} |"
        )
    return "\n".join(lines) + "\n"


# --- the check


@dataclass(frozen=True)
class Check:
    """A real run of parts on this machine, some of them killed."""

    parts: int = 8
    workers: int = 2
    trajectories: int = 16_000
    shards: int = 6
    """Of a part, about."""
    seconds_between_kills: float = 12.0
    """Mean, of one worker."""
    seed: int = 0


def check(options: Check) -> dict[str, Any]:
    """Seconds of the undisturbed run, predicted ones of the disturbed run, and those that it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = _prepared(options, folder)
        spread = ["--parts", str(options.parts), "--workers", str(options.workers), "--retries", "1000"]

        def run(*words: str) -> float:
            start = time.perf_counter()
            subprocess.run([*command, *words], check=True, capture_output=True, env=_environment())
            return time.perf_counter() - start

        plain = run("--to", str(folder / "plain"), *spread)
        n_shards = len(list((folder / "plain").rglob("*.h5"))) / options.parts
        # One more start of a part that has nothing left to do, beside another, as parts run.
        beside = [
            subprocess.Popen([*command, "--to", str(folder / "plain"), "--part", f"{i + 1}/{options.parts}"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
            for i in range(options.workers)
        ]  # fmt: skip
        start = time.perf_counter()
        for process in beside:
            process.wait()
        startup = time.perf_counter() - start
        part = plain / -(-options.parts // options.workers)
        model = Simulate(
            parts=options.parts, workers=options.workers, part_hours=part / 3600, startup_minutes=startup / 60,
            shards=max(1, round(n_shards)), failures_per_node_day=86_400 / options.seconds_between_kills,
            restart_minutes=0.0, spread=0.03, jitter=0.1, draws=2000, seed=options.seed,
        )  # fmt: skip
        predicted = [hours * 3600 for hours in simulate(model).hours]
        print(f"undisturbed {plain:.1f} s; start-up {startup:.1f} s of a part's {part:.1f} s, {n_shards:.1f} shards")
        print(f"predicted with kills: {predicted[1]:.1f} s ({predicted[0]:.1f} to {predicted[2]:.1f})", flush=True)
        start, rng, kills = time.perf_counter(), np.random.default_rng([options.seed, 1]), 0
        with subprocess.Popen(
            [*command, "--to", str(folder / "killed"), *spread],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(),
        ) as run_:  # fmt: skip
            due = [start + rng.exponential(options.seconds_between_kills) for _ in range(options.workers)]
            while run_.poll() is None:
                for worker, when in enumerate(due):
                    if time.perf_counter() >= when:
                        due[worker] = when + rng.exponential(options.seconds_between_kills)
                        running = _children(run_.pid)
                        if worker < len(running):
                            os.kill(running[worker], signal.SIGKILL)
                            kills += 1
                time.sleep(0.01)
        took = time.perf_counter() - start
        assert run_.returncode == 0
        equal = all(
            file.read_bytes() == (folder / "killed" / file.relative_to(folder / "plain")).read_bytes()
            for file in (folder / "plain").rglob("*.h5")
        )
    inside = predicted[0] <= took <= predicted[2]
    print(f"took {took:.1f} s with {kills} kills; bytes {'equal' if equal else 'DIFFER'}")
    return {"seconds": {"undisturbed": plain, "predicted": predicted, "took": took}, "kills": kills, "inside": inside,
            "equal": equal, "ratio": took / predicted[1]}  # fmt: skip


def _prepared(options: Check, folder: Path) -> list[str]:
    """The capture command, but for where it writes."""
    import tsae
    from tsae.checkpoints.tokenizers import tokenizer_fingerprint

    base = tsae.testbed.series_path() / "base"
    tokenizer = tsae.CheckpointSeries.load(base).base.load_tokenizer()
    rng = np.random.default_rng(options.seed)
    records = [
        {"problem_id": f"p{i}", "policy": "base", "outcome": "unknown",
         "prompt_ids": rng.integers(1, 15, 12).tolist(), "response_ids": rng.integers(1, 15, 80).tolist()}
        for i in range(options.trajectories)
    ]  # fmt: skip
    rollouts = tsae.Rollouts.from_records(records, {"tokenizer": tokenizer_fingerprint(tokenizer)})
    rollouts.write(folder / "rollouts.parquet")
    tokens = options.trajectories * 92 // (options.parts * options.shards) + 1
    command = [sys.executable, "-m", "tsae", "capture", "--series", str(base), "--plan", "all"]
    command += ["--rollouts", str(folder / "rollouts.parquet"), "--shard-tokens", str(tokens)]
    return [*command, "--batch-tokens", "4096"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def _children(pid: int) -> list[int]:
    """Processes of the parts that run now."""
    try:
        text = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return sorted(map(int, text.split()))


def main() -> None:
    options: Any = tyro.cli(
        Annotated[Plan, tyro.conf.subcommand("plan")]
        | Annotated[Simulate, tyro.conf.subcommand("simulate")]
        | Annotated[Check, tyro.conf.subcommand("check")],
        description=__doc__,
    )
    if isinstance(options, Plan):
        print(table(options))
        print(failures(Simulate()))
    elif isinstance(options, Simulate):
        found = simulate(options)
        low, middle, high = found.hours
        print(f"wall time {middle:.1f} h ({low:.1f} to {high:.1f}), undisturbed {found.ideal_hours:.1f} h")
        print(json.dumps({"name": "simulate_scale", "ratio": middle / found.ideal_hours, **vars(found)}))
    else:
        print(json.dumps({"name": "simulate_scale", **check(options)}))


if __name__ == "__main__":
    main()
