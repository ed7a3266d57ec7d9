"""Behaviours: read off texts, held against ground truth and real solutions, and averaged over problems."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statements.changes import WORLDS

import tsae
from support.builders import SHARED
from support.logs import refused
from tsae.base.statistics import FEWEST, change_interval, too_few
from tsae.errors import TsaeError
from tsae.report.terminal import behaviour_text
from tsae.rollouts.behaviours import (
    Answer,
    behaviour_table,
    by_thirds,
    final_answers,
    format_table,
    loop_share,
    operations,
    repeated_ngrams,
    response_format,
    with_behaviours,
)
from tsae.rollouts.table import Rollouts

# --- texts


@pytest.mark.parametrize(
    "text",
    [
        "So it is 4 / 12 = 0." + "3" * 200,
        "3 / 440 = 0.006" + "81" * 60,
        "Wait. " + "I should check that again. " * 3,
        "We get 33 = 2x.\nDividing by 2, x = 16.5.\n" * 4,
        "答案是五。" * 12,
        "<answer>5</answer>" * 4,
        "ha" * 25,
    ],
)
def test_loops_are_found(text: str) -> None:
    assert loop_share(text) > 0.4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short short short",
        "It is 4/12 = <<4/12=0.3333333333333333>>0.3333333333333333 feet.",
        "| a | b |\n" + "-" * 80 + "\n" + "=" * 80 + "\n" + " " * 200 + "." * 80,
        "I should check that again. I should check that again. And so on, as before.",
        "On Monday he eats 3 eggs. On Tuesday he eats 3 eggs. On Wednesday he eats 3 eggs.",
        "5 + 5 + 5 + 5 = 20 and 2 * 2 * 2 * 2 = 16 and 10 + 10 + 10 = 30",
    ],
)
def test_what_is_no_loop(text: str) -> None:
    assert loop_share(text) == 0


def test_the_share_of_a_loop_is_what_repeats() -> None:
    start, unit = "Let us see what comes out. ", "and then it goes on, "
    text = start + unit * 5 + "until it stops here in the end."
    assert loop_share(text) == pytest.approx(4 * len(unit) / len(text), abs=0.02)
    assert loop_share("x" * 50_000) == pytest.approx(1, abs=1e-3)


def test_the_limits_of_a_loop() -> None:
    """Three times in a row, over 40 characters, of at most 300 each; of long texts the last 40,000 characters."""
    letters = "".join(np.random.default_rng(0).choice([*"abcdefghijklmnopqrstuvwxyz"], 301))
    assert loop_share(letters[:300] * 3) == 2 / 3
    assert loop_share(letters * 3) == 0
    assert loop_share(letters[:300] * 2) == 0
    assert loop_share("x" * 40) == 39 / 40
    assert loop_share("x" * 39) == 0
    assert loop_share("." + "x" * 39) == 0
    assert loop_share("a" + "x" * 39_999) == 39_998 / 40_000
    assert loop_share("a" + "x" * 40_000) == 39_999 / 40_000


def test_repeated_ngrams_by_hand() -> None:
    # Nine words, six 4-grams: a b c a | b c a b | c a b c | and again, three of them.
    assert repeated_ngrams("a b c a b c a b c") == pytest.approx(1 - 3 / 6)
    assert repeated_ngrams("one two three four five six seven eight") == 0
    assert np.isnan(repeated_ngrams("one two three"))


ANSWERS = [
    ("She makes 9 * 2 = 18.\nA: 18", [("label", "18")]),
    ("A: 70,000", [("label", "70000")]),
    ("A: $5.50", [("label", "5.5")]),
    ("**Answer:** 42", [("label", "42")]),
    ("Final Answer: $1,234.50", [("label", "1234.5")]),
    ("it follows. Answer: (B)", [("label", "(B)")]),
    ("#### 72", [("hashes", "72")]),
    ("3+5=8;#8", [("hashes", "8")]),
    (r"so it is \boxed{\frac{1}{2}}.", [("boxed", r"\frac{1}{2}")]),
    (r"The final answer is $\boxed{12}$.", [("boxed", "12")]),
    (r"Hence \boxed{\frac{\sqrt{3}}{2}}", [("boxed", r"\frac{\sqrt{3}}{2}")]),
    (r"\boxed{\sqrt{\frac{a^{2}}{b^{c_{1}}}}}", [("boxed", r"\sqrt{\frac{a^{2}}{b^{c_{1}}}}")]),
    (r"The final answer is \fbox {5}.", [("boxed", "5")]),
    ("Answer: −5", [("label", "-5")]),
    ("We get\n−5", [("bare", "-5")]),
    ("The answer is option-5.", [("sentence", "5")]),
    (r"\boxed{5} and \boxed{5}", [("boxed", "5"), ("boxed", "5")]),
    ("<think>3+4=7</think><answer> 7 </answer>", [("tag", "7")]),
    ("The answer is 7. The answer is 7.", [("sentence", "7"), ("sentence", "7")]),
    ("So the answer should be x = 5", [("sentence", "5")]),
    ("The answer is 12 \t\r\nDone", [("sentence", "12")]),
    ("The answer is: 12" + " " * 99 + "\nDone", [("sentence", "12")]),
    ("the answer is\n\n 12!", [("sentence", "12")]),
    ("25", [("bare", "25")]),
    ("print(3)\n-1.50", [("bare", "-1.5")]),
    ("# Solution\nFirst we look at team #1.", []),
    ("A. Yes\nB. No", []),
    ("A car is at A: it goes", []),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_final_answers(text: str, expected: list[tuple[str, str]]) -> None:
    assert final_answers(text) == [Answer(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("16 - 3 - 4 = <<16-3-4=9>>9 eggs. She makes 9 * 2 = $<<9*2=18>>18.", 3),
        ("16 - 3 - 4 = 9", 2),
        ("6 people * 2 slices/person = 12 slices", 1),
        ("4 feet / 12 inches/foot = 0.33", 1),
        ("11 blue balls x $5/ball = $55", 1),
        ("It is 50(.50)=25", 1),
        ("3 + 4 makes 7", 1),
        ("16 + 8 + -17 = 7", 2),
        (r"\frac{3}{4} \times 8 = 6", 2),
        (r"Therefore \boxed{\frac{3}{4}}", 0),
        (r"Therefore \boxed{\frac{\sqrt{3}}{2}}", 0),
        ("3x + 20 = 80, so 3x = 80 - 20", 2),
        ("3+5=8;8*2=6;#6", 2),
        ("from 5-10 years on 2020-01-01, 3/4 of it, at 60 km/h, and/or more", 0),
        ("x = 5 eggs", 0),
        ("five plus three is eight", 0),
    ],
)
def test_operations_are_counted(text: str, n: int) -> None:
    assert operations(text) == n


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She makes 9 * 2 = 18.\nA: 18", "equations, label"),
        ("Step 1: 3 + 4 = 7\nStep 2: 7 * 2 = 14\nThe answer is 14.", "steps, sentence"),
        (r"We have \( 3 \times 4 = 12 \). \boxed{12}", "LaTeX, boxed"),
        ("```python\nprint(3 * 4)\n```\nA: 12", "code, label"),
        ("She was fifth, then third, then fourth in the end.\nA: 4", "prose, label"),
        ("#### 4", "none, hashes"),
        ("I do not know what to say to that", "prose, no answer"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert response_format(text) == expected


def test_spaces_before_an_answer_take_no_time() -> None:
    """What follows is not an answer, so that every way to share out the spaces was tried, with 500 characters each."""
    start = time.process_time()
    assert final_answers("answer is" + " " * 20_000 + "x" * 600 + "\n") == []
    assert final_answers("the answer is : \n  5.")[0].value == "5"
    assert final_answers("the answer is a" + " " * 20_000 + "b") == final_answers("the answer is" + "\n" * 20_000) == []
    assert time.process_time() - start < 1


def test_formats_that_a_table_brings_are_texts() -> None:
    rows = [{"response": "A: 7", "format": "own"}, {"response": "A: 8", "format": "other"}]
    rollouts = rollouts_of(rows)
    assert set(format_table(rollouts).n_formats) == {2}
    assert format_table(rollouts.with_column("format", [None, None])).empty
    assert set(format_table(rollouts.with_column("format", [None, "own"])).n_trajectories) == {1}
    with pytest.raises(TsaeError, match=r"the column format holds list<.*>, expected texts"):
        format_table(rollouts.with_column("format", [[1], [1]]))


@pytest.mark.slow  # times long texts
def test_no_text_takes_more_than_linear_time() -> None:
    n = 40_000
    units = ["<answer>", "\n", "\n*", "answer is ", "Answer: ", r"\boxed{", "answer is a. ", "#", "1,", "1 ", "(", "<<",
             " - ", "\n ", "final ", "*", " ", "a", "import", ".", r"\boxed{{a}", "{", "{a}"]  # fmt: skip
    for unit in units:
        long = unit * (n // len(unit))
        for text in (long, f"answer is {long}x", rf"\boxed{{{long}"):
            start = time.process_time()
            final_answers(text), operations(text), response_format(text), loop_share(text), repeated_ngrams(text)
            assert time.process_time() - start < 4, unit  # quadratic patterns took from 8 seconds to minutes


# --- ground truth


def logged() -> pd.DataFrame:
    files = sorted((tsae.testbed.series_path() / "logs").rglob("*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def test_texts_of_the_testbed_are_read_as_their_ground_truth() -> None:
    """5,376 responses whose every token is known."""
    log = logged()
    facts = [tsae.testbed.describe_response(r.prompt, r.completion) for r in log.itertuples()]
    assert len(facts) == 5376
    counted = np.array([operations(text) for text in log.completion])
    assert ((counted == 0) == [fact.style == "direct" for fact in facts]).all()
    assert (counted == [fact.n_steps_written for fact in facts]).mean() > 0.998  # a few texts break the grammar
    for text, fact in zip(log.completion, facts, strict=True):
        stated = final_answers(text)
        assert (stated[-1].value if stated else None) == fact.answer


@pytest.mark.slow
def test_answers_of_real_solutions_agree_with_how_they_were_judged() -> None:
    """GSM8K's solutions by four models: what is read as the answer is right exactly where the file says so."""
    path = SHARED / "data" / "gsm8k" / "example_model_solutions.jsonl"
    if not path.is_file():
        pytest.skip("shared/data/gsm8k is not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    n, looping, required = 0, set(), []
    for number, row in enumerate(rows):
        truth = final_answers(row["ground_truth"])[-1].value
        needed = operations(" ".join(re.findall(r"<<[^<>]*>>", row["ground_truth"])))
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            text = row[model]["solution"]
            stated = final_answers(text)
            assert (bool(stated) and stated[-1].value == truth) == row[model]["is_correct"], text
            n += 1
            if needed:
                required.append((row[model]["is_correct"], max(0, 1 - operations(text) / needed)))
            if len(text) > 400 and loop_share(text) > 0:
                looping.add((number, model))
    assert n == 5276
    # All five were read: four endless decimals, and one that goes in circles.
    assert len(looping) == 5
    right, wrong = (np.mean([skipped for ok, skipped in required if ok == side]) for side in (True, False))
    assert right < 0.03
    assert wrong > 0.1


# --- columns


def rollouts_of(rows: list[dict[str, Any]], **info: Any) -> Rollouts:
    records = [
        {"problem_id": "p", "policy": "base", "prompt_ids": [1], "response_ids": [1], "outcome": "unknown", **row}
        for row in rows
    ]
    return Rollouts.from_records(records, info)


def test_behaviours_become_columns() -> None:
    rows = [
        {"response": "16 - 3 = 13\n13 * 2 = 26\nA: 26", "prompt": "q1", "answer": "26"},
        {"response": "A: 26", "prompt": "q1", "answer": "26"},
        {"response": "The answer is 26. " * 3 + "The answer is 26.", "prompt": "q2", "answer": "1"},
        {"response": "I cannot tell what the total is", "prompt": "q3", "answer": "1"},
        {"response": "He passes two of them and ends as the fourth.\nA: 4", "prompt": "q4", "answer": "4"},
    ]
    found = with_behaviours(rollouts_of(rows), required_steps=lambda prompt, answer: {"q1": 4, "q2": 1}.get(prompt))
    frame = found.frame
    assert found.info["behaviours"] == [
        "looping", "repeated_4grams", "repeated_answer", "unanswered", "direct_answer", "skipped_steps",
    ]  # fmt: skip
    assert frame.looping.tolist() == [0, 0, 1, 0, 0]
    assert frame.repeated_answer.tolist() == [0, 0, 1, 0, 0]
    assert frame.unanswered.tolist() == [0, 0, 0, 1, 0]
    assert frame.direct_answer.tolist() == [0, 1, 1, 0, 0]
    assert frame.skipped_steps.tolist()[:3] == [0.5, 1, 1]
    assert np.isnan(frame.skipped_steps[3])
    formats = ["equations, label", "none, label", "none, sentence", "prose, no answer", "prose, label"]
    assert frame["format"].tolist() == formats
    assert "relative_length" not in frame  # nobody was right
    again = with_behaviours(found)
    assert again.info["behaviours"] == found.info["behaviours"]
    assert again.table.equals(found.table)


@pytest.mark.parametrize(
    ("named", "mood", "what"),
    [
        ("looping", 1.0, r"names 'looping' as its behaviours .*, expected a list of columns"),
        (7, 1.0, "names 7 as its behaviours"),
        ([["x"]], 1.0, r"names \[\['x'\]\] as its behaviours"),
        (["mood"], "happy", r"the behaviour 'mood' is a column of (large_)?string, expected numbers"),
        (["mood"], [1.0, 2.0], "the behaviour 'mood' is a column of list"),
        (["mood"], np.inf, "the behaviour 'mood' is infinite"),
    ],
)
def test_behaviours_that_a_file_names_wrongly_are_refused(named: Any, mood: Any, what: str) -> None:
    rows = [{"response": "A: 26", "mood": mood, "looping": 0.0}]
    refused(what, behaviour_table, rollouts_of(rows, behaviours=named))
    if mood != np.inf:
        refused(what, with_behaviours, rollouts_of(rows, behaviours=named))


@pytest.mark.parametrize("values", [[True, None], [1, None], [None, None], [0.5, np.nan]])
def test_behaviours_may_be_any_numbers(values: list[Any]) -> None:
    rows = [{"response": "A: 26", "mood": value} for value in values]
    found = behaviour_table(rollouts_of(rows, behaviours=["mood"]))
    assert ("mood" in set(found.behaviour)) == (values[0] is not None)


@pytest.mark.parametrize("steps", ["many", float("inf"), -3, 10**400, [1]])
def test_required_steps_that_are_no_numbers_are_refused(steps: Any) -> None:
    with pytest.raises(TsaeError, match="required steps are not finite numbers of 0 or more"):
        with_behaviours(rollouts_of([{"response": "A: 26"}]), required_steps=lambda *_: steps)
    if isinstance(steps, float):
        with pytest.raises(TsaeError, match="required steps are not finite numbers of 0 or more"):
            with_behaviours(rollouts_of([{"response": "A: 26", "required_steps": steps}]))


def test_what_a_table_knows_is_kept() -> None:
    rows = [{"response": "3 + 4 = 7\nA: 7", "direct_answer": 1.0, "required_steps": 2, "format": "own"}]
    found = with_behaviours(rollouts_of(rows, behaviours=["direct_answer"]))
    assert found.frame.direct_answer.tolist() == [1.0]
    assert found.frame["format"].tolist() == ["own"]
    assert found.frame.skipped_steps.tolist() == [0.5]
    assert found.info["behaviours"][0] == "direct_answer"


def test_length_is_relative_to_other_successes_of_the_problem() -> None:
    def row(policy: str, n: int, outcome: str, problem: str = "p") -> dict[str, Any]:
        return {"policy": policy, "response_ids": [1] * n, "outcome": outcome, "problem_id": problem, "response": "x"}

    rows = [row("base", 10, "success"), row("base", 20, "success"), row("base", 40, "failure"),
            row("run", 5, "failure"), row("run", 30, "success"), row("run", 7, "success", "q")]  # fmt: skip
    found = with_behaviours(rollouts_of(rows), reference="base").frame.relative_length
    assert found.tolist()[:5] == pytest.approx([10 / 20, 20 / 10, 40 / 15, 5 / 15, 30 / 15])
    assert np.isnan(found[5])
    found = with_behaviours(rollouts_of(rows)).frame.relative_length
    assert found.tolist()[:5] == pytest.approx([10 / 25, 20 / 20, 40 / 20, 5 / 20, 30 / 15])
    assert np.isnan(found[5])  # its only success is itself


def test_texts_are_needed() -> None:
    refused("1 responses have no text", with_behaviours, rollouts_of([{"response": "x"}, {"response": None}]))
    refused("no policy 'run'; there are base", with_behaviours, rollouts_of([{"response": "x"}]), reference="run")


# --- tables


def valued(values: dict[str, np.ndarray], n: int = 4) -> Rollouts:
    """n trajectories a problem, each with the policy's value of the problem as its behaviour."""
    rows = [
        {"policy": policy, "problem_id": f"p{i:03d}", "response": "x", "b": float(v)}
        for policy, means in values.items()
        for i, v in enumerate(means)
        for _ in range(n)
    ]
    return rollouts_of(rows, behaviours=["b"])


def test_few_problems_a_step_are_told_by_thirds_of_the_run() -> None:
    """Fifteen steps of four problems each, other ones at every step; b rises with the steps."""
    rows = [
        {"policy": f"run-{step:05d}", "problem_id": f"p{step}-{i}", "response": "x", "b": float(step), "step": step}
        for step in range(1, 16)
        for i in range(4)
    ]
    log = rollouts_of([*rows[30:], *rows[:30]], behaviours=["b"])
    table = behaviour_table(by_thirds(log)).set_index(["behaviour", "policy"]).loc["b"]
    assert table["mean"].to_dict() == {"steps 1-5": 3.0, "steps 6-10": 8.0, "steps 11-15": 13.0}
    assert list(table.index) == ["steps 1-5", "steps 6-10", "steps 11-15"]
    assert table.n_problems.tolist() == [20, 20, 20]
    # Not where a step has enough, where thirds have as few, or where steps are not known.
    many = rollouts_of([{**row, "problem_id": f"{row['problem_id']}-{i}"} for row in rows for i in range(2)])
    same = rollouts_of([{**row, "problem_id": row["problem_id"][-1]} for row in rows])
    unknown = rollouts_of([{name: row[name] for name in row if name != "step"} for row in rows])
    for other in (many, same, unknown):
        assert by_thirds(other) is other


def changes(rollouts: Rollouts) -> pd.Series:
    table = behaviour_table(rollouts, reference="base")
    return table[(table.behaviour == "b") & (table.policy == "run")].iloc[0]


def test_changes_are_paired_over_problems() -> None:
    """Problems differ by much more than the run changed them: two intervals side by side would not tell."""
    rng = np.random.default_rng(0)
    level = rng.normal(0, 10, 40)
    rollouts = valued({"base": level, "run": level + 0.5 + rng.normal(0, 0.3, 40)})
    table = behaviour_table(rollouts, reference="base").set_index(["policy", "behaviour"])
    base, run = table.loc[("base", "b")], table.loc[("run", "b")]
    assert run.low < base["mean"] < run.high
    assert 0.3 < run.change_low < run.change < run.change_high < 0.8
    assert run.change == pytest.approx(run["mean"] - base["mean"])
    assert np.isnan(base.change)
    assert behaviour_table(rollouts).change.isna().all()


def test_changes_are_over_the_problems_of_both() -> None:
    table = behaviour_table(
        rollouts_of(
            [
                {"policy": p, "problem_id": i, "response": "x", "b": b}
                for p, i, b in [("base", "a", 1.0), ("base", "a", 3.0), ("base", "b", 9.0), ("run", "a", 5.0),
                                ("run", "c", 100.0)]
            ],
            behaviours=["b"],
        ),
        reference="base",
    ).set_index(["policy", "behaviour"])  # fmt: skip
    run = table.loc[("run", "b")]
    assert (run["mean"], run.change, run.n_paired, run.n_problems) == (52.5, 3.0, 1, 2)
    assert (run.paired_reference, run.paired_mean) == (2.0, 5.0)
    assert np.isnan(run.change_low)  # one problem tells nothing of others


def test_truncation_counts_where_it_is_known() -> None:
    rows = [{"finish_reason": reason, "problem_id": f"p{i}"} for i, reason in enumerate(["stop", "length", "unknown"])]
    table = behaviour_table(rollouts_of(rows)).set_index("behaviour")
    assert (table["mean"]["truncated"], table.n_problems["truncated"]) == (0.5, 2)


def test_entropy_of_formats_by_hand() -> None:
    rows = [
        {"problem_id": problem, "policy": policy, "format": name}
        for policy, problem, names in [
            ("base", "a", ["x", "x", "y", "y"]), ("base", "b", ["x"]), ("run", "a", ["x", "x"]), ("run", "b", ["x"]),
        ]
        for name in names
    ]  # fmt: skip
    table = format_table(rollouts_of(rows), reference="base").set_index("policy")
    # Problem a is half x, half y; b all x. Each problem counts the same: 3/4 and 1/4.
    expected = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert table.entropy.tolist() == pytest.approx([expected, 0])
    assert (table.top_format["base"], table.top_share["base"], table.n_formats["base"]) == ("x", 0.75, 2)
    assert table.change["run"] == pytest.approx(-expected)
    assert table.n_trajectories.tolist() == [5, 3]


def formatted(shares: dict[str, list[float]], n_problems: int, seed: int) -> Rollouts:
    rng = np.random.default_rng(seed)
    rows = [
        {"problem_id": f"p{i}", "policy": policy, "format": str(rng.choice(len(p), p=p))}
        for policy, p in shares.items()
        for i in range(n_problems)
        for _ in range(4)
    ]
    return rollouts_of(rows)


@pytest.mark.slow(ci=True)
def test_convergence_on_one_format_is_found_and_none_where_there_is_none() -> None:
    found = format_table(formatted({"base": [0.5, 0.3, 0.2], "run": [0.95, 0.05]}, 40, 0), reference="base")
    run = found.set_index("policy").loc["run"]
    assert run.change_high < -0.7
    assert run.top_share > 0.9
    missed = 0
    for seed in range(60):
        table = format_table(formatted({"base": [0.5, 0.5], "run": [0.5, 0.5]}, 20, seed), reference="base")
        run = table.set_index("policy").loc["run"]
        missed += not run.change_low <= 0 <= run.change_high
    assert missed <= 9  # 3 expected


@pytest.mark.parametrize(("n", "known"), [(1, False), (2, False), (7, False), (8, True)])
def test_a_few_problems_that_are_all_alike_say_nothing_of_others(n: int, known: bool) -> None:
    records = [{"problem_id": str(i), "response": "x", "b": 3.0} for i in range(n)]
    row = behaviour_table(rollouts_of(records, behaviours=["b"])).set_index("behaviour").loc["b"]
    assert row["mean"] == 3.0
    assert np.isfinite([row.low, row.high]).tolist() == [known, known]


def test_formats_are_read_off_the_texts_of_every_band() -> None:
    rows = [
        {"problem_id": p, "response": text, "band": band}
        for p, text, band in [("a", "A: 3", "easy"), ("b", "2 + 3 = 5\nA: 5", "hard"), ("c", "2 + 3 = 5", "hard")]
    ]
    table = format_table(rollouts_of(rows)).set_index("band")
    assert table.n_formats.to_dict() == {"all": 3, "easy": 1, "hard": 2}
    assert table.entropy.to_dict() == pytest.approx({"all": np.log2(3), "easy": 0, "hard": 1})
    assert np.isnan(table.low["easy"])


# --- how often a change is called one where there is none


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("n", [2, 5, 8, 16, 60])
def test_what_did_not_change_neither_rises_nor_falls(name: str, n: int) -> None:
    """With percentiles of a bootstrap .20 of two problems, .12 to .17 of five, .10 of eight."""
    rng = np.random.default_rng(n)
    draws = 1500
    ends = np.array([change_interval(WORLDS[name](rng, n), 0.95) for _ in range(draws)])
    called = np.mean((ends[:, 0] > 1e-12) | (ends[:, 1] < -1e-12))
    assert called == 0 if n < FEWEST else called <= 0.06 + 2 * np.sqrt(0.06 * 0.94 / draws)


def test_few_problems_are_said_to_be_few() -> None:
    rng = np.random.default_rng(0)
    few, enough = (valued({"base": rng.random(n), "run": 5 + rng.random(n)}) for n in (7, 8))
    row = changes(few)
    assert row.n_paired == 7
    assert row.change > 4
    assert np.isnan([row.change_low, row.change_high]).all()
    assert changes(enough).change_low > 4
    for rollouts, mark in ((few, "?"), (enough, "↑")):
        text = behaviour_text(behaviour_table(rollouts, reference="base"))
        (line,) = [line for line in text.splitlines() if line.strip().startswith("run") and "[5." in line]
        assert line.endswith(mark)
        assert ("too few problems to say whether it changed (8 are needed)" in text) is (mark == "?")
    assert too_few(7) == "too few problems (7; 8 are needed)"
