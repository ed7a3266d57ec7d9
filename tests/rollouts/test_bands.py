"""Bands from other rollouts than those that are compared; and bands of a log that are its training steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import tsae
from support.builders import BOS, EOS, feature_table, graded
from tsae.diff.comparisons import Rows, comparisons, shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.effects import draw
from tsae.errors import TsaeError
from tsae.rollouts.bands import Confounding, _step_groups, band_problems, confounding, find_bands, found_how
from tsae.rollouts.config import BandQuantiles
from tsae.rollouts.schema import problem_bands
from tsae.rollouts.table import Rollouts

SHIPPED = tsae.testbed.series_path()


def world(rng: np.random.Generator, rate: np.ndarray, n: int, policies: tuple[str, ...] = ("base", "run")) -> Any:
    """Trajectories of policies that solve every problem equally often."""
    parts = []
    for policy in policies:
        right = rng.random((len(rate), n)) < rate[:, None]
        ids = np.repeat([f"p{i:03d}" for i in range(len(rate))], n)
        outcome = np.where(right.ravel(), "success", "failure")
        parts.append(pd.DataFrame({"problem_id": ids, "policy": policy, "outcome": outcome}))
    return pd.concat(parts, ignore_index=True)


SPREAD = {"easy": "ssssssss", "medium": "ssssffff", "hard": "ffffffff"}


# --- cross-fitting


def test_a_band_is_that_of_the_other_half() -> None:
    found = graded({"base": SPREAD | {"odd": "sfsfsfsf"}}).with_bands("base")
    band = found.frame.groupby("problem_id", sort=False).band
    assert {id: list(b) for id, b in band if id != "odd"} == {id: [id] * 8 for id in SPREAD}
    # Its halves are all right and all wrong: one half is kept, in the band of the other's rate.
    odd = found.frame[found.frame.problem_id == "odd"]
    assert odd.pass_rate.tolist() == [0.0, 1.0] * 4
    assert odd.pass_rate_low.tolist()[1] == pytest.approx(0.51, abs=0.01)  # of four responses
    assert odd.band.fillna("none").tolist() in (["hard", "none"] * 4, ["none", "easy"] * 4)
    assert found.info["bands"] == {
        "reference": "base", "easy": 0.75, "hard": 0.25, "separate": False, "cross_fitted": True, "halved": 1,
        "unbanded": 0,
    }  # fmt: skip
    assert "1 problems, whose halves differ, are in a band with one half" in found_how(found.info["bands"])
    assert problem_bands(found.frame).notna().all()


def test_bands_are_not_measured_on_the_very_same_rollouts() -> None:
    """Where every response is a coin's flip, hard problems would look hard and easy ones easy."""
    rng = np.random.default_rng(0)
    letters = {f"p{i}": "".join(rng.choice(["s", "f"], 4)) for i in range(60)}
    rollouts = graded({"base": letters})
    with pytest.raises(TsaeError, match="holds the very rollouts that are put into bands"):
        rollouts.with_bands("base", measured_on=rollouts.with_column("reward", np.zeros(len(rollouts))))


def test_halves_are_kept_by_the_problems_id_alone() -> None:
    ids = {f"q{i}": "sfsfsfsf" for i in range(400)}
    found = graded({"base": SPREAD | ids}).with_bands("base").frame
    kept = found[found.problem_id.str.startswith("q")].groupby("problem_id").band.first()
    assert 160 < (kept == "easy").sum() < 240
    few = graded({"base": SPREAD | {"q7": "sfsfsfsf", "q3": "sfsfsfsf"}}).with_bands("base").frame
    assert few.groupby("problem_id").band.first()["q7"] == kept["q7"]


def test_other_policies_are_banded_by_the_references_other_half() -> None:
    run = dict.fromkeys(SPREAD, "fsfs")
    found = graded({"base": SPREAD, "run": run}).with_bands("base").frame
    assert found[found.policy == "run"].band.tolist() == ["easy"] * 4 + ["medium"] * 4 + ["hard"] * 4


