"""The verdict on a run: what changed, in one sentence, and three lights with what each of them rests on.

A light says yes, no, not decided or not measured.

- *What it writes changed*: the paired change of a behaviour passes Holm's test over all of them. No, if every interval
  of a change is narrow around 0.
- *What it computes on the same text changed*: features moved where both read the same text (so that length, position
  and tokens are the same), more of them than noise as large as the update moves. No, if none moved where half a
  standard deviation would have been found.
- *Tested causally*: an edit of features did more than the same edit of random features, by Holm's test over all
  behaviours of all tests. No, if no behaviour shows more. Only after such a test does a sentence use a verb of causes.

Where a gate is closed, its sentence takes the place of the finding: a log that contradicts itself, weights that are the
base's, a reader that the SAE reconstructs badly, noise that moves as many features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student

from tsae.base.statistics import FEWEST, too_few
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.story.statements import Light, contrasts, tests
from tsae.report.text import capitalised, count, listed, number, percent

YES, NO, UNDECIDED, UNMEASURED = "yes", "no", "not decided", "not measured"
WRITES = ("What it writes changed", "writes")
COMPUTES = ("What it computes on the same text changed", "same text")
TESTED = ("Tested causally", "causes")
NARROW = 0.05
"""A change whose whole interval is within this share of responses (or of the length) counts as none."""
_FINDABLE = 0.5
"""|Δ| that a contrast has to be able to find before “none moved” means no."""
_PHRASES = {
    "direct_answer": ("answers more often without steps", "writes out its steps more often"),
    "skipped_steps": ("skips more steps", "skips fewer steps"),
    "response_length": ("writes longer responses", "writes shorter responses"),
    "truncated": ("is cut off more often", "is cut off less often"),
    "looping": ("loops more often", "loops less often"),
    "repeated_answer": ("repeats its answer more often", "repeats its answer less often"),
    "unanswered": ("leaves more problems without an answer", "leaves fewer problems without an answer"),
}
_SAMPLE = "Sample both on the same problems: `tsae run … --sample 4 --to OTHER`."
_MORE = "Compare base and run on more problems: both have the same ones."


class Change(NamedTuple):
    """A behaviour of the base and of a run, with their paired change."""

    name: str
    band: str
    before: float
    after: float
    change: float
    low: float
    high: float
    n: int
    is_share: bool

    @property
    def size(self) -> float:
        """In shares of responses, or of the base's length."""
        return abs(self.change) if self.is_share else abs(self.change) / max(abs(self.before), 1e-9)

    @property
    def is_narrow(self) -> bool:
        unit = 1.0 if self.is_share else max(abs(self.before), 1e-9)
        return max(abs(self.low), abs(self.high)) <= NARROW * unit

    @property
    def numbers(self) -> str:
        """“(45 → 84 %)”."""
        if self.is_share:
            return f"({percent(self.before)} → {percent(self.after)} %)"
        unit = " tokens" if self.name == "response_length" else ""
        return f"({number(self.before)} → {number(self.after)}{unit})"

    @property
    def named(self) -> str:
        """“accuracy on medium (45 → 84 %)”."""
        where = "" if self.band == "all" else f" on {self.band}"
        return f"{facts.behaviour_name(self.name)}{where} {self.numbers}"


class Verdict(NamedTuple):
    """What a run's statement says."""

    sentence: str
    limit: str
    lights: tuple[Light, Light, Light]


def verdict(diff: FeatureDiff, run: str) -> Verdict:
    """The verdict on a run's last checkpoint."""
    known = measured_changes(diff, run)
    clear = clear_changes(known, float(diff.info["config"]["confidence"]))
    writes, computes, tested = _writes(diff, run, known, clear), _computes(diff, run), _tested(diff, run)
    after = _after(diff, run)
    if same_weights(diff, run):
        sentence = f"{after}, the weights are the base's: nothing was trained, and what differs is chance in sampling."
    elif writes.answer == YES:
        sentence = f"{after}, the model {listed(_clauses(known, clear))}."
    else:
        sentence = f"{after}, {_unchanged(diff, known, writes)}; {_same_text(computes)}."
    if writes.answer == YES and not any(change.name == "accuracy" for change in known):
        sentence += " Whether it solves more is not known: no response has a reward or an outcome."
    limit = {
        YES: f"One run. Tested causally: {tested.sentences[0]}",
        NO: "One run. The edited features did no more than random ones: what causes the change is not known.",
        UNDECIDED: "One run. Features were edited, and what causes the change is not decided.",
    }.get(tested.answer, "One run; what causes the change is not tested.")
    limit = "One run." if same_weights(diff, run) else limit
    return Verdict(_gate(diff) + sentence, limit, (writes, computes, tested))


