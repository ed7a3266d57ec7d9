"""`tsae claims` on folders of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tsae
from support.cli import run
from support.damage import flip
from support.refusals import fails, refuses
from support.results import BANDS, answers, checkpoint, write_run
from tsae.base.artefact import read_record, write_record
from tsae.claims.run_claims import claims_before
from tsae.verify import verify

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
    assert "c  Lone successes: needs the log of the training's own responses; add it by `tsae run`" in printed
    assert "One training run: problems are the unit" in " ".join(printed.split())
    assert f"wrote {folder / 'claims.json'}" in printed
    assert len(read_record(folder / "claims.json", "")["claims"]) == 26
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


def test_what_a_function_of_yours_found_is_not_lost(folder: Path) -> None:
    """A page that is written anew keeps what it found."""
    run("claims", folder, "--check", "support.cli:every_step")
    found = tsae.Claims.load(folder)
    assert found is not None
    assert found.info["check"] == "support.cli:every_step"
    again = tsae.claims_of(folder).with_steps_of(claims_before(folder, tsae.FeatureDiff.load(folder / "diff")))
    assert again == found
    assert "to know which steps" in tsae.claims_of(folder)["p"]["needs"]


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--only", "A"), "no claim 'A'"), (("--check", "nothing"), "check"), (("--json", "analysis"), "is an input too")],
)
def test_wrong_options(
    folder: Path, args: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert said in fails(capsys, "claims", "analysis", *args).err


def test_the_report_shows_what_was_kept(folder: Path) -> None:
    run("claims", folder)
    run("report", "--diff", folder / "diff", "--to", folder / "page.html")
    assert '<span class="chip reproduced">' in (folder / "page.html").read_text()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda file: flip(file, file.stat().st_size // 2),
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "link": lambda file: (file.unlink(), file.symlink_to(file.parent / "nowhere")),
}


def other_run(file: Path) -> None:
    """The claims of a run with other responses."""
    records = answers("base", LEVEL) + answers("run-10", LEVEL)
    other = write_run(file.parent.with_name("other"), records, [checkpoint("run-10", "run", trained_on="hard")])
    tsae.claims_of(other).save(file.parent)


@pytest.mark.parametrize("how", [*DAMAGES, "other"])
def test_damaged_claims_are_refused_and_named(how: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("claims", folder)
    write_record(folder / "run.json", {"kind": "run", "run": {}})
    file = folder / "claims.json"
    DAMAGES.get(how, other_run)(file)
    capsys.readouterr()
    said = fails(capsys, "report", "--diff", folder / "diff", "--to", folder / "page.html").err
    assert "claims.json" in said
    assert "tsae claims RUN" in said
    assert not (folder / "page.html").exists()
    found = {finding.path.name: finding for finding in verify([folder], progress=False)}
    assert found["claims.json"].state == {"other": "outdated", "link": "missing", "folder": "missing"}.get(
        how, "damaged"
    )


def test_claims_of_another_sae_are_refused(folder: Path) -> None:
    found = tsae.claims_of(folder)
    replace(found, info={**found.info, "sae": "of another"}).save(folder)
    diff = tsae.FeatureDiff.load(folder / "diff")
    diff.info["sae"] = {"weights": "mine"}
    refuses("weights of the SAE", tsae.Claims.load, folder, diff)


def test_claims_take_no_folders_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "claims.json").mkdir()
    assert "claims.json" in fails(capsys, "claims", folder).err


def test_a_run_without_its_claims_is_said_to_lack_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But not one of before there were claims."""
    write_record(folder / "run.json", {"kind": "run", "run": {}})

    def found() -> dict[str, str]:
        return {finding.path.name: finding.state for finding in verify([folder], progress=False)}

    assert "claims.json" not in found()
    (folder / "stages.json").write_text(json.dumps({"claims": "Of 26 claims …"}))
    assert found()["claims.json"] == "missing"
    assert "tsae claims" in fails(capsys, "report", "--diff", folder / "diff", "--to", folder / "page.html").err
