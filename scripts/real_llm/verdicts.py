"""Verdicts on claims from the records of the runs: a part for every run, its interval over problems.

A claim holds in a run where the whole interval of its effect lies on the claim's side (`tsae.claims.judging`). Runs are
not averaged: two seeds give two parts. A claim that only one of them shows is reproduced partly, and not at all if the
other one refutes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tsae.claims.judging import Judgement, Part, untestable
from tsae.claims.literature import CLAIMS
from tsae.errors import TsaeError
from tsae.rollouts.difficulty import estimate

TESTED = tuple("abcdefgjlnor")
BANDS = ("easy", "medium", "hard")
PROBLEMS = "problems"
ONE_FORMAT = 0.9
"""Share of responses beyond which one format has won."""
EQUAL = 0.05
"""Accuracy that counts as equal."""
FEWEST = 5
"""Problems, lone successes, … below which nothing is judged."""


class Records:
    """The records of the base and of all runs.

    Args:
        measured: by policy ("base", "hard-0"), by problem, a list a field (`real_llm.measuring.by_problem`).
        bands: of the held-out problems.
        logs: by run, a record a step (`real_llm.measuring.of_log`).
        inside: "sparsity", by policy and problem; "halves", by run, accuracy a problem with the lower or the upper half
            of its update taken back.
        features: verdicts on e, f and g, from the analysis.
    """

    def __init__(
        self,
        measured: Mapping[str, Mapping[str, Mapping[str, Sequence[float | None]]]],
        bands: Mapping[str, str],
        logs: Mapping[str, Sequence[Mapping[str, float]]],
        inside: Mapping[str, Any] | None = None,
        features: Mapping[str, Judgement] | None = None,
    ) -> None:
        self.measured, self.bands, self.logs = measured, bands, logs
        self.inside, self.features = inside or {}, features or {}

    def seeds(self, *bands: str) -> list[str]:
        """Seeds of which every one of these bands has a measured run."""
        have = [{name.split("-")[1] for name in self.measured if name.startswith(f"{band}-")} for band in bands]
        return sorted(set.intersection(*have))

    def mean(self, policy: str, field: str, band: str | None = None) -> dict[str, float]:
        """Of every held-out problem of a band or of all: the mean over its responses, those without a value left out;
        problems without any value are missing."""
        found = {}
        for id, lists in self.measured[policy].items():
            values = [value for value in lists[field] if value is not None]
            if band in (None, self.bands[id]) and values:
                found[id] = float(np.mean(values))
        return found

    def gain(self, policy: str, field: str = "right", band: str | None = None) -> dict[str, float]:
        """Change against the base, by problem."""
        return less(self.mean(policy, field, band), self.mean("base", field, band))


def less(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """a − b on the problems of both."""
    return {id: a[id] - b[id] for id in a if id in b}


def balanced(effects: Mapping[str, float], bands: Mapping[str, str]) -> list[float]:
    """Effects whose mean gives each band the same weight, whatever its number of problems."""
    sizes = {band: sum(bands[id] == band for id in effects) for band in BANDS}
    present = sum(size > 0 for size in sizes.values())
    return [value * len(effects) / present / sizes[bands[id]] for id, value in effects.items()]


def judge(records: Records) -> dict[str, Judgement]:
    """Every tested claim's judgement, by its letter."""
    return {key: _judged(key, records) for key in TESTED}


def _judged(key: str, records: Records) -> Judgement:
    if key in "efg":
        return records.features.get(key) or untestable(
            CLAIMS[key], "an analysis of features with an ablation of them", "Run the stage analyse."
        )
    try:
        return JUDGES[key](records)
    except TsaeError as error:  # too few problems for an interval
        return untestable(CLAIMS[key], f"more held-out problems ({error.what})", "Give more problems a level.")


def _parts(records: Records, bands: Sequence[str], make: Callable[[str], Part]) -> tuple[Part, ...]:
    return tuple(make(seed) for seed in records.seeds(*bands))


def _some(key: str, parts: tuple[Part, ...], **more: Any) -> Judgement:
    if not parts:
        return untestable(CLAIMS[key], "finished runs of these bands", "Run the stages runs and measure.")
    return Judgement(CLAIMS[key], parts, **more)


