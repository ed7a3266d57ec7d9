"""Several sites and seeds in one pass: every folder is what training it alone writes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.children import exit_codes, killed_until_done, past, start, start_ranks
from support.refusals import refuses
from support.stores import CONFIG, SHORT, TRAINING, Interrupted, checkpoint, make_store, run, run_ranks, same_files
from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.training.run_folder import RunFolder
from tsae.sae.training.train import run_name, train, train_many

SITES = ["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"]
SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return make_store(tmp_path_factory.mktemp("many") / "acts")


@pytest.fixture(scope="module")
def alone(one_site: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each seed trained by itself, on the data's order of seed 0."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in SEEDS:
        training = replace(SHORT, site="x.site", seed=seed, data_seed=0)
        train(one_site, CONFIG, to=folder / run_name("x.site", seed), training=training, progress=False)
    return folder


def same_folders(a: Path, b: Path) -> None:
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for folder in a.iterdir():
        same_files(folder, b / folder.name)


def many(store: Path, folder: Path, training: TrainingConfig = SHORT) -> None:
    train_many(store, CONFIG, seeds=SEEDS, to=folder, training=training, progress=False)


@pytest.mark.slow(ci=True)
def test_sites_and_seeds_give_what_each_gives_alone(store: ActivationStore, tmp_path: Path) -> None:
    config = SAEConfig(d_sae=32, k=3)
    training = TrainingConfig(tokens=4000, batch_tokens=100, save_every_steps=15, data_seed=7)
    found = train_many(store, config, seeds=[3, 5], to=tmp_path / "many", training=training, progress=False)
    assert list(found) == [(site, seed) for site in SITES for seed in (3, 5)]
    for (site, seed), sae in found.items():
        name = f"{site}-seed{seed}"
        one = replace(training, site=site, seed=seed)
        same = train(store, config, to=tmp_path / "alone" / name, training=one, progress=False)
        assert sae.fingerprint == same.fingerprint
        assert (sae.site, sae.training_info["norms"]) == (site, same.training_info["norms"])
    same_folders(tmp_path / "many", tmp_path / "alone")
    assert len({sae.fingerprint for sae in found.values()}) == 4
    assert len({sae.training_info["norms"]["limit"] for sae in found.values()}) == 2
    in_memory = train_many(store, config, sites=SITES[1:], seeds=[5], training=training, progress=False)
    assert in_memory[SITES[1], 5].fingerprint == found[SITES[1], 5].fingerprint


def test_every_batch_is_read_once(
    one_site: ActivationStore, alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[int] = []
    epoch = Windows.epoch

    def counted(self: Windows, *args: Any, **options: Any) -> Any:
        for batch in epoch(self, *args, **options):
            read.append(batch.number)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "epoch", counted)
        run(one_site.path, tmp_path / "one", SHORT)
        alone_read = read.copy()
        read.clear()
        many(one_site.path, tmp_path / "many")
    assert read == alone_read != []
    same_folders(tmp_path / "many", alone)


def test_the_data_seed_is_that_of_the_data_alone(one_site: ActivationStore) -> None:
    def weights(**seeds: int) -> dict[str, torch.Tensor]:
        return train(one_site, CONFIG, training=replace(SHORT, **seeds), progress=False).state_dict()

    plain, same, other = weights(seed=4), weights(seed=4, data_seed=4), weights(seed=4, data_seed=5)
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert not torch.equal(plain["W_dec"], other["W_dec"])


def test_windows_at_another_site_are_those_made_for_it(store: ActivationStore) -> None:
    first = Windows(store, SITES[0], window=4, max_norm=1.2, seed=3)
    moved, made = first.at(SITES[1]), Windows(store, SITES[1], window=4, max_norm=1.2, seed=3)
    assert moved.norms == made.norms != first.norms
    assert moved.norms.outlier_share > 0
    for a, b in zip(moved.epoch(2, 100), made.epoch(2, 100), strict=True):
        assert np.array_equal(a.x, b.x)
        assert np.array_equal(a.pairs, b.pairs)
    assert first.site == SITES[0]


# --- killed and resumed


@pytest.mark.slow(ci=True)
def test_a_pass_killed_at_random_moments_ends_with_the_same_bits(one_site: ActivationStore, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    last = folder / run_name("x.site", SEEDS[-1])
    training = replace(TRAINING, tokens=10_000)
    start(many, one_site.path, tmp_path / "whole", training).join()
    past_next = past(lambda: checkpoint(last), 0.05)
    assert killed_until_done(lambda: start(many, one_site.path, folder, training), past_next) >= 2
    same_folders(folder, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2, 4, 5])
def test_a_training_that_was_left_behind_catches_up(
    one_site: ActivationStore, alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saves: int
) -> None:
    """Stopped after the first or second seed's checkpoint, of the first or second round; with one seed finished."""
    save, left = RunFolder.save, list(range(saves))

    def stopping(self: RunFolder, steps: int, tensors: Any) -> None:
        save(self, steps, tensors)
        left.pop()
        if not left:
            raise Interrupted

    folder = tmp_path / "many"
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        with pytest.raises(Interrupted):
            many(one_site.path, folder)
    found = [checkpoint(folder / run_name("x.site", seed)) for seed in SEEDS]
    assert found == {1: [10, 0, 0], 2: [10, 10, 0], 4: [20, 10, 10], 5: [20, 20, 10]}[saves]
    if saves == 2:
        training = replace(SHORT, site="x.site", seed=1, data_seed=0)
        train(one_site, CONFIG, to=folder / run_name("x.site", 1), training=training, progress=False)
    many(one_site.path, folder)
    same_folders(folder, alone)


