"""`tsae watch`: a training that goes on, analysed update by update."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import tsae
from support.builders import digests, make_rollouts
from support.refusals import refuses
from tsae.activations import capture as capturing
from tsae.activations.config import CaptureConfig
from tsae.activations.reading_plan import beginnings, cut
from tsae.base.artefact import write_record
from tsae.checkpoints.weight_files import unfinished
from tsae.cli import main
from tsae.config import RunConfig, WatchConfig
from tsae.doctor import find_series
from tsae.errors import TsaeError
from tsae.features import encode as encoding
from tsae.rollouts import importing
from tsae.rollouts.fresh_rollouts import draw_problems
from tsae.rollouts.importing import check_grown
from tsae.rollouts.logs.log_files import StableFiles
from tsae.run import State, analyze_run, analyze_state
from tsae.stages import read_run
from tsae.verify import verify
from tsae.watching import watch

pytestmark = pytest.mark.slow(ci=True)

SHIPPED = tsae.testbed.series_path()
ONCE = WatchConfig(once=True, quiet=0.0)
FEW = tsae.DiffConfig(n_bootstrap=100, n_permutations=100, noise_draws=0)


class Training:
    """The testbed's hard run, as TRL leaves it, up to some step."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.run = folder / "hard"
        shutil.copytree(SHIPPED / "base", folder / "base")
        (self.run / "completions").mkdir(parents=True)
        self.config = RunConfig(
            self.run, to=folder / "out", base=str(folder / "base"), attribute=False,
            tokens=6_000, d_sae=32, k=4, training_tokens=10_000, diff=FEW,
        )  # fmt: skip
        if steps:
            self.log(1, *steps)
        for step in steps:
            self.save(step)

    def log(self, *steps: int) -> None:
        for step in steps:
            name = f"completions/completions_{step:05d}.parquet"
            shutil.copy(SHIPPED / "logs" / "hard" / name, self.run / name)

    def save(self, step: int) -> None:
        shutil.copytree(SHIPPED / f"hard-{step:03d}", self.run / f"checkpoint-{step}")

    def alone(self, to: Path) -> Path:
        """One analysis of the training as it is, with the SAE that was kept."""
        out, log = self.config.to, self.run / "completions"
        record, kept = json.loads((out / "run.json").read_text()), tsae.TemporalSAE.load(out / "sae").fingerprint
        sizes, trained = {f: f.stat().st_size for f in log.iterdir()}, record["found"]["fve_at_training"]
        state = State(*find_series(self.config), log, sizes, to / "cache", kept, trained)
        shutil.copytree(out / "sae", to / "one" / "sae")
        record |= {"stages": {"sae": record["stages"]["sae"]}, "found": {}}
        write_record(to / "one" / "run.json", record)
        analyze_state(replace(self.config, to=to / "one"), state, progress=False, say=lambda line: None)
        return to / "one"


Followed = tuple[Training, list[str], list[dict[str, int]]]
"""A training after two updates; what was printed; and how many shards each captured, copied and encoded."""


def look_once(config: RunConfig, lines: list[str] | None = None) -> int:
    """How many updates one look made."""
    return len(list(watch(config, ONCE, say=(lambda line: None) if lines is None else lines.append)))


