"""Attribution of a run from its folder: the testbed's mixed run, made tiny."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from organism.mixed import MixedConfig, train

import tsae
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.attribution.credit import simulations
from tsae.attribution.credit.effects import simulate
from tsae.attribution.credit.shares import Shares, shares
from tsae.attribution.credit.simulations import kept_changes
from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.targets import NextToken, Together
from tsae.attribution.trainer.recipe import read_recipe
from tsae.base.files import is_partial
from tsae.base.seal import SEAL
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.importing import import_log
from tsae.testbed.tokenizer import TOKEN_IDS
from tsae.upkeep.verify import verify

QUICK = AttributionConfig(
    targets=("features", "outcome"),
    features=(0, 3),
    n_fixed=18,
    subsets=9,
    singles=1,
    groups=("outcome", "third of the run"),
)
FAST = replace(QUICK, targets=("outcome",), features=(), subsets=0, singles=0, groups=())
"""One or two targets, and nothing simulated but the whole."""


def some_sae() -> tsae.TemporalSAE:
    sae = tsae.TemporalSAE(96, tsae.SAEConfig(d_sae=32, k=4), site="blocks.1.hook_resid_post")
    generator = torch.Generator().manual_seed(0)
    sae.initialize(0.1 * torch.randn(96, generator=generator), generator)
    sae.threshold.fill_(0.3)
    return sae


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, with its imported log."""
    config = MixedConfig(per_band=1, steps=3, groups=3, samples=6, learning_rate=1e-3)
    folder = train(config, tsae.testbed.series().base, tmp_path_factory.mktemp("attribute") / "run", progress=False)
    import_log(folder, folder / "rollouts.parquet", progress=False)
    return folder


@pytest.fixture(scope="module")
def found(run: Path) -> Attribution:
    return tsae.attribute(
        tsae.CheckpointSeries.load(run),
        tsae.Rollouts.read(run / "rollouts.parquet"),
        run / "attribution",
        sae=some_sae(),
        first_token=TOKEN_IDS["#"],
        config=QUICK,
        progress=False,
    )


def test_shares_add_up_to_what_happened(found: Attribution) -> None:
    targets = found.targets.set_index("target")
    assert list(targets.index) == ["P (first token)", "log-likelihood, right − wrong", "feature 0", "feature 3"]
    sums = found.samples.groupby("target").share.sum()
    np.testing.assert_allclose(sums[targets.index] + targets.remainder * targets.realised, targets.realised, rtol=1e-3)
    assert abs(targets.remainder["P (first token)"]) < 0.1
    np.testing.assert_allclose(targets.after - targets.before, targets.realised, rtol=1e-6)
    np.testing.assert_allclose(targets.simulated, targets.realised, rtol=0.02, atol=1e-5)
    assert found.info["path_error"] < 0.01


def test_features_are_means_over_what_the_base_wrote(found: Attribution, run: Path) -> None:
    """Before: by the base's own codes, trajectory by trajectory, without special tokens."""
    log, sae = tsae.Rollouts.read(run / "rollouts.parquet"), some_sae()
    first = log.select(np.flatnonzero(log.frame["step"] == 1))
    model = tsae.testbed.series().base.load_model()
    special = tsae.testbed.series().base.load_tokenizer().all_special_ids
    means = []
    for row in range(len(first)):
        prompt, response = first.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        x = model(input_ids=ids, output_hidden_states=True).hidden_states[2][0, len(prompt) :]
        means.append(sae.encode(x)[~np.isin(response, special)].mean(0)[3].item())
    by_problem = pd.Series(means).groupby(first.frame.problem_id.to_numpy()).mean()
    before = found.targets.set_index("target").before["feature 3"]
    assert before == pytest.approx(by_problem.mean(), rel=0.05)  # the soft gate's difference
    assert before > 0.01


def test_kinds_add_up_where_they_divide_the_samples(found: Attribution) -> None:
    every = found.samples.groupby("target").share.sum()
    groups = found.groups.set_index(["group", "target"])
    for target, share in every.items():
        for names in (
            ("success", "failure"),
            ("first third of the run", "second third of the run", "last third of the run"),
        ):
            assert sum(groups.share[name, target] for name in names) == pytest.approx(share, rel=1e-5)
    assert groups.n["success", "feature 0"] + groups.n["failure", "feature 0"] == 54
    whole = found.targets.set_index("target").simulated
    for (_, target), row in groups.iterrows():
        assert row.effect == pytest.approx(whole[target] - row.without, abs=1e-9)


