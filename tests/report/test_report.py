"""The report, on diffs made by hand: the numbers in its sentences, hostile text, and a page that loads nothing."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from support.builders import feature_table
from support.refusals import refuses
from support.results import (
    INVISIBLE,
    MARKUP,
    answer,
    behaviour,
    describe,
    every_table,
    make,
    reader,
    rendered,
    source,
    table_of,
)
from tsae.diff.config import DiffConfig
from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES
from tsae.diff.feature_diff import FeatureDiff, feature_diff
from tsae.report.document import number_array
from tsae.report.examples import AFTER, BEFORE, colouring, contexts, histograms, side_by_side
from tsae.report.explorer import contrasts_shown, explorer
from tsae.report.figures.features import decomposition_figure
from tsae.report.figures.layout import BAND_STYLE, LOWERED, NEUTRAL, RAISED, SERIES, SYMBOLS, panels
from tsae.report.figures.overview import overview, overview_caption
from tsae.report.page import linked, render, write_report
from tsae.report.story import facts
from tsae.report.story.findings import NEXT, findings, lead
from tsae.report.story.gates import statistics_text
from tsae.report.story.verdict import clear_changes, measured_changes
from tsae.report.tables import opposed, table_text
from tsae.report.terminal import contrasts_text, gates_text, print_findings
from tsae.report.text import figure_text, html_text, number, percent, q_value, script_json, visible
from tsae.rollouts.table import Rollouts


@pytest.fixture(scope="module")
def page() -> Page:
    """The report of the diff that `make` makes."""
    return Page(rendered(make()))


@pytest.mark.slow(ci=True)
def test_bands_from_elsewhere_are_called_so_wherever_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    source = {"kind": "difficulty", "label": f"difficulty for model {MARKUP}", "file": "data.jsonl", "column": "rate"}
    made = make()
    diff = replace(made, info={**made.info, "bands": {**made.info["bands"], "separate": True, "source": source}})
    text = html_text(f"difficulty for model {MARKUP}")
    shown = rendered(diff)
    assert f"Easy, medium and hard are the {text}, not what the base finds so." in shown
    assert f"Pass rate of {text}, easy ≥" in shown
    assert f"Behaviour by {text}" in shown
    assert shown.count(text) > 6  # the tables' heads
    assert MARKUP not in shown
    print_findings(diff)
    assert f"Behaviour on each band ({visible(f'difficulty for model {MARKUP}')})" in capsys.readouterr().out
    level = {**source, "kind": "level", "label": "level of the data set"}
    bands = {"reference": None, "separate": True, "unbanded": 2, "source": level}
    shown = rendered(replace(made, info={**made.info, "bands": bands}))
    assert "Bands are the level of the data set (rate of data.jsonl); 2 problems have no band." in shown


def unpacked(part: str) -> Any:
    """What the page's script makes of it."""
    return json.loads(zlib.decompress(base64.b64decode(part)))


