"""Controls: effects that are nothing but length, position or token identity vanish; others stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from support.builders import EOS, feature_table
from support.results import answer
from tsae.diff import confounds
from tsae.diff.comparisons import Rows, comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.confounds import CANNOT_TELL, FAILS, SURVIVES, TOO_FEW
from tsae.diff.feature_diff import FeatureDiff, feature_diff
from tsae.rollouts.table import Rollouts

QUICK = DiffConfig(n_bootstrap=300, n_permutations=1000)
LENGTH, POSITION, TOKEN, REAL = range(4)


@pytest.fixture(scope="module")
def diff() -> FeatureDiff:
    """Successes are longer and write token 5 more often; three features know only that, the last one knows success."""
    rng = np.random.default_rng(0)
    records, codes = [], []
    for problem in range(40):
        for sample in range(8):
            right = sample % 2 == 0
            length = int(rng.integers(3, 20) if right else rng.integers(2, 12))
            tokens = np.where(rng.random(length) < (0.6 if right else 0.3), 5, rng.integers(6, 12, length))
            response = rng.normal(0, 0.1, size=(length, 4)) + 1
            response[:, LENGTH] += 0.2 * length
            response[:, POSITION] += 0.2 * np.arange(length)
            response[:, TOKEN] += 2 * (tokens == 5)
            response[:, REAL] += 0.3 * right
            codes += [np.zeros((1, 4)), response, np.full((1, 4), 9.0)]
            records.append(answer(f"p{problem}", "base", right, response_ids=[*tokens.tolist(), EOS]))
    table = feature_table(Rollouts.from_records(records), np.concatenate(codes), [("base", np.arange(len(records)))])
    return feature_diff(table, QUICK, progress=False)


def test_what_a_confound_explains_shrinks_and_the_rest_stays(diff: FeatureDiff) -> None:
    outcome = diff.table(kind="outcome").set_index("feature")
    assert (outcome.q <= 0.05).all()
    kept = diff.confounds.pivot(index="feature", columns="control", values="kept")
    assert abs(kept.length[LENGTH]) < 0.3
    assert abs(kept.position[POSITION]) < 0.1
    assert abs(kept.token[TOKEN]) < 0.1
    for control in ("length", "position", "token"):
        assert kept[control][REAL] == pytest.approx(1, abs=0.15)
        assert outcome[f"survives_{control}"][REAL] == "survives"
    assert outcome.survives_token[TOKEN] == "does not survive"
    assert outcome.survives_position[POSITION] == "does not survive"
    # A control speaks of its own confound only.
    assert kept.length[TOKEN] > 0.8
    assert kept.token[LENGTH] > 0.8


def test_controlled_differences_against_loops(diff: FeatureDiff) -> None:
    table = diff.source
    assert table is not None
    frame = table.rollouts.frame
    rows = table.row_means().toarray()
    lengths = table.rollouts.lengths("response_ids") - 1
    octave = np.floor(2 * np.log2(lengths)).astype(int)
    by_length, by_position = [], []
    for _, group in frame.groupby("problem_id", sort=False):
        right = group.index[group.outcome == "success"].to_numpy()
        wrong = group.index[group.outcome == "failure"].to_numpy()
        cells, weights = [], []
        for o in np.intersect1d(octave[right], octave[wrong]):
            a, b = right[octave[right] == o], wrong[octave[wrong] == o]
            cells.append(rows[a].mean(0) - rows[b].mean(0))
            weights.append(min(len(a), len(b)))
        if weights:
            by_length.append(np.average(cells, axis=0, weights=weights))
        cells, weights = [], []
        for o in range(10):
            sides = []
            for side in (right, wrong):
                found = [
                    table.codes[[int(table.row_offsets[r]) + 1 + t]].toarray()[0]
                    for r in side
                    for t in range(lengths[r])
                    if int(np.floor(2 * np.log2(t + 1))) == o
                ]
                sides.append(found)
            if sides[0] and sides[1]:
                cells.append(np.mean(sides[0], axis=0) - np.mean(sides[1], axis=0))
                weights.append(min(map(len, sides)))
        by_position.append(np.average(cells, axis=0, weights=weights))
    for control, expected in (("length", by_length), ("position", by_position)):
        found = diff.confounds[diff.confounds.control == control]
        assert (found.n_problems == len(expected)).all()
        np.testing.assert_allclose(found.difference, np.mean(expected, axis=0), rtol=1e-5, atol=1e-7)


def test_what_tokens_explain_against_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token's mean in the other half of the problems; in one problem one outcome is missing, and some ids are one
    problem's own."""
    monkeypatch.setattr(confounds, "_IDS", 3)
    monkeypatch.setattr(confounds, "_OFTEN", 0.2)
    rng = np.random.default_rng(0)
    records = [
        answer(f"p{p:02d}", "base", s % 2 > 0, response_ids=[*rng.integers(5, 13, rng.integers(1, 5)).tolist(), 20 + p])
        for p in range(11) for s in range(4) if p != 4 or s % 2
    ]  # fmt: skip
    rollouts = Rollouts.from_records(records)
    n = int((rollouts.lengths("response_ids") + 1).sum())
    table = feature_table(rollouts, rng.random((n, 3)), [("base", np.arange(len(records)))])
    rows = Rows.of(table, QUICK)
    (of,) = (c for c in comparisons(table, rows, QUICK) if c.kind == "outcome" and c.band == "all")
    problems, found = confounds._controlled(table, rows, confounds._Tokens.of(table, QUICK), of, "token", seed=3)
    assert problems.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    half = dict(zip(problems.tolist(), np.random.default_rng([3, 6]).permutation(10) % 2, strict=True))
    codes = table.codes.toarray()
    tokens = [(int(rows.problem[r]), int(table.token_ids[i]), codes[i])
              for r in range(len(records)) if rows.problem[r] != 4
              for i in range(int(table.row_offsets[r]) + 1, int(table.row_offsets[r + 1]))]  # fmt: skip
    unseen = 0
    for problem, difference in zip(problems.tolist(), found, strict=True):
        others = [(id, code) for p, id, code in tokens if half[p] != half[problem]]
        sides: dict[str, list[np.ndarray]] = {"success": [], "failure": []}
        for r in np.flatnonzero(rows.problem == problem):
            left = []
            for i in range(int(table.row_offsets[r]) + 1, int(table.row_offsets[r + 1])):
                same = [code for id, code in others if id == table.token_ids[i]]
                unseen += not same
                left.append(codes[i] - np.mean(same or [code for _, code in others], axis=0))
            sides[rows.outcome[r]].append(np.mean(left, axis=0))
        np.testing.assert_allclose(
            difference, np.mean(sides["success"], axis=0) - np.mean(sides["failure"], axis=0), atol=1e-6
        )
    assert unseen >= 40


