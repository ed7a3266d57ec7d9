"""Attribution of a run from the folder that TRL leaves; and of what does not belong together, a paragraph."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch

import tsae
from support.builders import save_perturbed
from support.grpo_loop import GrpoLoop, make_log
from support.refusals import refuses
from support.trl_runs import with_kl
from tsae.attribution.attribute import _check_begin
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.attribution.find_settings import read_settings
from tsae.attribution.forward_passes import OLD
from tsae.attribution.loss import PolicyLoss, RewardKL
from tsae.attribution.order import Plan, Update
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.attribution.states import States
from tsae.commands.outputs import check_outputs
from tsae.errors import TsaeError
from tsae.report.attribution import attribution_text
from tsae.rollouts.config import BandSource
from tsae.rollouts.importing import import_log
from tsae.rollouts.table import Rollouts
from tsae.testbed import make_tokenizer

WORDS: dict[str, Any] = {
    "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_steps": 4, "weight_decay": 0.1, "max_grad_norm": 0.1,
    "adam_epsilon": 1e-4, "beta": 0.04, "loss_type": "dapo", "temperature": 1.0, "epsilon": 0.2, "bf16": False,
    "num_generations": 4, "per_device_train_batch_size": 12, "max_completion_length": 16, "trl_version": "1.16.0",
    "logging_steps": 1, "use_bias_correction_kl": False,
}  # fmt: skip
TOKEN = 3
QUICK = AttributionConfig(targets=("outcome",), groups=("band", "outcome", "lone success"))
BARE = replace(QUICK, groups=(), tokens_of=0, shown=0)


def leave(loop: GrpoLoop, to: Path, *, ids: bool) -> Path:
    """What TRL leaves of a training beside its checkpoints: tables, and the trainer's state."""
    frame, tokenizer = loop.log.frame, make_tokenizer()
    (to / "completions").mkdir(parents=True)
    history = []
    for step, norm in enumerate(loop.norms, 1):
        rows = np.flatnonzero(frame.step == step)
        texts = [loop.log.tokens(row) for row in rows]
        table = {
            "step": step,
            "prompt": [tokenizer.decode(prompt, skip_special_tokens=True) for prompt, _ in texts],
            "completion": [tokenizer.decode(response, skip_special_tokens=True) for _, response in texts],
            "accuracy_reward": frame.reward[rows],
            "advantage": frame.advantage[rows],
            "level": [("easy", "medium", "hard")[row // 4 % 3] for row in rows],
            **({"completion_ids": [response.tolist() for _, response in texts]} if ids else {}),
        }
        pd.DataFrame(table).to_parquet(to / "completions" / f"completions_{step:05d}.parquet")
        history.append({
            "step": step, "grad_norm": norm, "learning_rate": loop.settings.optimiser.rate(step), "epoch": step / 4,
            "completions/mean_length": float(loop.log.n_sampled[rows].mean()),
            "rewards/accuracy_reward/mean": float(frame.reward[rows].mean()),
        })  # fmt: skip
    state = {"global_step": 4, "max_steps": 4, "log_history": history}
    (to / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
    return to


@pytest.fixture(scope="module")
def trained(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[GrpoLoop, Path]:
    """A run of four steps with its checkpoints and its settings, and no log."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "training_args.json").write_text(json.dumps(WORDS))
    settings = read_settings(folder)
    return GrpoLoop(llama, make_log(settings, 4, fingerprint), settings).run(to=folder, save=(2, 4)), folder


def the_run(trained: tuple[GrpoLoop, Path], to: Path, *, ids: bool = True) -> Path:
    """Its folder, with the log that was imported."""
    loop, folder = trained
    leave(loop, Path(shutil.copytree(folder, to)), ids=ids)
    import_log(to, to / "rollouts.parquet", str(loop.base), progress=False)
    return to


@pytest.fixture(scope="module")
def run(trained: tuple[GrpoLoop, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return the_run(trained, tmp_path_factory.mktemp("left") / "run")


def attribute(base: Path, run: Path, to: Path, log: Rollouts | None = None, **given: Any) -> Attribution:
    series = given.pop("series", None) or tsae.CheckpointSeries.load(base, run)
    log = log or Rollouts.read(run / "rollouts.parquet")
    usual = {"first_token": TOKEN, "config": BARE, "settings": run}
    return tsae.attribute(series, log, to, **usual | given, progress=False)


@pytest.fixture(scope="module")
def found(llama: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Attribution:
    return attribute(llama, run, tmp_path_factory.mktemp("found"), config=QUICK)


def chance(loop: GrpoLoop, weights: torch.Tensor) -> float:
    """Mean probability that a response begins with TOKEN, prompt by prompt."""
    loop.put(weights)
    prompts, found = {loop.log.frame.problem_id[row]: loop.log.tokens(row)[0] for row in range(len(loop.log))}, []
    for prompt in prompts.values():
        with torch.no_grad():
            logits = loop.model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
        found.append(float(torch.softmax(logits, -1)[TOKEN]))
    return float(np.mean(found))


def test_the_run_is_replayed_and_that_is_shown(found: Attribution, trained: tuple[GrpoLoop, Path]) -> None:
    loop, info = trained[0], found.info
    assert info["path_error"] < 1e-5
    assert info["replay"] | {"within": 0} == {"steps": 4, "to": 4, "within": 0, "departs": None, "cause": ""}
    assert info["replay"]["within"] < 1e-4
    assert (info["gate"], info["trained_on"], info["checkpoints"]) == ("", True, [0, 2, 4])
    assert found.steps.distance.notna().tolist() == [False, True, False, True]
    np.testing.assert_allclose(found.steps.grad_norm, loop.norms, rtol=1e-4)
    np.testing.assert_allclose(found.steps.mean_length, found.steps.logged_mean_length)
    assert "adamw, learning rate 0.001 (linear)" in info["recipe"]
    assert any(
        note.startswith("Targets are measured on 48 responses to 12 problems that the run") for note in info["notes"]
    )


def test_a_kl_penalty_in_the_rewards_is_computed(trained: tuple[GrpoLoop, Path], llama: Path, tmp_path: Path) -> None:
    """Of a log without advantages, from the folder of a run to shares."""
    plain = replace(trained[0].settings, reward_kl=RewardKL(0.5), facts={"advantage_epsilon": 1e-6})
    settings = replace(plain, loss=replace(plain.loss, beta=0.0))
    loop = GrpoLoop(llama, trained[0].log, settings).run(to=tmp_path / "run", save=(4,))
    log = loop.log.with_column("advantage", [None] * len(loop.log))
    found = attribute(llama, tmp_path / "run", tmp_path / "found", log, settings=settings)
    assert found.info["path_error"] < 1e-5
    assert "KL penalty 0.5 in the rewards" in found.info["recipe"]
    assert any("and the divergence from the reference" in note for note in found.info["notes"])
    assert np.isfinite(found.facts.advantage).all()
    assert not found.targets.flagged.any()


@pytest.mark.slow(ci=True)
def test_bands_from_elsewhere_are_called_so(llama: Path, run: Path, found: Attribution, tmp_path: Path) -> None:
    assert "Bands are the level of the data set." in attribution_text(found, 1)  # in place of bands that the log lacks
    log = Rollouts.read(run / "rollouts.parquet")
    rows = [{"id": id, "rate": (0.1, 0.5, 0.9)[i % 3]} for i, id in enumerate(log.frame.problem_id.unique())]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = BandSource(difficulty=tmp_path / "data.jsonl", difficulty_column="rate", difficulty_model="X")
    both = log.with_source(BandSource(bands_column="level")).with_source(source)
    bands = replace(QUICK, groups=("band",), effects=False, tokens_of=0, shown=0)
    by = {kind: attribute(llama, run, tmp_path / kind, both.by(kind), config=bands) for kind in ("difficulty", "level")}
    assert "Bands are the difficulty for model X." in attribution_text(by["difficulty"], 1)
    assert "Bands are the level of the data set." in attribution_text(by["level"], 1)
    for kind, one in by.items():
        sizes = one.groups[one.groups.kind == "band"].drop_duplicates("group").set_index("group").n
        assert sizes.to_dict() == both.by(kind).frame.band.value_counts().to_dict()
    # Samples without a band are a part, too: shares of all parts add up.
    for column, names in (("band", ["easy", "hard", None]), ("level", ["level 1", "level 2", None])):
        some = attribute(llama, run, tmp_path / column, log.with_column(column, names * 16), config=bands)
        parts, whole = (table.groupby("target").share.sum() for table in (some.bands, some.samples))
        np.testing.assert_allclose(parts, whole, atol=1e-12)
        assert " unbanded samples " in " ".join(attribution_text(some, 1).split())
        assert not some.targets.target.str.endswith("unbanded").any()


def test_shares_add_up_to_what_happened(found: Attribution, trained: tuple[GrpoLoop, Path]) -> None:
    loop, targets = trained[0], found.targets.set_index("target")
    assert list(targets.index)[:2] == ["P (first token)", "right − wrong"]
    assert "right − wrong, hard" in targets.index
    one = targets.loc["P (first token)"]
    assert (one.before, one.after) == pytest.approx(
        [chance(loop, w) for w in (loop.weights[0], loop.weights[-1])], abs=1e-6
    )
    sums = found.samples.groupby("target").share.sum()[targets.index]
    largest = found.samples.groupby("target").share.apply(lambda share: share.abs().max())[targets.index]
    assert ((sums + targets.decay - targets.predicted).abs() < 1e-5 * largest).all()
    assert (targets.predicted - targets.realised).abs().max() < 0.02 * largest.max()
    np.testing.assert_allclose(found.samples.policy + found.samples.kl, found.samples.share)
    assert found.samples.kl.abs().max() > 0
    assert set(found.samples.step) == {1, 2, 3, 4}


def test_bands_are_replayed_and_other_kinds_simulated(found: Attribution, trained: tuple[GrpoLoop, Path]) -> None:
    """What would have been: trained anew in plain torch."""
    loop, bands = trained[0], found.bands[found.bands.target == "P (first token)"].set_index("band")
    assert list(bands.index) == ["easy", "medium", "hard"]
    assert (bands.how == "replayed").all()
    assert bands.share.sum() == pytest.approx(found.samples[found.samples.target == "P (first token)"].share.sum())
    easy = np.arange(48) // 4 % 3 == 0
    before, other = chance(loop, loop.weights[0]), GrpoLoop(loop.base, loop.log, loop.settings)
    for name, kept in (("without", ~easy), ("alone", easy)):
        other.put(loop.weights[0])
        really = chance(other, other.run(kept, loop.old).weights[-1]) - before
        assert bands[name]["easy"] == pytest.approx(really, abs=2e-6)
    groups = found.table("P (first token)")
    assert set(groups.how[groups.kind != "band"]) == {"simulated"}
    np.testing.assert_allclose(groups.effect, groups.realised - groups.without, atol=1e-6)
    success, failure = (groups[groups.group == name].iloc[0] for name in ("success", "failure"))
    assert success.alone == pytest.approx(failure.without, abs=1e-6)  # the same training
    assert success.n + failure.n == 48


def test_samples_and_tokens_can_be_read(found: Attribution, trained: tuple[GrpoLoop, Path]) -> None:
    main = found.tokens.target.iloc[0]
    assert found.tokens.trajectory.nunique() == 10
    mine = found.samples[found.samples.target == main].set_index(["trajectory", "step"]).share
    for key, of in found.tokens.groupby(["trajectory", "step"]):
        assert of.share.sum() == pytest.approx(mine[key], abs=1e-5 * mine.abs().max())
        assert of.token_id.tolist() == trained[0].log.tokens(key[0])[1].tolist()
    assert found.entropy.share.sum() == pytest.approx(mine.sum(), abs=1e-5 * mine.abs().max())
    assert set(found.entropy.fifth) == {1, 2, 3, 4, 5}
    top = found.of_target(main, n=2)
    assert (top.share.max(), top.share.min()) == (mine.max(), mine.min())
    assert found.source is not None
    assert top.response.tolist() == found.source.frame.response[top.trajectory].tolist()
    moved = found.of_sample(int(top.trajectory.iloc[0]))
    assert set(moved.target) == set(found.targets.target)
    assert moved.part.is_monotonic_decreasing
    refuses("no target 'feature 9'", found.of_target, "feature 9")
    refuses("no step was trained on trajectory 999", found.of_sample, 999)
    refuses("no kind 'reward'; there are band, outcome", found.table, kind="reward")


def test_what_is_saved_is_loaded(
    found: Attribution, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until a new one is whole, the earlier one stays."""
    log = Rollouts.read(run / "rollouts.parquet")
    found.save(tmp_path / "a")
    again = Attribution.load(tmp_path / "a", log)
    for name in ("targets", "samples", "facts", "groups", "steps", "entropy", "tokens"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))
    assert again.info == json.loads(json.dumps(found.info))
    assert found.info["recipe"].endswith("(by training_args.json; trl 1.16.0)")
    assert str(run) not in (tmp_path / "a" / "attribution.json").read_text()
    refuses("holds no complete attribution", Attribution.load, tmp_path)
    refuses("was made from other rollouts", lambda: Attribution.load(tmp_path / "a", log.select(np.arange(12))))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tsae.base.artefact.file_hash", stop)
        with pytest.raises(KeyboardInterrupt):
            replace(found, targets=found.targets.assign(realised=7.0)).save(tmp_path / "a")
    pd.testing.assert_frame_equal(Attribution.load(tmp_path / "a").targets, found.targets)
    assert not [file for file in (tmp_path / "a").iterdir() if file.name.endswith(".tsae.tmp")]


@pytest.mark.slow(ci=True)
def test_a_log_of_texts_gets_its_end_tokens_back(
    trained: tuple[GrpoLoop, Path], llama: Path, found: Attribution, tmp_path: Path
) -> None:
    """By the mean length that the trainer logged, or where it logged none because no response has one."""
    run = the_run(trained, tmp_path / "run", ids=False)
    state = run / "checkpoint-4" / "trainer_state.json"
    for of_trainer in (True, False):
        if not of_trainer:
            known = json.loads(state.read_text())
            for line in known["log_history"]:
                del line["completions/mean_length"]
            state.write_text(json.dumps(known))
        again = attribute(llama, run, tmp_path / "to")
        assert "The log's texts lack the end token; 48 responses have it back." in again.info["notes"]
        assert again.info["path_error"] < 1e-5
        mine = found.samples[found.samples.target == "P (first token)"].share.to_numpy()
        also = again.samples[again.samples.target == "P (first token)"].share.to_numpy()
        np.testing.assert_allclose(also, mine, atol=1e-5 * np.abs(mine).max())


@pytest.mark.slow(ci=True)
def test_a_killed_replay_is_no_obstacle(
    llama: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to"
    with monkeypatch.context() as killed:
        killed.setattr(States, "get", Mock(side_effect=KeyboardInterrupt))
        killed.setattr(States, "remove", Mock())  # which SIGKILL leaves undone
        with pytest.raises(KeyboardInterrupt):
            attribute(llama, run, to)
    assert any(next(to.iterdir()).iterdir())
    check_outputs(make_dataclass("Attribute", ["to"])(to))
    (to / "path").mkdir()
    attribute(llama, run, to)
    assert [path.name for path in to.iterdir() if path.is_dir()] == ["path"], "a folder of the user's stays"


@pytest.mark.slow(ci=True)
def test_the_last_checkpoint_alone_and_a_stretch(llama: Path, run: Path, found: Attribution, tmp_path: Path) -> None:
    series = tsae.CheckpointSeries.load(llama, run)
    last = attribute(llama, run, tmp_path / "a", series=series.final())
    assert last.info["checkpoints"] == [0, 4]
    assert last.info["path_error"] < 1e-5
    mine = found.samples[found.samples.step > 2]
    stretch = attribute(llama, run, tmp_path / "b", config=replace(BARE, steps=(2, 4)))
    assert set(stretch.samples.step) == {3, 4}
    assert stretch.info["path_error"] < 1e-5
    assert mine.trajectory.nunique() == stretch.samples.trajectory.nunique()
    log = Rollouts.read(run / "rollouts.parquet")
    short = attribute(llama, run, tmp_path / "c", log.select(np.flatnonzero(log.frame["step"] < 4)))
    for one, steps in ((stretch, "steps 3 to 4"), (short, "steps 1 to 3")):
        assert f" {steps}, moved " in (text := attribution_text(one, 1))
        assert "Replayed to step {0} of {0} ".format(steps[-1]) in text
    assert "The log ends at step 3: it does not reach the run's last checkpoint, of step 4." in short.info["notes"]


def test_above_a_distance_no_effect_is_stated(llama: Path, run: Path, tmp_path: Path) -> None:
    """The checkpoint is of another training from step 1 on: the norms agree, and the weights do not."""
    other = Path(shutil.copytree(run, tmp_path / "run"))
    for step in (2, 4):
        shutil.rmtree(other / f"checkpoint-{step}", ignore_errors=False)
    save_perturbed(run / "checkpoint-4", other / "checkpoint-4", amount=0.02)
    gated = attribute(llama, other, tmp_path / "to", config=QUICK)
    assert gated.info["gate"].startswith("The replay ends ")
    assert gated.groups.without.isna().all()
    assert gated.groups.share.abs().max() > 0


def test_simulations_that_do_not_fit_are_left_out(llama: Path, run: Path, tmp_path: Path) -> None:
    small = attribute(llama, run, tmp_path, config=replace(QUICK, groups=("outcome", "band"), memory_gb=1e-5))
    assert any("are not simulated: their states do not fit" in note for note in small.info["notes"])
    assert small.groups.without.notna().tolist() == (small.groups.kind == "band").tolist()


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def _with(change: Callable[[Rollouts], Rollouts]) -> Callable[[Path], Any]:
    def changed(run: Path) -> None:
        change(Rollouts.read(run / "rollouts.parquet")).write(run / "rollouts.parquet")

    return changed


def _settings(**changed: Any) -> Callable[[Path], Any]:
    return lambda run: (run / "training_args.json").write_text(json.dumps(WORDS | changed))


def _explosive(run: Path) -> None:
    (run / "training_args.json").unlink()
    (run / "training_args.bin").write_bytes(pickle.dumps(Bomb()))


def _texts(change: Callable[[list[list[int]]], list[list[int]]]) -> Callable[[Path], Any]:
    return _with(lambda log: log.with_column("response_ids", change(log.table["response_ids"].to_pylist())))


def _nan(log: Rollouts) -> Rollouts:
    return log.with_column("advantage", [None if row == 13 else a for row, a in enumerate(log.frame.advantage)])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a log of another run": (_texts(lambda ids: ids[12:] + ids[:12]), "the gradient of step 1 has the norm .* logged"),
    "other texts of these lengths and norms": (
        _texts(lambda ids: [[(token + 7) % 17 for token in one[:-1]] + one[-1:] for one in ids]),
        "the replay is farther from the checkpoint of step 2 than its first weights are",
    ),
    "settings of another run": (_settings(loss_type="dr_grpo"), "gradient of step 1 has the norm .* Give log, sett"),
    "a pickle bomb": (_explosive, r"training_args\.bin"),
    "a log that lacks steps": (
        _with(lambda log: log.select(log.frame["step"].to_numpy() != 3)),
        "lacks 1 of the steps 1 to 4, the first of them step 3",
    ),
    "rewards rescaled after the fact": (
        _with(lambda log: log.with_column("reward/accuracy_reward", 10 * log.frame["reward/accuracy_reward"])),
        "the trainer logged other rewards in 4 of 4 steps",
    ),
    "samples that the trainer dropped": (
        _with(lambda log: log.select(np.arange(len(log)) % 4 != 1)),
        "the gradient of step 1 has the norm|the trainer logged other",
    ),
    "an advantage that is not a number": (_with(_nan), "the gradient of step 2 is not finite"),
    "steps that are missing": (
        _with(lambda log: log.with_column("step", [None, *log.frame["step"].tolist()[1:]])), "rows have no whole number"
    ),
    "tokens of another model": (
        _texts(lambda ids: [[10_000] * len(one) for one in ids]), "outside the model's vocabulary"
    ),
    "another tokenizer": (
        _with(lambda log: Rollouts(log.table, {**log.info, "tokenizer": "deadbeefdeadbeef"}, log.origin)),
        "is not the one that the trajectories were tokenised with",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_belong_together_gets_a_paragraph(
    what: str, llama: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never a share."""
    change, said = BAD[what]
    monkeypatch.chdir(tmp_path)
    change(Path(shutil.copytree(run, tmp_path / "run")))
    with pytest.raises(TsaeError, match=said) as caught:
        attribute(llama, tmp_path / "run", tmp_path / "to")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("to/*.*"))
    assert not (tmp_path / "exploded").exists()


def test_checkpoints_that_are_not_there(llama: Path, run: Path, tmp_path: Path) -> None:
    """Rotated away while it ran; no later one; and a base that is not the model that the KL term is against."""
    other = Path(shutil.copytree(run, tmp_path / "run"))
    series = tsae.CheckpointSeries.load(llama, other)
    late = tsae.CheckpointSeries(tuple(replace(c, run=None) if c.step == 2 else c for c in series if c.step))
    with pytest.raises(TsaeError, match="the model that the KL term is against is not known after step 2") as caught:
        attribute(llama, other, tmp_path / "to", series=late, config=replace(BARE, steps=(2, 4)))
    assert "\n" not in str(caught.value)
    shutil.rmtree(other / "checkpoint-4")
    with pytest.raises(TsaeError, match="checkpoint-4") as caught:
        attribute(llama, other, tmp_path / "to", series=series)
    assert "\n" not in str(caught.value)
    with pytest.raises(TsaeError, match="has the runs none"):
        attribute(llama, other, tmp_path / "to", series=tsae.CheckpointSeries((series.base,)))
    assert not list(tmp_path.glob("to/*.*"))


def test_what_cannot_be_asked(llama: Path, run: Path, tmp_path: Path) -> None:
    for token in (-1, 10_000, 1.5):
        refuses("is not a token id of this model", attribute, llama, run, tmp_path, first_token=token)
    for options, said in (
        ({"points": 0}, "points=0"),
        ({"steps": (3, 1)}, "is not a stretch"),
        ({"groups": ("bands",)}, "groups.0='bands'"),
        ({"targets": ("feature",)}, "targets.0='feature'"),
        ({"budget_gb": 0}, "budget_gb=0"),
        ({"features": (3, 3)}, "twice"),
    ):
        refuses(said, AttributionConfig, **options)
    refuses("there is no SAE", attribute, llama, run, tmp_path, config=replace(BARE, features=(2,)))
    unknown = Rollouts.read(run / "rollouts.parquet").with_column("outcome", ["unknown"] * 48)
    with pytest.raises(TsaeError, match=r"nothing is there to attribute: Too few .*problems have both right and wrong"):
        attribute(llama, run, tmp_path, unknown, first_token=None)


@pytest.mark.slow(ci=True)
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_(en|dis)able)?` is deprecated:FutureWarning")
def test_a_training_of_trl(tmp_path: Path) -> None:
    """KL penalty, two iterations, two steps an iteration: its gradient norms and its checkpoints."""
    run, base = tmp_path / "run", tsae.testbed.series_path() / "base"
    with_kl(run, 8, per_device_train_batch_size=16, num_generations=8, max_completion_length=30).train()
    import_log(run, run / "rollouts.parquet", str(base), progress=False)
    last = tsae.CheckpointSeries.load(base, run).final()
    found = attribute(base, run, tmp_path / "to", series=last, config=QUICK)
    np.testing.assert_allclose(found.steps.grad_norm, found.steps.logged_grad_norm, rtol=1e-3)
    np.testing.assert_allclose(found.steps.mean_length[[0, 4]], found.steps.logged_mean_length[[0, 4]])
    assert len(found.steps) == 8
    assert found.info["path_error"] < 1e-3
    assert found.info["gate"] == ""
    assert (found.targets.remainder.abs() < 0.05).all()
    assert set(found.bands.how) == {"replayed"}


def test_a_stretch_that_begins_within_a_generation(run: Path) -> None:
    """Its ratios are against weights that are not there."""
    log = Rollouts.read(run / "rollouts.parquet")
    rows = np.arange(8)
    updates = [Update(step, (step - 1) // 2, step % 2 == 1, (rows,)) for step in (2, 3, 4)]
    plan = Plan(updates, [rows, rows + 8])
    settings = RunSettings(Optimiser(n_steps=4), PolicyLoss("dapo"), Batching(1, 2))
    with pytest.raises(TsaeError, match=r"after step 1, in the middle of a generation.* Begin after step 2, or log"):
        _check_begin(log, settings, plan)
    known = log.with_column(OLD, [[-1.0] * n for n in log.lengths("response_ids").tolist()])
    _check_begin(known, settings, plan)
    _check_begin(log, settings, replace(plan, updates=updates[1:]))
