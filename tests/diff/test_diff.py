"""The feature diff: its statistics against enumeration and scipy, its contrasts against loops, its error rates."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import false_discovery_control

from support.builders import EOS, feature_table
from support.refusals import refuses
from support.results import answer
from tsae.diff.comparisons import Rows, outcome_comparisons, shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.effects import draw
from tsae.diff.feature_diff import FeatureDiff, feature_diff
from tsae.diff.inference import paired_inference, sequential_p
from tsae.diff.permutations import sign_flips
from tsae.diff.threads import in_threads
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

DRAWS = DiffConfig(n_bootstrap=200, n_permutations=1000, confidence=0.95, seed=0, minimum_effect=0.0)


# --- statistics


def test_no_discovery_has_an_interval_with_0_in_it() -> None:
    """p is that of the sign flips, or larger: the bootstrap's, by its definition, where the interval has 0 in it."""
    rng = np.random.default_rng(0)
    differences = rng.normal(0.2, 1, size=(60, 200))
    differences[:, ::4] = rng.exponential(size=(60, 50)) ** 6  # of one sign, most of it in a few problems
    found = paired_inference(differences, np.ones(200), DRAWS)
    flips = sequential_p(sign_flips(differences, 0), 1, 200, 1000, 0.05, "bh")
    crossing = (found.low <= 0) & (found.high >= 0)
    assert (crossing & (flips < 0.001)).sum() >= 10
    assert found.p[crossing].min() > 0.04
    np.testing.assert_array_equal(found.p[~crossing], flips[~crossing])
    feature = int(np.flatnonzero(crossing & (flips < 0.001))[0])
    x = differences[:, feature]
    t = []
    for _ in range(4000):
        drawn = x[rng.integers(0, 60, size=60)]
        t.append(abs(drawn.mean() - x.mean()) / (drawn.std(ddof=1) / np.sqrt(60)))
    expected = np.mean(np.array(t) >= x.mean() / (x.std(ddof=1) / np.sqrt(60)))
    assert abs(found.p[feature] - expected) < 0.04


def test_p_is_never_zero_and_never_nan() -> None:
    differences = np.stack([np.full(40, 3.0), np.zeros(40), np.r_[1e-30, np.zeros(39)]], axis=1)
    for least in (0.0, 0.1, 4.0):
        found = paired_inference(differences, np.ones(3), replace(DRAWS, minimum_effect=least))
        assert found.p_differs[0] == 1 / 1001
        assert found.p[0] == (1 if least == 4 else 1 / 1001)
        assert found.p_differs[1] == found.p[1] == 1
        for name, values in vars(found).items():
            assert np.isfinite(values).all(), name
        assert found.delta[:2].tolist() == [3, 0]


# --- a world with known truth


