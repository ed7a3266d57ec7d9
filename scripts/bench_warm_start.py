"""What a T-SAE saves that starts from a published SAE (`--init-from`), on the testbed.

The published SAE is a plain BatchTopK SAE in sae_lens's form, trained on what the base reads in the demo. The T-SAE is
half as wide, and is trained on the whole store of the demo: what the base and the three runs' last checkpoints read.
For every budget of tokens: measures on held-out problems, from random weights and from the published SAE.

    python scripts/bench_warm_start.py --to runs/warm-start

Cells are means over seeds (of the published SAE, and of the random weights). The last line is JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

import tsae
from tsae.config import DemoConfig
from tsae.demo import demo_rollouts

MEASURES = ("fve", "fve_high", "smoothness_high", "smoothness_high_robust", "alive")


@dataclass(frozen=True)
class Bench:
    """What is compared."""

    to: Path
    """Folder for rollouts, activations and SAEs."""
    d_sae: int = 256
    k: int = 8
    published_tokens: int = 1_000_000
    """Tokens of the published SAE."""
    tokens: tuple[int, ...] = (30_000, 100_000, 300_000, 1_000_000)
    """Budgets of the T-SAE."""
    seeds: int = 3


def as_published(sae: tsae.TemporalSAE, to: Path) -> tsae.TemporalSAE:
    """The same weights as somebody else's, of which nothing is known but the site."""
    sae.to_saelens(to)
    config = json.loads((to / "cfg.json").read_text())
    config["metadata"] = {"sae_lens_version": "6.54.0", "hook_name": sae.site}
    (to / "cfg.json").write_text(json.dumps(config))
    return tsae.load_sae(to)


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    rollouts = demo_rollouts(DemoConfig(to=bench.to))
    store = tsae.capture(tsae.testbed.series().final(), rollouts, to=bench.to / "activations")
    base = store.subset(readers="base")
    config = tsae.SAEConfig(d_sae=bench.d_sae, k=bench.k)
    plain = replace(config, d_sae=2 * bench.d_sae, groups=(1.0,), temporal_weight=0.0)
    training = tsae.TrainingConfig(tokens=bench.published_tokens, batch_tokens=1024)
    rows: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(bench.seeds):
        one = replace(training, seed=seed)
        trained = tsae.train(base, plain, to=bench.to / f"plain-{seed}", training=replace(one, seed=100 + seed))
        published = as_published(trained, bench.to / f"published-{seed}")
        for n in bench.tokens:
            for name, beginning in (("random weights", None), ("published", published)):
                found = tsae.train(
                    store,
                    config,
                    init_from=beginning,
                    to=bench.to / f"{n}-{name.replace(' ', '-')}-{seed}",
                    training=replace(one, tokens=n),
                )
                measured = tsae.evaluate(found, store)
                for measure in MEASURES:
                    rows[n, name][measure].append(getattr(measured, measure))
    print("| tokens | start | " + " | ".join(MEASURES) + " |\n|---|---|" + "---|" * len(MEASURES))
    for (n, name), values in rows.items():
        cells = [f"{np.mean(values[m]):.3f} ({min(values[m]):.3f}–{max(values[m]):.3f})" for m in MEASURES]
        print(f"| {n:,} | {name} | " + " | ".join(cells) + " |")
    print(json.dumps([{"tokens": n, "start": name, **values} for (n, name), values in rows.items()]))


if __name__ == "__main__":
    main()
