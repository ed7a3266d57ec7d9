"""Count discoveries where there is nothing to find: one checkpoint against itself, or against itself with noise.

    python scripts/check_null.py --weights
    python scripts/check_null.py --checkpoint MODEL --sae SAE --problems problems.jsonl --to runs/null
    python scripts/check_null.py --checkpoint MODEL --sae SAE --features FEATURES --to runs/null-labels

With --problems, the checkpoint answers them with one seed as *base* and with another as *again*, --pairs times, and the
total shift of again is tested as every other. With --features, what the checkpoint read anyway (as base) is split in
random halves within problems, and its outcomes are permuted within problems, --repeats times. At q = .05 a discovery
is to be expected in at most a twentieth of all contrasts: with every discovery false, the false-discovery rate is the
chance of any.

With --weights, on the testbed's base and its three runs, with an SAE trained as in the demo: checkpoints of base
weights and Gaussian noise of 1 %, 10 % and 100 % of each run's update norm, tensor by tensor, --seeds times each. They
read the base's trajectories (same_trajectories) and sample their own with the base's seed (total). The last line is
JSON: ratio, the largest share of tested features that 1 % and 10 % noise moves, over runs, seeds and both parts; noise,
that share for every size and part; real, the features that each run moved in total.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import tyro

import tsae
from tsae.base.artefact import versions
from tsae.base.files import read_object, write_json
from tsae.checkpoints.drift import Update, update_of
from tsae.config import DemoConfig
from tsae.diff.comparisons import Rows, comparisons, shift_comparisons
from tsae.diff.effects import Contrast, draw, null_counts
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem, read_problems
from tsae.rollouts.rewards import find_verifier
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

SHARES = (0.01, 0.1, 1.0)
LEVEL = 30


@dataclass(frozen=True)
class CheckNull:
    """Count discoveries where there is nothing to find."""

    checkpoint: str | None = None
    """The model: a folder, a .gguf file or a Hugging Face id."""
    sae: Path | None = None
    """Folder that `tsae train` wrote; with --weights by default one is trained."""
    to: Path = Path("runs/null")
    """Folder for rollouts, activations and null.json; what is there is not made again."""
    problems: int | Path | None = None
    """JSON lines of id, prompt, answer: answered with different seeds. With --weights, problems of each level; 30 by
    default."""
    weights: bool = False
    """Noise in the weights of the testbed's base."""
    seed: int = 0
    """With --weights, of problems, sampling, SAE and noise."""
    seeds: int = 2
    """With --weights, noisy checkpoints of every run and size."""
    samples: int = 6
    """With --weights, responses per problem and checkpoint."""
    pairs: int = 1
    """Pairs of seeds."""
    features: Path | None = None
    """Folder that `tsae encode` wrote: halves and permuted outcomes of what its base read."""
    repeats: int = 50
    """Halves and permutations."""
    verifier: str = "last_number"
    """Of the answers."""
    config: tsae.DiffConfig = field(default_factory=tsae.DiffConfig)
    """Of the contrasts."""
    sampling: tsae.SamplingConfig = field(default_factory=lambda: tsae.SamplingConfig(n_samples=4, max_new_tokens=96))
    """Of the answers; its seed is the first."""


def main() -> None:
    options = tyro.cli(CheckNull, description=__doc__)
    if options.weights:
        print(json.dumps(changed_weights(options)))
        return
    if options.problems is None and options.features is None:
        raise TsaeError("nothing to compare", where="check_null", fix="Give --weights, --problems or --features.")
    if options.checkpoint is None or options.sae is None:
        raise TsaeError("no checkpoint or no SAE", where="check_null", fix="Give --checkpoint and --sae.")
    found: list[dict[str, Any]] = []
    if options.problems is not None:
        for pair in range(options.pairs):
            found.append(seeds_apart(options, pair))
            print(json.dumps(found[-1]), flush=True)
        found = [together(found)]
    if options.features is not None:
        found += relabelled(options)
    print(f"{'nothing to find':<22}{'contrasts':>10}{'features':>10}{'with any discovery':>20}{'discoveries each':>18}")
    for row in found:
        print(
            f"{row['null']:<22}{row['contrasts']:>10}{row['tested']:>10}{row['any']:>20.3f}{row['discoveries']:>18.3f}"
        )
    write_json(options.to / "null.json", {"rows": found})
    print(json.dumps(found))


