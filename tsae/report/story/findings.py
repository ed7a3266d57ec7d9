"""Findings: plain sentences with numbers, generated from the tables.

Works for any series: any names of runs, with or without bands, and with no runs at all, where only outcomes are
contrasted. A behaviour counts as changed where the interval of its change leaves out 0 (`facts.direction`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.base.intervals import too_few
from tsae.diff.result import FeatureDiff
from tsae.report.noise import noise_sentence
from tsae.report.story import facts
from tsae.report.text import count, interval, listed, number, percent

_VERBS = {1: "rose", -1: "fell", 0: "did not clearly change"}


@dataclass(frozen=True)
class Finding:
    """A heading, what it rests on, and sentences of plain text (unescaped)."""

    heading: str
    sentences: tuple[str, ...]
    evidence: str
    """Id of the section that holds the evidence."""
    note: str = ""
    """A few words beside the heading."""
    checkpoint: str | None = None
    """The run that it is about."""
    warns: bool = False
    """Whether it has to be read before all others."""


def findings(diff: FeatureDiff, *, limit: int = 5) -> list[Finding]:
    """At most `limit` findings: one a run, then runs in opposition, outcomes, and how far to believe it; before the
    last, where they are known, also what was predicted, how it went along steps, and what was tested causally."""
    runs = facts.final_checkpoints(diff)
    found = [_run(diff, checkpoint) for checkpoint in runs[: limit - 1]]
    rest = [_opposed(diff), _outcomes(diff) if not runs else None]
    found += [finding for finding in rest if finding is not None]
    beside = [_predicted(diff), _along_steps(diff), _tested(diff)]
    warned = Finding("Before all others", (warning,), "gates", warns=True) if (warning := bands_warning(diff)) else None
    kept = [warned, *found[: limit - 1], *beside, _belief(diff)]
    return [finding for finding in kept if finding is not None]


def bands_warning(diff: FeatureDiff) -> str:
    """That bands are training steps, where they are; empty otherwise."""
    refused = (diff.info.get("bands") or {}).get("refused") or ""
    return f"{refused[0].upper()}{refused[1:]}. Bands are shown, and not compared." if refused else ""


def findings_content(diff: FeatureDiff) -> dict[str, Any]:
    """What a diff found, for a program: sentences, behaviours, contrasts, discoveries with their evidence, gates."""
    return {
        "findings": [{"heading": f.heading, "sentences": f.sentences, "note": f.note} for f in findings(diff)],
        "q": diff.q,
        "readers": diff.info["readers"],
        "minimum_effect": diff.minimum_effect,
        "behaviours": diff.behaviours,
        "contrasts": diff.contrasts,
        "discoveries": diff.table(discoveries=True, band="all", outcome="all"),
        **{
            name: table
            for name, table in (("baselines", diff.baselines), ("predicted", diff.predicted))
            if table is not None
        },
        "causally_tested": diff.info.get("causally_tested") or [],
        "second_look": diff.info.get("second_look") or {},
    }


def lead(diff: FeatureDiff) -> str:
    """One sentence: what was compared with what, on how much."""
    base, runs = diff.base, facts.final_checkpoints(diff)
    table = diff.behaviours
    everything = table[table.band == "all"] if not table.empty else table
    size = ""
    if not everything.empty:
        # In a trainer's log every policy answered other problems; contrasts know them all.
        drawn = diff.contrasts
        known = [] if drawn.empty else (drawn.n_problems + drawn.n_left_out)[drawn.band == "all"].tolist()
        problems = max(int(everything.n_problems.max()), *known)
        trajectories = int(everything.drop_duplicates("policy").n_trajectories.sum())
        size = f" on {count(problems, 'problem')} and {count(trajectories, 'response')}"
    if not runs:
        return f"Successes against failures of the same problem, as {base} reads them{size}."
    names = listed(runs) if len(runs) <= 4 else count(len(runs), "run")
    return f"{names} compared with {base}{size}, through {len(diff.features):,} features of a temporal SAE."


def _run(diff: FeatureDiff, checkpoint: str) -> Finding:
    sentences = [*_behaviour_sentences(diff, checkpoint), *feature_sentences(diff, checkpoint)]
    band = facts.trained_on(diff, checkpoint)
    reader = next(r for r in diff.info["readers"] if r["id"] == checkpoint)
    if reader.get("flagged"):
        why = facts.flag_reason(diff, reader)
        why = "does not see much of this checkpoint" if "left out" in why else "reconstructs this checkpoint badly"
        sentences.append(f"The SAE {why}: its feature shifts are not to be trusted.")
    return Finding(
        heading=checkpoint,
        note=f"trained on {band}" if band else "",
        sentences=tuple(sentences) or ("Nothing could be compared with the base.",),
        evidence="behaviours" if _behaviour_sentences(diff, checkpoint) else "shifts",
        checkpoint=checkpoint,
    )


def _behaviour_sentences(diff: FeatureDiff, checkpoint: str) -> list[str]:
    sentences = []
    accuracy = _accuracy_clauses(diff, checkpoint)
    if accuracy:
        sentences.append(f"Accuracy {'; '.join(accuracy)}.")
    others = []
    for name in facts.behaviours_of(diff):
        both = facts.change_of(diff, checkpoint, "all", name)
        if name != "accuracy" and both is not None:
            others.append(f"{facts.behaviour_name(name)} {_change(diff, name, *both)}")
    if others:
        text = "; ".join(others)
        sentences.append(text[0].upper() + text[1:] + ".")
    sampled = [facts.behaviour(diff, policy, "all", "accuracy") is not None for policy in (diff.base, checkpoint)]
    if not sentences and all(sampled):
        sentences.append(f"It answered no problem that {diff.base} answered, so that what they wrote is not compared.")
    return sentences


def _accuracy_clauses(diff: FeatureDiff, checkpoint: str) -> list[str]:
    clauses: dict[int, list[str]] = {1: [], -1: [], 0: []}
    bands = [b for b in facts.BANDS if facts.behaviour(diff, checkpoint, b, "accuracy") is not None] or ["all"]
    for band in bands:
        both = facts.change_of(diff, checkpoint, band, "accuracy")
        if both is None:
            continue
        before, after = both
        numbers = _from_to(diff, "accuracy", before, after)
        clauses[facts.direction(after)].append(numbers if band == "all" else f"on {band} {numbers}")
    return [f"{_VERBS[way]} {listed(items)}" for way, items in clauses.items() if items]


def _change(diff: FeatureDiff, name: str, before: pd.Series, after: pd.Series) -> str:
    return f"{_VERBS[facts.direction(after)]} {_from_to(diff, name, before, after)}"


def _from_to(diff: FeatureDiff, name: str, before: pd.Series, after: pd.Series) -> str:
    """Both means, and the paired change with its interval."""
    share = facts.is_share(diff, name)
    factor, unit = (100.0, " %") if share else (1.0, " tokens" if name == "response_length" else "")
    shown = percent if share else number
    change, low, high = (factor * after[column] for column in ("change", "change_low", "change_high"))
    ends = f"{number(change, sign=True)} "
    ends += too_few(int(after["n_paired"])) if pd.isna(low) else interval(low, high, sign=True, like=change)
    return f"({shown(before['mean'])} → {shown(after['mean'])}{unit}, {ends})"


def feature_sentences(diff: FeatureDiff, checkpoint: str) -> list[str]:
    """How many features a run moved, what is left of them under the controls, and the largest shifts."""
    part = diff.main_part(checkpoint)
    if part is None:
        return []
    contrast = diff.contrast(kind="shift", checkpoint=checkpoint, part=part, band="all")
    if contrast is None:
        return []
    if contrast.note:
        return [f"Its feature shifts were not drawn: {contrast.note}."]
    moved = facts.main_shift(diff, checkpoint)
    moved = moved[moved.moved]
    up, down = moved[moved.delta > 0], moved[moved.delta < 0]
    how = "" if part == "total" else f" {facts.PART_NAMES[part]}"
    detectable = f"{contrast.n_differs} differ detectably"
    counts = f"{len(moved) or 'None'} of {contrast.n_tested} tested features moved{how} ({facts.least_text(diff)})"
    if not len(moved):
        return [f"{counts}; {detectable}, all by too little."]
    clearest = []
    for word, side in (("raised", up), ("lowered", down)):
        if len(side):
            row = facts.strongest(side, diff.q, 1).iloc[0]
            clearest.append(f"{word} {facts.named(diff, int(row.feature))} Δ {facts.effect_text(row)}")
    left = facts.survivors_text(moved)
    controls = f" {left}" if left else ""
    if part == "same_trajectories":
        controls = " Both read the same text: length, position and tokens cannot explain it."
    noise = noise_sentence(diff, checkpoint)
    return [
        f"{counts}: {len(up)} raised, {len(down)} lowered; {detectable}.{f' {noise}' if noise else ''}{controls}",
        f"Largest: {'; '.join(clearest)}.",
    ]


def _opposed(diff: FeatureDiff) -> Finding | None:
    runs = facts.final_checkpoints(diff)
    if len(runs) < 2:
        return None
    pairs = facts.opposed_pairs(diff)
    if not pairs:
        return Finding(
            "Opposite directions",
            (f"No feature was raised by one run and lowered by another ({facts.least_text(diff)}).",),
            "opposed",
        )
    runs_of_first = {pairs[0][0], pairs[0][1]}
    clauses = []
    for up, down, features in pairs:
        if {up, down} == runs_of_first:
            clearest = int(features.index[0])
            clauses.append(
                f"{up} raised and {down} lowered {count(len(features), 'feature')}, most clearly "
                f"{facts.named(diff, clearest)}"
            )
    sentence = f"{'; '.join(clauses)}."
    return Finding("Opposite directions", (sentence,), "opposed", note=f"{facts.least_text(diff)} in both")


def _outcomes(diff: FeatureDiff) -> Finding | None:
    base = diff.base
    sentences = []
    for band in ["all", *facts.bands_of(diff)]:
        contrast = diff.contrast(kind="outcome", checkpoint=base, band=band)
        if contrast is None:
            continue
        where = "All problems" if band == "all" else f"{band.capitalize()} problems"
        if contrast.note:
            sentences.append(f"{where}: not drawn, because {contrast.note}.")
            continue
        text = (
            f"{where}: {contrast.n_discoveries} of {contrast.n_tested} tested features differ between "
            f"successes and failures of the same problem ({facts.least_text(diff)}; "
            f"{count(contrast.n_problems, 'problem')} with both outcomes, {contrast.n_left_out} left out)"
        )
        found = facts.rows(diff, kind="outcome", checkpoint=base, band=band)
        left = facts.survivors_text(found[found.moved]) if found.moved.any() else ""
        text += f". {left}" if left else "."
        for row in facts.records(facts.strongest(found, diff.q, 1)):
            text += f" Largest: {facts.named(diff, int(row.feature))} Δ {facts.effect_text(row)} in successes."
        sentences.append(text)
    return Finding("Success against failure", tuple(sentences), "outcomes") if sentences else None


def _predicted(diff: FeatureDiff) -> Finding | None:
    """Prediction and policy part on all problems, for each run."""
    table = diff.predicted
    if table is None or table.empty:
        return None
    whole = table[(table.part == "policy") & (table.predicted_on == "all") & (table.realised_on == "all")]
    whole = whole[whole.checkpoint.isin(facts.final_checkpoints(diff)) & (whole.note == "")]
    whole = whole[whole.gradient == "natural"]
    clauses = [
        f"{r.checkpoint} {number(r.rho, sign=True)} {interval(r.low, r.high, sign=True)} (p {r.p:.2g})"
        for r in facts.records(whole)
    ]
    if not clauses:
        return None
    told = (
        f"What the rewards of {diff.base}'s own rollouts reinforce, set against the shifts that runs made through new "
        f"responses; rank correlation over features: {'; '.join(clauses)}."
    )
    return Finding("Predicted against realised", (told,), "predicted")


def _along_steps(diff: FeatureDiff) -> Finding | None:
    table = diff.dynamics
    if table is None or table.empty:
        return None
    clauses = []
    for run, rows in table.groupby("run", sort=False):
        clear = rows[(rows.step == rows.step.max()) & (rows.kind != "flat")]
        if len(clear):
            half = f", half of them with their onset by step {clear.onset.median():g}"
            clauses.append(f"{run}: {count(len(clear), 'feature')} moved{half}")
        else:
            clauses.append(f"{run}: no feature moved")
    return Finding("Along the steps", (f"{'; '.join(clauses)}.",), "steps")


def _tested(diff: FeatureDiff) -> Finding | None:
    """A sentence a test: direct answers where they were measured, else the first behaviour."""
    sentences = []
    for test in diff.info.get("causally_tested") or []:
        rows = [row for row in test.get("changes") or [] if row["condition"] in ("features", "random")]
        names = facts.behaviour_order(row["behaviour"] for row in rows)
        for name in ["direct_answer"] if "direct_answer" in names else names[:1]:
            both = {row["condition"]: row for row in rows if row["behaviour"] == name}
            changes = [
                f"{number(row['change'], sign=True)} "
                + (
                    too_few(int(row["n_paired"]))
                    if pd.isna(row["change_low"])
                    else interval(row["change_low"], row["change_high"], sign=True)
                )
                for row in (both["features"], both["random"])
            ]
            what = f"{facts.test_name(test)}: {facts.behaviour_name(name)} {changes[0]}"
            sentences.append(f"{what[0].upper()}{what[1:]}; matched random features {changes[1]}.")
    if not sentences:
        return None
    more = [f"{count(len(sentences) - 3, 'more test')} below."] if len(sentences) > 3 else []
    return Finding("Tested causally", tuple(sentences[:3] + more), "causal")


def _belief(diff: FeatureDiff) -> Finding:
    readers = diff.info["readers"]
    known = [reader["fve"] for reader in readers if reader["fve"] is not None]
    flagged = [reader["id"] for reader in readers if reader["flagged"]]
    sentences = []
    if wrong := [name for name, check in (diff.info.get("second_look") or {}).items() if check["disagrees"]]:
        sentences.append(f"The rollout log does not agree with itself: {listed(wrong)}.")
    if known:
        spread = (
            f"{min(known):.2f}" if f"{min(known):.2f}" == f"{max(known):.2f}" else f"{min(known):.2f}–{max(known):.2f}"
        )
        sentences.append(f"The SAE explains {spread} of the variance of {count(len(readers), 'reader')}.")
    if flagged:
        sentences.append(f"Flagged for bad reconstruction or many tokens left out: {listed(flagged)}.")
    sentences += null_sentences(diff)
    tested = {feature for test in diff.info.get("causally_tested") or [] for feature in test["features"]}
    sentences.append(
        f"{count(len(tested), 'feature')} causally tested, the others not: correlation."
        if tested
        else "Correlation throughout: not causally tested."
    )
    return Finding("How far to believe it", tuple(sentences), "gates")


def survival_sentences(diff: FeatureDiff) -> list[str]:
    """How many discoveries outlive each control: of every run's main shift, and of the base's outcomes."""
    found = []
    for run in facts.final_checkpoints(diff):
        found.append((f"Shift of {run}", diff.main_shift(run, discoveries=True)))
    table = diff.table(discoveries=True, kind="outcome", checkpoint=diff.base, band="all")
    found.append(("Success − failure", table))
    return [
        f"{what}: {count(len(table), 'feature')} found. {left}"
        for what, table in found
        if len(table) and (left := facts.survivors_text(table))
    ]


def null_sentences(diff: FeatureDiff) -> list[str]:
    """What the same tests find where there is nothing to find, on the same rows."""
    if diff.contrasts.empty:
        return []
    whole = diff.contrasts[(diff.contrasts.band == "all") | (diff.contrasts.kind == "interaction")]
    whole = whole[whole.n_null.notna()]
    names = {
        "shift": "trajectories split at random within problem",
        "outcome": "outcomes shuffled within problem",
        "interaction": "the same between bands",
    }
    clauses = []
    for kind, what in names.items():
        mine = whole[whole.kind == kind]
        if len(mine):
            worst = mine.iloc[mine.n_null.argmax()]
            clauses.append(f"{what}: at most {number_of(worst.n_null)} of {int(worst.n_tested)}")
    repeats = diff.info.get("null_repeats", 0)
    told = "Discoveries where there is nothing to find, on the same rows and by the same test (mean of"
    return [f"{told} {repeats:g}): {'; '.join(clauses)}."] if clauses else []


def number_of(mean: float) -> str:
    """A mean count: whole where it is whole."""
    return f"{mean:.0f}" if float(mean).is_integer() else f"{mean:.1f}"
