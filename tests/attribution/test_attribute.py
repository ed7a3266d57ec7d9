"""Attribution of a run from its folder: the testbed's mixed run, made tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from organism.mixed import MixedConfig, train

import tsae
from tsae.attribution.attribution import Attribution, banzhaf
from tsae.attribution.config import AttributionConfig
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.importing import import_log
from tsae.testbed.tokenizer import TOKEN_IDS

QUICK = AttributionConfig(features=(0, 3), n_fixed=18, subsets=9)


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
        recipe=run,
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
    with pytest.raises(TsaeError, match="no target 'feature 9'"):
        found.of_target("feature 9")
    with pytest.raises(TsaeError, match="no step was trained on trajectory 999"):
        found.of_sample(999)


def test_what_is_saved_is_loaded(found: Attribution, run: Path, tmp_path: Path) -> None:
    again = Attribution.load(run / "attribution")
    for name in ("targets", "samples", "groups", "problems", "segments"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))
    assert again.info == json.loads(json.dumps(found.info))
    with pytest.raises(TsaeError, match=r"holds no attribution\.json"):
        Attribution.load(tmp_path)


def test_effects_of_problems_are_found_again() -> None:
    """Planted: changes are sums of the problems' effects, with and without noise."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(12, 2))
    kept = np.array([rng.permutation(12) < 6 for _ in range(100)])
    effects, low, high, r2 = banzhaf(kept, kept @ truth)
    # Of halves that are all equally large only differences are known: the mean effect is in the intercept.
    np.testing.assert_allclose(effects - effects.mean(0), truth - truth.mean(0), atol=1e-8)
    np.testing.assert_allclose(r2, 1)
    noisy = kept @ truth + rng.normal(size=(100, 2))
    effects, low, high, r2 = banzhaf(kept, noisy)
    centred = truth - truth.mean(0)
    assert ((low - effects.mean(0) <= centred) & (centred <= high - effects.mean(0))).mean() > 0.85
    assert (r2 > 0.5).all()
    nothing = banzhaf(kept, rng.normal(size=(100, 2)))[3]
    assert (nothing < 0.2).all()


def test_a_log_that_lacks_steps_is_refused(run: Path, tmp_path: Path) -> None:
    series, log = tsae.CheckpointSeries.load(run), tsae.Rollouts.read(run / "rollouts.parquet")
    short = log.select(log.frame["step"].to_numpy() != 2)
    with pytest.raises(TsaeError, match=r"lacks step 2 .* steps 1 to 3 between the checkpoints"):
        tsae.attribute(series, short, tmp_path, recipe=run, first_token=3, progress=False)


def test_the_command_prints_both_answers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some_sae().save(tmp_path / "sae")
    log = str(run / "rollouts.parquet")
    options = ["--features", "0", "--n-fixed", "8", "--subsets", "0", "--groups", "outcome"]
    to = ["--sae", str(tmp_path / "sae"), "--to", str(tmp_path / "out")]
    main(["attribute", str(run), "--rollouts", log, *to, "--first-token", "#", *options])
    text = capsys.readouterr().out
    for part in ("adamw, learning rate 0.001", "P (first token)", "feature 0", "success", "without", "alone"):
        assert part in text
    assert Attribution.load(tmp_path / "out").groups.group.unique().tolist() == ["success", "failure"]
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "other" / "training_args.json").unlink()
    with pytest.raises(TsaeError, match="holds no settings of the training"):
        tsae.attribute(
            tsae.CheckpointSeries.load(run), tsae.Rollouts.read(log), tmp_path / "no", recipe=tmp_path / "other",
            first_token=3, progress=False,
        )  # fmt: skip
