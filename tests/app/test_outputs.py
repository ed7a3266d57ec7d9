"""Outputs never replace inputs, nor files of other programs."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import tsae.commands
from support.builders import make_rollouts
from tsae.base.artefact import MANIFEST, Kind, running_command, write_artefact
from tsae.cli import main, parse
from tsae.commands.causes import Influence
from tsae.commands.outputs import FILES, KINDS, check_outputs
from tsae.commands.report import Report
from tsae.commands.rollouts import Bands
from tsae.errors import TsaeError
from tsae.rollouts.parquet import write_table


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return make_rollouts(n_problems=3).write(tmp_path / "rollouts.parquet")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("report --diff diff --to rollouts.parquet", "no file with a page of tsae"),
        ("report --diff diff --to precious.html", "no file with a page of tsae"),
        ("report --diff diff --to pipe", "is a device or a pipe, expected a file"),
        ("reinforcement --features features --json pipe", "is a device or a pipe, expected a file"),
        ("diff --features features --to pipe", "is a device or a pipe, expected a file"),
        ("reinforcement --features features --json rollouts.parquet", "no file with JSON results"),
        ("rollouts bands --rollouts rollouts.parquet --to other.parquet", "no file with rollouts in bands"),
        ("rollouts bands --rollouts rollouts.parquet --to rollouts.parquet", r"is an input too \(--rollouts\)"),
        ("rollouts bands --rollouts rollouts.parquet --to ./folder/../rollouts.parquet", "is an input too"),
        ("rollouts bands --rollouts rollouts.parquet --to folder", "is a folder, and a file is to be written"),
        ("reformulate problems.jsonl --to problems.jsonl", r"is an input too \(--problems\)"),
        ("reformulate problems.jsonl --to notes.txt", "no file with reformulated problems"),
        ("demo --to notes.txt", "is a file, and a folder is to be written"),
        ("export --sae sae --to notes.txt", "is a file, and a folder is to be written"),
        ("encode --sae sae --store folder --to folder", r"is an input too \(--store\)"),
        ("encode --sae sae --live.series a --live.rollouts b --to store", r"another command \(store\)"),
        ("diff --features features --to store", r"holds the results of another command \(store\)"),
        ("export --sae sae --to store", r"holds the results of another command \(store\)"),
        ("diff --features features --to demo", r"holds the results of another command \(run\)"),
        ("attribute folder --to out --json notes.txt", "no file with JSON results"),
        ("diff --features features --to out --markdown notes.txt", "no file with a Markdown table of tsae"),
        ("diff --features features --to out --markdown folder", "is a folder, and a file is to be written"),
        ("diff --features features --to out --series rollouts.parquet --markdown rollouts.parquet", "is an input too"),
        ("rollouts difficulty --rollouts rollouts.parquet --json mine.json", "no file with JSON results of tsae"),
        ("store statistics folder --to rollouts.parquet", "no file with token statistics of tsae"),
        ("credit weights --credit a --features b --store c --to other.parquet", "no file with token weights of tsae"),
        (
            "credit weights --credit a --features b --store c --to rollouts.parquet",
            "no file with token weights of tsae",
        ),
        ("rollouts bands --rollouts other.parquet --to statistics.parquet", "no file with rollouts in bands"),
        ("reformulate problems.jsonl --to mine.jsonl", "no file with reformulated problems"),
        ("rollouts behaviours --rollouts rollouts.parquet --to a.out --json a.out", "is the output of --to, too"),
        ("diff --features features --to out --json ./f.json --markdown f.json", "is the output of --json, too"),
        ("diff --features features --to out --json out/diff.json", r"lies in the folder that is written \(--to out\)"),
        ("rollouts import folder --to rollouts.parquet", "no file with imported rollouts of tsae"),
        (
            "rollouts sample --series folder --problems problems.jsonl --verifier a:b --to imported.parquet",
            "no file with sampled rollouts of tsae",
        ),
    ],
)
def test_what_others_wrote_is_left_alone(
    command: str, said: str, rollouts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rollouts.parent
    monkeypatch.chdir(folder)
    (folder / "folder").mkdir()
    write_artefact(folder / "store", Kind("store", 1, "", ""), None)
    (folder / "demo").mkdir()
    (folder / "demo" / "demo.json").write_text("{}")
    (folder / "notes.txt").write_text("precious")
    os.mkfifo(folder / "pipe")
    (folder / "precious.html").write_text("<!DOCTYPE html><p>mine")
    (folder / "problems.jsonl").write_text('{"id": "1", "prompt": "1+1?", "answer": "2"}\n')
    shutil.copy(folder / "problems.jsonl", folder / "mine.jsonl")
    pd.DataFrame({"a": [1]}).to_parquet(folder / "other.parquet")
    table = pa.table({"a": [1]})
    write_table(folder / "statistics.parquet", table.schema, [table], {"kind": "token statistics"})
    write_table(folder / "imported.parquet", table.schema, [table], {"log": {"format": "trl"}})
    (folder / "mine.json").write_text('{"mine": 1}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(said, message), message
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_command_may_write_its_own_output_again(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rollouts.parent)
    for _ in range(2):
        main(["rollouts", "bands", "--rollouts", "rollouts.parquet", "--to", "banded.parquet"])
        main(["rollouts", "difficulty", "--rollouts", "rollouts.parquet", "--json", "found.json"])
    assert json.loads(Path("found.json").read_text())
    Path("empty.parquet").touch()  # nothing is lost
    main(["rollouts", "bands", "--rollouts", "rollouts.parquet", "--to", "empty.parquet"])
    assert pd.read_parquet("empty.parquet").equals(pd.read_parquet("banded.parquet"))


IMPORT = "rollouts import log --to"
SAMPLE = "rollouts sample --series folder --problems problems.jsonl --verifier a:b --to"
BANDS, BEHAVIOURS = "rollouts bands --rollouts in.parquet --to", "rollouts behaviours --rollouts in.parquet --to"


@pytest.mark.parametrize(
    ("command", "info", "recorded", "allowed"),
    [
        (IMPORT, ["log"], None, True),
        (IMPORT, ["log", "bands"], None, False),
        (IMPORT, ["log", "behaviours"], None, False),
        (IMPORT, ["log"], BANDS, False),
        (IMPORT, [], IMPORT, False),
        (SAMPLE, [], None, True),
        (SAMPLE, ["bands"], None, False),
        (SAMPLE, ["behaviours"], None, False),
        (SAMPLE, ["log"], SAMPLE, False),
        (BANDS, ["log", "bands"], None, True),
        (BANDS, ["bands", "behaviours"], None, False),
        (BANDS, ["bands", "behaviours"], BEHAVIOURS, False),
        (BANDS, ["bands", "behaviours"], BANDS, True),  # its input had behaviours
        (BEHAVIOURS, ["bands", "behaviours"], None, True),
        (BEHAVIOURS, ["bands", "behaviours"], BANDS, False),
        (BEHAVIOURS, ["bands"], BEHAVIOURS, False),
    ],
)
def test_rollouts_of_a_later_command_stay(
    command: str, info: list[str], recorded: str | None, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"a": [1]})
    with running_command([] if recorded is None else [*recorded.split(), "out.parquet"], Path("out.parquet")):
        write_table(Path("out.parquet"), table.schema, [table], {key: {} for key in info})
    if allowed:
        checked(f"{command} out.parquet")
    else:
        with pytest.raises(TsaeError, match="that it could replace"):
            checked(f"{command} out.parquet")


FOLDERS = {
    "Encode": "encode --sae sae --store store --to own",
    "Diff": "diff --features features --to own",
    "Attribute": "attribute log --to own",
    "Causal": "causal --series series --checkpoint a --sae sae --features features --choose 1 --to own",
    "Influence": "influence --series series --rollouts rollouts.parquet --sae sae --features 1 --to own",
    "Explain": "explain run --to own",
    "Reinforcement": "reinforcement --features features --to own",
    "Fit": "credit fit --features features --to own",
    "Drift": "drift --series series --to own",
    "Difficulty": "rollouts difficulty --rollouts rollouts.parquet --to own",
}
"""Commands that write files into a folder."""


def checked(command: str) -> None:
    options = parse(command.split())
    check_outputs(getattr(options, "command", options))


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_folder_is_known_by_its_manifest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("own")
    own.mkdir()
    checked(FOLDERS[name])
    (own / "notes.txt").write_text("mine")
    with pytest.raises(TsaeError, match=rf"holds notes\.txt, which `tsae .*{name.lower()}` did not write"):
        checked(FOLDERS[name])
    write_artefact(own, Kind(KINDS[name], 1, "", ""), None)
    checked(FOLDERS[name])
    (own / MANIFEST).rename(own / f".{MANIFEST}.tsae.tmp")  # killed just before the end
    checked(FOLDERS[name])
    write_artefact(own, Kind("other", 1, "", ""), None)
    with pytest.raises(TsaeError, match=r"holds the results of another command \(other\)"):
        checked(FOLDERS[name])


def test_an_encoding_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own/pieces").mkdir(parents=True)
    Path("own/means.h5").touch()
    with pytest.raises(TsaeError, match=r"holds means\.h5, which `tsae encode` did not write"):
        checked(FOLDERS["Encode"])
    Path("own/pieces/encoding.json").write_text("{}")
    checked(FOLDERS["Encode"])


def test_a_damaged_output_of_ours_can_be_replaced(rollouts: Path) -> None:
    damaged = rollouts.with_name("damaged.parquet")
    damaged.write_bytes(rollouts.read_bytes()[:-50])
    check_outputs(Bands(rollouts=rollouts, to=damaged))
    page = rollouts.with_name("page.html")
    page.write_text('<!DOCTYPE html>\n<html><head><meta charset="utf-8"><meta name="generator" content="tsae">')
    check_outputs(Report(diff=rollouts.parent / "diff", to=page))


def test_every_output_is_known_to_be_a_file_or_a_folder() -> None:
    """The help of --to says it; a new command must say it too."""
    seen, missing = 0, []
    for info in pkgutil.iter_modules(tsae.commands.__path__):
        module = importlib.import_module(f"tsae.commands.{info.name}")
        for name, kind in vars(module).items():
            own = isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
            if own and any(field.name == "to" for field in fields(kind)):
                source = Path(str(module.__file__)).read_text().split(f"class {name}")[1].split("    to: Path")[1]
                help_text = source.split('"""')[1].lower()
                assert ("folder" in help_text.split(";")[0]) != (name in FILES), (name, help_text)
                assert name not in FILES or name not in KINDS
                missing += [] if name in FILES or name in KINDS else [name]
                seen += 1
    assert seen > 15
    assert missing == []
    assert Influence.__name__ not in FILES
