"""One set of rows a contrast, on which sizes, controls, nulls and plain directions rest, and one main part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.builders import EOS, feature_table, write_store
from support.refusals import refuses
from support.results import answer, rendered
from tsae.activations.store import ActivationStore
from tsae.commands.causes import Causal, opposed_features
from tsae.diff.baselines import baselines
from tsae.diff.comparisons import Comparison, Rows, comparisons, main_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.effects import null_counts, null_of, problem_effects, question
from tsae.diff.effects import tested_features as features_tested
from tsae.diff.feature_diff import feature_diff
from tsae.diff.inference import moved_p, q_values
from tsae.features.feature_table import FeatureTable
from tsae.report.terminal import print_findings
from tsae.rollouts.table import Rollouts

QUICK = DiffConfig(n_bootstrap=200, n_permutations=1000)
BANDS = ("easy", "medium", "hard")


def log(
    readers: tuple[str, ...] = ("base", "run"),
    *,
    moved: dict[str, np.ndarray] | None = None,
    n_problems: int = 60,
    common: int = 0,
    n_features: int = 8,
    outcome: Any = lambda band: 0.0,
    seed: int = 0,
) -> FeatureTable:
    """All readers read everything, and nearly every problem is one policy's own, as in a trainer's log.

    Args:
        moved: what a reader adds to the features, (n_features,).
        common: problems that all policies answered.
        outcome: band -> what successes have more of, (n_features,).
    """
    rng = np.random.default_rng([seed, 11])
    level = rng.normal(3, 1, size=(n_problems, n_features))
    records, values = [], []
    for problem in range(n_problems):
        band = BANDS[problem % 3]
        for policy in readers if problem < common else (readers[problem % len(readers)],):
            for _ in range(6):
                right = bool(rng.random() < {"easy": 0.7, "medium": 0.5, "hard": 0.3}[band])
                value = level[problem] + outcome(band) * right + 0.7 * rng.normal(size=n_features)
                values.append(np.maximum(value, 0))
                response = [*rng.integers(2, 9, int(rng.integers(1, 6))).tolist(), EOS]
                records.append(answer(f"p{problem}", policy, right, response_ids=response, band=band))
    codes = []
    for reader in readers:
        for record, value in zip(records, values, strict=True):
            read = np.maximum(value + (moved or {}).get(reader, 0.0) + 0.05 * rng.normal(size=n_features), 0)
            n = len(record["response_ids"]) - 1
            codes += [np.zeros((1, n_features)), np.tile(read, (n, 1)), np.full((1, n_features), 9.0)]
    rows = np.arange(len(records))
    return feature_table(Rollouts.from_records(records), np.concatenate(codes), [(r, rows) for r in readers])


@pytest.mark.parametrize("common", [pytest.param(7, marks=pytest.mark.slow), 8])
def test_controls_and_plain_directions_name_the_rows_of_their_contrast(common: int, tmp_path: Path) -> None:
    """Without enough problems in common everything that was read stands for a reader; else its own trajectories do."""
    table = log(common=common)
    rows = Rows.of(table, QUICK)
    assert rows.pooled == (common < QUICK.min_problems)
    diff = feature_diff(table, QUICK, progress=False)
    keys = ["kind", "checkpoint", "part", "band", "outcome"]
    of_contrast = diff.contrasts.set_index(keys)["rows"]
    drawn = diff.contrasts[(diff.contrasts.note == "") & (diff.contrasts.outcome == "all")]
    controlled = drawn[drawn.part.isin(["total", "success_minus_failure"])].set_index(keys)
    of_control = diff.confounds.drop_duplicates([*keys, "control"]).set_index(keys)
    assert set(of_control.index) == set(controlled.index)
    assert {"outcome", "interaction"} <= set(controlled.index.get_level_values("kind"))
    assert (of_control["rows"] == of_contrast.reindex(of_control.index)).all()
    for key, of in of_control.groupby(level=list(range(5))):
        assert sorted(of.control) == ["length", "position", "token"]
        # Every problem has a token at like positions, and tokens: none is left out there.
        n = of[of.control != "length"].n_problems
        assert (n == diff.contrasts.set_index(keys).n_problems[key]).all(), key
    interactions = diff.contrasts[diff.contrasts.kind == "interaction"]
    for row in interactions.itertuples():
        bands = [of_contrast["outcome", row.checkpoint, row.part, band, "all"] for band in row.band.split("-")]
        assert row.rows == "+".join(bands)
    # Every contrast has as many trajectories and tokens as the rows that it names.
    for of, found in zip(comparisons(table, rows, QUICK), diff.contrasts.itertuples(), strict=True):
        assert of.fingerprint == found.rows
        mine = np.unique(np.concatenate([of.a, of.b]))
        lengths = table.rollouts.lengths("response_ids")[table.trajectory[mine]] - 1  # without <eos>
        assert (found.n_trajectories, found.n_tokens) == (len(mine), lengths.sum())
        assert found.n_problems <= len(np.unique(rows.problem[mine]))

    store = store_of(tmp_path / "acts", table)
    table.info["sae"]["site"] = "x.site"
    plain = baselines(table, store, QUICK)
    main_part = "same_trajectories" if common < QUICK.min_problems else "total"
    assert set(plain.part) == {main_part, "success_minus_failure"}
    for row in plain.itertuples():
        key = (row.kind, row.checkpoint, row.part, "all", "all")
        assert row.rows == of_contrast[key]
        assert row.n_problems == diff.contrasts.set_index(keys).n_problems[key]


def store_of(folder: Path, table: FeatureTable) -> ActivationStore:
    """Random activations of the table's tokens, in its order."""
    readers: dict[str, Any] = {}
    for number, reader in enumerate(table.readers):
        rows = np.flatnonzero(table.reader == number)
        offsets = table.row_offsets[rows[0] : rows[-1] + 2]
        ids = table.token_ids[offsets[0] : offsets[-1]]
        x = np.random.default_rng(number).normal(size=(len(ids), 4))
        readers[reader] = (None, [(x, ids, np.diff(offsets), table.trajectory[rows])])
    return write_store(folder, table.rollouts, readers, site="x.site", special=table.info["special_ids"])


