"""The claims on runs whose truth is planted: each where it is true, where it is false, and where it cannot be told."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tsae
from support.builders import synthetic_store
from support.cli import run as cli
from support.damage import flip
from support.refusals import refuses
from support.results import BANDS, TARGETS, answer, answers, checkpoint, make_attribution, write_run
from tsae.base.artefact import Kind, write_artefact
from tsae.causal.intervention import folders_of_tests
from tsae.claims.evidence import Evidence, Missing, attribution_in
from tsae.claims.judging import between
from tsae.claims.run_claims import Claims, claims_of
from tsae.commands.report import files_of_page
from tsae.rollouts.logs.entry import hash64

RUN = [checkpoint("run-10", "run")]
LEVEL = {band: [1, 2, 1, 2, 2, 1, 1, 2, 3, 2] for band in BANDS}


def raised(by: dict[str, int]) -> dict[str, list[int]]:
    """LEVEL, with so many more right of every problem of a band; every fifth one stays, so that problems differ."""
    return {band: [min(4, max(0, k + by[band] * (i % 5 > 0))) for i, k in enumerate(LEVEL[band])] for band in BANDS}


def record(folder: Path, key: str, **options: Any) -> dict[str, Any]:
    return claims_of(folder, [key], **options)[key]


def ran(folder: Path, by: int | dict[str, int] | None = 0, runs: Any = RUN, log: Any = None, **more: Any) -> Path:
    """A run of a base and of run-10, which gets so many more right (see `raised`); None where it answered nothing."""
    gains = by if isinstance(by, dict) else dict.fromkeys(BANDS, by or 0)
    level = LEVEL if by == 0 else raised(gains)
    return write_run(
        folder, answers("base", LEVEL) + ([] if by is None else answers("run-10", level)), runs, log, **more
    )


ON_HARD = [checkpoint("run-10", "run", trained_on="hard")]


def held(found: dict[str, Any]) -> list[bool | None]:
    return [part["holds"] for part in found["parts"]]


def both(*bands: str, level: Any = LEVEL) -> list[dict[str, Any]]:
    """Base and run-10, as good as each other."""
    return [row for who in ("base", "run-10") for row in answers(who, {band: level[band] for band in bands})]


BASE, SAME = answers("base", LEVEL), dict.fromkeys(BANDS, [2] * 10)
MIXED = [answer(f"p{i}", who, k % 8 < 1 + (i + j) % 3) for j, who in enumerate(("base", "run-10"))
         for i in range(30) for k in range(8)]  # fmt: skip
ALONE = [answer(f"p{i}", "base", True, step=1) for i in range(20)]
ONCE = [answer(f"p{i}", "base", i % 2 == 0, step=i) for i in range(20) for _ in range(4)]
ON_ALL = "8 easy and medium and hard problems or more (there are 0 {})"
STEPLESS = [{**row, "step": None} for row in ONCE]


@pytest.mark.parametrize(
    ("keys", "records", "runs", "log", "needs", "add"),
    [
        ("abcdefgjknopqv", BASE, [], None, "a checkpoint beside the base", ""),
        ("a", both("medium"), RUN, None, ON_ALL.format("easy, 0 hard"), "`tsae run … --sample 8 --to OTHER`"),
        ("a", both("easy", "medium"), RUN, None, ON_ALL.format("hard"), "`tsae run … --sample 8 --to OTHER`"),
        ("an", answers("run-10", LEVEL), RUN, None, "there are 0", ""),
        ("b", both(*BANDS), RUN, None, "on hard problems (there is run-10 on a mixture, or it is not known)", ""),
        ("b", both(*BANDS, level=SAME), ON_HARD, None, "problems that differ (“run-10 solves fewer easy problems than "
         "the base.”: 0 in all 10)", ""),
        ("n", both(*BANDS), RUN, None, "8 responses or more of the base and of run-10 to 8 problems or more (there are "
         "4)", ""),
        ("n", MIXED, RUN, None, "a checkpoint that is clearly ahead at pass@1 (run-10: none)", ""),
        ("c", BASE, RUN, None, "the log of the training's own responses", ""),
        ("c", BASE, RUN, ALONE, "(there are 0 lone successes and 0 others)", ""),
        ("k", BASE, RUN, ONCE, "there are 0", "two epochs"),
        ("cdjk", BASE, RUN, STEPLESS, "the training step of the log's responses", ""),
    ],
)  # fmt: skip
def test_what_a_run_lacks_for_a_claim(
    tmp_path: Path, keys: str, records: Any, runs: Any, log: Any, needs: str, add: str
) -> None:
    found = claims_of(write_run(tmp_path, records, runs, log, info=None if log is None else {"log": {}}), keys)
    for key in keys:
        assert found[key]["verdict"] == "cannot be tested"
        assert needs in found[key]["needs"]
        assert add in found[key]["add"]


# --- success


def test_inverted_u_between_runs_on_bands(tmp_path: Path) -> None:
    gains = {"easy": 0, "medium": 2, "hard": -1}
    records = answers("base", LEVEL)
    for band, gain in gains.items():
        records += answers(f"{band}-10", raised(dict.fromkeys(BANDS, gain)))
    runs = [checkpoint(f"{band}-10", band, trained_on=band) for band in BANDS]
    found = record(write_run(tmp_path, records, runs), "a")
    assert found["verdict"] == "reproduced"
    assert [part["statement"] for part in found["parts"]] == [
        "medium-10 (medium) gained more than easy-10 (easy).",
        "medium-10 (medium) gained more than hard-10 (hard).",
    ]
    # By hand: of four responses, the mean over 30 problems of the difference.
    by_hand = [np.mean([(a - b) / 4 for band in BANDS for a, b in zip(raised(dict.fromkeys(BANDS, 2))[band],
               raised(dict.fromkeys(BANDS, other))[band], strict=True)]) for other in (0, -1)]  # fmt: skip
    assert [part["mean"] for part in found["parts"]] == pytest.approx(by_hand)
    assert {(part["n"], part["unit"]) for part in found["parts"]} == {(30, "problems")}


def test_every_run_on_a_band_counts_and_a_band_without_one_is_said(tmp_path: Path) -> None:
    """Two seeds on medium problems, of which one gains nothing; no run on hard ones."""
    gains = {"medium-0": 0, "medium-1": 2, "easy-0": 1}
    records = answers("base", LEVEL)
    for name, gain in gains.items():
        records += answers(name, raised(dict.fromkeys(BANDS, gain)))
    runs = [checkpoint(name, name, trained_on=name[:-2]) for name in gains]
    found = record(write_run(tmp_path / "both", records, runs), "a")
    assert {part["statement"]: part["holds"] for part in found["parts"]} == {
        "medium-0 (medium) gained more than easy-0 (easy).": False,
        "medium-1 (medium) gained more than easy-0 (easy).": True,
    }
    assert found["verdict"] == "partly"
    found = record(write_run(tmp_path / "one", records, runs[1:]), "a")
    assert held(found) == [True]
    assert found["verdict"] == "partly"
    assert found["caveat"] == "No run was trained on hard problems alone."


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({"easy": 0, "medium": 2, "hard": 0}, "reproduced"),
        ({"easy": 2, "medium": 1, "hard": 0}, "partly"),
        ({"easy": 2, "medium": 0, "hard": 2}, "not reproduced"),
    ],
)
def test_inverted_u_within_one_run(tmp_path: Path, gains: dict[str, int], verdict: str) -> None:
    assert record(ran(tmp_path, gains), "a")["verdict"] == verdict


@pytest.mark.parametrize(("change", "verdict"), [(-1, "reproduced"), (1, "not reproduced")])
def test_hard_harms(tmp_path: Path, change: int, verdict: str) -> None:
    found = record(ran(tmp_path, change, ON_HARD), "b")
    assert found["verdict"] == verdict
    assert len(found["parts"]) == 2


def test_hard_harms_by_the_bands_of_the_log(tmp_path: Path) -> None:
    """Nine tenths of the log's problems are hard: the run counts as trained on hard ones, without being named so."""
    rng = np.random.default_rng(0)
    chance = {"easy": 1.0, "medium": 0.5, "hard": 0.05}
    kinds = ["easy"] * 10 + ["medium"] * 10 + ["hard"] * 180
    log = [
        answer(f"log{i}", "base", rng.random() < chance[kind], step=int(i % 5))
        for i, kind in enumerate(kinds)
        for _ in range(16)
    ]
    folder = ran(tmp_path, -1, log=log)
    evidence = Evidence(folder)
    assert evidence.training_bands["hard"] > 0.85
    assert evidence.trained_on("run-10") == "hard"
    assert record(folder, "b")["verdict"] == "reproduced"
    assert "of this one's responses: easy" in record(folder, "a")["needs"]