def test_a_single_response_measures_nothing() -> None:
    """It could only be banded by itself."""
    found = graded({"base": SPREAD | {"one": "s", "half": "su"}}).with_bands("base")
    assert found.frame[found.frame.problem_id.isin(["one", "half"])].band.isna().all()
    assert found.info["bands"]["unbanded"] == 2
    assert "2 problems, of which base gave fewer than two responses, have no band" in found_how(found.info["bands"])
    with pytest.raises(TsaeError, match="no problem has two responses, one to measure its pass rate on"):
        graded({"base": {"a": "s", "b": "f"}}).with_bands("base")
    with pytest.raises(TsaeError, match=r"1 problems have no rollouts of known outcome from base \(first: x\)"):
        graded({"base": SPREAD | {"x": "uu"}}).with_bands("base")


def gains(frame: pd.DataFrame, band: np.ndarray) -> dict[str, float]:
    """Accuracy of the run − the base's, over the problems of a band."""
    right = (frame.outcome == "success").astype(float)
    means = right.groupby([band, frame.problem_id, frame.policy]).mean().unstack()
    return (means.run - means.base).groupby(level=0).mean().to_dict()


@pytest.mark.parametrize(
    ("n", "shares"),
    [(16, None), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((8, None), (7, None), (16, BandQuantiles())))],
)
def test_a_checkpoint_that_is_the_base_gains_nothing_in_any_band(n: int, shares: BandQuantiles | None) -> None:
    """Fresh rollouts of the base as checkpoint; bands on the analysed rollouts make hard problems gain."""
    rng = np.random.default_rng(n)
    crossed, same = [], []
    for number in range(16):
        frame = world(rng, rng.beta(1.5, 1.5, size=400), n)
        crossed.append(gains(frame, find_bands(frame, "x", "base", shares).rows.band.to_numpy()))
        if number < 4:
            base = frame[frame.policy == "base"]
            same.append(gains(frame, find_bands(frame, "x", "base", shares, measured_on=base).rows.band.to_numpy()))
    for band, sign in (("hard", 1), ("easy", -1)):
        found = np.array([each[band] for each in crossed])
        error = found.std() / np.sqrt(len(found))
        assert abs(found.mean()) < 3.5 * error < 0.025, (band, found.mean(), error)
        assert sign * np.mean([each[band] for each in same]) > 0.04


def test_responses_that_are_sorted_by_outcome_are_dealt_to_halves_by_chance() -> None:
    """By rank, the halves of a sorted problem are alike, so that its luck comes back: easy +.04, hard -.04."""
    rng = np.random.default_rng(5)
    rate = rng.beta(1, 1, size=3000)
    frame = world(rng, rate, 8, ("base",))
    assert "shuffled" not in find_bands(frame, "x", "base").info
    for up in (True, False):
        frame = frame.sort_values(["problem_id", "outcome"], ascending=[True, up], ignore_index=True)
        bands = find_bands(frame, "x", "base")
        assert "dealt by chance, since the log has them sorted by outcome" in found_how(bands.info)
        luck = (frame.outcome == "success") - rate[frame.problem_id.str[1:].astype(int)]
        by_problem = luck.groupby([bands.rows.band, frame.problem_id]).mean()
        assert (by_problem.groupby(level=0).mean().abs() < 0.015).all()


