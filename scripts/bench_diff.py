"""A whole feature diff on a large table: its time and memory, against one pass that reads all codes.

The table: two checkpoints that each read their own trajectories, without bands, which makes five contrasts (total shift
of all, of successful and of failed trajectories; success − failure of both checkpoints), every one with studentised
intervals, permutation tests, AUROC, controls and nulls, as `tsae diff` draws them. Codes are sparse: in each of k slots
a token has one of d_sae / k features by Zipf's law, three of ten times a favourite of the problem, two of the
trajectory, two of the token id, so that trajectories of a problem are alike. The run raises a feature in 64, success
another.

    python scripts/bench_diff.py                              # 20,000 trajectories, 1.6 GB on disk
    python scripts/bench_diff.py --trajectories 5000          # a quarter

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import tyro
from statements.tables import feature_table

import tsae.diff.effects as tables
import tsae.diff.feature_diff as whole
from tsae.diff.config import DiffConfig
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

_IDS = 8000
_STAGES = {
    "contrasts": (whole, "draw_all"),
    "controls": (whole, "confound_table"),
    "nulls": (tables, "null_counts"),
    "descriptions": (whole, "describe"),
}


@dataclass(frozen=True)
class Bench:
    """Size of the tables."""

    trajectories: int = 20_000
    """Of both checkpoints together."""
    samples: int = 8
    """Trajectories of a problem and checkpoint."""
    tokens: int = 300
    """Of a trajectory on average, prompt included."""
    k: int = 32
    """Active features of a token."""
    d_sae: int = 16_384
    n_bootstrap: int = 1000
    n_permutations: int = 10_000
    threads: int = 2
    """Of the diff; each of its threads multiplies matrices on its own."""
    to: Path | None = None
    """Folder for the large table, which is kept and used again; by default a temporary one."""


def make_table(bench: Bench) -> FeatureTable:
    """The table, written problem by problem into arrays of the final size."""
    rng = np.random.default_rng(0)
    n_problems, per = bench.trajectories // (2 * bench.samples), bench.d_sae // bench.k
    zipf = np.cumsum(1 / np.arange(1, per + 1))
    zipf /= zipf[-1]
    id_zipf = np.cumsum(1 / np.arange(10, _IDS + 10))
    id_zipf /= id_zipf[-1]

    def ranks(*shape: int) -> np.ndarray:
        return np.searchsorted(zipf, rng.random(shape, dtype=np.float32)).clip(max=per - 1).astype(np.int16)

    of_id = ranks(_IDS, bench.k)
    n_rows = 2 * n_problems * bench.samples
    prompt = bench.tokens // 15
    response = rng.integers(bench.tokens * 2 // 3, bench.tokens * 4 // 3 + 1, n_rows) - prompt
    offsets = np.concatenate([[0], np.cumsum(response + prompt)])
    indices = np.empty(offsets[-1] * bench.k, dtype=np.int32)
    values = np.empty(offsets[-1] * bench.k, dtype=np.float32)
    token_ids = np.empty(offsets[-1], dtype=np.int32)
    level = rng.lognormal(0, 0.5, bench.d_sae).astype(np.float32)
    slot = np.arange(bench.k, dtype=np.int32)
    records = []
    state = [(rng.integers(0, _IDS, 40), ranks(4, bench.k), rng.random()) for _ in range(n_problems)]
    for side, policy in enumerate(("base", "run")):
        for problem, (own_ids, favourites, rate) in enumerate(state):
            strength = level * rng.lognormal(0, 0.2, bench.d_sae).astype(np.float32)
            if side:
                strength[::64] *= 1.3
            for sample in range(bench.samples):
                row = (side * n_problems + problem) * bench.samples + sample
                right = bool(rng.random() < 0.2 + 0.6 * rate)
                n, start = int(response[row] + prompt), int(offsets[row])
                ids = np.searchsorted(id_zipf, rng.random(n)).clip(max=_IDS - 1)
                ids = np.where(rng.random(n) < 0.5, own_ids[rng.integers(0, len(own_ids), n)], ids)
                choice = rng.random((n, bench.k), dtype=np.float32)
                rank = ranks(n, bench.k)
                of_row = ranks(4, bench.k)
                which = rng.integers(0, 4, (n, bench.k))
                rank = np.where(choice < 0.3, favourites[which, slot], rank)
                rank = np.where((choice >= 0.3) & (choice < 0.5), of_row[which, slot], rank)
                rank = np.where((choice >= 0.5) & (choice < 0.7), of_id[ids], rank)
                feature = np.sort(rank * np.int32(bench.k) + slot, axis=1)
                value = strength[feature] * (0.3 + rng.random((n, bench.k), dtype=np.float32))
                if right:
                    value[feature % 64 == 1] *= np.float32(1.3)
                span = slice(start * bench.k, (start + n) * bench.k)
                indices[span], values[span] = feature.ravel(), value.ravel()
                token_ids[start : start + n] = ids
                records.append(
                    {
                        "problem_id": f"p{problem}", "policy": policy, "outcome": "success" if right else "failure",
                        "prompt_ids": ids[:prompt].astype(np.int32), "response_ids": ids[prompt:].astype(np.int32),
                    }
                )  # fmt: skip
    shape = (int(offsets[-1]), bench.d_sae)
    codes = sp.csr_array((values, indices, np.arange(shape[0] + 1) * bench.k), shape=shape)
    rows = np.arange(n_rows)
    readers = list(zip(("base", "run"), np.split(rows, 2), strict=True))
    return feature_table(Rollouts.from_records(records), codes, readers, d_high=bench.d_sae // 5, special=())


def measure(folder: Path, config: DiffConfig) -> dict[str, Any]:
    """Seconds of load, diff and save with their parts, and peak memory of this process."""
    stages: dict[str, float] = {}
    stages_cpu: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            found = function(*args, **kwargs)
            stages[name] = round(time.perf_counter() - start, 2)
            stages_cpu[name] = round(time.process_time() - cpu, 2)
            return found

        return wrapper

    for name, (module, function) in _STAGES.items():
        setattr(module, function, timed(name, getattr(module, function)))
    start = time.perf_counter()
    table = timed("load", FeatureTable.load)(folder)
    diff = whole.feature_diff(table, config, progress=False)
    timed("save", diff.save)(folder / "diff")
    seconds, cpu = time.perf_counter() - start, time.process_time()
    # Not getrusage: a child's ru_maxrss starts from its parent's.
    status = Path("/proc/self/status").read_text()
    drawn = diff.contrasts[diff.contrasts.note == ""]
    least, least_cpu = floor(table)
    return {
        "floor": {
            "seconds": round(least, 1),
            "cpu_seconds": round(least_cpu, 1),
            "ratio": round(seconds / least, 1),
            "cpu_ratio": round(cpu / least_cpu, 1),
        },
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gb": round(int(status.partition("VmHWM:")[2].split()[0]) / 1e6, 2),
        "stages": stages,
        "stages_cpu": stages_cpu,
        "non_zeros": int(table.codes.nnz),
        "contrasts": len(drawn),
        "tested": drawn.n_tested.tolist(),
        "discoveries": drawn.n_discoveries.tolist(),
        "null": drawn.n_null.round(2).tolist(),
    }


def floor(table: FeatureTable) -> tuple[float, float]:
    """Seconds, and of CPU, of one pass that reads all codes and sums every feature per trajectory on one thread.

    No diff does without it.
    """
    start, cpu = time.perf_counter(), time.process_time()
    for _, tokens, ends in table.row_blocks():
        codes, shape = table.codes[tokens], (len(ends) - 1, ends[-1])
        member = sp.csr_array((np.ones(ends[-1], np.float32), np.arange(ends[-1]), ends), shape=shape)
        _ = member @ codes
    return time.perf_counter() - start, time.process_time() - cpu


def step(name: str, bench: Bench, folder: Path) -> Any:
    """What a step gives, in a process of its own: the script calls itself with `step` and its arguments as JSON."""
    size = json.dumps({name: value for name, value in vars(bench).items() if name != "to"})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "step", name, size, str(folder)]
    text = subprocess.check_output(command, env=environment, text=True)
    return json.loads(text.splitlines()[-1]) if text else None


def run_step(name: str, size: str, folder: Path) -> None:
    """The process of a step."""
    bench = Bench(**json.loads(size))
    config = DiffConfig(n_bootstrap=bench.n_bootstrap, n_permutations=bench.n_permutations, threads=bench.threads)
    if name == "make":
        make_table(bench).save(folder)
    else:
        print(json.dumps(measure(folder, config)))


def main() -> None:
    if sys.argv[1:2] == ["step"]:
        run_step(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    bench = tyro.cli(Bench, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = bench.to or Path(temporary) / "features"
        if not (folder / "features.json").is_file():
            step("make", bench, folder)
        found = step("measure", bench, folder)
    print(f"{bench.trajectories:,} trajectories × {bench.tokens} tokens × k {bench.k}, {bench.d_sae:,} features")
    print(
        f"  {found['seconds']} s, {found['cpu_seconds']} s of CPU, peak {found['peak_gb']} GB, {bench.threads} threads"
    )
    print("  " + ", ".join(f"{name} {s:.1f} s" for name, s in found["stages"].items()))
    print("  of CPU: " + ", ".join(f"{name} {s:.1f} s" for name, s in found["stages_cpu"].items()))
    least = found["floor"]
    print(f"  one pass that sums every feature per trajectory: {least['seconds']} s, {least['ratio']} ×", end="")
    print(f"; of CPU {least['cpu_seconds']} s, {least['cpu_ratio']} ×")
    print(f"  discoveries {found['discoveries']} of {found['tested']}; nulls {found['null']}")
    size = {name: value for name, value in vars(bench).items() if name != "to"}
    print(json.dumps({"name": "bench_diff", "ratio": least["cpu_ratio"], **found, "size": size}))


if __name__ == "__main__":
    main()