def test_bands_that_were_measured_elsewhere_are_those_of_the_log(tmp_path: Path) -> None:
    """The log's own outcomes are not known, and could say nothing of bands."""
    log = [answer(f"{band}{i}", "base", None, step=1) for band in BANDS for i in range(10 if band == "hard" else 1)]
    bands = {"reference": "base", "separate": True}
    evidence = Evidence(ran(tmp_path, log=log, info={"sampled": {}, "bands": bands}))
    assert evidence.training_bands.to_dict() == pytest.approx({"easy": 1 / 12, "medium": 1 / 12, "hard": 10 / 12})
    assert evidence.trained_on("run-10") == "hard"


def test_difficulty_drifts_beyond_chance(tmp_path: Path) -> None:
    """Eight responses in each half. Problems whose rate goes from 0 to 1 drift; those that stay at 1/2 change bands by
    chance alone, which counts for nothing."""
    rng = np.random.default_rng(1)
    kinds = {"drift": (0.05, 0.95), "stays": (0.5, 0.5)}
    for kind, rates in kinds.items():
        log = [
            answer(f"p{i}", "base", rng.random() < rates[half], step=1 + half)
            for i in range(150)
            for half in (0, 1)
            for _ in range(8)
        ]
        found = record(ran(tmp_path / kind, None, log=log), "k")
        assert held(found) == ([True] if kind == "drift" else [None])
        assert found["parts"][0]["n"] == 150
        assert "adaptive curriculum" in found["caveat"]