def null_table(seed: int, cross: bool, n_problems: int = 90, n: int = 8) -> Any:
    """Base and a checkpoint that is the base; ten features of which most are active in successes."""
    rng = np.random.default_rng([seed, 9])
    frame = world(rng, rng.beta(1.5, 1.5, size=n_problems), n)
    right = (frame.outcome == "success").to_numpy(dtype=float)
    values = np.maximum(rng.normal(size=(len(frame), 10)) + np.linspace(0, 2, 10) * right[:, None] + 0.5, 0)
    records = [
        {**row, "prompt_ids": [BOS], "response_ids": [3, EOS]}
        for row in frame[["problem_id", "policy", "outcome"]].to_dict("records")
    ]
    rollouts = Rollouts.from_records(records)
    rollouts = rollouts.with_bands("base", measured_on=None if cross else rollouts.where(policy="base"))
    rows = np.arange(len(frame))
    own = rows[frame.policy == "run"]
    codes = np.zeros((3 * (len(rows) + len(own)), 10))
    codes[1::3] = np.concatenate([values, values[own]])
    return feature_table(rollouts, codes, [("base", rows), ("run", own)])


def found_in_bands(table: Any) -> bool:
    """Whether any feature moves in easy or in hard problems."""
    # A test of 0: regression to the mean is to be seen however small.
    config = DiffConfig(n_bootstrap=200, n_permutations=1000, bands=("easy", "hard"), minimum_effect=0.0)
    rows = Rows.of(table, config)
    found = shift_comparisons(table, rows, config)
    wanted = [of for of in found if of.part == "total" and of.band != "all" and of.outcome == "all"]
    assert len(wanted) == 2
    drawn = [draw(rows, of, config).inference for of in wanted]
    return any((inference.q <= config.q).any() for inference in drawn if inference is not None)


@pytest.mark.slow
def test_share_of_splits_with_a_feature_that_moves_in_a_band() -> None:
    """Two bands of a q of .05 each: at most .1 by chance, and less, as features and bands are correlated."""
    share = {cross: np.mean([found_in_bands(null_table(s, cross)) for s in range(200)]) for cross in (True, False)}
    print(share)
    assert share[True] <= 0.1 + 2 * 0.021
    assert share[False] > 0.3


# --- steps


def test_bands_of_a_log_that_learns_are_its_steps() -> None:
    rng = np.random.default_rng(0)
    step = np.repeat(np.arange(1, 13), 8)
    frame = world(rng, np.clip(0.1 + 0.07 * step + rng.normal(0, 0.1, size=96), 0, 1), 8, ("x",))
    frame["step"] = np.repeat(step, 8)
    frame["policy"] = "run-" + frame["step"].astype(str)
    bands, told = band_problems(frame, "log")
    assert bands is not None
    assert told.startswith("bands and training steps cannot be separated: the training step explains ")
    assert bands.info["refused"] in told
    found = bands.info["confounded_with_step"]
    assert found["sentence"] == bands.info["refused"]
    assert found["statistic"] > 0.5
    assert found["p"] < 0.001
    assert sum(sum(row.values()) for row in found["table"].values()) == 96
    assert list(found["table"]) == ["easy", "medium", "hard"]
    # The base's own pass rates, measured elsewhere, tell what the log does not.
    elsewhere = world(rng, rng.random(96), 16, ("base",))
    bands, told = band_problems(frame, "log", base="base", measured_on=elsewhere)
    assert bands is not None
    assert "refused" not in bands.info
    assert "separate rollouts of base" in told


def test_bands_of_a_log_with_all_difficulties_at_every_step_are_not_refused() -> None:
    refused = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        step = np.repeat(np.arange(1, 13), 8)
        frame = world(rng, rng.beta(0.7, 0.7, size=96), 8, ("x",))
        frame["step"] = np.repeat(step, 8)
        refused += not confounding(frame.assign(band="easy"), seed).told_apart
    assert refused <= 6  # 5 % are 2


def test_a_log_that_learns_and_asks_everything_again_is_not_refused() -> None:
    rng = np.random.default_rng(0)
    rate = rng.beta(0.7, 0.7, size=60)
    parts = [world(rng, np.clip(rate + 0.1 * s, 0, 1), 4, (f"run-{s}",)).assign(step=s) for s in range(5)]
    measured = confounding(pd.concat(parts, ignore_index=True).assign(band="easy"))
    assert measured.n_steps == 5
    assert measured.told_apart


