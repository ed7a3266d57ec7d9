"""Verdicts from effects, against hand-worked intervals and scipy."""

import numpy as np
import pytest
from scipy import stats

from support.refusals import refuses
from tsae.claims.judging import CLAIMS, Judgement, Part

CLAIM = CLAIMS["a"]


def test_interval_is_that_of_scipy() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, 7)
    mean, low, high = Part("x", values, "training seeds").interval
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((values.mean(), *expected))


@pytest.mark.parametrize(
    ("values", "margin", "equal", "holds"),
    [
        ((0.3, 0.4, 0.35), 0.0, False, True),
        ((0.3, 0.4, 0.35), 0.5, False, False),
        ((-0.3, -0.4, -0.35), 0.0, False, False),
        ((-0.3, 0.4, 0.1), 0.0, False, None),
        ((0.01, -0.01, 0.0), 0.05, True, True),
        ((0.3, 0.31, 0.32), 0.05, True, False),
        ((-0.3, 0.4, 0.1), 0.05, True, None),
    ],
)
def test_a_part_holds_is_refuted_or_undecided(
    values: tuple[float, ...], margin: float, equal: bool, holds: bool | None
) -> None:
    assert Part("x", values, "training seeds", margin, equal).holds is holds


def test_verdicts() -> None:
    yes, no = Part("x", (0.3, 0.4), "training seeds", -1), Part("y", (-0.3, -0.31), "training seeds")
    unclear = Part("z", (-0.3, 0.4), "training seeds")
    for parts, whole, verdict, finer in (
        ((yes, yes), True, "reproduced", "reproduced"), ((yes, no), True, "partly", "partly"),
        ((yes, yes), False, "partly", "partly"), ((no, no), False, "not reproduced", "not reproduced"),
        ((no, no), True, "not reproduced", "not reproduced"), ((unclear,), True, "not reproduced", "undecided"),
        ((unclear, no), True, "not reproduced", "not reproduced"), ((unclear, yes), True, "partly", "partly"),
    ):  # fmt: skip
        found = Judgement(CLAIM, parts, whole=whole)
        assert (found.verdict, found.finer) == (verdict, finer)
    assert Judgement(CLAIM, needs="a second run", add="Train one.").verdict == "cannot be tested"


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, float("nan")), (float("inf"), 1.0)])
def test_no_interval_is_refused(values: tuple[float, ...]) -> None:
    refuses("no interval", Part, "x", values, "training seeds")


def test_noise_is_called_reproduced_one_time_in_forty() -> None:
    """Nothing planted: five units of noise lie above 0 in 2.5 % of the cases, and below in as many."""
    draws = np.random.default_rng(1).standard_normal((4000, 5))
    held = [Part("x", row, "training seeds").holds for row in draws]
    for side in (True, False):
        assert stats.binomtest(sum(h is side for h in held), len(held), 0.025).pvalue > 0.001


def test_every_claim_has_its_letter() -> None:
    assert "".join(CLAIMS) == "abcdefghijklmnopqrstuvwxyz"