def world(
    *,
    n_problems: int = 30,
    n_samples: int = 4,
    n_features: int = 40,
    seed: int = 0,
    shift: np.ndarray | float = 0.0,
    outcome: np.ndarray | float = 0.0,
    success_rate: float = 0.5,
    bands: bool = False,
    drop: Any = None,
) -> FeatureTable:
    """Features of one-token responses: a problem's level, which all its trajectories share, noise, and effects.

    Args:
        shift: added on trajectories of the run as the run reads them, (n_features,).
        outcome: added on successes, (n_features,).
        bands: the first third of the problems is easy, and so on.
        drop: (policy, problem) -> leave these trajectories out.
    """
    rng = np.random.default_rng(seed)
    level = rng.normal(3, 1, size=(n_problems, n_features))
    records, effects = [], []
    for policy in ("base", "run"):
        for problem in range(n_problems):
            for _ in range(n_samples):
                right = bool(rng.random() < success_rate)
                if drop is not None and drop(policy, problem):
                    continue
                band = ("easy", "medium", "hard")[problem * 3 // n_problems] if bands else None
                records.append(answer(f"p{problem}", policy, right, response_ids=[2, EOS], band=band))
                effects.append(level[problem] + outcome * right)
    rollouts = Rollouts.from_records(records)
    policy = np.array([r["policy"] for r in records])
    read = {"base": np.arange(len(records)), "run": np.arange(len(records))}
    codes = []
    for reader in ("base", "run"):
        for row in read[reader]:
            moved = shift * (reader == "run") * (policy[row] == "run")
            value = np.maximum(effects[row] + moved + 0.7 * rng.normal(size=n_features), 0)
            codes += [np.zeros(n_features), value, np.full(n_features, 9.0)]  # prompt, response, <eos>
    return feature_table(rollouts, np.array(codes), list(read.items()))


QUICK = DiffConfig(n_bootstrap=100, n_permutations=1000)


def drawn(table: FeatureTable, config: DiffConfig = QUICK) -> dict[tuple[str, str, str, str], Any]:
    rows = Rows.of(table, config)
    both = itertools.chain(shift_comparisons(table, rows, config), outcome_comparisons(table, rows, config))
    return {(of.checkpoint, of.part, of.band, of.outcome): draw(rows, of, config) for of in both}


def mean_of(table: FeatureTable, reader: str, policy: str, band: str = "all", outcome: str = "all") -> dict[str, Any]:
    """Problem -> mean over its trajectories of the response token's codes, by a loop."""
    by_problem: dict[str, list[np.ndarray]] = {}
    records = table.rollouts.table.to_pylist()
    for row in range(table.n_rows):
        record = records[table.trajectory[row]]
        if table.readers[table.reader[row]] != reader or record["policy"] != policy:
            continue
        if band not in ("all", record["band"]) or outcome not in ("all", record["outcome"]):
            continue
        code = table.codes[[int(table.row_offsets[row]) + 1]].toarray()[0]
        by_problem.setdefault(record["problem_id"], []).append(code)
    return {problem: np.mean(codes, axis=0, dtype=np.float64) for problem, codes in by_problem.items()}


SIDES = {
    "total": (("run", "run"), ("base", "base")),
    "policy": (("base", "run"), ("base", "base")),
    "representation": (("run", "run"), ("base", "run")),
    "same_trajectories": (("run", "base"), ("base", "base")),
}


@pytest.fixture(scope="module")
def banded() -> tuple[FeatureTable, dict[tuple[str, str, str, str], Any]]:
    """Shifts and effects of outcomes in three bands, and all their contrasts."""
    shift = np.linspace(-1, 1, 6)
    table = world(n_problems=60, n_features=6, shift=shift, outcome=0.3, bands=True, success_rate=0.3, n_samples=3)
    return table, drawn(table)


@pytest.mark.parametrize("outcome", ["all", "success", "failure"])
@pytest.mark.parametrize("band", ["all", "medium"])
def test_shifts_against_a_loop_and_their_parts_add_up(banded: Any, band: str, outcome: str) -> None:
    table, contrasts = banded
    # The parts are over the same problems, those that have such trajectories of base and run.
    ours = mean_of(table, "base", "base", band, outcome).keys() & mean_of(table, "run", "run", band, outcome).keys()
    for part, (a, b) in SIDES.items():
        contrast = contrasts["run", part, band, outcome]
        left, right = mean_of(table, *a, band, outcome), mean_of(table, *b, band, outcome)
        problems = sorted((left.keys() & right.keys()) if part == "same_trajectories" else ours)
        assert contrast.of.n_problems == len(problems)
        if part != "same_trajectories":
            assert contrast.of.n_left_out == len((left.keys() | right.keys()) - set(problems))
        np.testing.assert_allclose(contrast.mean_a, np.mean([left[p] for p in problems], axis=0), rtol=1e-5)
        np.testing.assert_allclose(contrast.mean_b, np.mean([right[p] for p in problems], axis=0), rtol=1e-5)
        assert contrast.feature.tolist() == list(range(6))
    total, policy, representation = (contrasts["run", p, band, outcome].inference for p in list(SIDES)[:3])
    np.testing.assert_allclose(total.difference, policy.difference + representation.difference, atol=1e-6)


@pytest.mark.parametrize("unknown", [False, True])
def test_outcome_contrasts_count_problems_that_carry_none(unknown: bool) -> None:
    """Every fourth outcome may be unknown."""
    table = world(n_problems=20, n_samples=3, n_features=5, outcome=1.0)
    hidden = unknown & (np.arange(len(table.rollouts)) % 4 == 0)
    outcome = np.where(hidden, "unknown", table.rollouts.frame.outcome)
    table = replace(table, rollouts=table.rollouts.with_column("outcome", outcome))
    contrast = drawn(table)["run", "success_minus_failure", "all", "all"]
    right, wrong = (mean_of(table, "run", "run", outcome=o) for o in ("success", "failure"))
    both = sorted(right.keys() & wrong.keys())
    assert contrast.of.n_problems == len(both) > 5
    assert contrast.of.n_left_out == len(right.keys() ^ wrong.keys()) > 0
    expected = np.mean([right[p] - wrong[p] for p in both], axis=0)
    np.testing.assert_allclose(contrast.inference.difference, expected, rtol=1e-5)
    assert (contrast.inference.q < 0.05).all()


def test_where_no_problems_are_shared_all_that_was_read_is_compared() -> None:
    """As in a trainer's log: the base answered the first half of the problems, the run the second."""
    drop = lambda policy, problem: (policy == "base") == (problem >= 15)  # noqa: E731
    table = world(n_features=5, shift=np.array([0, 0, 2.0, 0, 0]), drop=drop)
    contrasts = drawn(table)
    assert {part for _, part, _, _ in contrasts} == {"same_trajectories", "success_minus_failure"}
    found = contrasts["run", "same_trajectories", "all", "all"]
    means = {reader: mean_of(table, reader, "base") | mean_of(table, reader, "run") for reader in ("base", "run")}
    assert found.of.n_problems == len(means["base"]) == 30
    expected = np.mean([means["run"][p] - means["base"][p] for p in means["base"]], axis=0)
    np.testing.assert_allclose(found.inference.difference, expected, rtol=1e-5)
    outcome = contrasts["base", "success_minus_failure", "all", "all"]
    assert outcome.of.n_problems + outcome.of.n_left_out == 30

    # Nor is the base's half all there is where other policies, which read nothing, sampled the rest, or everything.
    for base, run in (("base", "step 7"), ("gpt", "claude")):
        others = np.where(table.rollouts.frame.policy == "run", run, base)
        contrasts = drawn(replace(table, rollouts=table.rollouts.with_column("policy", others)))
        assert {part for _, part, _, _ in contrasts} == {"same_trajectories", "success_minus_failure"}
        found = contrasts["run", "same_trajectories", "all", "all"]
        np.testing.assert_allclose(found.inference.difference, expected, rtol=1e-5)

    # With enough problems in common, each side has its own trajectories again.
    shared = world(n_features=5, drop=lambda policy, problem: (policy == "base") == (problem >= 15) and problem >= 8)
    assert drawn(shared)["run", "total", "all", "all"].of.n_problems == 8


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"n_problems": 1}, ("run", "total", "all", "all"), "1 problems have such trajectories on both sides; 8 are"),
        (
            {"n_problems": 1},
            ("run", "success_minus_failure", "all", "all"),
            "problems have both outcomes; 8 are needed",
        ),
        ({"success_rate": 0.0}, ("run", "success_minus_failure", "all", "all"), "0 problems have both outcomes"),
        ({"success_rate": 0.0}, ("run", "total", "all", "success"), "0 problems have such trajectories"),
        ({"success_rate": 1.0}, ("base", "success_minus_failure", "all", "all"), "0 problems have both outcomes"),
        ({"shift": -99.0, "outcome": -99.0}, ("run", "total", "all", "success"), "no feature is active"),
    ],
)
def test_what_cannot_be_contrasted_is_refused_with_a_note(
    changes: dict[str, Any], key: tuple[str, str, str, str], note: str
) -> None:
    contrast = drawn(world(n_features=4, **changes))[key]
    assert contrast.inference is None
    assert note in contrast.note
    assert len(contrast.feature) == 0


