"""Diffs, attributions, pages and folders of runs, made by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from support.builders import feature_table
from tsae.attribution.attribution import Attribution
from tsae.diff.feature_diff import FeatureDiff
from tsae.features.feature_table import FeatureTable
from tsae.report.page import render
from tsae.rollouts.table import Rollouts

MARKUP = '<script>alert(1)</script>"><img src=x onerror=alert(1)></script><!--&lt;b&gt;'


INVISIBLE = "a\u202eb\u2066c\x00\x1b\ud800"


def reader(id: str, run: str | None, fve: float | None = 0.9) -> dict[str, Any]:
    return {
        "id": id, "run": run, "step": 0 if run is None else 10, "trained_on": run, "n_tokens": 1000, "fve": fve,
        "l0": 8.0, "flagged": fve is None or fve < 0.5,
    }  # fmt: skip


def contrast(kind: str, checkpoint: str, part: str, band: str, outcome: str = "all", **more: Any) -> dict[str, Any]:
    counts = {
        "n_problems": 30, "n_trajectories": 240, "n_tokens": 4000, "rows": f"{kind}-{part}-{band}-{outcome}",
        "n_left_out": 4, "n_tested": 6, "n_discoveries": 4, "n_differs": 5, "n_null": 0.4, "null_any": 0.2,
        "detectable_delta": 0.4, "note": "",
    }  # fmt: skip
    keys = {"kind": kind, "checkpoint": checkpoint, "run": checkpoint, "step": 10, "part": part, "band": band}
    return {**keys, "outcome": outcome, **counts, **more}


def effects(keys: dict[str, Any], differences: list[float]) -> list[dict[str, Any]]:
    """One row a feature; features have the standard deviation 0.5 at base, and a difference of 0 is not a discovery."""
    names = ("kind", "checkpoint", "run", "step", "part", "band", "outcome")
    return [
        {
            **{name: keys[name] for name in names}, "feature": feature, "mean": 1 + x, "reference": 1.0,
            "difference": x, "low": x - 0.1, "high": x + 0.1,
            "delta": 2 * x, "delta_low": 2 * x - 0.2, "delta_high": 2 * x + 0.2, "auroc": 0.5,
            "p": 0.001 if x else 0.9,
            "q": 0.004 if x else 0.95,
            "p_differs": 0.0005 if x else 0.8,
            "q_differs": 0.002 if x else 0.85,
            "scale": "base", "active": 0.6, "active_reference": 0.4,
        }
        for feature, x in enumerate(differences)
    ]  # fmt: skip


def behaviour(
    policy: str, band: str, name: str, mean: float, half: float, change: float = np.nan, change_half: float = np.nan
) -> dict[str, Any]:
    row = {"policy": policy, "band": band, "behaviour": name, "mean": mean, "low": mean - half, "high": mean + half}
    row |= {"n_problems": 30, "n_trajectories": 240, "change": change, "n_paired": 30}
    row |= {"paired_reference": mean - change, "paired_mean": mean}
    return {**row, "change_low": change - change_half, "change_high": change + change_half}


def describe(classes: list[str], *, annotated: bool = True) -> pd.DataFrame:
    n = len(classes)
    table = pd.DataFrame(
        {
            "group": ["high", "low"] * (n // 2),
            "firing_rate": 0.1,
            "length_correlation": [0.9, -0.2] * (n // 2),
            "responds_to": classes,
            "top_tokens": [["a", "b"]] * n,
            "top_token_share": [0.8] + [0.2] * (n - 1),
        },
        index=pd.RangeIndex(n, name="feature"),
    )
    return table.assign(lift=2.0, share=0.25) if annotated else table


CLASSES = ["operand", "operand", "answer", "answer", "separator", "prompt"]


SHIFTS = {"up-run": [0.9, 0.5, -0.7, 0.0, 0.2, 0.0], "down-run": [-0.6, 0.0, 0.8, 0.3, -0.2, 0.0]}


def make(bands: tuple[str, ...] = ("easy", "hard"), *, runs: bool = True, **changes: Any) -> FeatureDiff:
    contrasts, rows, lived = [], [], []
    splits = ["all", *bands]
    for run, differences in SHIFTS.items() if runs else ():
        for part, factor in (("total", 1.0), ("policy", 0.75), ("representation", 0.25), ("same_trajectories", 0.2)):
            for band in splits:
                for outcome in ("all", "success", "failure"):
                    keys = contrast("shift", run, part, band, outcome)
                    if (band, outcome) == ("easy", "failure"):
                        keys |= {"n_tested": 0, "n_discoveries": 0, "note": "3 problems <on> both sides; 5 are needed"}
                    else:
                        rows += effects(keys, [factor * x for x in differences])
                    contrasts.append(keys)
    ids = ["base", *(SHIFTS if runs else ())]
    for checkpoint in ids:
        for band in splits:
            keys = contrast("outcome", checkpoint, "success_minus_failure", band)
            rows += effects(keys, [0.3, 0.0, -0.4, 0.0, 0.0, 0.0])
            contrasts.append(keys)
    accuracy = {"base": 0.5, "up-run": 0.8, "down-run": 0.45}
    length = {"base": 20.0, "up-run": 38.0, "down-run": 4.0}
    for checkpoint in ids:
        for band in splits:
            # A paired change is known more closely than two means side by side.
            for name, means, half, close in (
                ("accuracy", accuracy, 0.06, 0.055),
                ("response_length", length, 2.0, 1.0),
            ):
                paired = () if checkpoint == "base" else (means[checkpoint] - means["base"], close)
                lived.append(behaviour(checkpoint, band, name, means[checkpoint], half, *paired))
    info = {
        "config": {
            "span": "response", "n_bootstrap": 1000, "n_permutations": 10_000, "confidence": 0.95, "q": 0.05,
            "min_problems": 5, "min_fve": 0.5, "minimum_effect": 0.1, "fdr": "bh",
        },
        "sae": {"d_sae": 6, "d_high": 2, "k": 2, "site": "blocks.1.hook_resid_post", "aux_weight": 0.03125},
        "readers": [reader("base", None), *(reader(id, id) for id in ids[1:])],
        "null_repeats": 5,
        "bands": {"easy": 0.75, "hard": 0.25, "reference": "base", "separate": True} if bands else None,
        "rollouts": "0123456789abcdef",
        "causally_tested": False,
    }  # fmt: skip
    made = FeatureDiff(
        shifts=pd.DataFrame(rows),
        contrasts=pd.DataFrame(contrasts),
        features=describe(CLASSES),
        behaviours=pd.DataFrame(lived),
        info=info,
    )
    return replace(made, **changes)


def table_of(records: list[dict[str, Any]], codes: np.ndarray, *, d_high: int = 1, special: Any = ()) -> FeatureTable:
    """A feature table of what the base read: all trajectories, with (n_tokens, n_features) codes."""
    blank = {"outcome": "unknown", "prompt": "", "response": ""}
    rollouts = Rollouts.from_records([blank | record for record in records])
    rows = np.arange(len(records))
    return feature_table(rollouts, codes, [("base", rows)], d_high=d_high, special=special)


def source(texts: list[str]) -> tuple[FeatureTable, dict[str, str]]:
    """A table of two trajectories that hold the given tokens, with every feature active on the response's."""
    n = len(texts)
    prompt, response = [0], list(range(n))
    records = [
        {
            "problem_id": f"p{i}", "policy": policy, "prompt_ids": prompt, "response_ids": response,
            "outcome": outcome, "prompt": texts[0].replace("\ud800", ""), "response": "",
        }
        for i, (policy, outcome) in enumerate([("base", "success"), ("up-run", "failure")])
    ]  # fmt: skip
    codes = np.tile(np.linspace(0, 3, n + 1)[:, None], (2, 6))
    table = table_of(records, codes, d_high=2)
    return table, {str(i): text for i, text in enumerate(texts)}


