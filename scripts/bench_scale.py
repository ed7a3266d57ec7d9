"""Memory of encode, diff and report on ten times as many tokens.

Each stage runs in a process of its own: as it is, and on ten times as many trajectories of the same problems. A stage's
memory is the highest mark of its process (VmHWM), which counts the pages of mapped files too. The ratio is that of the
highest marks of the three stages; each stage's own stands beside it. Activations are those of token ids, problems and
noise; the SAE is random, with a threshold that lets k latents through.

    python scripts/bench_scale.py

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from bench_train import peak_mb, sparse_sae
from statements.tables import Shard, write_store

import tsae
from tsae.features.encode import encode

_IDS, _READERS, _SITE = 2000, ("base", "run"), "blocks.0.hook_resid_post"


@dataclass(frozen=True)
class Bench:
    """Sizes of the small store; the large one has `times` as many samples."""

    problems: int = 128
    samples: int = 8
    """Of a problem and checkpoint."""
    tokens: int = 320
    """Of a trajectory."""
    times: int = 10
    d_model: int = 32
    d_sae: int = 4096
    k: int = 32
    to: Path | None = None
    """Folder that is kept; by default a temporary one."""


def make_store(folder: Path, bench: Bench, samples: int) -> None:
    """Two checkpoints, which read their own trajectories."""
    rng, prompt = np.random.default_rng(0), bench.tokens // 16
    chance = 1 / np.arange(5, _IDS + 5)
    embedding = rng.normal(size=(_IDS, bench.d_model)).astype(np.float32)
    of_problem = 0.5 * rng.normal(size=(bench.problems, bench.d_model)).astype(np.float32)
    moved = 0.3 * rng.normal(size=bench.d_model).astype(np.float32)
    records: list[dict[str, Any]] = []

    def shards(side: int) -> Iterator[Shard]:
        """A shard is one sample of every problem."""
        for _ in range(samples):
            ids = rng.choice(_IDS, size=(bench.problems, bench.tokens), p=chance / chance.sum()).astype(np.int32)
            rows = np.arange(bench.problems) + len(records)
            x = embedding[ids] + of_problem[:, None] + side * moved
            x += 0.5 * rng.normal(size=x.shape).astype(np.float32)
            right = rng.random(bench.problems) < np.linspace(0.2, 0.8, bench.problems)
            outcome = np.where(right, "success", "failure").tolist()
            records.extend(
                {
                    "problem_id": f"p{problem}", "policy": _READERS[side], "outcome": outcome[problem],
                    "prompt_ids": ids[problem, :prompt], "response_ids": ids[problem, prompt:],
                }
                for problem in range(bench.problems)
            )  # fmt: skip
            yield x.reshape(-1, bench.d_model), ids.ravel(), [bench.tokens] * bench.problems, rows

    readers = {id: (None if side == 0 else id, shards(side)) for side, id in enumerate(_READERS)}
    write_store(folder, lambda: tsae.Rollouts.from_records(records), readers, site=_SITE, dtype="float16")


def stage(name: str, folder: Path) -> dict[str, Any]:
    """Do one stage, in this process."""
    start, facts = time.perf_counter(), dict[str, Any]()
    if name == "encode":
        table = encode(folder.parent / "sae", folder / "acts", to=folder / "features", progress=False)
        facts = {"codes": int(table.codes.nnz), "tokens": len(table.token_ids)}
    elif name == "diff":
        config = tsae.DiffConfig(n_bootstrap=200, n_permutations=1000)
        found = tsae.feature_diff(folder / "features", config, progress=False)
        found.save(folder / "diff")
        facts = {"discoveries": int(found.contrasts.n_discoveries.sum())}
    else:
        found = tsae.FeatureDiff.load(folder / "diff", features=tsae.FeatureTable.load(folder / "features"))
        facts = {"megabytes": round(Path(found.to_html(folder / "report.html")).stat().st_size / 1e6, 1)}
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 1), "gb": peak_mb() / 1e3, **facts}


def in_process(name: str, folder: Path) -> dict[str, Any]:
    """What a stage found, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    text = subprocess.check_output([sys.executable, __file__, "stage", name, str(folder)], env=environment, text=True)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["stage"]:
        print(json.dumps(stage(sys.argv[2], Path(sys.argv[3]))))
        return
    bench = tyro.cli(Bench, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = bench.to or Path(temporary)
        found: dict[str, dict[str, Any]] = {}
        for size, samples in (("1x", bench.samples), (f"{bench.times}x", bench.samples * bench.times)):
            here = folder / size
            shutil.rmtree(here, ignore_errors=True)
            make_store(here / "acts", bench, samples)
            if not found:
                shard = next(tsae.ActivationStore(here / "acts").shards())
                x = torch.from_numpy(shard.read(_SITE, np.arange(min(4096, shard.n_tokens))))
                sparse_sae(x, bench.d_sae, bench.k, _SITE).save(folder / "sae")
            found[size] = {}
            for name in ("encode", "diff", "report"):
                found[size][name] = in_process(name, here)
                print(f"{size:>4} {name:7} {found[size][name]}", flush=True)
        small, large = found.values()
        ratios = {name: round(large[name]["gb"] / small[name]["gb"], 3) for name in small}
        peaks = [max(each["gb"] for each in size.values()) for size in (small, large)]
        encoded = large["encode"]
        figures = {
            "name": "bench_scale", "ratio": round(peaks[1] / peaks[0], 3), "of_stages": ratios,
            "peak_gb": round(peaks[1], 2), "codes": encoded["codes"],
            "rows_per_s": round(encoded["tokens"] / encoded["seconds"]), **found, "size": {**vars(bench), "to": None},
        }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