def test_both_directions(found: Attribution) -> None:
    top = found.of_target("feature 3", n=2)
    mine = found.samples[found.samples.target == "feature 3"]
    assert len(top) == 4
    assert top.share.max() == mine.share.max()
    assert top.share.min() == mine.share.min()
    moved = found.of_sample(int(top.trajectory.iloc[0]))
    assert set(moved.target) == set(found.targets.target)
    assert moved.part.is_monotonic_decreasing
    assert {"response", "advantage", "outcome", "gradient_norm"} <= set(top.columns)
    text = found.source.frame.response if found.source is not None else None
    assert text is not None
    assert top.response.tolist() == [text[row] for row in top.trajectory]
    with pytest.raises(TsaeError, match="no target 'feature 9'"):
        found.of_target("feature 9")
    with pytest.raises(TsaeError, match="no step was trained on trajectory 999"):
        found.of_sample(999)


def test_what_is_saved_is_loaded(found: Attribution, run: Path, tmp_path: Path) -> None:
    again = Attribution.load(run / "attribution")
    for name in ("targets", "samples", "facts", "groups", "problems", "segments"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))
    assert again.info == json.loads(json.dumps(found.info))
    assert found.info["recipe"].endswith("(by training_args.json)")
    assert str(run) not in (run / "attribution" / "attribution.json").read_text()
    with pytest.raises(TsaeError, match=r"holds no attribution\.json"):
        Attribution.load(tmp_path)
    replace(found, facts=found.facts.drop(columns="band")).save(tmp_path / "lacks")
    with pytest.raises(TsaeError, match=r"facts\.parquet has no column band"):
        Attribution.load(tmp_path / "lacks")
    log = tsae.Rollouts.read(run / "rollouts.parquet")
    assert "response" in Attribution.load(run / "attribution", log).of_target("feature 3", 1)
    with pytest.raises(TsaeError, match="was made from other rollouts"):
        Attribution.load(run / "attribution", log.select(np.arange(5)))


def test_effects_of_single_samples_are_simulated(found: Attribution, run: Path) -> None:
    known = found.samples[found.samples.effect.notna()]
    assert set(found.of_target("feature 3", 1).trajectory) <= set(known.trajectory)
    row = int(found.of_target("P (first token)", 1).trajectory.iloc[0])
    log = tsae.Rollouts.read(run / "rollouts.parquet")
    fixed = found.facts[found.facts.step == 1].drop_duplicates("problem_id").trajectory
    target = NextToken([log.tokens(r)[0] for r in fixed], ["all"] * len(fixed), TOKEN_IDS["#"], what="P")
    path, store = TrainingPath.of(tsae.CheckpointSeries.load(run)), GradientStore(run / "attribution" / "gradients")
    kept = np.ones((1, len(log)), dtype=bool)
    kept[0, row] = False
    again = simulate(store, path, read_recipe(run).optimiser, target, kept, progress=False)
    effect = known[(known.trajectory == row) & (known.target == "P (first token)")].effect.iloc[0]
    assert effect == pytest.approx(-again.effects[0, 0], rel=1e-3, abs=1e-7)


def test_tokens_carry_a_share(found: Attribution, run: Path) -> None:
    series = tsae.CheckpointSeries.load(run)
    for target in ("P (first token)", "feature 3"):
        sample = found.of_target(target, 1).iloc[0]
        tokens = found.tokens(int(sample.trajectory), target, series)
        assert tokens.share.sum() == pytest.approx(sample.share, rel=0.02)
        assert "".join(tokens.token).startswith(sample.response)

    def refused(given: tsae.CheckpointSeries, told: str) -> None:
        with pytest.raises(TsaeError, match=told):
            found.tokens(int(sample.trajectory), target, given)

    step, last = int(sample.step), series.last(series.runs[0])
    other = tuple(replace(c, path=last.path) if c.step == step - 1 else c for c in series)
    refused(replace(series, checkpoints=other), f"the checkpoint after step {step - 1} is not the one that")
    fewer = tuple(c for c in series if c.step != step)
    refused(replace(series, checkpoints=fewer), f"after step {step} is .* not there, then")
    with pytest.raises(TsaeError, match="the log is not at hand"):
        replace(found, source=None).tokens(int(sample.trajectory), target, series)


