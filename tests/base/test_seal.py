"""A folder's seal: what was changed, exchanged or lost is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tsae.base import seal as module
from tsae.base.files import write_json
from tsae.base.provenance import write_run
from tsae.base.seal import SEAL, check_seal, read_sealed, seal, with_checksum
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
        check_seal(folder, "Make it again.", ["a.bin"])
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


def test_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("anything")
    check_seal(tmp_path, "")


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