def seeds_apart(options: CheckNull, pair: int) -> dict[str, Any]:
    """The shift of a checkpoint that sampled with another seed."""
    assert options.checkpoint is not None
    assert options.sae is not None
    first = options.sampling.seed + 2 * pair
    seeds = {"base": first, "again": first + 1}
    series = tsae.CheckpointSeries(
        tuple(tsae.Checkpoint(id, options.checkpoint, run=None if id == "base" else id) for id in seeds)
    )
    parts = []
    for id, seed in seeds.items():
        assert isinstance(options.problems, Path)
        file, problems = options.to / f"seed-{seed}.parquet", read_problems(options.problems)
        drawn = sampled(
            file, series.base, problems, replace(options.sampling, seed=seed), find_verifier(options.verifier)
        )
        parts.append(drawn.with_column("policy", [id] * len(drawn)))
    rollouts = tsae.Rollouts.concat(parts)
    sae = tsae.TemporalSAE.load(options.sae)
    acts = options.to / f"activations-{first}"
    store = tsae.capture(series, rollouts, [sae.site], to=acts, config=tsae.CaptureConfig(plan="own"))
    features = tsae.encode(sae, store)
    contrast = next(drawn_shifts(features, options.config, ("total",)))
    counted(contrast, options.config)
    assert contrast.inference is not None
    return {
        "null": "other seed",
        "seeds": list(seeds.values()),
        "n_problems": contrast.of.n_problems,
        "tested": len(contrast.feature),
        "discoveries": int((contrast.inference.q <= options.config.q).sum()),
        "p_below_.05": float((contrast.inference.p <= 0.05).mean()),
    }


def sampled(
    path: Path,
    checkpoint: tsae.Checkpoint,
    problems: Sequence[Problem],
    sampling: tsae.SamplingConfig,
    verify: Callable[[str, str], bool],
) -> tsae.Rollouts:
    """The answers in a file, which is made where it is not there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        tsae.sample(checkpoint, problems, sampling, verify=verify).write(path)
    return tsae.Rollouts.read(path)


def together(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    counts = np.array([pair["discoveries"] for pair in pairs])
    return {
        "null": "other seed",
        "contrasts": len(pairs),
        "tested": int(np.mean([pair["tested"] for pair in pairs])),
        "any": float((counts > 0).mean()),
        "discoveries": float(counts.mean()),
        "p_below_.05": float(np.mean([pair["p_below_.05"] for pair in pairs])),
    }


def relabelled(options: CheckNull) -> list[dict[str, Any]]:
    """Halves of the base's trajectories, and outcomes permuted within problems."""
    assert options.features is not None
    features = tsae.FeatureTable.load(options.features)
    rows = Rows.of(features, options.config)
    base = features.readers[0]
    found = [
        of
        for of in comparisons(features, rows, options.config)
        if not of.note and of.outcome == "all" and (of.kind == "shift" or of.checkpoint == base)
    ]
    counts = null_counts(rows, found, options.config, options.repeats)
    names = {"shift": "halves", "outcome": "permuted outcomes", "interaction": "… in two bands"}
    return [
        {"null": names[of.kind], **of.key, "contrasts": options.repeats, "any": any_, "discoveries": mean}
        for of, (mean, any_) in zip(found, counts, strict=True)
    ]


def changed_weights(options: CheckNull) -> dict[str, Any]:
    """What noise in the weights moves, beside what training did."""
    stamp = {name: getattr(options, name) for name in ("seed", "samples", "sae")}
    stamp |= {"problems": options.problems or LEVEL, "versions": versions()}
    asked, record = {name: str(value) for name, value in stamp.items()}, options.to / "weights.json"
    if record.is_file() and read_object(record, "Remove it.") != asked:
        raise TsaeError("holds a check of other settings or versions", where=options.to, fix="Give another --to.")
    write_json(record, asked)
    series = tsae.testbed.series().final()
    sae, features = testbed_features(options, series)
    config = replace(options.config, seed=options.seed, bands=())
    real = {}
    for contrast in drawn_shifts(features, config, ("total",)):
        moved, tested, size = counted(contrast, config)
        real[series[contrast.of.checkpoint].run] = moved
        print(f"{contrast.of.checkpoint:<22}{'total':<20}{moved:>5} of {tested:>4} moved; median |Δ| {size:.4f}")
    rows: list[dict[str, Any]] = []
    for checkpoint in list(series)[1:]:
        update = update_of(checkpoint)
        for number in range(options.seeds):
            table = noisy_features(options, series, checkpoint, update, sae, number)
            for contrast in drawn_shifts(table, config, ("same_trajectories", "total")):
                moved, tested, size = counted(contrast, config)
                share = SHARES[table.readers.index(contrast.of.checkpoint) - 1]
                rows.append({"run": checkpoint.run, "seed": number, "share": share, "part": contrast.of.part})
                rows[-1] |= {"moved": moved, "tested": tested, "ratio": moved / max(tested, 1), "size": size}
                who = f"{checkpoint.id} + {share:.0%}, {number}"
                print(
                    f"{who:<22}{contrast.of.part:<20}{moved:>5} of {tested:>4} moved; median |Δ| {size:.4f}", flush=True
                )
    found = pd.DataFrame(rows)
    largest = found.groupby(["share", "part"]).ratio.max()
    result = {
        "name": "null for changed weights",
        "ratio": float(largest[largest.index.get_level_values("share") < 1].max()),
        "noise": {f"{share:.0%}": largest[share].to_dict() for share in SHARES},
        "real": real,
        "seed": options.seed,
        "seeds": options.seeds,
        "trajectories": len(features.rollouts.where(policy=series.base.id)),
        "minimum_effect": config.minimum_effect,
    }
    write_json(options.to / "null.json", {**result, "rows": rows})
    return result