def measured_changes(diff: FeatureDiff, run: str) -> list[Change]:
    """Accuracy by band (over everything where there are no bands, or where they are training steps), other behaviours
    over everything."""
    bands = [] if (diff.info.get("bands") or {}).get("refused") else list(facts.BANDS)
    found = []
    for name in facts.behaviours_of(diff):
        split = [band for band in bands if facts.change_of(diff, run, band, name)] if name == "accuracy" else []
        for band in split or ["all"]:
            if both := facts.change_of(diff, run, band, name):
                before, after = both
                means = float(before["mean"]), float(after["mean"])
                change, low, high = (float(after[end]) for end in ("change", "change_low", "change_high"))
                n, is_share = int(after["n_paired"]), facts.is_share(diff, name)
                found.append(Change(name, band, *means, change, low, high, n, is_share))
    return found


def clear_changes(changes: Sequence[Change], confidence: float) -> list[Change]:
    """The changes that pass Holm's test (1979) over all of them, in their order.

    Intervals are Student's over problems, so that each gives back its p. With five intervals side by side, one leaves
    out 0 by chance in two of ten runs.
    """
    known = [change for change in changes if change.n >= FEWEST and np.isfinite(change.low)]
    passed = _holm([(change.low, change.high, change.n - 1, confidence) for change in known], 1 - confidence)
    return [change for change in changes if any(change is known[place] for place in passed)]


def _holm(intervals: Sequence[tuple[float, float, int, float]], alpha: float) -> list[int]:
    """The places of the intervals that pass Holm's test, the smallest p first.

    Args:
        intervals: (low, high, degrees of freedom, confidence) of intervals by Student's t.
        alpha: the chance of any false one.
    """
    p = []
    for low, high, df, confidence in intervals:
        error, size = (high - low) / 2 / student.ppf(0.5 + confidence / 2, df), abs(high + low) / 2
        p.append(2 * student.sf(size / error, df) if error > 0 else float(size == 0))
    order = [int(place) for place in np.argsort(p, kind="stable")]
    first = (rank for rank, place in enumerate(order) if p[place] > alpha / (len(p) - rank))
    return order[: next(first, len(p))]


def same_weights(diff: FeatureDiff, run: str) -> bool:
    """Whether the run's weights are the base's."""
    record = (diff.info.get("noise") or {}).get(run) or {}
    return record.get("update_norm") == 0


def _gate(diff: FeatureDiff) -> str:
    """What has to be read before the sentence, where the log contradicts itself."""
    checks = [name for name, check in (diff.info.get("second_look") or {}).items() if check["disagrees"]]
    return f"The rollout log contradicts itself ({listed(checks)}), and what follows may be wrong. " if checks else ""


def _after(diff: FeatureDiff, run: str) -> str:
    base, reader = diff.info["readers"][0], next(r for r in diff.info["readers"] if r["id"] == run)
    on, step = reader.get("trained_on"), reader.get("step")
    if on in facts.BANDS:
        return f"After training on {on} problems"
    if on and on not in (reader.get("run"), run):
        return f"After training on {on}"
    if step and base.get("step"):
        return f"From step {base['step']} to step {step}"
    return f"After {count(step, 'step')} of training" if step else "After training"


def _clauses(known: Sequence[Change], clear: Sequence[Change]) -> list[str]:
    """The largest change of style, then accuracy by direction, the largest first."""
    style = sorted((c for c in clear if c.name != "accuracy"), key=lambda c: (not c.is_share, -c.size))
    clauses = [_style(change) for change in style[:1]]
    accuracy = sorted((c for c in known if c.name == "accuracy"), key=lambda c: -c.size)
    for word, side in (("more", 1), ("fewer", -1)):
        mine = [c for c in accuracy if c in clear and np.sign(c.change) == side]
        parts = [f"{'' if c.band == 'all' else c.band} {{}}{c.numbers}".strip() for c in mine]
        if parts:
            named = [part.format("") for part in parts[:-1]] + [parts[-1].format("problems ")]
            clauses.append(f"solves {word} {listed(named)}")
    if accuracy and not any(c in clear for c in accuracy):
        first = accuracy[0]
        where = "" if first.band == "all" else f" on {first.band} problems"
        open_ = f"shows no clear change in accuracy ({percent(first.before)} → {percent(first.after)} %{where})"
        narrow = f"stays within {percent(NARROW)} points in accuracy"
        clauses.append(narrow if all(c.is_narrow for c in accuracy) else open_)
    return clauses


