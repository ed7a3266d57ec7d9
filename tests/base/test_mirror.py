"""Folders at a URL: what is fetched and uploaded, what is kept here, and what is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.refusals import refuses
from tsae.base import mirror
from tsae.base.artefact import MANIFEST, Kind, write_artefact
from tsae.base.mirror import (
    in_words,
    is_url,
    local,
    needed,
    published,
    refreshed,
    removed,
    shown,
    there,
    url_of,
)

EXPIRED = Mock(side_effect=PermissionError("The provided token has expired."))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://a/b", "s3://a/b"), ("s3:/a/b", "s3://a/b"), ("hf://datasets/x", "hf://datasets/x"), ("gs:/a", "gs://a"),
        *((path, None) for path in ("a/b", "/a/b", "C:/x", "file:///a", "a:/b", "/a/s3:/b", "s3:", ".")),
    ],
)  # fmt: skip
def test_urls_survive_being_paths_and_other_paths_are_none(text: str, url: str | None) -> None:
    assert is_url(text) == is_url(Path(text)) == (url is not None)
    assert url is None or url_of(Path(text)) == url


def test_small_files_come_at_once_and_shards_when_they_are_needed(remote: Any) -> None:
    remote.pipe({"/acts/manifest.json": b"{}", "/acts/base/00000.h5": b"shard", "/acts2/other": b"x"})
    folder = local("memory://acts")
    assert (folder / "manifest.json").read_bytes() == b"{}"
    assert not (folder / "base").exists()
    assert there(folder / "base" / "00000.h5")
    assert not there(folder / "base" / "00001.h5")
    assert needed(folder / "base" / "00000.h5").read_bytes() == b"shard"
    assert not (folder.parent / "other").exists()
    assert shown(folder / "base") == "memory://acts/base"
    assert url_of(folder / "base") == "memory://acts/base"
    assert in_words(f"{folder}/base: is damaged") == "memory://acts/base: is damaged"
    assert local("plain/path") == Path("plain/path")
    assert local("file:///plain/path") == local(Path("file:///plain/path")) == Path("/plain/path")


def test_what_has_changed_there_is_fetched_again(remote: Any) -> None:
    remote.pipe({"/a/x.json": b"1", "/a/gone.json": b"1"})
    folder = local("memory://a")
    remote.pipe("/a/x.json", b"22")
    remote.rm("/a/gone.json")
    assert (local("memory://a") / "x.json").read_bytes() == b"22"
    assert not (folder / "gone.json").exists()
    (folder / "x.json").write_bytes(b"changed here")
    assert (local("memory://a") / "x.json").read_bytes() == b"22"


def test_what_is_new_here_is_uploaded_once(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local("memory://out/features")
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_bytes(b"1")
    (folder / "sub" / "b.json").write_bytes(b"2")
    (folder / "half.json.tmp").write_bytes(b"3")
    published(folder)
    assert remote.find("/out") == ["/out/features/a.json", "/out/features/sub/b.json"]
    sent: list[str] = []
    real = type(remote).put_file
    monkeypatch.setattr(type(remote), "put_file", lambda *a, **k: sent.append(a[1]) or real(*a, **k))
    (folder / "a.json").write_bytes(b"11")
    published(folder)
    assert [Path(name).name for name in sent] == ["a.json"]
    assert remote.cat("/out/features/a.json") == b"11"
    removed(folder / "sub")
    assert remote.find("/out") == ["/out/features/a.json"]
    published(Path("elsewhere"))  # no mirror: nothing happens


def test_one_file_can_have_a_url(remote: Any) -> None:
    file = local("memory://out/rollouts.parquet", fetch=False)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"rows")
    published(file)
    assert remote.cat("/out/rollouts.parquet") == b"rows"
    file.unlink()
    assert local("memory://out/rollouts.parquet").read_bytes() == b"rows"


def test_the_cache_is_bounded(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five shards of 1,000 bytes, three fit; the least recently used goes first. Other files stay."""
    monkeypatch.setenv("TSAE_CACHE_GB", "3.5e-6")
    remote.pipe({f"/acts/base/{i:05d}.h5": bytes([i]) * 1000 for i in range(5)} | {"/acts/big.json": b"x" * 9000})
    folder = local("memory://acts")
    files = [folder / "base" / f"{i:05d}.h5" for i in range(5)]
    for i in (0, 1, 2, 0, 3):
        assert needed(files[i]).read_bytes() == bytes([i]) * 1000
    assert [file.is_file() for file in files] == [True, False, True, True, False]
    needed(files[1])
    assert [file.is_file() for file in files] == [True, True, False, True, False]
    # A shard that was written here and uploaded may go, too; one that was not may not.
    own = folder / "base" / "00005.h5"
    own.write_bytes(b"y" * 1000)
    needed(files[4])
    assert own.is_file()
    published(own)
    for i in (0, 1, 2):
        needed(files[i])
    assert not own.is_file()
    assert needed(own).read_bytes() == b"y" * 1000
    assert (folder / "big.json").is_file()
    # The one that is asked for stays, whatever was used while it came, and however little fits.
    monkeypatch.setenv("TSAE_CACHE_GB", "0")
    monkeypatch.setitem(mirror._used, files[3], 2**62)
    needed(files[3])
    assert needed(files[4]).is_file()