def test_finished_trainings_are_loaded_and_others_join(one_site: ActivationStore, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    train_many(one_site, CONFIG, seeds=[0], to=folder, training=SHORT, progress=False)
    stamp = (folder / "x.site-seed0" / "sae.safetensors").stat().st_mtime_ns
    many(one_site.path, folder)
    many(one_site.path, folder)
    assert (folder / "x.site-seed0" / "sae.safetensors").stat().st_mtime_ns == stamp
    same_folders(folder, alone)
    # The order of the data is that of seed 1 now: seed 0 alone would be another training.
    with pytest.raises(TsaeError, match=r"x\.site-seed0: holds another training \(training\.data_seed was 0, is 1\)"):
        train_many(one_site, CONFIG, seeds=[0], to=folder, training=replace(SHORT, seed=1), progress=False)


def test_a_kill_between_the_last_checkpoint_and_the_end(
    one_site: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = replace(SHORT, save_every_steps=25)
    run(one_site.path, tmp_path / "whole", training)

    def stopping(self: RunFolder, model: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", stopping)
        with pytest.raises(Interrupted):
            run(one_site.path, tmp_path / "sae", training)
    assert checkpoint(tmp_path / "sae") == 25
    run(one_site.path, tmp_path / "sae", training)
    same_files(tmp_path / "sae", tmp_path / "whole")


# --- progress and refusals


@pytest.mark.slow(ci=True)
def test_one_bar_counts_all_trainings(
    store: ActivationStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    training = TrainingConfig(tokens=4000, batch_tokens=100)
    train_many(store, SAEConfig(d_sae=32, k=3), seeds=[0, 1], to=tmp_path, training=training)
    shown = capsys.readouterr().err.split("\r")
    assert "16.0k/16.0k" in shown[-1]
    assert re.search(r"FVE -?\d\.\d{3}, alive \d+\.\d%", shown[-1])
    train_many(store, SAEConfig(d_sae=32, k=3), seeds=[0, 1], to=tmp_path, training=training)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_trained_is_refused(store: ActivationStore, tmp_path: Path) -> None:
    def refused(message: str, *, training: TrainingConfig = SHORT, **asked: Any) -> None:
        refuses(message, train_many, store, CONFIG, to=tmp_path / "many", training=training, progress=False, **asked)
        assert not (tmp_path / "many").exists()

    refused("1 sites and 0 seeds make no training", sites=SITES[:1], seeds=[])
    refused("no site 'y'; there are blocks.1", sites=["y"])
    assert run_name("../x", 0) == "..-x-seed0"


# --- several processes


@pytest.mark.slow
def test_two_processes_train_several(one_site: ActivationStore, tmp_path: Path) -> None:
    assert exit_codes(start_ranks(2, many, one_site.path, tmp_path / "many")) == [0, 0]
    training = replace(SHORT, site="x.site", seed=2, data_seed=0)
    assert run_ranks(one_site.path, tmp_path / "two", CONFIG, training) == [0, 0]
    same_files(tmp_path / "many" / "x.site-seed2", tmp_path / "two")


# --- the command line


@pytest.mark.slow(ci=True)
def test_seeds_from_the_command_line(
    one_site: ActivationStore, alone: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Trained in one command, matched in the next, which is given all of them."""
    from tsae.cli import main
    from tsae.sae.quality.stability import Stability, stability

    options = ["--tokens", 5000, "--batch-tokens", 200, "--learning-rate", 3e-3, "--save-every-steps", 10]
    options += ["--d-sae", 128, "--k", 3, "--dead-after-tokens", 400, "--store", one_site.path]
    main(list(map(str, ["train", "--to", tmp_path / "many", "--seeds", *SEEDS, *options])))
    same_folders(tmp_path / "many", alone)
    said = capsys.readouterr().out
    folders = [tmp_path / "many" / f"x.site-seed{seed}" for seed in SEEDS]
    assert all(f"wrote {folder}: TemporalSAE" in said for folder in folders)
    assert said.count("left out 0.00% of tokens") == 3
    main(list(map(str, ["evaluate", "--sae", folders[0], "--store", one_site.path, "--seeds", *folders])))
    assert f"wrote {folders[0] / 'stability.json'}" in capsys.readouterr().out
    found, expected = Stability.load(folders[0]), stability(folders[0], folders[1:])
    assert found.others == tuple(map(str, folders[1:]))
    np.testing.assert_allclose(found.cosine, expected.cosine, atol=1e-4)
    main(list(map(str, ["train", "--to", tmp_path / "sites", "--sites", "x.site", *options])))
    same_files(tmp_path / "sites" / "x.site-seed0", alone / "x.site-seed0")