def inverted_u(records: Records) -> Judgement:
    parts: tuple[Part, ...] = ()
    for more, fewer in (("medium", "easy"), ("medium", "hard"), ("easy", "hard")):
        parts += _parts(
            records,
            (more, fewer),
            lambda seed, more=more, fewer=fewer: Part(  # type: ignore[misc]
                f"Seed {seed}: {more} training gains more than {fewer} training, mean of the three bands.",
                balanced(less(records.gain(f"{more}-{seed}"), records.gain(f"{fewer}-{seed}")), records.bands),
                PROBLEMS,
            ),
        )
    return _some("a", parts)


def hard_harms(records: Records) -> Judgement:
    parts = tuple(
        Part(
            f"Seed {seed}: hard training lowers accuracy on {band} problems.",
            [-value for value in records.gain(f"hard-{seed}", band=band).values()],
            PROBLEMS,
        )
        for seed in records.seeds("hard")
        for band in ("easy", "medium")
    )
    return _some("b", parts)


def lone_successes(records: Records) -> Judgement:
    parts = []
    for name, log in sorted(records.logs.items()):
        if not name.startswith("hard-"):
            continue
        both = [step for step in log if step["lone"] and step["others"]]
        if len(both) < FEWEST or sum(step["lone"] for step in both) < FEWEST:
            continue
        parts += [
            Part(
                f"Seed {name[5:]}: in hard training, lone successes are direct answers more often than others.",
                [step["lone_direct"] / step["lone"] - step["others_direct"] / step["others"] for step in both],
                "steps",
            ),
        ]
    if not parts:
        return untestable(CLAIMS["c"], "steps of hard training with lone and with other successes", "Train longer.")
    return Judgement(
        CLAIMS["c"],
        tuple(parts),
        caveat="Only what lone successes are is tested: no run left them out, and none did without the deviation. So "
        "the claim is reproduced partly at best.",
        whole=False,
    )


def behaviour_first(records: Records) -> Judgement:
    parts = []
    for seed in records.seeds("hard"):
        name = f"hard-{seed}"
        for words, field, sign in (
            ("responses to medium problems get shorter", "length", -1),
            ("they carry out fewer of the steps", "carried", -1),
            ("they write a step twice more often", "repeated", 1),
        ):
            changes = [sign * value for value in records.gain(name, field, "medium").values()]
            parts.append(Part(f"Seed {seed}: under hard training {words}.", changes, PROBLEMS))
    return _some(
        "d",
        tuple(parts),
        caveat="Only the end of a run was measured on held-out problems, so that the order (before accuracy falls) is "
        "not tested. So the claim is reproduced partly at best.",
        whole=False,
    )


def one_format(records: Records) -> Judgement:
    parts = []
    for band in BANDS:
        for seed in records.seeds(band):
            name = f"{band}-{seed}"
            direct = records.mean(name, "direct", band)
            wins = float(np.mean(list(direct.values()))) > 0.5
            share = [value if wins else 1 - value for value in direct.values()]
            parts.append(
                Part(
                    f"Seed {seed}: after {band} training more than nine in ten responses have one format.",
                    [value - ONE_FORMAT for value in share],
                    PROBLEMS,
                )
            )
            against = [
                other - own
                for id in records.measured["base"]
                if records.bands[id] == band
                for own, other in [_by_format(records.measured["base"][id], wins)]
                if own is not None and other is not None
            ]
            if len(against) >= FEWEST:
                parts.append(
                    Part(f"Seed {seed}: the format that {band} training favours was the worse one.", against, PROBLEMS)
                )
    return _some("j", tuple(parts), caveat="Formats are direct answers and written steps.")


def _by_format(lists: Mapping[str, Sequence[float | None]], direct: bool) -> tuple[float | None, float | None]:
    """Accuracy of the responses in a format and of those in the other one; None without any."""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for right, is_direct in zip(lists["right"], lists["direct"], strict=True):
        sides[bool(is_direct) == direct].append(float(right or 0.0))
    own, other = (float(np.mean(side)) if side else None for side in (sides[True], sides[False]))
    return own, other