def test_names_do_not_lead_out(remote: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {name: {"size": 1, "created": 0} for name in ("/a/../../evil", "/a/./x", "/a\\..\\evil", "/a/fine")}
    monkeypatch.setattr(type(remote), "find", lambda *_, **__: found)
    monkeypatch.setattr(type(remote), "get_file", lambda self, path, to: Path(to).write_text(path) and None)
    local("memory://a")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"fine", "fine.json"}


def test_what_cannot_be_reached_is_said(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(r"nosuch://a/b: cannot be read \(Protocol not known: nosuch", local, "nosuch://a/b")
    remote.pipe("/a/x.json", b"1")
    monkeypatch.setattr(type(remote), "get_file", EXPIRED)
    refuses(r"memory://a: cannot be read \(The provided token has expired\.\)", local, "memory://a")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(type(remote), "get_file", Mock(side_effect=full))
    refuses(r"cannot be read \(.*No space left on device\)\..* the room in .*TSAE_CACHE", local, "memory://a")
    folder = local("memory://b")
    folder.mkdir(parents=True)
    (folder / "x.json").write_bytes(b"1234")
    real = type(remote).put_file
    monkeypatch.setattr(type(remote), "put_file", lambda self, here, path: self.pipe(path, b"12"))
    refuses(r"memory://b: cannot be written to \(2 bytes of 4 have arrived\)", published, folder)
    monkeypatch.setattr(type(remote), "put_file", real)
    published(folder)
    assert remote.cat("/b/x.json") == b"1234"


@pytest.mark.parametrize("name", ["roll[12].pieces", "*", "roll?.pieces"])
def test_a_name_that_looks_like_a_pattern_is_removed_alone(remote: Any, name: str) -> None:
    kept = ["/o/a.json", "/o/roll1.pieces/0.parquet", "/o/roll2.pieces/0.parquet"]
    remote.pipe(dict.fromkeys([*kept, f"/o/{name}/0.parquet", f"/o/{name}/more/1.parquet"], b"x"))
    removed(local(f"memory://o/{name}", fetch=False))
    assert sorted(remote.find("/o")) == kept
    removed(local(f"memory://o/{name}", fetch=False))  # nothing is left there
    remote.pipe(f"/o/{name}", b"one file")
    removed(local(f"memory://o/{name}", fetch=False))
    assert sorted(remote.find("/o")) == kept


def test_removed_folders_leave_nothing_behind(tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "sub").mkdir(parents=True)
    (tmp_path / "there" / "sub" / "x.json").write_bytes(b"1")
    removed(local("local://there", fetch=False))
    assert not (tmp_path / "there").exists()


def test_what_is_not_uploaded_yet_is_kept(remote: Any) -> None:
    folder = local("memory://a", fetch=False)
    folder.mkdir(parents=True)
    for name in ("removed.json", "overwritten.json"):
        (folder / name).write_bytes(b"1")
    published(folder)
    removed(folder / "removed.json")
    remote.rm_file("/a/overwritten.json")
    for name in ("removed.json", "overwritten.json"):
        (folder / name).write_bytes(b"new")
    refreshed(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["overwritten.json", "removed.json"]
    published(folder)
    assert remote.cat("/a/removed.json") == b"new"


@pytest.mark.parametrize("asked", [{}, {"size": 1}, {"ETag": "e"}, {"size": 1, "Last-Modified": "today"}])
@pytest.mark.parametrize("name", ["/x.json", ""])
def test_a_copy_of_which_nothing_is_known_is_fetched_again(
    asked: dict[str, Any], name: str, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over HTTP: a listing has neither size nor version, and a question about one file may have them."""
    remote.pipe("/a/x.json", b"1")
    monkeypatch.setattr(type(remote), "find", lambda *_, **__: {"/a/x.json": {"size": None} if name else {}})
    monkeypatch.setattr(type(remote), "info", lambda *_, **__: asked | {"type": "file"})
    url = "memory://a" if name else "memory://a/x.json"
    file = Path(f"{local(url)}{name}")
    assert file.read_bytes() == b"1"
    remote.pipe("/a/x.json", b"2")
    known = "ETag" in asked or "Last-Modified" in asked
    assert needed(file).read_bytes() == b"1"  # as it was listed
    assert Path(f"{local(url)}{name}").read_bytes() == (b"1" if known else b"2")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("ftp://user:passw0rd@host", "host"), ("ftp://user:pass/w0rd@host/", "host"),
        ("ftp://user:pass?w0rd@host", "host"),
        ("memory://x/..", "data"), ("memory://x/.", "data"), ("hf://datasets/org/name@main", "name@main"),
        ("https://h/a.parquet?sig=passw0rd", "a.parquet"),
    ],
)  # fmt: skip
def test_copies_are_named_without_passwords_and_inside_the_cache(url: str, name: str, remote: Any) -> None:
    found = local(url, fetch=False)
    assert found.name == name
    assert found.resolve() == found
    assert "w0rd" not in str(found)


@pytest.mark.parametrize("text", ["abc", "nan", "-5"])
def test_a_limit_that_is_none_is_refused(text: str, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSAE_CACHE_GB", text)
    refuses(rf"\$TSAE_CACHE_GB: is '{text}', expected gigabytes, 0 or more\. Set it to", local, "memory://a")


def test_an_empty_limit_is_the_usual_one(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSAE_CACHE_GB", "")
    remote.pipe({f"/a/r/{i:05d}.h5": b"shard" for i in range(2)})
    assert all(path.is_file() for path in [needed(local("memory://a") / "r" / f"{i:05d}.h5") for i in range(2)])


DIFF = Kind("diff", 1, "diff.json", "")


def test_a_file_that_a_result_no_longer_has_goes_from_the_url(remote: Any) -> None:
    """Else it stays there beside checksums that do not name it, and nobody can read the folder."""
    folder = local("memory://out/diff")
    write = {"a.txt": lambda path: path.write_bytes(b"a"), "b.txt": lambda path: path.write_bytes(b"b")}
    published(write_artefact(folder, DIFF, {}, write))
    assert sorted(remote.find("/out/diff")) == [
        f"/out/diff/{name}" for name in ("a.txt", "b.txt", "diff.json", MANIFEST)
    ]
    published(write_artefact(folder, DIFF, {}, {"a.txt": write["a.txt"]}))
    assert sorted(remote.find("/out/diff")) == [f"/out/diff/{name}" for name in ("a.txt", "diff.json", MANIFEST)]


def test_a_result_stays_whole_here_where_the_url_refuses(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local("memory://out/diff")
    write = {"b.txt": lambda path: path.write_bytes(b"b")}
    published(write_artefact(folder, DIFF, {"n": 1}, write))
    monkeypatch.setattr(type(remote), "rm_file", EXPIRED)
    refuses(r"memory://out/diff: cannot be written to \(The provided token", write_artefact, folder, DIFF, {"n": 2})
    assert sorted(path.name for path in folder.iterdir()) == ["diff.json", MANIFEST]


SHARED = """
import datetime, sys, fsspec
from tsae.base.mirror import local, needed, published

fs, me = fsspec.filesystem("memory"), sys.argv[1]
for i in range(60):
    fs.pipe(f"/in/x/{i:05d}.h5", b"x")
for file in fs.store.values():  # of both processes the same
    file.created = file.modified = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
(to := local("memory://out")).mkdir(parents=True, exist_ok=True)
sys.stdin.read()
for i in range(60):
    assert needed(local("memory://in", fetch=i == 0) / "x" / f"{i:05d}.h5").read_bytes() == b"x"
    (to / f"{me}-{i}.txt").write_text("x")
    published(to / f"{me}-{i}.txt")
"""


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Each fetches the same shards and uploads files of its own, at once. The notes of the mirror have all of them."""
    environment = {**os.environ, "TSAE_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, name], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in "ab"
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    for child in children:
        assert child.stderr is not None
        said = child.stderr.read().decode()
        child.stderr.close()
        assert child.wait() == 0, said
    noted = {folder.name: {file.name for file in folder.iterdir()} for folder in tmp_path.glob("*/*.remote")}
    assert noted["out.remote"] == {f"{name}-{i}.txt.json" for name in "ab" for i in range(60)}
    assert noted["in.remote"] == {f"x%2F{i:05d}.h5.json" for i in range(60)}
    assert not list(tmp_path.rglob("*.tmp"))


def test_notes_that_cannot_be_written_are_refused(remote: Any) -> None:
    folder = local("memory://a", fetch=False)
    folder.mkdir(parents=True)
    (folder / "x.json").write_bytes(b"1")
    folder.with_name("a.remote").write_bytes(b"no folder")
    refuses(r"cannot be written to .*room in .*TSAE_CACHE", published, folder)


def test_shards_that_are_gone_there_go_here_too(remote: Any) -> None:
    """Another machine joined the pieces and removed them: copies of them would be taken for those of the next work."""
    folder = local("memory://f")
    file, own = folder / "pieces" / "000000.npz", folder / "pieces" / "000001.npz"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"piece")
    published(file)
    own.write_bytes(b"not uploaded yet")
    remote.rm_file("/f/pieces/000000.npz")
    refreshed(folder)
    assert not file.exists()
    assert not there(file)
    assert own.is_file()


def test_what_is_uploaded_while_the_url_is_listed_stays(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are uploaded beside the work. A listing that was begun before does not have them."""
    folder, real = local("memory://acts"), mirror.Mirror._listed
    file = folder / "base" / "00000.h5"
    file.parent.mkdir(parents=True)

    def slow(self: mirror.Mirror) -> dict[str, Any]:
        found = real(self)
        file.write_bytes(b"shard")
        published(file)
        return found

    monkeypatch.setattr(mirror.Mirror, "_listed", slow)
    refreshed(folder)
    assert file.is_file()
    file.unlink()  # to make room
    assert there(file)