def _style(change: Change) -> str:
    more, less = _PHRASES.get(change.name, (f"shows more {facts.behaviour_name(change.name)}",) * 2)
    phrase = more if change.change > 0 else less.replace("shows more", "shows less")
    shown = f"direct answers {change.numbers[1:-1]}" if change.name == "direct_answer" else change.numbers[1:-1]
    return f"{phrase} ({shown})"


def _unchanged(diff: FeatureDiff, known: Sequence[Change], writes: Light) -> str:
    """What is known of the responses where no change is."""
    if writes.answer == UNMEASURED:
        step = facts.stand_in(diff).partition(",")[0].removeprefix("against ")
        return f"what the model writes is not compared with {step or 'the base'}"
    first = next((change for change in known if change.name == "accuracy"), known[0])
    if writes.answer == NO:
        return f"what the model writes did not change ({first.named})"
    if (n := max(change.n for change in known)) < FEWEST:
        both = f"both policies answered {n} of the same problems, and {FEWEST} are needed"
        return f"whether what the model writes changed is not decided: {both}"
    widest = next((c for c in known if c.name == "accuracy" and c.n >= FEWEST), first)
    return f"it is not decided whether what the model writes changed ({widest.named})"


def _same_text(computes: Light) -> str:
    what = "what it computes on the same text"
    return {
        YES: f"{what} changed",
        NO: f"{what} did not change",
        UNDECIDED: f"whether {what} changed is not decided",
        UNMEASURED: f"{what} is not measured",
    }[computes.answer]


def _writes(diff: FeatureDiff, run: str, known: Sequence[Change], clear: Sequence[Change]) -> Light:
    evidence = "behaviours"
    if not known:
        answered = set(diff.behaviours.get("policy", []))
        why = f"{run} answered no problem that {diff.base} answered."
        if missing := [policy for policy in (diff.base, run) if policy not in answered]:
            why = f"There is no response of {' or '.join(missing)}."
        if answered and all(policy.startswith("steps ") for policy in answered):  # `tsae.rollouts.behaviours.by_thirds`
            why = "Single steps have too few problems to compare: behaviours are those of thirds of the run."
        return Light(*WRITES, UNMEASURED, (why, _SAMPLE), evidence)
    if same_weights(diff, run):
        return Light(*WRITES, NO, ("The weights are the base's.",), evidence)
    if clear:
        told = f"{len(clear)} of {count(len(known), 'measure')} changed: {listed([c.named for c in clear])}."
        return Light(*WRITES, YES, (told,), evidence)
    if all(change.is_narrow for change in known):
        told = f"All {count(len(known), 'interval')} of a change lie within ±{percent(NARROW)} points."
        return Light(*WRITES, NO, (told,), evidence)
    n = max(change.n for change in known)
    if n < FEWEST:
        mine = diff.behaviours[diff.behaviours.policy.isin([diff.base, run])]
        how = _SAMPLE if mine.n_problems.max() > n else _MORE
        return Light(*WRITES, UNDECIDED, (f"{capitalised(too_few(n))}.", how), evidence)
    wide = max(known, key=lambda change: (change.high - change.low) * (1 if change.is_share else 0))
    told = f"No change is clear on {n} problems, and intervals are wide: {wide.named}. More problems decide it."
    return Light(*WRITES, UNDECIDED, (told,), evidence)


