"""`tsae verify` and `tsae repair`: what is damaged is named, and made again with the bytes that it had."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.builders import synthetic_store
from support.cli import run
from support.damage import flip
from support.planted import planted, small_credit
from support.results import make_attribution
from tsae.activations.config import CaptureConfig
from tsae.activations.shards.manifest import write_manifest
from tsae.attribution.config import AttributionConfig
from tsae.base.disk.made_by import command_file, made_by, record_command
from tsae.base.files import sha256, write_json
from tsae.base.provenance import write_run
from tsae.base.seal import SEAL, read_sealed, with_checksum
from tsae.cli import main, parse
from tsae.config import DemoConfig, RunConfig
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import FeatureDiff, feature_diff
from tsae.diff.influence import Influence
from tsae.errors import TsaeError
from tsae.report.document import check_page, render_page, write_page
from tsae.rl.run_log import RunLog
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.parquet import write_table
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.stamps import claim, stamp_copy
from tsae.testbed import series_path
from tsae.upkeep.find import Artefact, aside_name
from tsae.upkeep.kinds import FOLDERS
from tsae.upkeep.mend import _aside, remedy, repair
from tsae.upkeep.stamped import stamped_command
from tsae.upkeep.verify import Finding, verify

QUICK = DiffConfig(n_bootstrap=100, n_permutations=100, threads=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python code wrote: features and a diff, and files of somebody else."""
    folder = tmp_path_factory.mktemp("results")
    world = planted(n_problems=12, n_samples=4).table
    world.save(folder / "features")
    feature_diff(world, QUICK, progress=False).save(folder / "diff")
    world.rollouts.write(folder / "rollouts.parquet")
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def copy(results: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(results, tmp_path / "results"))


def states(*paths: Path) -> dict[str, str]:
    return {finding.artefact.path.name: finding.state for finding in verify(paths, progress=False)}


def test_what_is_whole_is_said_to_be(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states(results) == dict.fromkeys(("rollouts.parquet", "features", "diff"), "intact")
    assert states(results / "diff", results / "rollouts.parquet") == {"rollouts.parquet": "intact", "diff": "intact"}
    run("verify", results, "--json", "-")
    said = json.loads(capsys.readouterr().out)["artefacts"]
    assert [(one["kind"], one["state"], one["remedy"]) for one in said] == [
        ("rollouts", "intact", ""), ("features", "intact", ""), ("diff", "intact", ""),
    ]  # fmt: skip


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "byte": ("features", lambda f: flip(f / "columns.h5", 5000), "damaged", "columns.h5 is damaged"),
    "run": ("features", lambda f: (f / "features.json").unlink(), "damaged", "features.json"),
    "seal": ("diff", lambda f: (f / SEAL).unlink(), "damaged", "its checksums.json is missing"),
    "table": ("diff", lambda f: (f / "shifts.parquet").unlink(), "damaged", "shifts.parquet"),
    "cut": ("rollouts.parquet", lambda f: f.write_bytes(f.read_bytes()[:-7]), "damaged", "not a Parquet file"),
    "bit": ("rollouts.parquet", lambda f: flip(f, 321), "damaged", "its bytes have changed"),
    "unfinished": ("diff", lambda f: (shutil.rmtree(f), (f / "pieces").mkdir(parents=True),
                                      (f / "features.h5").touch()), "incomplete", "was not finished"),
}  # fmt: skip


def test_files_that_are_like_ours_are_not_read_as_such(copy: Path) -> None:
    before = states(copy)
    for number, text in enumerate(("3", "[" * 100_000, '["sites"]', "\udc80")):
        folder = copy / f"other-{number}"
        folder.mkdir()
        for name in ("run.json", "manifest.json", "config.json"):
            (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"tsae": "3"}), copy / "other.parquet")
    assert states(copy) == {**before, "other.parquet": "damaged"}


def test_a_page_that_is_cut(tmp_path: Path) -> None:
    page = write_page(tmp_path / "page.html", render_page("document.html", "A page", {}))
    check_page(page)
    whole = page.read_bytes()
    page.write_bytes(whole[: whole.index(b"</html>") + len(b"</html>")])
    with pytest.raises(TsaeError, match="its bytes have changed"):
        check_page(page)


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_what_is_damaged_is_named(damage: str, copy: Path) -> None:
    name, do, state, what = DAMAGES[damage]
    do(copy / name)
    found = {finding.artefact.path.name: finding for finding in verify([copy], progress=False)}
    assert found.pop(name).state == state
    assert all(other.state == "intact" for other in found.values())
    whole = {finding.artefact.path.name: finding for finding in verify([copy], progress=False)}
    assert what in whole[name].what


