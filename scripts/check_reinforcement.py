"""Which sign do the natural and the vanilla covariance give, against the change that runs made?

    tsae demo --samples 32 --to demo
    python scripts/check_reinforcement.py --demo demo

For each run of the testbed, on the problems of the band that it was trained on: reinforcement of every feature from the
base's rollouts alone (`tsae.diff.reinforcement`), beside the realised change in two parts,
*same_trajectories* (the run
reads the base's trajectories) and *total* (each reads its own). Counted are features that moved by more than .1 of
their standard deviations over base trajectories. *Sign* is the share of them that moved the way the covariance says,
*r* the correlation of covariance and change over them, both in standard deviations of the feature, *rho* that of their
ranks; intervals draw problems, covariance and change together. p permutes advantages within groups: the chance of as
large a |sign − 1/2|. Ends with one line of JSON; its ratio is the least share of agreeing signs of the vanilla
covariance, over runs and parts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import tsae
from tsae.diff.comparisons import Rows, group_difference
from tsae.diff.permutations import permuted_weights
from tsae.diff.reinforcement import Samples, effective_responses, response_logprobs, spearman, sums

DRAWS = 2000
LEAST = 0.1
PARTS = ("same_trajectories", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder that `tsae demo` wrote")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    series = tsae.testbed.series().final()
    features = tsae.FeatureTable.load(options.demo / "features")
    rows, base = Rows.of(features, tsae.DiffConfig()), series.base.id
    own = rows.by_reader[base, base]
    of_base = rows.values[own].toarray().astype(np.float64)
    scale = of_base.std(0, ddof=1)
    logprob = response_logprobs(features.rollouts, features.trajectory[own], series)
    found = []
    print(f"{'run':<12}{'part':<19}{'gradient':<10}{'moved':>6}{'sign':>22}{'p':>7}{'r':>22}{'rho':>22}")
    for checkpoint in list(series)[1:]:
        inside = rows.band[own] == checkpoint.trained_on
        picked = own[inside]
        frame = features.rollouts.frame.iloc[features.trajectory[picked]].reset_index(drop=True)
        samples = Samples.of(frame, None if logprob is None else logprob[inside], str(options.demo))
        codes = rows.problem[picked][np.unique(samples.problem, return_index=True)[1]]  # (n_problems,)
        for part in PARTS:
            run = rows.by_reader[checkpoint.id, base if part == "same_trajectories" else checkpoint.id]
            both = np.intersect1d(rows.problem[run], codes)
            assert len(both) == len(codes)
            alive = scale > 0
            change = group_difference(rows.values, run, own, rows.problem, codes)  # (n_problems, d_sae)
            moved = np.flatnonzero(alive & (np.abs(change.mean(0)) > LEAST * scale))
            change = change[:, moved] / scale[moved]
            for gradient in samples.relative:
                values = samples.moved(of_base[inside][:, moved] / scale[moved], gradient)
                predicted = np.asarray(sums(samples.problem, samples.weight) @ values) * len(codes)
                row = agreement(predicted, change, samples, values, options.seed)
                effective = effective_responses(samples.relative[gradient], samples.group).mean()
                found.append(
                    {"run": checkpoint.id, "part": part, "gradient": gradient, "problems": len(codes),
                     "rollouts": len(picked), "moved": len(moved), "effective": effective, **row}
                )  # fmt: skip
                sign = f"{row['sign']:.2f} [{row['sign_low']:.2f}, {row['sign_high']:.2f}]"
                r, rho = (f"{row[k]:+.2f} [{row[f'{k}_low']:+.2f}, {row[f'{k}_high']:+.2f}]" for k in ("r", "rho"))
                place = f"{checkpoint.id:<12}{part:<19}{gradient:<10}{len(moved):>6}"
                print(f"{place}{sign:>22}{row['p']:>7.3f}{r:>22}{rho:>22}", flush=True)
        decided = (np.bincount(samples.group, weights=samples.weight != 0) > 0).sum()
        print(
            f"  {checkpoint.trained_on}: {len(codes)} problems, {decided} with rewards that differ, {len(picked)} "
            f"rollouts; in the vanilla covariance {len(picked) / len(codes):.0f} count for {effective:.1f}"
        )
    ratio = min(float(row["sign"]) for row in found if row["gradient"] == "vanilla")
    print(json.dumps({"name": "check_reinforcement", "ratio": round(ratio, 3), "rows": rounded(found)}))


def agreement(
    predicted: np.ndarray, change: np.ndarray, samples: Samples, values: np.ndarray, seed: int
) -> dict[str, float]:
    """Share of agreeing signs and correlations, each with an interval over problems; p of the former.

    Args:
        predicted: (n_problems, n_moved).
        change: (n_problems, n_moved).
        samples: whose advantages are permuted.
        values: (n_rows, n_moved) what their weights multiply.
        seed: of the draws.
    """
    rng, n = np.random.default_rng(seed), len(predicted)
    weights = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS) / n
    drawn = shares(weights @ predicted, weights @ change)
    here = shares(predicted.mean(0)[None], change.mean(0)[None])
    null = np.concatenate(
        [shares(some @ values, change.mean(0)[None])[0] for some in permuted_weights(
            samples.weight, samples.group, DRAWS, rng
        )]
    )  # fmt: skip
    extreme = (np.abs(null - 0.5) >= abs(here[0][0] - 0.5) - 1e-9).sum()
    row = {"p": float((1 + extreme) / (1 + DRAWS))}
    for name, mine, draws in zip(("sign", "r", "rho"), here, drawn, strict=True):
        low, high = np.quantile(draws, [0.025, 0.975])
        row |= {name: float(mine[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
    return row


def shares(predicted: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n,) shares of agreeing signs, correlations and rank correlations of the rows of (n, m) and (n or 1, m)."""
    agree = (np.sign(predicted) == np.sign(change)).mean(1)
    a, b = predicted - predicted.mean(1, keepdims=True), change - change.mean(1, keepdims=True)
    norm = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    r = np.divide((a * b).sum(1), norm, out=np.zeros(len(norm)), where=norm > 0)
    return agree, r, spearman(predicted, change)


def rounded(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: round(float(v), 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows]


if __name__ == "__main__":
    main()
