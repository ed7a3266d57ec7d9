"""A folder's seal: what was changed, exchanged or lost is refused by name."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tsae.base import seal as module
from tsae.base.files import write_json
from tsae.base.provenance import write_run
from tsae.base.seal import SEAL, check_seal, read_sealed, seal, with_checksum, write_whole
from tsae.errors import TsaeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.bin", "b.bin", "other.txt"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    seal(tmp_path, ["a.bin", "b.bin", "never-written"])
    return tmp_path


def test_what_was_not_touched_is_accepted(folder: Path) -> None:
    check_seal(folder, "Make it again.")
    assert list(json.loads((folder / SEAL).read_text())["sha256"]) == ["a.bin", "b.bin"]
    (folder / "other.txt").write_text("not sealed")
    check_seal(folder, "Make it again.")


def test_every_changed_byte_is_found(folder: Path) -> None:
    before = (folder / "a.bin").read_bytes()
    for position in (0, 250, len(before) - 1):
        for bit in (1, 128):
            content = bytearray(before)
            content[position] ^= bit
            (folder / "a.bin").write_bytes(content)
            with pytest.raises(TsaeError, match=r"a\.bin is damaged: its bytes have changed.*Make it again"):
                check_seal(folder, "Make it again.")
    (folder / "a.bin").write_bytes(before)
    check_seal(folder, "Make it again.")


def test_exchanged_shortened_and_lost_files_are_found(folder: Path) -> None:
    (folder / "a.bin").rename(folder / "c.bin")
    (folder / "b.bin").rename(folder / "a.bin")
    with pytest.raises(TsaeError, match=r"b\.bin is missing"):
        check_seal(folder, "Make it again.")
    with pytest.raises(TsaeError, match=r"a\.bin is damaged"):
        check_seal(folder, "Make it again.", ["a.bin"], others=False)
    (folder / "c.bin").rename(folder / "b.bin")
    with pytest.raises(TsaeError, match=r"a\.bin is damaged"):
        check_seal(folder, "Make it again.")


def test_one_file_can_be_sealed_again(folder: Path) -> None:
    (folder / "a.bin").write_text("new")
    (folder / "b.bin").unlink()
    seal(folder, ["a.bin"])
    check_seal(folder, "Make it again.")
    assert list(json.loads((folder / SEAL).read_text())["sha256"]) == ["a.bin"]
    write_run(folder, "encode", {}, {})
    assert set(json.loads((folder / SEAL).read_text())["sha256"]) == {"a.bin", "run.json"}
    (folder / "run.json").write_text("{}")
    with pytest.raises(TsaeError, match=r"run\.json is damaged"):
        check_seal(folder, "Make it again.")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"sha256": {"../a": "0"}}', '{"sha256": {"..": "0"}}', '{"sha256": {"a.bin": 1}}', "\ud800"],
)
def test_a_damaged_seal_is_refused(folder: Path, content: str) -> None:
    (folder / SEAL).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(TsaeError, match="is no list of checksums"):
        check_seal(folder, "Make it again.")


def test_a_file_is_read_once_as_long_as_it_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seal(folder, "")
    read: list[str] = []
    real = module.sha256

    def counted(file: str) -> str:
        read.append(Path(file).name)
        return real(file)

    monkeypatch.setattr(module, "sha256", counted)
    check_seal(folder, "")
    assert read == []
    os.utime(folder / "a.bin")
    check_seal(folder, "")
    assert read == ["a.bin"]


def test_what_was_never_sealed_is_refused(folder: Path) -> None:
    with pytest.raises(TsaeError, match=r"holds other\.txt, which was not written with the rest"):
        check_seal(folder, "", ["other.txt"])
    (folder / SEAL).unlink()
    with pytest.raises(TsaeError, match=r"its checksums\.json is missing"):
        check_seal(folder, "")


def test_lone_surrogates_survive_in_json(tmp_path: Path) -> None:
    content = {"a": "\\\ud800\u00fc", "b\udfff": [1]}
    assert read_sealed(write_json(tmp_path / "a.json", with_checksum(content)), "") == content


def test_json_of_any_depth_is_read_or_refused(tmp_path: Path) -> None:
    """What can just be read may be too deep to be written again, which its checksum needs."""
    file = tmp_path / "deep.json"
    for depth in range(1000):
        lists = "[" * depth + "]" * depth
        file.write_text(f'{{"a": {lists or 0}, "sealed": true, "checksum": "0"}}')
        with pytest.raises(TsaeError, match=r"is damaged|nested too deeply"):
            read_sealed(file, "")


def saved(folder: Path, text: str, *, optional: bool = False) -> None:
    others = {
        "a.txt": lambda file: file.write_text(text),
        "b.txt": (lambda file: file.write_text(text)) if optional else None,
    }
    write_whole(folder, "whole.json", {"of": text}, others)


def test_an_earlier_result_stays_until_the_next_one_is_written(tmp_path: Path) -> None:
    saved(tmp_path, "first", optional=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(file: Path) -> None:
        file.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(
            tmp_path, "whole.json", {"of": "second"}, {"a.txt": lambda f: f.write_text("second"), "b.txt": full}
        )
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    saved(tmp_path, "second")
    check_seal(tmp_path, "")
    assert {file.name for file in tmp_path.iterdir()} == {"whole.json", "a.txt", SEAL}
    assert (tmp_path / "a.txt").read_text() == "second"
    assert json.loads((tmp_path / "whole.json").read_text()) == {"of": "second", "sealed": True}


def test_a_folder_is_rather_incomplete_than_of_two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a process is killed, the folder holds the one or the other, or lacks the file that completes it."""
    real = os.replace
    for last in range(5):
        folder = tmp_path / str(last)
        saved(folder, "first", optional=True)
        calls = 0

        def counted(source: Path, target: Path, last: int = last) -> None:
            nonlocal calls
            calls += 1
            if calls > last:
                raise KeyboardInterrupt
            real(source, target)

        monkeypatch.setattr(os, "replace", counted)
        with suppress(KeyboardInterrupt):
            saved(folder, "second", optional=True)
        monkeypatch.setattr(os, "replace", real)
        if (folder / "whole.json").is_file():
            check_seal(folder, "")
            texts = {json.loads((folder / "whole.json").read_text())["of"]}
            texts |= {(folder / name).read_text() for name in ("a.txt", "b.txt")}
            assert texts == {"first"}
        else:
            assert last >= 1
        saved(folder, "second", optional=True)
        check_seal(folder, "")


def test_nothing_is_replaced_beside_a_damaged_seal(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    (tmp_path / SEAL).write_text("[]")
    with pytest.raises(TsaeError, match="is no list of checksums"):
        saved(tmp_path, "second")
    assert json.loads((tmp_path / "whole.json").read_text())["of"] == "first"
