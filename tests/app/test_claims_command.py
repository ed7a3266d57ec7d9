"""`tsae claims` on folders of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tsae
from support.cli import run
from support.damage import flip
from support.runs import BANDS, answers, checkpoint, write_run
from tsae.base.seal import read_sealed
from tsae.upkeep.kinds import CLAIMS, kind_of_file

LEVEL = {band: [1, 2, 1, 2, 2, 1, 1, 2, 3, 2] for band in BANDS}
LOWER = {band: [max(0, k - (i % 5 > 0)) for i, k in enumerate(LEVEL[band])] for band in BANDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = answers("base", LEVEL) + answers("run-10", LOWER)
    return write_run(tmp_path / "analysis", records, [checkpoint("run-10", "run", trained_on="hard")])


def test_a_table_and_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("claims", folder)
    printed = capsys.readouterr().out
    assert "b  Hard harms: reproduced" in printed
    assert "10 problems  as claimed" in printed
    assert "Cannot be tested on this run:" in printed
    assert "c  Lone successes: needs the log of the training's own responses, add it by `tsae run`" in printed
    assert "One training run: problems are the unit" in " ".join(printed.split())
    assert f"wrote {folder / 'claims.json'}" in printed
    assert len(read_sealed(folder / "claims.json", "")["claims"]) == 22
    assert str(tsae.Claims.load(folder)).split() == printed.partition("\nwrote ")[0].split()


def test_some_alone_are_not_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("claims", folder, "--only", "b", "h", "--json", "-")
    found = json.loads(capsys.readouterr().out)
    assert [(one["claim"], one["verdict"]) for one in found["claims"]] == [
        ("b", "reproduced"),
        ("h", "cannot be tested"),
    ]
    assert found["claims"][0]["parts"][0]["n"] == 10
    assert not (folder / "claims.json").exists()


def test_steps_are_checked_by_your_own_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("claims", folder, "--only", "p", "--check", "support.cli:every_step")
    assert "p  Coherent, not valid: needs problems that differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--only", "z"), "no claim 'z'"), (("--check", "nothing"), "check"), (("--json", "analysis"), "is an input too")],
)
def test_wrong_options(
    folder: Path, args: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SystemExit) as ended:
        run("claims", "analysis", *args)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("claims", tmp_path)
    assert "holds no rollouts of a run" in capsys.readouterr().err


def test_the_report_shows_what_was_kept(folder: Path) -> None:
    run("claims", folder)
    run("report", "--diff", folder / "diff", "--to", folder / "page.html")
    assert '<span class="chip reproduced">' in (folder / "page.html").read_text()


def test_damage_is_seen_by_verify(folder: Path) -> None:
    run("claims", folder)
    file = folder / "claims.json"
    assert kind_of_file(file) is None  # no run's
    (folder / "run.json").write_text("{}")
    assert kind_of_file(file) is CLAIMS
    assert CLAIMS.check(file)
    flip(file, file.stat().st_size // 2)
    with pytest.raises(tsae.TsaeError):
        CLAIMS.check(file)