def test_sides_that_have_nothing_in_common_are_not_compared() -> None:
    records = [answer(f"p{p}", "base", not s % 2, length=2 if s % 2 else 16) for p in range(8) for s in range(4)]
    rollouts = Rollouts.from_records(records)
    n = int(rollouts.lengths("response_ids").sum()) + len(records)
    codes = np.random.default_rng(0).random((n, 3))
    found = feature_diff(feature_table(rollouts, codes, [("base", np.arange(len(records)))]), QUICK, progress=False)
    assert set(found.table(kind="outcome").survives_length) == {"too few problems"}
    of_length = found.confounds[found.confounds.control == "length"]
    assert of_length.difference.isna().all()
    assert (of_length.n_problems == 0).all()
    assert found.confounds[found.confounds.control != "length"].difference.notna().all()


def test_what_is_kept_is_of_the_problems_that_can_be_compared() -> None:
    """Length makes no difference to any feature. In half of the problems both outcomes have the same lengths, in the
    others none in common; the effect is small in the first and large in the second, or the reverse, or the same."""
    rng = np.random.default_rng(0)
    records, codes = [], []
    for problem in range(60):
        comparable = problem % 2 == 0
        effect = np.array([0.4, 0.8, 0.5]) if comparable else np.array([0.8, 0.4, 0.5])
        for sample in range(8):
            right = sample % 2 == 0
            n = int(rng.integers(4, 16)) if comparable else 4 if right else 16
            codes += [np.zeros((1, 3)), rng.normal(2, 0.3, size=(n, 3)) + effect * right]
            records.append(answer(f"p{problem}", "base", right, response_ids=rng.integers(5, 9, n).tolist()))
    rollouts = Rollouts.from_records(records)
    table = feature_table(rollouts, np.concatenate(codes), [("base", np.arange(len(records)))])
    diff = feature_diff(table, QUICK, progress=False)
    found = diff.confounds[diff.confounds.control == "length"].set_index("feature")
    assert found.n_problems.between(25, 30).all()
    np.testing.assert_allclose(found.plain, [0.4, 0.8, 0.5], atol=0.07)
    np.testing.assert_allclose(found.kept, 1, atol=0.15)
    assert set(found.verdict) == {SURVIVES}
    effect = diff.table(kind="outcome").set_index("feature").difference
    np.testing.assert_allclose(effect, [0.6, 0.6, 0.5], atol=0.05)  # against which .67 and 1.33 would be kept
    # Where comparable problems show less than half of the effect even uncontrolled, they cannot tell.
    codes = table.codes.toarray()
    problem = rollouts.frame.problem_id.str[1:].astype(int).to_numpy()[table.row_of_token]
    right = (rollouts.frame.outcome == "success").to_numpy()[table.row_of_token]
    codes[:, 0] -= 0.35 * (right & (problem % 2 == 0))
    weak = feature_diff(replace(table, codes=sp.csr_array(codes)), QUICK, progress=False)
    verdict = weak.confounds.set_index(["control", "feature"]).verdict
    assert verdict["length", 0] == TOO_FEW
    assert verdict["length", 2] == SURVIVES


