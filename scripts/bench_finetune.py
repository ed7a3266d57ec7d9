"""Fine-tuning against training from scratch, on the testbed: from the base's SAE to one of every run's last checkpoint.

Every checkpoint has a store of its own, of what it reads of its own responses. For every budget of tokens: variance
explained on held-out problems, and whether latent i is still latent i: "same" is the share of the start's active
latents whose best one-to-one match in the result is the latent of their own number, "cosine" their decoder cosine with
it; from scratch, the cosine is that with the match.

    python scripts/bench_finetune.py --to runs/finetune

Cells are means over runs and seeds. The last line is JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

import tsae
from tsae.checkpoints.series import CheckpointSeries
from tsae.config import DemoConfig
from tsae.demo import demo_rollouts
from tsae.sae.quality.stability import matched_cosines


@dataclass(frozen=True)
class Bench:
    """What is compared."""

    to: Path
    """Folder for rollouts, activations and SAEs."""
    d_sae: int = 256
    k: int = 8
    base_tokens: int = 1_000_000
    """Tokens of the base's SAE."""
    tokens: tuple[int, ...] = (30_000, 100_000, 300_000)
    """Budgets on the run's store."""
    learning_rate: float = 1.6e-3
    """Of the base's SAE and of training from scratch."""
    rates: tuple[float, ...] = (1.0, 0.1)
    """Learning rates of fine-tuning, as multiples of that."""
    seeds: int = 3


def stores(to: Path) -> dict[str, tsae.ActivationStore]:
    """One store a checkpoint; the base comes first."""
    rollouts = demo_rollouts(DemoConfig(to=to))
    alone = [replace(checkpoint, run=None, trained_on=None) for checkpoint in tsae.testbed.series().final()]
    return {
        c.id: tsae.capture(CheckpointSeries((c,)), rollouts.where(policy=c.id), to=to / "activations" / c.id)
        for c in alone
    }


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    base, *runs = stores(bench.to).items()
    config, seeds = tsae.SAEConfig(d_sae=bench.d_sae, k=bench.k), list(range(bench.seeds))
    training = tsae.TrainingConfig(tokens=bench.base_tokens, batch_tokens=1024, learning_rate=bench.learning_rate)
    starts = tsae.train_many(base[1], config, seeds=seeds, to=bench.to / "base", training=training)
    rows: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, store in runs:
        scratch = {
            n: tsae.train_many(
                store, config, seeds=seeds, to=bench.to / run / f"{n}-scratch", training=replace(training, tokens=n)
            )
            for n in bench.tokens
        }
        for key, start in starts.items():
            rows[0, "start"]["fve"].append(tsae.evaluate(start, store, max_norm=training.max_norm).fve)
            active = np.diff(tsae.encode(start, store, progress=False).columns.indptr) > 0
            for n in bench.tokens:
                found = {"scratch": scratch[n][key]}
                for rate in bench.rates:
                    found[f"tuned, rate {rate:g}"] = tsae.train(
                        store,
                        start=start,
                        to=bench.to / run / f"{n}-tuned-{rate:g}-seed{key[1]}",
                        training=replace(training, tokens=n, seed=key[1], learning_rate=rate * bench.learning_rate),
                    )
                for name, sae in found.items():
                    cosine, match = matched_cosines(start.W_dec, sae.W_dec)
                    rows[n, name]["fve"].append(tsae.evaluate(sae, store, max_norm=training.max_norm).fve)
                    if name != "scratch":
                        rows[n, name]["same"].append(float((match == np.arange(bench.d_sae))[active].mean()))
                        cosine = (start.W_dec * sae.W_dec).sum(1).numpy()
                    rows[n, name]["cosine"].append(float(cosine[active].mean()))

    print(f"\n{'tokens':>10}  {'':<18}" + "".join(f"{name:>10}" for name in ("FVE", "cosine", "same")))
    for (n, name), measured in rows.items():
        cells = [f"{np.mean(measured[m]):.3f}" if m in measured else "–" for m in ("fve", "cosine", "same")]
        print(f"{n:>10,}  {name:<18}" + "".join(f"{cell:>10}" for cell in cells))
    figures = {f"{n} {name}": dict(measured) for (n, name), measured in rows.items()}
    size = {name: str(value) for name, value in vars(bench).items()}
    print(json.dumps({"name": "bench_finetune", "size": size, "figures": figures}))


if __name__ == "__main__":
    main()
