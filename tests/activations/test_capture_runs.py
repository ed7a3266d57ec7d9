"""Long captures: killed and resumed, short of memory, on two processes; and stores that were damaged."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.builders import SHARED, make_rollouts
from support.checkpoints import reweigh, rewrite
from support.children import exit_codes, killed_until_done, run_tsae, start, start_ranks
from support.damage import flip
from support.refusals import fails, refuses
from support.stand_in import ERRORS, short_of_memory
from support.stores import contents, edit
from tsae.activations import capture as recording
from tsae.activations import reading_plan as opening
from tsae.activations.capture import capture, capture_part
from tsae.activations.config import CaptureConfig
from tsae.activations.forward_batches import is_out_of_memory, plan_batches
from tsae.activations.manifest import check_store, read_manifest
from tsae.activations.shard import opened
from tsae.activations.store import ActivationStore
from tsae.base.files import partial_name
from tsae.base.part import Part
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

pytestmark = pytest.mark.slow(ci=True)

SITES = ["blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"]
CONFIG = CaptureConfig(shard_tokens=100, batch_tokens=64)
Again = Callable[..., Any]


def captured(to: Path, part: Part | None = None, **changed: Any) -> Any:
    """A store, or a part of it: then what is missing."""
    given = {"sites": SITES, "config": CONFIG, "progress": False, **changed}
    return capture(to=to, **given) if part is None else capture_part(to=to, part=part, **given)


@pytest.fixture(scope="module")
def again(series: CheckpointSeries, rollouts: Rollouts) -> Again:
    """Captures the module's series and rollouts, or others."""
    return partial(captured, series=series, rollouts=rollouts)


def shards_of(folder: Path) -> dict[str, bytes]:
    return contents(folder, "*.h5")


def records(folder: Path) -> list[dict[str, Any]]:
    manifest = read_manifest(folder)
    return [shard for reader in manifest["readers"] for shard in reader["shards"]]


