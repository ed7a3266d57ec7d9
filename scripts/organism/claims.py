"""How each claim is measured on the runs of the study: from records to parts, one value a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from tsae.claims.judging import CLAIMS, STUDIED, Judgement, Part
from tsae.rollouts.difficulty import estimate

SEEDS = "training seeds"
LENGTHS = tuple(range(1, 15))
"""Operations of the chains whose sparsity was measured."""
BASE = "base"
_MOVED = 0.03
"""Accuracy that counts as equal: half of what 400 responses can tell apart."""
_BANDS = ("easy", "medium", "hard")
_PRODUCTIVE = (0.2, 0.8)
"""Pass rates between which a group of responses usually has both outcomes."""
_RISE = 0.05
"""Nats; a choice between two orders has at most .69."""

Record = Mapping[str, Any]
Value = Callable[..., float | None]
"""Effect in a seed, of the records of some arms; None where the seed cannot tell."""


@dataclass(frozen=True)
class Records:
    """The records of all runs, by arm and seed."""

    by_arm: Mapping[str, Mapping[int, dict[str, Any]]]

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Records:
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for record in records:
            found.setdefault(record["arm"], {})[record["seed"]] = record
        for record in [record for runs in found.values() for record in runs.values()]:
            base = found.get(record.get("start", [""])[0], {}).get(0, {})
            if "start" not in base and "measured" in base and "measured" in record and "0" in record["measured"]:
                # A base was measured once, with more responses.
                record["measured"]["0"] = base["measured"]["0"]
        return cls(found)

    def each(self, arms: Sequence[str], value: Value) -> list[float | None]:
        """`value` of the records of these arms, seed by seed; all seeds have the same base."""
        trained = [set(self.by_arm.get(arm, ())) for arm in arms if arm != BASE]
        return [
            value(*(self.by_arm[arm][0 if arm == BASE else seed] for arm in arms))
            for seed in sorted(set.intersection(*trained))
        ]


@dataclass(frozen=True)
class Measured:
    """A part of a claim, and how it is measured."""

    statement: str
    arms: str
    """Their names; the value is that of their records, in this order."""
    value: Value
    margin: float = 0.0
    """See `tsae.claims.judging.Part`, as for the next."""
    equal: bool = False

    def part(self, records: Records) -> Part | None:
        """One value a seed; None where fewer than two of the seeds can tell."""
        values = records.each(self.arms.split(), self.value)
        known = [value for value in values if value is not None]
        if len(known) < min(2, len(values)):
            return None
        return Part(self.statement, known, SEEDS, margin=self.margin, equal=self.equal)


# --- what is measured of a record


def at(record: Record, level: str, name: str = "accuracy", step: int | None = None) -> float:
    """What was measured at a step, by default the last."""
    measured = record["measured"]
    return float(measured[max(measured, key=int) if step is None else str(step)][level][name])


def gain(record: Record, level: str | None = None, name: str = "accuracy") -> float:
    """Change from the start to the end: on a level, or the mean over easy, medium and hard problems."""
    levels = _BANDS if level is None else (level,)
    return fmean(at(record, each, name) - at(record, each, name, 0) for each in levels)


def gained(level: str, name: str = "accuracy", sign: int = 1) -> Value:
    """How much a run gains, or with sign −1 loses."""
    return lambda record: sign * gain(record, level, name)


def more(measure: Callable[[Record], float]) -> Value:
    """How much more the first of two runs has than the second."""
    return lambda a, b: measure(a) - measure(b)


def ahead(level: str, name: str = "accuracy") -> Value:
    """How much higher the first of two runs ends than the second."""
    return more(partial(at, level=level, name=name))


def mean_accuracy(record: Record) -> float:
    return fmean(at(record, level) for level in ("easy", "medium", "long"))


def half_time(record: Record, level: str, name: str, sign: int, least: float = 0.05) -> float | None:
    """Step at which a measure has gone half of the way up (1) or down (−1) from its start to its extreme, linearly
    between measurements. None if the way is no more than `least`, or than this share of a start above 1."""
    steps = sorted(int(step) for step in record["measured"])
    path = np.array([at(record, level, name, step) for step in steps])
    way = sign * (path - path[0])
    if way.max() <= least * max(1.0, path[0]):
        return None
    half = way.max() / 2
    place = int(np.argmax(way >= half))
    share = (half - way[place - 1]) / (way[place] - way[place - 1])
    return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))


def _between(first: float | None, second: float | None) -> float:
    """Steps from one half time to another; 0 where one is never reached."""
    return 0.0 if first is None or second is None else second - first


def lead(name: str, sign: int) -> Value:
    """Steps by which a measure on medium problems is ahead of accuracy, which falls."""
    return lambda r: _between(half_time(r, "medium", name, sign), half_time(r, "medium", "accuracy", -1))


def plans_later(record: Record) -> float:
    """Steps by which right plans are behind right results."""
    return _between(*(half_time(record, "planning", name, 1, 0.0) for name in ("result_right", "plan_right")))


def lone_excess(record: Record) -> float:
    """How much more often lone successes are direct answers than others; step by step, as that share grows."""
    steps = [step for step in record["steps"][:20] if step["lone"] and step["others"]]
    shares = [step["lone_direct"] / step["lone"] - step["others_direct"] / step["others"] for step in steps]
    return float(np.average(shares, weights=[step["lone"] for step in steps]))


def concentration(level: str) -> Value:
    """How much more than nine in ten responses have the commoner format."""
    return lambda r: max(at(r, level, "direct"), 1 - at(r, level, "direct")) - 0.9


def worse_format(level: str) -> Value:
    """How much worse the format that won was in the base than the other; None where none has won."""

    def value(record: Record) -> float | None:
        share, start = at(record, level, "direct"), record["measured"]["0"][level]
        sign = 1.0 if share > 0.5 else -1.0
        return None if 0.1 < share < 0.9 else (start["accuracy_scratchpad"] - start["accuracy_direct"]) * sign

    return value


def left_productive(record: Record) -> float:
    """Share of the lengths with productive pass rates that lose them within 40 steps, beyond a third."""
    begin, end = (np.array(record["lengths"][key], dtype=float) for key in ("0", "40"))
    inside = [(rates > _PRODUCTIVE[0]) & (rates < _PRODUCTIVE[1]) for rates in (begin, end)]
    return float((inside[0] & ~inside[1]).sum() / inside[0].sum()) - 1 / 3


def crossing(level: str) -> Value:
    """How far the run is ahead of the base at k = 1, or the base of the run at k = 64, whichever is less."""

    def share(record: Record, k: int) -> float:
        counts = np.array(record["successes"][level]["flawless"])
        return float(estimate(np.full(len(counts), 64), counts, k).mean())

    return lambda run, base: min(share(run, 1) - share(base, 1), share(base, 64) - share(run, 64))


def sparsity_trend(record: Record) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(LENGTHS, record["sparsity"]).statistic)


def flawless_of_hard(record: Record) -> float:
    return float(np.mean(record["successes"]["hard"]["flawless"])) / 64


def after_error(kind: str) -> Value:
    return lambda r: r["slips"][f"{kind}_after_error"] - r["slips"][f"{kind}_without"]


def first_layer(kind: str, sign: float) -> Value:
    """Effect of exchanging the first layer, less that of the last."""
    return lambda r: sign * (r["layers"][f"{kind}/0"] - r["layers"][f"{kind}/2"])


def entropy_rise(record: Record) -> float:
    path = [at(record, "planning", "entropy/planning", int(step)) for step in record["measured"]]
    return max(path) - at(record, "planning", "entropy/planning", 0)


def learnt(record: Record) -> float:
    """Mean reward of the last five steps, less that of the first two."""
    rewards = [step["reward"] for step in record["steps"]]
    return fmean(rewards[-5:]) - fmean(rewards[:2])


# --- the claims

# fmt: off
STATEMENTS: dict[str, tuple[Measured, ...]] = {
    "a": (
        Measured("Medium gains more than easy, mean of the three bands.", "medium easy", more(gain)),
        Measured("Medium gains more than hard, mean of the three bands.", "medium hard", more(gain)),
    ),
    "b": (
        Measured("Hard training lowers accuracy on easy problems.", "hard", gained("easy", sign=-1)),
        Measured("Hard training lowers accuracy on medium problems.", "hard", gained("medium", sign=-1)),
    ),
    "c": (
        Measured("In 20 steps on hard problems, lone successes are direct answers more often than other successes.",
                 "hard", lone_excess),
        Measured("Without lone successes, hard training leaves more accuracy on medium problems.",
                 "no-lone hard", ahead("medium")),
        Measured("Without dividing by the deviation, it leaves more.", "mean-only hard", ahead("medium")),
    ),
    "d": tuple(
        Measured(f"On medium problems, {words} half of the way to its extreme before accuracy does, in steps.",
                 "hard", lead(name, sign))
        for name, sign, words in (
            ("skipped", 1, "skipped computation goes"),
            ("length", -1, "length goes"),
            ("top_answer", 1, "repetition of one answer goes"),
        )
    ),
    "h": (
        Measured("With backward reformulations, hard training ends higher on medium problems.",
                 "backward hard", ahead("medium")),
        Measured("It ends with more flawless responses to hard problems.", "backward hard", ahead("hard", "flawless")),
    ),
    "i": (
        Measured("With reformulations, guided credit ends higher on medium problems than no credit.",
                 "guided backward", ahead("medium")),
        Measured("It ends with more flawless responses to long problems (7 to 9 operations) than no credit.",
                 "guided backward", ahead("long", "flawless")),
        Measured("It ends with more flawless responses to hard problems than no credit.",
                 "guided backward", ahead("hard", "flawless")),
        Measured("It ends higher on medium problems than credit from shuffled features.",
                 "guided shuffled", ahead("medium")),
    ),
    "j": (
        *(
            Measured(f"After 50 steps of {level} training, more than nine in ten responses have one format.",
                     level, concentration(level))
            for level in _BANDS
        ),
        *(
            Measured(f"Under {level} training, the format that wins is the base's worse one.",
                     level, worse_format(level))
            for level in _BANDS
        ),
    ),
    "k": (
        Measured("After 40 steps of mixed training, over a third of the lengths with pass rate .2 to .8 have left it.",
                 "mixed", left_productive),
        Measured("Adaptive draws end higher (mean of easy, medium and long) than the base's medium band.",
                 "adaptive medium", more(mean_accuracy)),
        Measured("Adaptive draws end higher than equal shares of easy, medium and long problems.",
                 "adaptive mixed", more(mean_accuracy)),
    ),
    "l": (
        Measured("On medium problems, the fifth of the tokens with the highest entropy ends as high as all tokens.",
                 "top-fifth medium", ahead("medium"), _MOVED, equal=True),
        Measured("All tokens end higher than the other four fifths.", "medium rest", ahead("medium")),
    ),
    "m": (
        Measured("From a base that mostly writes the better format, random rewards raise accuracy on medium problems.",
                 "random-quarter", gained("medium")),
        Measured("From a base with both formats in equal shares, they raise it.", "random", gained("medium")),
        Measured("From a base with no better format, they do not raise it.",
                 "random-direct", gained("medium", sign=-1), -_MOVED),
    ),
    "n": tuple(
        Measured(f"On {level} problems, {arm} training is ahead of the base at pass@1 and behind at pass@64.",
                 f"{arm} {BASE}", crossing(level))
        for arm, level in (("medium", "medium"), ("medium", "hard"), ("hard", "hard"), ("easy", "medium"))
    ),
    "o": tuple(
        Measured(f"After {arm} training, the last hidden state is sparser on longer chains (rank correlation).",
                 arm, sparsity_trend)
        for arm in (*_BANDS, "mixed")
    ),
    "p": (
        Measured("Medium training makes results on hard problems follow from their own operands more often.",
                 "medium", gained("hard", "coherent")),
        Measured("It does not make more responses to hard problems flawless (of 2,560).",
                 f"medium {BASE}", more(flawless_of_hard), 0.005, equal=True),
        Measured("It does not make more responses to medium problems flawless.",
                 "medium", gained("medium", "flawless"), _MOVED, equal=True),
    ),
    "q": (
        Measured("A result is wrong more often after an error that the model made (long problems, mixed training).",
                 "mixed", after_error("natural"), 0.01),
        Measured("A step errs more often after a planted error.", "mixed", after_error("planted"), 0.01),
    ),
    "r": (
        Measured("The base's first layer, put back into a hard run, restores more medium accuracy than its last.",
                 "hard", first_layer("restored", 1)),
        Measured("Putting the hard run's first layer into the base costs more than its last.",
                 "hard", first_layer("damaged", -1)),
    ),
    "s": (
        Measured("Where an order has to be chosen, right results go half of their way before right plans do, in steps.",
                 "planning", plans_later),
        Measured("The entropy of planning rises from the start to its highest (nats a step).",
                 "planning", entropy_rise, _RISE),
        Measured("The entropy of execution falls from the start to the end (nats a step).",
                 "planning", gained("planning", "entropy/execution", -1)),
    ),
    "t": (
        Measured("Without a KL anchor, the run that starts on a second task is farther from the base (nats).",
                 "second-far second-near", more(lambda r: r["start_distance"])),
        Measured("It learns less of the second task, direct answers (change of the reward in 20 steps).",
                 "second-near second-far", more(learnt)),
        Measured("The anchored run learns as much of it as the base.", "second-near second-base", more(learnt), -0.1),
    ),
    "u": (
        Measured("A reward for the expert's steps ends with more flawless responses to hard problems than plain GRPO.",
                 "expert-steps hard", ahead("hard", "flawless")),
        Measured("It ends with more accuracy on medium problems.", "expert-steps hard", ahead("medium")),
    ),
    "v": (
        Measured("With fresh problems throughout, leaving out easy ones ends higher (mean of easy, medium and long).",
                 "no-easy mixed", more(mean_accuracy)),
        Measured("With four problems of each kind, leaving out easy ones ends lower.",
                 "mixed-few no-easy-few", more(mean_accuracy)),
    ),
}
# fmt: on

CAVEATS = {
    "d": "Measured every 5 steps under hard training; a lead of less cannot be seen.",
    "j": "All seeds share a base, so an interval has no width where the same format wins in all of them.",
    "m": "Each batch is used four times; with one use nothing is clipped, and random rewards have no direction.",
    "n": "Flawless responses only, as a guess is right one time in ten. 40 problems with 64 responses each.",
    "o": "Longer chains also are longer texts; nothing here separates the two.",
    "s": "Measured every 5 steps. The highest of 13 measurements lies a little above the start by chance, hence the "
    "margin. The source measures the variety of planning phrases, and this the entropy of one choice.",
}

FEATURES = "features"
"""The arm whose only record holds what the dictionaries say of all seeds."""

FAMILIES: dict[str, tuple[str, dict[str, tuple[str, str, int]], str]] = {
    "e": (
        "easy",
        {
            "Easy training raises the direct-answer family.": ("direct-answer", "shift", 1),
            "It raises the basic-computation family.": ("basic-computation", "shift", 1),
            "It lowers the deliberation family.": ("deliberation", "shift", -1),
        },
        "Ablating the direct-answer family lowers the share of direct answers more than random features do.",
    ),
    "f": (
        "hard",
        {
            "Hard training raises the deliberation family.": ("deliberation", "shift", 1),
            "On hard problems it is higher in successes than in failures.": ("deliberation", "outcome", 1),
        },
        "Ablating it lowers accuracy on hard problems more than random features do.",
    ),
    "g": (
        "medium",
        {
            "Medium training raises the basic-computation family.": ("basic-computation", "shift", 1),
            "It raises the deliberation family.": ("deliberation", "shift", 1),
        },
        "Ablating both lowers accuracy on medium problems more than random features do.",
    ),
}
"""Claims on families of features: the run; statement -> family, measure and sign; the statement on ablations."""


# --- judging


def judge(records: Records) -> dict[str, Judgement]:
    """Every claim's judgement, by its letter."""
    return {key: judge_claim(key, records) for key in STUDIED}