@pytest.mark.parametrize(("few", "holds"), [(1, True), (0, None)])
def test_base_overtakes(tmp_path: Path, few: int, holds: bool | None) -> None:
    """Of 16 responses the base has 2 right of every problem, the run all of half the problems and few of the others."""
    ids = [f"p{i}" for i in range(40)]
    records = [answer(id, "base", k < 2) for id in ids for k in range(16)]
    right = [16 if i % 2 else 0 if few and i % 4 == 0 else 2 for i in range(40)]
    records += [answer(id, "run-10", k < right[i]) for i, id in enumerate(ids) for k in range(16)]
    found = record(write_run(tmp_path, records, RUN), "n")
    if holds is None:  # pass@16 is 1 everywhere
        assert found["needs"] == "problems that differ (“At pass@16 the base is ahead of run-10.”: 0 in all 40)"
    else:
        assert held(found) == [True]
        assert found["parts"][0]["mean"] == pytest.approx(0.25)
        assert found["caveat"] == "k is 16 here; the claim is on k in the hundreds."


def test_a_checkpoint_with_few_responses_does_not_hide_another(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(40)]
    records = [answer(id, "base", k < 2) for id in ids for k in range(16)]
    for who, n in (("run-10", 16), ("few-10", 4)):
        right = [n if i % 2 else 0 if i % 4 == 0 else 2 for i in range(40)]
        records += [answer(id, who, k < right[i]) for i, id in enumerate(ids) for k in range(n)]
    found = record(write_run(tmp_path, records, [*RUN, checkpoint("few-10", "few")]), "n")
    assert held(found) == [True]
    assert found["verdict"] == "partly"  # of one of two
    assert found["caveat"].startswith(
        "Left out for lack of 8 responses or more of the base and of few-10 to 8 problems"
    )


# --- the log


def lone_log(shortcut: bool) -> list[dict[str, Any]]:
    """Groups of six: with one success on one half of the problems, with three on the other."""
    log = []
    for i in range(40):
        successes = 1 if i % 2 else 3
        for k in range(6):
            right = k < successes
            direct = right and (successes == 1 if shortcut else i % 4 < 2)
            text = "#1" if direct else "1+1=2;2+1=3;#3"
            log.append(answer(f"p{i}", "base", right, step=1, response=text, length=len(text) + (i % 3)))
    return log


def test_lone_successes(tmp_path: Path) -> None:
    found = record(ran(tmp_path / "yes", None, log=lone_log(True)), "c")
    assert found["verdict"] == "cannot be tested"  # always and never: no problem differs
    mixed = [*lone_log(True), answer("stray", "base", True, step=None)]  # no step is known of it
    for row in mixed:
        if row["problem_id"] in ("p1", "p2", "p3"):
            text, n = ("#1", 3) if row["problem_id"] == "p2" else ("1+1=2;#2", 9)
            row |= {"response": text, "response_ids": [2] * n}
    found = record(ran(tmp_path / "mixed", None, log=mixed), "c")
    assert found["verdict"] == "partly"  # all that is tested holds; whether it harms is not tested
    assert [part["statement"] for part in found["parts"]] == [
        "Lone successes answer directly more often than other successes.",
        "Lone successes are shorter than the median of their group more often than other successes.",
    ]
    assert "scale_rewards=False" in found["caveat"]
    found = record(ran(tmp_path / "no", None, log=lone_log(False)), "c")
    assert found["verdict"] == "undecided"


