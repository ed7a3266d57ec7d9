"""The findings in words: plain sentences with numbers.

Works for any series: any names of runs, with or without bands, and with no runs at all, where only outcomes are
contrasted. A behaviour counts as changed where the interval of its change leaves out 0 (`facts.direction`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from tsae.base.statistics import too_few
from tsae.diff.dynamics import FLAT
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.story.gates import bands_note, bands_warning, belief
from tsae.report.story.statements import (
    Statement,
    along_steps,
    at_last_step,
    contrasts,
    found_in,
    main_contrast,
    main_predictions,
    overlap_sentence,
    survive_in_both,
    surviving,
    survivors,
    tests,
    with_stand_in,
)
from tsae.report.story.verdict import TESTED, UNDECIDED, UNMEASURED, WRITES, YES, unreadable, verdict
from tsae.report.text import capitalised, count, interval, listed, number, percent

_MAX_RUNS, _MAX_TESTS = 4, 3
PREDICTED, BELIEF, NEXT = "Predicted against realised", "How far to believe it", "What to look at next"


def findings(diff: FeatureDiff, more: Iterable[Statement] = ()) -> list[Statement]:
    """What a diff found, in the order in which to read it.

    A few statements on runs, on runs in opposition or on outcomes. Then, where they are known: what was predicted, how
    it went along steps, what was tested causally, and `more`; how far to believe it, and what to look at next.
    """
    runs = verdicts(diff)[:_MAX_RUNS]
    found = [*runs, _opposed(diff)] if runs else [_outcomes(diff)]
    kept = [
        Statement("Before all others", (warning,), "gates", warns=True) if (warning := bands_warning(diff)) else None,
        Statement("Bands", (note,), "gates") if (note := bands_note(diff)) else None,
        *found[:_MAX_RUNS],
        _predicted(diff),
        _along_steps(diff),
        tested(diff),
        *more,
        Statement(BELIEF, belief(diff), "gates"),
        _next(diff, runs),
    ]
    return [statement for statement in kept if statement]


def findings_content(diff: FeatureDiff) -> dict[str, Any]:
    """What a diff found, for a program: sentences, behaviours, contrasts, discoveries with their evidence, gates."""
    beside = {"baselines": diff.baselines, "predicted": diff.predicted}
    return {
        "findings": [
            {"heading": f.heading, "sentences": f.sentences, "note": f.note, "lights": [l._asdict() for l in f.lights]}
            for f in findings(diff)
        ],
        "q": diff.q,
        "readers": diff.info["readers"],
        "minimum_effect": diff.minimum_effect,
        "behaviours": diff.behaviours,
        "contrasts": diff.contrasts,
        "discoveries": diff.table(discoveries=True, band="all", outcome="all"),
        **{name: table for name, table in beside.items() if table is not None},
        "causally_tested": tests(diff),
        "second_look": diff.info.get("second_look") or {},
    }


def lead(diff: FeatureDiff) -> str:
    """One sentence: what was compared with what, on how much."""
    runs, table = diff.final_checkpoints, diff.behaviours
    everything = table[table.band == "all"] if len(table) else table
    size = ""
    if len(everything):
        # In a trainer's log every policy answered other problems; contrasts know them all.
        known = [c.n_problems + c.n_left_out for c in contrasts(diff, band="all")]
        problems = max(int(everything.n_problems.max()), *known)
        trajectories = int(everything.drop_duplicates("policy").n_trajectories.sum())
        size = f" on {count(problems, 'problem')} and {count(trajectories, 'response')}"
    if not runs:
        return f"Successes against failures of the same problem, as {diff.base} reads them{size}."
    names = listed(runs) if len(runs) <= 4 else count(len(runs), "run")
    through = f"through {len(diff.features):,} features of a temporal SAE"
    return f"{names} compared with {facts.compared_with(diff)}{size}, {through}."


def verdicts(diff: FeatureDiff) -> list[Statement]:
    """A statement on every run: its verdict, and what is known of its features."""
    return [with_stand_in(diff, _run(diff, checkpoint)) for checkpoint in diff.final_checkpoints]


def _run(diff: FeatureDiff, checkpoint: str) -> Statement:
    found = verdict(diff, checkpoint)
    band = facts.trained_on(diff, checkpoint)
    return Statement(
        heading=checkpoint,
        note=f"trained on {band}" if band in facts.BANDS else "",
        sentences=(found.sentence, found.limit, *_feature_sentences(diff, checkpoint)),
        evidence="behaviours" if found.lights[0].answer != UNMEASURED else "shifts",
        checkpoint=checkpoint,
        lights=found.lights,
    )


def _feature_sentences(diff: FeatureDiff, checkpoint: str) -> list[str]:
    """How many features a run moved, what the controls leave of them, and the clearest of what is left."""
    contrast = main_contrast(diff, checkpoint)
    if contrast is None:
        return []
    if bad := unreadable(diff, checkpoint):
        return [f"{bad} Its features are left out."]
    if contrast.note:
        return [f"Its feature shifts were not drawn: {contrast.note}."]
    moved = found_in(diff, contrast)
    counts = f"{len(moved) or 'none'} of {contrast.n_tested} tested features moved ({facts.least_text(diff)})"
    counts = f"{capitalised(facts.PART_NAMES[contrast.part])}, {counts}"
    if moved.empty:
        unclear = ", none of them clearly by that much" if contrast.n_differs else ""
        return [f"{counts}; {contrast.n_differs} differ detectably{unclear}."]
    sides = {"raised": moved[moved.delta > 0], "lowered": moved[moved.delta < 0]}
    known = f"{counts}: {len(sides['raised'])} raised, {len(sides['lowered'])} lowered."
    if contrast.part == "same_trajectories":
        return [
            f"{known} Both read the same text: length, position and tokens cannot explain it.",
            *_clearest(diff, moved),
        ]
    if not (controls := survivors(moved)):
        return [f"{known} No control for length, position or tokens was measured.", *_clearest(diff, moved)]
    left = surviving(moved)
    overlap = overlap_sentence(diff, kind="shift", checkpoint=checkpoint, part=contrast.part, band="all")
    named = _clearest(diff, left) or ["No feature is named, since none survives all controls."]
    return [f"{known} {controls}", *([overlap] if overlap else []), *named]


def _clearest(diff: FeatureDiff, features: pd.DataFrame) -> list[str]:
    """The clearest feature on either side."""
    sides = {"raised": features[features.delta > 0], "lowered": features[features.delta < 0]}
    clearest = [f"{word} {_told(diff, e)}" for word, side in sides.items() for e in facts.records(side.head(1))]
    return [f"Clearest of these {len(features)}: {'; '.join(clearest)}."] if clearest else []


def _told(diff: FeatureDiff, effect: Any, *sides: str) -> str:
    return f"{facts.named(diff, effect.feature)} Δ {facts.effect_text(effect)}{facts.often_text(effect, *sides)}"


def _opposed(diff: FeatureDiff) -> Statement | None:
    if len(diff.final_checkpoints) < 2:
        return None
    pairs = facts.opposed_pairs(diff)
    if not pairs:
        drawn = [main_contrast(diff, run) for run in diff.final_checkpoints]
        if any(contrast is None or contrast.note for contrast in drawn):
            return None  # What was not tested may be there.
        told = f"No feature was raised by one run and lowered by another ({facts.least_text(diff)})."
        return with_stand_in(diff, Statement("Opposite directions", (told,), "opposed"))
    clauses = []
    for up, down, features in pairs:
        if {up, down} == set(pairs[0][:2]):
            left = survive_in_both(diff, up, down, features)
            clearest = f", of which {len(left) or 'none'} passed all controls" if len(left) < len(features) else ""
            if len(left):
                clearest += f", most clearly {facts.named(diff, int(left[0]))}"
            clauses.append(f"{up} raised and {down} lowered {count(len(features), 'feature')}{clearest}")
    told, note = f"{'; '.join(clauses)}.", f"{facts.least_text(diff)} in both"
    return with_stand_in(diff, Statement("Opposite directions", (told,), "opposed", note=note))


def _outcomes(diff: FeatureDiff) -> Statement | None:
    sentences = []
    found = {c.band: c for c in contrasts(diff, kind="outcome", checkpoint=diff.base)}
    for band in ["all", *facts.bands_of(diff)]:
        if band not in found:
            continue
        c, where = found[band], "All problems" if band == "all" else f"{band.capitalize()} problems"
        if c.note:
            sentences.append(f"{where}: not drawn, because {c.note}.")
            continue
        moved = found_in(diff, c)
        told = (
            f"{where}: {c.n_discoveries} of {c.n_tested} tested features differ between successes and failures of the "
            f"same problem ({facts.least_text(diff)}; {count(c.n_problems, 'problem')} with both outcomes, "
            f"{c.n_left_out} left out)."
        )
        controls = survivors(moved)
        named = facts.records((surviving(moved) if controls else moved).head(1))
        clearest = [f"Clearest: {_told(diff, e, ' of failures', ' of successes')}." for e in named]
        sentences.append(" ".join(part for part in [told, controls, *clearest] if part))
    return Statement("Success against failure", tuple(sentences), "outcomes") if sentences else None


def _predicted(diff: FeatureDiff) -> Statement | None:
    """Prediction and policy part on the band that a run was trained on."""
    table = main_predictions(diff)
    own = table[(table.part == "policy") & table.get("matched", False)]
    clauses = [
        f"{r.checkpoint} {number(r.rho, sign=True)} {interval(r.low, r.high, sign=True)} of about {number(r.ceiling)}"
        for r in facts.records(own)
    ]
    if not clauses:
        return None
    told = (
        f"Do the rewards of {diff.base}'s own responses to the problems that a run was trained on tell which features "
        "it moves? Rank correlation with the shifts that came, and about the most that noise allows: "
    )
    told += f"{'; '.join(clauses)}."
    return with_stand_in(diff, Statement(PREDICTED, (told,), "predicted"))


def _along_steps(diff: FeatureDiff) -> Statement | None:
    clauses = []
    for run, rows in along_steps(diff).items():
        clear = at_last_step(rows)
        clear = clear[clear.kind != FLAT]
        half = f", half of them with their onset by step {clear.onset.median():g}"
        moved = f"{count(len(clear), 'feature')} moved{half}" if len(clear) else "no feature moved"
        clauses.append(f"{run}: {moved}")
    told = Statement("Along the steps", (f"{'; '.join(clauses)}.",), "steps")
    return with_stand_in(diff, told) if clauses else None


def tested(diff: FeatureDiff) -> Statement | None:
    """A sentence a test: direct answers where they were measured, else the first behaviour."""
    sentences = []
    for test in tests(diff):
        rows = [row for row in test.get("changes") or [] if row["condition"] in ("features", "random")]
        names = facts.behaviour_order(row["behaviour"] for row in rows)
        for name in ["direct_answer"] if "direct_answer" in names else names[:1]:
            both = {row["condition"]: row for row in rows if row["behaviour"] == name}
            what = f"{facts.test_name(test)}: {facts.behaviour_name(name)} {_change(both['features'])}"
            share = both["features"].get("share")
            of = "" if share is None or pd.isna(share) else f", {percent(share)} % of what {test['donor']} differs by"
            sentences.append(f"{capitalised(what)}{of}; matched random features {_change(both['random'])}.")
    more = [f"{count(len(sentences) - _MAX_TESTS, 'more test')} below."] if len(sentences) > _MAX_TESTS else []
    return Statement("Tested causally", (*sentences[:_MAX_TESTS], *more), "causal") if sentences else None


def _next(diff: FeatureDiff, found: list[Statement]) -> Statement:
    """What a reader does next, by what is not known yet."""
    clearest, answers = [], {light.question: light for one in found for light in one.lights if light.answer != YES}
    for run in diff.final_checkpoints:
        contrast = main_contrast(diff, run)
        if contrast is not None and not contrast.note and not unreadable(diff, run):
            moved = found_in(diff, contrast)
            left = surviving(moved) if survivors(moved) else moved
            clearest += [f"{facts.named(diff, feature)} ({run})" for feature in left.feature.head(1)]
    said = [f"Open the cards of the clearest features: {listed(clearest)}."] if clearest else []
    if not clearest:
        said.append("Read problems side by side in Show me: no feature is named.")
    for question, answer in ((WRITES[0], UNDECIDED), (WRITES[0], UNMEASURED), (TESTED[0], UNMEASURED)):
        if (light := answers.get(question)) is not None and light.answer == answer:
            said.append(light.sentences[-1])
    said.append("Train once more with another seed: one run does not tell its change from chance in training.")
    return Statement(NEXT, tuple(said), "explorer-section")


def _change(row: dict[str, Any]) -> str:
    few = pd.isna(row["change_low"])
    ends = too_few(int(row["n_paired"])) if few else interval(row["change_low"], row["change_high"], sign=True)
    return f"{number(row['change'], sign=True)} {ends}"
