"""How each claim is measured on the runs of `scripts/claims_study.py`: from records to parts, one value a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from organism.examining import LENGTHS
from tsae.claims.catalogue import CLAIMS
from tsae.claims.judging import Judgement, Part, untestable
from tsae.rollouts.difficulty.pass_at_k import estimate

SEEDS = "training seeds"
_MOVED = 0.03
"""Accuracy that counts as equal: half of what 400 responses can tell apart."""
_BANDS = ("easy", "medium", "hard")
_PRODUCTIVE = (0.2, 0.8)
"""Pass rates between which a group of responses usually has both outcomes."""


@dataclass(frozen=True)
class Records:
    """The records of all runs, by arm and seed."""

    by_arm: Mapping[str, Mapping[int, Mapping[str, Any]]]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Records:
        found: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            found.setdefault(record["arm"], {})[record["seed"]] = record
        return cls(found)

    def base(self, name: str = "base") -> Mapping[str, Any]:
        """Record of a base."""
        return self.by_arm[name][0]

    def seeds(self, *arms: str) -> list[int]:
        """Seeds that all of these arms have."""
        return sorted(set.intersection(*(set(self.by_arm.get(arm, ())) for arm in arms)))

    def each(self, arms: Sequence[str], value: Callable[..., float]) -> list[float]:
        """`value` of the records of these arms, seed by seed."""
        return [value(*(self.by_arm[arm][seed] for arm in arms)) for seed in self.seeds(*arms)]


def at(record: Mapping[str, Any], level: str, name: str = "accuracy", step: int | None = None) -> float:
    """What was measured at a step, by default the last."""
    measured = record["measured"]
    return float(measured[max(measured, key=int) if step is None else str(step)][level][name])


def gain(record: Mapping[str, Any], level: str | None = None, name: str = "accuracy") -> float:
    """Change from the start to the end: on a level, or the mean over easy, medium and hard problems."""
    levels = _BANDS if level is None else (level,)
    return fmean(at(record, each, name) - at(record, each, name, 0) for each in levels)


def part(records: Records, statement: str, arms: Sequence[str], value: Callable[..., float], **more: Any) -> Part:
    """A part with one value a seed."""
    return Part(statement, records.each(arms, value), SEEDS, **more)


def judge(records: Records) -> dict[str, Judgement]:
    """Every claim's judgement, by its letter."""
    return {key: JUDGES[key](records) if key in JUDGES else _missing(key) for key in CLAIMS}


def _missing(key: str) -> Judgement:
    return untestable(CLAIMS[key], "runs that this study does not have", "See the row in docs/claims.md.")


def inverted_u(records: Records) -> Judgement:
    def more(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
        return gain(a) - gain(b)

    return Judgement(
        CLAIMS["a"],
        (
            part(records, "Medium gains more than easy, mean of the three bands.", ("medium", "easy"), more),
            part(records, "Medium gains more than hard, mean of the three bands.", ("medium", "hard"), more),
            part(records, "Easy gains more than hard, mean of the three bands.", ("easy", "hard"), more),
        ),
    )


def hard_harms(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["b"],
        (
            part(records, "Hard training lowers accuracy on easy problems.", ("hard",), lambda r: -gain(r, "easy")),
            part(records, "Hard training lowers accuracy on medium problems.", ("hard",), lambda r: -gain(r, "medium")),
        ),
    )


def lone_successes(records: Records) -> Judgement:
    def excess(record: Mapping[str, Any]) -> float:
        total = {key: sum(step[key] for step in record["steps"][:20]) for key in record["steps"][0] if key in _COUNTED}
        return total["lone_direct"] / total["lone"] - total["others_direct"] / total["others"]

    return Judgement(
        CLAIMS["c"],
        (
            part(
                records,
                "In 20 steps on hard problems, lone successes are direct answers more often than other successes.",
                ("hard",),
                excess,
            ),
            part(
                records,
                "Without lone successes, hard training leaves more accuracy on medium problems.",
                ("no-lone", "hard"),
                ahead("medium"),
            ),
            part(records, "Without dividing by the deviation, it leaves more.", ("mean-only", "hard"), ahead("medium")),
        ),
    )


_COUNTED = ("lone", "others", "lone_direct", "others_direct")


def behaviour_first(records: Records) -> Judgement:
    def lead(name: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda record: half_time(record, "medium", "accuracy") - half_time(record, "medium", name)

    return Judgement(
        CLAIMS["d"],
        tuple(
            part(
                records,
                f"On medium problems, {words} half of the way to its extreme before accuracy does, in steps.",
                ("hard",),
                lead(name),
            )
            for name, words in (
                ("skipped", "skipped computation goes"),
                ("length", "length goes"),
                ("top_answer", "repetition of one answer goes"),
            )
        ),
        caveat="Measured every 5 steps under hard training; a lead of less cannot be seen.",
    )


def half_time(record: Mapping[str, Any], level: str, name: str) -> float:
    """Step at which a measure has gone half of the way from its start to where it is furthest from it; linear between
    measurements."""
    steps = sorted(int(step) for step in record["measured"])
    path = np.array([at(record, level, name, step) for step in steps])
    way = np.abs(path - path[0])
    half = way.max() / 2
    place = int(np.argmax(way >= half))
    if place == 0:
        return 0.0
    share = (half - way[place - 1]) / (way[place] - way[place - 1])
    return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))