def path_run(folder: Path, rates: list[int], lengths: list[int]) -> Path:
    """Steps 10, 20 and 30 of a run and the base: how many of four are right, and how long responses are."""
    names = ["base", "run-10", "run-20", "run-30"]
    records = [
        answer(f"p{i}", who, k < rate - (i % 3 == 0), length=length + (i + j) % 4)
        for j, (who, rate, length) in enumerate(zip(names, rates, lengths, strict=True))
        for i in range(24)
        for k in range(4)
    ]
    readers = [checkpoint(name, "run", int(name[4:])) for name in names[1:]]
    return write_run(folder, records, readers[-1:], steps=readers)


def test_behaviour_first(tmp_path: Path) -> None:
    found = record(path_run(tmp_path / "yes", [3, 3, 3, 1], [20, 20, 12, 5]), "d")
    assert held(found) == [True]
    assert found["parts"][0]["statement"] == "At step 20 of run, before accuracy fell, responses are shorter."
    assert found["parts"][0]["mean"] == pytest.approx(8)
    found = record(path_run(tmp_path / "no", [3, 3, 3, 1], [12, 12, 14, 5]), "d")
    assert held(found) == [False]
    found = record(path_run(tmp_path / "never", [3, 3, 3, 3], [20, 20, 12, 5]), "d")
    assert found["needs"] == "a fall of accuracy (run: it does not clearly fall)"
    found = record(path_run(tmp_path / "at-once", [3, 1, 1, 1], [20, 20, 12, 5]), "d")
    assert "it has fallen at the first one after the start" in found["needs"]


def test_behaviour_first_in_a_log(tmp_path: Path) -> None:
    """Other problems at every step: shorter from step 4, and wrong from step 9."""
    rng = np.random.default_rng(2)
    log = [
        answer(f"p{step}-{i}", "base", rng.random() < (0.8 if step < 9 else 0.2), step=step,
               length=int(rng.integers(15, 20)) - 8 * (step >= 4))
        for step in range(12) for i in range(16) for _ in range(4)
    ]  # fmt: skip
    found = record(ran(tmp_path, None, log=log), "d")
    assert held(found) == [True]
    assert found["parts"][0]["statement"] == "From step 6, before accuracy fell, responses are shorter."


def format_log(end: float, better: float = 0.0, start: float = 0.4) -> list[dict[str, Any]]:
    """Eight steps; the share of boxed answers goes from `start` to `end`; at the start they are right more often."""
    rng = np.random.default_rng(3)
    log = []
    for step in range(8):
        for i in range(20):
            for _ in range(8):
                boxed = rng.random() < start + (end - start) * step / 7
                right = rng.random() < 0.4 + better * boxed
                text = "So we add them up now: \\boxed{3}" if boxed else "1+2=3\n#### 3"
                log.append(answer(f"p{step}-{i}", "base", right, step=step, response=text))
    return log


def test_one_format_wins(tmp_path: Path) -> None:
    logs = {
        "yes": format_log(1.0), "better": format_log(1.0, better=0.5), "no": format_log(0.4),
        "one": format_log(1.0, start=1.0),
    }  # fmt: skip
    found = {name: record(ran(tmp_path / name, None, log=log), "j") for name, log in logs.items()}
    assert held(found["yes"]) == [True, True, True]
    assert "No problem is asked twice" in found["yes"]["caveat"]
    assert held(found["better"]) == [True, True, False]
    assert found["better"]["verdict"] == "partly"
    assert held(found["no"])[0] is False
    assert "responses in several formats to begin with" in found["one"]["needs"]


def test_only_the_first_epoch_counts(tmp_path: Path) -> None:
    """The winner of the second epoch is another; it says nothing."""
    again = [{**row, "step": row["step"] + 8, "response": "1+2=3\n#### 3"} for row in format_log(1.0)]
    found = record(ran(tmp_path, None, log=format_log(1.0) + again), "j")
    assert "“prose, boxed”" in found["parts"][0]["statement"]
    assert "No problem is asked twice" not in found["caveat"]


