"""How each claim is measured on the runs of the study: from records to parts, one value a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS, STUDIED
from tsae.rollouts.difficulty import estimate

SEEDS = "training seeds"
LENGTHS = tuple(range(1, 15))
"""Operations of the chains whose sparsity was measured."""
_MOVED = 0.03
"""Accuracy that counts as equal: half of what 400 responses can tell apart."""
_BANDS = ("easy", "medium", "hard")
_PRODUCTIVE = (0.2, 0.8)
"""Pass rates between which a group of responses usually has both outcomes."""


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

    def base(self, name: str = "base") -> Mapping[str, Any]:
        """Record of a base."""
        return self.by_arm[name][0]

    def seeds(self, *arms: str) -> list[int]:
        """Seeds that all of these arms have, in order."""
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
    return {key: JUDGES[key](records) if set(NEEDED[key]) <= set(records.by_arm) else _missing(key) for key in STUDIED}


def _missing(key: str) -> Judgement:
    return Judgement(CLAIMS[key], needs=f"runs of {', '.join(NEEDED[key])}", add="Give the records of the study.")


def inverted_u(records: Records) -> Judgement:
    def more(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
        return gain(a) - gain(b)

    return Judgement(
        CLAIMS["a"],
        (
            part(records, "Medium gains more than easy, mean of the three bands.", ("medium", "easy"), more),
            part(records, "Medium gains more than hard, mean of the three bands.", ("medium", "hard"), more),
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
        # Step by step: the share of direct answers grows from one to the next.
        steps = [step for step in record["steps"][:20] if step["lone"] and step["others"]]
        shares = [step["lone_direct"] / step["lone"] - step["others_direct"] / step["others"] for step in steps]
        return float(np.average(shares, weights=[step["lone"] for step in steps]))

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


def behaviour_first(records: Records) -> Judgement:
    def lead(name: str, sign: int) -> Callable[[Mapping[str, Any]], float]:
        def value(record: Mapping[str, Any]) -> float:
            then, now = half_time(record, "medium", name, sign), half_time(record, "medium", "accuracy", -1)
            return 0.0 if then is None or now is None else now - then

        return value

    return Judgement(
        CLAIMS["d"],
        tuple(
            part(
                records,
                f"On medium problems, {words} half of the way to its extreme before accuracy does, in steps.",
                ("hard",),
                lead(name, sign),
            )
            for name, sign, words in (
                ("skipped", 1, "skipped computation goes"),
                ("length", -1, "length goes"),
                ("top_answer", 1, "repetition of one answer goes"),
            )
        ),
        caveat="Measured every 5 steps under hard training; a lead of less cannot be seen.",
    )


def half_time(record: Mapping[str, Any], level: str, name: str, sign: int, least: float = 0.05) -> float | None:
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
            part(
                records,
                "It ends with more flawless responses to hard problems than no credit.",
                ("guided", "backward"),
                ahead("hard", "flawless"),
            ),
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

    def won(level: str) -> list[float]:
        """Of the seeds in which a format won: how much worse it was than the other in the base."""
        found = []
        for record in (records.by_arm[level][seed] for seed in records.seeds(level)):
            share, start = at(record, level, "direct"), record["measured"]["0"][level]
            if not 0.1 < share < 0.9:
                found.append((start["accuracy_scratchpad"] - start["accuracy_direct"]) * (1.0 if share > 0.5 else -1.0))
        return found

    worse = [
        Part(f"Under {level} training, the format that wins is the base's worse one.", won(level), SEEDS)
        for level in _BANDS
        if len(won(level)) > 1
    ]
    concentrated = [
        part(
            records,
            f"After 50 steps of {level} training, more than nine in ten responses have one format.",
            (level,),
            concentration(level),
        )
        for level in _BANDS
    ]
    return Judgement(
        CLAIMS["j"],
        (*concentrated, *worse),
        caveat="All seeds share a base, so an interval has no width where the same format wins in all of them.",
    )


def drifts(records: Records) -> Judgement:
    def moved(record: Mapping[str, Any]) -> float:
        lengths = record["lengths"]
        begin, end = (np.array(lengths[key], dtype=float) for key in ("0", "40"))
        inside = [(rates > _PRODUCTIVE[0]) & (rates < _PRODUCTIVE[1]) for rates in (begin, end)]
        return float((inside[0] & ~inside[1]).sum() / inside[0].sum()) - 1 / 3

    def mean_accuracy(record: Mapping[str, Any]) -> float:
        return fmean(at(record, level) for level in ("easy", "medium", "long"))

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
                "Adaptive draws end higher (mean of easy, medium and long) than the base's medium band.",
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
                "From a base with no better format, they do not raise it.",
                ("random-direct",),
                lambda r: -gain(r, "medium"),
                margin=-_MOVED,
            ),
        ),
        caveat="Each batch is used four times; with one use nothing is clipped, and random rewards have no direction.",
    )


def overtakes(records: Records) -> Judgement:
    def crossing(run: Mapping[str, Any], level: str) -> float:
        """How far the run is ahead at k = 1, or the base at k = 64, whichever is less."""

        def share(record: Mapping[str, Any], k: int) -> float:
            counts = np.array(record["successes"][level]["flawless"])
            return float(estimate(np.full(len(counts), 64), counts, k).mean())

        base = records.base()
        return min(share(run, 1) - share(base, 1), share(base, 64) - share(run, 64))

    parts = []
    for arm, level in (("medium", "medium"), ("medium", "hard"), ("hard", "hard"), ("easy", "medium")):
        parts.append(
            part(
                records,
                f"On {level} problems, {arm} training is ahead of the base at pass@1 and behind at pass@64.",
                (arm,),
                lambda r, level=level: crossing(r, level),
            )
        )
    caveat = "Flawless responses only, as a guess is right one time in ten. 40 problems with 64 responses each."
    return Judgement(CLAIMS["n"], tuple(parts), caveat=caveat)


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
    def valid(record: Mapping[str, Any]) -> float:
        return float(np.mean(record["successes"]["hard"]["flawless"])) / 64

    return Judgement(
        CLAIMS["p"],
        (
            part(
                records,
                "Medium training makes results on hard problems follow from their own operands more often.",
                ("medium",),
                lambda r: gain(r, "hard", "coherent"),
            ),
            part(
                records,
                "It does not make more responses to hard problems flawless (of 2,560).",
                ("medium",),
                lambda r: valid(r) - valid(records.base()),
                margin=0.005,
                equal=True,
            ),
            part(
                records,
                "It does not make more responses to medium problems flawless.",
                ("medium",),
                lambda r: gain(r, "medium", "flawless"),
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
                "A result is wrong more often after an error that the model made (long problems, mixed training).",
                ("mixed",),
                excess("natural"),
                margin=0.01,
            ),
            part(records, "A step errs more often after a planted error.", ("mixed",), excess("planted"), margin=0.01),
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
    def later(record: Mapping[str, Any]) -> float:
        plan, result = (half_time(record, "planning", name, 1, 0.0) for name in ("plan_right", "result_right"))
        return 0.0 if plan is None or result is None else plan - result

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
                later,
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
        """Mean reward of the last five steps, less that of the first two."""
        rewards = [step["reward"] for step in record["steps"]]
        return fmean(rewards[-5:]) - fmean(rewards[:2])

    pair = ("second-near", "second-far")
    return Judgement(
        CLAIMS["t"],
        (
            part(
                records,
                "Without a KL anchor, the run that starts on a second task is farther from the base (nats).",
                pair,
                lambda near, far: far["start_distance"] - near["start_distance"],
            ),
            part(
                records,
                "It learns less of the second task, direct answers (change of the reward in 20 steps).",
                pair,
                lambda near, far: learnt(near) - learnt(far),
            ),
            part(
                records,
                "The anchored run learns as much of it as the base.",
                ("second-near", "second-base"),
                lambda near, base: learnt(near) - learnt(base),
                margin=-0.1,
            ),
        ),
        caveat="Both runs start at "
        + " and ".join(f"{np.mean(records.each((arm,), lambda r: at(r, 'medium', 'accuracy', 0))):.2f}" for arm in pair)
        + " on medium problems, anchored first.",
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


def features_of_easy(records: Records, dictionary: str = "T-SAE") -> Judgement:
    return _of_features(
        records,
        "e",
        dictionary,
        "easy",
        {
            "Easy training raises the direct-answer family.": ("direct-answer", "shift", 1),
            "It raises the basic-computation family.": ("basic-computation", "shift", 1),
            "It lowers the deliberation family.": ("deliberation", "shift", -1),
        },
        "Ablating the direct-answer family lowers the share of direct answers more than random features do.",
    )


def features_of_hard(records: Records, dictionary: str = "T-SAE") -> Judgement:
    return _of_features(
        records,
        "f",
        dictionary,
        "hard",
        {
            "Hard training raises the deliberation family.": ("deliberation", "shift", 1),
            "On hard problems it is higher in successes than in failures.": ("deliberation", "outcome", 1),
        },
        "Ablating it lowers accuracy on hard problems more than random features do.",
    )


def features_of_medium(records: Records, dictionary: str = "T-SAE") -> Judgement:
    return _of_features(
        records,
        "g",
        dictionary,
        "medium",
        {
            "Medium training raises the basic-computation family.": ("basic-computation", "shift", 1),
            "It raises the deliberation family.": ("deliberation", "shift", 1),
        },
        "Ablating both lowers accuracy on medium problems more than random features do.",
    )


def _of_features(
    records: Records, key: str, dictionary: str, run: str, wanted: Mapping[str, tuple[str, str, int]], causal: str
) -> Judgement:
    """Shifts in standard deviations of the base's scores; a family without features leaves its part out."""
    found = records.by_arm["features"][0]["dictionaries"][dictionary]
    parts, missing = [], []
    for statement, (family, name, sign) in wanted.items():
        values = found["shifts"].get(run, {}).get(family, {}).get(name, [])
        kept = [sign * value for value in values if value is not None]
        if len(kept) < 2:
            missing.append(f"{family} ({name})")
        else:
            parts.append(Part(statement, kept, SEEDS))
    if "ablations" in found:
        parts.append(Part(causal, found["ablations"][run], SEEDS))
    caveat = f"Not tested with {dictionary}: {', '.join(missing)}. " if missing else ""
    same = {
        family: f"{family} {np.mean(cell['same_texts']):+.2f}" for family, cell in found["shifts"].get(run, {}).items()
    }
    caveat += f"While it reads the base's own responses: {', '.join(same.values())}."
    if not parts:
        return Judgement(
            CLAIMS[key], needs=f"features of the families with {dictionary}", add="Use another dictionary."
        )
    return Judgement(CLAIMS[key], tuple(parts), caveat=caveat)


