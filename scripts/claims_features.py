"""Claims e, f and g: feature families of the study's easy, medium and hard runs, and whether the dictionary matters.

Reads the weights that `scripts/claims_study.py` left in --out (arms easy, medium, hard), and writes one record there,
features-0.json:

1. Every final checkpoint and the base answer the same fresh problems. One dictionary of each kind is trained on what
   the base computes while it reads all of them, and every other checkpoint the base's responses and its own.
2. Features get families by the ground-truth annotation of tokens: direct answer, basic computation, deliberation
   (`tsae.diff.descriptions`). Nothing says which run strengthens which.
3. A trajectory's score is the mean of a family's features, each in its standard deviation over the base's trajectories.
   A seed's shift is the mean over problems of run − base, in the deviation of the base's scores. Its outcome effect is
   the mean over problems of successes − failures, among the run's own trajectories.
4. With the T-SAE, a family's sixteen most active features are ablated while the run answers, beside random features of
   the same firing rate and size. With "difference" its direction is ablated, beside principal components and random
   directions.

Dictionaries: the T-SAE; a Matryoshka SAE (no temporal loss); a BatchTopK SAE (one group, too); principal components and
random directions, both signs of each, with thresholds for the same number of active features; and "difference": the
mean over a family's tokens − the mean over all, in the base: a probe without a dictionary.

"crosscoder": one of the base and each final checkpoint, on the responses that both read. Its codes, which both share,
give the families. As they do not tell the two readers apart, a reader m has an amount of its own wherever feature i
fires, by the projection of latent scaling (`tsae.sae.crosscoder`):

    a_m = ⟨d, f W_m + error_m⟩ / ‖d‖²     W_m its decoder row for m, d the longer of both rows, f the code

Shifts and outcome effects are of these amounts; "shared" in the record holds those of the codes.

    python scripts/claims_features.py --out runs/claims
    python scripts/claims_features.py --out runs/claims --dictionaries crosscoder    # added to the record that is there
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from claims_study import record_of, weights_of
from organism.examining import rounded

import tsae
from tsae.base.files import write_json
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.comparisons import Rows
from tsae.diff.config import DiffConfig
from tsae.diff.descriptions import NO_FAMILY, assign_families
from tsae.features.contexts import annotate_tokens
from tsae.features.feature_table import FeatureTable
from tsae.sae.training.trainer import calibrate
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
CROSSCODER = "crosscoder"
DICTIONARIES = (*CONFIGS, CROSSCODER, "PCA", "random", "difference")
"""In the order of the table."""
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
    parser.add_argument(
        "--tokens", type=int, default=600_000, help="that each SAE and crosscoder is trained on (default: 600,000)"
    )
    parser.add_argument(
        "--dictionaries",
        nargs="+",
        choices=DICTIONARIES,
        help="these alone, added to the record that is there (default: all, in a new record)",
    )
    parser.add_argument("--random", type=int, default=6, help="sets of random features in an ablation (default: 6)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    started = time.monotonic()
    to = options.out / "features"
    series = series_of(options.out, options.seeds)
    rollouts = sampled(series, options.problems, to / "rollouts.parquet")
    store = tsae.capture(series, rollouts, [SITE], to=to / "activations", config=tsae.CaptureConfig(plan="paired"))
    file, seconds = record_of(options.out, "features", 0), 0.0
    found: dict[str, Any] = {}
    if options.dictionaries and file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        found, seconds = before["dictionaries"], before["seconds"]
    wanted = options.dictionaries or DICTIONARIES
    for name, sae in dictionaries(store, to, options.tokens, wanted).items():
        features = tsae.encode(sae, store, to=to / f"codes-{name}")
        family = families_of(features)
        found[name] = {
            "features": {each: int((family == each).sum()) for each in (*FAMILIES, NO_FAMILY)},
            "shifts": shifts(features, family, series),
        }
        if name == "T-SAE":
            found[name]["ablations"] = ablations(series, sae, features, family, options)
        if name == "difference":
            sae, family = with_controls(store)
            features = tsae.encode(sae, store, to=to / f"codes-{name}-controls")
            found[name]["ablations"] = ablations(series, sae, features, family, options)
        print(name, found[name]["features"], flush=True)
    if CROSSCODER in wanted:
        found[CROSSCODER] = through_crosscoders(store, to, options.tokens, series)
    found = {name: found[name] for name in DICTIONARIES if name in found}
    record = {"arm": "features", "seed": 0, "dictionaries": found, "seconds": seconds + time.monotonic() - started}
    write_json(file, rounded(record))


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


def training_of(tokens: int) -> tsae.TrainingConfig:
    return tsae.TrainingConfig(tokens=tokens, batch_tokens=1024)


def dictionaries(
    store: tsae.ActivationStore, to: Path, tokens: int, wanted: Iterable[str] = DICTIONARIES
) -> dict[str, tsae.TemporalSAE]:
    """The dictionaries of single activations, by their names."""
    found = {
        name: tsae.train(store, config, to=to / f"sae-{name}", training=training_of(tokens))
        for name, config in CONFIGS.items()
        if name in wanted
    }
    if set(wanted) <= {*CONFIGS, CROSSCODER}:
        return found
    directions, x = directions_of(store)
    found |= {name: from_directions(rows, x, 1 if name == "difference" else K) for name, rows in directions.items()}
    return {name: sae for name, sae in found.items() if name in wanted}


def directions_of(store: tsae.ActivationStore) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(n, d_model) unit directions by dictionary, and the base's states that they are of."""
    x, code, names = base_states(store)
    centred = x - x.mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.T
    random = torch.nn.functional.normalize(
        torch.randn(D_SAE // 2, x.shape[1], generator=torch.Generator().manual_seed(SEED)), dim=-1
    )
    means = torch.stack(
        [
            centred[np.isin(code, [names.index(c) for c in classes if c in names])].mean(0)
            for classes in FAMILIES.values()
        ]
    )
    return {
        "PCA": torch.cat([components, -components]),
        "random": torch.cat([random, -random]),
        "difference": torch.nn.functional.normalize(means, dim=-1),
    }, x


def with_controls(store: tsae.ActivationStore) -> tuple[tsae.TemporalSAE, np.ndarray]:
    """A dictionary of the differences, and of principal components and random directions to compare them with; and the
    family of each of its features."""
    directions, x = directions_of(store)
    sae = from_directions(torch.cat([directions[name] for name in ("difference", "PCA", "random")]), x, K)
    return sae, np.array([*FAMILIES, *[NO_FAMILY] * (sae.config.d_sae - len(FAMILIES))], dtype=object)


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


class Readings(NamedTuple):
    """What readers made of responses; a row is of one reader and response."""

    values: np.ndarray
    """(n_rows, n_features) mean over the response's tokens."""
    by_reader: dict[tuple[str, str | None], np.ndarray]
    """Rows by (reader, policy)."""
    problem: np.ndarray
    """(n_rows,) codes."""
    band: np.ndarray
    outcome: np.ndarray


def shifts(features: FeatureTable, family: np.ndarray, series: CheckpointSeries) -> dict[str, Any]:
    """The effects of a dictionary of single activations."""
    rows = Rows.of(features, DiffConfig(min_problems=2))
    readings = Readings(dense(rows.values[:, :]), rows.by_reader, rows.problem, rows.band, rows.outcome)
    return effects(readings, family, series)


def dense(values: Any) -> np.ndarray:
    return np.asarray(values.todense() if hasattr(values, "todense") else values)


def effects(readings: Readings, family: np.ndarray, checkpoints: Iterable[Checkpoint]) -> dict[str, Any]:
    """By run and family, seed by seed: the shift over all problems, the outcome effect on the run's own band, and the
    shift while the run reads the base's responses: what it does not owe to another choice of format."""
    values, by_reader, problem, band, outcomes = readings
    base = by_reader["base", "base"]
    deviation = values[base].std(0, ddof=1)
    found: dict[str, Any] = {}
    for name in FAMILIES:
        chosen = (family == name) & (deviation > 0)
        if not chosen.any():
            continue
        score = (values[:, chosen] / deviation[chosen]).mean(1)
        unit = score[base].std(ddof=1)
        for checkpoint in checkpoints:
            if checkpoint.is_base:
                continue
            own = by_reader[checkpoint.id, checkpoint.id]
            change = by_problem(score, own, problem) - by_problem(score, base, problem)
            inside = own[band[own] == checkpoint.trained_on]
            right, wrong = (inside[outcomes[inside] == outcome] for outcome in ("success", "failure"))
            effect = by_problem(score, right, problem) - by_problem(score, wrong, problem)
            reading = by_reader[checkpoint.id, "base"]
            same = by_problem(score, reading, problem) - by_problem(score, base, problem)
            cell = found.setdefault(str(checkpoint.trained_on), {}).setdefault(
                name, {"shift": [], "outcome": [], "same_texts": []}
            )
            cell["same_texts"].append(float(np.nanmean(same) / unit))
            cell["shift"].append(float(np.nanmean(change) / unit))
            cell["outcome"].append(float(np.nanmean(effect) / unit) if np.isfinite(effect).any() else float("nan"))
    return found


def through_crosscoders(store: tsae.ActivationStore, to: Path, tokens: int, series: CheckpointSeries) -> dict[str, Any]:
    """What a crosscoder of the base and each run says: features in families (mean over runs), shifts, and those of the
    shared codes."""
    config = tsae.SAEConfig(d_sae=D_SAE, k=K, temporal_weight=0.0, groups=(1.0,))
    found: dict[str, Any] = {"shifts": {}, "shared": {}}
    counts = []
    for checkpoint in series:
        if checkpoint.is_base:
            continue
        pair = tsae.Pair(store, checkpoint.id)
        sae = tsae.train(
            pair, config, to=to / f"sae-{CROSSCODER}-{checkpoint.id}", training=training_of(tokens), progress=False
        )
        crosscoder = tsae.Crosscoder.from_sae(sae)
        features = tsae.encode(crosscoder, pair, progress=False)
        family = families_of(features)
        counts.append({each: int((family == each).sum()) for each in (*FAMILIES, NO_FAMILY)})
        for name, both in (
            ("shifts", amounts_of(crosscoder, pair, features)),
            ("shared", (features.codes[:], features.codes[:])),
        ):
            for run, families in effects(readings_of(features, both), family, [checkpoint]).items():
                for each, cell in families.items():
                    into = found[name].setdefault(run, {}).setdefault(each, {key: [] for key in cell})
                    for key, values in cell.items():
                        into[key] += values
        print(CROSSCODER, checkpoint.id, counts[-1], flush=True)
    return {"features": {each: round(float(np.mean([c[each] for c in counts]))) for each in counts[0]}, **found}


def amounts_of(crosscoder: tsae.Crosscoder, pair: tsae.Pair, features: FeatureTable) -> tuple[sp.csr_array, ...]:
    """(n_tokens, d_sae) amounts of the base, and of the other reader."""
    blocks: list[list[sp.csr_array]] = [[], []]
    first = 0
    for shard in pair.shards():
        x = torch.from_numpy(np.asarray(shard.read(SITE, slice(None)), dtype=np.float32))
        codes = torch.from_numpy(features.codes[first : first + len(x)].toarray())
        first += len(x)
        for block, amount in zip(blocks, amounts(crosscoder, codes, x), strict=True):
            block.append(sp.csr_array(amount.numpy()))
    if first != features.codes.shape[0]:
        raise tsae.TsaeError(f"{first} activations and {features.codes.shape[0]} codes", where=pair.path)
    return tuple(sp.csr_array(sp.vstack(block, format="csr")) for block in blocks)


def amounts(crosscoder: tsae.Crosscoder, codes: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """How much of each feature's direction each reader has on the tokens on which it fires.

    Args:
        crosscoder: of both readers.
        codes: (n, d_sae) of both.
        x: (n, 2 · width) activations of the base, then of the other.

    Returns:
        (n, d_sae) of the base, and of the other; 0 where the feature does not fire. They may be negative.
    """
    rows = crosscoder.decoders
    longer = torch.where(crosscoder.relative_norm[:, None] >= 0.5, rows[1], rows[0])
    square = longer.pow(2).sum(1).clamp_min(1e-12)
    errors = (x - crosscoder.decode(codes)).detach().split(crosscoder.width, dim=1)
    return tuple(
        (codes > 0) * (codes * (own * longer).sum(1) + error @ longer.T) / square
        for own, error in zip(rows, errors, strict=True)
    )


def readings_of(features: FeatureTable, amounts: Iterable[sp.csr_array]) -> Readings:
    """Readings of a pair, whose table has a row a response, from the base's amounts and the other reader's."""
    frame = features.rollouts.frame.iloc[features.trajectory]
    counted = features.counts(features.span_mask("response")) > 0
    run, n = features.readers[0], features.n_rows
    rows = {policy: np.flatnonzero(counted & (frame.policy == policy).to_numpy()) for policy in ("base", run)}
    means = [dense(replace(features, codes=each).row_means("response")) for each in amounts]
    twice = pd.concat([frame, frame])
    return Readings(
        values=np.concatenate(means),
        by_reader={("base", "base"): rows["base"], (run, "base"): n + rows["base"], (run, run): n + rows[run]},
        problem=pd.factorize(twice.problem_id)[0],
        band=twice.band.to_numpy(dtype=object),
        outcome=twice.outcome.to_numpy(dtype=object),
    )


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