@pytest.fixture(scope="module")
def source(rollouts: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rollouts.write(tmp_path_factory.mktemp("rollouts") / "rollouts.parquet")


@pytest.fixture(scope="module")
def whole(again: Again, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a base and a run, captured without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "acts"
    again(folder)
    assert len(records(folder)) > 12
    return folder


def run(series: Path, source: Path, to: Path, part: Part | None = None) -> None:
    torch.set_num_threads(1)  # as in the tests' own process, whose results these are compared with
    captured(to, part, series=CheckpointSeries.load(series), rollouts=Rollouts.read(source))


def entered(folder: Path) -> int:
    return len(records(folder)) if (folder / "manifest.json").is_file() else -1


# --- killed and resumed


@pytest.mark.slow(ci=True)
def test_kills_at_random_points_of_a_longer_capture(series_folder: Path, fingerprint: str, tmp_path: Path) -> None:
    longer = make_rollouts(("base", "easy-10"), n_problems=50, n_samples=8, tokenizer=fingerprint)
    source = longer.write(tmp_path / "rollouts.parquet")
    start(time.sleep, 0).join()  # the server's own start is not the capture's
    began = time.monotonic()
    child = start(run, series_folder, source, tmp_path / "whole")
    child.join()
    assert child.exitcode == 0
    took, kills = time.monotonic() - began, 0
    folder = tmp_path / "killed"
    while kills < 5:  # scripts/torture.py kills hundreds
        kills += killed_until_done(
            lambda: start(run, series_folder, source, folder),
            # Later after each kill: on a busy machine a start alone may take longer than the first of these limits.
            lambda child, of_this: child.join(random.uniform(0.05, 0.6) * took * (1 + of_this)),
        )
        assert contents(folder) == contents(tmp_path / "whole")
        shutil.rmtree(folder)


def test_a_resumed_capture_records_a_lost_shard_again(again: Again, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "acts"
    again(folder, part=Part(0, 2))
    (folder / "base" / "00002.h5").unlink()
    (folder / "base" / "00000.json").write_text("{}")  # a damaged record counts as none
    again(folder)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize("at", [0, -2], ids=["before it is loaded", "while it reads"])
def test_a_checkpoint_rewritten_during_a_capture_is_refused(
    again: Again, series_folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    series, folder = CheckpointSeries.load(tmp_path / "series"), tmp_path / "acts"
    moment, capture_one = sorted(shards_of(whole))[at], recording.capture_shard

    def then_rewritten(reader: Any, checkpoint: str, rollouts: Rollouts, piece: Any, *rest: Any) -> dict[str, Any]:
        entry = capture_one(reader, checkpoint, rollouts, piece, *rest)
        if piece.file == moment:
            rewrite(tmp_path / "series" / "easy-10")
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(recording, "capture_shard", then_rewritten)
        what = r"series/easy-10: its weights or its config changed while they were in use \(hash \S+, before \S+\)"
        refuses(what, again, folder, series=series)
    kept = [shard["file"] for shard in records(folder)]
    assert kept == [name for name in sorted(shards_of(whole)) if name < moment or name.startswith("base")]
    for name in kept:
        assert shards_of(folder)[name] == shards_of(whole)[name]
    refuses("holds another capture: readers differ", again, folder, series=series)
    shutil.copytree(series_folder / "easy-10", tmp_path / "series" / "easy-10", dirs_exist_ok=True)
    again(folder, series=series)
    assert contents(folder) == contents(whole)


def test_checkpoints_that_a_store_has_read_are_seen_to_be_rewritten(
    series_folder: Path, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    series = CheckpointSeries.load(tmp_path / "series")
    series = replace(series, checkpoints=(*series, replace(series["easy-10"], id="saved-later", step=20)))
    assert recording.rewritten_checkpoints(whole, series) == []
    rewrite(tmp_path / "series" / "easy-10")
    assert recording.rewritten_checkpoints(whole, series) == ["easy-10"]


def test_a_base_rewritten_before_it_is_fingerprinted_is_refused(
    again: Again, series_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    series, load = CheckpointSeries.load(tmp_path / "series"), opening._load

    def then_rewritten(*args: Any) -> Any:
        model = load(*args)
        rewrite(tmp_path / "series" / "base")
        return model

    monkeypatch.setattr(opening, "_load", then_rewritten)
    refuses("series/base: its weights or its config changed", again, tmp_path / "acts", series=series)
    assert not (tmp_path / "acts").exists()


def test_a_checkpoint_that_is_removed_once_it_is_loaded_reads_on(
    again: Again, series_folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    series, capture_one = CheckpointSeries.load(tmp_path / "series"), recording.capture_shard

    def removed_before(*args: Any) -> dict[str, Any]:
        shutil.rmtree(args[1], ignore_errors=True)
        return capture_one(*args)

    monkeypatch.setattr(recording, "capture_shard", removed_before)
    again(tmp_path / "acts", series=series)
    assert contents(tmp_path / "acts") == contents(whole)


def test_a_capture_does_not_write_through_a_link(again: Again, whole: Path, tmp_path: Path) -> None:
    folder, outside = Path(shutil.copytree(whole, tmp_path / "acts")), tmp_path / "outside"
    outside.mkdir()
    edit(folder, lambda m: (m.update(complete=False), m["readers"][1].update(shards=[])))
    shutil.rmtree(folder / "easy-10")
    (folder / "easy-10").symlink_to(outside)
    refuses("leaves the store", again, folder)
    assert not list(outside.iterdir())


# --- memory


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
def test_batches_that_do_not_fit_are_halved(
    again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    half = again(tmp_path / "half", config=replace(CONFIG, batch_tokens=32))
    tried = short_of_memory(monkeypatch, 40, error)
    found = again(tmp_path / "acts")
    assert max(tried) > 40
    # The same shards, bit for bit, as if the smaller budget had been asked for; the manifest says so.
    assert shards_of(found.path) == shards_of(half.path)
    assert {record["batch_tokens"] for record in records(found.path)} <= {32, 64}
    assert 32 in {record["batch_tokens"] for record in records(found.path)}


@pytest.mark.slow
def test_what_was_short_of_memory_and_interrupted_ends_with_the_same_bytes(
    again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory runs out at the same sizes: shards do not depend on what happened to those before."""
    short_of_memory(monkeypatch, 40, ERRORS[0])
    whole = again(tmp_path / "whole")
    for done in (1, 7):
        folder = Path(shutil.copytree(whole.path, tmp_path / f"acts-{done}"))
        edit(
            folder,
            lambda m, n=done: (
                m.update(complete=False),
                m["readers"][0].update(shards=m["readers"][0]["shards"][:n]),
                m["readers"][1].update(shards=[]),
            ),
        )
        shutil.rmtree(folder / "easy-10")
        again(folder)
        assert contents(folder) == contents(whole.path)


def test_a_trajectory_that_does_not_fit_alone_is_named(
    again: Again, rollouts: Rollouts, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    longest = int(lengths.max())
    with monkeypatch.context() as patch:
        short_of_memory(patch, longest - 1, ERRORS[0])
        refuses(rf"trajectory \d+ of {longest} tokens does not fit into memory by itself", again, tmp_path / "acts")
    # What fitted is kept, and memory may be enough the next time.
    again = again(tmp_path / "acts")
    assert min(record["batch_tokens"] for record in records(again.path)) < 64
    assert len(records(again.path)) == len(records(whole))


def test_other_errors_of_a_forward_pass_are_not_taken_for_a_lack_of_memory(
    again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = short_of_memory(monkeypatch, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        again(tmp_path / "acts")
    assert len(tried) == 1


def test_a_real_failed_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 55)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


# --- batches


def test_batches_hold_every_trajectory_once_and_keep_their_budget() -> None:
    rng = np.random.default_rng(0)
    for lengths in (rng.integers(1, 50, 200), np.array([7]), np.full(30, 5), np.array([100, 1, 1, 1])):
        batches = list(plan_batches(lengths, 64))
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or lengths[batch].max() * len(batch) <= 64
        widths = [lengths[batch].max() for batch in batches]
        assert widths == sorted(widths, reverse=True)


def test_little_is_padding_on_lengths_of_gsm8k() -> None:
    file = SHARED / "data" / "gsm8k" / "example_model_solutions.jsonl"
    if not file.is_file():
        pytest.skip("shared/data/gsm8k is not here")
    with file.open(encoding="utf-8") as lines:
        solutions = [json.loads(line) for line in lines]
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    # About four characters a token; a shard of half a million tokens.
    lengths = np.array([(len(s["question"]) + len(s[m]["solution"])) // 4 for s in solutions for m in models])
    lengths = lengths[np.cumsum(lengths) < CaptureConfig().shard_tokens]
    padded = sum(int(lengths[b].max()) * len(b) for b in plan_batches(lengths, CaptureConfig().batch_tokens))
    assert 1 - lengths.sum() / padded < 0.1


# --- several processes


@pytest.mark.parametrize("n", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_parts_in_any_order_make_the_store_of_one(again: Again, whole: Path, tmp_path: Path, n: int) -> None:
    folder, order = tmp_path / "acts", random.Random(n).sample(range(n), n)
    left = len(records(whole))
    for index in order:
        for _ in range(2):  # a part that is started again finds its work done
            missing = again(folder, part=Part(index, n))
        assert len(missing) < left
        left = len(missing)
        assert sorted(record["file"] for record in records(folder)) == sorted(
            {record["file"] for record in records(whole)} - set(missing)
        )
        if missing:
            refuses("its capture did not finish", ActivationStore, folder)
            assert check_store(folder) == []
    assert contents(folder) == contents(whole)


def test_a_part_of_another_capture_is_refused(again: Again, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "acts"
    again(folder, part=Part(0, 2))
    before = contents(folder)
    other = replace(CONFIG, shard_tokens=120)
    refuses("holds another capture: config differ", lambda: again(folder, part=Part(1, 2), config=other))
    assert contents(folder) == before
    shutil.copy(folder / "base" / "00000.json", folder / "base" / "00001.json")
    refuses(r"the record 00001\.json of base is that of base/00000\.h5", lambda: again(folder, part=Part(1, 2)))


@pytest.mark.slow(ci=True)
def test_a_shard_of_another_capture_is_refused(again: Again, whole: Path, tmp_path: Path) -> None:
    """Parts ran on two machines, one of them with another precision, and were copied into one folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    again(here, part=Part(0, 2))
    other = replace(CONFIG, model_dtype="bfloat16")
    again(there, part=Part(1, 2), config=other)
    shutil.copytree(there / "base", here / "base", dirs_exist_ok=True)
    n = len(list((there / "base").glob("*.h5")))
    what = rf"{n} shards are of another capture than the manifest, such as base/00001\.h5\. .*base/00001\.json"
    with pytest.raises(TsaeError, match=what) as refused:
        again(here)
    assert "\n" not in str(refused.value)
    refuses("of another capture", ActivationStore, here)
    for file in (there / "base").iterdir():
        (here / "base" / file.name).unlink()
    again(here)
    assert contents(here) == contents(whole)


@pytest.mark.slow(ci=True)
def test_a_completed_manifest_whose_records_were_not_removed(
    again: Again, series: CheckpointSeries, whole: Path, tmp_path: Path
) -> None:
    """The process died while it joined the parts: before the manifest took its place, or after that."""
    folder = tmp_path / "acts"
    again(folder, part=Part(0, 2))
    (folder / "manifest.json.part-1").write_text('{"format": "tsae-activ')
    again(folder, part=Part(1, 2))
    assert contents(folder) == contents(whole)
    (folder / "base" / "00000.json").write_text("{}")
    assert len(ActivationStore(folder).readers) == len(series)
    again(folder)
    assert contents(folder) == contents(whole)
    (folder / "manifest.json").write_text('{"format": "tsae-activ')
    refuses(r"manifest\.json: cannot be read", ActivationStore, folder)


def test_what_parts_left_that_were_killed_before_the_manifest_is_removed(
    again: Again, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "acts"
    folder.mkdir()
    own = f"manifest.json.{'0a' * 16}"
    for left in (own, partial_name(Path(own)).name):
        (folder / left).write_text('{"format": "tsae-activ')
    again(folder)
    assert contents(folder) == contents(whole)
    partial_name(folder / own).touch()  # killed just after the end
    again(folder)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize("at", ["rollouts.parquet.part-1", ".rollouts.parquet.part-1.tsae.tmp"])
def test_what_a_killed_part_left_is_removed_from_the_finished_store(
    again: Again, rollouts: Rollouts, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder, replace_file = tmp_path / "acts", os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(source).name == at:
            shutil.copy(source, tmp_path / "left")  # a kill lets nothing remove it
            raise KeyboardInterrupt
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            again(folder, part=Part(1, 3))
    shutil.copy(tmp_path / "left", folder / at)
    (folder / "rollouts.parquet.part-x").touch()
    again(folder)
    (folder / "rollouts.parquet.part-x").unlink()  # a user's own
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize("finished", [False, True])
def test_parts_that_write_the_same_record_at_the_same_moment(
    again: Again, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """The second part does all its work just before the first one's manifest takes its place."""
    folder, replace_file, seen = tmp_path / "acts", os.replace, []

    def read(index: int) -> None:
        part = Part(index, 2)
        again(folder, part=part)

    def late(source: Any, target: Any) -> None:
        if str(target) == str(folder / "manifest.json") and not seen:
            seen.append(target)
            read(1)
        replace_file(source, target)

    read(1)
    if finished:
        read(0)
    monkeypatch.setattr(os, "replace", late)
    read(0)
    assert seen
    assert contents(folder) == contents(whole)


def test_parts_on_the_command_line(
    series_folder: Path, source: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capture", "--series", str(series_folder), "--rollouts", str(source), "--to", str(tmp_path / "acts")]
    command += ["--sites", *SITES, "--shard-tokens", "100", "--batch-tokens", "64"]
    main([*command, "--part", "2/2"])
    left = -(-len(records(whole)) // 2)
    said = f"part 2/2 is done; other parts have {left} shards still to record, such as base/00000.h5"
    assert said in capsys.readouterr().out
    main([*command, "--part", "1/2"])
    assert "wrote" in capsys.readouterr().out
    assert shards_of(tmp_path / "acts") == shards_of(whole)
    assert json.loads((tmp_path / "acts" / "manifest.json").read_text())["command"] == command
    for wrong in ("0/2", "3/2", "2", "a/b"):
        assert "1/n to n/n" in fails(capsys, *command, "--part", wrong).err


@pytest.mark.slow
def test_parts_that_run_at_once_and_are_killed_lose_nothing(
    series_folder: Path, source: Path, whole: Path, tmp_path: Path
) -> None:
    """Three at once; one is killed in the middle, and started again when the others are done."""
    folder = tmp_path / "acts"
    parts = [start(run, series_folder, source, folder, Part(index, 3)) for index in range(3)]
    while entered(folder) < 3 and all(child.is_alive() for child in parts):
        time.sleep(0.001)
    parts[1].kill()
    assert exit_codes(parts)[::2] == [0, 0]
    if parts[1].exitcode != 0:
        assert exit_codes([start(run, series_folder, source, folder, Part(1, 3))]) == [0]
    assert contents(folder) == contents(whole)


@pytest.mark.slow
def test_two_processes_write_the_store_of_one(series_folder: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    assert exit_codes(start_ranks(2, run, series_folder, source, tmp_path / "acts")) == [0, 0]
    assert contents(tmp_path / "acts") == contents(whole)
    # Finished: opened by both.
    assert exit_codes(start_ranks(2, run, series_folder, source, tmp_path / "acts")) == [0, 0]
    assert contents(tmp_path / "acts") == contents(whole)


@pytest.mark.slow  # kills two processes
def test_what_two_killed_processes_left_is_completed_by_one(
    series_folder: Path, source: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "acts"
    for _ in range(20):  # on a busy machine they may end before they are killed
        shutil.rmtree(folder, ignore_errors=True)
        children = start_ranks(2, run, series_folder, source, folder)
        while entered(folder) < 4 and all(child.is_alive() for child in children):
            time.sleep(0.001)
        for child in children:
            child.kill()
        if (codes := exit_codes(children)) == [-signal.SIGKILL] * 2:
            break
    assert codes == [-signal.SIGKILL] * 2
    run(series_folder, source, folder)
    assert contents(folder) == contents(whole)


@pytest.mark.slow  # starts two processes
def test_all_processes_stop_where_one_refuses(
    series_folder: Path, source: Path, tmp_path: Path, rollouts: Rollouts
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    reweigh(tmp_path / "series" / "easy-10", lambda w: w["model.embed_tokens.weight"].fill_(torch.nan))
    assert exit_codes(start_ranks(2, run, tmp_path / "series", source, tmp_path / "acts")) == [2, 2]
    assert {Path(shard["file"]).parent.name for shard in records(tmp_path / "acts")} == {"base"}


@pytest.mark.slow
def test_torchrun_runs_the_command(series_folder: Path, source: Path, tmp_path: Path) -> None:
    command = ["capture", "--series", series_folder, "--rollouts", source, "--to", tmp_path / "acts", "--sites", *SITES]
    run_tsae(*command, "--shard-tokens", 100, "--batch-tokens", 64, processes=2)
    assert check_store(tmp_path / "acts") == []


def test_a_model_spread_over_devices_is_not_for_several_processes(
    again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TsaeError, match='device="auto" spreads one model over all GPUs'):
        again(tmp_path / "acts", config=replace(CONFIG, device="auto"))
    refuses('device="auto" needs backend="huggingface"', replace, CONFIG, device="auto", backend="transformer_lens")


def test_a_model_spread_over_devices_is_read_the_same(again: Again, whole: Path, tmp_path: Path) -> None:
    found = again(tmp_path / "acts", config=replace(CONFIG, device="auto"))
    assert shards_of(found.path) == shards_of(whole)


# --- checking and repairing


@pytest.mark.slow
def test_a_flipped_byte_is_refused_or_changes_no_place(whole: Path, tmp_path: Path) -> None:
    before = (whole / "easy-10" / "00000.h5").read_bytes()
    path = tmp_path / "shard.h5"
    path.write_bytes(before)
    _, places = opened(path)
    refused = 0
    for position in range(0, len(before), 17):
        path.write_bytes(before)
        flip(path, position)
        try:
            assert opened(path)[1] == places, position
        except TsaeError:
            refused += 1
    assert refused > 20


@pytest.fixture
def damaged(whole: Path, tmp_path: Path, series_folder: Path) -> Path:
    """A flipped byte, a truncated shard, a missing one, one of another model, one that is another's."""
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    flip(folder / "base" / "00001.h5")
    (folder / "base" / "00003.h5").write_bytes((folder / "base" / "00003.h5").read_bytes()[:-200])
    (folder / "base" / "00004.h5").unlink()
    shutil.copy(folder / "easy-10" / "00005.h5", folder / "base" / "00005.h5")
    shutil.copy(folder / "easy-10" / "00002.h5", folder / "easy-10" / "00001.h5")
    return folder


def test_a_whole_store_is_whole(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_store(whole) == []
    main(["store", "show", str(whole)])
    assert f"{SITES[0]}: d_model 16" in capsys.readouterr().out


def test_a_manifest_of_another_store_is_not_shown(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    edit(folder, lambda m: m["readers"][1].update(weights="sha256:another"))
    assert "is the shard of other weights" in fails(capsys, "store", "show", str(folder)).err


@pytest.mark.slow
def test_any_flipped_byte_is_found(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    path = folder / "easy-10" / "00000.h5"
    before = path.read_bytes()
    for position in random.Random(0).sample(range(len(before)), 25):
        flip(path, position)
        assert [damage.file for damage in check_store(folder)] == ["easy-10/00000.h5"], position
        path.write_bytes(before)
    assert check_store(folder) == []


def test_damaged_shards_are_named(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(fails(capsys, "verify", damaged, "--json", "-").out)["artefacts"]
    said = dict(one.split(": ", 1) for one in re.split(r"; (?=\w[-\w]*/\d+\.h5: )", found["what"]))
    assert found["state"] == "damaged"
    assert "bytes have changed" in said["base/00001.h5"]
    assert "cannot be read" in said["base/00003.h5"]
    assert "missing" in said["base/00004.h5"]
    assert "is the shard of other weights" in said["base/00005.h5"]
    assert set(said) == {f"base/0000{i}.h5" for i in (1, 3, 4, 5)} | {"easy-10/00001.h5"}


def test_damaged_shards_are_captured_again(
    again: Again, damaged: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched = damaged / "base" / "00000.h5"
    stamp = untouched.stat().st_mtime_ns
    for index in (1, 0):
        again(damaged, part=Part(index, 2))
    assert capsys.readouterr().err.count("it is captured again") == 5
    assert contents(damaged) == contents(whole)
    assert untouched.stat().st_mtime_ns == stamp


def test_a_shard_captured_with_less_memory_is_captured_again_with_its_bytes(
    again: Again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch, 40, ERRORS[0])
    store = again(tmp_path / "acts")
    before = contents(store.path)
    flip(store.path / "base" / "00002.h5")
    again(tmp_path / "acts")
    assert contents(store.path) == before


def test_a_checkpoint_rewritten_while_shards_are_captured_again_is_refused(
    again: Again, damaged: Path, series_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    series, capture_one = CheckpointSeries.load(tmp_path / "series"), recording.capture_shard

    def then_rewritten(*args: Any) -> dict[str, Any]:
        entry = capture_one(*args)
        rewrite(tmp_path / "series" / "base")
        return entry

    manifest = (damaged / "manifest.json").read_bytes()
    monkeypatch.setattr(recording, "capture_shard", then_rewritten)
    refuses("series/base: its weights or its config changed while they were in use", again, damaged, series=series)
    assert (damaged / "manifest.json").read_bytes() == manifest


def test_capturing_again_does_not_follow_links_or_paths_out_of_the_store(
    again: Again, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    outside = tmp_path / "outside.h5"
    shutil.move(folder / "base" / "00000.h5", outside)
    (folder / "base" / "00000.h5").symlink_to(outside)
    edit(folder, lambda m: m["readers"][0]["shards"][1].update(file="../outside.h5"))
    before = outside.read_bytes()
    damages = check_store(folder)
    assert [damage.number for damage in damages] == [0, 1]
    assert all("leaves the store" in damage.what for damage in damages)
    again(folder)
    assert outside.read_bytes() == before
    assert not (folder / "base" / "00000.h5").is_symlink()
    assert contents(folder) == contents(whole)


def test_an_unfinished_store_can_be_checked(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    edit(folder, lambda m: (m.update(complete=False), m["readers"][1].update(shards=[])))
    assert "incomplete: was not finished" in fails(capsys, "verify", folder).out
    flip(folder / "base" / "00000.h5")
    assert "damaged: base/00000.h5: " in fails(capsys, "verify", folder).out


def test_a_damaged_copy_of_the_rollouts_is_put_right_by_the_same_capture(
    again: Again, rollouts: Rollouts, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "acts"))
    make_rollouts(seed=5).write(folder / "rollouts.parquet")
    refuses(r"not the rollouts that were captured.*Run the same `tsae capture` again", check_store, folder)
    again(folder)
    assert check_store(folder) == []