JUDGES: dict[str, Callable[[Records], Judgement]] = {
    "a": inverted_u,
    "b": hard_harms,
    "c": lone_successes,
    "d": behaviour_first,
    "e": features_of_easy,
    "f": features_of_hard,
    "g": features_of_medium,
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
"""By the claims' letters."""

NEEDED: dict[str, tuple[str, ...]] = {
    "a": ("easy", "medium", "hard"),
    "b": ("hard",),
    "c": ("hard", "no-lone", "mean-only"),
    "d": ("hard",),
    "e": ("features",),
    "f": ("features",),
    "g": ("features",),
    "h": ("hard", "backward"),
    "i": ("backward", "guided", "shuffled"),
    "j": ("easy", "medium", "hard"),
    "k": ("mixed", "adaptive", "medium"),
    "l": ("medium", "top-fifth", "rest"),
    "m": ("random", "random-quarter", "random-direct"),
    "n": ("base", "easy", "medium", "hard"),
    "o": ("easy", "medium", "hard", "mixed"),
    "p": ("base", "medium"),
    "q": ("mixed",),
    "r": ("hard",),
    "s": ("planning",),
    "t": ("second-base", "second-near", "second-far"),
    "u": ("hard", "expert-steps"),
    "v": ("mixed", "no-easy", "mixed-few", "no-easy-few"),
}
"""Arms that a claim is judged from."""