# --- sizes


def test_sizes_are_in_deviations_over_base_trajectories() -> None:
    """Against loops over rows; features that the base hardly has are measured within base and checkpoint."""
    table = log(common=12, moved={"run": np.array([0.4, 0, 0, 0, 0, 1, 1, 0])}, outcome=lambda band: 0.5)
    codes = table.codes.toarray()
    frame = table.rollouts.frame.iloc[table.trajectory[table.row_of_token]]
    mine = (table.reader[table.row_of_token] == 0) & (frame.policy == "base").to_numpy()
    few = frame.problem_id.isin(["p0", "p1", "p2", "p3"]).to_numpy()
    codes[mine & ~few, 5] = 0  # active at base in four problems
    codes[mine, 6] = 0  # nowhere
    codes[mine, 7] = 0.5  # and everywhere the same
    without = table.trajectory % 3 == 0  # a token of the span: they do not count
    ids = np.where(without[table.row_of_token], EOS, table.token_ids)
    table = replace(table, codes=type(table.codes)(codes), token_ids=ids)
    diff = feature_diff(table, QUICK, progress=False)
    own: dict[str, list[np.ndarray]] = {"base": [], "run": []}
    records = table.rollouts.table.to_pylist()
    for row in range(table.n_rows):
        record = records[table.trajectory[row]]
        reader = table.readers[table.reader[row]]
        if record["policy"] == reader and not without[row]:
            tokens = slice(int(table.row_offsets[row]) + 1, int(table.row_offsets[row + 1]) - 1)
            own[reader].append(table.codes[tokens].toarray().mean(0, dtype=np.float64))
    base, run = (np.std(own[reader], axis=0, ddof=1) for reader in ("base", "run"))
    freedom = [len(own["base"]) - 1, len(own["run"]) - 1]
    pooled = np.sqrt((freedom[0] * base**2 + freedom[1] * run**2) / sum(freedom))
    means = [np.mean(own[reader], axis=0) for reader in ("base", "run")]
    floor = np.sqrt((base**2 + run**2) / 2 + (means[1] - means[0]) ** 2 / 4) / 2
    for checkpoint, theirs, least in (("run", pooled, floor), ("base", base, base / 2)):
        shifts = diff.shifts[diff.shifts.checkpoint == checkpoint]
        assert set(shifts.kind) == ({"outcome", "interaction"} | ({"shift"} if checkpoint == "run" else set()))
        silent = shifts.feature >= 5
        deviation = np.where(silent, theirs[shifts.feature], base[shifts.feature])
        floored = least[shifts.feature] > deviation
        assert (shifts.scale == np.where(floored, "floored", np.where(silent, "pooled", "base"))).all()
        deviation = np.maximum(deviation, least[shifts.feature])
        for size, of in (("delta", "difference"), ("delta_low", "low"), ("delta_high", "high")):
            np.testing.assert_allclose(shifts[size] * deviation, shifts[of], rtol=1e-4, atol=1e-7)
    assert {5, 6, 7} <= set(diff.shifts.feature[diff.shifts.checkpoint == "run"])
    # What the base has nowhere, or everywhere alike, varies in none of its own contrasts.
    assert not {6, 7} & set(diff.shifts.feature[diff.shifts.checkpoint == "base"])
    np.testing.assert_allclose(base[:5], Rows.of(table, QUICK).scales["run"].deviation[:5], rtol=1e-5)


