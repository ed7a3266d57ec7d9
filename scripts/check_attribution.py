"""Does attribution predict retraining? A mixed run of the testbed is retrained on subsets of its problems.

    python scripts/check_attribution.py

data/mixed holds the run, and what the retrainings changed. Commit 1a85fd33 has the code that made them.

Targets are the probability of a direct answer on held-out problems of each band, and the means of the features that
moved most, over fixed trajectories of the base. The run is replayed from its log. For every subset each predictor gives
a number; its score is the rank correlation with what the retrainings really changed, over the halves (linear
datamodelling score; Park et al. 2023). Bands left out and alone are really replayed, and compared with retrainings
that sampled anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
import tyro
from organism.mixed import MixedConfig, held_out, prompt_ids, replayed
from scipy.stats import spearmanr

import tsae
from tsae.attribution.attribution import share_of_rows
from tsae.attribution.loss import Again
from tsae.attribution.path import Replayed, train_on
from tsae.attribution.shares import shares, simulate
from tsae.attribution.targets import FeatureMeans, NextToken, Together
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.testbed.tokenizer import TOKEN_IDS, VOCABULARY

SPECIAL = [TOKEN_IDS[token] for token in VOCABULARY if token.startswith("<")]
REPLAYED: Literal["replayed"] = "replayed"


@dataclass(frozen=True)
class Options:
    """Compare predictions with retrainings."""

    data: Path = Path(__file__).parent.parent / "data" / "mixed"
    """Folder with the run's log, the SAE, and what the retrainings changed."""


def main(options: Options) -> int:
    """Check; 1 where the user has something to put right."""
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        found = check(options)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    times = {"seconds": round(time.monotonic() - began), "processor_seconds": round(time.process_time())}
    print(json.dumps(known({"name": "attribution", **found, **times})))
    return 0


