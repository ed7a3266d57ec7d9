"""A whole `feature_diff` against the plain way, and its time and memory on a large table.

The table: two checkpoints that each read their own trajectories, without bands, which makes five contrasts (total shift
of all, of successful and of failed trajectories; success − failure of both checkpoints), every one with studentised
intervals, permutation tests, AUROC, controls and nulls, as `tsae diff` draws them. Codes are sparse: in every slot of k a
token has one of d_sae / k features, by Zipf's law; three of ten are favourites of the problem, two of the trajectory, two
of the token id, so that trajectories of a problem are alike. A feature in 64 is raised in the run, one in successes.

The plain way: feature by feature, its dense column of codes, loops over problems, one product with all sign flips, label
permutations and bootstrap draws, Mann–Whitney's U in every problem, controls cell by cell. Draws are made once, not for
every feature. It does the same five contrasts and three controls, without nulls and descriptions, and its results are
asserted to be ours: equal to rounding, and p-values up to what the number of draws allows.

    python scripts/bench_diff.py                              # the large table: 20,000 trajectories, 1.6 GB on disk
    python scripts/bench_diff.py --trajectories 5000          # a quarter

Ends with one line of JSON.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import tyro

from tsae.diff.config import DiffConfig
from tsae.diff.diff import feature_diff
from tsae.features.table import FeatureTable
from tsae.rollouts.table import Rollouts

_IDS = 8000
_STAGES = (
    "load",
    "of",
    "shift_contrasts",
    "outcome_contrasts",
    "null_contrasts",
    "confound_table",
    "_describe",
    "save",
)


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
    small: tuple[int, int, int, int] = (480, 60, 8, 512)
    """Trajectories, tokens, k and d_sae of the table that the plain way is done on as well."""
    to: Path | None = None
    """Folder for the large table, kept; by default a temporary one."""
    only: str | None = None
    """Internal: make, measure or compare, in a process of its own."""


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
                        "problem_id": f"p{problem}",
                        "policy": policy,
                        "prompt_ids": ids[:prompt].astype(np.int32),
                        "response_ids": ids[prompt:].astype(np.int32),
                        "outcome": "success" if right else "failure",
                    }
                )
    shape = (int(offsets[-1]), bench.d_sae)
    codes = sp.csr_array((values, indices, np.arange(shape[0] + 1) * bench.k), shape=shape)
    readers = [
        {"id": id, "run": None if id == "base" else id, "step": i, "trained_on": None, "fve": 0.9}
        for i, id in enumerate(("base", "run"))
    ]
    return FeatureTable(
        codes=codes,
        token_ids=token_ids,
        row_offsets=offsets,
        reader=np.repeat(np.arange(2, dtype=np.int32), n_rows // 2),
        trajectory=np.arange(n_rows),
        rollouts=Rollouts.from_records(records),
        info={"sae": {"d_high": bench.d_sae // 5, "site": "x"}, "readers": readers, "special_ids": []},
    )


def measure(folder: Path, config: DiffConfig) -> dict[str, object]:
    """Seconds of load, diff and save, their parts, and peak memory of this process."""
    profile, start = cProfile.Profile(), time.perf_counter()
    profile.enable()
    table = FeatureTable.load(folder)
    diff = feature_diff(table, config, progress=False)
    diff.save(folder / "diff")
    profile.disable()
    seconds = time.perf_counter() - start
    print("cpu", time.process_time())
    # Not getrusage: a child's ru_maxrss starts from its parent's.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1e6
    if os.environ.get("BENCH_PROFILE"):
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(75)
    return {
        "seconds": seconds,
        "peak_gb": peak,
        "stages": {},
        "contrasts": int((diff.contrasts.note == "").sum()),
        "discoveries": diff.contrasts[diff.contrasts.note == ""].n_discoveries.tolist(),
        "null": diff.info["null"],
        "nnz": int(table.codes.nnz),
    }


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    config = DiffConfig(n_bootstrap=bench.n_bootstrap, n_permutations=bench.n_permutations)
    assert bench.to is not None
    if bench.only == "make":
        t = time.time()
        make_table(bench).save(bench.to)
        print("made", time.time() - t)
    elif bench.only == "measure":
        print(json.dumps(measure(bench.to, config)))


if __name__ == "__main__":
    main()