def _everything(folder: Path) -> dict[str, tuple[str, str]]:
    """Small artefacts of the kinds that no other test here has: their kind, and a file of each."""
    (attribution := make_attribution()).save(folder / "attribution")
    sample = {"trajectory": 0, "problem_id": "p", "feature": 3, "representation": 1.0, "policy_part": 0.5, "total": 1.5}
    Influence(pd.DataFrame([sample]), {"checkpoint": "run"}).save(folder / "influence")
    small_credit().save(folder / "credit")
    TemporalSAE(3, SAEConfig(d_sae=8, k=2), site="x.site").save(folder / "sae")
    store = synthetic_store(folder / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    shard = store.manifest["readers"][0]["shards"][0]
    shard["sha256"] = sha256(store.path / shard["file"])
    write_manifest(store.path / "manifest.json", store.manifest)
    write_run(store.path, "capture", {}, {"rollouts": store.rollouts.fingerprint})
    RunLog(folder / "tsae", {}).add(1, [{"advantage": 0.5, "prompt_ids": [1], "response_ids": [3]}])
    table = attribution.targets
    write_table(folder / "statistics.parquet", *_arrow(table), {"kind": "token statistics"})
    return {
        "attribution": ("attribution", "targets.parquet"),
        "influence": ("influence", "influence.parquet"),
        "credit": ("credit", "credit.safetensors"),
        "sae": ("SAE", "training.json"),
        "acts": ("store", "run.json"),
        "tsae/generations/generation-000001-rank-0.parquet": ("table", ""),
        "statistics.parquet": ("table", ""),
    }


def _arrow(frame: pd.DataFrame) -> tuple[pa.Schema, list[pa.Table]]:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return table.schema, [table]


def test_every_kind_is_known_and_its_damage_found(tmp_path: Path) -> None:
    expected = _everything(tmp_path)
    found = {f.artefact.path.relative_to(tmp_path).as_posix(): f for f in verify([tmp_path], progress=False)}
    assert {name: (finding.artefact.kind.name, finding.state) for name, finding in found.items()} == {
        name: (kind, "intact") for name, (kind, _) in expected.items()
    }
    for name, (_, file) in expected.items():
        flip(tmp_path / name / file if file else tmp_path / name, -2)
    for finding in verify([tmp_path], progress=False):
        file = expected[finding.artefact.path.relative_to(tmp_path).as_posix()][1]
        assert finding.state == "damaged", finding
        assert file in finding.what


def test_the_exit_status_says_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / "diff" / "shifts.parquet", 99)
    for command in ("verify", "repair"):
        with pytest.raises(SystemExit) as ended:
            run(command, copy)
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert "shifts.parquet is damaged: its bytes have changed since it was written; which" in said.out
        assert "1 of 3 artefacts are not intact" in said.err
    (copy / "empty").mkdir()
    with pytest.raises(SystemExit):
        run("verify", copy / "empty")
    assert "not ours: holds nothing that tsae wrote" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("verify", copy / "nothing")
    assert "is not there" in capsys.readouterr().err


def test_a_diff_of_other_features_is_outdated(copy: Path) -> None:
    record_command(copy / "diff", ["diff", "--features", str(copy / "features"), "--to", str(copy / "diff")])
    assert states(copy)["diff"] == "intact"
    shutil.rmtree(copy / "features")
    planted(n_problems=13, n_samples=4).table.save(copy / "features")
    found = verify([copy], progress=False)[-1]
    assert found.state == "outdated"
    assert "was made from other" in found.what
    assert f"tsae diff --features {copy}/features" in str(found.command)