def known(value: object) -> object:
    """The same with null for what is not known: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: known(one) for name, one in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value


def the_targets(config: MixedConfig, data: Path) -> Together:
    """Direct answers on held-out problems, and the features that moved most."""
    problems = held_out(config)
    prompts = [np.array(prompt_ids(problem)) for some in problems.values() for problem in some]
    bands = [band for band, some in problems.items() for _ in some]
    direct = NextToken(prompts, bands, TOKEN_IDS["#"], what="direct")
    features = json.loads((data / "about.json").read_text())["features"]
    sae = tsae.TemporalSAE.load(data / "sae")
    return Together(direct, FeatureMeans(sae, features, Rollouts.read(data / "fixed.parquet"), SPECIAL))


# --- predictions


def check(options: Options) -> dict[str, object]:
    """The line of figures; prints tables on the way."""
    data = options.data
    about = json.loads((data / "about.json").read_text())["config"]
    config = MixedConfig(seed=about["seed"], per_band=about["per_band"])
    rollouts, targets = Rollouts.read(data / "rollouts.parquet"), the_targets(config, data)
    lines = [json.loads(line) for line in (data / "retrained.jsonl").read_text().splitlines()]
    kinds = {line["name"]: line["kind"] for line in lines}
    wanted = [n for n, kind in kinds.items() if kind in ("half", "without", "alone")]
    realised = {
        sampling: {line["name"]: np.array(line["changes"]) for line in lines if str(line["sampling"]) == sampling}
        for sampling in dict.fromkeys(str(line["sampling"]) for line in lines)
    }
    include = {line["name"]: line["include"] for line in lines}
    kept = {name: np.isin(rollouts.frame.problem_id, include[name]) for name in wanted}
    bands = {name: mask for name, mask in kept.items() if kinds[name] in ("without", "alone")}
    with tempfile.TemporaryDirectory() as folder:
        path = replayed(tsae.testbed.series().base, rollouts, data, Path(folder))
        print(path.run.settings)
        split = shares(path, targets, points=len(path.steps) + 1, progress=False)
        masks = np.array(list(kept.values()))
        effects = {
            again: changes(path, targets, simulate(path, masks, again=again, progress=False), split.before)
            for again in get_args(Again)
        }
        ends = torch.stack([train_on(path, mask, progress=False) for mask in bands.values()])
        replays = dict(zip(bands, changes(path, targets, ends, split.before), strict=True))
        baselines = predictors(path, targets, share_of_rows(split, len(rollouts)))
    predicted = {
        name: masks.astype(float) @ (one if one.ndim == 2 else np.repeat(one[:, None], len(targets.names), axis=1))
        for name, one in baselines.items()
    }
    halves = [i for i, name in enumerate(wanted) if kinds[name] == "half"]
    scores = scores_of(predicted, effects, realised, [wanted[i] for i in halves], halves)
    print(scores.round(2).to_string())
    figures = summary(scores)
    figures["conservation"] = round(float(np.median(np.abs(split.remainder / split.realised))), 5)
    simulated = {again: dict(zip(wanted, effect, strict=True)) for again, effect in effects.items()}
    figures |= bands_of(replays, simulated, realised)
    print(f"stored: what the retrainings changed, in {data}; everything else is computed now")
    return figures


def changes(path: Replayed, targets: Together, ends: torch.Tensor, before: np.ndarray) -> np.ndarray:
    """(K, n_targets) of final weights, (K, P)."""
    found = []
    for end in ends:
        path.run.trained.put(end)
        found.append(targets.values(path.run.trained) - before)
    return np.array(found)


def predictors(path: Replayed, targets: Together, share: np.ndarray) -> dict[str, np.ndarray]:
    """(n,) or (n, n_targets) numbers of samples, whose sums over a subset predict."""
    rollouts, trained = path.run.rollouts, path.run.trained
    frame = rollouts.frame
    advantage = frame.advantage.to_numpy(dtype=float)
    trained.put(path.run.begin.weights)
    direct = np.array([VOCABULARY[rollouts.tokens(row)[1][0]] == "#" for row in range(len(rollouts))], dtype=float)
    features = targets.parts[1]
    assert isinstance(features, FeatureMeans)
    values = np.concatenate([np.repeat(direct[:, None], 3, axis=1), features.each(trained, rollouts)], axis=1)
    return {
        "number": np.ones(len(rollouts)),
        "reward": frame.reward.to_numpy(dtype=float),
        "|advantage|": np.abs(advantage),
        "length": frame.response_length.to_numpy(dtype=float),
        "Cov(advantage, target)": advantage[:, None] * (values - values.mean(0)),
        "share": share,
    }


# --- comparisons


def scores_of(
    predicted: Mapping[str, np.ndarray],
    effects: Mapping[str, np.ndarray],
    realised: Mapping[str, Mapping[str, np.ndarray]],
    names: list[str],
    rows: list[int],
) -> pd.DataFrame:
    """Rank correlations over the halves, by sampling and predictor; other retrainings are predictors too."""
    nothing = np.full_like(next(iter(realised[REPLAYED].values())), np.nan)
    others = {f"retrained, {s}": np.array([found.get(n, nothing) for n in names]) for s, found in realised.items()}
    table = []
    for sampling, found in realised.items():
        there = [i for i, name in enumerate(names) if name in found]
        truth = np.array([found[names[i]] for i in there])
        every = {"effect": effects[kind_of(sampling)], **predicted}
        of = {name: values[rows][there] for name, values in every.items()}
        of |= {name: values[there] for name, values in others.items() if name != f"retrained, {sampling}"}
        for name, values in of.items():
            each = [rank(values[:, j], truth[:, j]) for j in range(truth.shape[1])]
            row = {"sampling": sampling, "predictor": name, "subsets": len(there)}
            table.append(row | {"behaviours": np.nanmean(each[:3]), "features": np.nanmean(each[3:])})
    return pd.DataFrame(table).set_index(["sampling", "predictor"])


def kind_of(sampling: str) -> str:
    """What the simulation has to imagine."""
    return REPLAYED if sampling == REPLAYED else "on-policy"


def rank(a: np.ndarray, b: np.ndarray) -> float:
    known = np.isfinite(a)
    if known.sum() < 10 or np.ptp(a[known]) == 0 or np.ptp(b[known]) == 0:
        return 0.0 if known.all() else float("nan")
    return float(spearmanr(a[known], b[known]).statistic)


def summary(scores: pd.DataFrame) -> dict[str, object]:
    """The figures of the last line."""
    replayed = scores.loc[REPLAYED]
    baselines = replayed.drop(index="effect")
    baselines = baselines[~baselines.index.str.startswith("retrained")]
    found: dict[str, object] = {
        "lds": round(float(replayed.features["effect"]), 3),
        "lds_behaviours": round(float(replayed.behaviours["effect"]), 3),
        "ratio": round(
            min(
                float(replayed.features["effect"] / baselines.features.max()),
                float(replayed.behaviours["effect"] / baselines.behaviours.max()),
            ),
            3,
        ),
    }
    on = scores.drop(index=REPLAYED, level="sampling")
    names = on.index.get_level_values("predictor")
    effect, retrained = on[names == "effect"], on[names.str.startswith("retrained")]
    found["on_policy"] = {
        "lds": round(float(effect.features.mean()), 3),
        "lds_behaviours": round(float(effect.behaviours.mean()), 3),
        "ceiling": round(float(retrained.features.mean()), 3),
        "ceiling_behaviours": round(float(retrained.behaviours.mean()), 3),
    }
    table = baselines[["features", "behaviours"]].round(3)
    found["baselines"] = {str(name): row.tolist() for name, row in zip(table.index, table.to_numpy(), strict=True)}
    return found


def bands_of(
    replays: Mapping[str, np.ndarray],
    simulated: Mapping[str, Mapping[str, np.ndarray]],
    realised: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, object]:
    """Each band left out and alone: changes of the direct share on each band, and median errors."""
    columns = {"replayed": replays} | {f"simulated, {again}": found for again, found in simulated.items()}
    columns |= {f"really, {sampling}": found for sampling, found in realised.items()}
    table = {
        what: [found[name][:3].round(3) if name in found else "" for name in replays] for what, found in columns.items()
    }
    print(pd.DataFrame(table, index=list(replays)).to_string())
    anew = [found for sampling, found in realised.items() if sampling != REPLAYED]
    return {
        "band_error_retrained": error(replays, [realised[REPLAYED]]),
        "band_error_on_policy": error(replays, anew),
        "simulated_band_error": error(simulated[REPLAYED], [realised[REPLAYED]], among=replays),
        "simulated_band_error_on_policy": error(simulated["on-policy"], anew, among=replays),
    }


def error(
    found: Mapping[str, np.ndarray],
    others: list[Mapping[str, np.ndarray]],
    targets: slice = slice(3),
    among: Mapping[str, np.ndarray] | None = None,
) -> float:
    """Median |difference| over the subsets that both have, and targets: by default the direct shares."""
    each = [
        np.abs(found[name][targets] - other[name][targets])
        for other in others
        for name in (found if among is None else among)
        if name in other
    ]
    return round(float(np.median(each)), 5) if each else float("nan")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
