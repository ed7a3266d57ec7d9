"""Claims on families of features, with planted shifts and planted causal tests."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from support.builders import EOS, feature_table
from support.results import answer, checkpoint, describe, make, reader
from tsae.causal.intervention import Intervention, outcome_table
from tsae.claims.run_claims import claims_of
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

FAMILIES = ("direct-answer", "basic-computation", "deliberation")
CONDITIONS = ("none", "features", "random_1", "random_2", "same_norm_1", "same_norm_2", "wrong_sign")


def write(
    folder: Path, trained_on: str, shifts: tuple[float, ...], *, success: float = 0.0, effect: float = 0.0,
    tested: tuple[int, ...] = (0, 1), test: bool = True, families: bool = True,
) -> Path:  # fmt: skip
    """A base and a run that shifts each family's only feature; `success` is what deliberation has more of in successes,
    `effect` by how much an ablation lowers accuracy and direct answers."""
    rng, records, codes = np.random.default_rng(0), [], []
    for policy, moved in (("base", 0.0), ("run-10", 1.0)):
        for problem in range(24):
            for k in range(4):
                length, right = int(rng.integers(3, 7)), k % 2 == 0
                level = 2 + moved * np.array(shifts) + np.array([0, 0, success]) * right + rng.normal(0, 0.3, 3)
                response, nothing = np.maximum(level + rng.normal(0, 0.3, (length, 3)), 0), np.zeros((1, 3))
                codes.append(np.concatenate([nothing, response, nothing]))
                ids = [*rng.integers(2, 12, length).tolist(), EOS]
                records.append(answer(f"p{problem}", policy, right, response_ids=ids, band="hard"))
    rollouts = Rollouts.from_records(records)
    rollouts.write(folder / "rollouts" / "rollouts.parquet")
    rows, own = np.arange(len(records)), np.arange(len(records) // 2, len(records))
    table = feature_table(
        rollouts, np.concatenate([*codes, *(codes[row] for row in own)]), [("base", rows), ("run-10", own)]
    )
    table.save(folder / "features")
    described = describe(["a", "b", "c", "d"]).iloc[:3]
    diff = replace(make(), features=described.assign(family=FAMILIES) if families else described)
    diff.info["rollouts"] = rollouts.fingerprint
    diff.info["readers"] = [reader("base", None), checkpoint("run-10", "run", trained_on=trained_on)]
    diff.save(folder / "diff")
    if test:
        causal_test(effect, tested).save(folder / "causal" / "ablate-run-10")
    return folder


def causal_test(effect: float, tested: tuple[int, ...]) -> Intervention:
    rng = np.random.default_rng(1)
    records: list[dict[str, Any]] = []
    for condition in CONDITIONS:
        chance = 0.7 - effect * (condition == "features")
        for problem in range(40):
            for _ in range(6):
                right, direct = rng.random() < chance, float(rng.random() < chance)
                records.append(answer(f"q{problem}", condition, right, length=2, direct_answer=direct))
    rollouts = Rollouts.from_records(records, {"behaviours": ["direct_answer"]})
    info = {
        "checkpoint": "run-10", "features": list(tested), "n_problems": 40, "rows": {}, "sae": {},
        "config": {"mode": "ablate", "amount": 1.0, "tokens": "predicting", "n_random": 12,
            "confidence": 0.95}, "no_op_identical": True,
    }  # fmt: skip
    return Intervention(outcome_table(rollouts, confidence=0.95), rollouts, info)


def held(folder: Path, key: str) -> list[bool | None]:
    return [part["holds"] for part in claims_of(folder, [key])[key]["parts"]]


def test_easy_training(tmp_path: Path) -> None:
    yes = write(tmp_path / "yes", "easy", (1.0, 1.0, -1.0), effect=0.4)
    found = claims_of(yes, ["e"])["e"]
    assert found["verdict"] == "reproduced"
    assert [part["n"] for part in found["parts"]] == [24, 24, 24, 40]
    assert found["parts"][3]["mean"] == pytest.approx(0.4, abs=0.1)
    assert held(write(tmp_path / "no", "easy", (-1.0, -1.0, 1.0), effect=-0.3), "e") == [False] * 4
    assert held(write(tmp_path / "idle", "easy", (1.0, 1.0, -1.0)), "e") == [True, True, True, None]


def test_a_shift_is_in_standard_deviations_over_base_trajectories(tmp_path: Path) -> None:
    folder = write(tmp_path, "easy", (1.0, 1.0, -1.0))
    table = claims_of(folder, ["e"]).table()
    # By hand, from the means of trajectories.
    features = FeatureTable.load(folder / "features")
    means = np.asarray(features.row_means("response")[np.arange(features.n_rows)].toarray())
    frame = features.rollouts.frame.iloc[features.trajectory].reset_index(drop=True)
    base = (features.reader == 0) & (frame.policy == "base").to_numpy()
    run = features.reader == 1
    unit = means[base].std(0, ddof=1)
    by_problem = [
        pd.DataFrame(means[rows] / unit).groupby(frame.problem_id[rows].to_numpy()).mean() for rows in (run, base)
    ]
    expected = (by_problem[0] - by_problem[1]).mean()
    assert table["mean"].iloc[:3].tolist() == pytest.approx([expected[0], expected[1], -expected[2]], rel=1e-4)


@pytest.mark.parametrize(("sign", "effect"), [(1, 0.4), (-1, -0.2)])
def test_hard_training(sign: int, effect: float, tmp_path: Path) -> None:
    folder = write(tmp_path, "hard", (0.0, 0.0, sign), success=0.8 * sign, effect=effect, tested=(2,))
    assert held(folder, "f") == [sign > 0] * 3


def test_medium_training(tmp_path: Path) -> None:
    yes = write(tmp_path / "yes", "medium", (0.0, 1.0, 1.0), effect=0.4, tested=(1, 2))
    assert held(yes, "g") == [True, True, True]
    half = write(tmp_path / "half", "medium", (0.0, 1.0, -1.0), effect=0.4, tested=(1, 2))
    assert claims_of(half, ["g"])["g"]["verdict"] == "partly"


@pytest.mark.slow(ci=True)
def test_correlation_is_no_verdict(tmp_path: Path) -> None:
    none = claims_of(write(tmp_path / "none", "easy", (1.0, 1.0, -1.0), test=False), ["e"])["e"]
    assert none["verdict"] == "cannot be tested"
    assert "a correlation is not a verdict" in none["needs"]
    assert "--causal" in none["add"]
    other = claims_of(write(tmp_path / "other", "easy", (1.0, 1.0, -1.0), tested=(2,)), ["e"])["e"]
    assert "ablates features of direct-answer or basic-computation in run-10" in other["needs"]
    assert "--checkpoint run-10 --choose 0 1" in other["add"]
    foreign = write(tmp_path / "foreign", "easy", (1.0, 1.0, -1.0))
    for of in ({"sae": {"weights": "another SAE"}}, {"features_encoded_with": "other rollouts"}):
        test = causal_test(0.4, (0, 1))
        test.info.update(of)
        shutil.rmtree(foreign / "causal")
        test.save(foreign / "causal" / "ablate-run-10")
        assert "ablates features of" in claims_of(foreign, ["e"])["e"]["needs"]  # its numbers are other features
    bare = claims_of(write(tmp_path / "bare", "easy", (1.0, 1.0, -1.0), families=False), ["e"])["e"]
    assert bare["needs"] == "families of features"
    assert "--families" in bare["add"]
    elsewhere = claims_of(tmp_path / "none", ["g"])["g"]
    assert elsewhere["needs"] == "a run that was trained on medium problems (there is run-10 on easy)"