def testbed_features(options: CheckNull, series: tsae.CheckpointSeries) -> tuple[tsae.TemporalSAE, tsae.FeatureTable]:
    """An SAE trained as in the demo, and its codes of what the base and the runs sampled."""
    rollouts = tsae.Rollouts.concat([answers(options, checkpoint, checkpoint.id) for checkpoint in series])
    folder = options.sae or options.to / "sae"
    if not (options.to / "features" / "run.json").is_file():
        store = tsae.capture(series, rollouts, to=options.to / "activations")
        if options.sae is None:
            demo = DemoConfig()
            tsae.train(store, demo.sae, to=folder, training=replace(demo.training, seed=options.seed))
        tsae.encode(folder, store, to=options.to / "features")
    return tsae.TemporalSAE.load(folder), tsae.FeatureTable.load(options.to / "features")


def noisy_features(
    options: CheckNull,
    series: tsae.CheckpointSeries,
    checkpoint: tsae.Checkpoint,
    update: Update,
    sae: tsae.TemporalSAE,
    number: int,
) -> tsae.FeatureTable:
    """What the base with noise of every size reads: the base's trajectories and its own."""
    folder = options.to / f"{checkpoint.id}-{number}"
    if (folder / "features.json").is_file():
        return tsae.FeatureTable.load(folder)
    seed = 1000 * options.seed + number
    noisy = [update.noisy(checkpoint, i, share=share, seed=seed) for i, share in enumerate(SHARES, 1)]
    parts = [answers(options, series.base, series.base.id)]
    parts += [answers(options, reader, f"{reader.id}-{number}") for reader in noisy]
    together = tsae.CheckpointSeries((series.base, *noisy))
    with TemporaryDirectory(dir=options.to) as scratch:
        store = tsae.capture(
            together, tsae.Rollouts.concat(parts), [sae.site], to=Path(scratch) / "acts", progress=False
        )
        return tsae.encode(sae, store, to=folder, progress=False)


def answers(options: CheckNull, checkpoint: tsae.Checkpoint, name: str) -> tsae.Rollouts:
    """To the testbed's problems; all checkpoints sample with the same seed."""
    level = LEVEL if options.problems is None else options.problems
    assert isinstance(level, int)
    problems = tsae.testbed.eval_problems(level, seed=options.seed)
    sampling = tsae.SamplingConfig(
        n_samples=options.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=options.seed
    )
    file = options.to / "rollouts" / f"{name}.parquet"
    return sampled(file, checkpoint, problems, sampling, tsae.testbed.verify)


def drawn_shifts(table: tsae.FeatureTable, config: tsae.DiffConfig, parts: tuple[str, ...]) -> Iterator[Contrast]:
    rows = Rows.of(table, config)
    for of in shift_comparisons(table, rows, config):
        if of.part in parts and of.outcome == "all":
            yield draw(rows, of, config)


def counted(contrast: Contrast, config: tsae.DiffConfig) -> tuple[int, int, float]:
    """Features that moved, features tested, and the median of their |Δ|."""
    if contrast.inference is None:
        raise TsaeError(contrast.note, where="check_null", fix="Give more problems.")
    moved = int((contrast.inference.q <= config.q).sum())
    return moved, len(contrast.feature), float(np.median(np.abs(contrast.inference.delta)))


if __name__ == "__main__":
    main()
