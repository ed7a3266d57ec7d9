"""Fresh rollouts of a log's problems: which verifier, which problems, by whom, in how much time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from support.builders import BOS
from support.logs import refused
from tsae.rollouts.config import BandSource, SamplingConfig
from tsae.rollouts.fresh_rollouts import answered_anew, choose_verifier, drawn_problems, fresh_rollouts, with_answers
from tsae.rollouts.problems import Problem, read_problems, write_problems
from tsae.rollouts.table import Rollouts

CONFIG = SamplingConfig(n_samples=2, max_new_tokens=3, batch_size=4)
PROBLEMS = [Problem(f"p{n}", "", "3", None, (BOS, 3 + n)) for n in range(5)]


def logged(pairs: list[tuple[str, str, bool]]) -> Rollouts:
    """(response, answer, right by the log)."""
    return Rollouts.from_records(
        [
            {"problem_id": f"p{i % 3}", "policy": "run-1", "prompt": "?", "prompt_ids": [BOS, 4], "response_ids": [5],
             "response": response, "answer": answer, "reward": float(right),
             "outcome": "success" if right else "failure"}
            for i, (response, answer, right) in enumerate(pairs)
        ],
        {"log": {"notes": []}, "stages": {"rollouts": "as logged"}},
    )  # fmt: skip


def test_the_verifier_is_the_one_that_says_what_the_log_says() -> None:
    steps = [("1+1=2 so 2", "2", True), ("it is 3", "2", False), ("2", "2", True), ("2 or 5", "2", False)] * 2
    assert choose_verifier(logged(steps), None) == (
        "last_number",
        "last_number checks answers, which confirms 100% of the log's outcomes",
    )
    words = [("yes", "yes", True), ("yes.", "yes", False), ("no", "yes", False)] * 5
    assert choose_verifier(logged(words), None)[0] == "exact"
    # Nine failures in ten are confirmed by one that says no to everything; its successes are not.
    odd = [("a", "b", True)] + [("a", "c", False)] * 9
    name, told = choose_verifier(logged(odd), None)
    assert name is None
    assert "accuracy is not measured" in told
    assert choose_verifier(logged(odd), "exact") == ("exact", "exact checks answers (as asked)")
    assert "no reference answers" in choose_verifier(logged([("2", "", True)]), None)[1]


def test_answers_are_read_off_rewarded_responses() -> None:
    """p2 has no success, and so no answer."""
    steps = [("1+1=2 #2", "", True), ("#3", "", True), ("#4", "", False)] * 3
    found, told = with_answers(logged(steps))
    assert dict(zip(found.frame.problem_id, found.frame.answer, strict=True)) == {"p0": "2", "p1": "3", "p2": ""}
    assert told.endswith("its rewarded responses; 1 without are left out")
    assert choose_verifier(found, None)[0] == "last_number"
    zero, _ = with_answers(logged([("so 0", "", True), ("none", "", True), ("1", "", False)] * 2 + [("3", "", True)]))
    assert zero.frame.answer.tolist() == ["0", "", ""] * 2 + ["0"]
    assert with_answers(logged([("2", "2", True)]))[1] == ""


def test_bands_of_the_log_stay(series: Any, tmp_path: Path) -> None:
    """Of p0 half of the responses are in its band. No fresh response was part of its measurement: all are in it."""
    bands = ["easy", "medium", "hard", None, "medium", "hard"]
    log = logged([("it is 2", "2", True), ("it is 3", "2", False)] * 3).with_column("band", bands)
    for name in ("pass_rate", "pass_rate_low", "pass_rate_high"):
        log = log.with_column(name, [0.5] * 6)
    info = {"reference": None, "easy": 0.75, "hard": 0.25, "separate": False, "cross_fitted": True, "halved": 1}
    log = Rollouts(log.table, {**log.info, "bands": info}, log.origin)
    anew = answered_anew([series["base"]], log, CONFIG, pieces=tmp_path / "p", progress=False)
    found = dict(zip(anew.frame.problem_id, anew.frame.band, strict=True))
    assert found == {"p0": "easy", "p1": "medium", "p2": "hard"}
    assert anew.info["bands"]["separate"]
    assert anew.info["stages"]["bands"].startswith(
        "those of the log; of the problems that are answered: easy 1, medium"
    )
    # Bands from elsewhere stay, and the log's own beside them.
    level = log.with_column("level", ["3", "1", "2"] * 2).with_source(BandSource(bands_column="level"))
    anew = answered_anew([series["base"]], level, CONFIG, pieces=tmp_path / "level", progress=False)
    assert dict(zip(anew.frame.problem_id, anew.frame.band, strict=True)) == {
        "p0": "hard",
        "p1": "easy",
        "p2": "medium",
    }
    assert dict(zip(anew.frame.problem_id, anew.by("own").frame.band, strict=True)) == found
    of_steps = Rollouts(log.table, {**log.info, "bands": {**info, "refused": "They are steps."}}, log.origin)
    anew = answered_anew([series["base"]], of_steps, CONFIG, pieces=tmp_path / "p", progress=False)
    assert not anew.info["stages"]["bands"].startswith("those of the log")


def test_problems_are_drawn_by_what_fresh_responses_cost() -> None:
    outline = pd.DataFrame(
        {"problem_id": ["a", "a", "b", "c", "d"], "prompt_length": 10, "response_length": [10, 30, 20, 20, 20],
         "band": [None] * 5}
    )  # fmt: skip
    # 2 · (10 + 20) tokens a problem.
    for tokens, n in ((240, 4), (239, 3), (60, 1)):
        rows = drawn_problems(outline, 2, tokens, 0, Path("log"))
        assert outline.problem_id[rows].nunique() == n
        assert rows[0] == rows[1]


def test_every_reader_answers_the_same_ids_and_stops_in_time(series: Any, tmp_path: Path) -> None:
    readers = [series["base"], series["easy-10"]]
    found = fresh_rollouts(readers, PROBLEMS, CONFIG, pieces=tmp_path / "a", verify=lambda r, a: a in r, progress=False)
    assert found.policies == ["base", "easy-10"]
    assert found.frame.groupby(["policy", "problem_id"]).size().eq(2).all()
    asked = found.table.select(["problem_id", "prompt_ids"]).to_pylist()
    assert {row["problem_id"]: tuple(row["prompt_ids"]) for row in asked} == {p.id: p.ids for p in PROBLEMS}
    assert found.table["advantage"].null_count == 0
    assert "direct_answer" in found.info["behaviours"]
    # Two problems a batch: with no time, every reader stops after its first batch; then the rest is added.
    short = fresh_rollouts(readers, PROBLEMS, CONFIG, pieces=tmp_path / "b", minutes=1e-9, progress=False)
    assert short.frame.problem_id.unique().tolist() == ["p0", "p1"]
    assert short.frame.groupby(["policy", "problem_id"]).size().tolist() == [2] * 4
    held = {file: file.stat().st_mtime_ns for file in (tmp_path / "b").rglob("0*.json")}
    whole = fresh_rollouts(readers, PROBLEMS, CONFIG, pieces=tmp_path / "b", progress=False)
    assert all(file.stat().st_mtime_ns == time for file, time in held.items())
    assert whole.table["response_ids"].equals(found.table["response_ids"])


def test_what_is_known_of_the_log_stays(series: Any, tmp_path: Path) -> None:
    log = logged([("it is 2", "2", True), ("it is 3", "2", False)] * 6)
    anew = answered_anew([series["base"], series["easy-10"]], log, CONFIG, pieces=tmp_path / "p", progress=False)
    assert anew.info["log"] == log.info["log"]
    assert anew.info["sampled"] == {"n_samples": 2, "verifier": "last_number", "max_new_tokens": 3}
    assert anew.info["stages"]["rollouts"] == "as logged"
    assert anew.info["stages"]["sampled"].startswith("12 fresh responses, 2 to each of 3 problems by base, easy-10; ")
    unknown = logged([("a", "b", True), ("a", "c", False)] * 6)
    anew = answered_anew(
        [series["base"]], unknown, replace(CONFIG, n_samples=1), pieces=tmp_path / "q", minutes=1e-9, progress=False
    )
    assert set(anew.frame.outcome) == {"unknown"}
    assert anew.info["stages"]["bands"] == "none: accuracy is not measured"


def test_ids_of_problems_are_not_written(tmp_path: Path) -> None:
    write_problems(PROBLEMS, tmp_path / "problems.jsonl")
    assert read_problems(tmp_path / "problems.jsonl")[1] == replace(PROBLEMS[1], ids=None)


@pytest.mark.parametrize("options", [{"minutes": 0.0}, {"sample": 0}])
def test_settings_that_mean_nothing(options: dict[str, Any]) -> None:
    from tsae.config import RunConfig

    refused(r"minutes=0\.0|sample=0", RunConfig, Path("run"), **options)