def test_what_steps_explain_is_an_analysis_of_variance() -> None:
    """scipy's F gives R², and nearly the p-value; steps that explain nothing are told apart."""
    rng = np.random.default_rng(0)
    step = np.repeat(np.arange(1, 5), 10)
    for slope in (0.0, 0.06, 0.2):
        rate = np.clip(0.2 + slope * step + rng.normal(0, 0.2, size=40), 0, 1).round(1)
        frame = pd.DataFrame(
            {"problem_id": np.repeat([f"p{i:02d}" for i in range(40)], 10), "policy": "x", "band": "easy"}
        ).assign(step=np.repeat(step, 10))
        frame["outcome"] = [("failure", "success")[k < round(10 * r)] for r in rate for k in range(10)]
        found = confounding(frame)
        f, p = scipy.stats.f_oneway(*(rate[step == s] for s in range(1, 5)))
        unexplained = 1 / (1 + 3 * f / 36)
        assert found.share == pytest.approx(1 - unexplained * 39 / 36)
        assert found.p == pytest.approx(p, abs=0.03)
        assert found.table.columns.tolist() == ["1", "2", "3", "4"]
        assert found.table.loc["easy"].tolist() == [10] * 4
        assert (found.n_problems, found.n_steps) == (40, 4)
        assert found.late == "median step of the problems: easy 2.5"
    assert (f"p < {1 / 2000:g}" in str(found)) == (p < 1e-4)
    alike = confounding(frame.assign(outcome="success"))
    assert np.isnan(alike.share)
    assert np.isnan(alike.p)
    assert alike.told_apart
    assert str(alike) == "all problems have the same pass rate"
    assert alike.as_dict()["statistic"] is None


def test_what_counts_as_confounded() -> None:
    for share, p, told_apart in (
        (0.1, 0.05, False), (0.0999, 0.05, True), (0.1, 0.0501, True), (0.5, 1 / 2001, False), (np.nan, np.nan, True)
    ):  # fmt: skip
        assert Confounding(pd.DataFrame(), 10, 2, share, p, "").told_apart is told_apart


def test_groups_of_steps_by_hand() -> None:
    """At least five problems and a tenth of all in each; what is left over goes to the last."""
    for counts, names in (
        ([5, 5, 5], ["1", "2", "3"]),
        ([4, 1, 5, 4], ["1-2", "3-4"]),
        ([4, 4, 4], ["1-3"]),
        ([4, 4, 4, 4], ["1-2", "3-4"]),
        ([2, 1], ["1-2"]),
        ([6] * 9 + [5, 1], [*map(str, range(1, 10)), "10-11"]),
        ([6] * 9 + [7], [*(f"{a}-{a + 1}" for a in (1, 3, 5, 7)), "9-10"]),
    ):
        step = np.repeat(np.arange(1.0, len(counts) + 1), counts)
        group, found = _step_groups(step)
        assert found == names
        for s, g in zip(step.tolist(), group.tolist(), strict=True):
            low, _, high = names[g].partition("-")
            assert float(low) <= s <= float(high or low)


def test_the_base_itself_answered_everything() -> None:
    rng = np.random.default_rng(0)
    rate = np.concatenate([np.full(20, 0.05), np.full(20, 0.5), np.full(20, 0.95)])
    frame = pd.concat([world(rng, rate, 8, ("base",)), world(rng, np.full(60, 0.9), 8, ("run-1",))], ignore_index=True)
    bands, told = band_problems(frame, "log", base="base")
    assert bands is not None
    assert bands.info["reference"] == "base"
    assert "measured on the other half of the responses of base" in told