def test_the_format_is_chosen_on_other_problems_than_it_is_counted_on(tmp_path: Path) -> None:
    """Formats as common as each other: the top one of the very responses that are counted would have a larger share."""
    log = format_log(0.5, start=0.5)
    found = record(ran(tmp_path, None, log=log), "j")
    last = [row for row in log if row["step"] >= 6]
    boxed = pd.Series(["boxed" in row["response"] for row in last]).groupby([row["problem_id"] for row in last]).mean()
    seen = sorted(boxed.index, key=hash64)[::2]
    share = boxed if boxed[seen].mean() > 0.5 else 1 - boxed
    assert found["parts"][0]["n"] == 20
    assert found["parts"][0]["mean"] == pytest.approx(share.drop(seen).mean())
    assert "The format was chosen on 20 other problems of these steps." in found["caveat"]


# --- inside


@pytest.mark.parametrize(("order", "verdict"), [((8, 5, 2), "reproduced"), ((2, 5, 8), "not reproduced")])
def test_sparser_when_hard(tmp_path: Path, order: tuple[int, ...], verdict: str) -> None:
    """So many of 16 entries of a state are not 0, in problems of every band, up to one more."""
    bands = [band for band in BANDS for _ in range(12)]
    texts = []
    for i, band in enumerate(bands):
        state = np.zeros((3, 16))
        state[0, : order[BANDS.index(band)] + i % 2] = 2.0
        state[1:] = 1.0  # of the response: must not count
        texts.append(state)
    synthetic_store(tmp_path / "activations", texts, special=())
    same = {"prompt_ids": [0], "response_ids": [1, 2]}  # as the store has them
    records = [answer(f"p{i:04d}", "base", None, band=band, **same) for i, band in enumerate(bands)]
    found = record(write_run(tmp_path, records, RUN), "o")
    assert found["verdict"] == verdict
    # By hand: m equal entries of 16 have (4 − √m) / 3.
    expected = [
        np.mean([(4 - (order[b] + e) ** 0.5) / 3 for e in (0, 1)])
        - np.mean([(4 - (order[a] + e) ** 0.5) / 3 for e in (0, 1)])
        for a, b in ((0, 1), (1, 2))
    ]
    assert [part["mean"] for part in found["parts"]] == pytest.approx(expected)


def marked(prompt: str, response: str) -> list[bool]:
    """Steps as the letters of a response: r is right."""
    return [letter == "r" for letter in response]


@pytest.mark.parametrize(("after", "valid", "holds"), [
    ("rrrw", False, [True, True]), ("rrrr", True, [True, False]), ("wwww", False, [False, True]),
])  # fmt: skip
def test_coherent_not_valid(tmp_path: Path, after: str, valid: bool, holds: list[bool]) -> None:
    records = []
    for i in range(20):
        records += [answer(f"p{i}", "base", k == 0, response="rrww" if i % 3 else "rwww") for k in range(4)]
        records += [
            answer(f"p{i}", "run-10", (valid and k < 3) or (not valid and i % 4 == k), response=after) for k in range(4)
        ]
        if i % 5 == 0:
            records[-8] = answer(f"p{i}", "base", True, response="rrrr")
    found = record(write_run(tmp_path, records, RUN), "p", check=marked)
    assert held(found) == holds


def test_without_a_valid_solution_nothing_is_said_of_validity(tmp_path: Path) -> None:
    """Of two checkpoints one solves a problem: what is said is said of that one."""
    records = [
        answer(f"p{i}", who, right, response="rr" if right or (who != "base" and k) else "rw" if i % 3 else "ww")
        for i in range(20)
        for who in ("base", "run-10", "other-10")
        for k, right in enumerate((False, False, who == "other-10" and i % 2 == 0))
    ]
    found = record(write_run(tmp_path / "none", [row for row in records if row["policy"] != "other-10"], RUN), "p",
                   check=marked)  # fmt: skip
    assert found["needs"] == "a valid solution, with right steps alone (neither base nor run-10 has one)"
    for wrong in ("rw", [0.5], None):
        refuses("a list of true and false", record, tmp_path / "none", "p", check=lambda _, __, wrong=wrong: wrong)
    both = [*RUN, checkpoint("other-10", "other")]
    found = record(write_run(tmp_path / "one", records, both), "p", check=marked)
    assert len(found["parts"]) == 2
    assert "neither base nor run-10" in found["caveat"]


