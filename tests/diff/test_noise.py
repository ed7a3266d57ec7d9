"""Noise as large as an update: its norms, what it leaves alone, and the null that is read with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, random_sae, save_model, save_perturbed
from support.checkpoints import reweigh, save_resized
from support.refusals import refuses
from tsae.base import mirror
from tsae.checkpoints.drift import update_of
from tsae.checkpoints.loading import ModelLoader, weights_fingerprint
from tsae.checkpoints.record import Noise, add_noise
from tsae.cli import main
from tsae.diff.noise import noise_null
from tsae.errors import TsaeError
from tsae.report.story.statements import noise_lines
from tsae.sae.model import TemporalSAE

SITE = "blocks.1.hook_resid_post"
QUICK = tsae.DiffConfig(n_bootstrap=100, n_permutations=200, noise_draws=2, noise_problems=8)


def of_paths(base: Path, *others: Path) -> tsae.CheckpointSeries:
    runs = [tsae.Checkpoint(path.name, str(path), run=path.name, step=1) for path in others]
    return tsae.CheckpointSeries((tsae.Checkpoint("base", str(base)), *runs))


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def norms_between(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((a[name].double() - b[name].double()).norm()) for name in a}


# -- the update and the noise


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_noise_has_the_norm_of_the_update_tensor_by_tensor(architecture: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", architecture)
    series = of_paths(base, save_perturbed(base, tmp_path / "run"))
    update = update_of(series["run"])
    before, after = state(series.base.load_model()), state(series["run"].load_model())
    assert update.norms == pytest.approx(norms_between(before, after))
    total = sum(norm**2 for norm in update.norms.values()) / sum(float(w.double().norm()) ** 2 for w in before.values())
    assert update.relative == pytest.approx(total**0.5)
    noisy = update.noisy(series["run"], 1, share=0.1)
    model = noisy.load_model()
    found = norms_between(before, state(model))
    assert found == pytest.approx({name: 0.1 * norm for name, norm in update.norms.items()}, rel=1e-3)
    # In directions of its own, the same each time, another in another draw and for another run.
    changed = {name: w - before[name] for name, w in state(model).items()}
    name = max(found, key=lambda n: before[n].numel())
    trained = (after[name] - before[name]).flatten()
    assert abs(torch.cosine_similarity(changed[name].flatten(), trained, dim=0)) < 0.2
    assert all(torch.equal(w, state(model)[name]) for name, w in state(noisy.load_model()).items())
    others = [update.noisy(series["run"], 2), update.noisy(series["run"], 1, seed=1)]
    assert len({noisy.noise.seed, *(other.noise.seed for other in others)}) == 3  # type: ignore[union-attr]
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (architecture != "llama")


def test_rounding_to_16_bits_does_not_swallow_or_inflate_the_noise() -> None:
    """One unit in the last place of a bfloat16 near 1 is .0078: most of the noise below is a tenth of that."""
    layer = torch.nn.Linear(200, 100, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(1 + 0.5 * torch.rand(100, 200))
    before = layer.weight.detach().double()
    for norm in (0.05, 0.1, 3.0):
        moved = torch.nn.Linear(200, 100, bias=False, dtype=torch.bfloat16)
        moved.load_state_dict(layer.state_dict())
        add_noise(moved, Noise((("weight", norm),)))  # type: ignore[arg-type]
        assert float((moved.weight.detach().double() - before).norm()) == pytest.approx(norm, rel=0.1)


def test_noise_stays_out_of_what_is_loaded_next(series: tsae.CheckpointSeries) -> None:
    loader, run = ModelLoader(), series["easy-10"]
    plain = state(loader.load(series.base))
    noisy = update_of(run).noisy(run, 1)
    assert noisy.id == "easy-10+noise1"
    assert (noisy.run, noisy.step) == ("easy", 10)
    changed = state(loader.load(noisy))
    assert not torch.equal(changed["lm_head.weight"], plain["lm_head.weight"])
    assert all(torch.equal(w, plain[name]) for name, w in state(loader.load(series.base)).items())
    assert all(torch.equal(w, changed[name]) for name, w in state(loader.load(noisy)).items())
    assert len({weights_fingerprint(c) for c in (series.base, run, noisy, update_of(run).noisy(run, 2))}) == 4
    assert weights_fingerprint(noisy) == weights_fingerprint(update_of(run).noisy(run, 1))


def test_a_series_with_noise_is_not_saved(series: tsae.CheckpointSeries, tmp_path: Path) -> None:
    noisy = update_of(series["easy-10"]).noisy(series["easy-10"], 1)
    with pytest.raises(TsaeError, match=r"easy-10\+noise1 has noise in its weights"):
        tsae.CheckpointSeries((series.base, noisy)).save(tmp_path)
    refuses("belongs to no series", update_of, series.base)


def test_weights_that_are_not_the_bases_are_refused_in_one_paragraph(llama: Path, tmp_path: Path) -> None:
    series = of_paths(llama, save_model(tmp_path / "wide", d_model=24), save_model(tmp_path / "qwen3", "qwen3"))
    said = r"model.embed_tokens.weight is stored as .* of the shape \(20, 24\), in .* of the shape \(20, 16\)"
    refuses(rf"(?=.*{llama}).*{tmp_path / 'wide'}.*{said}", update_of, series["wide"])
    refuses(r"its weights are not those of .*: 0 are missing and \d+ new", update_of, series["qwen3"])
    broken = reweigh(save_perturbed(llama, tmp_path / "broken"), lambda w: w["lm_head.weight"][0].fill_(torch.nan))
    refuses(r"lm_head\.weight holds values that are not finite", lambda: update_of(of_paths(llama, broken)["broken"]))


# -- the null


def reading(series: tsae.CheckpointSeries, rollouts: Any, folder: Path) -> tuple[TemporalSAE, tsae.FeatureTable]:
    sae = random_sae(site=SITE, threshold=1.0, groups=(0.25, 0.75))
    store = tsae.capture(series, rollouts, [SITE], to=folder / "acts", progress=False)
    sae.save(folder / "sae")
    return sae, tsae.encode(sae, store, to=folder / "features", progress=False)


class Read(NamedTuple):
    sae: TemporalSAE
    features: tsae.FeatureTable
    folder: Path


@pytest.fixture(scope="module")
def read(series: tsae.CheckpointSeries, rollouts: Any, tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("read")
    bands = [("easy", "medium", "hard")[int(id[1:]) % 3] for id in rollouts.table["problem_id"].to_pylist()]
    return Read(*reading(series, rollouts.with_column("band", bands), folder), folder)


@pytest.mark.slow(ci=True)
def test_the_null_stands_beside_the_checkpoints_own_shift_on_the_same_rows(
    series: tsae.CheckpointSeries, read: Read, tmp_path: Path
) -> None:
    sae, features, folder = read
    (tmp_path / ".noise-store-dead" / "acts").mkdir(parents=True)  # of a process that was killed
    found = noise_null(series, sae, features, QUICK, scratch=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    info = found.info["easy-10"]
    assert (info["note"], info["draws"], info["share"], info["n_problems"], info["n_trajectories"]) == ("", 2, 1, 8, 24)
    table = found.table
    assert sorted(table.draw.unique()) == [0, 1, 2]
    own = table[table.draw == 0]
    assert info["n_moved"] == (own.q <= 0.05).sum()
    assert info["n_tested"] == len(own)
    assert info["noise_moved"] == [int((table[table.draw == i].q <= 0.05).sum()) for i in (1, 2)]
    assert info["run"]["median"] == pytest.approx(own.delta.abs().median())
    assert info["noise"]["largest"] == pytest.approx(table[table.draw > 0].delta.abs().max())
    # The run's own shift is that of the whole diff where all problems are read.
    every = replace(QUICK, noise_problems=100)
    own = noise_null(series, sae, features, every, progress=False).table.query("draw == 0").set_index("feature")
    whole = tsae.feature_diff(features, every, progress=False)
    shift = whole.table(kind="shift", part="same_trajectories", band="all", outcome="all").set_index("feature")
    np.testing.assert_allclose(own.difference, shift.difference[own.index], rtol=1e-5, atol=1e-7)
    # By folder it is the same, each time.
    again = noise_null(series, folder / "sae", folder / "features", QUICK, progress=False)
    assert again.table.equals(table)
    diff = whole.with_noise(found)
    loaded = tsae.FeatureDiff.load(diff.save(tmp_path / "diff"))
    assert loaded.noise is not None
    assert loaded.noise.equals(table)
    assert loaded.info["noise"] == json.loads(json.dumps(found.info))
    assert whole.noise is None
    line = noise_lines(loaded.info["noise"])[0]
    assert line.startswith(f"easy-10: on the same trajectories of 8 problems it moved {info['n_moved']} of")


def test_activations_of_the_noise_are_not_uploaded(
    series: tsae.CheckpointSeries, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae, features, _ = read
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_mirrors", {})
    remote = fsspec.filesystem("memory")
    remote.store.clear()
    noise_null(series, sae, features, QUICK, scratch=mirror.local("memory://bucket/diff"), progress=False)
    assert not remote.find("/bucket")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_little_noise_moves_nothing(series: tsae.CheckpointSeries, read: Read) -> None:
    sae, features, _ = read
    found = noise_null(series, sae, features, QUICK, share=0.01, progress=False)
    assert found.info["easy-10"]["noise_moved"] == [0, 0]
    assert found.info["easy-10"]["noise"]["median"] < 0.1 * found.info["easy-10"]["run"]["median"]
    assert noise_null(series, sae, features, replace(QUICK, noise_draws=0)).info == {}


def test_problems_come_from_every_band(read: Read) -> None:
    from tsae.diff.noise import _choose

    frame, config = read.features.rollouts.frame, replace(QUICK, noise_problems=9)
    chosen, others = (frame.iloc[_choose(read.features, "easy-10", "base", replace(config, seed=i))] for i in (0, 1))
    assert set(chosen.policy) == {"base"}
    assert chosen.drop_duplicates("problem_id").band.value_counts().tolist() == [3, 3, 3]
    assert set(others.problem_id) != set(chosen.problem_id)


@pytest.mark.slow(ci=True)
def test_what_cannot_have_a_null_says_so_and_the_rest_goes_on(llama: Path, tmp_path: Path, fingerprint: str) -> None:
    """A run without an update, one of another architecture, one with another vocabulary, and one that was trained."""
    same = save_perturbed(llama, tmp_path / "same", amount=0.0)
    others = save_resized(llama, tmp_path / "resized", 24), save_model(tmp_path / "qwen3", "qwen3")
    series = of_paths(llama, same, *others, save_perturbed(llama, tmp_path / "run"))
    sae, features = reading(series, make_rollouts(tokenizer=fingerprint), tmp_path)
    found = noise_null(series, sae, features, QUICK, progress=False)
    assert found.info["same"]["update_norm"] == 0
    assert "nothing was trained" in found.info["same"]["note"]
    assert "its weights are not those of" in found.info["qwen3"]["note"]
    assert found.info["run"]["note"] == found.info["resized"]["note"] == ""
    assert set(found.table.checkpoint) == {"run", "resized"}
    text = noise_lines(found.info)
    assert len(text) == 4
    assert not any("\n" in line for line in text)


def test_other_checkpoints_and_another_sae_are_refused(series: tsae.CheckpointSeries, read: Read, llama: Path) -> None:
    sae, features, _ = read
    other, run = TemporalSAE(16, sae.config, site=SITE), series["easy-10"]
    gone = tsae.CheckpointSeries((series.base, replace(run, path=str(llama.parent / "gone"))))
    renamed = tsae.CheckpointSeries((replace(series.base, id="start"), run))
    told = {**features.info, "special_ids": [*features.info["special_ids"], 7]}
    counted = replace(features, info=told)  # as with a tokenizer_config.json that was there then
    for of, by, table, said in (
        (series, other, features, "was encoded with another SAE"),
        (of_paths(llama), sae, features, "no checkpoint 'easy-10'"),
        (gone, sae, features, "gone"),  # It does not become a note in a diff that is otherwise whole.
        (renamed, sae, features, "has the base start, but the features were read by the base base"),
        (series, sae, counted, r"its special tokens are \[.*\], and were \[7, .*\] when"),
    ):
        refuses(said, noise_null, of, by, table, QUICK, progress=False)


@pytest.mark.slow(ci=True)
def test_the_command_reads_noise_where_checkpoints_are_at_hand(
    series_folder: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = read.folder
    common = ["--n-bootstrap", "100", "--n-permutations", "100", "--noise-draws", "1", "--noise-problems", "6"]
    main(["diff", "--features", str(folder / "features"), "--to", str(tmp_path / "plain"), *common])
    assert "null for changed weights: not run" in capsys.readouterr().out
    to = tmp_path / "noisy"
    given = ["--series", str(series_folder), "--sae", str(folder / "sae"), "--json", str(tmp_path / "found.json")]
    main(["diff", "--features", str(folder / "features"), "--to", str(to), *common, *given])
    assert "noise of the norm of its update" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["noise"]["easy-10"]["draws"] == 1
    diff = tsae.FeatureDiff.load(to)
    assert diff.noise is not None
    assert sorted(diff.noise.draw.unique()) == [0, 1]
    for lone, word in ((given[:2], "--series"), (given[2:4], "--sae")):
        with pytest.raises((SystemExit, TsaeError)):
            main(["diff", "--features", str(folder / "features"), "--to", str(tmp_path / "x"), *lone])
        said = capsys.readouterr()
        assert not said.err or word in said.err