def scale_weights(checkpoint: Path) -> None:
    """Another checkpoint in the same place: its file is replaced, and not written into."""
    file = checkpoint / "model.safetensors"
    scaled = {name: value * 1.01 for name, value in load_file(file).items()}
    save_file(scaled, file.with_suffix(".new"), metadata={"format": "pt"})
    os.replace(file.with_suffix(".new"), file)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files but hidden ones, and those that name the folder or the updates."""
    others = (".", "run.json", "stages.json")
    return {name: digest for name, digest in digests(folder).items() if not name.startswith(others)}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    with pytest.MonkeyPatch.context() as patch:
        done: dict[str, int] = {}

        def counting(name: str, really: Any, *args: Any, **options: Any) -> Any:
            done[name] = done.get(name, 0) + 1
            return really(*args, **options)

        counted = {capturing: ("capture_shard", "copy_shard"), encoding: ("encode_shard",), importing: ("read_part",)}
        for module, name in ((module, name) for module, names in counted.items() for name in names):
            patch.setattr(module, name, partial(counting, name, getattr(module, name)))
        training, lines, counts = Training(tmp_path_factory.mktemp("watch")), [], []

        def look() -> None:
            done.clear()
            assert look_once(training.config, lines) <= 1
            counts.append(dict(done))

        look()
        training.log(1, 25)
        look()
        training.save(25)
        look()
        look()
        training.log(50)
        training.save(50)
        look()
        yield training, lines, counts


def test_only_what_is_new_is_computed(followed: Followed) -> None:
    training, lines, counts = followed
    assert lines[:2] == ["waiting: there is no rollout log yet", "waiting: no checkpoint is complete"]
    assert lines[2].startswith("new: hard-00025; 512 new of 512 trajectories up to step 25; FVE base 0.")
    assert lines[2].endswith(f"reload {training.config.to / 'report.html'}")
    updates = [line for line in lines if "; reload " in line]
    assert updates[1].startswith("new: hard-00050; 256 new of 768 trajectories up to step 50")
    assert lines.count("nothing new") == 1
    first, nothing, second = (counts[number] for number in (2, 3, 4))
    assert nothing == {}
    assert "copy_shard" not in first
    # The new checkpoint reads everything, and the base what is new. Codes are computed for these shards.
    shards = [len(list((training.config.to / "activations" / id).glob("*.h5"))) for id in ("base", "hard-00050")]
    assert shards[0] == shards[1]
    assert 0 < second["copy_shard"] < shards[0]
    assert second["capture_shard"] == sum(shards) - second["copy_shard"] == second["encode_shard"]


def test_a_training_that_was_followed_to_its_end_is_not_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, lines = followed[0], []
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for what is there"))
    assert list(watch(training.config, replace(ONCE, once=False, until=50), say=lines.append)) == []
    assert lines == ["nothing new"]


@pytest.mark.slow
def test_an_update_equals_one_analysis_of_the_training(followed: Followed, tmp_path: Path) -> None:
    training, _, _ = followed
    out = training.config.to
    one = contents(training.alone(tmp_path))
    assert contents(out) == one
    page = (out / "report.html").read_text()
    assert "It was trained earlier in this training, on base and hard-00025" in page
    assert json.loads((out / "stages.json").read_text())["report"] == str(out / "report.html")
    assert not (out / ".next").exists()
    assert not (out / ".old").exists()
    # The SAE rests on the store of the first update, not on this one.
    assert {finding.state for finding in verify([out], progress=False)} == {"intact"}


@pytest.mark.slow
def test_a_published_sae_reads_every_update(followed: Followed, tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    sae = tsae.load_sae(followed[0].config.to / "sae")
    config = replace(training.config, sae=sae.save(tmp_path / "sae"), d_sae=None, k=None, training_tokens=None)
    training.log(1, 25, 50)
    for step in (25, 50):
        training.save(step)
        assert look_once(config) == 1
        assert tsae.load_sae(config.to / "sae").fingerprint == sae.fingerprint
    page = (config.to / "report.html").read_text()
    assert "trained earlier in this training" not in page
    other = copy.deepcopy(sae)
    with torch.no_grad():
        other.W_dec += 1
    shutil.rmtree(tmp_path / "sae")
    other.save(tmp_path / "sae")
    training.save(100)
    training.log(100)
    assert look_once(config) == 1  # all of it with the one that lies there now
    assert tsae.FeatureTable.load(config.to / "features").info["sae"]["weights"] == other.fingerprint
    assert json.loads((config.to / "stages.json").read_text())["sae"] == "32 latents, k 4, published, not trained here"


def test_what_is_not_the_same_training_is_refused(followed: Followed, tmp_path: Path) -> None:
    training = Training(tmp_path)
    for name in ("hard", "out"):
        shutil.copytree(followed[0].config.path.parent / name, tmp_path / name, dirs_exist_ok=True)
    told = json.dumps(read_run(tmp_path / "out", "run.json")).replace(
        str(followed[0].config.path.parent), str(tmp_path)
    )
    write_record(tmp_path / "out" / "run.json", {"kind": "run", **json.loads(told)})
    before = contents(training.config.to)

    look_once(training.config)  # Nothing is new.
    with pytest.raises(TsaeError, match=r"`tsae watch` wrote it, and can continue it"):
        analyze_run(training.config, progress=False, say=lambda line: None)
    training.log(100)
    refuses(r"another training, SAE or versions \(differing: k\)", look_once, replace(training.config, k=5))
    weights = tmp_path / "base" / "model.safetensors"
    held = weights.read_bytes()
    scale_weights(tmp_path / "base")
    refuses(r"base: is another base than before: its weights and config have the hash", look_once, training.config)
    weights.write_bytes(held)
    training.log(100)
    (training.run / "completions" / "completions_00025.parquet").unlink()
    for _ in range(2):
        refuses(r"no longer holds 256 of the 768 .* were read before \(of step 25\)", look_once, training.config)
    assert contents(training.config.to) == before
    # Another SAE in place of the one that is kept, where it is asked for.
    training.log(25)
    kept = tsae.load_sae(training.config.to / "sae").fingerprint
    (update,) = watch(training.config, replace(ONCE, retrain=True), say=lambda line: None)
    assert (update.trajectories, update.new_trajectories, update.warning) == (1024, 256, "")
    assert tsae.load_sae(training.config.to / "sae").fingerprint != kept
    assert "sae" not in (read_run(training.config.to, "run.json") or {})


def test_the_command(followed: Followed, capsys: pytest.CaptureFixture) -> None:
    config = followed[0].config
    options = "--once --quiet 0 --tokens 6000 --d-sae 32 --k 4 --training-tokens 10000 --diff.n-bootstrap 100 "
    options += "--diff.n-permutations 100 --diff.noise-draws 0"
    main(["watch", str(config.path), "--base", str(config.base), "--to", str(config.to), *options.split()])
    assert capsys.readouterr().out == "nothing new\n"


def test_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    whole, partial = tmp_path / "checkpoint-25", tmp_path / "checkpoint-50"
    shutil.copytree(SHIPPED / "hard-025", whole)
    partial.mkdir()
    told = []
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "trainer_state.json"):
        content = b'{"global_step": 50}' if name == "trainer_state.json" else (SHIPPED / "hard-050" / name).read_bytes()
        (whole / "trainer_state.json").write_text("{}")
        for n in (0, 5, len(content) // 2, len(content) - 1):
            (partial / name).write_bytes(content[:n])
            told.append(unfinished([whole, partial]).get(partial, ""))
        (partial / name).write_bytes(content)
    assert all(told)
    assert unfinished([whole, partial]) == {}


def test_a_log_that_is_being_written(tmp_path: Path) -> None:
    lines, table = tmp_path / "log.jsonl", tmp_path / "completions_00001.parquet"
    lines.write_text('{"a": 1}\n{"a": 2')
    whole = (SHIPPED / "logs" / "hard" / "completions" / "completions_00001.parquet").read_bytes()
    table.write_bytes(whole[: len(whole) // 2])
    settling = StableFiles(0.2)
    assert (settling.bytes_of(lines), settling.bytes_of(table), settling.waits) == (0, 0, True)
    lines.write_text('{"a": 1}\n{"a": 22}\n{"a"')
    time.sleep(0.25)
    # It never rests. Lines that were there a while ago count.
    lines.write_text('{"a": 1}\n{"a": 22}\n{"a": 3}\n')
    assert settling.bytes_of(lines) == len('{"a": 1}\n')
    assert settling.bytes_of(table) == 0
    table.write_bytes(whole)
    for file in (lines, table):  # Times that lie ahead, as the clocks of other machines do, say nothing.
        os.utime(file, (time.time() + 3600, time.time() + 3600))
    settling = StableFiles(0.2)
    assert (settling.bytes_of(lines), settling.bytes_of(table)) == (0, 0)
    time.sleep(0.25)
    assert (settling.bytes_of(lines), settling.bytes_of(table)) == (lines.stat().st_size, len(whole))
    settling = StableFiles(0.0)
    lines.write_text('{"a": 1}\n{"a": 2')
    assert settling.bytes_of(lines) == len('{"a": 1}\n')
    lines.write_text('{"a": 1}\n{"a": 2}')
    assert settling.bytes_of(lines) == len('{"a": 1}\n{"a": 2}')


def test_shards_stay_when_trajectories_come_and_go() -> None:
    rollouts = make_rollouts(n_problems=200, n_samples=4)
    config = CaptureConfig(steady_shards=True, shard_tokens=400)

    def shards(rows: np.ndarray) -> set[tuple[str, ...]]:
        some = rollouts.select(rows)
        lengths = some.lengths("prompt_ids") + some.lengths("response_ids")
        pieces = list(cut({"base": np.arange(len(some))}, lengths, 400, beginnings(some, lengths, config)))
        assert np.concatenate([piece.rows for piece in pieces]).tolist() == list(range(len(some)))
        assert max(int(lengths[piece.rows].sum()) for piece in pieces) <= 400
        return {tuple(str(rows[row]) for row in piece.rows) for piece in pieces}

    n = len(rollouts)
    all_of_them = shards(np.arange(n))
    assert 20 < len(all_of_them) < 200
    assert len(all_of_them - shards(np.arange(n - 40))) <= 15  # The last problems, and the shard that they share.
    without = shards(np.flatnonzero(np.arange(n) // 4 % 20 != 3))  # every 20th problem
    assert len(all_of_them & without) > 0.6 * len(all_of_them)


def test_a_longer_log_keeps_most_of_the_problems_that_were_drawn() -> None:
    outline = make_rollouts(n_problems=200, n_samples=4).frame.assign(band=None)
    half = int((outline.prompt_length + outline.response_length).sum()) // 2

    def drawn(n: int) -> set[str]:
        some = outline[: 4 * n]
        return set(some.problem_id[draw_problems(some, half, 0, "log")])

    before, after = drawn(160), drawn(200)
    stayed = len(before & after) / len(before)
    assert 0.7 < stayed < 0.9  # 4 in 5 have place
    assert after - before <= {f"p{number:03d}" for number in range(160, 200)}


def test_a_log_must_hold_what_it_held(tmp_path: Path) -> None:
    table = make_rollouts(n_problems=6, n_samples=4).with_column("step", np.repeat(np.arange(6), 4).tolist())
    before = table.select(np.arange(16)).write(tmp_path / "before.parquet")
    order = np.random.default_rng(0).permutation(24)
    check_grown(before, table.select(order).write(tmp_path / "more.parquet"), tmp_path)  # Order does not count.
    check_grown(tmp_path / "none.parquet", before, tmp_path)
    for changed, told in (
        (table.select(np.delete(order, np.flatnonzero(order == 9))), r"no longer holds 1 of the 16 .*of step 2\)"),
        (table.with_column("reward", [0.25] * 24), r"no longer holds 16 of the 16 .*of step 0, 1, 2 and 1 more\)"),
        (table.with_column("step", [7] * 24), r"no longer holds 16"),
    ):
        refuses(told, check_grown, before, changed.write(tmp_path / "now.parquet"), tmp_path)


def test_a_checkpoint_that_is_written_anew_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill, after its analysis, and while it is read."""
    training, lines, really, done = Training(tmp_path, 25), list[str](), capturing.capture_shard, list[str]()
    checkpoint = training.run / "checkpoint-25"

    def captured(reader: Any, where: Any, rollouts: Any, piece: Any, *rest: Any) -> Any:
        if done == ["base"]:
            raise KeyboardInterrupt
        found = really(reader, where, rollouts, piece, *rest)
        if "written" in done and "rewritten" not in done and piece.reader != "base":
            scale_weights(checkpoint)
            done.append("rewritten")
        done.append(piece.reader)
        return found

    monkeypatch.setattr(capturing, "capture_shard", captured)
    with pytest.raises(KeyboardInterrupt):
        look_once(training.config)
    assert (training.config.to / ".next" / "activations" / "manifest.json").is_file()
    done.append("killed")
    scale_weights(checkpoint)  # what was begun of the old weights does not stand in the way
    assert look_once(training.config, lines) == 1
    assert all(found.state == "intact" for found in verify([training.config.to]))

    before, weights = contents(training.config.to), checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert look_once(training.config, lines) == 0  # the same weights
    done.append("written")
    scale_weights(checkpoint)
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns - 10**15))
    until = WatchConfig(once=False, quiet=0.0, every=0.0, until=25)
    assert len(list(watch(training.config, until, say=lines.append))) == 1
    assert "hard-00025: written anew since the last analysis, and read again" in lines
    assert any(
        line.startswith("looking again: hard-00025 was removed or changed while it was read (") for line in lines
    )
    changed = {name for name, held in contents(training.config.to).items() if before.get(name) != held}
    assert {name for name in changed if "activations/base/" in name} == set()
    assert any("activations/hard-00025/" in name for name in changed)
    assert look_once(training.config, lines) == 0
    assert all(found.state == "intact" for found in verify([training.config.to]))


