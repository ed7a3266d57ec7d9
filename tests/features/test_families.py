"""The annotator of mathematical reasoning on known texts, and families of features with planted members."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from support.builders import BOS, EOS, SHARED, feature_table
from support.refusals import refuses
from support.results import answer
from tsae.diff import descriptions
from tsae.diff.comparisons import Rows
from tsae.diff.config import DiffConfig
from tsae.diff.descriptions import Families, assign_families, family_shifts, find_families
from tsae.diff.feature_diff import feature_diff
from tsae.errors import TsaeError
from tsae.features.contexts import annotate_tokens
from tsae.features.mathematics import CLASSES, FAMILIES, character_classes, math_classes
from tsae.report.tables import families, table_text
from tsae.rollouts.table import Rollouts
from tsae.testbed import classes as testbed

QUICK = DiffConfig(n_bootstrap=200, n_permutations=1000)
PROMPT = "Janet's ducks lay 16 eggs per day. She eats 3 for breakfast. She sells each for $2. How much does she make?"


# --- the annotator


def spans(text: str, prompt: str = PROMPT) -> dict[str, str]:
    """Class -> the characters of that class."""
    found = character_classes(prompt, text)
    assert len(found) == len(text)
    return {
        name: "".join(c for c, code in zip(text, found, strict=True) if code == number).strip()
        for number, name in enumerate(CLASSES)
        if (found == number).any()
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The ducks lay 16 eggs per day.", {"restating": "The ducks lay 16 eggs per day."}),
        ("So the ducks lay 16 eggs per day.", {"other": "So the ducks lay 16 eggs per day."}),
        ("The ducks lay 17 eggs per day.", {"other": "The ducks lay 17 eggs per day."}),
        ("Those teachers count 16 marbles.", {"other": "Those teachers count 16 marbles."}),
        ("She has 16 - 3 = <<16-3=13>>13 eggs", {"other": "She has  eggs", "arithmetic": "16 - 3 = <<16-3=13>>13"}),
        ("9 kids + 6 kids = 15", {"arithmetic": "9 kids + 6 kids = 15"}),
        ("That is .5*4 = 2 eggs", {"other": "That is  eggs", "arithmetic": ".5*4 = 2"}),
        ("It costs $26 on Monday.", {"other": "It costs $26 on Monday."}),
        ("First find the eggs: 16 - 3", {"planning": "First find the eggs:", "arithmetic": "16 - 3", "other": ""}),
        ("Let x be the price.", {"planning": "Let x be the price."}),
        ("We need to subtract what she eats.", {"planning": "We need to subtract what she eats."}),
        ("Maybe it is less, or more.", {"hesitation": "Maybe it is less", "other": ", or more."}),
        ("Wait, that is wrong.", {"checking": "Wait, that is wrong."}),
        ("Let me double-check the sum.", {"checking": "Let me double-check the sum."}),
        ("The waiter can check in.", {"other": "The waiter can check in."}),
        ("Good\nA: 26", {"other": "Good", "answer statement": "A: 26"}),
        ("The answer is $26.", {"answer statement": "The answer is $26", "other": "."}),
        ("#### 26", {"answer statement": "#### 26"}),
    ],
)
def test_spans_are_found(text: str, expected: dict[str, str]) -> None:
    assert {k: v for k, v in spans(text).items() if v} == {k: v for k, v in expected.items() if v}


def test_tokens_have_the_class_of_their_first_character() -> None:
    tokens = ["She", " has", " 16", " -", " 3", " =", " 13", " eggs", ".", "\n", "A", ":", " ", "13", ""]
    found = math_classes(PROMPT, tokens)
    assert found == ["other"] * 2 + ["arithmetic"] * 5 + ["other"] * 3 + ["answer statement"] * 4 + ["other"]
    assert math_classes(PROMPT, []) == []
    assert {name for names in FAMILIES.values() for name in names} < set(CLASSES)


@pytest.mark.parametrize("piece", ["1 + ", "a ", "((((", "<<", "$", "first ", "1 a b c", ". ", "maybe, ", "1,"])
def test_hostile_texts_take_linear_time(piece: str) -> None:
    text = piece * (40_000 // len(piece))
    start = time.process_time()
    character_classes(text, text)
    assert time.process_time() - start < 5


@pytest.mark.skipif(not (SHARED / "data" / "gsm8k").is_dir(), reason="needs GSM8K's example solutions")
def test_gsm8k_solutions_have_the_counts_that_the_notes_name() -> None:
    lines = (SHARED / "data" / "gsm8k" / "example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    counts = dict.fromkeys(CLASSES, 0)
    for line in lines[:200]:
        problem = json.loads(line)
        for name, solution in problem.items():
            if name not in ("question", "ground_truth"):
                for code in np.unique(character_classes(problem["question"], solution["solution"])):
                    counts[CLASSES[code]] += 1
    assert counts["answer statement"] >= 795  # of 800
    assert counts["arithmetic"] >= 780
    assert 20 <= counts["restating"] <= 200
    assert 50 <= counts["planning"] <= 300
    assert counts["checking"] + counts["hesitation"] <= 8


# --- families


def by_token(prompt: str, response: list[str]) -> list[str]:
    return [{"4": "answer", "5": "sum", "6": "plan"}.get(token, "filler") for token in response]


KINDS = {"direct-answer": ("answer",), "basic-computation": ("sum",), "deliberation": ("plan", "never")}


def story(*, n_problems: int = 30, seed: int = 0):
    """Base plans and computes; the run answers at once. Features: one a family, one everywhere, one by chance, one of a
    problem's own."""
    rng = np.random.default_rng(seed)
    records, codes = [], []
    for policy in ("base", "run"):
        for problem in range(n_problems):
            for _ in range(4):
                direct = rng.random() < (0.9 if policy == "run" else 0.3)
                body = [4] if direct else [6, 6, *([5, 7] * int(rng.integers(2, 5))), 4]
                text = np.array([7, *body])
                response = np.zeros((len(text), 6))
                for feature, token in enumerate((4, 5, 6)):
                    response[:, feature] = (text == token) * rng.random(len(text)) + 0.02 * rng.random(len(text))
                response[:, 3] = 1 + 0.1 * rng.random(len(text))
                response[:, 4] = (rng.random(len(text)) < 0.1) * rng.random(len(text))
                response[:, 5] = problem % 7 == 0
                codes += [np.zeros((1, 6)), response, np.zeros((1, 6))]
                ids = {"prompt_ids": [BOS], "response_ids": [*text.tolist(), EOS]}
                records.append(answer(f"p{problem}", policy, rng.random() < 0.5, **ids))
    rollouts, half = Rollouts.from_records(records), len(records) // 2
    lengths = rollouts.lengths("response_ids") + 1
    again = np.concatenate(codes)[lengths[:half].sum() :]
    rows = np.arange(len(records))
    return feature_table(rollouts, np.concatenate([*codes, again]), [("base", rows), ("run", rows[half:])])