def test_the_command_of_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    record_command(Path("out"), ["diff", "--features", "f", "--to", "out", "--store=s", "t"])
    shutil.move(tmp_path / "a", tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    found = made_by(Path("b/out"))
    assert found is not None
    assert found.where == tmp_path / "b"
    assert str(found) == "(cd b && tsae diff --features f --to out --store=s t)"
    assert found.values("--store") == [tmp_path / "b" / "s", tmp_path / "b" / "t"]
    # Another folder of that name has not been made by it.
    (tmp_path / "c" / "out").mkdir(parents=True)
    shutil.copy(command_file(Path("b/out")), command_file(Path("c/out")))
    moved = made_by(Path("c/out"))
    assert moved is not None
    assert moved.where == tmp_path / "c"
    record_command(Path("b/out"), ["diff", "--to", str(tmp_path / "b" / "out")])
    shutil.copy(command_file(Path("b/out")), command_file(Path("c/out")))
    assert made_by(Path("c/out")) is None
    flip(command_file(Path("b/out")), 20)
    with pytest.raises(TsaeError, match=r"\.out\.command\.json"):
        made_by(Path("b/out"))


def test_a_folder_in_the_place_of_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is computed: the output would have no record, and nothing would say so."""
    folder = command_file(tmp_path / "drift")
    folder.mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["drift", "--series", str(series_path()), "--to", str(tmp_path / "drift")])
    assert "drift.command.json: is a folder, expected the record of a command. Remove it" in capsys.readouterr().err
    assert not (tmp_path / "drift").exists()
    with pytest.raises(TsaeError, match="is a folder, expected the record of a command"):
        made_by(tmp_path / "drift")


def test_the_command_of_an_output_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    record_command(Path("demo"), ["demo", "--open", "--json=x", "--markdown", "y", "--seed", "3"])
    found = made_by(Path("demo"))
    assert found is not None
    assert found.runnable == ["demo", "--seed", "3", "--to", "demo"]
    assert not found.doubt
    record_command(Path("demo"), ["watch", "grpo", "--to", "demo"])
    found = made_by(Path("demo"))
    assert found is not None
    assert found.runnable == ["watch", "grpo", "--to", "demo", "--once"]
    for words in (["demo", "--seed", "3"], ["serve", "--to", "demo"], ["demo"]):
        write_json(command_file(tmp_path / "demo"), with_checksum({"command": words, "from": ".", "output": "demo"}))
        with pytest.raises(TsaeError, match="is no command that writes demo"):
            made_by(Path("demo"))
    twice = {"command": ["demo", "--to", "demo", "--to=x"], "from": ".", "output": "demo"}
    write_json(command_file(tmp_path / "demo"), with_checksum(twice))
    assert made_by(Path("demo")) is None


DOUBTS = {
    "function": (["--annotator", "evil:run"], r"runs code of its own \(evil:run\)"),
    "function, joined": (["--annotator=evil.sub:run"], "runs code of its own"),
    "function, odd names": (["--annotator", "evil:1"], "runs code of its own"),
    "function, other letters": (["--annotator", "évil:run "], "runs code of its own"),
    "cluster": (["--executor", "slurm"], "has the option"),
    "address": (["--server.url", "http://evil.example/v1"], "calls an address"),
    "option": (["--trust-remote-code"], "has the option"),
    "option, underscores": (["--log_to", "tensorboard"], "has the option --log_to"),
    "secret": (["--tokenizer", "hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"], "was not written down, because it is secret"),
}


@pytest.mark.parametrize("doubt", list(DOUBTS))
def test_what_a_stranger_wrote_down_is_not_run_unseen(doubt: str, copy: Path) -> None:
    words, said = DOUBTS[doubt]
    record_command(copy / "diff", ["diff", "--features", str(copy / "features"), "--to", str(copy / "diff"), *words])
    assert "aaaa" not in command_file(copy / "diff").read_text()
    flip(copy / "diff" / "shifts.parquet", 99)
    before = contents(copy)
    with pytest.raises(TsaeError, match=said) as refused:
        repair([copy], trust=doubt == "secret", say=lambda _: None, progress=False)
    assert "tsae diff --features" in str(refused.value)
    assert ("tsae repair --trust" in str(refused.value)) == (doubt != "secret")
    assert contents(copy) == before


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_that_was_kept_is_removed(copy: Path) -> None:
    diff, other = copy / "diff", copy / "other"
    shutil.copytree(diff, other)
    outdated = Finding(Artefact(diff, next(kind for kind in FOLDERS if kind.name == "diff")), "outdated")
    mine = ("diff.before-repair", "diff.damaged", ".diff.damaged")
    for name in mine:
        (copy / name).mkdir()
        (copy / name / "notes.txt").write_text(name)
    # The hidden one is of a repair that was killed when the replacement was already there.
    with _aside([outdated]) as told:
        shutil.copytree(other, diff)
    assert told == [f"{diff} is made again; the one before is kept as diff.before-repair-2"]
    assert contents(copy / "diff.before-repair-2") == contents(diff)
    assert (copy / "diff.damaged-2" / "notes.txt").read_text() == ".diff.damaged"
    # Where nothing is left to be done, it is brought to light.
    said: list[str] = []
    shutil.copytree(other, aside_name(diff))
    assert all(finding.ok for finding in repair([copy], say=said.append, progress=False))
    assert said == [f"{diff}: what an earlier repair had moved aside is kept as diff.damaged-3"]
    assert [(copy / name / "notes.txt").read_text() for name in mine[:2]] == list(mine[:2])
    # What is kept is no artefact, whatever its state.
    flip(copy / "diff.before-repair-2" / "shifts.parquet", 99)
    assert set(states(copy)) == {"rollouts.parquet", "features", "diff", "other"}


def test_names_with_line_breaks_pass_for_no_lines_of_ours(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = copy / "x\nfeatures  features  intact\t\x1b[2J"
    (copy / "diff").rename(odd)
    (copy / "features").rename(copy / "diff")
    flip(odd / "shifts.parquet", 99)
    with pytest.raises(SystemExit):
        run("verify", copy)
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "x‹U+000A›features  features  intact‹U+0009›‹U+001B›[2J" in said.out
    last = said.err.splitlines()[-1]
    assert last.startswith("tsae: ")
    assert "x‹U+000A›features" in last


def test_folders_in_folders_without_end(tmp_path: Path) -> None:
    (tmp_path / "/".join("a" * 150)).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 120)  # as a thousand of them would meet
    try:
        with pytest.raises(TsaeError, match="folders are nested too deeply"):
            verify([tmp_path], progress=False)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("causal", [5, [3, "", "..", "../..", "a/b", "x" * 5000, "a\0b", "\ud800"], {"a": 1}, None])
def test_a_stamp_that_names_no_folders_of_tests(causal: Any, tmp_path: Path) -> None:
    claim(tmp_path, "run.json", {"run": {"path": "a"}}, "an analysis")
    for found in ([], 3, {"causal": causal}):
        write_json(tmp_path / "run.json", with_checksum({"run": {"path": "a"}, "found": found}))
        said = {finding.artefact.path for finding in verify([tmp_path], progress=False)}
        assert {path.parent for path in said} <= {tmp_path, tmp_path / "rollouts", tmp_path / "causal"}


@pytest.mark.slow
def test_a_damaged_diff_is_made_again_with_the_same_bytes(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    run("diff", "--features", "features", "--to", "diff", "--n-permutations", 100, "--n-bootstrap", 100)
    before = contents(copy)
    flip(copy / "diff" / "confounds.parquet", 300)
    lines: list[str] = []
    repair([copy], dry_run=True, say=lines.append, progress=False)
    assert lines == [f"would repair diff: {made_by(copy / 'diff')}"]
    assert contents(copy).keys() == before.keys()
    # A command that fails leaves what was there.
    (copy / "features").rename(copy / "elsewhere")
    damaged = contents(copy / "diff")
    with pytest.raises(TsaeError, match=r"ended with status 2; what was moved aside is back"):
        repair([copy], say=lines.append, progress=False)
    assert contents(copy / "diff") == damaged
    (copy / "elsewhere").rename(copy / "features")
    # Modules in the folder are not imported.
    for module in ("tsae", "json", "evil"):
        (copy / f"{module}.py").write_text("open('imported', 'w')")
    before |= {name: told for name, told in contents(copy).items() if name.endswith(".py")}
    # So does a repair that was killed: the next one goes on.
    (copy / "diff").rename(aside_name(copy / "diff"))
    assert states(copy)["diff"] == "missing"
    assert all(finding.ok for finding in repair([copy], say=lines.append, progress=False))
    assert contents(copy) == before


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("run") / "demo"
    run("demo", "--to", to, "--problems", 14, "--samples", 4, "--band-samples", 12, "--sae.d-sae", 64, "--sae.k", 4,
        "--training.tokens", 40_000)  # fmt: skip
    return to


@pytest.mark.slow
def test_a_run_is_made_again_from_what_is_left_of_it(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(demo)
    assert all(finding.state == "intact" for finding in verify([demo], progress=False))
    changed = ("demo.json", "rollouts.parquet", "activations/base/00000.h5", "activations/run.json",
               "sae/training.json", "evaluation/evaluation.json", "features/means.h5", "report.html")  # fmt: skip
    for name in changed:
        flip(demo / name, len((demo / name).read_bytes()) // 2)
    shutil.rmtree(demo / "diff")
    with pytest.raises(SystemExit):
        run("verify", demo)
    said = capsys.readouterr().out
    assert said.count(": damaged") + said.count("  damaged") == 7
    assert "missing: is not there" in said
    run("repair", demo)
    assert contents(demo) == before
    assert read_sealed(demo / "demo.json", "")["demo"]["seed"] == 0
    assert isinstance(FeatureDiff.load(demo / "diff"), FeatureDiff)


def test_a_run_that_python_started_has_a_command_too(tmp_path: Path) -> None:
    training = TrainingConfig(tokens=5000, resume="never", balance=(), learning_rate=0.5)
    sae = SAEConfig(groups=(0.25, 0.75))
    demo_config = DemoConfig(to=tmp_path / "d", samples=3, steps=True, sae=sae, training=training)
    claim(demo_config.to, "demo.json", {"demo": {**asdict(demo_config), "to": None}}, "a demo")
    importing = ImportConfig(rewards=("a", "b"), skip=("errored",), success_above=0.5)
    attribution = AttributionConfig(n_features=3, budget_gb=4.0)
    config = RunConfig(tmp_path / "grpo", to=tmp_path / "r", base="org/model", seed=4, importing=importing,
                       diff=DiffConfig(n_bootstrap=200), attribute=False, attribution=attribution)  # fmt: skip
    settings = {name: value for name, value in asdict(config).items() if name not in ("path", "to", "device")}
    stamp = {**settings, "diff": config.diff.settings(), "path": config.path}
    claim(config.to, "run.json", {"run": stamp}, "an analysis")
    for wanted in (demo_config, config):
        command = stamped_command(wanted.to)
        assert command is not None
        assert command.where == tmp_path
        found = parse(command.words).config
        assert asdict(found) == {**asdict(wanted), "to": Path(wanted.to.name)}
    found = verify([config.to], progress=False)
    assert {finding.state for finding in found} == {"intact", "missing"}
    assert all(finding.command == stamped_command(config.to) for finding in found)


def test_only_a_copy_with_a_checksum_mends_the_settings_of_a_run(tmp_path: Path) -> None:
    claim(tmp_path / "r", "run.json", {"run": {"path": "a"}}, "an analysis")
    flip(tmp_path / "r" / "run.json", 30)
    finding = next(found for found in verify([tmp_path / "r"], progress=False) if found.state == "damaged")
    assert remedy(finding).startswith("tsae repair ")
    copy = stamp_copy(tmp_path / "r", "run.json")
    copy.rename(tmp_path / "copy")
    assert not remedy(finding)
    copy.symlink_to(tmp_path / "copy")
    assert not remedy(finding)
    copy.unlink()
    write_json(copy, {"run": {"path": "b"}})
    assert not remedy(finding)


def test_a_shard_that_links_to_itself_is_damaged(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32)])
    file = store.path / store.manifest["readers"][0]["shards"][0]["file"]
    write_run(store.path, "capture", {}, {"rollouts": store.rollouts.fingerprint})
    file.unlink()
    file.symlink_to(file.name)
    (finding,) = verify([store.path], progress=False)
    assert (finding.state, "leads nowhere" in finding.what or "cannot be read" in finding.what) == ("damaged", True)


def test_a_store_whose_checkpoints_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    shard = store.manifest["readers"][0]["shards"][0]
    shard["sha256"] = sha256(store.path / shard["file"])
    manifest = {**store.manifest, "config": asdict(CaptureConfig())}
    write_manifest(store.path / "manifest.json", manifest)
    write_run(store.path, "capture", {}, {"rollouts": store.rollouts.fingerprint})
    flip(store.path / shard["file"], 100)
    monkeypatch.chdir(tmp_path)
    for series in ("/gone/away", "org/model", "gone"):
        record_command(store.path, ["capture", "--series", series, "--rollouts", "r.parquet", "--to", str(store.path)])
        (finding,) = (found for found in verify([store.path], progress=False) if not found.ok)
        assert finding.state == "damaged"
        with pytest.raises(TsaeError, match=series):
            repair([store.path], say=lambda _: None, progress=False)
