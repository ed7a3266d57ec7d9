"""Crosscoder, T-SAE and Matryoshka on one question: which directions does the run have that the base lacks?

All are trained by one trainer on the same tokens: the crosscoder on both checkpoints side by side, the others on the
pooled activations of both. Four worlds:

- planted: sparse sums of known directions, of which some are new, lost, weaker in the base, or turned in the run;
- same: nothing is planted, the checkpoints differ by noise;
- testbed: the shipped base's activations; a copy has directions added on chosen tokens (new, lost, weaker);
- easy-150, medium-150, hard-150: the shipped runs, whose truth is not known.

    python scripts/bench_crosscoder.py --to runs/crosscoder

A latent says "new" (and the reverse "lost") by its kind of dictionary:

- crosscoder, norm: relative decoder norm at least .9;
- crosscoder: besides, latent scaling with its intervals (`tsae.crosscoder_changes`);
- T-SAE, Matryoshka: at least .9 of its activation is in the run, as both read the same tokens.

In each case it fires in at least five of the held-out problems. A planted direction is found where such a latent's
decoder row has a cosine of at least .8 with it. A false one is a latent that says so without such a direction.
`moved` is what `tsae diff` says of the same T-SAE: features whose use changed by more than the minimum effect.

The last line is JSON: `ratio` is the share of the planted new and lost directions that the crosscoder does not find,
plus its false ones by the number planted; 0 is best.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from bench_quality import testbed_store
from statements.pairs import PlantedPair, paired_store, planted_pair

import tsae
from tsae.sae.crosscoder import FEWEST_PROBLEMS, ONE_SIDED
from tsae.sae.quality.evaluation import counted_texts

FOUND = 0.8
Said = dict[str, np.ndarray]
"""Rows (n, d_model) of the latents that say new, and of those that say lost."""


@dataclass(frozen=True)
class Bench:
    """What is compared."""

    to: Path
    """Folder for stores and dictionaries; an interrupted bench goes on."""
    steps: int = 1000
    """Steps of a training, of 1,024 tokens (planted: 256)."""
    seeds: int = 3


def kinds(d_sae: int, k: int) -> dict[str, tsae.SAEConfig]:
    return {
        "crosscoder": tsae.SAEConfig(d_sae=d_sae, k=k, groups=(1.0,), temporal_weight=0.0),
        "T-SAE": tsae.SAEConfig(d_sae=d_sae, k=k),
        "Matryoshka": tsae.SAEConfig(d_sae=d_sae, k=k, temporal_weight=0.0),
    }


def testbed_world(folder: Path, store: tsae.ActivationStore, seed: int) -> PlantedPair:
    """The base's reading of its own trajectories, and a copy with directions added on tokens of one id each."""
    rng = np.random.default_rng([seed, 5])
    shards = list(store.shards(store.readers[0]))
    site, policy = store.sites[0], np.array(store.rollouts.table["policy"].to_pylist())
    ids = store.rollouts.table["problem_id"].to_pylist()
    texts, tokens, problems = [], [], []
    for shard in shards:
        for i, row in enumerate(shard.trajectory.tolist()):
            if policy[row] == store.readers[0]:
                part = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
                texts.append(shard.read(site, part))
                tokens.append(np.asarray(shard.token_ids[part]))
                problems.append(ids[row])
    every, ids_of = np.concatenate(texts), np.concatenate(tokens)
    size = 0.5 * float(np.median(np.linalg.norm(every - every.mean(0), axis=1)))
    frequent = np.argsort(-np.bincount(ids_of))[:10]  # the digits and operators, on 3 to 10 % of the tokens each
    chosen = rng.permutation(np.repeat(frequent, 2))[:12]
    rows = rng.normal(size=(12, every.shape[1]))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    names = {"new": slice(0, 4), "lost": slice(4, 8), "weaker": slice(8, 12)}
    scale = np.ones((2, 12))
    scale[0, :4], scale[1, 4:8], scale[0, 8:] = 0.0, 0.0, 1 / 3
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for x, of in zip(texts, tokens, strict=True):
        # On every other such token: a direction of all of them would be part of the token's own feature.
        active = (of[:, None] == chosen) & (rng.random((len(of), 12)) < 0.5)
        amplitude = active * size * rng.uniform(0.7, 1.3, active.shape)
        for side in (0, 1):
            sides[side].append((x + (amplitude * scale[side]) @ rows).astype(np.float32))
    made = paired_store(folder, {"base": sides[0], "run": sides[1]}, problems=problems, shard_size=400)
    return PlantedPair(made, {name: rows[part] for name, part in names.items()})


@torch.no_grad()
def one_sided(sae: tsae.TemporalSAE, pair: tsae.Pair) -> Said:
    """Features of a pooled SAE of which nearly all activation is on one side, on held-out problems."""
    windows = pair.windows(sae.site, held_out=True, partner=None)
    ids, width = pair.rollouts.table["problem_id"].to_pylist(), sae.d_model
    total = np.zeros((2, sae.config.d_sae))
    fired: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(sae.config.d_sae, bool))
    for text in counted_texts(windows):
        x = torch.from_numpy(windows.shards[text.shard].read(sae.site, text.tokens))
        for side in (0, 1):
            codes = sae.encode(x[:, side * width : (side + 1) * width]).numpy()
            total[side] += codes.sum(0)
            fired[ids[text.row]] |= (codes > 0).any(0)
    often = np.sum(list(fired.values()), axis=0) >= FEWEST_PROBLEMS
    share = total[1] / np.maximum(total.sum(0), 1e-12)
    rows = sae.W_dec.numpy()
    return {"new": rows[often & (share >= ONE_SIDED)], "lost": rows[often & (share <= 1 - ONE_SIDED)]}


