"""Count discoveries where there is nothing to find: one checkpoint against itself, or against itself with noise.

    python scripts/check_null.py --weights
    python scripts/check_null.py --features FEATURES --to runs/null-labels

With --features, what the base of an encoding read is split in random halves within problems, and its outcomes are
permuted within problems, --repeats times. At q = .05 a discovery is to be expected in at most a twentieth of all
contrasts: with every discovery false, the false-discovery rate is the chance of any.

With --weights, on the testbed's base and its three runs, with an SAE trained as in the demo: checkpoints of base
weights and Gaussian noise of 1 %, 10 % and 100 % of each run's update norm, tensor by tensor, --seeds times each. They
read the base's trajectories (same_trajectories) and sample their own with the base's seed (total). The last line is
JSON: ratio, the largest share of tested features that 1 % and 10 % noise moves, over runs, seeds and both parts; noise,
that share for every size and part; real, the features that each run moved in total.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import tyro

import tsae
from tsae.base.files import write_json
from tsae.checkpoints.drift import update_of
from tsae.config import DemoConfig
from tsae.diff.comparisons import Rows, comparisons, shift_comparisons
from tsae.diff.effects import Contrast, draw, null_counts
from tsae.errors import TsaeError
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

SHARES = (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class CheckNull:
    """Count discoveries where there is nothing to find."""

    to: Path = Path("runs/null")
    """Folder for null.json."""
    features: Path | None = None
    """Folder that `tsae encode` wrote: halves and permuted outcomes of what its base read."""
    repeats: int = 50
    """Halves and permutations."""
    weights: bool = False
    """Noise in the weights of the testbed's base."""
    sae: Path | None = None
    """With --weights, folder that `tsae train` wrote; by default an SAE is trained."""
    problems: int = 30
    """With --weights, problems of each level."""
    seed: int = 0
    """With --weights, of problems, sampling, SAE and noise."""
    seeds: int = 2
    """With --weights, noisy checkpoints of every run and size."""
    samples: int = 6
    """With --weights, responses per problem and checkpoint."""
    config: tsae.DiffConfig = field(default_factory=tsae.DiffConfig)
    """Of the contrasts."""


def main() -> None:
    options = tyro.cli(CheckNull, description=__doc__)
    if not options.weights and options.features is None:
        raise TsaeError("nothing to compare", where="check_null", fix="Give --weights or --features.")
    found = changed_weights(options) if options.weights else relabelled(options, options.features)
    write_json(options.to / "null.json", found)
    print(json.dumps({name: value for name, value in found.items() if name != "rows" or not options.weights}))


def relabelled(options: CheckNull, folder: Any) -> dict[str, Any]:
    """Halves of the base's trajectories, and outcomes permuted within problems."""
    features = tsae.FeatureTable.load(folder)
    rows = Rows.of(features, options.config)
    base = features.readers[0]
    found = [
        of
        for of in comparisons(features, rows, options.config)
        if not of.note and of.outcome == "all" and (of.kind == "shift" or of.checkpoint == base)
    ]
    counts = null_counts(rows, found, options.config, options.repeats)
    names = {"shift": "halves", "outcome": "permuted outcomes", "interaction": "… in two bands"}
    table: list[dict[str, Any]] = [
        {"null": names[of.kind], **of.key, "contrasts": options.repeats, "any": any_, "discoveries": mean}
        for of, (mean, any_) in zip(found, counts, strict=True)
    ]
    print(pd.DataFrame(table).to_string(index=False))
    return {"name": "null for labels", "ratio": max(row["any"] for row in table) / options.config.q, "rows": table}


def changed_weights(options: CheckNull) -> dict[str, Any]:
    """What noise in the weights moves, beside what training did."""
    series = tsae.testbed.series().final()
    config = replace(options.config, seed=options.seed, bands=())
    rollouts = tsae.Rollouts.concat([answers(options, checkpoint) for checkpoint in series])
    rows: list[dict[str, Any]] = []
    real = {}
    options.to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.to) as scratch:
        store = tsae.capture(series, rollouts, to=Path(scratch) / "activations")
        demo = DemoConfig()
        training = replace(demo.training, seed=options.seed)
        sae = tsae.TemporalSAE.load(options.sae) if options.sae else tsae.train(store, demo.sae, training=training)
        for contrast in drawn_shifts(tsae.encode(sae, store), config, ("total",)):
            real[series[contrast.of.checkpoint].run] = counted(contrast, config, contrast.of.checkpoint)["moved"]
        for checkpoint in list(series)[1:]:
            update = update_of(checkpoint)
            for number in range(options.seeds):
                seed = 1000 * options.seed + number
                noisy = [update.noisy(checkpoint, i, share=share, seed=seed) for i, share in enumerate(SHARES, 1)]
                readers = tsae.CheckpointSeries((series.base, *noisy))
                read = tsae.Rollouts.concat([answers(options, reader) for reader in readers])
                acts = Path(scratch) / f"{checkpoint.id}-{number}"
                table = tsae.encode(
                    sae, tsae.capture(readers, read, [sae.site], to=acts, progress=False), progress=False
                )
                for contrast in drawn_shifts(table, config, ("same_trajectories", "total")):
                    share = SHARES[table.readers.index(contrast.of.checkpoint) - 1]
                    found = counted(contrast, config, f"{checkpoint.id} + {share:.0%}, {number}")
                    rows.append(
                        {"run": checkpoint.run, "seed": number, "share": share, "part": contrast.of.part, **found}
                    )
    largest = pd.DataFrame(rows).groupby(["share", "part"]).ratio.max()
    return {
        "name": "null for changed weights",
        "ratio": float(largest[largest.index.get_level_values("share") < 1].max()),
        "noise": {f"{share:.0%}": largest[share].to_dict() for share in SHARES},
        "real": real,
        "seed": options.seed,
        "seeds": options.seeds,
        "trajectories": len(rollouts.where(policy=series.base.id)),
        "minimum_effect": config.minimum_effect,
        "rows": rows,
    }


def answers(options: CheckNull, checkpoint: tsae.Checkpoint) -> tsae.Rollouts:
    """To the testbed's problems; all checkpoints sample with the same seed."""
    problems = tsae.testbed.eval_problems(options.problems, seed=options.seed)
    sampling = tsae.SamplingConfig(
        n_samples=options.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=options.seed
    )
    return tsae.sample(checkpoint, problems, sampling, verify=tsae.testbed.verify, progress=False)


def drawn_shifts(table: tsae.FeatureTable, config: tsae.DiffConfig, parts: tuple[str, ...]) -> Iterator[Contrast]:
    rows = Rows.of(table, config)
    for of in shift_comparisons(table, rows, config):
        if of.part in parts and of.outcome == "all":
            yield draw(rows, of, config)


def counted(contrast: Contrast, config: tsae.DiffConfig, who: str) -> dict[str, Any]:
    """Features that moved, features tested, and the median of their |Δ|."""
    if contrast.inference is None:
        raise TsaeError(contrast.note, where="check_null", fix="Give more problems.")
    moved, tested = int((contrast.inference.q <= config.q).sum()), len(contrast.feature)
    size = float(np.median(np.abs(contrast.inference.delta)))
    print(f"{who:<22}{contrast.of.part:<20}{moved:>5} of {tested:>4} moved; median |Δ| {size:.4f}", flush=True)
    return {"moved": moved, "tested": tested, "ratio": moved / max(tested, 1), "size": size}


if __name__ == "__main__":
    main()
