"""Folders at a URL: what is fetched and uploaded, what is kept here, and what is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tsae.base.remote import mirror
from tsae.base.remote.mirror import in_words, is_url, local, needed, published, removed, shown, there, url_of
from tsae.errors import TsaeError


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty memory file system, and a cache of one's own."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_mirrors", {})
    monkeypatch.setattr(mirror, "_used", {})
    yield fs
    fs.store.clear()


@pytest.mark.parametrize(
    ("text", "url"),
    [("s3://a/b", "s3://a/b"), ("s3:/a/b", "s3://a/b"), ("hf://datasets/x", "hf://datasets/x"), ("gs:/a", "gs://a")],
)
def test_urls_survive_being_paths(text: str, url: str) -> None:
    assert is_url(text)
    assert is_url(Path(text))
    assert url_of(Path(text)) == url


@pytest.mark.parametrize("text", ["a/b", "/a/b", "C:/x", "file:///a", "a:/b", "/a/s3:/b", "s3:", "."])
def test_paths_are_no_urls(text: str) -> None:
    assert not is_url(text)


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
    assert in_words(f"{folder}/base: is damaged") == "memory://acts/base: is damaged"
    assert local("plain/path") == Path("plain/path")
    assert local("file:///plain/path") == Path("/plain/path")


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


def test_names_do_not_lead_out(remote: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {name: {"size": 1, "created": 0} for name in ("/a/../../evil", "/a/./x", "/a\\..\\evil", "/a/fine")}
    monkeypatch.setattr(type(remote), "find", lambda *_, **__: found)
    monkeypatch.setattr(type(remote), "get_file", lambda self, path, to: Path(to).write_text(path) and None)
    local("memory://a")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"fine", "a.remote.json"}


def test_what_cannot_be_reached_is_said(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TsaeError, match=r"nosuch://a/b: cannot be reached \(Protocol not known: nosuch"):
        local("nosuch://a/b")
    remote.pipe("/a/x.json", b"1")

    def fails(error: Exception) -> Any:
        def get_file(*_: object, **__: object) -> None:
            raise error

        return get_file

    monkeypatch.setattr(type(remote), "get_file", fails(PermissionError("The provided token has expired.")))
    with pytest.raises(TsaeError, match=r"memory://a: cannot be read \(The provided token has expired\.\)"):
        local("memory://a")
    monkeypatch.setattr(type(remote), "get_file", fails(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(TsaeError, match=r"is full \(No space left on device\)\. Make room, or set TSAE_CACHE"):
        local("memory://a")
    folder = local("memory://b")
    folder.mkdir(parents=True)
    (folder / "x.json").write_bytes(b"1234")
    real = type(remote).put_file
    monkeypatch.setattr(type(remote), "put_file", lambda self, here, path: self.pipe(path, b"12"))
    with pytest.raises(TsaeError, match=r"memory://b: cannot be written to \(2 bytes of 4 have arrived\)"):
        published(folder)
    monkeypatch.setattr(type(remote), "put_file", real)
    published(folder)
    assert remote.cat("/b/x.json") == b"1234"