def said_by(sae: tsae.TemporalSAE, pair: tsae.Pair) -> dict[str, Said]:
    if not isinstance(sae, tsae.Crosscoder):
        return {"": one_sided(sae, pair)}
    table = tsae.crosscoder_changes(sae, pair).latents
    base, run = (rows.numpy() for rows in sae.decoders)
    often = table.n_problems >= FEWEST_PROBLEMS
    by_norm = {
        "new": run[table.latent[often & (table.relative_norm >= ONE_SIDED)]],
        "lost": base[table.latent[often & (table.relative_norm <= 1 - ONE_SIDED)]],
    }
    judged = {"new": run[table.latent[table.verdict == "new"]], "lost": base[table.latent[table.verdict == "lost"]]}
    return {", norm": by_norm, "": judged}


def scores(said: Said, directions: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How many planted directions are found, and how many latents say so falsely; of these, which are shared ones."""
    found: dict[str, float] = {}
    for kind in ("new", "lost"):
        rows = said[kind] / np.maximum(np.linalg.norm(said[kind], axis=1, keepdims=True), 1e-12)
        found[f"says {kind}"] = len(rows)
        if not directions:
            continue
        near = {name: rows @ planted.T for name, planted in directions.items()}
        found[f"{kind} found"] = int((near[kind].max(0, initial=0) >= FOUND).sum())
        false = near[kind].max(1, initial=0) < FOUND
        found[f"false {kind}"] = int(false.sum())
        for name in ("weaker", "turned"):
            if name in near:
                found[f"false {kind}, {name}"] = int((false & (near[name].max(1, initial=0) >= FOUND)).sum())
    return found


def moved(sae: tsae.TemporalSAE, store: tsae.ActivationStore, run: str) -> dict[str, float]:
    """What `tsae diff` says of the same dictionary."""
    part = store.subset(readers=(store.readers[0], run))
    diff = tsae.feature_diff(tsae.encode(sae, part, progress=False), tsae.DiffConfig(n_bootstrap=500), progress=False)
    table = diff.table(kind="shift", part="same_trajectories", band="all", outcome="all", checkpoint=run)
    return {"moved": int(table.moved.sum()), "tested": len(table)}


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    shipped = testbed_store(bench.to)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(bench.seeds):
        folder = bench.to / f"planted-{seed}"
        worlds = {
            "planted": planted_pair(folder / "planted", n_problems=200, seed=seed),
            "same": planted_pair(folder / "same", n_problems=200, same=True, seed=seed),
            "testbed": testbed_world(folder / "testbed", shipped, seed),
            **{run: PlantedPair(shipped, {}) for run in shipped.readers[1:]},
        }
        for world, of in worlds.items():
            run = "run" if "run" in of.store.readers else world
            pair, small = tsae.Pair(of.store, run), world in ("planted", "same")
            batch = 256 if small else 1024
            training = tsae.TrainingConfig(
                tokens=bench.steps * batch, batch_tokens=batch, seed=seed, learning_rate=3e-3 if small else None
            )
            directions = {} if world == "same" else of.directions
            for kind, config in kinds(*((96, 5) if small else (256, 8))).items():
                pooled = of.store.subset(readers=(of.store.readers[0], run))
                source = pair if kind == "crosscoder" else pooled
                to = bench.to / f"{kind}-{world}-{seed}"
                sae = tsae.train(source, config, to=to, training=training, progress=False)
                row = figures[f"{world}: {kind}"]
                for suffix, said in said_by(sae, pair).items():
                    for name, value in scores(said, directions).items():
                        figures[f"{world}: {kind}{suffix}"][name].append(value)
                row["fve"].append(tsae.evaluate(sae, source).fve)
                if kind != "crosscoder":
                    for name, value in moved(sae, of.store, run).items():
                        row[name].append(value)
            print(f"seed {seed}, {world}: done", flush=True)
    for name, row in figures.items():
        cells = "; ".join(f"{key} {' '.join(f'{v:.3g}' for v in values)}" for key, values in row.items())
        print(f"{name:<34}{cells}")
    planted = [figures[f"{world}: crosscoder"] for world in ("planted", "testbed")]
    wanted = 8 * bench.seeds * len(planted)
    found = sum(sum(row[f"{kind} found"]) for row in planted for kind in ("new", "lost"))
    false = sum(sum(row[f"false {kind}"]) for row in planted for kind in ("new", "lost"))
    print(
        json.dumps(
            {
                "name": "bench_crosscoder",
                "ratio": (wanted - found + false) / wanted,
                "size": {name: str(value) for name, value in vars(bench).items()},
                "figures": {name: dict(row) for name, row in figures.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