def judge_claim(key: str, records: Records, dictionary: str = "T-SAE") -> Judgement:
    """The judgement of a claim; one on families of features sees them through a dictionary."""
    asked = STATEMENTS.get(key, ())
    needed = dict.fromkeys(arm for one in asked for arm in one.arms.split()) or [FEATURES]
    if not set(needed) <= set(records.by_arm):
        needs = f"runs of {', '.join(needed)}"
        return Judgement(CLAIMS[key], needs=needs, add="Give the records of the study.")
    if key in FAMILIES:
        return _of_families(key, records, dictionary)
    parts = tuple(part for one in asked if (part := one.part(records)) is not None)
    return Judgement(CLAIMS[key], parts, caveat=_starts(records) if key == "t" else CAVEATS.get(key, ""))


def _starts(records: Records) -> str:
    """Where the two runs that learn a second task start."""
    starts = [
        np.mean(records.each([arm], lambda record: at(record, "medium", "accuracy", 0)))  # type: ignore[arg-type]
        for arm in ("second-near", "second-far")
    ]
    return f"Both runs start at {' and '.join(f'{start:.2f}' for start in starts)} on medium problems, anchored first."


def _of_families(key: str, records: Records, dictionary: str) -> Judgement:
    """Shifts in standard deviations of the base's scores; a family without features leaves its part out."""
    run, wanted, causal = FAMILIES[key]
    found = records.by_arm[FEATURES][0]["dictionaries"][dictionary]
    shifts = found["shifts"].get(run, {})
    parts, missing = [], []
    for statement, (family, name, sign) in wanted.items():
        kept = [sign * value for value in shifts.get(family, {}).get(name, []) if value is not None]
        if len(kept) < 2:
            missing.append(f"{family} ({name})")
        else:
            parts.append(Part(statement, kept, SEEDS))
    if "ablations" in found:
        parts.append(Part(causal, found["ablations"][run], SEEDS))
    if not parts:
        needs = f"features of the families with {dictionary}"
        return Judgement(CLAIMS[key], needs=needs, add="Use another dictionary.")
    caveat = f"Not tested with {dictionary}: {', '.join(missing)}. " if missing else ""
    same = [f"{family} {np.mean(cell['same_texts']):+.2f}" for family, cell in shifts.items()]
    return Judgement(
        CLAIMS[key], tuple(parts), caveat=f"{caveat}While it reads the base's own responses: {', '.join(same)}."
    )
