"""Long trainings: killed and resumed, refused, on a full disk, on two processes, logged."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.builders import overwrite, synthetic_store
from support.children import killed_until_done, past, run_tsae, start
from support.refusals import refuses
from support.stores import (
    CONFIG,
    SHORT,
    TRAINING,
    WIDTH,
    checkpoint,
    edit,
    interrupted,
    make_store,
    run,
    run_ranks,
    same_files,
)
from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.base.artefact import write_record
from tsae.errors import TsaeError
from tsae.features.encode import encode
from tsae.sae.config import TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import evaluate
from tsae.sae.training import run_folder
from tsae.sae.training.run_folder import RunFolder
from tsae.sae.training.train import train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return make_store(tmp_path_factory.mktemp("long") / "acts")


@pytest.fixture(scope="module")
def whole(store: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "sae"
    run(store.path, folder)
    return folder


# --- killed and resumed


@pytest.mark.slow(ci=True)
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(store: ActivationStore, tmp_path: Path) -> None:
    folder = tmp_path / "sae"
    start(run, store.path, tmp_path / "whole", TRAINING).join()
    # At any moment up to the next few checkpoints.
    past_next = past(lambda: checkpoint(folder), 0.15)
    assert killed_until_done(lambda: start(run, store.path, folder, TRAINING), past_next) >= 3
    same_files(folder, tmp_path / "whole")


def run_until_write(store: Path, folder: Path, n: int) -> None:
    """Train, and die by SIGKILL right before the n-th operation on files."""
    left = itertools.count(1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (run_folder, "save_file"),
        (run_folder, "write_record"),
        (run_folder, "flush_to_disk"),
        (os, "replace"),
        (os, "unlink"),
        (os, "rmdir"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "open"),
        (TemporalSAE, "save"),
    ):
        setattr(owner, name, deadly(getattr(owner, name)))
    run(store, folder)


@pytest.mark.slow(ci=True)
def test_a_kill_before_any_operation_on_files_leaves_a_run_that_goes_on(
    store: ActivationStore, whole: Path, tmp_path: Path
) -> None:
    """One run is killed before its 1st, 4th, 7th … operation, every time from where the last one left it."""
    folder = tmp_path / "sae"
    for n in itertools.count(1, 3):
        child = start(run_until_write, store.path, folder, n)
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert n > 10
    same_files(folder, whole)


def test_the_state_is_all_that_the_next_step_depends_on(
    store: ActivationStore, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the second epoch and in the third: an epoch is 7 batches."""
    for saves in (1, 2):
        folder = interrupted(monkeypatch, store, tmp_path / str(saves), saves)
        assert len(list((folder / "checkpoint").iterdir())) == 1  # the older one is removed
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 999, "loss": 1.0}\n{"step": 10')
        run(store.path, folder)
        assert steps == [0]
        same_files(folder, whole)


def test_bfloat16_goes_on_with_the_same_bits(
    store: ActivationStore, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = replace(SHORT, precision="bfloat16")
    run(store.path, tmp_path / "whole", training)
    folder = interrupted(monkeypatch, store, tmp_path / "sae", training=training)
    run(store.path, folder, training)
    same_files(folder, tmp_path / "whole")
    assert (folder / "sae.safetensors").read_bytes() != (whole / "sae.safetensors").read_bytes()


def test_batches_are_skipped_without_being_read(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(store, "x.site", window=4)
    every = list(windows.epoch(3, 100))
    assert [batch.number for batch in every] == list(range(len(every)))
    read: list[int] = []
    gather = windows._gather
    monkeypatch.setattr(windows, "_gather", lambda rows, memory: read.append(len(rows)) or gather(rows, memory))
    rest = list(windows.epoch(3, 100, start=5))
    assert len(read) == len(rest) == len(every) - 5
    assert all(
        np.array_equal(a.x, b.x) and np.array_equal(a.pairs, b.pairs) for a, b in zip(rest, every[5:], strict=True)
    )
    assert list(windows.epoch(3, 100, start=len(every))) == []


# --- finished, changed, damaged


def test_a_finished_training_is_loaded(store: ActivationStore, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsae.sae.training.train._train", None)  # would be called to train
    stamp = (whole / "sae.safetensors").stat().st_mtime_ns
    again = train(store, CONFIG, to=whole, training=replace(SHORT, save_every_steps=50), progress=False)
    assert (whole / "sae.safetensors").stat().st_mtime_ns == stamp
    assert again.config == CONFIG
    assert not again.W_dec.requires_grad
    with pytest.raises(TsaeError, match=r"holds another training \(sae\.k was 3, is 4\).*Give another folder"):
        train(store, replace(CONFIG, k=4), to=whole, training=SHORT, progress=False)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("sae", "training", "message"),
    [
        ({"k": 4}, {}, r"\(sae\.k was 3, is 4\)"),
        ({}, {"precision": "bfloat16"}, r"\(training\.precision was float32, is bfloat16\)"),
        ({}, {"learning_rate": None}, r"\(training\.learning_rate was 0\.003, is null\)"),
        (
            {"temporal": "l1"},
            {"partner": "earlier"},
            r"\(sae\.temporal was contrastive, is l1; training\.partner was previous, is earlier\)",
        ),
        ({}, {"balance": ()}, r'\(training\.balance was \["reader"\], is \[\]\)'),
        ({}, {"tokens": 6000, "seed": 1}, r"\(training\.tokens was 5000, is 6000; training\.seed was 0, is 1; "),
    ],
)
def test_a_changed_config_is_refused(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sae: Any, training: Any, message: str
) -> None:
    folder = interrupted(monkeypatch, store, tmp_path / "sae")
    config, changed = replace(CONFIG, **sae), replace(SHORT, **training)
    with pytest.raises(TsaeError, match=message) as error:
        train(store, config, to=folder, training=changed, progress=False)
    assert "resume=" in str(error.value)
    assert checkpoint(folder) == 10
    anew = train(store, config, to=folder, training=replace(changed, resume="never"), progress=False)
    expected = train(store, config, training=changed, progress=False)
    assert all(torch.equal(value, anew.state_dict()[name]) for name, value in expected.state_dict().items())
    assert not (folder / "checkpoint").exists()


def test_changed_data_are_refused(store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = interrupted(monkeypatch, store, tmp_path / "sae")

    def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> ActivationStore:
        other = Path(shutil.copytree(store.path, tmp_path / name))
        edit(other, change)
        return ActivationStore(other)

    for other, message in (
        (changed("rollouts", lambda m: m.update(rollouts="beef")), "not the rollouts that were captured"),
        (changed("dtype", lambda m: m.update(dtype="float16")), r"inputs\.dtype was float32, is float16"),
        (
            changed("weights", lambda m: m["readers"][0].update(weights="b1")),
            r"inputs\.readers\.base\.weights was null",
        ),
        (changed("reader", lambda m: m["readers"][0].update(id="sft")), r"inputs\.readers\.sft was absent"),
        (changed("config", lambda m: m.update(config={"plan": "all"})), r"inputs\.capture\.plan was absent"),
    ):
        refuses(message, train, other, CONFIG, to=folder, training=SHORT, progress=False)
    # The same activations in another place are the same data.
    moved = ActivationStore(shutil.copytree(store.path, tmp_path / "moved"))
    train(moved, CONFIG, to=folder, training=SHORT, progress=False)


@pytest.mark.parametrize("what", ["a model", "rows of a trainer", "an SAE that was copied", "another SAE"])
def test_what_no_training_here_wrote_stays(what: str, store: ActivationStore, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sae"
    folder.mkdir()
    if what == "a model":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif what == "rows of a trainer":
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    else:
        TemporalSAE.load(whole).save(folder)
    if what == "another SAE":
        (folder / "metrics.jsonl").write_text('{"reward": 1}\n')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refuses("which no training here wrote", run, store.path, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_damaged_and_foreign_folders_are_refused(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = interrupted(monkeypatch, store, tmp_path / "sae")
    state = folder / "checkpoint" / "0000000010" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-5])
    refuses(r"state\.safetensors: is damaged: its bytes have changed.*set resume=", run, store.path, folder)
    whole = (state.parent / "state.json").read_text()
    (state.parent / "state.json").write_text(whole.replace('"state.safetensors": "', '"state.safetensors": "0'))
    refuses(r"state\.json: is damaged: its content has changed", run, store.path, folder)
    (state.parent / "state.json").write_text("{")
    refuses(r"state\.json: cannot be read \(Expecting", run, store.path, folder)
    other = tmp_path / "features"
    other.mkdir()
    write_record(other / "manifest.json", {"kind": "features", "config": {}, "inputs": {}})
    refuses("holds features, which no training here wrote", run, store.path, other)
    refuses("save_every_steps=0", TrainingConfig, save_every_steps=0)


def test_changed_metrics_of_a_finished_training_are_refused(
    store: ActivationStore, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "sae"))
    metrics = folder / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(TsaeError, match=r"metrics\.jsonl is damaged: its bytes have changed.*set resume="):
        train(store, CONFIG, to=folder, training=SHORT, progress=False)
    metrics.write_bytes(content)
    train(store, CONFIG, to=folder, training=SHORT, progress=False)


@pytest.mark.parametrize("limit", [0, 1000, 12_000])
def test_a_full_disk_leaves_the_checkpoint_before(
    store: ActivationStore, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int
) -> None:
    """The second checkpoint meets a limit on the size of files, whose writes then fail as on a full disk."""
    save, soft_hard = RunFolder.save, resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "sae"

    def limited(self: RunFolder, steps: int, tensors: Any) -> None:
        if steps == 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, soft_hard[1]))
        try:
            save(self, steps, tensors)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", limited)
        refuses(r"cannot be written to .*resumes from the checkpoint after 10 steps", run, store.path, folder)
    assert [p.name for p in (folder / "checkpoint").iterdir()] == ["0000000010"]
    run(store.path, folder)
    same_files(folder, whole)


# --- activations that are not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    store = make_store(tmp_path / "acts")
    shard = next(store.shards())
    values = np.array(shard.raw("x.site"))
    values[25 * 17 + 4, 3] = value
    overwrite(store, shard, "x.site", values)
    store = ActivationStore(store.path)
    refuses(r"x\.site is not finite in trajectory 17", train, store, CONFIG, training=TRAINING, progress=False)
    # Nor do they become codes, which would be 0 and look like any.
    sae = TemporalSAE(WIDTH, CONFIG, site="x.site")
    for use in (lambda: encode(sae, store, progress=False), lambda: evaluate(sae, store, held_out=None)):
        refuses(r"x\.site is not finite in trajectory 17", use)


# --- several processes


@pytest.mark.slow  # starts several processes
@pytest.mark.parametrize(
    ("size", "training"),
    [(2, TRAINING), (3, replace(SHORT, partner="earlier")), (2, replace(SHORT, precision="bfloat16"))],
    ids=("long", "partners from outside the windows", "bfloat16"),
)
def test_several_processes_give_the_weights_of_one(
    store: ActivationStore, tmp_path: Path, size: int, training: TrainingConfig
) -> None:
    """All terms, up to the order of sums: the tolerance is a few float32 roundings of the weights."""
    assert run_ranks(store.path, tmp_path / "many", CONFIG, training, size=size) == [0] * size
    one = train(store, CONFIG, to=tmp_path / "one", training=training, progress=False)
    ranks = [load_file(tmp_path / f"many-{rank}.safetensors") for rank in range(size)]
    for name, weight in one.state_dict().items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        torch.testing.assert_close(ranks[0][name], weight, atol=3e-6, rtol=1e-5, msg=name)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "many")
    ]
    assert training is not TRAINING or max(row["aux"] for row in rows[0]) > 0
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_two_processes_killed_go_on_with_the_same_bits(store: ActivationStore, tmp_path: Path) -> None:
    assert run_ranks(store.path, tmp_path / "whole", CONFIG) == [0, 0]
    assert run_ranks(store.path, tmp_path / "sae", CONFIG, die=10) == [-signal.SIGKILL] * 2
    assert run_ranks(store.path, tmp_path / "sae", CONFIG) == [0, 0]
    same_files(tmp_path / "sae", tmp_path / "whole")
    # Finished: loaded by both, and another training is refused by both.
    assert run_ranks(store.path, tmp_path / "sae", CONFIG) == [0, 0]
    assert run_ranks(store.path, tmp_path / "sae", replace(CONFIG, k=4)) == [2, 2]


