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
from bench_train import peak_mb
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

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = function(*args, **kwargs)
            stages[name] = round(time.perf_counter() - start, 2)
            return found

        return wrapper

    for name, (module, function) in _STAGES.items():
        setattr(module, function, timed(name, getattr(module, function)))
    start = time.perf_counter()
    table = timed("load", FeatureTable.load)(folder)
    diff = whole.feature_diff(table, config, progress=False)
    timed("save", diff.save)(folder / "diff")
    seconds, cpu, peak = time.perf_counter() - start, time.process_time(), peak_mb()
    drawn = diff.contrasts[diff.contrasts.note == ""]
    least = floor(table)
    return {
        "ratio": round(seconds / least, 1), "seconds": round(seconds, 1), "floor_seconds": round(least, 1),
        "cpu_seconds": round(cpu, 1), "peak_gb": round(peak / 1e3, 2), "stages": stages,
        "non_zeros": int(table.codes.nnz), "contrasts": len(drawn), "tested": drawn.n_tested.tolist(),
        "discoveries": drawn.n_discoveries.tolist(), "null": drawn.n_null.round(2).tolist(),
    }  # fmt: skip


def floor(table: FeatureTable) -> float:
    """Seconds of one pass that reads all codes and sums every feature per trajectory on one thread.

    No diff does without it.
    """
    start = time.perf_counter()
    for _, tokens, ends in table.row_blocks():
        codes, shape = table.codes[tokens], (len(ends) - 1, ends[-1])
        member = sp.csr_array((np.ones(ends[-1], np.float32), np.arange(ends[-1]), ends), shape=shape)
        _ = member @ codes
    return time.perf_counter() - start


def in_process(step: str, bench: Bench, folder: Path) -> str:
    """What a step prints, in a process of its own: the script calls itself with `step` and its arguments as JSON."""
    size = json.dumps({**vars(bench), "to": None})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, step, size, str(folder)]
    return subprocess.check_output(command, env=environment, text=True)


def main() -> None:
    if sys.argv[1:2] in (["make"], ["measure"]):
        bench, folder = Bench(**json.loads(sys.argv[2])), Path(sys.argv[3])
        if sys.argv[1] == "make":
            make_table(bench).save(folder)
            return
        config = DiffConfig(n_bootstrap=bench.n_bootstrap, n_permutations=bench.n_permutations, threads=bench.threads)
        print(json.dumps(measure(folder, config)))
        return
    bench = tyro.cli(Bench, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = bench.to or Path(temporary) / "features"
        if not (folder / "features.json").is_file():
            in_process("make", bench, folder)
        found = json.loads(in_process("measure", bench, folder).splitlines()[-1])
    print(f"{bench.trajectories:,} trajectories × {bench.tokens} tokens × k {bench.k}, {bench.d_sae:,} features")
    print(f"  {found['seconds']} s, {found['ratio']} passes over the codes, peak {found['peak_gb']} GB")
    print("  " + ", ".join(f"{name} {s:.1f} s" for name, s in found["stages"].items()))
    print(json.dumps({"name": "bench_diff", **found, "size": {**vars(bench), "to": str(bench.to)}}))


if __name__ == "__main__":
    main()