def choice_points(records: Records) -> Judgement:
    parts = tuple(
        Part(
            f"Seed {seed}: on medium problems, the fifth of the tokens with the highest entropy ends as high as all.",
            list(
                less(
                    records.mean(f"fifth-{seed}", "right", "medium"), records.mean(f"medium-{seed}", "right", "medium")
                ).values()
            ),
            PROBLEMS,
            margin=EQUAL,
            equal=True,
        )
        for seed in records.seeds("fifth", "medium")
    )
    if not parts:
        return untestable(
            CLAIMS["l"], "runs on the fifth of the tokens with the highest entropy", "Run --only fifth measure results."
        )
    return Judgement(
        CLAIMS["l"],
        parts,
        caveat="The other four fifths were not trained on. So it is reproduced partly at best.",
        whole=False,
    )


def overtakes(records: Records) -> Judgement:
    def passed(policy: str, band: str) -> dict[str, float]:
        lists = {id: own["right"] for id, own in records.measured[policy].items() if records.bands[id] == band}
        n = np.array([len(own) for own in lists.values()])
        right = np.array([sum(value or 0.0 for value in own) for own in lists.values()])
        return dict(zip(lists, estimate(n, right, int(n.min())).tolist(), strict=True))

    parts = tuple(
        Part(
            f"Seed {seed}: at pass@k for the largest k, the base is ahead of {arm} training on {band} problems.",
            list(less(passed("base", band), passed(f"{arm}-{seed}", band)).values()),
            PROBLEMS,
        )
        for arm, band in (("medium", "medium"), ("medium", "hard"), ("hard", "hard"))
        for seed in records.seeds(arm)
    )
    return _some("n", parts, caveat="k is the number of responses to a problem, which is small.")


def sparser(records: Records) -> Judgement:
    from scipy.stats import rankdata

    sparsity, parts = records.inside.get("sparsity", {}), []
    if not sparsity:
        return untestable(CLAIMS["o"], "the sparsity of hidden states", "Run --only inside results.")
    for name, by_id in sparsity.items():
        ids = list(by_id)
        x = rankdata([1 - np.mean([v or 0.0 for v in records.measured["base"][id]["right"]]) for id in ids])
        y = rankdata([by_id[id] for id in ids])
        if x.std() == 0 or y.std() == 0:
            continue
        products = (x - x.mean()) / x.std() * (y - y.mean()) / y.std()
        parts.append(
            Part(
                f"{name}: the last hidden state is sparser on problems that the base solves less often (rank "
                "correlation).",
                products.tolist(),
                PROBLEMS,
            )
        )
    return _some("o", tuple(parts), caveat="Harder problems also are longer texts; nothing here separates the two.")


def lower_layers(records: Records) -> Judgement:
    parts = []
    for name, halves in sorted(records.inside.get("halves", {}).items()):
        harm = Part("harm", [-value for value in records.gain(name, band="medium").values()], PROBLEMS)
        if harm.holds is True:
            restored = less(halves["lower"], halves["upper"])
            parts.append(
                Part(
                    f"Seed {name.split('-')[1]}: taking back a hard run's update in the lower half of the layers "
                    "restores more medium accuracy than in the upper half.",
                    list(restored.values()),
                    PROBLEMS,
                )
            )
    if not parts:
        return untestable(CLAIMS["r"], "a hard run that lowers accuracy on medium problems", "Train longer, or harder.")
    return Judgement(CLAIMS["r"], tuple(parts))


JUDGES: dict[str, Callable[[Records], Judgement]] = {
    "a": inverted_u,
    "b": hard_harms,
    "c": lone_successes,
    "d": behaviour_first,
    "j": one_format,
    "l": choice_points,
    "n": overtakes,
    "o": sparser,
    "r": lower_layers,
}


def verdict(judgement: Judgement) -> str:
    """The judgement's verdict; not even "partly" where all that holds in one seed is refuted in another."""
    found = judgement.verdict
    if found == "partly" and all(part in contradicted(judgement) for part in judgement.parts if part.holds is True):
        return "not reproduced"
    return found


def contradicted(judgement: Judgement) -> list[Part]:
    """Parts that hold in their seed, and are refuted in another one."""

    def said(part: Part) -> str:
        return part.statement.partition(": ")[2]

    refuted = {said(part) for part in judgement.parts if part.holds is False and part.statement.startswith("Seed ")}
    return [part for part in judgement.parts if part.holds is True and said(part) in refuted]