STRINGS = [str(i) for i in range(20)]


def families_of(table: Any, kinds: Families = KINDS) -> pd.DataFrame:
    """What a diff says of the features' families, without the diff."""
    return assign_families(table, annotate_tokens(table, by_token, STRINGS), kinds, QUICK)


@pytest.mark.slow(ci=True)
def test_families_by_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share, lift and choice of every feature; and that the draws' p-values find the planted ones alone."""
    monkeypatch.setattr(descriptions, "_DRAWS", 199)
    table = story(n_problems=9)
    found = families_of(table)
    counted = np.isin(table.token_ids, (4, 5, 6, 7))
    label, codes = table.token_ids[counted], table.codes.toarray()[counted]
    tokens = np.array([4, 5, 6])  # of the families
    part = np.array([(label == token).mean() for token in tokens])
    for feature, row in found.iterrows():
        share = np.array([codes[label == token, feature].sum() for token in tokens]) / codes[:, feature].sum()
        chosen = int(np.argmax(share * np.log(np.maximum(share / part, 1e-12))))
        assert row.family_share == pytest.approx(share[chosen], rel=1e-5)
        assert row.family_lift == pytest.approx(share[chosen] / part[chosen], rel=1e-5)
        assert row.family == ((*KINDS,)[chosen] if feature < 3 else "none")
    assert found.family_p[:3].tolist() == [1 / 200] * 3
    assert found.family_q[:3].tolist() == pytest.approx([18 / 3 / 200] * 3)
    assert found.family_p[5] == 1  # active in two problems alone
    assert (found.family_p[3:] > 0.05).all()
    strict = replace(QUICK, q=0.029)
    classes = annotate_tokens(table, by_token, STRINGS)
    assert set(assign_families(table, classes, KINDS, strict).family) == {"none"}


