"""Which samples did that: the story against tables made by hand, the page, and the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tsae
from support.results import BANDS, GATE, MARKUP, REALISED, TARGETS, make, make_attribution, rendered
from tsae.attribution.attribution import Attribution
from tsae.cli import main
from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES
from tsae.report.attribution import (
    TRAINED_ON,
    amount,
    attribution_text,
    belief,
    lead,
    meaning,
    most_moved,
    moved,
    pushed,
    shown_name,
    signal,
    statement,
    to_read,
    told_targets,
)
from tsae.report.attribution import attributed as section_of
from tsae.report.story import facts
from tsae.report.text import html_text

pytestmark = pytest.mark.slow(ci=True)


def test_bands_stand_in_order_with_share_and_other_runs() -> None:
    found = make_attribution()
    table = found.bands
    assert list(table) == ["band", "n", "target", "share", "without", "alone", "how"]
    assert table.band.tolist() == list(BANDS) * len(TARGETS)
    assert table.target.tolist() == np.repeat(TARGETS, 3).tolist()
    # Easy has the samples 0, 1, 6, 7: shares −0.9 (i − 5) / 6.
    easy = table[(table.target == TARGETS[3]) & (table.band == "easy")].iloc[0]
    assert easy.share == pytest.approx(-0.9 * (14 - 20) / 6)
    assert (easy.without, easy.alone) == (pytest.approx(-0.9 - 2 * easy.share), pytest.approx(easy.share / 2))
    assert (easy.n, easy.how) == (4, "replayed")
    np.testing.assert_allclose(table.groupby("target", sort=False).share.sum(), REALISED)
    # A log may have levels of its own.
    groups = found.groups.replace({"group": {"easy": "level 2", "hard": "level 1"}})
    other = replace(found, groups=groups).bands
    assert other.band.tolist()[:3] == ["medium", "level 1", "level 2"]


def test_a_sample_that_two_steps_used_is_told_once() -> None:
    found = make_attribution()
    again = found.samples[found.samples.trajectory == 11].assign(step=7)
    twice = replace(found, samples=pd.concat([found.samples, again]))
    row = twice.of_target(TARGETS[3], 1).iloc[-1]
    assert (row.trajectory, row.step) == (11, 6)
    assert row.share == pytest.approx(2 * -0.9)
    assert row.policy + row.kl == pytest.approx(row.share)
    assert twice.of_sample(11).share.abs().max() == pytest.approx(1.8)


def test_names_say_what_a_number_is() -> None:
    found = make_attribution()
    assert [shown_name(found, name) for name in (*TARGETS, "right − wrong", "P (first token)")] == [
        "preference for right answers, easy problems (trained on)",
        "preference for right answers, medium problems (trained on)",
        "preference for right answers, hard problems (trained on)",
        "preference for direct answers",
        "feature 2",
        "preference for right answers (trained on)",
        "P (first token)",
    ]
    fresh = make_attribution(trained_on=False)
    assert shown_name(fresh, TARGETS[0]) == "preference for right answers, easy problems"
    assert (TRAINED_ON in meaning(found), TRAINED_ON in meaning(fresh)) == (True, False)
    assert lead(found) == "Which of 12 samples of run, steps 1 to 6, moved 5 targets?"
    assert (amount(0.00012345), amount(-2e-17), amount(float("nan"))) == ("+0.00012", "0", "–")


def test_targets_are_told_in_the_order_of_the_block() -> None:
    found = make_attribution()
    shuffled = replace(found, targets=found.targets[::-1])
    assert told_targets(shuffled) == list(TARGETS)
    # 0.9 of 0.5, 0.6 of 1.6, 0.3 of 0.8, 0.1 of 0.3; features are not compared with these.
    assert most_moved(found) == [TARGETS[3], *TARGETS[:3]]
    # Where right answers are known over all problems, those of bands come last.
    every = replace(found, targets=found.targets.replace({"target": {TARGETS[1]: "right − wrong"}}))
    assert told_targets(every) == ["right − wrong", *TARGETS[3:], TARGETS[0], TARGETS[2]]
    assert most_moved(every) == [TARGETS[3], "right − wrong"]
    one = moved(found, TARGETS[1])
    assert (one.change, one.unexplained, one.flagged) == ("0.5 → 0.8 nats (+0.3)", "20 %", True)
    assert one.lone.share.tolist() == pytest.approx([0.3 * 3 / 6])
    assert one.others.group.tolist() == ["success"]


def test_the_signal_is_by_band_and_fifth() -> None:
    made = signal(make_attribution(), TARGETS[3])
    assert list(made.index) == list(BANDS)
    np.testing.assert_allclose(made.to_numpy()[0], 0.9 * np.array([0, 0.1, 0.1, 0.2, 0.6]), atol=1e-12)
    assert made.to_numpy().sum() == pytest.approx(-0.9)
    assert signal(make_attribution(), "another").empty


def test_samples_to_read_have_the_tokens_that_carry_them() -> None:
    found = make_attribution()
    samples = to_read(found)
    assert [one.trajectory for one in samples] == [11, 0, 10, 1, 9, 2, 8, 3, 7, 4]
    first = samples[0]
    assert (first.problem, first.band, first.step, first.outcome) == ("prompt 11", "hard", 6, "✗ wrong")
    assert (first.advantage, first.share) == (-1, pytest.approx(-0.9))
    assert first.target == "preference for direct answers (nats)"
    assert first.carried == "“31” −1.8 (token 5), “24” +0.9 (token 1)"
    assert first.tokens.share.sum() == pytest.approx(-0.9)
    # Without tokens: those with the largest shares for and against what changed most.
    without = to_read(replace(found, tokens=found.tokens.head(0)), 4)
    assert [one.trajectory for one in without] == [0, 1, 10, 11]
    assert (without[0].response, without[0].carried) == ("response 0", "")


def test_the_finding_is_what_bands_did_and_what_would_be_without_them() -> None:
    told = statement(make_attribution())
    assert told.evidence == "samples"
    # Shares of hard samples: −0.9 (4 + 5 + 10 + 11 − 20) / 6. Without them: −0.9 + 2 · 1.5.
    assert told.sentences == (
        "The preference for right answers, easy problems (trained on) rose: 1 → 1.6 nats (+0.6). "
        "Shares, which add up to it: hard samples +1.0, medium samples +0.2 and easy samples −0.6.",
        "In a run without hard samples it changes by −1.4, without medium samples by +0.2 and without easy samples "
        "by +1.8 (replayed).",
        "The preference for direct answers fell: 0.5 → −0.4 nats (−0.9). "
        "Shares, which add up to it: hard samples −1.5, medium samples −0.3 and easy samples +0.9.",
        "In a run without hard samples it changes by +2.1, without medium samples by −0.3 and without easy samples "
        "by −2.7 (replayed).",
        "These numbers have no intervals: they are of one run with one seed, and another seed may differ. "
        "The replay ends off the run's checkpoints by 0.02 % of what training moved.",
    )
    # Doubts come first.
    replay = {"steps": 6, "to": 3, "within": 0.02, "departs": 4, "cause": "special tokens are missing from the log"}
    assert statement(make_attribution(replay=replay)).sentences[1].startswith("From step 4 on it departs from the run.")
    # What was not replayed is not told.
    found = make_attribution()
    shares = replace(found, groups=found.groups.assign(without=np.nan, alone=np.nan, how=""))
    assert not any("Without" in sentence for sentence in statement(shares).sentences)
    for band, why in ((None, "The log has no bands"), ("hard", "All samples are of the band hard")):
        of_one = found.groups[found.groups.kind != "band"], found.facts.assign(band=band)
        undivided = replace(found, groups=of_one[0], facts=of_one[1])
        assert statement(undivided).sentences[2] == f"{why}, so that samples cannot be divided by difficulty."


def test_a_closed_gate_stands_in_the_place_of_every_finding() -> None:
    found = make_attribution(gate=GATE)
    assert statement(found).sentences == (GATE,)
    text, page = attribution_text(found), rendered(make(), attribution=found)
    for part in ("Add logging_steps=1", "How far to believe it", "A note."):
        assert part in text
        assert part in page
    for part in ("share +", "without them", "to read first", "first third", "direct answers rose", "replayed for"):
        assert part not in text
        assert part not in page.partition('<section id="samples"')[2]


def test_doubts_are_said_and_marked() -> None:
    def said(**info: Any) -> dict[str, bool]:
        return {one.text: one.warns for one in belief(make_attribution(**info))}

    good = said()
    assert good["Replayed to step 6 of 6 within 0.1 % of what the run logged and saved."] is False
    near = "It is off the run's checkpoints by 0.02 % of the way at most."
    assert good[f"{near} Replays of the testbed that were as near gave the right shares and effects."] is False
    assert "The replay's gradient norms differ from the logged ones by 0.1 % at most (6 steps)." in good
    assert "Runs without some samples, or with these alone, are simulated for: lone success, outcome." in good
    assert good[
        "Shares leave 0.5 % of a change unexplained (median), 20 % at most "
        "(preference for right answers, medium problems (trained on))."
    ]
    replay = {"steps": 6, "to": 3, "within": 0.02, "departs": 4, "cause": "special tokens are missing from the log"}
    bad = said(replay=replay, path_error=None)
    assert [text for text, warns in bad.items() if warns][:2] == [
        "Replayed to step 3 of 6 within 2 % of what the run logged and saved.",
        "From step 4 on it departs from the run. Likely cause: special tokens are missing from the log.",
    ]
    assert not any("checkpoints by" in text for text in bad)


def test_both_views_tell_one_story(attributed: str) -> None:
    found = make_attribution()
    text = " ".join(attribution_text(found).split())
    for part in [
        lead(found), *meaning(found), *(one.text for one in belief(found)), *(moved(found, t).change for t in TARGETS),
        *statement(found).sentences, *(one.problem for one in to_read(found)), "replayed", "simulated", "A note.",
    ]:  # fmt: skip
        assert part in text
        assert html_text(part) in attributed
    # Shares in direct answers by band, then by third of the run: easy samples are 0, 1, then 6, 7.
    for row in ("easy 4 +0.9 +1.4 −0.4 0 −2.7 +0.5 replayed", "hard 4 −1.5 0 +0.1 −1.6 +2.1 −0.8 replayed"):
        assert row in text
    assert '<td class="n shade a5 against">−1.5</td><td class="n">0</td>' in "".join(attributed.split("\n"))
    # In the log: 50, 60 and 70 % right.
    assert "easy 50 % 60 % 70 % +20.0 points [+2.00, +40.0]" in text
    assert "easy 5.0 tokens 5.1 tokens 5.2 tokens +0.20 tokens [+0.020, +0.40]" in text


def test_the_page_has_the_section_only_with_an_attribution(attributed: str) -> None:
    without, page = rendered(make()), attributed
    assert "Which samples did that" not in without
    assert 'id="samples"' not in without
    assert '<section id="samples"' in page
    assert '<a href="#samples" title="Which samples did that">Samples</a>' in page
    assert "20 % unexplained by shares" in page
    # In this order.
    places = [page.index(part) for part in ("direct answers fell", "<caption>What easy, medium and hard",
                                            "<caption>10 samples to read first", "<caption>What the log shows",
                                            "<caption>Lone", "How far to believe it</h3>")]  # fmt: skip
    assert places == sorted(places)
    # The last token of the first sample lowered the target most, and its first one raised it half as far.
    assert '<mark class="a4" title="+0.9">24</mark> + 7 =\n<mark class="a9 against" title="−1.8">31</mark>' in page


def test_advantages_against_the_outcome_are_pointed_out(attributed: str) -> None:
    """A wrong answer may earn a reward for its form."""
    said, found = "is against the outcome, as where another part of the reward outweighs it", make_attribution()
    assert said not in attributed
    facts = found.facts.assign(advantage=found.facts.advantage.where(found.facts.trajectory != 11, 0.5))
    assert f"the advantage of 1 {said}" in rendered(make(), attribution=replace(found, facts=facts))


def of_sae(weights: str) -> tsae.FeatureDiff:
    """The diff made by hand, of the features of this SAE."""
    diff = make()
    diff.info["sae"]["weights"] = weights
    return diff


def test_features_of_another_sae_are_said_to_be_others() -> None:
    diff = of_sae("own")
    told = [[one.warns for one in section_of(make_attribution(sae=sae), diff)["belief"]] for sae in ("own", "another")]
    assert told[1] == [True, *told[0]]


def test_hostile_text_stays_text() -> None:
    found = make_attribution((MARKUP, "<script>alert(2)</script>", "a\u202eb\x1b"), gate="", notes=[MARKUP])
    hostile = replace(found, groups=found.groups.replace({"group": {"success": MARKUP}}))
    page, text = rendered(make(), attribution=hostile), attribution_text(hostile)
    assert MARKUP not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in page
    for shown in (page, text):
        assert "a‹U+202E›b‹U+001B›" in shown
        assert "\x1b" not in shown
    closed = rendered(make(), attribution=make_attribution(gate=MARKUP))
    assert MARKUP not in closed


@pytest.fixture(scope="module")
def attributed() -> str:
    return rendered(make(), attribution=make_attribution())


def test_the_page_stays_bounded(attributed: str) -> None:
    found = make_attribution(("x" * 100_000,) * 12)
    long = rendered(make(), attribution=found)
    assert len(long) - len(attributed) < 12 * 3 * 2500
    # Of a long response, what is around its strongest token.
    tokens = found.tokens[found.tokens.trajectory == 11].iloc[[0] * 3000].assign(token="y", position=range(3000))
    tokens = tokens.assign(share=np.where(tokens.position == 2900, -1.0, 0.0))
    [(_, _, pieces), *_] = section_of(replace(found, tokens=tokens), make())["samples"]
    assert [(piece.text, piece.shade) for piece in pieces] == [("…" + "y" * 300, 0), ("y", 9), ("y" * 99, 0)]


def test_levels_of_the_data_set_stand_beside_the_bands() -> None:
    found = make_attribution()
    assert section_of(found, make())["levels"] is None
    easier = replace(found, facts=found.facts.assign(level=np.where(found.facts.band == "hard", "hard", "easy")))
    assert section_of(easier, make())["levels"].rows[0][1:4] == ["4", "4", "0"]
    assert section_of(easier, make())["levels"].rows[1][1:5] == ["0", "0", "4", "+1"]


def test_cards_get_the_samples_that_pushed_their_feature() -> None:
    found = make_attribution(sae="w")
    assert pushed(found, make()) == {}
    known = pushed(found, of_sae("w"), 1)
    assert list(known) == ["2"]
    assert known["2"]["told"].startswith(
        "Feature 2 rose: mean activation 0.6 → 0.63 (+0.03). Shares, which add up to it: hard samples"
    )
    assert known["2"]["rows"] == [
        ["11", "prompt 11", "hard", "6", "response 11", "✗ wrong", "−1", "+0.03"],
        ["0", "prompt 0", "easy", "1", "response 0", "✓ right", "+1", "−0.025"],
    ]


@pytest.mark.slow
def test_a_feature_links_to_its_card_where_the_sae_is_the_same() -> None:
    assert "<bdi>feature 2</bdi><br>" in rendered(make(), attribution=make_attribution(sae="another"))
    assert 'data-feature="2">2</span><bdi> “' in rendered(of_sae("w"), attribution=make_attribution(sae="w"))


def test_features_to_attribute_are_those_that_the_diff_names() -> None:
    # up-run moved 0 by 1.8 and 2 by −1.4; the other run moved 0 most, too.
    diff = make()
    assert facts.moved_features(diff, 2) == [0, 2]
    found = facts.moved_features(diff, 50)
    assert len(found) == len(set(found))
    assert set(found) == set(diff.shifts[(diff.shifts.q <= diff.q) & (diff.shifts.band == "all")].feature)
    # Those that a control explains come last.
    known = pd.concat([diff.shifts.assign(control=control, verdict=SURVIVES) for control in CONTROLS])
    known.loc[(known.feature == 0) & (known.control == "length"), "verdict"] = FAILS
    assert facts.moved_features(replace(diff, confounds=known), 50) == [*(f for f in found if f), 0]


def test_the_command_finds_the_attribution_of_a_run_or_takes_another(tmp_path: Path) -> None:
    def report(*options: object) -> str:
        main(["report", *map(str, ["--diff", tmp_path / "diff", "--to", tmp_path / "report.html", *options])])
        return (tmp_path / "report.html").read_text()

    make().save(tmp_path / "diff")
    make_attribution().save(tmp_path / "attribution")
    make_attribution(notes=["Another."]).save(tmp_path / "other")
    assert "A note." in report()
    loaded = Attribution.load(tmp_path / "attribution")
    assert attribution_text(loaded) == attribution_text(make_attribution())
    assert "Another." in report("--attribution", tmp_path / "other")
    with pytest.raises(SystemExit):
        report("--attribution", tmp_path)
