"""Which samples did that: the story against tables made by hand, the page, and the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tsae
from support.attributions import REALISED, TARGETS, make_attribution
from support.diffs import MARKUP, make
from support.pages import rendered
from tsae.attribution.attribution import Attribution
from tsae.cli import main
from tsae.report.figures.attribution import attribution_figure
from tsae.report.pages.attribution import attributed as section_of
from tsae.report.printed.attribution import attribution_text
from tsae.report.story import facts
from tsae.report.story.attribution import amount, belief, grid, lead, most_moved, moved, statement
from tsae.report.text import html_text


def test_a_target_is_told_with_its_numbers() -> None:
    found = make_attribution()
    assert lead(found) == "Which of 12 samples of steps 1 to 6 moved 3 targets?"
    one = moved(found, "P (first token)", 2)
    assert one.change == "0.5 → 0.1 (−0.4)"
    assert (one.unexplained, one.flagged) == ("0.3 %", False)
    # Shares are −0.4 (i − 5) / 6: the first samples raised it, the last lowered it.
    assert one.samples.trajectory.tolist() == [0, 1, 10, 11]
    assert one.samples.share.tolist() == pytest.approx([0.4 * 5 / 6, 0.4 * 4 / 6, -0.4 * 5 / 6, -0.4])
    assert one.samples.response.tolist() == ["response 0", "response 1", "response 10", "response 11"]
    assert one.problems.problem_id.tolist() == ["p2", "p1", "p0"]
    assert "R² 0.90" in one.about_problems
    # Bands: easy has the samples 0, 1, 4, 5, 8, 9, hard the others.
    bands = one.groups[one.groups.kind == "band"].set_index("group")
    assert bands.share["easy"] == pytest.approx(-0.4 * (27 - 30) / 6)
    assert bands.share["hard"] == pytest.approx(-0.4 * (39 - 30) / 6)


def test_what_cannot_be_told_apart_is_not_told() -> None:
    found = make_attribution()
    flagged = moved(found, "log-likelihood, right − wrong", 2)
    assert flagged.flagged
    assert flagged.problems.empty
    assert "cannot be told apart" in flagged.about_problems
    assert moved(found, "feature 2", 2).about_problems == ""


def test_what_changed_most_for_its_size_comes_first_and_features_are_among_it() -> None:
    found = make_attribution()
    # 0.4 of 0.5, and 1.2 of 2.2
    assert most_moved(found, 6) == list(TARGETS)
    assert most_moved(found, 2) == [TARGETS[0], TARGETS[2]]
    assert most_moved(found, 1) == [TARGETS[0]]
    only = Attribution(**{**vars(found), "targets": found.targets[::-1].head(1)})
    assert most_moved(only, 2) == [TARGETS[2]]


def test_the_grid_holds_every_cell_where_it_belongs() -> None:
    found = make_attribution()
    made = grid(found, "P (first token)")
    assert made is not None
    assert made.rows == ["easy, success", "easy, failure", "hard, success", "hard, failure"]
    assert made.columns == ["first third of the run", "second third of the run", "last third of the run"]
    # Easy successes: samples 0, 4 and 8, one a third.
    np.testing.assert_allclose(made.share[0], [-0.4 * (i - 5) / 6 for i in (0, 4, 8)])
    np.testing.assert_allclose(made.effect, 2 * made.share)
    assert made.share.sum() == pytest.approx(REALISED[0])
    assert (made.n == 1).all()


def test_without_crossed_kinds_the_grid_is_coarser_or_missing() -> None:
    found = make_attribution()
    groups = found.groups[found.groups.kind == "band"]
    assert grid(Attribution(**{**vars(found), "groups": groups}), TARGETS[0]) is None
    thirds = groups.assign(kind="third of the run", group=groups.group + " third of the run")
    made = grid(Attribution(**{**vars(found), "groups": thirds}), TARGETS[0])
    assert made is not None
    assert (made.rows, made.columns) == (["all samples"], ["easy third of the run", "hard third of the run"])


def test_the_finding_names_the_samples_that_mattered_most() -> None:
    told = statement(make_attribution())
    # Hard samples: share −0.6, effect −1.2; without them −0.4 + 1.2.
    assert told.evidence == "samples"
    assert told.sentences[0] == (
        "P (first token): 0.5 → 0.1 (−0.4); without the 6 samples of “hard” it would have changed by +0.8, with all by "
        "−0.4 (both simulated)."
    )


def test_doubts_are_said_and_marked() -> None:
    said = {one.text: one.warns for one in belief(make_attribution(path_error=0.2))}
    assert said["The simulated optimiser meets the checkpoints to 20 % of the distance between them."]
    assert any(warns and text.startswith("Flagged for a larger remainder: 1 segment") for text, warns in said.items())
    assert any("0.94 (behaviours) and 0.72 (features)" in text for text in said)
    assert any("partly chance" in text for text in said)


def test_replayed_trainings_are_told_by_target() -> None:
    found = make_attribution(validated=True)
    assert moved(found, TARGETS[0], 1).validated == "rank correlation 0.90, median error 0.04"
    assert moved(found, TARGETS[2], 1).validated == "rank correlation –, median error 0.003"
    # Errors of 10, 5 and 10 per cent of the changes.
    assert belief(found)[-1].text == (
        "On this run, 8 trainings were really replayed on random halves of its problems: rank correlation with the "
        "simulation 0.85, error 10 % of a change (medians over targets)."
    )
    assert "nothing was retrained" in belief(make_attribution())[-1].text
    assert moved(make_attribution(), TARGETS[0], 1).validated == ""


@pytest.mark.parametrize("validated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_views_tell_one_story(validated: bool) -> None:
    found = make_attribution(validated=validated)
    text, page = attribution_text(found), rendered(make(), attribution=found)
    for part in [lead(found), *(one.text for one in belief(found)), *(moved(found, t, 1).change for t in TARGETS)]:
        assert part in text
        assert html_text(part) in page
    for target in TARGETS:
        assert moved(found, target, 1).validated in text
        assert moved(found, target, 1).validated in page
    for value in found.table(TARGETS[0]).head(3).effect:
        assert amount(value) in text
        assert amount(value) in page


def test_the_page_has_the_section_only_with_an_attribution(attributed: str) -> None:
    without, page = rendered(make()), attributed
    assert "Which samples did that" not in without
    assert 'id="samples"' not in without
    assert '<section id="samples"' in page
    assert '<a href="#samples">Which samples did that</a>' in page
    assert 'data-figure="samples-figure"' in page
    assert "20 % (flagged)" in page
    assert "A note." in page


def test_features_of_another_sae_are_said_to_be_others() -> None:
    found, diff = make_attribution(), make()
    diff.info["sae"] = {**(diff.info.get("sae") or {}), "weights": "own"}
    told = [
        [one.warns for one in section_of(replace(found, info={**found.info, "sae": sae}), diff).belief]
        for sae in ("own", "another")
    ]
    assert told[1] == [True, *told[0]]


def test_hostile_responses_stay_text() -> None:
    page = rendered(make(), attribution=make_attribution((MARKUP, "<script>alert(2)</script>", "a\u202eb\x1b")))
    assert MARKUP not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in page
    assert "a‹U+202E›b‹U+001B›" in page


@pytest.fixture(scope="module")
def attributed() -> str:
    return rendered(make(), attribution=make_attribution())


def test_the_page_stays_bounded(attributed: str) -> None:
    short = len(attributed)
    long = len(rendered(make(), attribution=make_attribution(("x" * 1_000_000,) * 12)))
    assert long - short < 12 * 3 * 2500


def test_the_figure_draws_shares_above_effects() -> None:
    figure = attribution_figure(make_attribution())
    assert figure is not None
    assert len(figure.data) == 6
    np.testing.assert_allclose(figure.data[1].z, 2 * np.array(figure.data[0].z))
    assert figure.data[0].zmax == figure.data[1].zmax == pytest.approx(np.abs(figure.data[1].z).max())


@pytest.mark.slow
def test_a_feature_links_to_its_card_where_the_sae_is_the_same() -> None:
    diff = make()
    weights = (diff.info.get("sae") or {}).get("weights")
    other = rendered(diff, attribution=make_attribution(sae="another"))
    assert "feature 2</bdi></th><td" in other
    same = tsae.FeatureDiff(
        **{**vars(diff), "info": {**diff.info, "sae": {**(diff.info.get("sae") or {}), "weights": "w"}}}
    )
    page = rendered(same, attribution=make_attribution(sae="w"))
    assert 'data-feature="2">2</span><bdi> “' in page
    assert weights != "w"


def test_features_to_attribute_are_those_that_the_diff_names() -> None:
    # up-run moved 0 by 1.8 and 2 by −1.4; the other run moved 0 most, too.
    diff = make()
    assert facts.moved_features(diff, 2) == [0, 2]
    found = facts.moved_features(diff, 50)
    assert len(found) == len(set(found))
    assert set(found) == set(diff.shifts[(diff.shifts.q <= diff.q) & (diff.shifts.band == "all")].feature)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A run's folder with a diff and an attribution, and another attribution."""
    make().save(tmp_path / "diff")
    make_attribution().save(tmp_path / "attribution")
    make_attribution(notes=["Another."]).save(tmp_path / "other")
    return tmp_path


def report(folders: Path, *options: object) -> str:
    ask = ["--diff", folders / "diff", "--to", folders / "report.html", *options]
    main(["report", *map(str, ask)])
    return (folders / "report.html").read_text()


def test_the_command_finds_the_attribution_of_a_run(folders: Path) -> None:
    assert "A note." in report(folders)


@pytest.mark.slow
def test_the_command_takes_an_attribution(folders: Path) -> None:
    assert "Another." in report(folders, "--attribution", folders / "other")
    with pytest.raises(SystemExit):
        report(folders, "--attribution", folders)


@pytest.mark.slow
def test_without_an_attribution_the_command_writes_no_section(folders: Path) -> None:
    (folders / "attribution" / "attribution.json").unlink()
    assert "Which samples did that" not in report(folders)