@pytest.mark.slow
def test_a_stand_in_for_the_base_that_is_rotated_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks, and while it is read: the earliest checkpoint that is left takes its place."""
    training, lines, really = Training(tmp_path, 25, 50), list[str](), capturing.capture_shard
    training.config = replace(training.config, base=None)

    def bases() -> tuple[str, list[str]]:
        diff = tsae.FeatureDiff.load(training.config.to / "diff")
        return diff.base, diff.checkpoints

    assert look_once(training.config, lines) == 1
    assert bases() == ("hard-00025", ["hard-00050"])
    assert "; against step 25, since the base is missing; " in lines[-1]
    page = (training.config.to / "report.html").read_text()
    assert "<title>What training changed: hard, against step 25, since the base is missing</title>" in page
    training.save(100)
    shutil.rmtree(training.run / "checkpoint-25")
    assert look_once(training.config, lines) == 1
    assert bases() == ("hard-00050", ["hard-00100"])
    assert "hard-00025, which stood in for the base, was removed: hard-00050 takes its place" in lines

    def captured(reader: Any, where: Any, rollouts: Any, piece: Any, *rest: Any) -> Any:
        if (training.run / "checkpoint-50").is_dir():
            shutil.rmtree(training.run / "checkpoint-50")
        return really(reader, where, rollouts, piece, *rest)

    monkeypatch.setattr(capturing, "capture_shard", captured)
    training.log(100)
    training.save(150)
    until = WatchConfig(once=False, quiet=0.0, every=0.0, until=150)
    assert len(list(watch(training.config, until, say=lines.append))) == 1
    assert any(line.startswith("looking again: hard-00050 was removed or changed") for line in lines)
    assert bases() == ("hard-00100", ["hard-00150"])
    assert all(found.state == "intact" for found in verify([training.config.to]))


def test_fresh_rollouts_are_not_sampled_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match="fresh rollouts are not sampled while a training runs"):
        watch(RunConfig(tmp_path, to=tmp_path / "out", sample=2))
