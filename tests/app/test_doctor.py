"""`tsae doctor`: what a run has and lacks, before anything is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from support.cli import run
from tsae import testbed
from tsae.config import RunConfig
from tsae.doctor import Finding, examine

BASE = str(testbed.series().base.path)


def examined(path: Path, to: Path, **options: object) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(RunConfig(path=path, to=to / "out", **options))}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The shipped mixed run, to be changed."""
    return Path(shutil.copytree(testbed.mixed_run(), tmp_path / "mixed"))


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    found = examined(testbed.mixed_run(), tmp_path, base=BASE)
    assert list(found) == [
        "base", "checkpoints", "log", "success", "tokens", "bands", "settings", "attribution", "device", "disk", "time"
    ]  # fmt: skip
    assert {finding.state for finding in found.values()} == {"ok"}
    assert not any(finding.fix for finding in found.values())
    assert "1,024 trajectories, steps 1 to 16" in found["log"].what
    log = pd.concat(map(pd.read_parquet, (testbed.mixed_run() / "completions").glob("*.parquet")))
    right = log.accuracy_reward.groupby(log.prompt).mean()
    easy, hard = (right >= 0.75).sum(), (right <= 0.25).sum()
    bands = f"easy {easy}, medium {len(right) - easy - hard}, hard {hard}"
    assert bands in found["bands"].what
    assert f"{log.accuracy_reward.gt(0).mean():.0%} of 1,024 are right" in found["success"].what


def test_what_is_missing_is_named_with_the_option_that_adds_it(mixed: Path, tmp_path: Path) -> None:
    (mixed / "checkpoint-16" / "training_args.bin").unlink()
    for file in (mixed / "completions").iterdir():
        table = pd.read_parquet(file).drop(columns="completion_ids")
        table.rename(columns={"format_reward": "one_reward", "accuracy_reward": "other_reward"}).to_parquet(file)
    found = examined(mixed, tmp_path, device="cuda")
    assert found["base"].state == found["device"].state == "missing"
    assert found["settings"].state == found["attribution"].state == "note"
    assert "training_args.bin" in found["settings"].fix
    assert "--base MODEL" in found["base"].fix
    assert found["log"].state == "missing"
    assert "--outcome" in found["log"].fix
    named = examined(mixed, tmp_path, base=BASE, importing={"outcome": "one_reward"})
    assert named["log"].state == named["success"].state == "ok"
    assert named["tokens"].state == "note"


def test_of_a_run_without_a_log_nothing_is_said_of_the_log(mixed: Path, tmp_path: Path) -> None:
    shutil.rmtree(mixed / "completions")
    found = examined(mixed, tmp_path, base=BASE)
    assert found["log"].state == "missing"
    assert not found.keys() & {"success", "tokens", "bands", "attribution"}


def test_a_stand_in_for_the_base_and_thin_bands(mixed: Path, tmp_path: Path) -> None:
    shutil.copytree(mixed / "checkpoint-16", mixed / "checkpoint-8")
    for file in sorted((mixed / "completions").iterdir())[1:]:
        file.unlink()
    found = examined(mixed, tmp_path)
    assert found["base"].state == "note"
    assert "stands in for the base" in found["base"].what
    assert found["bands"].state == "note"
    assert "--bands-from" in found["bands"].fix


def test_bands_from_elsewhere(mixed: Path, tmp_path: Path) -> None:
    log = pd.concat(map(pd.read_parquet, (mixed / "completions").glob("*.parquet")))
    prompts = sorted(set(log.prompt))
    data = pd.DataFrame({"problem": prompts, "rate": [(i % 5) / 4 for i in range(len(prompts))]}).iloc[1:]
    data.to_parquet(tmp_path / "data.parquet")
    asked = {"difficulty": tmp_path / "data.parquet", "difficulty_column": "rate", "difficulty_model": "X"}
    found = examined(mixed, tmp_path, base=BASE, source=asked)
    assert found["difficulty"].state == "ok"
    assert f"difficulty for model X: problems: easy {(data.rate >= 0.75).sum()}, " in found["difficulty"].what
    assert "1 problems have no band" in found["difficulty"].what
    assert "by the log's own pass rates" in found["bands"].what
    found = examined(mixed, tmp_path, base=BASE, source={**asked, "difficulty_column": "no"})
    assert found["difficulty"].state == "missing"
    assert "has no column no" in found["difficulty"].what


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, to = str(testbed.mixed_run()), str(tmp_path / "out")
    run("doctor", path, "--base", BASE, "--to", to, "--json", "-")
    printed = capsys.readouterr()
    assert [finding["state"] for finding in json.loads(printed.out)["findings"]] == ["ok"] * 11
    assert "attribution  ok" in printed.err
    with pytest.raises(SystemExit) as stopped:
        run("doctor", path, "--to", to)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "-> --base MODEL" in printed.out
    assert "the run lacks base" in printed.err
    assert not Path(to).exists()
