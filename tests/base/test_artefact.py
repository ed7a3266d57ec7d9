"""The contract of artefacts: what was changed, exchanged, cut, lost or half written is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.damage import flip
from support.refusals import refuses
from tsae.base import artefact
from tsae.base.artefact import (
    MANIFEST,
    Kind,
    OtherVersion,
    add_to_artefact,
    command_text,
    manifest_of,
    read_artefact,
    read_record,
    running_command,
    write_artefact,
    write_record,
)
from tsae.errors import TsaeError

KIND = Kind("thing", 3, "thing.json", "Make it with `tsae thing`.")


def text(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content)


def save(folder: Path, content: str = "first", *, optional: bool = True) -> Path:
    files = {"a.txt": text(content), **({"b.txt": text(content)} if optional else {})}
    return write_artefact(folder, KIND, {"of": content}, files, config={"k": 1}, inputs={"rollouts": "r"})


def test_what_was_not_touched_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "notes.txt").write_text("of somebody else")
    assert read_artefact(tmp_path, KIND, ["a.txt"]) == {"of": "first"}
    facts = read_record(tmp_path / MANIFEST, "")
    assert (facts["kind"], facts["version"], facts["config"], facts["inputs"]) == (
        "thing",
        3,
        {"k": 1},
        {"rollouts": "r"},
    )
    assert facts["gives"] == facts["inputs"]
    assert set(facts["files"]) == {"thing.json", "a.txt", "b.txt"}
    assert "torch" in facts["versions"]
    assert "command" not in facts  # Python code runs


def other_kind(folder: Path) -> None:
    write_artefact(folder, Kind("other", 3, "thing.json", ""), {})


def other_version(folder: Path) -> None:
    write_artefact(folder, Kind("thing", 4, "thing.json", ""), {})


def exchanged(folder: Path) -> None:
    (folder / "a.txt").write_text("another")
    (folder / "a.txt").rename(folder / "c.txt")
    (folder / "b.txt").rename(folder / "a.txt")
    (folder / "c.txt").rename(folder / "b.txt")


def manifest(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: write_record(folder / MANIFEST, {**read_record(folder / MANIFEST, ""), **changes})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda folder: flip(folder / "a.txt", 2), r"a\.txt is damaged: its bytes have changed"),
    "bit of the main file": (lambda folder: flip(folder / "thing.json", 2), r"thing\.json is damaged"),
    "bit of the manifest": (lambda folder: flip(folder / MANIFEST, 12), r"manifest\.json: (is damaged|cannot be read)"),
    "cut": (lambda folder: (folder / "a.txt").write_text("firs"), r"a\.txt is damaged"),
    "cut manifest": (lambda folder: (folder / MANIFEST).write_text("{"), r"manifest\.json: cannot be read"),
    "exchanged": (exchanged, r"b\.txt is damaged"),
    "lost": (lambda folder: (folder / "b.txt").unlink(), r"b\.txt is missing"),
    "lost manifest": (lambda folder: (folder / MANIFEST).unlink(), r"no complete thing: manifest\.json is missing"),
    "a folder": (lambda folder: ((folder / "b.txt").unlink(), (folder / "b.txt").mkdir()), r"b\.txt is missing"),
    "foreign file": (lambda folder: (folder / "c.txt").write_text("x"), r"holds c\.txt, which is not of this"),
    "other kind": (other_kind, "holds other, expected thing"),
    "other version": (other_version, "is a thing of version 4, this tsae reads 3"),
    "no hashes": (manifest(files=3), "does not say which files"),
    "a path": (manifest(files={"../a.txt": "0"}), "does not say which files"),
    "no checksum": (lambda folder: (folder / MANIFEST).write_text('{"kind": "thing"}'), "has no checksum"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_what_is_damaged_is_refused(damage: str, tmp_path: Path) -> None:
    save(tmp_path)
    do, said = DAMAGES[damage]
    do(tmp_path)
    with pytest.raises(TsaeError, match=said) as refused:
        read_artefact(tmp_path, KIND, ["a.txt", *(["c.txt"] if damage == "foreign file" else [])])
    assert "tsae thing" in str(refused.value)
    assert isinstance(refused.value, OtherVersion) == (damage == "other version")


def test_every_bit_of_a_record_counts(tmp_path: Path) -> None:
    content = {"a": [1, 0.1, None, "ü\ud800"], "b": {"x": float("nan"), "1": -0.0}}
    file = write_record(tmp_path / "a.json", content)
    assert json.dumps(read_record(file, "")) == json.dumps(content)
    whole = file.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        with suppress(TsaeError):  # of white space nothing is said
            assert json.dumps(read_record(file, "")) == json.dumps(content)


def test_json_of_any_depth_is_read_or_refused(tmp_path: Path) -> None:
    """What can just be read may be too deep to be written again, which its checksum needs."""
    file = tmp_path / "deep.json"
    for depth in range(1000):
        file.write_text(f'{{"a": {"[" * depth + "]" * depth or 0}, "checksum": "0"}}')
        refuses(r"is damaged|nested too deeply", read_record, file, "")


def test_a_file_is_hashed_once_as_long_as_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    read_artefact(tmp_path, KIND)
    read: list[str] = []
    real = artefact.xxhash.xxh3_128
    monkeypatch.setattr(artefact.xxhash, "xxh3_128", lambda: read.append("a file") or real())
    read_artefact(tmp_path, KIND)
    assert read == []
    os.utime(tmp_path / "a.txt")
    read_artefact(tmp_path, KIND)
    assert read == ["a file"]


def test_an_earlier_artefact_stays_until_the_next_one_is_written(tmp_path: Path) -> None:
    save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(file: Path) -> None:
        file.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_artefact(tmp_path, KIND, {"of": "second"}, {"a.txt": text("second"), "b.txt": full})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    save(tmp_path, "second", optional=False)
    assert {file.name for file in tmp_path.iterdir()} == {"thing.json", "a.txt", MANIFEST}
    assert read_artefact(tmp_path, KIND) == {"of": "second"}


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_a_folder_is_rather_incomplete_than_of_two_artefacts(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a process is killed, the folder holds the one or the other, or has no manifest."""
    owner: Any = os if step == "replace" else Path
    real = getattr(owner, step)

    def save_until(last: int) -> None:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > last:
                raise KeyboardInterrupt
            real(*args, **kwargs)

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(owner, step, counted)
            save(folder, "second", optional=False)

    for last, again in product(range(12), (0, 1, 2, 4, 12)):
        folder = tmp_path / f"{last}-{again}"
        save(folder)
        save_until(last)
        save_until(again)
        assert (manifest_of(folder) or {})["kind"] == KIND.name, "a third command knows whose folder it is"
        if (folder / MANIFEST).is_file():
            of = read_artefact(folder, KIND)["of"]
            names = [name for name in ("a.txt", "b.txt") if name in read_record(folder / MANIFEST, "")["files"]]
            assert {(folder / name).read_text() for name in names} == {of}
        else:
            refuses(r"manifest\.json is missing", read_artefact, folder, KIND)
        save(folder, "second", optional=False)
        assert read_artefact(folder, KIND) == {"of": "second"}


def test_a_file_can_be_added_to_what_is_whole(tmp_path: Path) -> None:
    save(tmp_path)
    for content in ("one", "two"):
        add_to_artefact(tmp_path, "more.txt", text(content))
        read_artefact(tmp_path, KIND, ["more.txt"])
    flip(tmp_path / "a.txt", 1)
    refuses(r"a\.txt is damaged", lambda: add_to_artefact(tmp_path, "more.txt", text("three")))
    assert (tmp_path / "more.txt").read_text() == "two"


def test_the_manifest_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "abcdef0123456789")
    with running_command(["thing", "--to", "a b/out", "--url=https://joe:abcdef0123456789@h"], Path("a b/out")):
        save(Path("a b/out"))
        save(Path("elsewhere"))
    assert "command" not in read_record(Path("elsewhere") / MANIFEST, "")
    Path("a b").rename("c")  # a tree of folders can be moved as a whole
    facts = read_record(Path("c/out") / MANIFEST, "")
    assert command_text(facts, Path("c/out")) == "tsae thing --to 'a b/out' '--url=https://***@h'"
    monkeypatch.chdir(tmp_path / "c")
    assert command_text(facts, Path("out")).startswith("(cd .. && tsae thing")