def outliers_between(folder: Path) -> ActivationStore:
    """A store in which of every three tokens the middle one is an outlier."""
    rng = np.random.default_rng(0)
    return synthetic_store(folder, [rng.normal(size=(3, WIDTH)) * [[1], [1000], [1]] for _ in range(200)])


def test_a_store_whose_pairs_are_all_outliers_is_refused(tmp_path: Path) -> None:
    store = outliers_between(tmp_path / "acts")
    warned = pytest.warns(UserWarning, match="33% of tokens")
    with warned, pytest.raises(TsaeError, match=r"no two tokens that make a pair have norms below .* about the centre"):
        train(store, CONFIG, to=tmp_path / "sae", training=SHORT, progress=False)


@pytest.mark.slow  # starts processes
def test_several_processes_refuse_a_store_whose_pairs_are_all_outliers(tmp_path: Path) -> None:
    store = outliers_between(tmp_path / "acts")
    assert run_ranks(store.path, tmp_path / "two", CONFIG) == [2, 2]
    # Without the temporal term none is needed.
    plain = replace(CONFIG, temporal_weight=0.0)
    with pytest.warns(UserWarning, match="33% of tokens at x.site are left out"):
        one = train(store, plain, training=SHORT, progress=False)
    assert run_ranks(store.path, tmp_path / "plain", plain) == [0, 0]
    for name, weight in load_file(tmp_path / "plain-1.safetensors").items():
        torch.testing.assert_close(weight, one.state_dict()[name], atol=3e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_torchrun_runs_the_command(store: ActivationStore, tmp_path: Path) -> None:
    options = ["--d-sae", 64, "--k", 3, "--tokens", 5000, "--batch-tokens", 200]
    run_tsae("train", "--store", store.path, "--to", tmp_path / "sae", *options, processes=2)
    assert TemporalSAE.load(tmp_path / "sae").training_info["processes"] == 2


# --- Weights & Biases


def test_metrics_go_to_wandb(store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, float]] = []

    def init(**kwargs: Any) -> Any:
        started.append(kwargs)
        return types.SimpleNamespace(
            log=lambda row, step: logged.append((step, row["fve"])), finish=lambda: logged.append((-1, 0.0))
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    training = replace(SHORT, log_to="wandb:p")
    folder = interrupted(monkeypatch, store, tmp_path / "sae", training=training)
    train(store, CONFIG, to=folder, training=training, progress=False)
    assert [step for step, _ in logged] == [0, 24, -1]
    assert (started[0]["project"], started[0]["name"], started[0]["resume"]) == ("p", "sae", "allow")
    assert started[0]["config"]["sae"]["k"] == 3
    train(store, CONFIG, to=tmp_path / "other", training=training, progress=False)
    train(store, CONFIG, to=folder, training=replace(training, resume="never"), progress=False)
    train(store, CONFIG, training=training, progress=False)
    assert started[1] == started[0]
    # Another folder, training anew, and no folder at all are other runs.
    assert started[2]["id"] != started[0]["id"]
    assert [call["id"] for call in started[3:]] == [None, None]


@pytest.mark.parametrize(("target", "tool"), [("wandb:p", "wandb"), ("trackio:p", "trackio")])
def test_logs_are_asked_for_by_name(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, target: str, tool: str
) -> None:
    monkeypatch.setitem(sys.modules, tool, None)
    with pytest.raises(TsaeError, match=rf"needs {tool}.*pip install '{tool}"):
        train(store, CONFIG, training=replace(TRAINING, log_to=target), progress=False)
    refuses("log_to='mlflow:p'", replace, TRAINING, log_to="mlflow:p")


@pytest.mark.slow
def test_a_run_of_wandb_lies_on_this_machine(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real package, offline: its file holds the project, the settings and the metrics."""
    for name, value in {"MODE": "offline", "DIR": tmp_path, "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    train(store, CONFIG, to=tmp_path / "sae", training=replace(SHORT, log_to="wandb:project-x"), progress=False)
    (file,) = tmp_path.rglob("*.wandb")
    content = file.read_bytes()
    for text in (b"project-x", b"fve", b"alive", b"learning_rate"):
        assert text in content


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_has_the_metrics(store: ActivationStore, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = tmp_path / "tb"
    train(store, CONFIG, to=tmp_path / "sae", training=replace(SHORT, log_to=f"tensorboard:{log}"), progress=False)
    events = EventAccumulator(str(log / "sae"))
    events.Reload()
    assert [event.step for event in events.Scalars("fve")] == [0, 24]


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_the_metrics(store: ActivationStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train(store, CONFIG, to=tmp_path / "sae", training=replace(SHORT, log_to="trackio:p"), progress=False)
    assert any(b"fve" in file.read_bytes() for file in (tmp_path / "trackio").rglob("p*"))
