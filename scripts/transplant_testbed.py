"""What a run's features bring about alone: they are transplanted into the base while it answers, and the other way.

For easy-150, medium-150 and hard-150, on fresh problems: the features of direct answers and of the scratchpad that the
run moved furthest, beside matched random features, the mean difference of equal norm, all features, and the whole
residual stream. A share is the change divided by that from the one checkpoint to the other. Reads what
`tsae demo --to demo` wrote:

    python scripts/transplant_testbed.py --demo demo --to runs/transplant
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from causal_testbed import Story, fresh_problems, with_styles

import tsae
from tsae.causal.controls import mean_difference
from tsae.report.text import percent
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

RUNS = ("easy-150", "medium-150", "hard-150")
FAMILIES = {"direct-answer": ("direct-answer",), "scratchpad": ("basic-computation", "deliberation")}
CONDITIONS = ("features", "random", "same_norm", "wrong_sign", "mean_difference", "all_features", "whole")
MEASURED = (("direct", "all"), ("scratchpad", "all"), ("accuracy", "all"), ("accuracy", "medium"))


@dataclass(frozen=True)
class Settings:
    """Size and seeds."""

    demo: Path
    """Folder that `tsae demo` wrote."""
    to: Path = Path("runs/transplant")
    """Folder for one result each; those that are there are read."""
    problems: int = 40
    """Fresh problems of each level."""
    samples: int = 2
    """Responses per problem and condition."""
    n_random: int = 12
    """Sets of matched random features."""
    features: int = 12
    """Features of each family, those that the run moved furthest."""
    only: tuple[str, ...] = ()
    """Names of tests to make now, such as direct-answer-of-hard-150-into-base; the tables have all that are there. By
    default all are made."""
    seed: int = 4000
    """Of problems, sampling and controls; the demo's is 0."""


def main() -> None:
    settings = tyro.cli(Settings)
    series = tsae.testbed.series().final()
    features = tsae.FeatureTable.load(settings.demo / "features")
    sae = tsae.TemporalSAE.load(settings.demo / "sae")
    store = tsae.ActivationStore(settings.demo / "activations")
    diff = tsae.FeatureDiff.load(settings.demo / "diff")
    story = Story(settings.demo, problems=settings.problems, seed=settings.seed)
    sampling = tsae.SamplingConfig(
        n_samples=settings.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=settings.seed
    )
    # The levels take the place of bands: results are given by them too.
    asked = tsae.sample(
        series.base, fresh_problems(features, story), tsae.SamplingConfig(n_samples=1, max_new_tokens=4), progress=False
    )
    asked = asked.with_column("band", asked.table["level"].to_pylist())
    rows = []
    for way in (1, -1):
        for run in RUNS:
            chosen = furthest(diff, run, settings.features)
            together = sorted({feature for of in chosen.values() for feature in of})
            into, donor = ("base", run)[::way]
            direction = mean_difference(store, sae.site, donor, into, sae=sae)
            for family, ids in chosen.items():
                folder, began = settings.to / f"{family}-of-{donor}-into-{into}", time.perf_counter()
                there = (folder / "causal.json").is_file()
                if not there and settings.only and folder.name not in settings.only:
                    continue
                if not there:
                    config = tsae.InterventionConfig(
                        mode="transplant", tokens="all", n_random=settings.n_random, sampling=sampling
                    )
                    tsae.intervene(
                        series[into],
                        sae,
                        features,
                        ids,
                        config,
                        problems=asked,
                        verify=tsae.testbed.verify,
                        direction=direction,
                        donor=series[donor],
                        exclude=[f for f in together if f not in ids],
                        describe=with_styles,
                        progress=False,
                    ).save(folder)
                found = tsae.Intervention.load(folder)
                print(f"{folder.name}: features {ids}, {time.perf_counter() - began:.0f} s", flush=True)
                rows += table_rows(found, family)
    table = pd.DataFrame(rows)
    settings.to.mkdir(parents=True, exist_ok=True)
    table.to_parquet(settings.to / "transplant.parquet", index=False)
    print_markdown(table)
    kept = table[(table.behaviour == "direct") & table.condition.isin(["features", "whole"])]
    shares = {f"{r.donor} into {r.into}, {r.family}, {r.condition}": round(r.share, 3) for r in kept.itertuples()}
    print(json.dumps({"name": "transplant", "n_problems": 3 * settings.problems, "shares_of_direct_answers": shares}))


def furthest(diff: tsae.FeatureDiff, run: str, n: int) -> dict[str, list[int]]:
    """Of every family the n features that a run moved furthest, over all problems."""
    moved = diff.main_shift(run, discoveries=True).set_index("feature")
    family = diff.features.family.reindex(moved.index)
    order = moved.delta.abs().sort_values(ascending=False, kind="stable").index
    return {name: [int(f) for f in order if family[f] in of][:n] for name, of in FAMILIES.items()}


def table_rows(found: tsae.Intervention, family: str) -> list[dict[str, object]]:
    """What one transplant did to what is measured, by condition."""
    rows = []
    for behaviour, band in MEASURED:
        table = found.table(behaviour=behaviour, band=band).set_index("condition")
        for condition in (*CONDITIONS, "donor"):
            row = table.loc[condition]
            about = {
                "donor": found.info["donor"],
                "into": found.info["checkpoint"],
                "family": family,
                "condition": condition,
            }
            kept = ["change", "change_low", "change_high", "beyond_random", "beyond_low", "beyond_high"]
            kept += ["share", "share_low", "share_high"]
            before = {"behaviour": behaviour, "band": band, "before": float(table.loc["none", "mean"])}
            rows.append({**about, **before, **{name: float(row[name]) for name in kept}})
    return rows


def print_markdown(table: pd.DataFrame) -> None:
    """A table a measured behaviour: the donor's change, and what share of it every condition moves, in per cent."""
    for behaviour, band in MEASURED:
        mine = table[(table.behaviour == behaviour) & (table.band == band)]
        print(f"\n{behaviour} on {band} problems: share moved, in per cent\n")
        print(f"| of | into | features of | donor's change | {' | '.join(c.replace('_', ' ') for c in CONDITIONS)} |")
        print("|" + " --- |" * (4 + len(CONDITIONS)))
        for (donor, into, family), rows in mine.groupby(["donor", "into", "family"], sort=False):
            by = rows.set_index("condition")
            cells = []
            for condition in CONDITIONS:
                r = by.loc[condition]
                told = f"{percent(r.share)} [{percent(r.share_low)}, {percent(r.share_high)}]"
                clear = condition == "features" and (r.beyond_low > 0 or r.beyond_high < 0)
                cells.append("–" if pd.isna(r.share) else f"**{told}**" if clear else told)
            d = by.loc["donor"]
            change = f"{d.before:.2f} {d.change:+.2f} [{d.change_low:+.2f}, {d.change_high:+.2f}]"
            print(f"| {donor} | {into} | {family} | {change} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