def test_bands_of_the_problems_that_the_base_answered() -> None:
    """The others were answered by later steps, which solve them all."""
    rng = np.random.default_rng(0)
    rate = np.concatenate([np.tile([0.05, 0.5, 0.95], 20), np.full(60, 0.9)])
    frame = world(rng, rate, 12, ("x",))
    frame["step"] = np.repeat([1] * 60 + [*np.repeat([25, 50, 75], 20)], 12)
    frame["policy"] = np.where(frame.step == 1, "base", "run-" + frame.step.astype(str))
    bands, told = band_problems(frame, "log", base="base")
    assert bands is not None
    assert "refused" not in bands.info
    assert problem_bands(bands.rows).notna().sum() == 60
    assert "60 problems, of which base gave fewer than two responses, have no band" in told
    bands, told = band_problems(frame, "log", base="another")
    assert bands is not None
    assert "refused" in bands.info


@pytest.mark.parametrize(("run", "refused"), [("medium", True), ("hard", False)])
def test_the_shipped_logs(run: str, refused: bool) -> None:
    """Of the medium log's easy problems 95 of 97 come from step 25 or later; the hard run hardly learns."""
    log = pd.concat(pd.read_parquet(f) for f in sorted((SHIPPED / "logs" / run / "completions").glob("*.parquet")))
    frame = log[["problem_id", "step"]].assign(
        policy=log.step.map("run-{:05d}".format), outcome=np.where(log.correct > 0, "success", "failure")
    )
    bands, told = band_problems(frame.reset_index(drop=True), "log", base="base")
    assert bands is not None
    assert ("refused" in bands.info) is refused, told
    if refused:
        table = pd.DataFrame(bands.info["confounded_with_step"]["table"]).T
        assert table.loc["easy"].drop("1").sum() >= 0.95 * table.loc["easy"].sum()
        assert table.loc["medium"].drop("1").sum() <= 4


def test_one_step_all_right_and_all_wrong_are_said() -> None:
    rng = np.random.default_rng(0)
    frame = world(rng, np.tile([0.05, 0.5, 0.95], 20), 8, ("run-1",)).assign(step=1)
    bands, told = band_problems(frame, "log")
    assert bands is not None
    assert "the log is of one training step" in told
    for outcome, word in (("success", "right"), ("failure", "wrong")):
        bands, told = band_problems(frame.assign(outcome=outcome), "log")
        assert bands is None
        assert told.startswith(f"none: every response is {word}, so that no problem is harder than another here")


def test_small_bands_are_said() -> None:
    rng = np.random.default_rng(0)
    frame = world(rng, np.array([0.0] * 3 + [0.5] * 6 + [1.0] * 6), 80, ("run-1",)).assign(step=1)
    bands, told = band_problems(frame, "log")
    assert bands is not None
    assert told.startswith(
        "problems: easy 6, medium 6, hard 3; too few to find anything in easy 6, medium 6, hard 3 (8 are"
    )


def test_contrasts_of_refused_bands_say_why() -> None:
    table = null_table(0, cross=True)
    config = DiffConfig(n_bootstrap=100, n_permutations=100)
    why = "bands are steps"
    table.rollouts.info["bands"]["refused"] = why
    rows = Rows.of(table, config)
    for of in comparisons(table, rows, config):
        contrast = draw(rows, of, config)
        if of.band == "all":
            assert contrast.note != why
        else:
            assert contrast.note == why
            assert contrast.inference is None


def test_policies_with_one_response_each_are_banded_together() -> None:
    """Four models' solutions to a problem: two of them measure what the other two are banded by."""
    records = [
        {"problem_id": f"p{p}", "policy": f"m{m}", "prompt_ids": [BOS], "response_ids": [3, EOS],
         "outcome": "success" if (p % 3 == 0 or (p % 3 == 1 and m in (0, 3))) else "failure"}
        for p in range(60) for m in range(4)
    ]  # fmt: skip
    frame = Rollouts.from_records(records).with_bands(None).frame
    kept = frame.dropna(subset="band")
    rate = frame.assign(right=frame.outcome == "success").groupby("problem_id").right.mean()
    assert set(kept.band) == {"easy", "medium", "hard"}
    assert (kept.band[kept.problem_id.map(rate) == 1] == "easy").all()
    assert (kept.band[kept.problem_id.map(rate) == 0] == "hard").all()
