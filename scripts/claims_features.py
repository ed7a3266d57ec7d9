"""Claims e, f and g: feature families of the study's easy, medium and hard runs, and whether the dictionary matters.

Reads the weights that `scripts/claims_study.py` left in --out, and adds one record, features-0.json:

1. Every final checkpoint and the base answer the same fresh problems. One dictionary of each kind is trained on what
   the base computes while it reads all of them, and every other checkpoint its own.
2. Features get families by the ground-truth annotation of tokens: direct answer, basic computation, deliberation
   (`tsae.diff.families`). Nothing says which run strengthens which.
3. A trajectory's score is the mean of a family's features, each in its standard deviation over the base's trajectories.
   A seed's shift is the mean over problems of run − base, in the deviation of the base's scores. Its outcome effect is
   the mean over problems of successes − failures, among the run's own trajectories.
4. With the T-SAE, a family's sixteen most active features are ablated while the run answers, beside random features of
   the same firing rate and size.

Dictionaries: the T-SAE; a Matryoshka SAE (no temporal loss); a BatchTopK SAE (one group, too); principal components and
random directions, both signs of each, with thresholds for the same number of active features; and "difference": the
mean over a family's tokens − the mean over all, in the base: a probe without a dictionary.

    python scripts/claims_features.py --out runs/claims
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims_study import record_of, weights_of
from organism.examining import rounded

import tsae
from tsae.base.files import write_json
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.rows import Rows
from tsae.diff.families import NO_FAMILY, assign_families
from tsae.features.annotations import annotate_tokens
from tsae.features.feature_table import FeatureTable
from tsae.sae.fitting.threshold import calibrate
from tsae.testbed.chains import LEVELS, generate_problems
from tsae.testbed.classes import FAMILIES, token_classes, with_behaviours
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS, VOCABULARY

RUNS = ("easy", "medium", "hard")
SITE = "blocks.1.hook_resid_post"
SEED = 3000
D_SAE, K = 256, 8
CONFIGS = {
    "T-SAE": tsae.SAEConfig(d_sae=D_SAE, k=K),
    "Matryoshka": tsae.SAEConfig(d_sae=D_SAE, k=K, temporal_weight=0.0),
    "BatchTopK": tsae.SAEConfig(d_sae=D_SAE, k=K, temporal_weight=0.0, groups=(1.0,)),
}
ABLATIONS = {
    "easy": (("direct-answer",), "direct_answer"),
    "medium": (("basic-computation", "deliberation"), "accuracy"),
    "hard": (("deliberation",), "accuracy"),
}
"""What is ablated in a run, and what that should lower."""


ABLATED = 16
"""Features of a family that are ablated: the most active ones. Of more, too few others are left to compare with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--seeds", type=int, default=5, help="of the runs (default: 5)")
    parser.add_argument("--problems", type=int, default=40, help="of each level (default: 40)")
    parser.add_argument("--tokens", type=int, default=600_000, help="that each SAE is trained on (default: 600,000)")
    parser.add_argument("--random", type=int, default=6, help="sets of random features in an ablation (default: 6)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    started = time.monotonic()
    to = options.out / "features"
    series = series_of(options.out, options.seeds)
    rollouts = sampled(series, options.problems, to / "rollouts.parquet")
    store = tsae.capture(series, rollouts, [SITE], to=to / "activations", config=tsae.CaptureConfig(plan="paired"))
    found: dict[str, Any] = {}
    for name, sae in dictionaries(store, to, options.tokens).items():
        features = tsae.encode(sae, store, to=to / f"codes-{name}")
        family = families_of(features)
        found[name] = {
            "features": {each: int((family == each).sum()) for each in (*FAMILIES, NO_FAMILY)},
            "shifts": shifts(features, family, series),
        }
        if name == "T-SAE":
            found[name]["ablations"] = ablations(series, sae, features, family, options, to)
        print(name, found[name]["features"], flush=True)
    record = {"arm": "features", "seed": 0, "dictionaries": found, "seconds": time.monotonic() - started}
    write_json(record_of(options.out, "features", 0), rounded(record))


def series_of(out: Path, seeds: int) -> CheckpointSeries:
    base = replace(tsae.testbed.series().base)
    runs = [
        Checkpoint(f"{run}-{seed}", str(weights_of(out, run, seed)), run=f"{run}-{seed}", step=50, trained_on=run)
        for seed in range(seeds)
        for run in RUNS
    ]
    return CheckpointSeries((base, *runs), name="claims")


def sampled(series: CheckpointSeries, n: int, file: Path) -> tsae.Rollouts:
    """Four responses of every checkpoint to the same problems; a problem's band is its level."""
    if file.is_file():
        return tsae.Rollouts.read(file)
    problems = [problem for level in LEVELS for problem in generate_problems(level, n, SEED)]
    sampling = tsae.SamplingConfig(n_samples=4, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=512, seed=SEED)
    found = tsae.Rollouts.concat(
        [tsae.sample(each, problems, sampling, verify=tsae.testbed.verify, progress=False) for each in series]
    )
    level = {problem.id: problem.level for problem in problems}
    found = found.with_column("band", [level[id] for id in found.table["problem_id"].to_pylist()])
    found = with_behaviours(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    found.write(file)
    return found


def dictionaries(store: tsae.ActivationStore, to: Path, tokens: int) -> dict[str, tsae.TemporalSAE]:
    """Every dictionary by its name."""
    training = tsae.TrainingConfig(tokens=tokens, batch_tokens=1024)
    found = {
        name: tsae.train(store, config, to=to / f"sae-{name}", training=training) for name, config in CONFIGS.items()
    }
    x, code, names = base_states(store)
    centred = x - x.mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.T
    random = torch.nn.functional.normalize(
        torch.randn(D_SAE // 2, x.shape[1], generator=torch.Generator().manual_seed(SEED)), dim=-1
    )
    found["PCA"] = from_directions(torch.cat([components, -components]), x, K)
    found["random"] = from_directions(torch.cat([random, -random]), x, K)
    means = torch.stack(
        [
            centred[np.isin(code, [names.index(c) for c in classes if c in names])].mean(0)
            for classes in FAMILIES.values()
        ]
    )
    found["difference"] = from_directions(torch.nn.functional.normalize(means, dim=-1), x, 1)
    return found


def base_states(store: tsae.ActivationStore) -> tuple[torch.Tensor, np.ndarray, list[str]]:
    """(n, d_model) states of the base on its own responses, and each token's class: (n,) codes and their names."""
    policies = np.array(store.rollouts.table["policy"].to_pylist())
    prompts, responses = (store.rollouts.table[name].to_pylist() for name in ("prompt", "response_ids"))
    states, classes = [], list[str]()
    for shard in store.shards("base"):
        own = np.repeat(policies[shard.trajectory] == "base", np.diff(shard.offsets))
        of_response = shard.token_span(store.rollouts, "response", frozenset())
        rows = np.flatnonzero(own & of_response)
        states.append(torch.from_numpy(np.asarray(shard.read(SITE, rows), dtype=np.float32)))
        for trajectory in shard.trajectory:
            if policies[trajectory] == "base":
                classes += token_classes(prompts[trajectory], [VOCABULARY[i] for i in responses[trajectory]])
    x = torch.cat(states)
    if len(x) != len(classes):
        raise tsae.TsaeError(f"{len(x)} states and {len(classes)} classes", where=SITE)
    names = sorted(set(classes))
    return x, np.array([names.index(name) for name in classes]), names


def from_directions(directions: torch.Tensor, x: torch.Tensor, k: int) -> tsae.TemporalSAE:
    """A dictionary with these unit directions, (n, d_model), and a threshold with which k are active a token."""
    config = tsae.SAEConfig(d_sae=len(directions), k=k, groups=(1.0,), temporal_weight=0.0)
    sae = tsae.TemporalSAE(x.shape[1], config, site=SITE)
    with torch.no_grad():
        sae.W_dec.copy_(directions)
        sae.W_enc.copy_(directions.T)
        sae.b_dec.copy_(x.mean(0))
    calibrate(sae, x)
    return sae


def families_of(features: FeatureTable) -> np.ndarray:
    """(n_features,) the family of each."""
    classes = annotate_tokens(features, token_classes, VOCABULARY)
    return assign_families(features, classes, FAMILIES, DiffConfig(seed=SEED)).family.to_numpy()


def shifts(features: FeatureTable, family: np.ndarray, series: CheckpointSeries) -> dict[str, Any]:
    """By run and family, seed by seed: the shift over all problems, the outcome effect on the run's own band, and the
    shift while the run reads the base's responses: what it does not owe to another choice of format."""
    rows = Rows.of(features, DiffConfig(min_problems=2))
    values = np.asarray(rows.values[:, :].todense() if hasattr(rows.values[:, :], "todense") else rows.values[:, :])
    base = rows.by_reader["base", "base"]
    deviation = values[base].std(0, ddof=1)
    found: dict[str, Any] = {}
    for name in FAMILIES:
        chosen = (family == name) & (deviation > 0)
        if not chosen.any():
            continue
        score = (values[:, chosen] / deviation[chosen]).mean(1)
        unit = score[base].std(ddof=1)
        for checkpoint in series:
            if checkpoint.is_base:
                continue
            own = rows.by_reader[checkpoint.id, checkpoint.id]
            change = by_problem(score, own, rows.problem) - by_problem(score, base, rows.problem)
            inside = own[rows.band[own] == checkpoint.trained_on]
            right, wrong = (inside[rows.outcome[inside] == outcome] for outcome in ("success", "failure"))
            effect = by_problem(score, right, rows.problem) - by_problem(score, wrong, rows.problem)
            reading = rows.by_reader[checkpoint.id, "base"]
            same = by_problem(score, reading, rows.problem) - by_problem(score, base, rows.problem)
            cell = found.setdefault(str(checkpoint.trained_on), {}).setdefault(
                name, {"shift": [], "outcome": [], "same_texts": []}
            )
            cell["same_texts"].append(float(np.nanmean(same) / unit))
            cell["shift"].append(float(np.nanmean(change) / unit))
            cell["outcome"].append(float(np.nanmean(effect) / unit) if np.isfinite(effect).any() else float("nan"))
    return found


def by_problem(score: np.ndarray, rows: np.ndarray, problem: np.ndarray) -> np.ndarray:
    """(n_problems,) mean scores, NaN where there are no rows."""
    n = np.bincount(problem[rows], minlength=problem.max() + 1)
    total = np.bincount(problem[rows], weights=score[rows], minlength=problem.max() + 1)
    return np.divide(total, n, out=np.full(len(n), np.nan), where=n > 0)


def ablations(
    series: CheckpointSeries,
    sae: tsae.TemporalSAE,
    features: FeatureTable,
    family: np.ndarray,
    options: argparse.Namespace,
    to: Path,
) -> dict[str, list[float]]:
    """By run, seed by seed: how much more than random features the ablation lowers what it should."""
    found: dict[str, list[float]] = {}
    for checkpoint in series:
        if checkpoint.is_base:
            continue
        names, behaviour = ABLATIONS[str(checkpoint.trained_on)]
        means = features.row_means("response")[features.rows(reader=checkpoint.id, policy=checkpoint.id)]
        strength = np.where(np.isin(family, names), np.asarray(means.mean(0)).ravel(), 0.0)
        chosen = [int(i) for i in np.argsort(-strength, kind="stable")[:ABLATED] if strength[i] > 0]
        sampling = tsae.SamplingConfig(n_samples=2, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=SEED + 1)
        problems = generate_problems(str(checkpoint.trained_on), options.problems, SEED + 1)
        result = tsae.intervene(
            checkpoint,
            sae,
            features,
            chosen,
            tsae.InterventionConfig(mode="ablate", n_random=options.random, sampling=sampling),
            problems=problems,
            verify=tsae.testbed.verify,
            describe=with_behaviours,
            progress=False,
        )
        row = result.table(condition="features", band="all", behaviour=behaviour).iloc[0]
        found.setdefault(str(checkpoint.trained_on), []).append(-float(row.beyond_random))
        print(checkpoint.id, len(chosen), behaviour, row["mean"], row.change, row.beyond_random, flush=True)
    return found


if __name__ == "__main__":
    main()
