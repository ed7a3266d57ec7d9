"""The campaign of random damage: it sees what is bad, and finds nothing bad in a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torture
from fault_injection import artefacts, commands, inputs, process

from tsae.base.artefact import file_hash


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Artefacts of nothing, which every stage reads."""
    folder = tmp_path / "made"
    for name in (*commands.ARTEFACTS, *(f"other/{name}" for name in commands.ARTEFACTS)):
        file = folder / name
        (file.parent if file.suffix else file).mkdir(parents=True, exist_ok=True)
        for written in (file,) if file.suffix else (file / "a.json", file / "b.json"):
            written.write_text(f'{{"version": "{name}"}}')
    for stage in commands.STAGES:
        (folder / f"expected-{stage.name}").mkdir()
        (folder / f"expected-{stage.name}" / "found").write_text("right")
    (tmp_path / "room").mkdir()
    return folder


def judged(
    made: Path, monkeypatch: pytest.MonkeyPatch, *, code: int = 0, said: str = "", wrote: str = "right",
    spoils: str = "", late: bool = False, kind: str = "damaged",
) -> set[str]:  # fmt: skip
    """What is said of twelve cases in which the command ends so."""

    def run(words: list[str], where: Path, *_: object) -> subprocess.CompletedProcess[str]:
        if late:
            raise subprocess.TimeoutExpired(words, 1)
        (where / "out" / "found").write_text(wrote)
        if spoils:
            (where / spoils).write_text("mine now")
        return subprocess.CompletedProcess(words, code, "", said)

    monkeypatch.setattr(process, "run", run)
    whole = [
        replace(stage, open="")  # else results of changed checkpoints may differ
        for stage in commands.READERS
        if stage.compared == "*"  # others do not answer for what is written here
    ]
    monkeypatch.setattr(torture, "READERS", whole)
    options = torture.Torture(seed=6, only=kind)  # type: ignore[arg-type]
    return {torture.attempt(number, options, made, made.parent / "room")[2].split(":")[0] for number in range(12)}


def test_what_is_good_and_what_is_bad(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(made, monkeypatch) == {""}
    assert judged(made, monkeypatch, wrote="wrong") == {"silently different"}
    assert judged(made, monkeypatch, wrote="wrong", code=2, said="tsae: is damaged") == {""}
    assert judged(made, monkeypatch, code=2) == {"exit code 2 without a word"}
    assert judged(made, monkeypatch, code=1, said="oh") == {"exit code 1"}
    assert judged(made, monkeypatch, code=1, said="Traceback (most recent call last):\nKeyError") == {"traceback"}
    limits = {process.LIMIT_S, 3 * process.LIMIT_S}  # the longer one of parts and whole runs
    assert judged(made, monkeypatch, late=True) <= {f"takes longer than {limit} s" for limit in limits}
    assert judged(made, monkeypatch, kind="command", spoils="precious.json") == {"changed precious.json"}
    assert judged(made, monkeypatch, kind="command", wrote="other") == {""}


def test_each_file_is_damaged_once_for_each_command(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(words: tuple[str, ...], here: Path, **_: object) -> tuple[None, str]:
        if words == place.stage.command:
            seen.append((here / place.file).exists())
        return None, "bad" if place.again else ""

    monkeypatch.setattr(artefacts, "watched", watched)
    found = torture.places(made)
    options = torture.Torture(each="remove")
    for number in range(0, len(found), 5):
        place = found[number]
        kind, what, wrong = torture.attempt(number, options, made, made.parent / "room")
        assert (kind, wrong) == ("remove", "bad" if place.again else "")
        assert what == f"{place.stage.name}{' again' if place.again else ''}: remove {place.file}"
    assert seen == [False] * len(range(0, len(found), 5))
    assert len(set(found)) == len(found)
    of_diff = {place.file for place in found if place.stage is commands.BY_NAME["diff"]}
    assert of_diff == {"features/a.json", "features/b.json", "out/found"}
    assert {place.stage for place in found} == set(commands.STAGES)


@pytest.mark.parametrize("how", torture.DAMAGES)
def test_every_damage_changes_the_file(how: str, tmp_path: Path) -> None:
    (tmp_path / "strange").write_bytes(b"of another run")
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    file.write_text(json.dumps({"format_version": 1, "values": list(range(3000))}))
    other.write_bytes(b"other")
    before = file_hash(file)
    torture.damage(how, file, other, tmp_path / "strange", tmp_path / "elsewhere", np.random.default_rng(0))
    assert (file.is_file() and file_hash(file) == before) == (how in ("outside", "double"))
    assert how != "outside" or file.is_symlink()


def test_a_case_is_the_same_again() -> None:
    command = commands.READERS[0].command
    drawn = [[torture.disturb(np.random.default_rng([1, i]), command) for i in range(20)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    changes = [sum(a != b for a, b in zip(line, command, strict=True)) for line in drawn[0]]
    assert max(changes) == 2
    assert changes.count(0) < 5  # what is drawn may be what stood there


def test_options_come_from_the_parser_of_every_command() -> None:
    known = torture.commands()
    assert set(known) > {("run",), ("attribute",), ("credit", "weights"), ("store", "show"), ("rollouts", "import")}
    for stage in commands.STAGES:
        assert any(action.option_strings for action in torture.options_of(stage.command)), stage.name
    invented = [torture.invent(np.random.default_rng(i)) for i in range(200)]
    assert {command[0] for command in invented} == {command[0] for command in known} - {"demo"}
    assert all("--executor" not in command for command in invented)


@pytest.mark.slow
@pytest.mark.skipif(inputs.CHROMIUM is None, reason="no Chromium")
def test_the_canary_sings_where_a_text_is_not_escaped(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for hostile in inputs.HOSTILE[:5]:
        page.write_text(
            f'<!doctype html><html><body><p title="{hostile}">{hostile}</p></body></html>', encoding="utf-8"
        )
        assert inputs.fired(page) == "a script in a text has run", hostile
    page.write_text("<!doctype html><html><body><p>harmless</p></body></html>", encoding="utf-8")
    assert inputs.fired(page) == ""


def test_what_could_steer_a_terminal_is_seen() -> None:
    assert inputs.raw_controls("a\tb\n") == ""
    assert inputs.raw_controls("\x1b[31m\u202e") == "U+001B, U+202E"


@pytest.mark.slow
def test_sixty_cases() -> None:
    script = Path(torture.__file__)
    done = subprocess.run([sys.executable, script, "--cases", "60", "--seed", "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["cases"], found["bad"], found["ratio"]) == (60, [], 0.0)
    assert {"damaged, good", "log, good", "command, good", "fault, good"} <= set(found["kinds"])
