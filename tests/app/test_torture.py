"""The campaign of random damage: it sees what is bad, and finds nothing bad in a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torture
from torments import artefacts, damage, text, words

from tsae.base.files import sha256


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Artefacts of nothing, which every stage reads."""
    folder = tmp_path / "made"
    for name in ("acts", "sae", "features", "diff"):
        (folder / name).mkdir(parents=True)
        for file in ("a.json", "b.json"):
            (folder / name / file).write_text(f"{name} {file}")
    (folder / "raw.parquet").write_text("rollouts")
    for stage in artefacts.STAGES:
        (folder / f"expected-{stage.name}").mkdir()
        (folder / f"expected-{stage.name}" / "found").write_text("right")
    (tmp_path / "room").mkdir()
    return folder


def judged(
    made: Path, monkeypatch: pytest.MonkeyPatch, *, code: int = 0, said: str = "", wrote: str = "right",
    spoils: str = "", late: bool = False, kind: str = "damaged",
) -> set[str]:  # fmt: skip
    """What is said of twelve cases in which the command ends so."""

    def run(words: list[str], where: Path, disturbed: object = None) -> subprocess.CompletedProcess[str]:
        if late:
            raise subprocess.TimeoutExpired(words, 1)
        (where / "out" / "found").write_text(wrote)
        if spoils:
            (where / spoils).write_text("mine now")
        return subprocess.CompletedProcess(words, code, "", said)

    monkeypatch.setattr(artefacts, "run", run)
    options = torture.Torture(seed=3, only=kind)  # type: ignore[arg-type]
    return {torture.attempt(number, options, made, made.parent / "room")[2].split(":")[0] for number in range(12)}


def test_what_is_good_and_what_is_bad(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(made, monkeypatch) == {""}
    assert judged(made, monkeypatch, wrote="wrong") == {"silently different"}
    assert judged(made, monkeypatch, wrote="wrong", code=2, said="tsae: is damaged") == {""}
    assert judged(made, monkeypatch, code=2) == {"exit code 2 without a word"}
    assert judged(made, monkeypatch, code=1, said="oh") == {"exit code 1"}
    assert judged(made, monkeypatch, code=1, said="Traceback (most recent call last):\nKeyError") == {"traceback"}
    assert judged(made, monkeypatch, late=True) == {"takes longer than 120 s"}
    assert judged(made, monkeypatch, kind="command", spoils="precious.json") == {"changed precious.json"}
    assert judged(made, monkeypatch, kind="command", wrote="other") == {""}


def test_every_damage_changes_the_file(tmp_path: Path) -> None:
    names = ["flip", "zeros", "cut", "empty", "remove", "exchange", "folder", "link"]
    for name in names:
        (tmp_path / name).mkdir()
        file, other = tmp_path / name / "a", tmp_path / name / "b"
        file.write_bytes(b"0123456789" * 1000)
        other.write_bytes(b"other")
        before = sha256(file)
        possible = damage.damages(file, other, np.random.default_rng(0))
        assert list(possible) == names
        possible[name]()
        assert not file.is_file() or sha256(file) != before


def test_a_case_is_the_same_again() -> None:
    command = artefacts.READERS[0].command
    drawn = [[words.disturb(np.random.default_rng([1, i]), command) for i in range(20)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    changes = [sum(a != b for a, b in zip(line, command, strict=True)) for line in drawn[0]]
    assert max(changes) == 2
    assert changes.count(0) < 5  # what is drawn may be what stood there


@pytest.mark.slow
@pytest.mark.skipif(text.BROWSER is None, reason="no Chromium")
def test_the_canary_sings_where_a_text_is_not_escaped(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for hostile in text.HOSTILE[:5]:
        page.write_text(
            f'<!doctype html><html><body><p title="{hostile}">{hostile}</p></body></html>', encoding="utf-8"
        )
        assert text._fired(page) == "a script in a text has run", hostile
    page.write_text("<!doctype html><html><body><p>harmless</p></body></html>", encoding="utf-8")
    assert text._fired(page) == ""


def test_what_could_steer_a_terminal_is_seen() -> None:
    assert text.raw_controls("a\tb\n") == ""
    assert text.raw_controls("\x1b[31m\u202e") == "U+001B, U+202E"


@pytest.mark.slow
def test_sixty_cases() -> None:
    script = Path(torture.__file__)
    done = subprocess.run([sys.executable, script, "--cases", "60", "--seed", "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["cases"], found["bad"], found["ratio"]) == (60, [], 0.0)
    assert {"damaged, good", "log, good", "command, good", "fault, good"} <= set(found["kinds"])