class Page(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.html = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.parts: dict[str, str] = {}
        self._in: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script" and (id := self.tags[-1][1].get("id") or "").startswith("part-"):
            self.parts[id.removeprefix("part-")] = data
        (self.scripts if self._in == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def part(self, name: str) -> Any:
        return unpacked(self.parts[name])

    @property
    def drawn(self) -> dict[str, Any]:
        return json.loads(next(s for s in self.scripts if s.startswith("{")))


def sentences(diff: FeatureDiff, heading: str) -> str:
    return " ".join(next(f for f in findings(diff) if f.heading == heading).sentences)


def test_a_run_is_told_with_its_numbers() -> None:
    told = sentences(make(), "up-run")
    assert told.startswith(
        "After 10 steps of training, the model writes longer responses (20.0 → 38.0 tokens) and solves more easy "
        "(50 → 80 %) and hard problems (50 → 80 %). One run; what causes the change is not tested. "
    )
    assert "4 of 6 tested features moved (|Δ| > 0.1, q ≤ 0.05): 3 raised, 1 lowered." in told
    assert "No control for length, position or tokens was measured. Clearest of these 4: " in told
    assert "raised 0 “operand” Δ +1.80 sd [+1.60, +2.00], active in 40 % → 60 % of responses; lowered 2 “ans" in told


def link(feature: int) -> str:
    return f'<span class="feature" data-feature="{feature}">{feature}</span>'


def test_findings_link_the_features_that_they_name(page: Page) -> None:
    assert f"raised {link(0)} “operand” Δ +1.80 sd [+1.60, +2.00], active in" in page.html
    assert f"lowered {link(2)} “answer” Δ −1.40 sd" in page.html
    assert f"lowered 2 features, most clearly {link(0)} “operand”" in page.html
    assert "4 of 6 tested features moved" in page.html


def test_only_features_with_a_card_are_linked_and_text_is_escaped() -> None:
    made = make()
    made.features["responds_to"] = ["<b>1 (x)</b>", *made.features.responds_to[1:]]
    assert linked(made, "raised 0 “<b>1 (x)</b>” & 1 (x)") == (
        f"raised {link(0)} “&lt;b&gt;1 (x)&lt;/b&gt;” &amp; 1 (x)"
    )
    assert linked(made, "Feature 3 ablated: 3 (of 5)") == f"Feature {link(3)} ablated: 3 (of 5)"
    for plain in ("Feature 99 ablated", "Accuracy 0 (of 5)", "2 features ablated", "99 “operand”"):
        assert linked(made, plain) == plain


def test_a_change_within_its_interval_is_not_called_one() -> None:
    assert "shows no clear change in accuracy (50 → 45 % on easy problems)" in sentences(make(), "down-run")
    # The intervals of the two means overlap, but that of the paired change leaves out 0.
    after = pd.Series(behaviour("a", "all", "x", 0.45, 0.06, -0.05, 0.02))
    assert after.high > 0.5 - 0.06
    assert facts.direction(after) == -1
    assert facts.direction(pd.Series(behaviour("a", "all", "x", 0.45, 0.06))) == 0


def test_behaviours_are_shown_in_per_cent_by_what_they_are() -> None:
    """An entropy of .3 nats is not 30 %; and the accuracy on one problem, which has no interval, is a share."""
    numbers = {"entropy": 0.3, "relative_length": 0.8, "skipped_steps": 0.5}
    table = table_of([answer("p", "base", bool(k), **numbers, used_code=k) for k in range(2)], np.ones((4, 1)))
    table.rollouts.info["behaviours"] = [*numbers, "used_code"]
    diff = feature_diff(table, DiffConfig(n_bootstrap=100, n_permutations=100), progress=False)
    shares = [name for name in facts.behaviours_of(diff) if facts.is_share(diff, name)]
    assert shares == ["accuracy", "skipped_steps", "used_code"]


def test_runs_in_opposition_and_the_gates() -> None:
    opposed = sentences(make(), "Opposite directions")
    assert "up-run raised and down-run lowered 2 features, most clearly 0 “operand”" in opposed
    assert "down-run raised and up-run lowered 1 feature, most clearly 2 “answer”" in opposed
    made = make()
    made.shifts["p"] = 1.0
    assert "No feature was raised by one run and lowered by another" in sentences(made, "Opposite directions")
    made.contrasts.loc[made.contrasts.checkpoint == "up-run", "note"] = "5 problems; 8 are needed"
    assert not [f for f in findings(made) if f.heading == "Opposite directions"]  # It was not tested.
    belief = sentences(make(), "How far to believe it")
    assert "explains 0.90 of the variance of 3 readers" in belief
    assert "at most (mean of 5): 0.4 of 6 features where the trajectories of a problem are split at random; " in belief
    assert "not causally tested" in belief


def test_a_flagged_reader_is_named_on_the_first_screen() -> None:
    made = make()
    made.info["readers"][2] = reader("down-run", "down-run", fve=0.31)
    assert "down-run" in sentences(made, "How far to believe it")
    told = sentences(made, "down-run")
    assert told.endswith(
        "The SAE explains 31 % of the variance of down-run; 50 % are needed. Its features are left out."
    )


@pytest.mark.slow(ci=True)
def test_tokens_that_are_left_out_are_said() -> None:
    from tsae.report.terminal import gates_text

    made = make()
    assert "norm limit" not in gates_text(made, None)
    made.info["config"]["max_outliers"] = 0.05
    made.info["readers"][1]["outlier_share"] = 0.005
    made.info["readers"][2] |= {"outlier_share": 0.08, "flagged": True}
    assert "norm limit, left out of every mean: base 0 %, up-run 0.5 %, down-run 8 %" in gates_text(made, None)
    assert "The SAE leaves out 8 % of the tokens of down-run. Its features are left" in sentences(made, "down-run")
    made.info["readers"][1] = reader("up-run", "up-run", fve=0.31)
    text = Page(rendered(made)).text
    assert "flagged (below 0.5)" in text
    assert "flagged (more than 5 % of tokens left out)" in text


def test_no_bands() -> None:
    made = make(bands=())
    assert "and solves more problems (50 → 80 %)." in sentences(made, "up-run")
    page = Page(rendered(made))
    assert "The problems have no bands." in page.text
    assert {"overview", "bands-figure", "decomposition-figure", "outcomes-figure"} <= set(page.drawn)


def test_no_runs() -> None:
    made = make(runs=False)
    assert [f.heading for f in findings(made)] == ["Success against failure", "How far to believe it", NEXT]
    assert sentences(made, NEXT).startswith("Read problems side by side")
    told = sentences(made, "Success against failure")
    assert "Hard problems: 4 of 6 tested features differ" in told
    assert "30 problems with both outcomes, 4 left out" in told
    assert "Clearest: 2 “answer” Δ −0.80 sd [−1.00, −0.60], active in 40 % of failures → 60 % of successes." in told
    assert lead(made).startswith("Successes against failures of the same problem, as base reads them")
    page = Page(rendered(made))
    assert "overview" in page.drawn
    assert "bands-figure" not in page.drawn
    assert "successes than in failures" in overview_caption(made)


def test_a_run_that_only_read_others_trajectories() -> None:
    made = make()
    of_readers = made.shifts.part.isin(["same_trajectories", "success_minus_failure"])
    drawn = made.contrasts.part.isin(["same_trajectories", "success_minus_failure"])
    nobody = made.behaviours.assign(policy="someone else")
    made = replace(made, shifts=made.shifts[of_readers], contrasts=made.contrasts[drawn], behaviours=nobody)
    assert "On the same trajectories, 4 of 6 tested features moved" in sentences(made, "up-run")
    assert "Accuracy" not in sentences(made, "up-run")
    assert "decomposition-figure" not in Page(rendered(made)).drawn


def test_what_was_not_found_is_not_called_small_and_the_rate_is_named() -> None:
    """A difference that is large and hardly known did not move either."""
    made = make()
    none = made.contrasts.assign(n_discoveries=0)
    wide = made.shifts.assign(q=0.5)
    assert sentences(replace(made, shifts=wide, contrasts=none), "up-run").endswith(
        "; 5 differ detectably, none of them clearly by that much."
    )
    nothing = replace(made, shifts=wide, contrasts=none.assign(n_differs=0))
    assert sentences(nothing, "up-run").endswith("; 0 differ detectably.")
    assert "Benjamini–Hochberg at q" in statistics_text(made)
    by = replace(made, info={**made.info, "config": {**made.info["config"], "fdr": "by"}})
    assert "Benjamini–Yekutieli at q" in statistics_text(by)


def test_nothing_was_tested() -> None:
    made = make()
    refused = made.contrasts.assign(n_tested=0, n_discoveries=0, note="2 problems; 5 are needed")
    made = replace(made, shifts=made.shifts.iloc[:0], contrasts=refused, behaviours=made.behaviours.iloc[:0])
    assert "not drawn: 2 problems; 5 are needed" in sentences(made, "up-run")
    page = Page(rendered(made))
    assert "2 problems; 5 are needed" in page.text
    assert "No behaviours were measured." in page.text


@pytest.mark.parametrize(("known", "said"), [((0, 12), True), ((0, None), False)])
def test_tests_on_the_problems_that_chose_the_features_are_said(known: tuple[int | None, ...], said: bool) -> None:
    """As those of `tsae run --causal`; not of problems of their own, nor where an older test does not say."""
    tested = [
        {"checkpoint": "up-run", "features": [0], "mode": "ablate", "amount": 1.0, "tokens": "all", "n_problems": 30,
         "summaries": {}, "changes": [], **({} if n is None else {"n_of_features": n})}
        for n in known
    ]  # fmt: skip
    made = make((), runs=False)
    page = rendered(replace(made, info={**made.info, "causally_tested": tested}))
    assert ("are the fairer" in page) is said
    assert page.count("(the features were found on ") == sum(bool(n) for n in known)


def test_without_an_annotator_the_picture_shows_features() -> None:
    tokens = [f"' {word}' ' of'" for word in "abcdef"]
    made = make(features=describe(tokens, annotated=False))
    labels = overview(make()).layout.yaxis4.ticktext  # type: ignore[union-attr]
    assert "operand" in labels
    labels = overview(made).layout.yaxis4.ticktext  # type: ignore[union-attr]
    assert any(label.startswith("0: ' a'") for label in labels)


def test_the_picture_says_what_the_tables_say() -> None:
    figure = overview(make())
    assert figure is not None
    by_mode = [trace for trace in figure.data if trace.mode == "markers" and len(trace.x) == 4]
    assert sorted(by_mode[0].x) == pytest.approx([-1.4, 0.4, 1.0, 1.8])
    assert any("80" in str(trace.text) for trace in figure.data if trace.mode == "text")
    # A filled mark has a colour where the verdict counts the change: not where an interval leaves out 0 by a hair.
    made = make()
    made.behaviours.loc[
        (made.behaviours.policy == "down-run") & (made.behaviours.behaviour == "accuracy"), "change_high"
    ] = -0.002
    marks = [
        trace.marker for trace in overview(made).data if trace.mode == "markers" and trace.marker.symbol == "circle"
    ]
    known = [c for run in made.final_checkpoints for c in clear_changes(measured_changes(made, run), 0.95)]
    coloured = [mark for mark in marks if mark.line.color in (RAISED, LOWERED)]
    assert len(coloured) == sum(c.name == "accuracy" for c in known) == len(marks) - 2 == 2


def test_parts_add_up_in_the_decomposition() -> None:
    figure = decomposition_figure(make())
    assert figure is not None
    policy, representation, total = figure.data[:3]
    parts = dict(zip(policy.y, policy.x, strict=True))
    for y, x in zip(representation.y, representation.x, strict=True):
        parts[y] += x
    assert [parts[y] for y in total.y] == pytest.approx(list(total.x))


def test_refused_contrasts_come_with_their_reason(page: Page) -> None:
    assert "contrasts refused, with the reason" in page.text
    assert "3 problems <on> both sides; 5 are needed" in page.text
    assert "on" not in [tag for tag, _ in page.tags]


def test_confounds_are_words(page: Page) -> None:
    assert "one token" in page.texts
    assert "tracks length" in page.texts


def test_stability_is_shown_where_it_is_known(page: Page) -> None:
    made = make()
    known = {"n_others": 2, "n_latents": 6, "cosine": 0.81, "found_again": 0.75, "same_group": 1.0}
    features = made.features.assign(stability=[0.93, 0.7, 0.41, 0.95, 0.9, 0.99])
    table, strings = source(["a"])
    diff = replace(made, features=features, info={**made.info, "stability": known, "token_strings": strings})
    shown = Page(rendered(replace(diff, source=table)))
    fact = "2 other seeds on average find 75 % of 6 active features again (cosine of matched decoder directions ≥ 0.7)"
    assert f"{fact}; mean cosine 0.81." in shown.texts
    assert "25 %, high-level, stability 0.93" in shown.texts
    # Feature 2 alone is below .7: in its rows and for the explorer.
    flagged = [attributes["title"] for _, attributes in shown.tags if "matched cosine" in str(attributes.get("title"))]
    assert set(flagged) == {"matched cosine 0.41 with other seeds"}
    assert shown.texts.count("not found again") == len(flagged) > 0
    data = shown.part("features")
    assert data["numbers"]["stability"] == [0.93, 0.7, 0.41, 0.95, 0.9, 0.99]
    assert [f for f, flags in enumerate(data["columns"]["flags"]) if "not found again" in flags] == [2]
    assert "stability" not in page.text.lower().partition("words of this page")[0]
    assert "stability" not in page.part("features")["numbers"]
    assert "not found again" not in page.texts
    for shown in (lambda d: table_text(opposed(d)[0]), lambda d: contrasts_text(d, "outcome", d.base, 6)):
        plain, with_stability = (shown(one).splitlines() for one in (made, diff))
        assert any("0  " in line and "operand 25 %, high-level, stability 0.93" in line for line in with_stability)
        assert not any("stability" in line for line in plain)
    assert gates_text(diff, None).splitlines()[2] == f"  stability: {fact}; mean cosine 0.81"
    assert "stability" not in gates_text(made, None)


@pytest.mark.slow
def test_examples_need_the_feature_table(page: Page) -> None:
    assert "without its feature table" in page.part("features")["info"]["no_examples"]
    assert set(page.parts) == {"features"}
    table, strings = source(["x", "y", "z"])
    made = make(source=table)
    made.info["token_strings"] = strings
    page = Page(rendered(made))
    assert page.part("features")["info"]["no_examples"] == ""
    data = page.part("trajectories")
    # Two trajectories of prompt 0 and response 0, 1, 2; token 0 is the most frequent.
    assert data["strings"] == ["x", "y", "z"]
    assert data["trajectories"]["1"] == ["p1", "up-run", "failure", 1, 4, [[0, [0, 0, 1, 2]]]]
    maximum, groups = page.part("examples-0")["3"]
    assert maximum == 3.0
    # Activations 0, 1, 2, 3: strongest at token 3, in steps of a 99th of 3; ties go to the first row.
    assert groups[0] == [
        "strongest",
        [[0, 0, 3, 0, 4, 3.0, [1, 1, 1], [33, 66, 99]], [1, 0, 3, 0, 4, 3.0, [1, 1, 1], [33, 66, 99]]],
    ]
    # Ids where no strings were kept.
    assert Page(rendered(make(source=table))).part("trajectories")["strings"][1] == "#1 "


def test_the_explorer_says_what_the_tables_say(page: Page) -> None:
    made, data = make(), page.part("features")
    contrasts = data["info"]["contrasts"]
    assert [c["where"] for c in contrasts[:5]] == [
        "all problems", "easy problems", "hard problems", "policy part", "representation part",
    ]  # fmt: skip
    shown = contrasts_shown(made)
    assert len(shown) == len(contrasts) == len(data["effects"])
    keys = ["kind", "checkpoint", "part", "band", "outcome"]
    for contrast, effect in zip(shown[keys].to_dict("records"), data["effects"], strict=True):
        rows = made.table(**contrast)
        assert effect["feature"] == rows.feature.tolist()
        for name in ("delta", "delta_low", "delta_high", "q"):
            np.testing.assert_allclose(effect[name], rows[name], rtol=5e-3)
    assert data["info"]["q"] == 0.05
    # Raised or lowered by most first; the feature that never moved last.
    assert data["info"]["order"][-1] == 5
    flags = [["one token", "tracks length"], [], ["tracks length"], [], ["tracks length"], []]
    assert data["columns"]["flags"] == flags


def test_controls_that_a_feature_does_not_survive_reach_its_card() -> None:
    keys = {"kind": "shift", "checkpoint": "up-run", "part": "total", "band": "all", "outcome": "all"}
    verdicts = [(0, "length", FAILS), (0, "token", FAILS), (1, "length", SURVIVES), (2, "position", FAILS)]
    confounds = pd.DataFrame([{**keys, "feature": f, "control": c, "verdict": v} for f, c, v in verdicts])
    data = unpacked(explorer(make(confounds=confounds), []).parts["features"])
    assert data["effects"][0]["lost"] == [0b101, 0, 0b010, 0, 0, 0]


def test_examples_of_every_kind() -> None:
    """Forty problems, whose activation falls from problem to problem; both outcomes in every second one."""
    records, values = [], []
    for problem in range(40):
        for outcome in ("success", "failure") if problem % 2 == 0 else ("success",):
            ids = {"prompt_ids": [0], "response_ids": [1, 2]}
            records.append({"problem_id": f"p{problem}", "policy": "base", **ids, "outcome": outcome})
            values.append([0.0, 40.0 - problem if outcome == "success" else 0.0, 1.0])
    table = table_of(records, np.reshape(values, (-1, 1)))
    found = contexts(table, [0], {})
    groups = dict(found.chunks[0]["0"][1])
    problem = {int(t): record[0] for t, record in found.trajectories["trajectories"].items()}
    told = {name: [(problem[e[0]], e[5]) for e in examples] for name, examples in groups.items()}
    assert told["pairs"] == [("p0", 40.0), ("p0", 1.0), ("p2", 38.0), ("p2", 1.0)]
    assert told["strongest"] == [("p0", 40.0), ("p1", 39.0), ("p2", 38.0)]
    # 60 rows by their strongest token: 1 to 6 the top tenth, 7 to 30 above the median, the failures among the others.
    assert told["90–100 %"] == [("p3", 37.0), ("p4", 36.0)]
    assert [value for _, value in told["50–90 %"]] == [23.0, 22.0]
    assert {value for _, value in told["0–50 %"]} == {1.0}
    outcomes = [found.trajectories["trajectories"][str(e[0])][2] for e in groups["pairs"]]
    assert outcomes == ["success", "failure"] * 2
    none = contexts(table, [0], {}, max_tokens=0)
    assert (none.chunks, none.left_out) == ([], 1)


def test_a_long_trajectory_keeps_a_window() -> None:
    n = 5000
    record = {"problem_id": "p", "policy": "base", "prompt_ids": [0], "response_ids": [1] * (n - 1)}
    codes = np.zeros((n, 2), dtype=np.float32)
    codes[[1000, 1100, 4000], 0] = [2, 1, 1]
    codes[4000, 1] = 1
    table = table_of([record], codes)
    found = contexts(table, [0, 1], {})
    (example,) = found.chunks[0]["0"][1][0][1]
    assert example == [0, 0, 1000, 1000 - BEFORE, 1000 + AFTER, 2.0, [BEFORE, 100], [99, 50]]
    segments = found.trajectories["trajectories"]["0"][5]
    assert [(start, len(ids)) for start, ids in segments] == [(744, BEFORE + AFTER), (3744, BEFORE + AFTER)]


def test_histograms_count_every_active_token_of_the_span() -> None:
    table, _ = source(["a", "b", "c"])
    counts, top = histograms(table, "response")
    assert top.tolist() == [3.0] * 6
    # Two responses with activations 1, 2 and 3; the prompt's 0 is not an activation.
    assert {int(i): int(n) for i, n in enumerate(counts[0]) if n} == {8: 2, 16: 2, 23: 2}
    counts, _ = histograms(replace(table, codes=table.codes * 0), "response")
    assert counts.sum() == 0


@pytest.mark.parametrize("attack", [MARKUP, INVISIBLE])
def test_hostile_text_is_shown_and_does_nothing(attack: str, tmp_path: Path, page: Page) -> None:
    table, strings = source([attack, "b", attack])
    # Tables cannot hold lone surrogates; titles and token strings can.
    named = attack.replace("\ud800", "")
    classes = [named, named, "answer", "answer", named, "prompt"]
    clean, plain = make(), page
    renamed = {"up-run": f"up-run{named}"}
    made = make(
        source=table,
        features=describe(classes).assign(top_tokens=[[attack, "b"]] * 6),
        shifts=clean.shifts.replace({"checkpoint": renamed}),
        contrasts=clean.contrasts.replace({"checkpoint": renamed}),
        behaviours=clean.behaviours.replace({"policy": renamed}),
    )
    made.info["token_strings"] = strings
    made.info["readers"][1] |= {"id": renamed["up-run"], "run": named, "trained_on": named}
    written = write_report(made, tmp_path / "report.html", title=attack).read_bytes().decode("utf-8")
    page = Page(written)
    count = [sum(tag == name for tag, _ in page.tags) for name in ("script", "img", "b", "iframe", "svg")]
    assert count == [6, 0, 0, 0, 0]  # figures, three packed parts, Plotly and ours
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    # Our two scripts are the same bytes as ever, and figures are still whole JSON.
    assert page.scripts[-2:] == plain.scripts[-2:]
    assert all(re.fullmatch("[A-Za-z0-9+/=]+", part) for part in page.parts.values())
    assert visible(attack) in page.part("trajectories")["strings"]
    assert set(plain.drawn) <= set(page.drawn)
    assert visible(attack) in page.text
    # Plotly reads markup in labels: they reach it escaped.
    assert "<script" not in json.dumps(page.drawn)
    assert "<img" not in json.dumps(page.drawn)
    assert not re.search("[\ud800-\udfff\u202a-\u202e\u2066-\u2069\x00\x1b]", written.split("<script>")[0])


def test_the_page_loads_nothing(page: Page) -> None:
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            target = attrs.get(name)
            assert target is None or target.startswith("#"), (tag, target)
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = {name: words for name, *words in (rule.split() for rule in policy.split(";"))}
    for name in ("default-src", "connect-src", "base-uri", "form-action"):
        assert rules[name] == ["'none'"]
    assert len(rules["script-src"]) == 2
    assert all(word.startswith("'sha256-") for word in rules["script-src"])
    assert "http" not in policy


def test_every_link_and_figure_has_its_target(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        if (attrs.get("href") or "").startswith("#"):
            assert str(attrs["href"])[1:] in ids
        if "data-figure" in attrs:
            assert attrs["data-figure"] in page.drawn
            assert attrs["aria-label"]


def side(outcomes: dict[str, dict[str, str]]) -> FeatureDiff:
    """Base and up-run answer problems, r or w a response. On the first token of each, feature f is f + 1."""
    records = [
        {
            "problem_id": problem, "policy": policy, "prompt_ids": [0, 0], "response_ids": [1, 2, 3], "prompt": "ask",
            "response": "", "band": problem[:4], "outcome": {"r": "success", "w": "failure"}[letter],
        }
        for policy, of in outcomes.items() for problem, letters in of.items() for letter in letters
    ]  # fmt: skip
    rollouts = Rollouts.from_records(records)
    policies = np.array([record["policy"] for record in records])
    codes = np.zeros((len(records) * 5, 6))
    codes[2::5] = np.arange(1, 7)
    readers = [(name, np.flatnonzero(policies == name)) for name in outcomes]
    made = make()
    made.info["token_strings"] = {"1": "one", "2": "two\u202e"}
    return replace(made, source=feature_table(rollouts, codes, readers, d_high=2, special=(0,)))


def test_a_problem_side_by_side() -> None:
    base = {"easy0": "rrww", "easy1": "rrrr", "hard0": "wwww"}
    diff = side({"base": base, "up-run": {"easy0": "wwww", "easy1": "rrrw", "hard0": "wrww"}})
    shown = side_by_side(diff)
    assert shown is not None
    # No control was measured, so features that moved stand in for those that survive: the clearest first.
    assert shown["runs"] == [["up-run", [(0, 1), (2, -1), (1, 1), (4, 1)], False]]
    # From each band in turn, those whose solve rate changed most.
    assert [(name, band, prompt) for name, band, prompt, _ in shown["problems"]] == [
        ("easy0", "easy", "ask"), ("hard0", "hard", "ask"), ("easy1", "easy", "ask")
    ]  # fmt: skip
    right, n, responses = shown["problems"][0][3]["base"]
    assert (right, n, [outcome for outcome, *_ in responses]) == (2, 4, ["success", "failure"])
    # Three tokens; on the first one all four features are as active as ever.
    assert responses[0][1:] == [3, [0, 1, 2], [0, 0, 99, 0, 2, 99, 0, 1, 99, 0, 4, 99]]
    assert [shown["strings"][token] for token in responses[0][2]] == ["one", "two‹U+202E›", "#3 "]
    assert [shown["problems"][2][3]["up-run"][0], len(shown["problems"][2][3]["base"][2])] == [3, 1]
    # A feature that survives every control takes the place of the others.
    keys = {"kind": "shift", "checkpoint": "up-run", "part": "total", "band": "all", "outcome": "all", "feature": 1}
    kept = pd.DataFrame([{**keys, "control": control, "verdict": SURVIVES} for control in CONTROLS])
    assert colouring(replace(diff, confounds=kept), "up-run") == (True, {1: 1})
    assert side_by_side(replace(diff, source=None)) is None
    assert side_by_side(side({"base": base, "up-run": {"hard9": "r"}})) is None


@pytest.mark.slow(ci=True)
def test_the_task_is_shown_with_a_worked_example() -> None:
    diff = side({"base": {"hard0": "wwr"}, "up-run": {"hard0": "rrw"}})
    assert "The task." not in rendered(diff)
    page = rendered(replace(diff, info={**diff.info, "task": f"Add {MARKUP}."}))
    assert f"The task.</strong> Add {html_text(MARKUP)}." in page
    assert page.count("✗ wrong</span> <small>1 of 3 right") == page.count("✓ right</span> <small>2 of 3 right") == 1


@pytest.mark.slow(ci=True)
def test_the_same_diff_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_report(make(), tmp_path / "a" / "r.html")
    assert one.read_bytes().startswith("".join(render(make())).encode())
    assert one.stat().st_size < 15e6
    assert [path.name for path in one.parent.iterdir()] == ["r.html"]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    refuses("is a folder", write_report, make(), tmp_path)


def test_many_runs_are_cut_to_a_readable_picture() -> None:
    made = every_table(make(), [f"run-{i}" for i in range(6)])
    assert [f.heading for f in findings(made) if f.lights] == ["run-0", "run-1", "run-2", "run-3"]
    assert sentences(made, NEXT).startswith("Open the cards of the clearest features: ")
    assert "The first 4 of 6 runs are shown." in overview_caption(made)
    assert "6 runs compared with base" in lead(made)


def test_the_last_step_of_every_run_is_told() -> None:
    made = make()
    made.info["readers"].insert(1, reader("up-early", "up-run") | {"step": 5})
    assert made.final_checkpoints == ["up-run", "down-run"]


def test_numbers_as_people_read_them() -> None:
    assert [number(x) for x in (0.0, 0.0123, 0.123, -1.5, 20.72, 511.4)] == [
        "0.00", "0.012", "0.12", "−1.50", "20.7", "511",
    ]  # fmt: skip
    assert number(float("nan")) == "–"
    assert [percent(x) for x in (0.0, 0.004, 0.5, 0.996, 1.0)] == ["0", "0.4", "50", "99.6", "100"]
    assert [q_value(x) for x in (0.0001, 0.03, 0.5)] == ["< 0.001", "0.030", "0.50"]


def test_text_for_each_place() -> None:
    assert visible("a\u202eb\ud800\n") == "a‹U+202E›b‹U+D800›\n"
    assert html_text('<b a="1">&') == "&lt;b a=&quot;1&quot;&gt;&amp;"
    assert figure_text("<i>\n" + "x" * 100, 10) == "&lt;i&gt;⏎xxxxx…"
    assert script_json({"a": ["</script>", float("nan"), np.float32(0.5)]}) == (
        '{"a":["\\u003c/script\\u003e",null,0.5]}'
    )


def test_packed_numbers_have_three_digits() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=2000) * 10.0 ** rng.integers(-12, 12, size=2000)
    written = json.loads(number_array(values))
    assert written == [float(f"{v:.3g}") for v in values]
    assert number_array(np.array([0.0, 0.12345, np.nan, -np.inf, 98765.0])) == "[0.0,0.123,null,null,98800.0]"


def test_hard_against_medium_comes_first() -> None:
    made = every_table(make(), ["easy-run", "down-run", "up-run"])
    for record, band in zip(made.info["readers"][1:], ("easy", "medium", "hard"), strict=True):
        record["trained_on"] = band
    pairs = [(up, down) for up, down, _ in facts.opposed_pairs(made)]
    assert pairs[:2] == [("up-run", "down-run"), ("down-run", "up-run")]
    assert set(pairs[2:]) == {("easy-run", "down-run"), ("down-run", "easy-run")}


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
COLOUR_BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "typical": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = np.cbrt(xyz / np.array([0.9505, 1, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", COLOUR_BLIND)
def test_colours_stay_apart_for_everybody(sight: str) -> None:
    apart = [(RAISED, LOWERED), (RAISED, NEUTRAL), (LOWERED, NEUTRAL)]
    apart += list(combinations([colour for colour, _ in BAND_STYLE.values()], 2))
    seen = {name: lab(np.array(COLOUR_BLIND[sight]) @ linear(name)) for pair in apart for name in pair}
    for one, other in apart:
        # About 2.3 can just be noticed.
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)
    # Where lines share a panel, either their colour or their shape differs.
    assert len(set(SYMBOLS)) == len(SYMBOLS) == len(SERIES)
    assert len({symbol for _, symbol in BAND_STYLE.values()}) == len(BAND_STYLE)


@pytest.mark.parametrize("page_colour", ["#ffffff", "#14171b"])
def test_marks_stand_out_from_the_page(page_colour: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    ground = float(weights @ linear(page_colour))
    for colour in {*SERIES, RAISED, LOWERED, NEUTRAL, *(colour for colour, _ in BAND_STYLE.values())}:
        light, dark = sorted((float(weights @ linear(colour)), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_panels_have_the_heights_and_gaps_that_were_asked_for() -> None:
    made = panels(list("abcde"), 3, panel=200, gap=50, horizontal=0.1)
    assert made.height == 450
    assert made.cells == [{"row": 1, "col": c} for c in (1, 2, 3)] + [{"row": 2, "col": c} for c in (1, 2)]
    top, bottom = (made.figure.get_subplot(row, 1).yaxis.domain for row in (1, 2))
    assert [made.height * (end - start) for start, end in (top, bottom)] == pytest.approx([200, 200])
    assert made.height * (top[0] - bottom[1]) == pytest.approx(50)
    assert [title.text for title in made.figure.layout.annotations] == list("abcde")
    assert panels(["alone"], 3, panel=200, gap=50, horizontal=0.1).height == 200


def test_bands_that_are_steps_are_said_before_all_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Where the log has many steps, several stand together.
    table = {"easy": {"10-25": 7, "2": 0}, "medium": {"2": 3, "3-9": 4}, "hard": {"2": 5, "10-25": 0}}
    why = "bands and training steps cannot be separated"
    bands = {**make().info["bands"], "refused": why, "confounded_with_step": {"table": table, "sentence": why}}
    diff = replace(make(), info={**make().info, "bands": bands})
    assert findings(diff)[0].sentences == (f"{why[0].upper()}{why[1:]}. Bands are shown, and not compared.",)
    page = diff.to_html(tmp_path / "r.html").read_text()
    assert page.index("cannot be separated") < page.index("<bdi>up-run</bdi>")
    assert "Problems by band and training step" in page
    print_findings(diff)
    said = capsys.readouterr().out
    assert said.index("cannot be separated") < said.index("Behaviour on each band")
    assert re.search(r"step 2 +step 3-9 +step 10-25\n  easy +0 +0 +7\n", said)


@pytest.mark.slow(ci=True)
def test_a_stand_in_for_the_base_is_said_in_the_title_and_in_every_statement_that_compares_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, *others = make().info["readers"]
    told = "against step 25, since the base is missing"
    diff = every_table(make(), make().checkpoints)
    assert told not in str(findings(diff)) + rendered(diff)
    info = {**diff.info, "readers": [{**base, "step": 25}, *others], "no_dynamics": {}, "steps": []}
    diff = replace(diff, info=info)
    compared = [
        f.sentences[0] for f in findings(diff) if f.checkpoint or f.evidence in ("opposed", "predicted", "steps")
    ]
    assert len(compared) == 5
    assert all(sentence.startswith(f"A{told[1:]}: ") for sentence in compared)
    assert f"compared with base ({told[8:]})" in lead(diff)
    page = rendered(replace(diff, info={**info, "title": "My run"}))  # as `tsae run` leaves it
    assert f"<title>My run, {told}</title>" in page
    assert f"<h1>My run, {told}</h1>" in page
    assert '<p class="warn banner">The base is missing, and base takes its place: ' in page
    print_findings(diff)
    assert capsys.readouterr().out.startswith("\nThe base is missing, and base takes its place")
    shown = contrasts_text(diff, "shift", "up-run", 3)
    assert shown.startswith("Shifts of up-run against base (step 25, since the base is missing), ")
