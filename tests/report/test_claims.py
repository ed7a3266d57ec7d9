"""The section on what the literature would expect: on the page, in a terminal and in a notebook."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.refusals import refuses
from support.results import MARKUP, make, rendered
from tsae.claims.judging import CLAIMS, Judgement, Part
from tsae.claims.run_claims import ONE_RUN, Claims
from tsae.report.claims import counted, told_claims


def claims(**info: Any) -> Claims:
    """Two parts that hold and one against, an undecided one, and one that cannot be tested."""
    above, below, unclear = (0.2, 0.3, 0.25), (-0.2, -0.3, -0.25), (0.2, -0.3, 0.05)
    judged = [
        Judgement(
            CLAIMS["a"], (Part(f"{MARKUP} gained.", above, "problems"), Part("Hard gained less.", above, "problems"))
        ),
        Judgement(CLAIMS["b"], (Part("It harms.", below, "problems", margin=-0.1),), caveat=f"Mind {MARKUP}."),
        Judgement(CLAIMS["o"], (Part("Sparser.", unclear, "problems"), Part("Sparser still.", above, "problems"))),
        Judgement(CLAIMS["h"], needs=f"a second training {MARKUP}", add="`tsae reformulate <x>`"),
    ]
    return Claims(tuple(one.record() for one in judged), {"rollouts": make().info["rollouts"], **info})


def test_the_counts_and_the_order() -> None:
    assert counted(claims()) == (
        "Of 4 claims about sample difficulty, this run shows 1 as claimed (“Inverted U”), 1 in part (“Sparser when "
        "hard”) and 1 not (“Hard harms”); 1 cannot be tested on it."
    )
    assert [one.key for one in told_claims(claims())] == ["a", "b", "o", "h"]
    open_one = Judgement(CLAIMS["n"], (Part("It overtakes.", (0.2, -0.3, 0.05), "problems"),)).record()
    some = replace(claims(), records=(*claims().records, open_one))
    assert counted(some).endswith("1 not (“Hard harms”); 1 is undecided (“Base overtakes”); 1 cannot be tested on it.")
    assert counted(replace(some, records=(open_one,))) == (
        "Of 1 claim about sample difficulty, this run shows none; 1 is undecided (“Base overtakes”)."
    )
    none = replace(claims(), records=claims().records[-1:])
    assert counted(none) == "Of 1 claim about sample difficulty, this run can test none."


def test_the_section_is_there_only_with_claims() -> None:
    without, page = rendered(make()), rendered(make(), None, None, claims())
    assert '<section id="claims"' not in without
    assert "literature" not in without.partition("<script")[0]
    assert '<section id="claims"' in page
    assert '<a href="#claims" title="What the literature would expect">Literature</a>' in page
    assert ONE_RUN in page
    assert page.count('<span class="chip reproduced">') == 1
    assert page.count('<span class="chip not-reproduced">') == 1
    assert "+0.25 [+0.13, +0.37]" in page
    assert "must be &gt; −0.10" in page
    assert "as claimed" in page
    assert "undecided" in page
    assert "<code>tsae reformulate &lt;x&gt;</code>" in page
    assert MARKUP not in page


def test_claims_of_other_rollouts_are_refused() -> None:
    refuses("other rollouts", rendered, make(), None, None, claims(rollouts="f" * 16))


def test_in_a_terminal_and_a_notebook() -> None:
    text = str(claims())
    assert "a  Inverted U: reproduced" in text
    assert "Cannot be tested on this run:\nh  Backward reformulation: needs a second training" in text
    assert ONE_RUN in " ".join(text.split())
    assert "3 problems  as claimed" in text
    card = claims()._repr_html_()
    assert "Inverted U" in card
    assert "Mind &lt;" in card  # why a claim whose parts all hold may be reproduced partly
    assert MARKUP not in card
