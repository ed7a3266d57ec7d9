"""T-SAE, plain Matryoshka and plain BatchTopK on the same batches: one table of what each is good for.

All three come from the same code and see the same tokens in the same order: temporal_weight=0 is a plain Matryoshka
SAE, and groups=(1.0,) besides is a plain BatchTopK SAE. Trained SAEs stay in --to: an interrupted bench goes on.

    python scripts/bench_quality.py --to runs/quality                                     # the testbed
    python scripts/bench_quality.py --to runs/quality-smollm2 --store runs/smollm2-gsm8k/activations \\
        --d-sae 4096 --k 20 --tokens 3000000

Every cell is mean ± standard deviation over seeds. The last line is JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

import tsae
from tsae.demo import DemoConfig, demo_rollouts
from tsae.sae.separation import separation

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
    tokens: int = 1_500_000
    batch_tokens: int = 1024
    window: int = 8
    seeds: int = 3
    temporal_weight: float = tsae.SAEConfig.temporal_weight
    """Of the T-SAE."""
    temperature: float = tsae.SAEConfig.temperature
    """Of the T-SAE."""


def testbed_store(folder: Path) -> tsae.ActivationStore:
    """The demo's rollouts and activations."""
    config = DemoConfig(to=folder / "testbed")
    rollouts = demo_rollouts(config, progress=True)
    return tsae.capture(tsae.testbed.series().final(), rollouts, to=config.to / "activations")


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    store = testbed_store(bench.to) if bench.store is None else tsae.ActivationStore(bench.store)
    ours = tsae.SAEConfig(
        d_sae=bench.d_sae, k=bench.k, temporal_weight=bench.temporal_weight, temperature=bench.temperature
    )
    kinds = {
        "T-SAE": ours,
        "Matryoshka": replace(ours, temporal_weight=0.0),
        "BatchTopK": replace(ours, temporal_weight=0.0, groups=(1.0,)),
    }
    rows: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
    for seed in range(bench.seeds):
        training = tsae.TrainingConfig(
            tokens=bench.tokens, batch_tokens=bench.batch_tokens, window=bench.window, seed=seed
        )
        saes = {
            kind: tsae.train(store, config, to=bench.to / f"{kind}-{seed}", training=training)
            for kind, config in kinds.items()
        }
        for kind, sae in saes.items():
            measured = tsae.evaluate(sae, store)
            for name in MEASURES:
                rows[kind][name].append(float(getattr(measured, name)))
        for score in separation(saes, store, seed=seed).scores:
            if score.sae in rows:
                rows[score.sae][f"{score.group} → {score.label} (chance {score.chance:.2f})"].append(score.accuracy)

    names = list(dict.fromkeys(name for kind in rows.values() for name in kind))
    print(f"\n{'':<40}" + "".join(f"{kind:>20}" for kind in kinds))
    for name in names:
        cells = [f"{np.mean(v):.3f} ± {np.std(v):.3f}" if (v := rows[kind].get(name)) else "–" for kind in kinds]
        print(f"{name:<40}" + "".join(f"{cell:>20}" for cell in cells))
    t, m = (rows[kind] for kind in ("T-SAE", "Matryoshka"))
    ratio = float(np.mean(t["smoothness_high"]) / np.mean(m["smoothness_high"]))
    print(
        json.dumps(
            {
                "name": "bench_quality",
                "ratio": ratio,
                "fve_difference": float(np.mean(t["fve"]) - np.mean(m["fve"])),
                "size": {name: str(value) for name, value in vars(bench).items()},
                "figures": {kind: dict(values) for kind, values in rows.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