def test_interactions_and_parts_say_that_they_were_not_controlled(diff: FeatureDiff) -> None:
    shifts = diff.shifts.assign(kind="interaction")
    other = replace(diff, shifts=shifts)
    assert set(other.table().survives_token) == {"not measured"}
    bare = replace(diff, confounds=pd.DataFrame())
    assert set(bare.table().survives_token) == {"not measured"}


@pytest.mark.parametrize(("direct", "verdict"), [((2, 2), CANNOT_TELL), ((2, 16), FAILS)])
def test_length_does_not_refute_what_it_cannot_tell_from_style(direct: tuple[int, int], verdict: str) -> None:
    """A feature of direct answers. Successes answer directly in six of eight responses, failures in two. Where direct
    answers are short and others long, responses of like length are of one style; where a length says nothing of the
    style, the control is a fair one, and here finds that length, not style, makes the feature."""
    rng = np.random.default_rng(0)
    records, codes = [], []
    for problem in range(30):
        for sample in range(16):
            right = sample % 2 == 0
            shows = sample // 2 < (6 if right else 2)
            length = int(direct[sample % 4 // 2]) if shows else 16
            if verdict == FAILS:
                length = 2 if shows == (sample % 3 > 0) else 16
            active = shows if verdict == CANNOT_TELL else length == 2
            codes += [np.zeros((1, 1)), rng.normal(0, 0.01, size=(length, 1)) + 1.0 * active]
            records.append({**answer(f"p{problem}", "base", right, length=length), "direct_answer": float(shows)})
    rollouts = Rollouts.from_records(records, {"behaviours": ["direct_answer"]})
    table = feature_table(rollouts, np.concatenate(codes), [("base", np.arange(len(records)))])
    found = feature_diff(table, QUICK, progress=False).confounds.set_index("control")
    assert found.verdict["length"] == verdict
    assert found["style"]["length"] == "direct_answer"
    assert (found.style_auroc["length"] >= 0.95) == (verdict == CANNOT_TELL)
    if (
        verdict == CANNOT_TELL
    ):  # of eight responses on a side six and two are short: two and two have one of like length
        assert found.overlap["length"] == pytest.approx(0.5)
