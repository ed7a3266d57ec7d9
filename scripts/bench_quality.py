"""T-SAE, plain Matryoshka and plain BatchTopK on the same batches: one table of what each is good for.

All three come from the same code and see the same tokens in the same order: temporal_weight=0 is a plain Matryoshka
SAE, and groups=(1.0,) besides is a plain BatchTopK SAE. Trained SAEs stay in --to: an interrupted bench goes on.

    python scripts/bench_quality.py --to runs/quality                                     # the testbed
    python scripts/bench_quality.py --to runs/quality-smollm2 --store runs/smollm2-gsm8k/activations \\
        --d-sae 4096 --k 20 --steps 600 1500 --no-probe

Every cell is mean ± standard deviation over seeds, on held-out problems. `roughness_high` is how much the high-level
group's reconstruction moves from token to token, as a share of how much the stream moves; `smooth_bound` is the largest
FVE that any reconstruction of that roughness can have, and `smooth_linear` what the best linear function of a token has
(`SlowVariance` in slow_variance.py).

Thresholds are set on the held-out problems, where L0 is therefore k. `l0_elsewhere` sets them on one half of these
problems, for the other: by its mean over both halves, and by how far the two are apart (`l0_apart`), new problems can
be expected to differ from k.

The last line is JSON: `ratio` is the largest over the lengths of (Matryoshka's FVE − the T-SAE's FVE) / .02; at most 1
is wanted. `wanted` has, by length, that difference and the other aims: smoothness_high at most .08, L0 within 5 % of k,
alive at least .97.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from slow_variance import SlowVariance

import tsae
from tsae.config import DemoConfig
from tsae.demo import demo_rollouts
from tsae.sae.quality.evaluation import counted_texts
from tsae.sae.quality.probing import separation
from tsae.sae.training.trainer import calibrate

MEASURES = [
    "fve",
    "fve_high",
    "cosine",
    "l0",
    "l0_high",
    "silent_high",
    "alive",
    "alive_in_training",
    "alive_high",
    "smoothness_high",
    "smoothness_all",
    "smoothness_high_robust",
    "smoothness_all_robust",
]


@dataclass(frozen=True)
class Bench:
    """What is compared."""

    to: Path
    """Folder for the trained SAEs."""
    store: Path | None = None
    """An activation store; by default the testbed's, captured as the demo does."""
    d_sae: int = 256
    k: int = 8
    steps: tuple[int, ...] = (1500,)
    """Lengths of the trainings, in steps of batch_tokens."""
    batch_tokens: int = 1024
    window: int = 8
    seeds: int = 3
    temporal_weight: float = tsae.SAEConfig.temporal_weight
    """Of the T-SAE."""
    temperature: float = tsae.SAEConfig.temperature
    """Of the T-SAE."""
    probe: bool = True
    """Measure with probes what the high-level and the low-level features know."""


def testbed_store(folder: Path) -> tsae.ActivationStore:
    """The demo's rollouts and activations."""
    config = DemoConfig(to=folder / "testbed")
    rollouts = demo_rollouts(config, progress=True)
    return tsae.capture(tsae.testbed.series().final(), rollouts, to=config.to / "activations")


def held_out_runs(store: tsae.ActivationStore) -> Iterator[tuple[str, np.ndarray]]:
    """Problem and (T, d_model) runs of adjacent tokens of held-out problems, without outliers, at the first site."""
    windows = store.windows(store.sites[0], held_out=True)
    problem = store.rollouts.table["problem_id"].to_pylist()
    for text in counted_texts(windows):
        x = windows.shards[text.shard].read(windows.site, text.tokens)
        kept = np.flatnonzero(~windows.norms.beyond(torch.from_numpy(x)).numpy())
        runs = np.split(kept, np.flatnonzero(np.diff(text.tokens[kept]) > 1) + 1)
        yield from ((problem[text.row], x[run]) for run in runs if len(run))


@torch.no_grad()
def l0_elsewhere(sae: tsae.TemporalSAE, runs: list[tuple[str, np.ndarray]]) -> tuple[float, float]:
    """L0 of either half of the problems where the other half sets the threshold: its mean, and the difference."""
    half = {problem: i % 2 for i, problem in enumerate(dict.fromkeys(problem for problem, _ in runs))}
    first, second = (torch.from_numpy(np.concatenate([x for p, x in runs if half[p] == side])) for side in (0, 1))
    other, found = copy.deepcopy(sae), []
    for set_on, measured_on in ((first, second), (second, first)):
        calibrate(other, set_on)
        active = sum(int((other.encode(part) > 0).sum()) for part in measured_on.split(1024))
        found.append(active / len(measured_on))
    return sum(found) / 2, abs(found[0] - found[1])


