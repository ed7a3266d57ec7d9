"""The verdict on a run: twenty situations, with the sentence and the lights that must come out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from support.results import behaviour, make, reader
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.noise import NOTHING_TRAINED
from tsae.report.story.findings import findings, findings_content
from tsae.report.story.verdict import Change, clear_changes, verdict

Y, N, U, M = "yes", "no", "not decided", "not measured"
BASE_STEP, QUIET, LOUD = {"step": 25, "run": "run"}, (0, 10), (9, 10)


def situation(
    *changed: tuple[str, str, float, float, float],
    n: int = 30,
    alone: float = 0.0,
    moved: int = 40,
    findable: float = 0.3,
    same_text: str | None = "",
    left_out: int = 4,
    noise: tuple[int, int] | str | None = QUIET,
    base: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    **info: Any,
) -> FeatureDiff:
    """A run of which is known what changed.

    Args:
        changed: (behaviour, band, before, after, half of the change's interval), of n problems.
        n: problems.
        alone: by how much problems that one side alone answered raise the base's mean, and lower the run's.
        moved: features that moved on the same text, of 100.
        findable: |Δ| that is found 8 times in 10 there.
        same_text: why that contrast was not drawn; None where there is none.
        left_out: problems that one side alone read.
        noise: features that noise and run moved, of 100; or why that is not known; None where noise was not read.
        base: more of the base's record as a reader.
        run: more of the run's.
        info: more of the diff's.
    """
    made = make(bands=("easy", "medium", "hard"))
    rows = []
    for name, band, before, after, half in changed:
        few = n < 8
        rows += [
            {**behaviour("base", band, name, before + alone, 0.02), "n_problems": n},
            {
                **behaviour("run", band, name, after - alone, 0.02, after - before, np.nan if few else half),
                "n_paired": n, "paired_reference": before, "paired_mean": after,
            },
        ]  # fmt: skip
    columns = [*behaviour("base", "all", "accuracy", 0.5, 0.1)]
    contrasts = made.contrasts[made.contrasts.checkpoint.isin(["base", "up-run"])].replace("up-run", "run")
    same = contrasts.part == "same_trajectories"
    if same_text is None:
        contrasts = contrasts[~same]
    else:
        numbers = {"n_tested": 100, "n_discoveries": moved, "detectable_delta": findable, "note": same_text}
        numbers["n_left_out"] = left_out
        contrasts.loc[same, list(numbers)] = list(numbers.values())
    readers = [{**reader("base", None), **(base or {})}]
    readers += [{**reader("run", "run"), "trained_on": "medium", "step": 150, **(run or {})}]
    if noise is not None:
        of_noise: dict[str, Any] = {"note": noise, "update_norm": 0.0 if noise == NOTHING_TRAINED else 0.1}
        if not isinstance(noise, str):
            of_noise |= {"note": "", "n_problems": 20, "n_tested": 100, "n_moved": noise[1]}
            of_noise |= {"noise_moved": [noise[0], 0], "noise_tested": [100, 100]}
        info = {"noise": {"run": of_noise}, **info}
    return replace(
        made,
        contrasts=contrasts,
        shifts=made.shifts[made.shifts.checkpoint.isin(["base", "up-run"])].replace("up-run", "run"),
        behaviours=pd.DataFrame(rows, columns=columns),
        info={**made.info, "readers": readers, **info},
    )


def edit(beyond: tuple[float, ...], mode: str = "ablate", **others: tuple[float, ...]) -> dict[str, Any]:
    """The record of a causal test: of direct answers and others (low, high) beyond random ones, and the change if it is
    not their middle."""
    rows = []
    for name, (low, high, *change) in {"direct_answer": beyond, **others}.items():
        row = {"behaviour": name, "mean": 0.5, "n_paired": 30, "change_low": 0.2, "change_high": 0.4}
        mine = {"change": [*change, (low + high) / 2][0], "beyond_low": low, "beyond_high": high}
        rows += [{**row, "condition": "features", **mine}, {**row, "condition": "random", "change": 0.01}]
    return {
        "checkpoint": "run", "features": [0, 2], "mode": mode, "amount": 1.0, "tokens": "predicting", "n_problems": 30,
        "n_random": 12, "confidence": 0.95, "summaries": {}, "changes": rows,
    }  # fmt: skip


STYLE = ("direct_answer", "all", 0.52, 0.02, 0.03)
LENGTH = ("response_length", "all", 20.0, 38.0, 2.0)
MEDIUM = ("accuracy", "medium", 0.45, 0.84, 0.09)
STEADY = [("accuracy", band, 0.5, 0.505, 0.03) for band in ("easy", "medium", "hard")]
OPEN = ("accuracy", "all", 0.56, 0.33, 0.25)
NO_REWARDS = "Whether it solves more is not known: no response has a reward or an outcome."
ONE_RUN = "One run; what causes the change is not tested."
OPEN_TEST = "One run. Features were edited, and what causes the change is not decided."
DONE = "After training on medium problems, the model"
STEPS = "writes out its steps more often (direct answers 52 → 2 %)"
MORE = f"{DONE} solves more medium problems (45 → 84 %). {ONE_RUN}"

SITUATIONS: dict[str, tuple[FeatureDiff, str, tuple[str, str, str]]] = {
    "style and success": (
        situation(STYLE, LENGTH, MEDIUM),
        f"{DONE} {STEPS} and solves more medium problems (45 → 84 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "problems that one side alone answered": (situation(MEDIUM, alone=0.3), MORE, (Y, Y, M)),
    "harm in two bands": (
        situation(("accuracy", "easy", 0.95, 0.68, 0.09), ("accuracy", "medium", 0.45, 0.22, 0.08)),
        f"{DONE} solves fewer easy (95 → 68 %) and medium problems (45 → 22 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "better here, worse there": (
        situation(("accuracy", "easy", 0.95, 0.68, 0.09), MEDIUM),
        f"{DONE} solves more medium problems (45 → 84 %) and solves fewer easy problems (95 → 68 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "no change": (
        situation(*STEADY, moved=0),
        "After training on medium problems, what the model writes did not change (accuracy on easy (50 → 50 %)); what "
        f"it computes on the same text did not change. {ONE_RUN}",
        (N, N, M),
    ),
    "too few problems": (
        situation(OPEN, n=3, same_text="3 problems have such trajectories on both sides; 8 are needed"),
        "After training on medium problems, whether what the model writes changed is not decided: both policies "
        "answered 3 of the same problems, and 8 are needed; what it computes on the same text is not measured. "
        + ONE_RUN,
        (U, M, M),
    ),
    "wide intervals": (
        situation(OPEN, moved=0, findable=1.4),
        "After training on medium problems, it is not decided whether what the model writes changed (accuracy "
        f"(56 → 33 %)); whether what it computes on the same text changed is not decided. {ONE_RUN}",
        (U, U, M),
    ),
    "one of six leaves out 0 by chance": (
        situation(
            ("accuracy", "easy", 0.5, 0.55, 0.049),
            *(("accuracy", band, 0.5, 0.51, 0.06) for band in ("medium", "hard")),
            *((name, "all", 0.5, 0.51, 0.06) for name in ("direct_answer", "skipped_steps", "looping")),
        ),
        "After training on medium problems, it is not decided whether what the model writes changed (accuracy on easy "
        f"(50 → 55 %)); what it computes on the same text changed. {ONE_RUN}",
        (U, Y, M),
    ),
    "a stand-in for the base": (
        situation(STYLE, base=BASE_STEP, run={"trained_on": "run"}),
        f"From step 25 to step 150, the model {STEPS}. {NO_REWARDS} {ONE_RUN}",
        (Y, Y, M),
    ),
    "a mixed run": (
        situation(LENGTH, *STEADY, run={"trained_on": "mixed problems"}),
        "After training on mixed problems, the model writes longer responses (20.0 → 38.0 tokens) and stays within 5 "
        f"points in accuracy. {ONE_RUN}",
        (Y, Y, M),
    ),
    "an ordinary run, named after its folder": (
        situation(("accuracy", "all", 0.5, 0.8, 0.05), run={"trained_on": "run"}),
        f"After 150 steps of training, the model solves more problems (50 → 80 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "an adapter whose update cannot be measured": (
        situation(MEDIUM, noise="the adapter has modules that the base lacks"), MORE, (Y, U, M),
    ),
    "no rewards": (
        situation(STYLE),
        f"{DONE} {STEPS}. {NO_REWARDS} {ONE_RUN}",
        (Y, Y, M),
    ),
    "no bands": (
        situation(STYLE, ("accuracy", "all", 0.5, 0.8, 0.05), bands=None),
        f"{DONE} {STEPS} and solves more problems (50 → 80 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "bands that are training steps": (
        situation(("accuracy", "all", 0.5, 0.8, 0.05), MEDIUM, bands={"refused": "bands are training steps"}),
        f"{DONE} solves more problems (50 → 80 %). {ONE_RUN}",
        (Y, Y, M),
    ),
    "noise moves as many features": (situation(MEDIUM, noise=LOUD), MORE, (Y, U, M)),
    "noise was not read": (situation(MEDIUM, noise=None), MORE, (Y, U, M)),
    "a reader that the SAE does not see": (situation(MEDIUM, run={"fve": 0.31, "flagged": True}), MORE, (Y, U, M)),
    "nothing was trained": (
        situation(MEDIUM, noise=NOTHING_TRAINED),
        "After training on medium problems, the weights are the base's: nothing was trained, and what differs is "
        "chance in sampling. One run.",
        (N, N, M),
    ),
    "a log whose steps share no problems": (
        situation(same_text=""),
        "After training on medium problems, what the model writes is not compared with the base; what it computes on "
        f"the same text changed. {ONE_RUN}",
        (M, Y, M),
    ),
    "a log that contradicts itself": (
        situation(MEDIUM, second_look={"advantages": {"disagrees": True, "compared": 9, "line": "9 of 9 differ"}}),
        f"The rollout log contradicts itself (advantages), and what follows may be wrong. {MORE}",
        (Y, Y, M),
    ),
    "steps that were tested causally": (
        situation(STYLE, MEDIUM, causally_tested=[edit((0.1, 0.4))]),
        f"{DONE} {STEPS} and solves more medium problems (45 → 84 %). One run. Tested causally: 2 features ablated in "
        "run: direct answers +25.0 points, more than with random features.",
        (Y, Y, Y),
    ),
    "a test that accuracy alone shows": (
        situation(MEDIUM, causally_tested=[edit((-0.02, 0.02), accuracy=(-0.5, -0.3), response_length=(500, 1100))]),
        f"{DONE} solves more medium problems (45 → 84 %). One run. Tested causally: 2 features ablated in run: "
        "accuracy −40.0 points, more than with random features.",
        (Y, Y, Y),
    ),
    "a test that one of two measures passes by chance": (
        situation(MEDIUM, causally_tested=[edit((-0.1, 0.4), accuracy=(0.01, 0.4))]),
        MORE.replace(ONE_RUN, OPEN_TEST),
        (Y, Y, U),
    ),
    "a test on too few problems": (
        situation(MEDIUM, causally_tested=[edit((np.nan, np.nan, 0.3))]),
        MORE.replace(ONE_RUN, OPEN_TEST),
        (Y, Y, U),
    ),
    "a test that random features do more in": (
        situation(MEDIUM, causally_tested=[edit((-0.5, -0.3, 0.1))]),
        f"{DONE} solves more medium problems (45 → 84 %). One run. The edited features did no more than random ones: "
        "what causes the change is not known.",
        (Y, Y, N),
    ),
    "a test that random features pass as well": (
        situation(STYLE, MEDIUM, causally_tested=[edit((-0.1, 0.4))]),
        f"{DONE} {STEPS} and solves more medium problems (45 → 84 %). One run. The edited features did no more than "
        "random ones: what causes the change is not known.",
        (Y, Y, N),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_sentence_and_the_lights_of(name: str) -> None:
    """A light that is not measured says what adds it, and only a causal test gives a causal verb."""
    diff, sentence, lights = SITUATIONS[name]
    found = verdict(diff, "run")
    assert f"{found.sentence} {found.limit}" == sentence
    assert tuple(light.answer for light in found.lights) == lights
    for light in found.lights:
        assert light.sentences
        assert light.answer != M or "`tsae " in " ".join(light.sentences), light
    statement = next(f for f in findings(diff) if f.checkpoint == "run")
    causal = re.compile(r"\b(causes? the change by|because|due to|leads? to|made the|makes the)\b")
    assert not causal.search(" ".join(statement.sentences))
    assert ("more than with random features" in " ".join(statement.sentences)) == (lights[2] == Y)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (("base", "run"), "run answered no problem that base answered."),
        (("base",), "There is no response of run."),
        (("run", "other"), "There is no response of base."),
        ((), "There is no response of base or run."),
        (("steps 1-3", "steps 4-6", "steps 7-9"), "behaviours are those of thirds of the run."),
    ],
)
def test_why_responses_are_not_compared(policies: tuple[str, ...], said: str) -> None:
    """Responses need no outcome."""
    rows = [behaviour(policy, "all", "response_length", 20.0, 1.0) for policy in policies]
    found = verdict(replace(situation(), behaviours=pd.DataFrame(rows)), "run").lights[0]
    assert found.answer == M
    assert found.sentences[0].endswith(said)


@pytest.mark.parametrize(("own", "left_out"), [(6, 0), (20, 14)])
def test_both_are_sampled_on_the_same_problems_only_where_they_were_not(own: int, left_out: int) -> None:
    diff = situation(OPEN, n=6, same_text="6 problems have such trajectories on both sides", left_out=left_out)
    diff.behaviours["n_problems"] = own
    writes, computes, _ = verdict(diff, "run").lights
    more = "Compare base and run on more problems: both have the same ones."
    assert (more in writes.sentences, more in computes.sentences) == (not left_out, not left_out)
    assert computes.answer == (M if left_out else U)  # What is not measured has a command that adds it.


def test_the_verdict_is_a_statement_that_programs_can_read() -> None:
    diff, _, lights = SITUATIONS["style and success"]
    told = findings_content(diff)["findings"][0]
    assert told["sentences"][0].startswith(DONE)
    assert [light["answer"] for light in told["lights"]] == list(lights)
    assert told["lights"][1]["sentences"][0].startswith("40 of 100 features moved on the same 120 responses")


def test_holms_test_by_hand() -> None:
    """Of p = .004, .03 and .2, the first is below .05 / 3, the second not below .05 / 2."""

    def change(p: float) -> Change:
        half = student.ppf(0.975, 29) / student.isf(p / 2, 29)  # of the interval of a change of 1
        return Change("accuracy", "all", 0.0, 1.0, 1.0, 1.0 - half, 1.0 + half, 30, True)

    changes = [change(0.03), change(0.004), change(0.2)]
    assert clear_changes(changes, 0.95) == [changes[1]]
    assert clear_changes(changes[:1], 0.95) == changes[:1]
    assert clear_changes([changes[0], changes[1], change(0.02)], 0.95) == [changes[0], changes[1], change(0.02)]
