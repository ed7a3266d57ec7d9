"""The testbed's story, tested causally: what the features do that hard training raised and medium training lowered.

On fresh problems, which no feature was chosen on: ablate them in the hard run's last checkpoint (are scratchpads
restored?), and steer with them in the base (do direct answers appear?), each beside matched random features, the wrong
sign and the mean difference between the two runs. Reads what `tsae demo --to demo` wrote:

    python scripts/causal_testbed.py --demo demo --to runs/causal
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tqdm.auto import tqdm

import tsae
from tsae.base.statistics.intervals import mean_interval
from tsae.causal.controls import FeatureScales, beyond_random, matched_features, mean_difference
from tsae.causal.edits import FeatureEdit
from tsae.checkpoints.hooks import rewritten
from tsae.testbed.annotate import describe_response
from tsae.testbed.chains import LEVELS
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

UP, DOWN = "hard-150", "medium-150"
Tests = list[tuple[str, Literal["ablate", "steer"], float, Literal["predicting", "first"]]]


@dataclass(frozen=True)
class Story:
    """Size and seeds."""

    demo: Path
    """Folder that `tsae demo` wrote."""
    to: Path = Path("runs/causal")
    """Folder for one result each."""
    problems: int = 60
    """Fresh problems of each level."""
    samples: int = 2
    """Responses per problem and condition."""
    n_random: int = 12
    """Sets of matched random features."""
    exchangeable: int = 0
    """Count false claims of this many features, taken at random, instead."""
    deciding: float = 0.1
    """Beside all of them, those that fire on at least this share of the hard run's last prompt tokens, where the first
    token of the response is drawn."""
    choose: tuple[int, ...] = ()
    """Features of one's own instead, beside the same controls."""
    alphas: tuple[float, ...] = (0.5, 1.0)
    """Steering, in units of a feature's typical activation."""
    seed: int = 2000
    """Of problems, sampling and controls; the demo's is 0."""


def main() -> None:
    story = tyro.cli(Story)
    if story.exchangeable:
        exchangeable(story)
        return
    series = tsae.testbed.series().final()
    features = tsae.FeatureTable.load(story.demo / "features")
    sae = tsae.TemporalSAE.load(story.demo / "sae")
    store = tsae.ActivationStore(story.demo / "activations")
    family = [int(f) for f in tsae.FeatureDiff.load(story.demo / "diff").opposed(UP, DOWN).index]
    deciding = [f for f in family if last_prompt_rate(features, UP)[f] >= story.deciding]
    sets = {"chosen": list(story.choose)} if story.choose else {"all": family, "deciding": deciding}
    for name, chosen in sets.items():
        print(f"{name}: {', '.join(map(str, chosen))}")
    sampling = tsae.SamplingConfig(
        n_samples=story.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=story.seed
    )
    problems = fresh_problems(features, story)
    # Bands on responses of their own, as in the demo.
    for_bands = replace(sampling, n_samples=24, seed=story.seed + 1)
    measured = tsae.sample(series.base, problems, for_bands, verify=tsae.testbed.verify, progress=False)
    banded = measured.with_bands(series.base)
    direction = mean_difference(store, sae.site, UP, DOWN, sae=sae)
    plan: Tests = [(UP, "ablate", 1.0, "predicting"), (UP, "ablate", 1.0, "first")]
    plan += [("base", "steer", alpha, "first") for alpha in story.alphas]
    plan += [("base", "steer", alpha, "predicting") for alpha in story.alphas[:1]]
    for name, chosen in sets.items():
        for checkpoint, mode, amount, tokens in plan:
            found = tsae.intervene(
                series[checkpoint],
                sae,
                features,
                chosen,
                tsae.InterventionConfig(
                    mode=mode, amount=amount, tokens=tokens, n_random=story.n_random, sampling=sampling
                ),
                problems=banded,
                verify=tsae.testbed.verify,
                direction=direction,
                exclude=family,
                describe=with_styles,
                progress=False,
            )
            found.save(story.to / f"{checkpoint}-{mode}-{amount:g}-{tokens}-{name}")
            table = found.table(band="all")
            table = table[table.behaviour.isin(["direct", "scratchpad", "neither", "accuracy"])]
            table = table[~table.condition.str.contains(r"_\d$")]
            print(
                f"\n{name}: {mode} {amount:g} in {checkpoint}, {tokens}; "
                f"no-op identical: {found.info['no_op_identical']}; matching: {found.info['matching']}"
            )
            cells = table["mean"].map("{:.2f} ".format) + table.change.map("{:+.2f} ".format)
            cells += "[" + table.change_low.map("{:+.2f}, ".format) + table.change_high.map("{:+.2f}]".format)
            shown = table.assign(cell=cells).pivot(index="condition", columns="behaviour", values="cell")
            print(shown.loc[table.condition.unique()].to_string(), flush=True)