@pytest.mark.slow(ci=True)
def test_noise_in_the_weights_differs_and_moves_nothing() -> None:
    """A reader whose activations are the base's and a little more or less on every trajectory, as with weights that
    noise changed, and a third that was trained."""
    table = log(("base", "noise", "run"), moved={"run": np.array([0.5, -0.5, 0, 0, 0, 0, 0, 0])}, n_problems=120)
    of_token = table.reader[table.row_of_token]
    codes = table.codes.toarray()
    rng = np.random.default_rng(0)
    noise = codes[of_token == 0] * (1 + 0.004 * rng.choice([-1, 1], 8) + 0.002 * rng.normal(size=(1, 8)))
    codes[of_token == 1] = noise
    diff = feature_diff(replace(table, codes=type(table.codes)(codes)), QUICK, progress=False)
    shift = {
        c: diff.contrast(kind="shift", checkpoint=c, part="same_trajectories", band="all") for c in diff.checkpoints
    }
    assert shift["noise"].n_differs == 8
    assert shift["noise"].n_discoveries == 0
    assert shift["run"].n_discoveries == 2
    assert not diff.table(checkpoint="noise", kind="shift").moved.any()
    assert diff.top().feature.tolist() in ([0, 1], [1, 0])
    assert "noise: 0 of 8" in repr(diff)
    shown = repr(diff.top()).splitlines()
    assert len(shown[0].split()) == len(shown[1].split()), "rows have no numbers of their own"


# --- nulls


def comparison(table: FeatureTable, **keys: str) -> tuple[Rows, Comparison]:
    rows = Rows.of(table, QUICK)
    (found,) = (
        of
        for of in comparisons(table, rows, QUICK)
        if all(getattr(of, name) == value for name, value in {"outcome": "all", **keys}.items())
    )
    return rows, found


def test_a_null_splits_the_second_side_of_its_own_contrast() -> None:
    table = log(common=24)
    for keys in (
        {"part": "total", "band": "hard"},
        {"part": "total", "band": "all", "outcome": "success"},
        {"part": "policy", "band": "all"},
        {"part": "representation", "band": "easy"},
    ):
        rows, of = comparison(table, kind="shift", checkpoint="run", **keys)
        null = null_of(rows, of, np.random.default_rng(0))
        for side in (null.a, null.b):
            assert set(side) <= set(of.b)
            assert np.unique(rows.problem[side]).tolist() == null.problems.tolist()
            if of.band != "all":
                assert set(rows.band[side]) == {of.band}
            if of.outcome != "all":
                assert set(rows.outcome[side]) == {of.outcome}
        assert not set(null.a) & set(null.b)
        # Every trajectory of a problem with two of them is in one of the halves, which are as large as each other.
        n = np.bincount(rows.problem[of.b])
        assert null.problems.tolist() == np.flatnonzero(n >= 2).tolist()
        assert len(null.a) + len(null.b) == n[n >= 2].sum()
        halves = [np.bincount(rows.problem[side], minlength=len(n)) for side in (null.a, null.b)]
        assert set((halves[0] - halves[1])[n >= 2]) <= {0, 1}


def test_a_null_permutes_outcomes_within_problem_and_band() -> None:
    table = log(common=24)
    for band in ("all", "hard"):
        rows, of = comparison(table, kind="outcome", checkpoint="base", band=band)
        null = null_of(rows, of, np.random.default_rng(0))
        assert sorted([*null.a, *null.b]) == sorted([*of.a, *of.b])
        for side, theirs in ((null.a, of.a), (null.b, of.b)):
            np.testing.assert_array_equal(np.bincount(rows.problem[side]), np.bincount(rows.problem[theirs]))
            assert set(side) != set(theirs)
        assert band == "all" or set(rows.band[null.a]) == {band}
    rows, of = comparison(table, kind="interaction", checkpoint="base", band="hard-medium")
    null = null_of(rows, of, np.random.default_rng(0))
    assert null.bands is not None
    for found, theirs in zip(null.bands, of.bands or (), strict=True):
        assert sorted([*found.a, *found.b]) == sorted([*theirs.a, *theirs.b])
        assert set(rows.band[found.a]) == {theirs.band}


