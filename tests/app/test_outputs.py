"""Outputs never replace inputs, nor what another program or command wrote."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from dataclasses import fields, make_dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import tsae
from support.builders import make_rollouts
from support.cli import commands
from support.refusals import fails, refuses
from tsae.base.artefact import Kind, running_command, write_artefact
from tsae.cli import main, parse
from tsae.commands.outputs import FILES, FOLDERS, LOOK_THEMSELVES, check_outputs
from tsae.rollouts.parquet import write_table


def checked(command: str) -> None:
    options = parse(command.split())
    check_outputs(getattr(options, "command", options))


def write_parquet(file: str, command: str = "", info: str = "") -> None:
    """A Parquet file, as a command writes it or as Python code does."""
    table = pa.table({"a": [1]})
    with running_command(command.split(), Path(file)):
        write_table(Path(file), table.schema, [table], {key: {} for key in info.split()})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rollouts, and with files and folders of others."""
    monkeypatch.chdir(tmp_path)
    make_rollouts(n_problems=3).write("rollouts.parquet")
    write_artefact("store", Kind("store", 1, "", ""), None)
    for folder in ("folder", "demo", "mine", "unfinished/pieces"):
        Path(folder).mkdir(parents=True)
    Path("demo/demo.json").write_text("{}")
    Path("mine/shifts.parquet").write_text("mine")
    Path("unfinished/pieces/encoding.json").write_text("{}")
    Path("unfinished/means.h5").write_text("half")
    Path("notes.txt").write_text("precious")
    Path("mine.html").write_text("<!DOCTYPE html><p>mine")
    Path("mine.json").write_text('{"mine": 1}')
    for name in ("problems.jsonl", "mine.jsonl"):
        Path(name).write_text('{"id": "1", "prompt": "1+1?", "answer": "2"}\n')
    pd.DataFrame({"a": [1]}).to_parquet("other.parquet")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("report --diff diff --to mine.html", "not a file with a page"),
        ("report --diff diff --to pipe", "a device or a pipe"),
        ("diff --features features --to pipe", "a device or a pipe"),
        ("rollouts bands --rollouts rollouts.parquet --to other.parquet", "not a file with rollouts in bands"),
        ("rollouts bands --rollouts rollouts.parquet --to rollouts.parquet", "an input too (--rollouts)"),
        ("rollouts bands --rollouts rollouts.parquet --to ./folder/../rollouts.parquet", "an input too"),
        ("rollouts bands --rollouts rollouts.parquet --to folder", "a folder, and a file is to be written"),
        ("reformulate problems.jsonl --to mine.jsonl", "not a file with reformulated problems"),
        ("demo --to notes.txt", "a file, and a folder is to be written"),
        ("encode --sae sae --store folder --to folder", "an input too (--store)"),
        ("diff --features features --to store", "another command (store)"),
        ("run folder --to store", "another command (store)"),
        ("diff --features features --to demo", "another command (run)"),
        ("diff --features features --to mine", "holds shifts.parquet, which this command did not write"),
        ("diff --features features --to unfinished", ""),
        ("diff --features features --to out --markdown notes.txt", "not a file with a Markdown table"),
        ("diff --features features --to out --series rollouts.parquet --markdown rollouts.parquet", "an input too"),
        ("rollouts difficulty --rollouts rollouts.parquet --json mine.json", "not a file with JSON"),
        ("store statistics folder --to rollouts.parquet", "not a file with token statistics"),
        ("credit weights --credit a --features b --store c --to other.parquet", "not a file with token weights"),
        ("rollouts behaviours --rollouts rollouts.parquet --to a.out --json a.out", "the output of --to, too"),
        ("diff --features features --to out --json ./f.json --markdown f.json", "the output of --json, too"),
        ("diff --features features --to out --json out/diff.json", "lies in the folder that is written (--to out)"),
        ("rollouts difficulty --rollouts folder/r.parquet --to folder", ""),
    ],
)
def test_what_others_wrote_is_left_alone(
    command: str, why: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not why:
        checked(command)
        return
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert why in " ".join(fails(capsys, *command.split()).err.split())
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_a_command_may_write_its_own_output_again(here: Path) -> None:
    for _ in range(2):
        main(["rollouts", "bands", "--rollouts", "rollouts.parquet", "--to", "banded.parquet"])
        main(["rollouts", "difficulty", "--rollouts", "rollouts.parquet", "--json", "found.json", "--to", "found"])
    assert json.loads(Path("found.json").read_text())
    for name, content in (("empty", b""), ("damaged", Path("rollouts.parquet").read_bytes()[:-50])):
        Path(f"{name}.parquet").write_bytes(content)  # nothing is lost
        main(["rollouts", "bands", "--rollouts", "rollouts.parquet", "--to", f"{name}.parquet"])
        found = tsae.Rollouts.read(f"{name}.parquet")
        assert found.table.equals(tsae.Rollouts.read("banded.parquet").table)
    Path("page.html").write_text('<!DOCTYPE html>\n<html><head><meta name="generator" content="tsae">')
    checked("report --diff diff --to page.html")


COMMANDS = {
    "import": "rollouts import log --to x.parquet",
    "sample": "rollouts sample --series a --problems problems.jsonl --to x.parquet",
    "bands": "rollouts bands --rollouts in.parquet --to x.parquet",
    "behaviours": "rollouts behaviours --rollouts in.parquet --to x.parquet",
}


@pytest.mark.parametrize("later", COMMANDS)
@pytest.mark.parametrize("earlier", [*COMMANDS, ""])
def test_rollouts_of_another_command_stay(earlier: str, later: str, here: Path) -> None:
    write_parquet("x.parquet", COMMANDS.get(earlier, ""), "log bands")
    if earlier == later:
        checked(COMMANDS[later])
    else:
        refuses("that this command could replace", checked, COMMANDS[later])


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_known_by_its_manifest(name: str, here: Path) -> None:
    own = Path("own")
    command = make_dataclass(name, ["to"])(own)
    for kind in set(FOLDERS.values()):
        write_artefact(own, Kind(kind, 1, "", ""), None, {"table.parquet": lambda file: file.write_text("damaged")})
        if kind == FOLDERS[name]:
            check_outputs(command)
        else:
            refuses("results of another command", check_outputs, command)
        shutil.rmtree(own)
    own.mkdir()
    (own / "table.parquet").write_text("mine")
    if name in LOOK_THEMSELVES:
        check_outputs(command)
    else:
        refuses(r"holds table\.parquet, which this command did not write", check_outputs, command)


def test_every_output_is_known_to_be_a_file_or_a_folder() -> None:
    """The help of --to tells it; that of a new command must tell it too."""
    written = [kind for kind in commands().values() if "to" in {field.name for field in fields(kind)}]
    assert len(written) > 15
    for kind in written:
        help_text = re.split(r"    to: (?:Daily\[)?Path", inspect.getsource(kind))[1].split('"""')[1].lower()
        assert ("folder" in help_text.split(";")[0]) != (kind.__name__ in FILES), (kind, help_text)
        assert (kind.__name__ in FILES) != (kind.__name__ in FOLDERS), kind