@pytest.mark.parametrize(("breeds", "holds"), [(True, True), (False, None)])
def test_errors_breed_errors(tmp_path: Path, breeds: bool, holds: bool | None) -> None:
    """A step is wrong one time in four, or three in four after an error. Later steps are not to count as worse."""
    rng = np.random.default_rng(4)
    records = []
    for i in range(60):
        for _ in range(12):
            text = ""
            for _ in range(4):
                wrong = rng.random() < (0.75 if breeds and "w" in text else 0.25)
                text += "w" if wrong else "r"
            records.append(answer(f"p{i}", "base", True, response=text))
    found = record(write_run(tmp_path, records, RUN), "q", check=marked)
    assert held(found) == [holds]
    assert found["parts"][0]["mean"] == pytest.approx(0.5 if breeds else 0.0, abs=0.06)
    assert "module:function" in record(tmp_path, "q")["add"]


def attributed(folder: Path, gate: str = "", **tables: Any) -> None:
    """An attribution of the run's own log, with these tables."""
    of = tsae.Rollouts.read(folder / "rollouts" / "log.parquet").fingerprint
    replace(make_attribution(inputs={"rollouts": of}, gate=gate), **tables).save(folder / "attribution")


@pytest.mark.parametrize(("sign", "verdict"), [(-1.0, "partly"), (1.0, "not reproduced")])
def test_pruning_easy_samples(tmp_path: Path, sign: float, verdict: str) -> None:
    """Two samples of each of twenty problems, of which one has no band; shares in accuracy on three bands."""
    folder = ran(tmp_path, None, log=answers("base", LEVEL, step=1))
    base, rows = make_attribution(), np.arange(40)
    easy = rows // 2 < 12
    facts = base.facts.iloc[[0] * 40].assign(
        trajectory=rows, problem_id=[f"p{i // 2}" for i in rows],
        band=[None if i % 2 else "easy" if i < 24 else "hard" for i in rows],
    )  # fmt: skip
    share = np.where(easy, sign * (1 + rows // 2 % 3), -sign) / 2
    samples = pd.concat(
        [pd.DataFrame({"trajectory": rows, "step": 1, "target": target, "share": share, "policy": share, "kl": 0.0})
         for target in TARGETS]
    )  # fmt: skip
    make_attribution().save(folder / "attribution")
    assert "an attribution of this run’s own log" in record(folder, "v")["needs"]
    attributed(folder, facts=facts, samples=samples)
    found = record(folder, "v")
    assert found["verdict"] == verdict
    assert found["parts"][0]["n"] == 12
    assert found["parts"][0]["mean"] == pytest.approx(-2.0 * sign)


def test_replayed_bands_stand_in_for_runs_on_a_band_and_decide_nothing(tmp_path: Path) -> None:
    """Alone, a band changes a target by half of its share; see make_attribution."""
    folder = ran(tmp_path, None, log=answers("base", LEVEL, step=1))
    assert [record(folder, key)["verdict"] for key in "abe"] == ["cannot be tested"] * 3
    attributed(folder)
    shares = dict(zip(BANDS, (-1.0, 1 / 3, 5 / 3), strict=True))  # of a target's change
    mean = (0.6 + 0.3 - 0.1) / 3 / 2
    expected = {
        "a": [mean * (shares["medium"] - shares[band]) for band in ("easy", "hard")],
        "b": [-0.6 / 2 * shares["hard"], -0.3 / 2 * shares["hard"]],
        "e": [-0.9 / 2 * shares["easy"]],
    }
    for key, values in expected.items():
        found = record(folder, key)
        assert found["verdict"] == "undecided"
        assert [part["mean"] for part in found["parts"]] == pytest.approx(values)
        assert {part["unit"] for part in found["parts"]} == {"replayed, one run"}
        assert held(found) == [None] * len(values)
        assert "one run" in found["caveat"]
    text = str(claims_of(folder, ["e"]))
    assert "+0.45" in text
    assert "+0.45 [" not in text
    Claims.load(claims_of(folder, ["e"]).save(folder).parent)
    # Simulated ones, and those behind a closed gate, do not count.
    simulated = make_attribution().groups.assign(how="simulated")
    for tables in ({"groups": simulated}, {"gate": "Too far."}):
        (folder / "attribution" / "attribution.json").unlink()
        attributed(folder, **tables)
        assert record(folder, "e")["verdict"] == "cannot be tested"


# --- the whole


def test_every_claim_has_a_test_and_untestable_ones_say_why(tmp_path: Path) -> None:
    found = claims_of(folder := ran(tmp_path, 1))
    assert "".join(one["claim"] for one in found.records) == "abcdefghijklmnopqrstuvwxyz"
    for one in found.records:
        assert bool(one["parts"]) != bool(one["needs"] and one["add"])
    assert {one["unit"] for record in found.records for one in record["parts"]} == {"problems"}
    assert found["h"]["add"].startswith("`tsae reformulate")
    refuses("no claim 'A'", claims_of, folder, ["A"])
    refuses("no claim 'b'; there are a", claims_of(folder, ["a"]).__getitem__, "b")
    refuses("holds no rollouts of a run", claims_of, tmp_path / "diff", ["a"])


def test_what_is_saved_is_read_again_and_damage_is_seen(tmp_path: Path) -> None:
    folder = ran(tmp_path, 1)
    assert Claims.load(folder) is None
    found = claims_of(folder)
    file = found.save(folder)
    again = Claims.load(folder)
    assert again is not None
    assert json.dumps(again.as_dict()) == json.dumps(json.loads(json.dumps(found.as_dict())))
    assert str(again) == str(found)
    table = found.table()
    assert len(table) == sum(max(1, len(one["parts"])) for one in found.records)
    flip(file, file.stat().st_size // 2)
    refuses("claims.json", Claims.load, folder)


def test_pieces_of_another_run_are_refused(tmp_path: Path) -> None:
    folder = ran(tmp_path / "mine")
    ran(tmp_path / "labels", 1)
    ran(tmp_path / "rollouts", None)
    synthetic_store(folder / "activations", [np.ones((3, 16))], special=())
    refuses(r"activations: is of other rollouts \(\w+\) than this run", claims_of, folder, ["o"])
    for name in ("labels", "rollouts"):
        shutil.rmtree(folder / "diff")
        shutil.copytree(tmp_path / name / "diff", folder / "diff")
        refuses(rf"diff: is of other {name} \(\w+\) than this run", claims_of, folder, ["a"])


@pytest.mark.parametrize(
    "bands", ["easy", {"reference": "base"}, {"reference": "base", "separate": False, "refused": 1}]
)
def test_damaged_facts_on_bands_are_refused(tmp_path: Path, bands: Any) -> None:
    refuses("not describe in a known way", claims_of, ran(tmp_path, info={"sampled": {}, "bands": bands}), ["a"])


def test_a_damaged_piece_is_an_error_and_no_missing_one(tmp_path: Path) -> None:
    folder = ran(tmp_path)
    flip(folder / "diff" / "shifts.parquet", 400)
    refuses("damaged", claims_of, folder, ["a"])


def test_files_and_hidden_folders_are_no_causal_tests(tmp_path: Path) -> None:
    folder = ran(tmp_path / "run", None)
    for name in ("one", ".hidden", "two"):
        (folder / "causal" / name).mkdir(parents=True)
    (folder / "causal" / "notes.txt").write_text("mine")
    assert [test.name for test in folders_of_tests(folder)] == ["one", "two"]
    assert [file.parent.name for file in files_of_page(folder) if file.name == "causal.json"] == ["one", "two"]


@pytest.mark.slow(ci=True)
def test_an_attribution_of_another_log_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ran(tmp_path / "run", None, log=answers("base", LEVEL, step=1))
    assert attribution_in(folder) == (None, "")
    own = Evidence(folder)._log_fingerprint
    section = "Which samples did that"
    for of, shown in ((own, True), ("0123456789abcdef", False)):
        make_attribution(inputs={"rollouts": of}).save(folder / "attribution")
        found, why = attribution_in(folder)
        assert (found is not None) == shown
        assert shown or re.match("an attribution of this run’s own log .*is of the log 0123456789abcdef", why)
        cli("report", "--diff", folder / "diff", "--to", tmp_path / "page.html")
        assert (section in (tmp_path / "page.html").read_text(encoding="utf-8")) == shown
        assert ("attribution is not shown: the page needs" in capsys.readouterr().err) == (not shown)
    # Who names it has it shown.
    cli("report", "--diff", folder / "diff", "--attribution", folder / "attribution", "--to", tmp_path / "page.html")
    assert section in (tmp_path / "page.html").read_text(encoding="utf-8")
    (folder / "rollouts" / "rollouts.parquet").rename(tmp_path / "elsewhere.parquet")  # no run any more
    found, _ = attribution_in(folder)
    assert found is not None


def test_a_piece_that_was_there_is_no_missing_one(tmp_path: Path) -> None:
    """What is left of it shows that it was finished. Without its folder it is missing."""
    folder = ran(tmp_path / "run", None, log=answers("base", LEVEL, step=1))
    make_attribution().save(folder / "attribution")
    synthetic_store(folder / "activations", [np.ones((3, 16))], special=())
    for name in ("features/features.json", "causal/one/causal.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
        write_artefact((folder / name).parent, Kind("of any", 1, "", ""), None, there=[Path(name).name])
    (folder / "steps").mkdir()
    (folder / "run.json").write_text("{}")
    lost = {
        "diff/diff.json": "diff", "features/features.json": "features", "activations/manifest.json": "store",
        "rollouts/log.parquet": "outline", "attribution/attribution.json": "attribution",
        "causal/one/causal.json": "tests", "steps/rollouts.parquet": "at_steps",
    }  # fmt: skip
    for name, piece in lost.items():
        (folder / name).unlink(missing_ok=True)
        refuses(rf"{Path(name).parent}: holds no {Path(name).name}, which was there", getattr, Evidence(folder), piece)
        if piece != "outline":
            shutil.rmtree((folder / name).parent)
        if piece not in ("outline", "at_steps"):
            with pytest.raises(Missing):
                getattr(Evidence(folder), piece)
    (folder / "run.json").unlink()
    with pytest.raises(Missing):
        _ = Evidence(folder).outline


def test_jackknife_of_means_over_other_problems() -> None:
    """Its mean is the difference of the means. Its interval is Welch's where sides share no problem, nearly, and the
    paired one where they share all."""
    rng = np.random.default_rng(5)
    one = pd.Series(rng.normal(1, 1, 40), index=[f"a{i}" for i in range(40)])
    two = pd.Series(rng.normal(0, 2, 60), index=[f"b{i}" for i in range(60)])
    mean, low, high = between("x", one, two, "").interval
    welch = stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
    assert mean == pytest.approx(one.mean() - two.mean())
    assert (low, high) == pytest.approx((welch.low, welch.high), rel=0.02)
    two = one + rng.normal(0.5, 0.1, 40)
    paired = stats.ttest_1samp(two - one, 0).confidence_interval(0.95)
    assert between("x", two, one, "").interval == pytest.approx(((two - one).mean(), paired.low, paired.high))


def test_a_side_whose_problems_are_all_the_same_has_no_certainty() -> None:
    """0 of 8 problems: of eight with a chance of 1/10, that is so in 43 % of draws."""
    none, some = pd.Series(0.0, [f"a{i}" for i in range(8)]), pd.Series([0.0] * 90 + [1.0] * 10, map(str, range(100)))
    mean, low, high = between("x", some, none, "").interval
    assert mean == pytest.approx(0.1)
    pooled = some.std(ddof=1) * (1 / 8 + 1 / 100) ** 0.5  # both sides with the spread that one of them shows
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 107) * pooled, rel=0.1)
    assert low < 0
    back = between("x", none, some, "").interval
    assert back == pytest.approx((-mean, -high, -low))


LOGS: dict[str, dict[str, Any]] = {
    "no outcomes": {"right": None},
    "no texts": {"response": None},
    "one step": {"step": 1},
    "one response": {},
}


@pytest.mark.parametrize("lacking", LOGS)
def test_poor_logs_are_facts_and_no_errors(tmp_path: Path, lacking: str) -> None:
    more = {"right": True, "step": None, **LOGS[lacking]}
    right, step = more.pop("right"), more.pop("step")
    known = {"step": step} if step is not None else {}
    log = [
        answer(f"p{i}", "base", right and (i + k) % 3 == 0, **{"step": i % 6, **known}, **more)
        for i in range(30)
        for k in range(6)
    ][: 1 if lacking == "one response" else None]
    records = [answer(f"x{i}", who, None) for who in ("base", "run-10") for i in range(10)]
    found = claims_of(write_run(tmp_path, records, RUN, log, info={"log": {}}))
    tested = {one["claim"] for one in found.records if one["parts"]}
    assert tested <= {"c", "j"} if lacking == "one step" else tested <= {"d"} if lacking == "no texts" else not tested
    assert all(one["parts"] or (one["needs"] and one["add"]) for one in found.records)


def test_a_folder_in_place_of_the_claims_is_damage(tmp_path: Path) -> None:
    """A page was made without the claims, and nothing said so."""
    (tmp_path / "folder" / "claims.json").mkdir(parents=True)
    (tmp_path / "claims.json").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path, tmp_path / "folder"):
        refuses("tsae claims RUN", Claims.load, folder)