def ahead(level: str, name: str = "accuracy") -> Callable[[Mapping[str, Any], Mapping[str, Any]], float]:
    """How much higher the first of two runs ends than the second."""
    return lambda a, b: at(a, level, name) - at(b, level, name)


def backward(records: Records) -> Judgement:
    pair = ("backward", "hard")
    return Judgement(
        CLAIMS["h"],
        (
            part(
                records,
                "With backward reformulations, hard training ends higher on medium problems.",
                pair,
                ahead("medium"),
            ),
            part(records, "It ends higher on hard problems.", pair, ahead("hard")),
            part(records, "It ends with more flawless responses to hard problems.", pair, ahead("hard", "flawless")),
        ),
    )


def credit(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["i"],
        (
            part(
                records,
                "With reformulations, guided credit ends higher on medium problems than no credit.",
                ("guided", "backward"),
                ahead("medium"),
            ),
            part(
                records,
                "It ends with more flawless responses to long problems (7 to 9 operations) than no credit.",
                ("guided", "backward"),
                ahead("long", "flawless"),
            ),
            part(records, "It ends higher on hard problems than no credit.", ("guided", "backward"), ahead("hard")),
            part(
                records,
                "It ends higher on medium problems than credit from shuffled features.",
                ("guided", "shuffled"),
                ahead("medium"),
            ),
        ),
    )