@pytest.mark.slow(ci=True)
def test_what_one_band_has_does_not_reach_the_null_of_another() -> None:
    """Only hard problems have outcome effects, and large ones: permuted, they are gone in every contrast."""
    effect = np.r_[3.0, -3.0, 2.0, np.zeros(5)]
    table = log(n_problems=90, outcome=lambda band: effect * (band == "hard"))
    diff = feature_diff(table, QUICK, progress=False)
    outcome = diff.contrasts[(diff.contrasts.kind == "outcome") & (diff.contrasts.checkpoint == "base")].set_index(
        "band"
    )
    assert outcome.n_discoveries[["all", "hard"]].tolist() == [3, 3]
    assert outcome.n_discoveries[["easy", "medium"]].sum() == 0
    assert outcome.n_null.max() <= 0.4
    interaction = diff.contrast(kind="interaction", checkpoint="base", band="hard-medium")
    assert interaction.n_discoveries == 3
    assert interaction.n_null <= 0.4
    counted = diff.contrasts[diff.contrasts.note == ""]
    assert counted.n_null.notna().all()
    assert (counted.null_any <= counted.n_null + 1e-12).all()
    assert diff.contrasts.n_null[diff.contrasts.note != ""].isna().all()


def test_where_trajectories_cannot_be_split_there_is_no_null() -> None:
    table = log(common=24)
    prompts = replace(QUICK, span="prompt")
    rows = Rows.of(table, prompts)
    assert np.isnan(null_counts(rows, comparisons(table, rows, prompts), prompts)).all()
    diff = feature_diff(table, prompts, progress=False)
    assert diff.contrasts.n_null.isna().all()
    # Nor where problems have one trajectory each.
    rows, of = comparison(table, kind="shift", checkpoint="run", part="total", band="all")
    first = np.unique(rows.problem[of.b], return_index=True)[1]
    assert np.isnan(null_counts(rows, [replace(of, b=of.b[first])], QUICK)).all()