def test_facts_and_baselines_of_samples(found: Attribution, run: Path) -> None:
    log = tsae.Rollouts.read(run / "rollouts.parquet")
    frame = log.frame.iloc[found.facts.trajectory]
    assert found.facts.length.tolist() == frame.response_length.tolist()
    gradients = GradientStore(run / "attribution" / "gradients").step(2)
    norms = found.facts.set_index("trajectory").gradient_norm[gradients[0]]
    np.testing.assert_allclose(norms, gradients[1].norm(dim=1), rtol=1e-5)
    first = np.array([log.tokens(row)[1][0] == TOKEN_IDS["#"] for row in range(len(log))], dtype=float)
    mine = found.samples[found.samples.target == "P (first token)"]
    for (_, _), rows in log.frame.groupby(["problem_id", "step"]).indices.items():
        expected = log.frame.advantage.to_numpy()[rows] * (first[rows] - first[rows].mean())
        np.testing.assert_allclose(mine.set_index("trajectory").covariance[rows], expected, atol=1e-12)


@pytest.mark.slow
def test_a_second_call_goes_on_from_the_first(found: Attribution, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr(simulations, "simulate", refuse)
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    again = tsae.attribute(
        series, log, run / "attribution", sae=some_sae(), first_token=TOKEN_IDS["#"], config=QUICK, progress=False
    )
    pd.testing.assert_frame_equal(again.groups, found.groups)
    changed = log.with_column("advantage", -log.frame.advantage.to_numpy())
    with pytest.raises(TsaeError, match="holds an attribution of other labels"):
        tsae.attribute(series, changed, run / "attribution", first_token=3, config=FAST, progress=False)


@pytest.mark.slow
def test_a_stretch_of_the_run(run: Path, tmp_path: Path) -> None:
    """Asked for, or because the first checkpoint is a later one: the optimiser's state is missing, and that is said."""
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    asked = tsae.attribute(
        series, log, tmp_path / "a", first_token=TOKEN_IDS["#"], config=replace(FAST, steps=(1, 3)), progress=False
    )
    late = tsae.CheckpointSeries(tuple(
        replace(c, run=None) if c.step == 1 else c for c in series if c.step >= 1
    ))  # fmt: skip
    found = tsae.attribute(late, log, tmp_path / "b", first_token=TOKEN_IDS["#"], config=FAST, progress=False)
    for one in (asked, found):
        assert set(one.samples.step) == {2, 3}
        assert one.info["checkpoints"] == [1, 2, 3]
        assert set(one.segments["first"]) == {1, 2}
        assert any("starts from zero" in note for note in one.info["notes"])
        assert any("lie outside the checkpoints" in note for note in one.info["notes"])
    np.testing.assert_allclose(asked.samples.share, found.samples.share)
    token = found.of_target("P (first token)", 1).iloc[0]
    tokens = found.tokens(int(token.trajectory), "P (first token)", late)
    assert tokens.share.sum() == pytest.approx(token.share, rel=0.02)
    with pytest.raises(TsaeError, match="no checkpoint after step 4; there are 0, 1, 2, 3"):
        tsae.attribute(series, log, tmp_path / "c", first_token=3, config=replace(FAST, steps=(1, 4)), progress=False)


def test_an_attribution_is_there_until_the_next_one_is_whole(
    found: Attribution, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another target, and the process ends after its directions are on disk."""
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    to = shutil.copytree(run / "attribution", tmp_path / "attribution")
    trajectory = int(found.of_target("feature 3", 1).iloc[0].trajectory)
    tokens = found.tokens(trajectory, "feature 3", series)

    def folders() -> list[str]:
        return sorted(folder.name for folder in to.glob("directions*"))

    def again() -> Attribution:
        return tsae.attribute(series, log, to, first_token=TOKEN_IDS["#"], config=FAST, progress=False)

    with monkeypatch.context() as patch:
        patch.setattr("tsae.attribution.attribute.simulate_kept", _stopped)
        with pytest.raises(KeyboardInterrupt):
            again()
    assert len(folders()) == 2
    before = Attribution.load(to, log)
    pd.testing.assert_frame_equal(before.tokens(trajectory, "feature 3", series), tokens)
    after = again()
    assert folders() == [after.info["directions"]] != [before.info["directions"]]
    # A folder that is not tsae's stays.
    (to / "directions-mine").mkdir()
    (to / "directions-0123456789abcdef").write_text("no folder")
    assert again().info["directions"] == after.info["directions"]
    assert folders() == sorted([after.info["directions"], "directions-mine", "directions-0123456789abcdef"])


def test_directions_that_lost_their_checksums_are_refused(found: Attribution, run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    to = shutil.copytree(run / "attribution", tmp_path / "attribution")
    trajectory = int(found.of_target("feature 3", 1).iloc[0].trajectory)
    (to / found.info["directions"] / SEAL).unlink()
    with pytest.raises(TsaeError, match=r"its checksums\.json is missing.*Attribute again"):
        Attribution.load(to, log).tokens(trajectory, "feature 3", series)
    states = {finding.artefact.path.name: finding.state for finding in verify([to], progress=False)}
    assert states["attribution"] == "damaged"


def test_saving_anew_keeps_what_was_there_until_all_is_written(
    found: Attribution, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = shutil.copytree(run / "attribution", tmp_path / "attribution")
    other = replace(found, targets=found.targets.assign(realised=7.0))
    with monkeypatch.context() as patch:
        patch.setattr("tsae.base.seal.sha256", _stopped)
        with pytest.raises(KeyboardInterrupt):
            other.save(to)
    pd.testing.assert_frame_equal(Attribution.load(to).targets, found.targets)
    assert not [file for file in to.iterdir() if is_partial(file)]
    other.save(to)
    pd.testing.assert_frame_equal(Attribution.load(to).targets, other.targets)


def test_directions_lie_in_the_attribution(found: Attribution, run: Path, tmp_path: Path) -> None:
    to = replace(found, info={**found.info, "directions": "../directions"}).save(tmp_path / "attribution").folder
    with pytest.raises(TsaeError, match=r"'\.\./directions' is no folder of directions"):
        Attribution.load(to or "")


def _stopped(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_few_checkpoints_are_enough_and_said(found: Attribution, run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    ends = tsae.attribute(series.final(), log, tmp_path, first_token=TOKEN_IDS["#"], config=FAST, progress=False)
    assert any("2 checkpoints that are used for 3 steps" in note for note in ends.info["notes"])
    assert len(ends.segments) == 2
    every = found.samples[found.samples.target == "P (first token)"].share
    mine = ends.samples[ends.samples.target == "P (first token)"].share
    assert np.corrcoef(every, mine)[0, 1] > 0.9
    assert ends.targets.remainder.abs()[0] > found.targets.remainder.abs()[0]


def test_of_very_many_samples_whole_groups_are_drawn(run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    found = tsae.attribute(
        series, log, tmp_path, first_token=TOKEN_IDS["#"], config=replace(FAST, max_samples=40), progress=False
    )
    kept = sorted(file.stem for file in (tmp_path / found.info["directions"]).glob("*.safetensors"))
    assert kept == ["step-000001", "step-000002", "step-000003"]
    assert len(found.facts) == 36
    assert set(found.facts.groupby(["step", "problem_id"]).size()) == {6}
    assert any(note.startswith("Of 54 samples 36 were drawn") for note in found.info["notes"])
    assert any("misses the checkpoints" in note for note in found.info["notes"])


def test_a_log_that_lacks_steps_is_refused(run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    short = log.select(log.frame["step"].to_numpy() != 2)
    with pytest.raises(TsaeError, match=r"lacks step 2 .* steps 1 to 3 between the checkpoints"):
        tsae.attribute(series, short, tmp_path, recipe=run, first_token=3, progress=False)


def test_what_is_not_of_this_run_is_refused(run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")

    def attribute(log: tsae.Rollouts, **given: Any) -> None:
        tsae.attribute(series, log, tmp_path / "to", recipe=run, first_token=3, config=FAST, progress=False, **given)

    with pytest.raises(TsaeError, match="is not the one that the trajectories were tokenised with"):
        attribute(tsae.Rollouts(log.table, {**log.info, "tokenizer": "deadbeefdeadbeef"}, log.origin))
    ids = log.table["response_ids"].to_pylist()
    with pytest.raises(TsaeError, match="outside the model's vocabulary"):
        attribute(log.with_column("response_ids", [[10_000] * len(one) for one in ids]))
    for token in (-1, 10_000, 1.5):
        with pytest.raises(TsaeError, match="is no token id of this model; there are 0 to"):
            tsae.attribute(series, log, tmp_path / "to", first_token=token, config=FAST, progress=False)
    steps = log.frame["step"].tolist()
    with pytest.raises(TsaeError, match="1 of 54 rows have no step"):
        attribute(log.with_column("step", [None, *steps[1:]]))
    with pytest.raises(TsaeError, match=r"features=\(3, 3\) are negative, or repeated"):
        replace(QUICK, features=(3, 3))


def test_shares_that_are_not_finite_are_no_shares(run: Path) -> None:
    path = TrainingPath.of(tsae.CheckpointSeries.load(run))
    log = tsae.Rollouts.read(run / "rollouts.parquet")
    prompts = [log.tokens(0)[0]]
    twice = Together(*(NextToken(prompts, ["all"], token, what="P") for token in (5, 6)))
    with pytest.raises(TsaeError, match="two targets are named 'P"):
        shares(None, path, read_recipe(run).optimiser, twice, progress=False)  # type: ignore[arg-type]
    table = pd.DataFrame({"target": ["a", "a"], "remainder": [1.0, np.nan], "realised": [1.0, 2.0]})
    empty = np.zeros(0)
    found = Shares(["a"], empty, empty, np.zeros((0, 1)), empty, {}, np.zeros(1), table)
    assert np.isnan(found.remainder).all()  # and not 1
    assert found.realised.tolist() == [3.0]


def test_a_simulation_that_is_damaged_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, changes=np.zeros((2, 3)))
    assert kept_changes(file, (2, 3)).shape == (2, 3)
    with pytest.raises(TsaeError, match=r"a\.npz: cannot be read .*expected \(2, 4\)"):
        kept_changes(file, (2, 4))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(TsaeError, match=r"a\.npz: cannot be read"):
        kept_changes(file, (2, 3))


def test_the_command_prints_both_answers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some_sae().save(tmp_path / "sae")
    log = str(run / "rollouts.parquet")
    options = ["--features", "0", "--n-fixed", "8", "--subsets", "0", "--singles", "1", "--groups", "outcome"]
    to = ["--sae", str(tmp_path / "sae"), "--to", str(tmp_path / "out")]
    results = tmp_path / "results.json"
    asked = ["attribute", str(run), "--rollouts", log, *to, *options]
    main([*asked, "--first-token", "#", "--json", str(results)])
    text = capsys.readouterr().out
    for part in ("adamw, learning rate 0.001", "P (first token)", "feature 0", "success", "without", "alone"):
        assert part in text
    for part in ("Which of 54 samples of steps 1 to 3 moved", "How far to believe it", "meets the checkpoints to 0"):
        assert part in text
    written = json.loads(results.read_text())
    assert set(written) == {"written_by", "targets", "groups", "problems", "segments", "samples", "info"}
    assert written["samples"]["P (first token)"][0]["response"]
    with pytest.raises(SystemExit) as stopped:
        main([*asked, "--first-token", "##"])
    assert stopped.value.code == 2
    assert "'##' is 2 tokens, expected one" in capsys.readouterr().err
    assert Attribution.load(tmp_path / "out").groups.group.unique().tolist() == ["success", "failure"]
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "other" / "training_args.json").unlink()
    with pytest.raises(TsaeError, match="holds no settings of the training"):
        tsae.attribute(
            tsae.CheckpointSeries.load(run), tsae.Rollouts.read(log), tmp_path / "no", recipe=tmp_path / "other",
            first_token=3, progress=False,
        )  # fmt: skip
