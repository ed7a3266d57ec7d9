"""Count discoveries where there is nothing to find: one checkpoint against itself.

    python scripts/check_null.py --checkpoint MODEL --sae SAE --problems problems.jsonl --to runs/null
    python scripts/check_null.py --checkpoint MODEL --sae SAE --features FEATURES --to runs/null-labels

With --problems, the checkpoint answers them with one seed as *base* and with another as *again*, --pairs times, and the
total shift of again is tested as every other. With --features, what the checkpoint read anyway (as base) is split in
random halves within problems, and its outcomes are permuted within problems, --repeats times. At q = .05 a discovery
is to be expected in at most a twentieth of all contrasts: with every discovery false, the false-discovery rate is the
chance of any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import tsae
from tsae.diff.contrasts import Rows, comparisons, draw, shift_comparisons
from tsae.diff.null import null_counts
from tsae.errors import TsaeError
from tsae.provenance import write_json
from tsae.rollouts.checking import find_verifier
from tsae.rollouts.problems import read_problems


@dataclass(frozen=True)
class CheckNull:
    """Count discoveries where there is nothing to find."""

    checkpoint: str
    """The model: a folder, a .gguf file or a Hugging Face id."""
    sae: Path
    """Folder that `tsae train` wrote."""
    to: Path
    """Folder for rollouts, activations and null.json; what is there is not made again."""
    problems: Path | None = None
    """JSON lines of id, prompt, answer: answered with different seeds."""
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
    if options.problems is None and options.features is None:
        raise TsaeError("nothing to compare", where="check_null", fix="Give --problems or --features.")
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
    first = options.sampling.seed + 2 * pair
    seeds = {"base": first, "again": first + 1}
    series = tsae.CheckpointSeries(
        tuple(tsae.Checkpoint(id, options.checkpoint, run=None if id == "base" else id) for id in seeds)
    )
    parts = []
    for id, seed in seeds.items():
        drawn = sampled(options, series.base, seed)
        parts.append(drawn.with_column("policy", [id] * len(drawn)))
    rollouts = tsae.Rollouts.concat(parts)
    sae = tsae.TemporalSAE.load(options.sae)
    acts = options.to / f"activations-{first}"
    store = tsae.capture(series, rollouts, [sae.site], to=acts, config=tsae.CaptureConfig(plan="own"))
    features = tsae.encode(sae, store)
    rows = Rows.of(features, options.config)
    contrast = draw(rows, next(shift_comparisons(features, rows, options.config)), options.config)
    if contrast.inference is None:
        raise TsaeError(contrast.note, where="check_null", fix="Give more problems.")
    return {
        "null": "other seed",
        "seeds": list(seeds.values()),
        "n_problems": contrast.of.n_problems,
        "tested": len(contrast.feature),
        "discoveries": int((contrast.inference.q <= options.config.q).sum()),
        "p_below_.05": float((contrast.inference.p <= 0.05).mean()),
    }


def sampled(options: CheckNull, checkpoint: tsae.Checkpoint, seed: int) -> tsae.Rollouts:
    path = options.to / f"seed-{seed}.parquet"
    if not path.is_file():
        assert options.problems is not None
        drawn = tsae.sample(
            checkpoint,
            read_problems(options.problems),
            replace(options.sampling, seed=seed),
            verify=find_verifier(options.verifier),
        )
        drawn.write(path)
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
        {
            "null": names[of.kind],
            **of.key,
            "contrasts": options.repeats,
            "any": any_,
            "discoveries": mean,
        }
        for of, (mean, any_) in zip(found, counts, strict=True)
    ]


if __name__ == "__main__":
    main()