def _computes(diff: FeatureDiff, run: str) -> Light:
    evidence = "shifts"
    keys = {"checkpoint": run, "part": "same_trajectories", "band": "all", "outcome": "all"}
    c = next(iter(contrasts(diff, kind="shift", **keys)), None)
    if same_weights(diff, run):
        return Light(*COMPUTES, NO, ("The weights are the base's.",), evidence)
    if bad := unreadable(diff, run):
        return Light(*COMPUTES, UNDECIDED, (bad,), "gates")
    if c is not None and c.note and not c.n_left_out:
        return Light(*COMPUTES, UNDECIDED, (f"{capitalised(c.note)}.", _MORE), evidence)
    if c is None or c.note:
        why = f"{run} did not read the base's responses." if c is None else f"{capitalised(c.note)}."
        return Light(*COMPUTES, UNMEASURED, (why, "Let both read the same: `tsae capture … --plan all`."), evidence)
    same = f"the same {count(c.n_trajectories // 2, 'response')} to {count(c.n_problems, 'problem')}"
    moved = f"{c.n_discoveries or 'None'} of {c.n_tested} features moved on {same} ({facts.least_text(diff)})."
    if not c.n_discoveries:
        if c.detectable_delta <= _FINDABLE:
            return Light(*COMPUTES, NO, (f"{moved} A shift of {number(c.detectable_delta)} would be found.",), evidence)
        least = "No shift" if np.isinf(c.detectable_delta) else f"Only a shift of {number(c.detectable_delta)} or more"
        return Light(*COMPUTES, UNDECIDED, (f"{moved} {least} would be found with so few problems.",), evidence)
    record = (diff.info.get("noise") or {}).get(run)
    if record is None:
        more = "What noise as large as the update moves was not measured: give `tsae diff` --series and --sae."
        return Light(*COMPUTES, UNDECIDED, (moved, more), "gates")
    if record["note"]:
        return Light(*COMPUTES, UNDECIDED, (moved, f"Noise cannot be set beside it: {record['note']}."), "gates")
    noise, tested = max(zip(record["noise_moved"], record["noise_tested"], strict=True), key=lambda x: x[0] / x[1])
    mine = record["n_moved"] / record["n_tested"]
    beside = (
        f"On {count(record['n_problems'], 'problem')} that were also read with noise in the weights, the run moves "
        f"{record['n_moved']} of {record['n_tested']} features; noise as large as its update moves {noise} of {tested}."
    )
    if mine <= 2 * noise / tested:
        return Light(*COMPUTES, UNDECIDED, (moved, f"{beside} That is not clearly more."), "gates")
    return Light(*COMPUTES, YES, (moved, beside), evidence)


def unreadable(diff: FeatureDiff, run: str) -> str:
    """That the SAE does not show what the base or the run computes; empty where it does."""
    for reader in diff.info["readers"]:
        if reader["id"] in (diff.base, run) and reader["flagged"]:
            fve, least = reader["fve"], diff.info["config"]["min_fve"]
            if fve is not None and fve >= least:
                return f"The SAE leaves out {percent(reader['outlier_share'])} % of the tokens of {reader['id']}."
            share = "nothing" if fve is None else f"{percent(fve)} %"
            return f"The SAE explains {share} of the variance of {reader['id']}; {percent(least)} % are needed."
    return ""


def _tested(diff: FeatureDiff, run: str) -> Light:
    """Over all behaviours of all tests; direct answers are named first."""
    mine = [test for test in tests(diff) if run in (test["checkpoint"], test.get("donor"))]
    rows = [(test, row) for test in mine for row in test.get("changes") or [] if row["condition"] == "features"]
    if not rows:
        how = "To test features, repeat `tsae run` with --causal, or use `tsae causal`."
        return Light(*TESTED, UNMEASURED, ("No features were edited.", how), "causal")
    rows.sort(key=lambda row: row[1]["behaviour"] != "direct_answer")
    told = [f"{capitalised(facts.test_name(test))}: {_amount(diff, row)}" for test, row in rows]
    known, intervals, beyond = [], [], []
    for place, (test, row) in enumerate(rows):
        low, high = row.get("beyond_low"), row.get("beyond_high")
        if pd.isna([low, high]).any():
            continue
        known.append(place)
        # An interval over sets and problems: p by the fewer of both errs on the side of no.
        df = min(test["n_random"], int(row["n_paired"])) - 1
        intervals.append((low, high, df, test["confidence"]))
        if min(row["change"] * low, row["change"] * high) > 0:  # else it did less than random features
            beyond.append(place)
    passed = {known[place] for place in _holm(intervals, 1 - float(diff.info["config"]["confidence"]))}
    n = count(len(known), "measure")
    if sure := [told[place] for place in beyond if place in passed]:
        return Light(*TESTED, YES, tuple(f"{what}, more than with random features." for what in sure[:2]), "causal")
    if beyond:
        more = f"{told[beyond[0]]}, more than with random features, but not by Holm's test over {n}."
        return Light(*TESTED, UNDECIDED, (more,), "causal")
    if known:
        no = (f"{told[known[0]]}, no more than with random features.", f"0 of {n} went beyond random features.")
        return Light(*TESTED, NO, no, "causal")
    few = "problems" if rows[0][1]["n_paired"] < FEWEST else "random features"
    return Light(*TESTED, UNDECIDED, (f"{told[0]}, with too few {few} to compare with.",), "causal")


def _amount(diff: FeatureDiff, row: dict[str, Any]) -> str:
    """“direct answers +30.0 points”, “response length +12.0 tokens”."""
    unit = " points" if facts.is_share(diff, row["behaviour"]) else ""
    unit = " tokens" if row["behaviour"] == "response_length" else unit
    change = number(row["change"] * (100 if unit == " points" else 1), sign=True)
    return f"{facts.behaviour_name(row['behaviour'])} {change}{unit}"