def exchangeable(story: Story) -> None:
    """How often "beyond random" is claimed of features that nobody chose."""
    series = tsae.testbed.series().final()
    features, sae = tsae.FeatureTable.load(story.demo / "features"), tsae.TemporalSAE.load(story.demo / "sae")
    sampling = tsae.SamplingConfig(
        n_samples=story.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=story.seed
    )
    problems, special = fresh_problems(features, story), tuple(features.info["special_ids"])
    numbers = (20, 15, 12, 10, 8, 5, 3)  # The most first: they give the unit of power.
    counted: dict[int, dict[str, list[bool]]] = {
        n: {"plain": [], "false": [], "3": [], "4": [], "moves": []} for n in numbers
    }
    plan: Tests = [(UP, "ablate", 1.0, "predicting"), ("base", "steer", 1.0, "first")]
    for checkpoint, mode, amount, tokens in plan:
        scales = FeatureScales.of(features, checkpoint, tokens)
        fires = np.flatnonzero(scales.typical > 0)
        alive = np.sort(np.random.default_rng(story.seed).permutation(fires)[: story.exchangeable])
        spreads: dict[tuple[int, str], float] = {}
        left_out = np.setdiff1d(np.arange(features.n_features), alive).tolist()
        model = series[checkpoint].load_model()
        effects = {}
        start = time.perf_counter()
        for feature in tqdm(alive.tolist(), desc=f"{mode} in {checkpoint}"):
            levels = (0.0 if mode == "ablate" else amount * float(scales.typical[feature]),)
            around = FeatureEdit(sae, (feature,), mode, levels).hook(
                lambda model: partial(rewritten, model), tokens, special
            )
            drawn = tsae.sample(
                series[checkpoint],
                problems,
                sampling,
                verify=tsae.testbed.verify,
                model=model,
                around=around,
                progress=False,
            )
            frame = with_styles(drawn).frame.assign(accuracy=lambda f: (f.outcome == "success").astype(float))
            effects[feature] = frame.groupby("problem_id")[["direct", "scratchpad", "accuracy"]].mean()
        seconds = (time.perf_counter() - start) / len(alive)
        print(f"{mode} in {checkpoint}, {tokens}: {len(alive)} features, {seconds:.1f} s a condition")
        for n in numbers:
            found = counted[n]
            for feature in alive.tolist():
                sets = [s[0] for s in matched_features([feature], scales, sae, n, feature, exclude=left_out)]
                for behaviour in ("direct", "scratchpad", "accuracy"):
                    mine = effects[feature][behaviour].to_numpy()
                    others = np.stack([effects[s][behaviour].to_numpy() for s in sets])
                    low, high = mean_interval(mine - others.mean(0), 0.95)
                    found["plain"].append(not low <= 0 <= high)
                    spread = spreads.setdefault((feature, behaviour), float(others.mean(1).std(ddof=1)))
                    found["moves"].append(spread > 0)
                    for name, size in (("false", 0), ("3", 3), ("4", 4)):
                        beyond = beyond_random(mine + size * spread, others, 0.95)
                        found[name].append(not beyond.low <= 0 <= beyond.high)
    rates = {}
    for n, found in sorted(counted.items()):
        # Where no feature alike moves a behaviour at all nothing can be claimed, nor is there a unit.
        moves = np.array(found.pop("moves"))
        rates[n] = {name: float(np.mean(np.array(claims)[moves])) for name, claims in found.items()}
        rates[n]["draws"] = int(moves.sum())
    print(f"{'sets':>5}{'draws':>8}{'problems alone':>16}{'false':>8}{'power, 3 sd':>13}{'power, 4 sd':>13}")
    for n, rate in rates.items():
        row = "".join(f"{rate[name]:>{width}.3f}" for name, width in zip(counted[n], (16, 8, 13, 13), strict=True))
        print(f"{n:>5}{rate['draws']:>8}{row}")
    default = tsae.InterventionConfig().n_random
    print(json.dumps({"name": "beyond_random", "ratio": rates[default]["false"], "sets": default, "rates": rates}))


def last_prompt_rate(features: tsae.FeatureTable, checkpoint: str) -> np.ndarray:
    """(n_features,) share of a checkpoint's own trajectories where a feature fires on the last prompt token."""
    rows = features.rows(reader=checkpoint, policy=checkpoint)
    last = features.row_offsets[rows] + features.rollouts.lengths("prompt_ids")[features.trajectory[rows]] - 1
    return np.asarray((features.codes[last] > 0).mean(axis=0)).ravel()


def fresh_problems(features: tsae.FeatureTable, story: Story) -> list[tsae.Problem]:
    """Of every level, problems that the demo did not have."""
    known = set(features.rollouts.table["prompt"].to_pylist())
    drawn = [p for p in tsae.testbed.eval_problems(2 * story.problems, seed=story.seed) if p.prompt not in known]
    return [p for level in LEVELS for p in [p for p in drawn if p.level == level][: story.problems]]


def with_styles(rollouts: tsae.Rollouts) -> tsae.Rollouts:
    """Every response is one of: an answer alone; valid steps and then one answer; or neither, which is broken text."""
    frame = rollouts.frame
    direct = frame.response.str.fullmatch(r"#\d").to_numpy()
    facts = [describe_response(p, r) for p, r in zip(frame.prompt, frame.response, strict=True)]
    answered_once = frame.response.str.fullmatch(r"[^#]+#\d").to_numpy()
    scratchpad = answered_once & np.array([f.n_steps_valid > 0 for f in facts])
    shares = {"direct": direct, "scratchpad": scratchpad, "neither": ~direct & ~scratchpad}
    for name, share in shares.items():
        rollouts = rollouts.with_column(name, share.astype(float))
    return tsae.Rollouts(rollouts.table, {**rollouts.info, "behaviours": list(shares)}, rollouts.origin)


if __name__ == "__main__":
    main()