def one_format(records: Records) -> Judgement:
    def concentration(level: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda r: max(at(r, level, "direct"), 1 - at(r, level, "direct")) - 0.9

    def against(level: str) -> Callable[[Mapping[str, Any]], float]:
        # Positive if the worse format won.
        def value(record: Mapping[str, Any]) -> float:
            start = record["measured"]["0"][level]
            won = 1.0 if at(record, level, "direct") > 0.5 else -1.0
            return won * (start["accuracy_scratchpad"] - start["accuracy_direct"])

        return value

    return Judgement(
        CLAIMS["j"],
        tuple(
            part(
                records,
                f"After 60 steps of {level} training, more than nine in ten responses have one format.",
                (level,),
                concentration(level),
            )
            for level in _BANDS
        )
        + tuple(
            part(
                records,
                f"Under {level} training, the format that wins was the worse one at the start.",
                (level,),
                against(level),
            )
            for level in _BANDS
        ),
    )


def drifts(records: Records) -> Judgement:
    def moved(record: Mapping[str, Any]) -> float:
        lengths = record["lengths"]
        begin, end = (np.array(lengths[key], dtype=float) for key in ("0", "40"))
        inside = [(rates > _PRODUCTIVE[0]) & (rates < _PRODUCTIVE[1]) for rates in (begin, end)]
        return float((inside[0] & ~inside[1]).sum() / inside[0].sum()) - 1 / 3

    def mean_accuracy(record: Mapping[str, Any]) -> float:
        return fmean(at(record, level) for level in ("easy", "medium", "long", "hard"))

    return Judgement(
        CLAIMS["k"],
        (
            part(
                records,
                "After 40 steps of mixed training, over a third of the lengths with pass rate .2 to .8 have left it.",
                ("mixed",),
                moved,
            ),
            part(
                records,
                "Adaptive draws end higher (mean of easy, medium, long and hard) than the base's medium band.",
                ("adaptive", "medium"),
                lambda a, b: mean_accuracy(a) - mean_accuracy(b),
            ),
            part(
                records,
                "Adaptive draws end higher than equal shares of easy, medium and long problems.",
                ("adaptive", "mixed"),
                lambda a, b: mean_accuracy(a) - mean_accuracy(b),
            ),
        ),
    )


def choice_points(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["l"],
        (
            part(
                records,
                "On medium problems, the fifth of the tokens with the highest entropy ends as high as all tokens.",
                ("top-fifth", "medium"),
                ahead("medium"),
                margin=_MOVED,
                equal=True,
            ),
            part(records, "All tokens end higher than the other four fifths.", ("medium", "rest"), ahead("medium")),
        ),
    )


def spurious(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["m"],
        (
            part(
                records,
                "From a base that mostly writes the better format, random rewards raise accuracy on medium problems.",
                ("random-quarter",),
                lambda r: gain(r, "medium"),
            ),
            part(
                records,
                "From a base with both formats in equal shares, they raise it.",
                ("random",),
                lambda r: gain(r, "medium"),
            ),
            part(
                records,
                "From a base with no better format, they do not move it.",
                ("random-direct",),
                lambda r: gain(r, "medium"),
                margin=_MOVED,
                equal=True,
            ),
        ),
        caveat="Each batch is used four times; with one use nothing is clipped, and random rewards have no direction.",
    )


def overtakes(records: Records) -> Judgement:
    def base_ahead(run: Mapping[str, Any], level: str, what: str, k: int) -> float:
        def share(record: Mapping[str, Any]) -> float:
            counts = np.array(record["successes"][level][what])
            return float(estimate(np.full(len(counts), 64), counts, k).mean())

        return share(records.base()) - share(run)

    parts = []
    for arm, level in (("medium", "medium"), ("medium", "hard"), ("hard", "hard"), ("easy", "medium")):
        parts.append(
            part(
                records,
                f"At pass@64 on {level} problems, flawless responses only, the base is ahead of {arm} training.",
                (arm,),
                lambda r, level=level: base_ahead(r, level, "flawless", 64),
            )
        )
    return Judgement(CLAIMS["n"], tuple(parts), caveat="A guess is right one time in ten, so only flawless ones count.")


def sparser(records: Records) -> Judgement:
    from scipy.stats import spearmanr

    def trend(record: Mapping[str, Any]) -> float:
        return float(spearmanr(LENGTHS, record["sparsity"]).statistic)

    return Judgement(
        CLAIMS["o"],
        tuple(
            part(
                records,
                f"After {arm} training, the last hidden state is sparser on longer chains (rank correlation).",
                (arm,),
                trend,
            )
            for arm in (*_BANDS, "mixed")
        ),
        caveat="Longer chains also are longer texts; nothing here separates the two.",
    )


def coherent(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["p"],
        (
            part(
                records,
                "Medium training makes steps on hard problems follow from their own operands more often.",
                ("medium",),
                lambda r: gain(r, "hard", "coherent"),
            ),
            part(
                records,
                "It does not make more responses to hard problems flawless.",
                ("medium",),
                lambda r: gain(r, "hard", "flawless"),
                margin=_MOVED,
                equal=True,
            ),
        ),
    )


def errors_breed(records: Records) -> Judgement:
    def excess(kind: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda r: r["slips"][f"{kind}_after_error"] - r["slips"][f"{kind}_without"]

    return Judgement(
        CLAIMS["q"],
        (
            part(
                records,
                "A step errs more often after an error that the model made (7 to 9 operations, mixed training).",
                ("mixed",),
                excess("natural"),
            ),
            part(records, "A step errs more often after a planted error.", ("mixed",), excess("planted")),
        ),
    )


def lower_layers(records: Records) -> Judgement:
    def difference(kind: str, sign: float) -> Callable[[Mapping[str, Any]], float]:
        return lambda r: sign * (r["layers"][f"{kind}/0"] - r["layers"][f"{kind}/2"])

    return Judgement(
        CLAIMS["r"],
        (
            part(
                records,
                "The base's first layer, put back into a hard run, restores more medium accuracy than its last.",
                ("hard",),
                difference("restored", 1),
            ),
            part(
                records,
                "Putting the hard run's first layer into the base costs more than its last.",
                ("hard",),
                difference("damaged", -1),
            ),
        ),
    )


def planning(records: Records) -> Judgement:
    def rise(record: Mapping[str, Any]) -> float:
        path = [at(record, "planning", "entropy/planning", int(step)) for step in record["measured"]]
        return max(path) - at(record, "planning", "entropy/planning", 0)

    return Judgement(
        CLAIMS["s"],
        (
            part(
                records,
                "Where an order has to be chosen, right results go half of their way before right plans do, in steps.",
                ("planning",),
                lambda r: half_time(r, "planning", "plan_right") - half_time(r, "planning", "result_right"),
            ),
            part(
                records,
                "The entropy of planning rises from the start to its highest (nats a step).",
                ("planning",),
                rise,
                margin=_RISE,
            ),
            part(
                records,
                "The entropy of execution falls from the start to the end (nats a step).",
                ("planning",),
                lambda r: -gain(r, "planning", "entropy/execution"),
            ),
        ),
        caveat="Measured every 5 steps. The highest of 13 measurements lies a little above the start by chance, hence "
        "the margin. The source measures the variety of planning phrases, and this the entropy of one choice.",
    )


_RISE = 0.05
"""Nats; a choice between two orders has at most .69."""


def plasticity(records: Records) -> Judgement:
    def learnt(record: Mapping[str, Any]) -> float:
        return fmean(step["reward"] for step in record["steps"])

    def distances(near: Mapping[str, Any], far: Mapping[str, Any]) -> float:
        return float(far["start_distance"] - near["start_distance"])

    return Judgement(
        CLAIMS["t"],
        (
            part(
                records,
                "At equal accuracy, the run without a KL anchor is farther from the base (nats a response).",
                ("second-near", "second-far"),
                distances,
            ),
            part(
                records,
                "The second task (direct answers) is learnt faster from the anchored run (mean reward of 20 steps).",
                ("second-near", "second-far"),
                lambda a, b: learnt(a) - learnt(b),
            ),
            part(
                records,
                "The anchored run learns it as fast as the base.",
                ("second-near", "second-base"),
                lambda a, b: learnt(a) - learnt(b),
                margin=0.05,
                equal=True,
            ),
        ),
    )


def expert(records: Records) -> Judgement:
    return Judgement(
        CLAIMS["u"],
        (
            part(
                records,
                "A reward for the expert's steps ends with more flawless responses to hard problems than plain GRPO.",
                ("expert-steps", "hard"),
                ahead("hard", "flawless"),
            ),
            part(records, "It ends with more accuracy on medium problems.", ("expert-steps", "hard"), ahead("medium")),
            part(records, "It ends with more accuracy on hard problems.", ("expert-steps", "hard"), ahead("hard")),
        ),
    )


def pruning(records: Records) -> Judgement:
    def mean_accuracy(record: Mapping[str, Any]) -> float:
        return fmean(at(record, level) for level in ("easy", "medium", "long"))

    def better(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
        return mean_accuracy(a) - mean_accuracy(b)

    return Judgement(
        CLAIMS["v"],
        (
            part(
                records,
                "With fresh problems throughout, leaving out easy ones ends higher (mean of easy, medium and long).",
                ("no-easy", "mixed"),
                better,
            ),
            part(
                records,
                "With four problems of each kind, leaving out easy ones ends lower.",
                ("mixed-few", "no-easy-few"),
                better,
            ),
        ),
    )


JUDGES: dict[str, Callable[[Records], Judgement]] = {
    "a": inverted_u,
    "b": hard_harms,
    "c": lone_successes,
    "d": behaviour_first,
    "h": backward,
    "i": credit,
    "j": one_format,
    "k": drifts,
    "l": choice_points,
    "m": spurious,
    "n": overtakes,
    "o": sparser,
    "p": coherent,
    "q": errors_breed,
    "r": lower_layers,
    "s": planning,
    "t": plasticity,
    "u": expert,
    "v": pruning,
}
"""e, f and g rest on features."""