def test_features_that_are_never_active_are_not_tested() -> None:
    table = world(n_features=6)
    codes = table.codes.toarray()
    codes[:, 2] = 0
    codes[:, 4] = 0
    codes[1:12:3, 4] = 1.0  # active in one problem only
    sparse = replace(table, codes=sp.csr_array(codes))
    assert drawn(sparse)["run", "total", "all", "all"].feature.tolist() == [0, 1, 3, 5]
    silent = replace(table, codes=sp.csr_array(codes.shape, dtype=np.float32))
    diff = feature_diff(silent, QUICK, progress=False)
    assert set(diff.contrasts.note) == {"no feature is active in enough problems"}
    assert diff.shifts.empty
    assert diff.table().empty
    assert set(diff.features.responds_to) == {"never active"}
    assert np.isfinite(diff.features.length_correlation).all()


def test_an_empty_band_is_refused_by_name() -> None:
    with pytest.raises(TsaeError, match="no problem is in the band 'hard'; the rollouts have no bands"):
        feature_diff(world(n_features=3), DiffConfig(bands=("hard",)), progress=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_codes_that_are_no_numbers_are_refused(value: float) -> None:
    """No draw is as extreme as they are: a feature with one would have the smallest p there is."""
    table = world(n_features=3)
    token = table.row_offsets[-1] - 2  # the response of the run's last trajectory, as the run reads it
    codes = table.codes.tolil()
    codes[token, 1] = value
    with pytest.raises(TsaeError, match="the codes of feature 1 are not finite"):
        feature_diff(replace(table, codes=sp.csr_array(codes)), QUICK, progress=False)


def test_ids_that_no_tokenizer_knows_are_shown_by_number() -> None:
    """Vocabularies are padded, and a model may sample what pads them."""
    table = world(n_features=3)
    diff = feature_diff(table, QUICK, token_strings=["zero"], progress=False)
    ids = {str(i) for i in table.token_ids.tolist()}
    assert diff.info["token_strings"] == {i: "zero" if i == "0" else f"#{i}" for i in ids}


@pytest.mark.parametrize(
    "config",
    [
        {"n_bootstrap": 99},
        {"n_permutations": 50},
        {"q": 0.0},
        {"q": 1.0},
        {"q": 1e-9},
        {"bands": ("easy", "hard", "easy")},
        {"confidence": 1.0},
        {"min_problems": 1},
        {"threads": 0},
        {"minimum_effect": -0.1},
        {"minimum_effect": float("nan")},
        {"minimum_effect": float("inf")},
    ],
)
def test_diffs_that_cannot_be_are_refused(config: dict[str, Any]) -> None:
    refuses(next(iter(config)), DiffConfig, **config)


def test_prompts_tell_of_reading_alone() -> None:
    """What a run reads out of the same prompts can shift; what no two trajectories of a problem differ in cannot."""
    table = world(shift=1.5)
    codes = table.codes.toarray()
    starts = table.row_offsets[:-1]
    noise = 1e-3 * np.random.default_rng(0).random((len(starts), 40))
    codes[starts] = 1 + table.reader[:, None] * (np.arange(40) < 20)[None] + noise
    first = replace(table, codes=sp.csr_array(codes.astype(np.float32)))
    assert (first.span_mask("last_prompt").nonzero()[0] == starts).all()
    diff = feature_diff(first, DiffConfig(span="last_prompt", n_bootstrap=100, n_permutations=1000), progress=False)
    found = diff.table(kind="shift", part="total", band="all", outcome="all", discoveries=True)
    assert set(range(20)) <= set(found.feature)
    np.testing.assert_allclose(found[found.feature < 20].difference, 1, atol=1e-2)
    refused = diff.contrasts[diff.contrasts.note == "both sides read the same prompts with the same checkpoint"]
    assert set(refused.kind) == {"shift", "outcome"}
    assert set(refused[refused.kind == "shift"].part) == {"policy"}
    assert set(diff.shifts.kind) == {"shift"}


# --- the answer


@pytest.fixture(scope="module")
def diff() -> FeatureDiff:
    table = world(shift=np.linspace(-1.5, 1.5, 10), n_features=10, outcome=0.5, bands=True)
    return feature_diff(table, QUICK, token_strings=[f"t{i}" for i in range(20)], progress=False)


def test_the_diff_reproduces_with_any_number_of_threads(diff: FeatureDiff) -> None:
    """The same world made anew, and one thread, against the two of the fixture."""
    assert QUICK.threads == 2
    table = world(shift=np.linspace(-1.5, 1.5, 10), n_features=10, outcome=0.5, bands=True)
    strings = [f"t{i}" for i in range(20)]
    again = feature_diff(table, replace(QUICK, threads=1), token_strings=strings, progress=False)
    for name in ("shifts", "contrasts", "features", "confounds"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(diff, name))
    assert again.info == diff.info


def test_threads_keep_order_and_pass_errors_on() -> None:
    begun, gate = [], threading.Event()

    def job(number: int) -> int:
        begun.append(number)
        if number == 0:
            gate.wait(10)  # Later ones end sooner.
        elif number == 1:
            gate.set()
        return number

    assert list(in_threads([partial(job, i) for i in range(5)], 2)) == [0, 1, 2, 3, 4]
    begun.clear()

    def refuse() -> int:
        raise TsaeError("refused", where="here")

    slow = [partial(job, 9), partial(time.sleep, 0.2)]
    refuses("refused", lambda: list(in_threads([refuse, *slow * 20], 2)))
    assert len(begun) < 20


def test_every_row_carries_its_evidence(diff: FeatureDiff) -> None:
    numbers = ["mean", "reference", "difference", "low", "high", "delta", "delta_low", "delta_high", "auroc"]
    assert np.isfinite(diff.shifts[[*numbers, "p", "q", "p_differs", "q_differs"]].to_numpy()).all()
    assert "d" not in diff.shifts
    assert (diff.shifts.p_differs > 0).all()
    assert (diff.shifts.p >= diff.shifts.p_differs).all()  # what moved differs
    for p, q in (("p", "q"), ("p_differs", "q_differs")):
        assert (diff.shifts[q] >= diff.shifts[p] - 1e-12).all()
    inside = (diff.shifts.low <= diff.shifts.difference) & (diff.shifts.difference <= diff.shifts.high)
    assert inside.mean() > 0.99
    np.testing.assert_allclose(diff.shifts["mean"] - diff.shifts.reference, diff.shifts.difference, atol=1e-6)
    for keys, group in diff.shifts.groupby(["kind", "checkpoint", "part", "band", "outcome"]):
        np.testing.assert_allclose(group.q, false_discovery_control(group.p))
        contrast = diff.contrasts.set_index(["kind", "checkpoint", "part", "band", "outcome"]).loc[keys]
        assert contrast.n_tested == len(group)
        np.testing.assert_allclose(group.q_differs, false_discovery_control(group.p_differs))
        assert contrast.n_discoveries == (group.q <= 0.05).sum()
        assert contrast.n_differs == (group.q_differs <= 0.05).sum() >= contrast.n_discoveries
    plain = diff.contrasts[diff.contrasts.kind != "interaction"]
    assert set(plain.band) == {"all", "easy", "medium", "hard"}
    assert set(diff.contrasts.band) - set(plain.band) == {"medium-easy", "hard-easy", "hard-medium"}
    assert diff.info["causally_tested"] is False
    assert diff.checkpoints == ["run"]


def test_rows_are_selected(diff: FeatureDiff) -> None:
    total = diff.table(kind="shift", part="total", band="all", outcome="all")
    assert total.feature.tolist() == list(range(10))
    assert (total.difference.to_numpy()[[0, 9]] * [-1, 1] > 0.5).all()
    top = diff.top(3)
    apart = (total[total.q <= 0.05].auroc - 0.5).abs()
    assert (top.auroc - 0.5).abs().tolist() == sorted(apart, reverse=True)[:3]
    assert (total.moved == (total.q <= 0.05)).all()
    assert (diff.table(discoveries=True).q <= 0.05).all()
    one = diff.feature(4).table()
    assert set(one.feature) == {4}
    for table in (total, one):
        assert table.index.tolist() == [*range(len(table))]
        assert "index" not in table.columns
    refuses("no feature 10; there are 0 to 9", diff.feature, 10)
    refuses("no column 'bands'", diff.table, bands="all")


def test_a_misspelt_name_is_answered_with_those_that_there_are(diff: FeatureDiff) -> None:
    for ask, message in (
        (lambda: diff.table(band="medum"), "no band 'medum'; there are all, easy, medium, hard"),
        (lambda: diff.top(kind="shfit"), "no kind 'shfit'; there are shift, outcome, interaction"),
        (lambda: diff.main_shift("rum"), "no checkpoint 'rum'; there are base, run"),
        (lambda: diff.opposed("base", "rum"), "no checkpoint 'rum'"),
        (lambda: diff.table(feature="ten"), "no feature 'ten'; there are 0 to 9"),
    ):
        refuses(message, ask)
    assert diff.feature("4").index == 4
    assert set(diff.table(feature="4").feature) == {4}


def test_claims_are_checked_against_intervals(diff: FeatureDiff) -> None:
    names = ["up", "down", "open"]
    table = pd.DataFrame({"policy": "run", "band": "all", "behaviour": names, "change": [1.0, -1.0, 0.5]})
    table = table.assign(change_low=[0.5, -2.0, -0.5], change_high=[2.0, -0.5, 2.0])
    claims = {name: ("run", "raises", name, "all") for name in (*names, "never")}
    found = replace(diff, behaviours=table, families=pd.DataFrame()).check(claims)
    assert found.holds.tolist() == ["yes", "no, the opposite", "not clear", "not measured"]
    assert found.measured.tolist() == ["+1.00 [+0.50, +2.00]", "-1.00 [-2.00, -0.50]", "+0.50 [-0.50, +2.00]", "–"]
    assert diff.gates.startswith("Before you believe it\n")


def test_the_clearest_shifts_are_printed_with_what_decides(diff: FeatureDiff) -> None:
    top = diff.top(3)
    head = " ".join(str(top).splitlines()[0].split())
    assert head == "feature responds to checkpoint Δ (sd) interval active % q past all controls"
    assert str(top) in str(diff)
    assert str(diff).startswith(f"{diff!r}\nrun: ")
    assert "index" not in top.columns
    assert type(top[["feature", "q"]]) is pd.DataFrame


def test_opposed_features_are_raised_by_one_and_lowered_by_another(diff: FeatureDiff) -> None:
    other = diff.shifts.assign(checkpoint="other", difference=-diff.shifts.difference, delta=-diff.shifts.delta)
    both = replace(
        diff,
        shifts=pd.concat([diff.shifts, other], ignore_index=True),
        contrasts=pd.concat([diff.contrasts, diff.contrasts.assign(checkpoint="other")], ignore_index=True),
    )
    raised = diff.table(discoveries=True, kind="shift", part="total", band="all", outcome="all")
    raised = raised[raised.difference > 0]
    found = both.opposed("run", "other")
    assert sorted(found.index) == sorted(raised.feature)
    assert found.strength.is_monotonic_decreasing
    assert both.opposed("run", "run").empty


def test_a_diff_is_saved_and_loaded(diff: FeatureDiff, tmp_path: Path) -> None:
    loaded = FeatureDiff.load(diff.save(tmp_path / "diff"))
    for name in ("shifts", "contrasts"):  # the base has no run: None here, NaN there
        a, b = (getattr(d, name).fillna({"run": ""}).astype({"run": object}) for d in (loaded, diff))
        pd.testing.assert_frame_equal(a, b, check_dtype=False)
    pd.testing.assert_frame_equal(
        loaded.features.drop(columns="top_tokens"), diff.features.drop(columns="top_tokens"), check_dtype=False
    )
    assert [list(t) for t in loaded.features.top_tokens] == [list(t) for t in diff.features.top_tokens]
    assert loaded.info == json.loads(json.dumps(diff.info, default=float))
    assert loaded.q == 0.05


def test_badly_reconstructed_readers_are_flagged() -> None:
    table = world(n_features=3)
    table.info["readers"][1]["fve"] = 0.3
    readers = feature_diff(table, QUICK, progress=False).info["readers"]
    assert [reader["flagged"] for reader in readers] == [False, True]


def test_a_base_alone_has_outcome_contrasts() -> None:
    table = world(n_features=4, outcome=1.0)
    rows = table.rows(reader="base", policy="base")
    codes = np.concatenate([table.codes[table.row_offsets[r] : table.row_offsets[r + 1]].toarray() for r in rows])
    alone = feature_diff(
        feature_table(table.rollouts, codes, [("base", table.trajectory[rows])]), QUICK, progress=False
    )
    assert set(alone.contrasts.kind) == {"outcome"}
    assert (alone.table(discoveries=True).difference > 0.5).all()
    assert alone.top().empty
    assert alone.checkpoints == []


def test_diffs_of_one_sae_are_compared(diff: FeatureDiff) -> None:
    turned = diff.shifts.assign(
        difference=np.where(diff.shifts.feature == 0, -diff.shifts.difference, diff.shifts.difference),
        q=np.where(diff.shifts.feature == 9, 0.9, diff.shifts.q),
    )
    found = diff.compare(replace(diff, shifts=turned[turned.feature != 5]))
    total = found[(found.part == "total") & (found.band == "all") & (found.outcome == "all")].set_index("feature")
    assert sorted(total.index) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert total.agreement[0] == "opposite"
    assert total.agreement[1] == "both"
    assert total.agreement[9] == "one"
    assert set(diff.compare(diff).agreement) == {"both", "neither"}
    other = {**diff.info, "sae": {**diff.info["sae"], "weights": "else"}}
    refuses("a diff of the SAE None cannot be compared with one of else", diff.compare, replace(diff, info=other))


def test_markdown_keeps_hostile_text_in_its_cell(diff: FeatureDiff) -> None:
    described = diff.features.assign(responds_to="a|b\n[x](y) <img> `c`")
    lines = replace(diff, features=described).to_markdown(3).splitlines()
    assert len(lines) == 5
    for line in lines:
        assert line.replace("\\|", "").count("|") == 18
    assert "a\\|b⏎\\[x\\](y) &lt;img&gt; \\`c\\`" in lines[2]
    top = diff.top(3)
    assert [line.split(" | ")[4] for line in lines[2:]] == [str(f) for f in top.feature]