def test_draws_keep_runs_and_problems_together() -> None:
    """Every row gets the labels of one donor, stretched and rotated; the rows of a problem those of another problem."""
    table = story(n_problems=9)
    counted = np.flatnonzero(np.isin(table.token_ids, (4, 5, 6, 7)))
    row = table.row_of_token[counted]
    shuffle = descriptions._Shuffle(table, row, np.arange(len(row)))
    problems = pd.factorize(table.rollouts.frame.problem_id.to_numpy()[table.trajectory])[0]
    tokens = {int(r): np.flatnonzero(row == r) for r in np.unique(row)}
    rng, donated, turned = np.random.default_rng(0), set(), set()
    for _ in range(5):
        drawn, of_problem = shuffle(rng), {}
        for mine, places in tokens.items():
            (donor,) = set(row[drawn[places]].tolist())
            n, m = len(places), len(tokens[donor])
            stretched = tokens[donor][[i * m // n for i in range(n)]]
            turns = [t for t in range(n) if np.array_equal(np.roll(stretched, t), drawn[places])]
            assert turns
            turned.add(turns[0])
            donated.add(donor)
            of_problem.setdefault(problems[mine], set()).add(problems[donor])
        assert all(len(donors) == 1 for donors in of_problem.values())
        assert set.union(*of_problem.values()) == set(range(9))
    assert len(donated) > len(tokens) / 2
    assert turned >= {0, 1, 2}


def test_families_are_learnt_on_a_part_of_a_long_table() -> None:
    records = [answer(f"p{i}", "base", True, prompt_ids=[BOS], response_ids=[4, EOS]) for i in range(700)]
    rollouts = Rollouts.from_records(records)
    table = feature_table(rollouts, np.ones((2100, 1)), [("base", np.arange(700))])
    label = np.arange(2100)
    token, row, sampled = descriptions._sample(table, label, QUICK, np.random.default_rng(0))
    assert len(token) == len(np.unique(row)) == 600
    assert (table.token_ids[token] == 4).all()
    assert sampled.tolist() == token.tolist()
    assert row.tolist() == table.row_of_token[token].tolist()


def test_shifts_of_families_by_loops() -> None:
    """The score is the mean of the features in deviations; a family that is silent at base has no shift."""
    table = story(n_problems=9)
    codes = table.codes.toarray()
    codes[table.reader[table.row_of_token] == 0, 5] = 0
    table = replace(table, codes=sp.csr_array(codes))
    rows = Rows.of(table, QUICK)
    family = pd.Series(["a", "a", "b", "none", "none", "c"])
    found = family_shifts(table, rows, family, QUICK)
    assert found.columns[:5].tolist() == ["checkpoint", "band", "family", "n_features", "n_problems"]
    whole = found[found.band == "all"].set_index("family")
    assert whole.n_features.to_dict() == {"a": 2, "b": 1, "c": 1}
    assert set(whole.checkpoint) == {"run"}
    values, frame = rows.values.toarray(), table.rollouts.frame.loc[table.trajectory].reset_index(drop=True)
    policy, reader = frame.policy.to_numpy(), np.array(table.readers)[table.reader]
    base = (policy == "base") & (reader == "base")
    for name, members in (("a", [0, 1]), ("b", [2])):
        score = (values[:, members] / values[base][:, members].std(0, ddof=1)).mean(1)
        run = (policy == "run") & (reader == "run")
        by_problem = [score[run & mine].mean() - score[base & mine].mean()
                      for mine in (frame.problem_id.to_numpy() == f"p{i}" for i in range(9))]  # fmt: skip
        assert whole.difference[name] == pytest.approx(np.mean(by_problem), rel=1e-4)
        assert whole.delta[name] == pytest.approx(np.mean(by_problem) / score[base].std(ddof=1), rel=1e-4)
        assert whole.n_problems[name] == 9
        assert whole.note[name] == ""
        assert whole.low[name] < whole.difference[name] < whole.high[name]
    assert whole.note["c"] == "silent at base"
    assert np.isnan(whole.difference["c"])
    assert family_shifts(table, rows, pd.Series(["none"] * 6), QUICK).empty


@pytest.mark.slow(ci=True)
def test_planted_families_are_found_counted_and_tested() -> None:
    table = story()
    diff = feature_diff(table, QUICK, annotator=by_token, families=KINDS, token_strings=STRINGS, progress=False)
    pd.testing.assert_frame_equal(diff.features[list(families_of(table))], families_of(table))
    found = diff.features
    assert found.family.tolist() == ["direct-answer", "basic-computation", "deliberation", "none", "none", "none"]
    assert (found.family_p[:3] <= 0.002).all()
    assert (found.family_p > 0).all()
    assert (found.family_share[:3] > 0.8).all()
    shifts = diff.families[diff.families.band == "all"].set_index("family")
    assert shifts.n_features.tolist() == [1, 1, 1]
    assert shifts.difference["direct-answer"] > 0 > shifts.difference["deliberation"]
    assert (shifts.q <= 0.05).all()
    assert "direct-answer (1 features)" in table_text(families(diff))


@pytest.mark.slow(ci=True)  # draws many tables
def test_a_family_with_most_of_the_tokens_has_features_too() -> None:
    """Its lift cannot be 2: of 70 % of the tokens the share has to be half way to 1."""
    found = families_of(story(), {"most": ("sum", "filler", "answer"), "deliberation": ("plan",)})
    assert found.family.tolist() == ["most", "most", "deliberation", "none", "none", "none"]
    assert (found.family_lift[:2] < 2).all()
    assert (found.family_share[:2] > 0.85).all()


@pytest.mark.slow(ci=True)
def test_a_feature_of_few_problems_has_no_family() -> None:
    table = story()
    problem = table.rollouts.frame.problem_id.str[1:].astype(int).to_numpy()[table.trajectory[table.row_of_token]]
    for n, expected in ((7, "none"), (8, "direct-answer")):
        codes = table.codes.toarray()
        codes[problem >= n, 0] = 0
        codes[:, 0] *= codes[:, 0] > 0.02  # on its class alone
        found = families_of(replace(table, codes=sp.csr_array(codes)))
        assert found.family[0] == expected
        assert found.family[1] == "basic-computation"


@pytest.mark.slow(ci=True)  # draws many tables
def test_families_of_noise_are_few() -> None:
    """Features that know nothing of tokens, but are bursty and a problem's own."""
    table = story(n_problems=20)
    rng = np.random.default_rng(1)
    problem = pd.factorize(table.rollouts.frame.problem_id)[0][table.trajectory[table.row_of_token]]
    bursts = np.repeat(rng.random((len(table.token_ids) // 3 + 1, 120)) < 0.3, 3, axis=0)[: len(table.token_ids)]
    codes = bursts * rng.exponential(size=(20, 120))[problem]
    rows = [(name, table.trajectory[table.reader == i]) for i, name in enumerate(table.readers)]
    found = families_of(feature_table(table.rollouts, codes, rows))
    assert (found.family != "none").sum() <= 4
    assert (found.family_p <= 0.05).mean() < 0.12


def test_families_need_classes() -> None:
    with pytest.raises(TsaeError, match="families are made of an annotator's classes"):
        feature_diff(story(n_problems=6), QUICK, families=KINDS, progress=False)
    refuses("no token has a class of a family; there are 'prompt'", families_of, story(n_problems=6), {"x": ("y",)})
    assert find_families("tsae.features.mathematics:math_classes") is FAMILIES
    assert find_families("tsae.testbed.classes:token_classes") is testbed.FAMILIES
    refuses("names no annotator with FAMILIES", find_families, "json:loads")


def test_the_testbeds_families_are_classes_of_its_annotator() -> None:
    responses = ("3+5=8;8*2=6;#6", "3-5=7;8*2=6;#6", "#6")
    found = {name for text in responses for name in testbed.token_classes("<bos>3+5*2?", [*text, "<eos>"])}
    members = {name for names in testbed.FAMILIES.values() for name in names}
    assert members - found <= {f"slipped {role}, scratchpad" for role in ("separator", "operand", "result")}
    assert len(members & found) >= 8
