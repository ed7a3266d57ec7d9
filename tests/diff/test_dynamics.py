"""Features along steps: planted trajectories of means, nothing where nothing moves, and the same steps' behaviours."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import false_discovery_control, spearmanr

import tsae
from support.builders import EOS, feature_table
from support.results import answer
from tsae.cli import main
from tsae.diff.config import DiffConfig
from tsae.diff.dynamics import COLUMNS, align, dynamics, run_steps
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

QUICK = DiffConfig(n_bootstrap=300, n_permutations=1000)
STEPS = (10, 20, 30, 40)
# Mean activation at the base and at every step: what training did to the feature, and when half of it was done.
PLANTED = {
    "emerging": ((0.0, 0.0, 0.3, 0.9, 1.2), 30),
    "growing": ((1.0, 1.1, 1.7, 1.9, 2.0), 20),
    "fading": ((1.0, 0.9, 0.8, 0.7, 0.0), 40),
    "passing": ((1.0, 1.0, 2.0, 1.0, 1.0), 20),
    "flat": ((1.0, 1.0, 1.0, 1.0, 1.0), None),
}


def world(
    means: np.ndarray, *, n_problems: int = 40, n_samples: int = 3, noise: float = 0.3, seed: int = 0, own: bool = True
) -> FeatureTable:
    """A base and one run with the given means.

    Args:
        means: (1 + n_steps, n_features), the base's first.
        n_problems: each with its own level of every feature.
        n_samples: trajectories a problem and checkpoint.
        noise: of problem and checkpoint, and of trajectories.
        seed: of the noise.
        own: every checkpoint reads its own trajectories; else all read all, and every problem is one checkpoint's.
    """
    rng = np.random.default_rng([seed, 9])
    n_features = means.shape[1]
    ids = ["base", *(f"run-{step}" for step in STEPS[: len(means) - 1])]
    level = rng.normal(0, 0.2, (n_problems, n_features))
    records: list[dict[str, Any]] = []
    for number, id in enumerate(ids):
        for problem in range(n_problems):
            if not own and problem % len(ids) != number:
                continue
            for _ in range(n_samples):
                right = bool(rng.random() < 0.2 + 0.15 * number)
                response = [*rng.integers(2, 12, 3 + number).tolist(), EOS]
                records.append(answer(f"p{problem}", id, right, response_ids=response))
    rollouts = Rollouts.from_records(records)
    policy = np.array([record["policy"] for record in records])
    readers, codes = [], []
    for number, id in enumerate(ids):
        read = np.flatnonzero(policy == id) if own else np.arange(len(records))
        readers.append((id, read))
        together = rng.normal(0, noise, (n_problems, n_features))
        for row in read:
            problem = int(records[row]["problem_id"][1:])
            mean = level[problem] + together[problem] + rng.normal(0, noise, n_features)
            value = np.where(means[number] > 0, np.maximum(means[number] + mean, 0), 0)
            n = len(records[row]["response_ids"]) - 1
            codes += [np.zeros((1, n_features)), np.repeat(value[None], n, 0), np.full((1, n_features), 9.0)]
    table = feature_table(rollouts, np.concatenate(codes), readers)
    for record, step in zip(table.info["readers"][1:], STEPS, strict=False):
        record |= {"run": "run", "step": step}
    return table


@pytest.fixture(scope="module")
def planted() -> FeatureTable:
    """Four features of every kind."""
    return world(np.repeat(np.array([means for means, _ in PLANTED.values()]).T, 4, axis=1))


def test_planted_trajectories_get_their_kind_and_onset(planted: FeatureTable) -> None:
    found = dynamics(planted, QUICK)
    assert found is not None
    assert list(found.table.columns) == list(COLUMNS)
    assert found.table.step.unique().tolist() == [0, *STEPS]
    for number, (kind, (means, onset)) in enumerate(PLANTED.items()):
        rows = found.table[found.table.feature // 4 == number]
        assert set(rows.kind) == {kind}
        by_step = rows.groupby("step")["mean"].mean().to_numpy()
        np.testing.assert_allclose(by_step, means, atol=0.15)
        np.testing.assert_allclose(rows["mean"] - rows["shift"], rows.groupby("feature")["mean"].transform("first"))
        if onset is None:
            assert rows.onset.isna().all()
        else:
            assert set(rows.onset) == {onset}
            assert ((rows.onset_low <= onset) & (onset <= rows.onset_high)).all()
    base = found.table[found.table.step == 0]
    assert (base[["shift", "low", "high", "delta"]] == 0).all(axis=None)
    assert (base[["p", "q"]] == 1).all(axis=None)


def test_steps_are_shifts_of_the_diff(planted: FeatureTable) -> None:
    diff = tsae.feature_diff(planted, QUICK, progress=False)
    shifts = diff.shifts[(diff.shifts.kind == "shift") & (diff.shifts.part == "total") & (diff.shifts.outcome == "all")]
    assert diff.dynamics is not None
    both = diff.dynamics.merge(shifts, on=["run", "step", "feature"], suffixes=("", "_diff"))
    # Emerging features are nowhere active at the first step: the diff does not test them there.
    assert len(both) == len(shifts) == len(STEPS) * 20 - 4
    names = {"shift": "difference"} | {name: f"{name}_diff" for name in ("mean", "low", "high", "delta", "p")}
    for ours, theirs in names.items():
        np.testing.assert_allclose(both[ours], both[theirs], rtol=1e-6, atol=1e-9, err_msg=ours)
    # q over the steps and features of the run.
    along = diff.dynamics[diff.dynamics.step > 0]
    np.testing.assert_allclose(along.q, false_discovery_control(along.p))


@pytest.mark.slow(ci=True)  # measures an error rate
def test_nothing_moves_where_nothing_moves() -> None:
    worlds = [world(np.ones((5, 30)), n_problems=20, seed=seed) for seed in range(40)]
    found = [dynamics(table, replace(QUICK, seed=seed)) for seed, table in enumerate(worlds)]
    moved = [0 if f is None else f.table[f.table.kind != "flat"].feature.nunique() for f in found]
    # At q = .05 one world in twenty has a discovery; 40 worlds have more than five in 1.4 % of all cases.
    assert (np.array(moved) > 0).sum() <= 5
    assert all(f is not None and f.table.feature.nunique() == 30 for f in found)


def test_onset_intervals_hold_the_planted_onset() -> None:
    """Means rise evenly over four steps, so that the second has half of the fourth and problems decide."""
    means = np.repeat(1 + np.array([0.0, 0.1, 0.22, 0.33, 0.4])[:, None], 60, axis=1)
    found = dynamics(world(means, noise=0.2), QUICK)
    assert found is not None
    rows = found.table[(found.table.step == 40) & (found.table.kind != "flat")]
    assert len(rows) > 40
    assert len(set(rows.onset)) > 1  # Noise moves the estimate …
    held = (rows.onset_low <= 20) & (rows.onset_high >= 20)  # … and the interval knows.
    assert held.mean() >= 0.9
    assert (rows.onset_low <= rows.onset).all()
    assert (rows.onset <= rows.onset_high).all()


def test_steps_that_answered_different_problems_are_compared_on_the_same_trajectories() -> None:
    found = dynamics(world(np.array([[1.0, 1.0], [1.0, 1.2], [1.0, 2.0]]), own=False), QUICK)
    assert found is not None
    assert set(found.table.part) == {"same_trajectories"}
    assert found.table.groupby("feature").kind.first().tolist() == ["flat", "growing"]
    assert found.behaviours.empty  # Their own trajectories are of different problems.


def test_behaviours_of_the_same_steps_and_how_features_go_with_them(planted: FeatureTable) -> None:
    found = dynamics(planted, QUICK)
    assert found is not None
    length = found.behaviours[(found.behaviours.behaviour == "response_length") & (found.behaviours.band == "all")]
    assert length.step.tolist() == [0, *STEPS]
    assert length["mean"].tolist() == [4, 5, 6, 7, 8]
    together = found.alignment()
    assert "flat" not in set(together.kind)
    assert set(together.n_points) == {5}
    assert together.smallest_p.iloc[0] == 2 / math.factorial(5)
    accuracy = found.behaviours[found.behaviours.behaviour == "accuracy"]["mean"].to_numpy()
    for row in together[together.behaviour == "accuracy"].itertuples():
        means = found.table[found.table.feature == row.feature]["mean"]
        assert row.rho == pytest.approx(spearmanr(means, accuracy).statistic)
    grown = together[(together.kind == "growing") & (together.behaviour == "response_length")]
    assert (grown.rho > 0.85).all()


@pytest.mark.parametrize(("others", "counted"), [(11, {9}), (13, set())])
def test_steps_behave_on_the_problems_that_all_of_them_answered(others: int, counted: set[int]) -> None:
    """Of 20; fewer than eight in common say too little."""
    table = world(np.ones((3, 2)), n_problems=20)
    frame = table.rollouts.frame
    elsewhere = (frame.policy == "run-20") & frame.problem_id.isin([f"p{i}" for i in range(others)])
    ids = frame.problem_id.where(~elsewhere, "other " + frame.problem_id).tolist()
    found = dynamics(replace(table, rollouts=table.rollouts.with_column("problem_id", ids)), QUICK)
    assert found is not None
    assert set(found.behaviours.n_problems) == counted


def test_alignment_leaves_out_what_does_not_change(planted: FeatureTable) -> None:
    found = dynamics(planted, QUICK)
    assert found is not None
    assert align(found.table, found.behaviours.assign(mean=1.0)).empty
    assert align(found.table[found.table.step <= 10], found.behaviours).empty


def test_a_run_with_one_step_has_no_dynamics(planted: FeatureTable) -> None:
    single = world(np.ones((2, 3)))
    assert dynamics(single, QUICK) is None
    assert tsae.feature_diff(single, QUICK, progress=False).dynamics is None
    twice = world(np.ones((3, 3)))
    twice.info["readers"][2]["step"] = STEPS[0]  # No order among steps of the same number.
    assert run_steps(twice) == {}
    assert run_steps(planted) == {"run": ["run-10", "run-20", "run-30", "run-40"]}


def test_a_run_that_cannot_be_compared_says_why() -> None:
    found = dynamics(world(np.ones((3, 3)), n_problems=4), QUICK)
    assert found is not None
    assert found.table.empty
    assert found.notes == {"run": "4 problems have trajectories of every step; 8 are needed"}


def test_command_line_and_files(
    planted: FeatureTable, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = planted.save(tmp_path / "steps")
    last = world(np.ones((2, 20))).save(tmp_path / "last")
    args = ["--n-bootstrap", "200", "--n-permutations", "1000", "--to", str(tmp_path / "diff")]
    main(["diff", "--all", "--features", str(last), "--steps", str(steps), *args])
    printed = capsys.readouterr().out
    assert re.search(r"0, 10, 20, 30, 40 +4 +4 +4 +4 +4\n", printed)
    diff = tsae.FeatureDiff.load(tmp_path / "diff")
    assert diff.checkpoints == ["run-10"]  # The contrasts are those of --features.
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "diff" / "dynamics.parquet"), diff.dynamics)
    assert [reader["flagged"] for reader in diff.info["steps"]] == [False] * 5
    assert diff.behaviour_dynamics is not None
    assert set(diff.behaviour_dynamics.step) == {0, *STEPS}
    # A diff without steps in the same folder leaves none of the old ones.
    main(["diff", "--features", str(last), *args])
    assert tsae.FeatureDiff.load(tmp_path / "diff").dynamics is None

    other = replace(planted, info={**planted.info, "sae": {**planted.info["sae"], "weights": "other"}})
    with pytest.raises(tsae.TsaeError, match="another SAE"):
        tsae.feature_diff(FeatureTable.load(last), QUICK, steps=other, progress=False)
