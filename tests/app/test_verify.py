"""`tsae verify`: what is damaged, lost, unfinished or outdated is named, with the command that makes it again."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.builders import digests, synthetic_store
from support.cli import run
from support.damage import flip
from support.planted import planted
from support.refusals import fails, refuses
from tsae.base.artefact import MANIFEST, read_record, running_command, write_record
from tsae.diff.feature_diff import FeatureDiff
from tsae.rl.run_log import RunLog
from tsae.rollouts.parquet import write_table
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.stages import RunRecord
from tsae.verify import Finding, verify


@pytest.fixture
def copy(results: Path, tmp_path: Path) -> Path:
    """Rollouts, features and a diff, and a file of somebody else."""
    others = shutil.ignore_patterns("influence", "credit", "attribution")
    folder = Path(shutil.copytree(results, tmp_path / "results", ignore=others))
    (folder / "notes.txt").write_text("mine")
    return folder


def found(*paths: Path) -> dict[str, Finding]:
    return {finding.path.name: finding for finding in verify(paths, progress=False)}


def states(*paths: Path) -> dict[str, str]:
    return {name: finding.state for name, finding in found(*paths).items()}


def test_what_is_whole_is_said_to_be(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states(copy) == dict.fromkeys(("rollouts.parquet", "features", "diff"), "intact")
    assert states(copy / "diff", copy / "rollouts.parquet") == {"rollouts.parquet": "intact", "diff": "intact"}
    run("verify", copy, "--json", "-")
    said = json.loads(capsys.readouterr().out)["artefacts"]
    assert [(one["kind"], one["state"], one["command"]) for one in said] == [
        ("rollouts", "intact", ""), ("features", "intact", ""), ("diff", "intact", ""),
    ]  # fmt: skip


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "main file": ("features", lambda f: (f / "features.json").unlink(), "damaged", "features.json"),
    "manifest": ("diff", lambda f: flip(f / MANIFEST, 30), "damaged", MANIFEST),
    "table": ("diff", lambda f: (f / "shifts.parquet").unlink(), "damaged", "shifts.parquet"),
    "cut": ("rollouts.parquet", lambda f: f.write_bytes(f.read_bytes()[:-7]), "damaged", "not a Parquet file"),
    "encoding": ("diff", lambda f: (shutil.rmtree(f), (f / "pieces").mkdir(parents=True),
                                    (f / "pieces" / "encoding.json").touch()), "incomplete", "was not finished"),
    "killed": ("diff", lambda f: (f / MANIFEST).rename(f / f".{MANIFEST}.tsae.tmp"), "incomplete", "was not finished"),
    "version": ("diff", lambda f: write_record(f / MANIFEST, {**read_record(f / MANIFEST, ""), "version": 99}),
                "other version", "is a diff of version 99"),
}  # fmt: skip


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_what_is_damaged_is_named(damage: str, copy: Path) -> None:
    name, do, state, what = DAMAGES[damage]
    do(copy / name)
    findings = found(copy)
    assert findings[name].state == state
    assert what in findings[name].what
    assert "which command made it is not known" in findings[name].what
    assert all(other.state == "intact" for place, other in findings.items() if place != name)


def test_files_that_are_like_ours_are_not_read_as_such(copy: Path) -> None:
    before = states(copy)
    for number, text in enumerate(("3", '["sites"]', '{"a": 1}')):
        folder = copy / f"other-{number}"
        folder.mkdir()
        for name in ("run.json", "claims.json", "config.json"):
            (folder / name).write_text(text)
    pq.write_table(pa.table({"a": [1]}), copy / "plain.parquet")
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"tsae": "3"}), copy / "other.parquet")
    assert states(copy) == {**before, "other.parquet": "damaged"}


def _everything(folder: Path) -> dict[str, tuple[str, str]]:
    """Beside `results` small artefacts of further kinds: of all of them the kind, and a file of each."""
    TemporalSAE(3, SAEConfig(d_sae=8, k=2), site="x.site").save(folder / "sae")
    store = synthetic_store(folder / "acts", [np.ones((4, 3), np.float32) for _ in range(3)])
    RunLog(folder / "tsae", {}).add(1, [{"advantage": 0.5, "prompt_ids": [1], "response_ids": [3]}])
    table = pa.table({"a": [1.0]})
    write_table(folder / "statistics.parquet", table.schema, [table], {"kind": "token statistics"})
    return {
        "rollouts.parquet": ("rollouts", ""),
        "features": ("features", "columns.h5"),
        "diff": ("diff", "shifts.parquet"),
        "attribution": ("attribution", "targets.parquet"),
        "influence": ("influence", "influence.parquet"),
        "credit": ("credit", "credit.safetensors"),
        "sae": ("SAE", "training.json"),
        "acts": ("store", store.manifest["readers"][0]["shards"][0]["file"]),
        "tsae/generations/generation-000001-rank-0.parquet": ("table", ""),
        "statistics.parquet": ("table", ""),
    }


def test_every_kind_is_known_and_its_damage_found(results: Path, tmp_path: Path) -> None:
    expected = _everything(shutil.copytree(results, tmp_path, dirs_exist_ok=True))
    findings = {f.path.relative_to(tmp_path).as_posix(): f for f in verify([tmp_path], progress=False)}
    assert {name: (finding.kind, finding.state) for name, finding in findings.items()} == {
        name: (kind, "intact") for name, (kind, _) in expected.items()
    }
    for name, (_, file) in expected.items():
        flip(tmp_path / name / file if file else tmp_path / name, -2)
    for finding in verify([tmp_path], progress=False):
        file = expected[finding.path.relative_to(tmp_path).as_posix()][1]
        assert finding.state == "damaged", finding
        assert file in finding.what


def test_the_exit_status_says_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / "diff" / "shifts.parquet", 99)
    said = fails(capsys, "verify", copy)
    assert "shifts.parquet is damaged: its bytes have changed since it was written; which" in said.out
    assert "1 of 3 artefacts are not intact" in said.err
    (copy / "empty").mkdir()
    assert "not ours: holds nothing that tsae wrote" in fails(capsys, "verify", copy / "empty").out
    assert "is not there" in fails(capsys, "verify", copy / "nothing").err


def test_a_diff_of_other_features_is_outdated(copy: Path) -> None:
    words = ["diff", "--features", str(copy / "features"), "--to", str(copy / "diff")]
    with running_command(words, copy / "diff"):
        FeatureDiff.load(copy / "diff").save(copy / "diff")
    assert states(copy)["diff"] == "intact"
    shutil.rmtree(copy / "features")
    planted(n_problems=13, n_samples=4).table.save(copy / "features")
    finding = found(copy)["diff"]
    assert finding.state == "outdated"
    assert "was made from other" in finding.what
    assert f"tsae diff --features {copy}/features" in finding.command


def test_names_with_line_breaks_pass_for_no_lines_of_ours(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = copy / "x\nfeatures  features  intact\t\x1b[2J"
    (copy / "diff").rename(odd)
    (copy / "features").rename(copy / "diff")
    flip(odd / "shifts.parquet", 99)
    said = fails(capsys, "verify", copy)
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
        refuses("folders are nested too deeply", verify, [tmp_path], progress=False)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("causal", [5, [3, "", "..", "../..", "a/b", "x" * 5000, "a\0b", "\ud800"], {"a": 1}, None])
def test_a_run_that_names_no_folders_of_tests(causal: Any, tmp_path: Path) -> None:
    RunRecord(tmp_path, "run.json", {"run": {"path": "a"}, "versions": {}}, "an analysis")
    for names in ([], 3, {"causal": causal}):
        write_record(tmp_path / "run.json", {"kind": "run", "run": {"path": "a"}, "found": names})
        said = {finding.path for finding in verify([tmp_path], progress=False)}
        assert {path.parent for path in said} <= {
            tmp_path,
            *(tmp_path / name for name in ("rollouts", "causal", "evaluation")),
        }


def test_a_shard_that_links_to_itself_is_damaged(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "acts", [np.ones((4, 3), np.float32)])
    file = store.path / store.manifest["readers"][0]["shards"][0]["file"]
    file.unlink()
    file.symlink_to(file.name)
    (finding,) = verify([store.path], progress=False)
    assert (finding.state, "leads nowhere" in finding.what or "cannot be read" in finding.what) == ("damaged", True)


@pytest.mark.slow
def test_a_run_is_made_again_from_what_is_left_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = tmp_path / "demo"
    words = ("demo", "--to", demo, "--problems", 14, "--samples", 4, "--band-samples", 12, "--sae.d-sae", 64,
             "--sae.k", 4, "--training.tokens", 40_000)  # fmt: skip
    run(*words)
    before = digests(demo)
    assert set(states(demo).values()) == {"intact"}
    for name in ("activations/base/00000.h5", "sae/training.json", "features/means.h5"):
        flip(demo / name, len((demo / name).read_bytes()) // 2)
    shutil.rmtree(demo / "diff")
    capsys.readouterr()
    said = fails(capsys, "verify", demo).out
    assert said.count("  damaged") == 3
    assert "missing: is not there" in said
    assert said.count("-> tsae demo --to") == 2  # the store, whose damaged shards are captured again, and the lost diff
    assert said.count("-> remove it, then: tsae demo --to") == 2
    run(*words)
    assert f"{demo / 'sae'}: training.json is damaged" in capsys.readouterr().out
    assert digests(demo) == before