@torch.no_grad()
def roughness_high(sae: tsae.TemporalSAE, runs: list[tuple[str, np.ndarray]]) -> float:
    """Root of Σ ‖Δx̂_high‖² / Σ ‖Δx‖² over steps between adjacent tokens."""
    moved = total = 0.0
    for _, run in runs:
        x_high = sae.encode_high(torch.from_numpy(run)) @ sae.W_dec[: sae.config.d_high]
        moved += x_high.diff(dim=0).pow(2).sum().item()
        total += float(np.square(np.diff(run, axis=0)).sum())
    return float((moved / total) ** 0.5)


Rows = dict[str, dict[str, list[float]]]
"""Kind of SAE -> measure -> one figure a seed."""


def trained(
    bench: Bench, store: tsae.ActivationStore, steps: int, runs: list[tuple[str, np.ndarray]], slow: SlowVariance
) -> Rows:
    """Train and measure at one length."""
    ours = tsae.SAEConfig(
        d_sae=bench.d_sae, k=bench.k, temporal_weight=bench.temporal_weight, temperature=bench.temperature
    )
    kinds = {
        "T-SAE": ours,
        "Matryoshka": replace(ours, temporal_weight=0.0),
        "BatchTopK": replace(ours, temporal_weight=0.0, groups=(1.0,)),
    }
    rows: Rows = {kind: defaultdict(list) for kind in kinds}
    for seed in range(bench.seeds):
        training = tsae.TrainingConfig(
            tokens=steps * bench.batch_tokens, batch_tokens=bench.batch_tokens, window=bench.window, seed=seed
        )
        saes = {}
        for kind, config in kinds.items():
            sae = tsae.train(store, config, to=bench.to / f"{kind}-{steps}-{seed}", training=training)
            saes[kind] = sae
            measured = tsae.evaluate(sae, store)
            for name in MEASURES:
                rows[kind][name].append(float(getattr(measured, name)))
            for name, value in zip(("l0_elsewhere", "l0_apart"), l0_elsewhere(sae, runs), strict=True):
                rows[kind][name].append(value)
            if len(config.groups) > 1:
                roughness = roughness_high(sae, runs)
                rows[kind]["roughness_high"].append(roughness)
                rows[kind]["smooth_bound"].append(slow.bound(roughness))
                rows[kind]["smooth_linear"].append(slow.linear(roughness))
        for score in separation(saes, store, seed=seed).scores if bench.probe else ():
            if score.sae in rows:
                rows[score.sae][f"{score.group} → {score.label} (chance {score.chance:.2f})"].append(score.accuracy)
    return rows


def wants(rows: Rows, k: int) -> dict[str, float]:
    """The T-SAE's means of what is wanted of it."""
    t, m = ({name: float(np.mean(v)) for name, v in rows[kind].items()} for kind in ("T-SAE", "Matryoshka"))
    return {
        "fve_less_than_matryoshka": m["fve"] - t["fve"],
        "smoothness_high": t["smoothness_high"],
        "smoothness_high_of_matryoshka": m["smoothness_high"],
        "fve_high": t["fve_high"],
        "smooth_bound": t["smooth_bound"],
        "l0_off": t["l0"] / k - 1,
        "l0_elsewhere_off": t["l0_elsewhere"] / k - 1,
        "alive": t["alive"],
    }


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    store = testbed_store(bench.to) if bench.store is None else tsae.ActivationStore(bench.store)
    runs, slow = list(held_out_runs(store)), SlowVariance(store.d_model(store.sites[0]))
    for _, run in runs:
        slow.add(run)
    every: dict[int, Rows] = {}
    for steps in bench.steps:
        every[steps] = rows = trained(bench, store, steps, runs, slow)
        print(f"\n{f'{steps:,} steps of {bench.batch_tokens:,} tokens':<40}" + "".join(f"{kind:>20}" for kind in rows))
        for name in dict.fromkeys(name for kind in rows.values() for name in kind):
            cells = [f"{np.mean(v):.3f} ± {np.std(v):.3f}" if (v := row.get(name)) else "–" for row in rows.values()]
            print(f"{name:<40}" + "".join(f"{cell:>20}" for cell in cells))
    wanted = {str(steps): wants(rows, bench.k) for steps, rows in every.items()}
    print(
        json.dumps(
            {
                "name": "bench_quality",
                "ratio": max(row["fve_less_than_matryoshka"] for row in wanted.values()) / 0.02,
                "wanted": wanted,
                "size": {name: str(value) for name, value in vars(bench).items()},
                "figures": {str(n): {kind: dict(values) for kind, values in rows.items()} for n, rows in every.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