BANDS = ("easy", "medium", "hard")


def answer(problem: str, policy: str, right: bool | None, **more: Any) -> dict[str, Any]:
    """One response; `length` tokens, one by default."""
    length = more.pop("length", 1)
    outcome = "unknown" if right is None else "success" if right else "failure"
    text = {"prompt": problem, "response": "#1", "prompt_ids": [1], "response_ids": [2] * length}
    return {"problem_id": problem, "policy": policy, "outcome": outcome, **text, **more}


def answers(policy: str, rates: Mapping[str, Sequence[int]], n: int = 4, **more: Any) -> list[dict[str, Any]]:
    """n responses of a policy to problems of every band: of how many each is right, problem by problem."""
    return [
        answer(f"{band}{i}", policy, k < right, band=band, **more)
        for band, of_problem in rates.items()
        for i, right in enumerate(of_problem)
        for k in range(n)
    ]


def checkpoint(id: str, run: str, step: int = 10, trained_on: str | None = None) -> dict[str, Any]:
    """A reader of the diff."""
    return {**reader(id, run), "step": step, "trained_on": trained_on}


def write_run(
    folder: Path,
    records: list[dict[str, Any]],
    checkpoints: Sequence[dict[str, Any]],
    log: list[dict[str, Any]] | None = None,
    *,
    steps: Sequence[dict[str, Any]] = (),
    info: dict[str, Any] | None = None,
) -> Path:
    """Rollouts, sampled unless their info says else, a diff that names the readers, and a log."""
    facts = {"sampled": {"n_samples": 4}} if info is None else info
    rollouts = Rollouts.from_records(records, facts)
    rollouts.write(folder / "rollouts" / "rollouts.parquet")
    diff = make()
    of = {"rollouts": rollouts.fingerprint, "labels": rollouts.labels_fingerprint}
    diff.info.update(**of, readers=[reader("base", None), *checkpoints], steps=list(steps))
    diff.save(folder / "diff")
    if log is not None:
        Rollouts.from_records(log).write(folder / "rollouts" / "log.parquet")
    return folder