@pytest.mark.parametrize(("least", "many"), [(0.0, 8), (0.05, 1)])
def test_null_discoveries_are_averaged_over_the_repeats(
    least: float, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against draws of all features one by one, at a q that lets chance through."""
    monkeypatch.setattr("tsae.diff.effects._MANY", many)
    table, loose = log(n_problems=40), replace(QUICK, q=0.6, minimum_effect=least)
    rows = Rows.of(table, loose)
    found = [of for of in comparisons(table, rows, loose) if not of.note]
    seen = set()
    for of, (mean, share) in zip(found, null_counts(rows, found, loose, repeats=4), strict=True):
        counted = []
        for repeat in range(4):
            null = null_of(rows, of, np.random.default_rng([loose.seed, 4, repeat]))
            if len(null.problems) < loose.min_problems:
                continue
            effects = [problem_effects(rows, part) for part in null.bands or (null,)]
            feature = features_tested(rows, null, effects, loose)
            p = moved_p(question(rows, null, effects, feature, loose), loose)
            counted.append(int((q_values(p) <= loose.q).sum()))
        if not counted:
            assert np.isnan([mean, share]).all()
        elif of.kind != "shift" or of.checkpoint == "run":  # whose halves are made first
            assert mean == pytest.approx(sum(counted) / len(counted))
            assert share == pytest.approx(sum(n > 0 for n in counted) / len(counted))
            seen.update(counted)
    assert {0, 1, 2} <= seen


# --- one main part


@pytest.fixture(scope="module")
def one_epoch() -> Any:
    """Two runs that moved features in opposite directions, in a log where every problem came once."""
    push = np.array([0.9, -0.8, 0, 0, 0, 0, 0, 0])
    table = log(("base", "up", "down"), moved={"up": push, "down": -push}, n_problems=60)
    return feature_diff(table, QUICK, token_strings=[f"t{i}" for i in range(20)], progress=False)


@pytest.mark.slow(ci=True)
def test_a_one_epoch_run_speaks_of_what_it_has(one_epoch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    diff = one_epoch
    assert set(diff.contrasts[diff.contrasts.kind == "shift"].part) == {"same_trajectories"}
    assert [diff.main_part(c) for c in ("up", "down")] == ["same_trajectories"] * 2
    assert diff.main_part("base") is None
    assert diff.opposed("up", "down").index.tolist() == [0]
    assert diff.opposed("down", "up").index.tolist() == [1]
    assert set(diff.top().feature) == {0, 1}
    assert sorted(diff.main_shift("up", discoveries=True).feature) == [0, 1]
    print_findings(diff)
    said = capsys.readouterr().out
    assert "Raised by up, lowered by down: 1 feature" in said
    assert "Raised by down, lowered by up: 1 feature" in said
    assert "On the same trajectories, 2 of 8 tested features moved" in " ".join(said.split())
    page = rendered(diff)
    assert "up raised and down lowered 1 feature, most clearly" in page
    for nothing in ("Nothing was discovered", "Nothing was found", "No feature was raised by one run"):
        assert nothing not in page


def test_the_causal_command_finds_opposed_features_of_a_one_epoch_run(one_epoch: Any, tmp_path: Path) -> None:
    folder, features = one_epoch.save(tmp_path / "diff"), one_epoch.source.save(tmp_path / "features")

    def chosen(**more: Any) -> list[int]:
        unused = {"series": (), "checkpoint": "up", "sae": tmp_path, "features": features, "to": tmp_path}
        return opposed_features(Causal(**{**unused, "diff": folder, **more}))

    assert chosen(raised="up", lowered="down") == [0]
    assert chosen(raised="down", lowered="up") == [1]
    refuses("no feature was raised by up and lowered by up", chosen, raised="up", lowered="up")
    of_other = {**one_epoch.source.info, "sae": {**one_epoch.source.info["sae"], "weights": "other"}}
    replace(one_epoch.source, info=of_other).save(features)
    replace(one_epoch, info={**one_epoch.info, "sae": {"weights": "mine"}}).save(folder)
    refuses(r"drawn from other features \(of other sae\)", chosen, raised="up", lowered="down")


@pytest.mark.slow(ci=True)
def test_runs_with_and_without_their_own_trajectories_are_opposed_on_the_same_text() -> None:
    """One run answered the base's problems, the other none of them."""
    push = np.array([0.9, -0.8, 0, 0, 0, 0, 0, 0])
    table = log(("base", "up", "down"), moved={"up": push, "down": -push}, common=15)
    frame = table.rollouts.frame
    other = np.where(frame.policy == "down", "somebody", frame.policy)
    table = replace(table, rollouts=table.rollouts.with_column("policy", other.tolist()))
    diff = feature_diff(table, QUICK, progress=False)
    assert [diff.main_part(c) for c in ("up", "down")] == ["total", "same_trajectories"]
    assert diff.opposed("up", "down").index.tolist() == [0]
    rows = Rows.of(table, QUICK)
    for checkpoint in ("up", "down"):
        of_main = main_comparisons(comparisons(table, rows, QUICK), checkpoint)
        assert {of.part for of in of_main if of.kind == "shift"} == {diff.main_part(checkpoint)}


@pytest.mark.parametrize("bands", ["easy", {"refused": "no"}, {"reference": None, "separate": False, "refused": True}])
def test_damaged_facts_on_bands_are_refused(bands: Any) -> None:
    """What says whether bands can be compared must be as it was written."""
    table = log(n_problems=8)
    table.rollouts.info["bands"] = bands
    refuses("not describe in a known way", lambda: comparisons(table, Rows.of(table, QUICK), QUICK))
    refuses("not describe in a known way", feature_diff, table, QUICK, progress=False)


def test_a_feature_that_the_base_hardly_has_gets_a_size_that_people_can_hold() -> None:
    """By hand. Base: means of 0 and 0.002 in turn, so 0.001 on average. Run: 0.2 and 0.6 in turn. Over both, the
    variance is (v₀ + v₁) / 2 + (0.4 − 0.001)² / 4, with v₀ = 0.001² · 24 / 23 and v₁ = 0.2² · 24 / 23: 0.0209 + 0.0398
    = 0.0607. So the deviation is 0.246, its half 0.123, and Δ = 0.399 / 0.123 = 3.24 in place of 391."""
    records = [answer(f"p{p}", policy, True) for policy in ("base", "run") for p in range(24)]
    rollouts = Rollouts.from_records(records)
    values = np.concatenate([np.tile([0.0, 0.002], 12), np.tile([0.2, 0.6], 12)])
    codes = np.zeros((96, 1))  # a token of the prompt and one of the response
    codes[1::2, 0] = values
    readers = [("base", np.arange(48)), ("run", np.arange(48))]
    table = feature_table(rollouts, np.concatenate([codes, codes]), readers)
    diff = feature_diff(table, QUICK, progress=False)
    (row,) = diff.table(kind="shift", part="total", outcome="all").to_dict("records")
    unit = np.sqrt((24 / 23 * (0.001**2 + 0.2**2)) / 2 + 0.399**2 / 4) / 2
    assert row["delta"] == pytest.approx(0.399 / unit, rel=1e-5) == pytest.approx(3.24, abs=0.01)
    assert row["scale"] == "floored"
    assert (row["active_reference"], row["active"]) == pytest.approx((0.5, 1.0))
    assert row["auroc"] == 1.0