TARGETS = (*(f"right − wrong, {band}" for band in BANDS), "log-likelihood, direct answer", "feature 2")
BEFORE = (1.0, 0.5, -0.2, 0.5, 0.6)
REALISED = (0.6, 0.3, -0.1, -0.9, 0.03)
WORDS = ("24", " + 7", " =", "\n", "31")
GATE = (
    "No effect is stated: the log holds every tenth step only, so that the run cannot be replayed. Add logging_steps=1 "
    "to the trainer's settings."
)


def make_attribution(texts: tuple[str, ...] = (), **info: Any) -> Attribution:
    """Twelve samples of six steps: a success and a failure a step, on easy, medium and hard problems in turn.

    The share of sample i in target j is REALISED[j] · (i − 5) / 6. Of a group with the share s, without it the target
    changes by REALISED[j] − 2 s, and with it alone by s / 2. Of a sample that is shown, each of the five tokens has a
    part of the share: −1, 0, 0, 0, 2. Its first token is its text, if it has one.
    """
    n, k = 12, np.arange(12)
    band = [BANDS[i // 2 % 3] for i in k]
    facts = pd.DataFrame(
        {
            "trajectory": k, "problem_id": [f"p{i // 4}" for i in k], "step": k // 2 + 1, "band": band, "level": None,
            "outcome": ["success", "failure"] * 6, "reward": [1.0, 0.0] * 6, "advantage": [1.0, -1.0] * 6,
            "length": len(WORDS), "prompt": [f"prompt {i}" for i in k],
            "response": [texts[i] if i < len(texts) else f"response {i}" for i in k],
        }
    )  # fmt: skip
    shares = np.outer(k - 5, REALISED) / 6  # (n, n_targets); the columns sum to REALISED
    samples = pd.DataFrame(
        {
            "trajectory": np.repeat(k, len(TARGETS)), "step": np.repeat(facts.step.to_numpy(), len(TARGETS)),
            "target": np.tile(TARGETS, n), "share": shares.ravel(), "policy": 1.5 * shares.ravel(),
            "kl": -0.5 * shares.ravel(),
        }
    )  # fmt: skip
    masks = {("band", one): (facts.band == one).to_numpy() for one in BANDS}
    masks |= {("lone success", "lone success"): k == 8, ("outcome", "success"): k % 2 == 0}
    groups = [
        {
            "kind": kind, "group": group, "n": int(mask.sum()), "target": target, "share": shares[mask, j].sum(),
            "without": REALISED[j] - 2 * shares[mask, j].sum(), "effect": 2 * shares[mask, j].sum(),
            "alone": shares[mask, j].sum() / 2,
            "how": "replayed" if kind == "band" else "simulated",
        }
        for (kind, group), mask in masks.items()
        for j, target in enumerate(TARGETS)
    ]  # fmt: skip
    entropy = [
        {"band": one, "fifth": fifth, "target": target, "share": shares[masks["band", one], j].sum() * part}
        for one in BANDS
        for fifth, part in enumerate((0.0, 0.1, 0.1, 0.2, 0.6), start=1)
        for j, target in enumerate(TARGETS)
    ]
    tokens = [
        {
            "trajectory": i, "step": i // 2 + 1, "target": TARGETS[3], "position": place, "token_id": place,
            "token": texts[i] if place == 0 and i < len(texts) else word, "share": shares[i, 3] * part,
        }
        for i in (11, 0, 10, 1, 9, 2, 8, 3, 7, 4)
        for place, (word, part) in enumerate(zip(WORDS, (-1, 0, 0, 0, 2), strict=True))
    ]  # fmt: skip
    targets = pd.DataFrame(
        {
            "target": TARGETS, "before": BEFORE, "after": np.add(BEFORE, REALISED), "realised": REALISED,
            "predicted": REALISED, "decay": 0.0, "remainder": [0.003, 0.2, 0.01, 0.004, 0.005],
            "flagged": [False, True, False, False, False],
        }
    )  # fmt: skip
    steps = pd.DataFrame(
        {
            "step": range(1, 7), "n": 2, "grad_norm": 1.0, "logged_grad_norm": [1.0, 1.0, 1.0, 1.0, 1.0, 1.001],
            "mean_length": 5.0, "logged_mean_length": 5.0, "distance": [np.nan] * 5 + [0.0002], "clipped": False,
        }
    )  # fmt: skip
    along = pd.DataFrame(
        [
            {"third": f"steps {2 * t + 1}-{2 * t + 2}", "band": one, "measure": measure, "mean": mean + 0.1 * t,
             "low": 0.0, "high": 1.0, "change": 0.1 * t if t else np.nan, "change_low": 0.01 * t if t else np.nan,
             "change_high": 0.2 * t if t else np.nan, "n_paired": 9 if t else np.nan}
            for t in range(3)
            for one in BANDS
            for measure, mean in {"accuracy": 0.5, "direct_answer": 0.2, "response_length": 5, "feature 2": 0.3}.items()
        ]
    )  # fmt: skip
    known = {
        "recipe": "adamw, learning rate 0.001 (constant)", "series": "tiny", "run": "run", "checkpoints": [0, 6],
        "inputs": {"rollouts": "none"}, "sae": None, "path_error": 0.0002,
        "replay": {"steps": 6, "to": 6, "within": 0.001, "departs": None, "cause": ""}, "gate": "",
        "trained_on": True, "notes": ["A note."],
    }  # fmt: skip
    return Attribution(
        targets, samples, facts, pd.DataFrame(groups), steps, pd.DataFrame(entropy), pd.DataFrame(tokens), along,
        {**known, **info},
    )  # fmt: skip


def rendered(diff: FeatureDiff, *of: Any, **also: Any) -> str:
    """All pieces of the page that `render` gives, with its arguments, without the links from words to the glossary."""
    return re.sub(r'<a class="term"[^>]*>(.*?)</a>', r"\1", "".join(render(diff, *of, **also)))


def crossed(**columns: Iterable[Any]) -> pd.DataFrame:
    """A row for every combination of the columns' values."""
    return pd.DataFrame(list(product(*columns.values())), columns=list(columns))


def every_table(diff: FeatureDiff, names: list[str]) -> FeatureDiff:
    """The hand-made diff with other runs, which repeat its two, and with every table that has a figure."""
    made = diff.checkpoints

    def named(table: pd.DataFrame, column: str) -> pd.DataFrame:
        if names == made:
            return table
        others = [table[table[column] == made[i % 2]].assign(**{column: name}) for i, name in enumerate(names)]
        return pd.concat([table[~table[column].isin(made)], *others], ignore_index=True)

    bands = ["all", "easy", "hard"]
    readers = {reader["id"]: reader for reader in diff.info["readers"]}
    runs = [readers[made[i % 2]] | {"id": name, "run": name, "trained_on": "medium"} for i, name in enumerate(names)]
    interval = {"low": -0.3, "high": 0.5, "p": 0.01, "q": 0.01, "n_problems": 30}
    delta = {"delta": 0.5, "delta_low": -1.0, "delta_high": 1.0}
    families = crossed(checkpoint=names, band=bands, family=["basic-computation", "deliberation", "answering"])
    predicted = crossed(checkpoint=names, part=["policy", "total"], predicted_on=bands)
    dynamics = crossed(run=names, step=[0, 50, 150], feature=list(range(6)))
    lived = crossed(run=names, step=[0, 50, 150], band=bands)
    noise = crossed(checkpoint=names, draw=[0, 1, 2], feature=list(range(6)))
    conditions = ["features", "random", "same_norm", "wrong_sign", "mean_difference"]
    changes = crossed(condition=conditions, behaviour=["accuracy", "direct_answer", "skipped_steps"]).assign(
        mean=0.5, change=-0.3, change_low=-0.4, change_high=-0.2, n_paired=30
    )
    test = {
        "checkpoint": names[0], "features": [0, 2], "mode": "ablate", "amount": 1.0, "tokens": "predicting",
        "n_problems": 30, "summaries": {}, "changes": changes.to_dict("records"),
    }  # fmt: skip
    return replace(
        diff,
        shifts=named(diff.shifts, "checkpoint"),
        contrasts=named(diff.contrasts, "checkpoint"),
        behaviours=named(diff.behaviours, "policy"),
        families=families.assign(n_features=3, difference=0.1, note="", **delta, **interval),
        predicted=predicted.assign(
            run=names[0], step=10, gradient="natural", realised_on="all", n_features=6, rho=0.4,
            matched=predicted.predicted_on == "hard",
            ceiling=0.9, rho_halves=0.3, note="", **interval,
        ),
        dynamics=dynamics.assign(
            mean=1.0, shift=dynamics.step / 100, delta=0.3, kind="growing", onset=5.0, onset_low=5.0, onset_high=10.0,
            part="total", **interval,
        ),
        behaviour_dynamics=lived.assign(behaviour="accuracy", mean=0.5, **interval),
        noise=noise.assign(delta=np.linspace(0.001, 1.5, len(noise))),
        info={**diff.info, "readers": [readers[diff.base], *runs], "causally_tested": [test, test]},
    )  # fmt: skip
